"""The documentation says what the program prints: commands, programs, tour rows, faults, links."""

import contextlib
import io
import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxpar import audit, expected, preset
from jaxpar.audit.compare import Amount, Line
from jaxpar.cli import main
from jaxpar.collectives import wire_bytes
from jaxpar.report.text import row_cells
from jaxpar.strategies import compose
from jaxpar.tour import Tour, TrainingRow
from tests.helpers import run_program
from tests.test_planted_faults import FAULTS

ROOT = Path(__file__).parent.parent
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}


def _blocks(language: str) -> list[tuple[str, str]]:
    """(page, content) of every fenced block in this language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(name, block) for name, page in PAGES.items() for block in fence.findall(page)]


CONSOLE = [block for _, block in _blocks("console")]
COMMANDS = [block for block in CONSOLE if block.startswith("$ .venv/bin/jaxpar ")]
TOURS = [block for block in CONSOLE if block.startswith("$ make tour ")]
PROGRAMS = [
    program
    for page in PAGES.values()
    for program in re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.S | re.M)
]


def _lines(text: str) -> list[str]:
    """Without the spaces that fill a table's lines, and without empty lines around it."""
    return [line.rstrip() for line in text.strip("\n").splitlines() if line.strip()]


def test_every_block_is_checked_somewhere():
    assert len(COMMANDS) >= 7 and len(TOURS) >= 4
    assert len(CONSOLE) == len(COMMANDS) + len(TOURS)
    assert len(PROGRAMS) == len(_blocks("python")) >= 3


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.splitlines()[0][2:])
def test_command_prints_what_the_page_shows(block, monkeypatch):
    command, _, shown = block.partition("\n")
    shown, _, code = shown.partition("$ echo $?\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["jaxpar", *shlex.split(command)[2:]])
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as exit:
        main()
    assert (exit.value.code or 0) == int(code or 0)
    assert _lines(output.getvalue()) == _lines(shown)


@pytest.mark.parametrize("program, shown", PROGRAMS)
def test_program_prints_what_the_page_shows(program, shown, tmp_path):
    assert _lines(run_program(program, tmp_path)) == _lines(shown)


# --- rows of the tour ------------------------------------------------------------------------


def _predicted(name: str) -> list[list[str]]:
    """The tour's cells of one strategy as its closed form has them; nothing is run."""
    variants = {v.name: v for s in compose.all_strategies().values() for v in s.variants}
    plan = variants[name].plan(batch_size=16, seq_len=64)
    totals: dict[tuple, list[int]] = {}
    for row in expected(preset(variants[name].model or "tiny"), plan):
        total = totals.setdefault((row.kind, row.axes, row.phase), [0, 0])
        total[0] += row.count
        total[1] += row.count * row.payload_bytes
    lines = []
    for (kind, axes, phase), (count, payload) in totals.items():
        amount = Amount(count=count, payload_bytes=payload, dtype="f32")
        group_size = math.prod(plan.size(axis) for axis in axes)
        lines.append(
            Line(
                kind=kind, axes=axes, phase=phase, predicted=amount, asked=amount, compiled=amount,
                wire_bytes=wire_bytes(kind, payload, group_size), agrees=True, note="",
            )
        )  # fmt: skip
    return [[str(cell) for cell in cells[2:8]] for cells in row_cells(_row(name, plan, lines))]


def _row(name: str, plan, lines: list[Line]) -> TrainingRow:
    return TrainingRow(
        strategy=name, plan=plan, lines=lines, loss_error=0.0, gradient_norm_error=0.0,
        parameter_error=0.0,
    )  # fmt: skip


def _shown(block: str) -> dict[str, list[list[str]]]:
    """Cells from collective to wire of each strategy in a printed tour."""
    rows: dict[str, list[list[str]]] = {}
    name = ""
    for line in block.splitlines():
        if "✓" not in line:
            continue
        cells = re.split(r" {2,}", line.split("✓")[0].strip())
        if line[1] != " ":
            name, _mesh, *cells = cells
        # An execution count is predicted / asked / compiled where XLA merged some.
        cells[3] = cells[3].split(" / ")[0]
        rows.setdefault(name, []).append(cells)
    return rows


@pytest.mark.parametrize("block", TOURS, ids=lambda block: block.splitlines()[0][2:])
def test_tour_rows_are_the_closed_forms(block):
    shown = _shown(block)
    assert list(shown) == re.findall(r"--only ([\w+-]+)", block.splitlines()[0])
    for name, cells in shown.items():
        assert sorted(cells) == sorted(_predicted(name))


# --- what pages say in prose and tables ------------------------------------------------------


def test_every_planted_fault_is_told_with_who_sees_it():
    pages = "\n".join(PAGES.values())
    for name, (_, _, seen_by, _) in FAULTS.items():
        told = re.findall(rf"^\| {re.escape(name)} \| .+ \| (.+) \|$", pages, re.MULTILINE)
        assert told == [", ".join(sorted(seen_by))], name


def _keys_told(page: str, key: str) -> set[str]:
    """Words in backticks in the row of the JSON tables that starts with `key`."""
    row = re.search(rf"^\| `{re.escape(key)}`.* \|$", page, re.MULTILINE).group(0)
    return set(re.findall(r"`(\w+)`", row))


def test_json_keys_are_told():
    page = PAGES["05-audit.md"]
    data = audit(ROOT / "tests/audit/hlo/trip_fori_dyn.cpu.txt.gz", mesh={"data": 8}).to_json()
    assert f'"{data["schema"]}"' in page
    assert data.keys() <= set(re.findall(r"^\| `(\w+)` ", page, re.MULTILINE))
    for key in ("program", "collectives", "totals", "findings"):
        one = data[key] if isinstance(data[key], dict) else data[key][0]
        assert one.keys() <= _keys_told(page, key), key

    amount = Amount(count=1, payload_bytes=4, dtype="f32")
    line = Line(
        kind="all-reduce", axes=("data",), phase="forward", predicted=amount, asked=amount,
        compiled=amount, wire_bytes=4, agrees=True, note="",
    )  # fmt: skip
    _, variant = compose.strategy("data")
    row = _row("data", variant.plan(batch_size=16, seq_len=64), [line])
    tour = Tour(seconds=1.0, model="tiny", corpus="text", num_steps=1, rows=[row]).to_json()
    assert f'"{tour["schema"]}"' in page
    assert tour.keys() - {"rows", "schema"} <= _keys_told(page, "seconds")
    assert tour["rows"][0].keys() <= _keys_told(page, "rows")
    told = _keys_told(page, "rows[].comparison")
    assert tour["rows"][0]["comparison"][0].keys() | {"count", "payload_bytes", "dtype"} <= told
    assert json.loads(json.dumps(tour)) == tour


LINKING = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_point_to_something(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    for target in targets:
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), target


def test_index_names_every_page():
    linked = re.findall(r"\]\((\w[^)/]+\.md)\)", PAGES["README.md"])
    assert set(PAGES) - {"README.md"} == set(linked)
