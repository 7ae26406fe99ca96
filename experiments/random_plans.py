"""Random plans on 1 to 8 devices with random small models: each equals one device or is refused.

    .venv/bin/python experiments/random_plans.py                  # 1,000 plans, 2 processes
    .venv/bin/python experiments/random_plans.py --num 50 --seed 7000
    .venv/bin/python experiments/random_plans.py --case 123       # one of them, in full

Equal means: over two steps the same loss, global gradient norm and parameters in float32, and
predicted = asked = compiled for every collective. Exit code 1 when a plan ends otherwise.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.random_plans import Judge, Outcome, numbered, rule

PLANS_PER_PROCESS = 40
"""JAX keeps every program it compiled; a fresh process starts without them."""


def judge_all(seeds: list[int]) -> list[tuple[int, Outcome]]:
    """In a process of its own."""
    import jax

    from jaxpar.mesh import use_cpu_devices

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_disable_most_optimizations", True)
    use_cpu_devices(8)
    judge = Judge()
    return [(seed, judge(numbered(seed))) for seed in seeds]


def outcomes(seeds: list[int], num_workers: int) -> Iterator[tuple[int, Outcome]]:
    chunk = max(1, min(PLANS_PER_PROCESS, len(seeds) // num_workers))
    parts = [seeds[i : i + chunk] for i in range(0, len(seeds), chunk)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_workers, maxtasksperchild=1) as pool:
        for part in pool.imap_unordered(judge_all, parts):
            yield from part


def main(
    num: Annotated[int, typer.Option(min=1, help="How many plans.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="The first one.")] = 0,
    case: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
    num_workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Every outcome, here.")] = None,
) -> None:
    """Exit code 1 when a plan neither equals one device nor is refused by name."""
    console = Console()
    console.width = max(console.width, 120)
    seeds = list(range(seed, seed + num)) if case is None else [case]
    found: dict[int, Outcome] = {}
    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:  # fmt: skip
        task = bar.add_task("plans", total=len(seeds))
        for number, outcome in outcomes(seeds, num_workers):
            found[number] = outcome
            bar.advance(task)
            if case is not None or outcome.kind not in ("equal", "refused"):
                told = f"{number} {outcome.kind}: {numbered(number)}\n  {outcome.why[:2000]}"
                console.print(told, markup=False, highlight=False)
    console.print(_table(found))
    if json_path is not None:
        told = {
            n: {"kind": o.kind, "why": o.why, "plan": str(numbered(n))} for n, o in found.items()
        }
        json_path.write_text(json.dumps(told, indent=1))
    if any(outcome.kind not in ("equal", "refused") for outcome in found.values()):
        raise typer.Exit(1)


def _table(found: dict[int, Outcome]) -> Table:
    kinds = Counter(outcome.kind for outcome in found.values())
    rules = Counter(rule(o.why) for o in found.values() if o.kind == "refused")
    table = Table("plans", "ended", title=f"{len(found)} random plans")
    for kind in ("equal", "different", "crashed", "refused"):
        table.add_row(str(kinds[kind]), kind)
    for name, count in rules.most_common():
        table.add_row(str(count), f"  {name}")
    return table


if __name__ == "__main__":
    typer.run(main)
