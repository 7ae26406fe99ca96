"""Damage real HLO in every way that tests/audit/mutations.py knows, and watch the auditor read it.

    .venv/bin/python experiments/fuzz_audit.py                        # 20,000 cases, 2 processes
    .venv/bin/python experiments/fuzz_audit.py --num 2000 --only tp.cpu
    .venv/bin/python experiments/fuzz_audit.py --case tp.cpu:delete-bytes:17
    .venv/bin/python experiments/fuzz_audit.py --properties 300       # random programs instead

A case is bad when it ends in anything but the project's own error or an audit; takes more than a
second; or leaves out, in silence, communication that the dump has. Exit code 1 when any is.
"""

from __future__ import annotations

import collections
import difflib
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.audit import fuzzing
from tests.audit.fuzzing import BAD_OUTCOMES, OUTCOMES, Case, Outcome
from tests.audit.mutations import OPERATORS

HANG_S = 20.0
"""Wall time after which a case counts as one that never ends."""

MEMORY_BYTES = 4 << 30
"""Address space of a worker: what needs more is a crash."""

_AHEAD = 16  # cases that a worker has at hand, so that it never waits for the next
_SHOWN = 40
_TABLE_WIDTH = 130


class Worker:
    """A process that runs cases; `pending` are those it was given, in order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.pending: collections.deque[Case] = collections.deque()
        self.since = time.monotonic() + HANG_S  # it has to import everything first

    def give(self, case: Case) -> None:
        if not self.pending:
            self.since = max(self.since, time.monotonic())
        self.pending.append(case)
        self.connection.send(case)

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection) -> None:
    """What a worker does, until the other end closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        fuzzing.totals_of("tp.cpu")  # imports what the first audit would be charged for
        while True:
            try:
                case = connection.recv()
            except EOFError:
                return
            connection.send(fuzzing.run(case, Path(folder)))


def run_all(cases: list[Case], num_workers: int) -> Iterator[tuple[Case, Outcome]]:
    """Every case with its outcome, as they end; a case that hangs or kills ends by our hand."""
    todo = collections.deque(cases)
    workers = [Worker() for _ in range(num_workers)]
    try:
        while todo or any(worker.pending for worker in workers):
            for worker in workers:
                while todo and len(worker.pending) < _AHEAD:
                    worker.give(todo.popleft())
            ready = wait([worker.connection for worker in workers], timeout=0.5)
            for at, worker in enumerate(workers):
                if worker.connection in ready:
                    outcome = _received(worker)
                elif worker.pending and time.monotonic() - worker.since > HANG_S:
                    outcome = Outcome(name="hang", why="it never ended", time_s=HANG_S)
                else:
                    continue
                case = worker.pending.popleft()
                worker.since = time.monotonic()
                if outcome.name in ("hang", "died"):
                    todo.extendleft(reversed(worker.pending))
                    worker.stop()
                    workers[at] = Worker()
                    outcome = Outcome(name="hang", why=outcome.why, time_s=outcome.time_s)
                yield case, outcome
    finally:
        for worker in workers:
            worker.stop()


def _received(worker: Worker) -> Outcome:
    try:
        outcome: Outcome = worker.connection.recv()
    except (EOFError, OSError):
        return Outcome(name="died", why="the process died", time_s=0.0)
    return outcome


@dataclass(kw_only=True)
class Row:
    """Cases of one operator: how many of each outcome, and the slowest."""

    counts: collections.Counter[str]
    slowest_s: float = 0.0
    slowest: str = ""


def summary(rows: dict[str, Row]) -> Table:
    """Operators by outcomes; the bad ones in red."""
    table = Table(title="What became of damaged HLO", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("operator", no_wrap=True)
    for name in ("cases", *OUTCOMES):
        table.add_column(name, justify="right", no_wrap=True)
    for name in BAD_OUTCOMES:
        table.add_column(name, justify="right", style="red", no_wrap=True)
    table.add_column("slowest", justify="right", no_wrap=True)
    total = Row(counts=collections.Counter())
    for operator in OPERATORS:
        if row := rows.get(operator):
            total.counts += row.counts
            total.slowest_s = max(total.slowest_s, row.slowest_s)
            table.add_row(operator, *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(total))
    return table


def _cells(row: Row) -> list[str]:
    numbers = [row.counts.total(), *(row.counts[name] for name in (*OUTCOMES, *BAD_OUTCOMES))]
    return [*(str(number or "") for number in numbers), f"{row.slowest_s * 1000:.0f} ms"]


def fuzz(cases: list[Case], num_workers: int, console: Console) -> bool:
    """Run, show the table and the bad cases. Whether there was none."""
    rows: dict[str, Row] = {}
    bad: list[tuple[Case, Outcome]] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Auditing damaged HLO", total=len(cases))
        for case, outcome in run_all(cases, num_workers):
            row = rows.setdefault(case.operator, Row(counts=collections.Counter()))
            row.counts[outcome.name] += 1
            if outcome.time_s > row.slowest_s:
                row.slowest_s, row.slowest = outcome.time_s, str(case)
            if outcome.name in BAD_OUTCOMES:
                bad.append((case, outcome))
            progress.advance(task)
    console.print(summary(rows))
    for case, outcome in bad[:_SHOWN]:
        console.print(f"[red]{outcome.name}[/] {case} ({outcome.time_s:.2f} s)")
        console.print(f"    {outcome.why[:300]}", markup=False)
    if len(bad) > _SHOWN:
        console.print(f"and {len(bad) - _SHOWN} more")
    return not bad


def replay(case: Case, console: Console) -> bool:
    """Show what one case changes, and what comes of it. Whether that is fine."""
    before, after = (
        text.decode("utf-8", "replace").split("\n")
        for text in (fuzzing.text_of(case.dump), case.damaged())
    )
    for line in list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:42]:
        console.print(line[:400], markup=False, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzzing.run(case, Path(folder))
    console.print(f"[bold]{outcome.name}[/] after {outcome.time_s * 1000:.0f} ms")
    console.print(outcome.why, markup=False)
    return outcome.name not in BAD_OUTCOMES


def properties(num: int, seed: int, console: Console) -> bool:
    """Random programs, compiled and audited. Whether all agree with what they asked for."""
    from tests.audit import random_programs as programs

    programs.use_devices()
    bad: list[str] = []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as shown:
        for number in shown.track(range(seed, seed + num), description="Auditing programs"):
            program = programs.random_program(random.Random(number))
            bad += [
                f"{program}\n    {why}"
                for why in programs.disagreements(programs.tried_out(program))
            ]
    for line in bad:
        console.print(line, markup=False)
    console.print(f"{num} programs, {len(bad)} disagreements")
    return not bad


def main(
    num: Annotated[int, typer.Option(min=1, help="How many cases.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Another seed, other cases.")] = 0,
    only: Annotated[str, typer.Option(help="Dumps, joined by commas.")] = "",
    operators: Annotated[str, typer.Option(help="Operators, joined by commas.")] = "",
    case: Annotated[str, typer.Option(help="Replay dump:operator:seed.")] = "",
    num_workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    num_programs: Annotated[
        int, typer.Option("--properties", min=0, help="Check so many random programs instead.")
    ] = 0,
) -> None:
    """Exit code 1 when anything is bad."""
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    try:
        if case:
            fine = replay(Case.parse(case), console)
        elif num_programs:
            fine = properties(num_programs, seed, console)
        else:
            chosen = _chosen(only, fuzzing.DUMPS), _chosen(operators, tuple(OPERATORS))
            fine = fuzz(fuzzing.cases(num, seed, *chosen), num_workers, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if fine else 1)


def _chosen(given: str, known: tuple[str, ...]) -> Any:
    names = tuple(given.split(",")) if given else known
    if unknown := set(names) - set(known):
        raise ValueError(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
    return names


if __name__ == "__main__":
    typer.run(main)
