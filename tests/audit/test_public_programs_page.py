"""The page on what jit communicates shows the programs that the tests audit, and their numbers."""

import collections
import re
from pathlib import Path

import pytest

from tests.audit.programs import Program, registered

ROOT = Path(__file__).parent.parent.parent
PAGE = next((ROOT / "docs").glob("*-what-jit-communicates.md")).read_text()
MAX_CODE = 76

PROGRAMS = registered()


def short(one: Program) -> str:
    """The program itself where it fits on a line, else a link to it."""
    code = one.code
    if ":;" not in code and len(code) <= MAX_CODE:
        return f"`{code}`"
    file = one.function.__module__.rpartition(".")[2]
    return f"[`{one.name}`](../tests/audit/public/{file}.py)"


def moved(one: Program) -> str:
    """Collectives with how often each runs, and the bytes sent; for each way XLA has of it."""
    ways = []
    for moves, sends in one.either.values():
        runs = collections.Counter()
        for move in moves:
            runs[f"{move.kind} {move.payload_bytes:,} B"] += move.count
        told = [f"{count} × {text}" if count > 1 else text for text, count in runs.items()]
        ways.append(f"{' + '.join(told) or 'nothing'}: **{sends:,} B**")
    return " or ".join(ways)


def row(name: str) -> str:
    """How the page tells one program."""
    one = PROGRAMS[name]
    into = "" if one.out is None else f" → {one.out}".replace("PartitionSpec", "P")
    into = into.replace(",)", ")")
    better = PROGRAMS.get(one.instead)
    instead = ""
    if better is not None:
        sends = [sends for _, sends in better.either.values()]
        instead = f"{short(better)}: **{sends[0]:,} B**"
    return (
        f"| {short(one)}<br>`{one.given()}{into}` | {moved(one)} | {one.needs:,} B | {instead} "
        f"| {one.why} |"
    )


def names_on_page() -> list[str]:
    """Names in the comments before the rows, `<!-- rows: a b -->`."""
    return re.findall(r"\w+", " ".join(re.findall(r"<!-- rows: ([\w\s]+)-->", PAGE)))


@pytest.mark.parametrize("name", names_on_page())
def test_the_row_is_what_was_audited(name):
    assert row(name) in PAGE.splitlines()


def test_no_row_is_on_the_page_unchecked():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") or line.startswith("| [")]
    assert len(rows) == len(names_on_page()) >= 20
