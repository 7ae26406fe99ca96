"""Tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # an audit is told without importing what trains
    from jaxpar.audit.compare import Amount, Line
    from jaxpar.strategies.strategy import Card, Expected
    from jaxpar.tour import Row, Tour

MAX_WIDTH = 1000
"""Columns no table needs; a longer name is cut."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: int | None) -> str:
    """Bytes with a binary unit and at most one decimal, '?' when not known."""
    if num_bytes is None:
        return "?"
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + f" {UNITS[unit]}"


def literal(text: str, style: str = "") -> Text:
    """Text exactly as it is, whoever wrote it: no markup, no emoji, no escape sequences."""
    visible = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return Text("".join(visible), style=style)


def wire_text(wire_bytes: Mapping[tuple[str, ...], int]) -> str:
    """Bytes over each set of axes in a row: "1.5 GiB over fsdp; 4 B over data,tensor"."""
    over = (f"{size(num)} over {','.join(axes)}" for axes, num in wire_bytes.items())
    return "; ".join(over) or "nothing"


def as_text(parts: Iterable[RenderableType]) -> str:
    """What a terminal without colours and of any width would show."""
    console = Console(width=MAX_WIDTH, file=io.StringIO(), color_system=None, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def triple(line: Line, field: str) -> str:
    """predicted / asked / compiled of one field; once when all three are the same."""
    amounts: list[Amount | None] = [line.predicted, line.asked, line.compiled]
    values = [None if a is None else getattr(a, field) for a in amounts]
    if field == "payload_bytes":
        shown = ["–" if a is None else size(v) for a, v in zip(amounts, values, strict=True)]
    else:
        shown = [
            "–" if a is None else "?" if v is None else str(v)
            for a, v in zip(amounts, values, strict=True)
        ]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def tour_table(tour: Tour) -> Table:
    """strategy · mesh · collective · axis · phase · executions · payload · wire · error · note."""
    table = plain_table(
        f"{tour.model} on {tour.corpus}, {tour.num_steps} steps, float32, 8 virtual CPU devices",
        ["strategy", "mesh", "collective", "axis", "phase"],
        ["executions", "payload", "wire"],
        ["", "executed error", "note"],
    )
    for row in tour.rows:
        for cells in row_cells(row):
            table.add_row(*(cell if isinstance(cell, Text) else literal(cell) for cell in cells))
        table.add_section()
    return table


def row_cells(row: Row) -> Iterable[Sequence[str | Text]]:
    """The lines of one strategy; its name, mesh and errors stand on the first ones."""
    errors = row.told()
    # One on each line, what is left on the last.
    last = len(row.lines) - 1
    shown = [*errors[:last], ", ".join(errors[last:])] if last < len(errors) else errors
    for i, line in enumerate(row.lines):
        agrees = line.agrees and (row.numbers_agree or i >= len(shown))
        yield [
            row.strategy if i == 0 else "",
            str(row.plan.mesh) if i == 0 else "",
            line.kind,
            ",".join(line.axes),
            line.phase,
            triple(line, "count"),
            triple(line, "payload_bytes"),
            size(line.wire_bytes),
            Text("✓", style="green") if agrees else Text("✗", style="bold red"),
            shown[i] if i < len(shown) else "",
            literal(line.note, style="dim" if line.agrees else "red"),
        ]


def tour_verdict(tour: Tour) -> Text:
    """One sentence: whether everything agrees, and if not, who does not."""
    failed = [row.strategy for row in tour.rows if not row.agrees]
    if failed:
        return literal(f"Disagreement in {', '.join(failed)}.", style="bold red")
    return Text(
        f"predicted = asked = compiled, and = one device, on all {len(tour.rows)} rows "
        f"in {tour.seconds:.0f} s.",
        style="green",
    )


def card_table(card: Card) -> Table:
    title = literal(card.name)
    table = Table(box=box.SIMPLE, show_header=False, title=title, title_justify="left")
    for key in ("axis", "splits", "why", "costs", "source"):
        table.add_row(literal(key, style="bold"), literal(getattr(card, key)))
    return table


def expected_table(rows: Sequence[Expected], title: str) -> Table:
    table = plain_table(
        title, ["collective", "axis", "phase"], ["count", "payload", "total"], ["dtype", "why"]
    )
    for row in rows:
        table.add_row(
            *map(
                literal,
                [
                    row.kind,
                    ",".join(row.axes),
                    row.phase,
                    str(row.count),
                    size(row.payload_bytes),
                    size(row.count * row.payload_bytes),
                    row.dtype,
                    row.why,
                ],
            )
        )
    return table


def plain_table(title: str, left: list[str], right: list[str], more: list[str]) -> Table:
    """An empty table: columns of names, of numbers (aligned right), and of whatever follows."""
    table = Table(box=box.SIMPLE_HEAD, title=literal(title), title_justify="left", pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    for name in more:
        table.add_column(name, no_wrap=name != "note")
    return table
