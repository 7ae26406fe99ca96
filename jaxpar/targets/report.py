"""Tables of what compilers made of strategies, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from jaxpar.audit.result import LiveBuffer
from jaxpar.errors import OutOfDeviceMemoryError
from jaxpar.report.text import literal, plain_table, size
from jaxpar.targets.on_target import OnTarget
from jaxpar.targets.tour import KindOnTarget, TargetRow, TargetTour


def tour_table(tour: TargetTour) -> Table:
    """strategy · mesh · collective · axis · links · executions · payload · wire · exposed."""
    options = "".join(f", {name}={value}" for name, value in tour.options.items())
    table = plain_table(
        f"{tour.model}, bfloat16, compiled for {tour.target} ({tour.target.num_devices} devices), "
        f"asked / compiled{options}",
        ["strategy", "mesh", "collective", "axis", "links"],
        ["executions", "payload", "wire", "async", "exposed"],
        ["", "note"],
    )
    for row in tour.rows:
        for cells in _cells(row):
            table.add_row(*(cell if isinstance(cell, Text) else literal(cell) for cell in cells))
        table.add_section()
    return table


def memory_table(tour: TargetTour) -> Table:
    """What one device needs, of what it has, and its largest buffers when most is alive."""
    table = plain_table(
        f"Memory of one device of {tour.target}",
        ["strategy"],
        ["arguments", "temporary", "needs", "has"],
        ["", "largest buffers"],
    )
    for row in tour.rows:
        if row.result is not None:
            table.add_row(*map(literal, memory_cells(row.strategy, row.result)))
        elif isinstance(row.error, OutOfDeviceMemoryError):
            needs, has = row.error.used_bytes, row.error.available_bytes
            over = "" if needs is None or has is None else f" by {size(needs - has)}"
            told = ["–", "–", size(needs), size(has), f"does not fit{over}", ""]
            table.add_row(literal(row.strategy), *map(literal, told))
    return table


def memory_cells(name: str, result: OnTarget) -> Iterator[str]:
    compiled, available = result.compiled, result.available_bytes
    spare = available - compiled.device_bytes
    yield name
    yield size(compiled.memory["argument_bytes"])
    yield size(compiled.memory["temp_bytes"])
    yield size(compiled.device_bytes)
    yield size(available)
    yield f"fits, {size(spare)} left" if spare >= 0 else f"does not fit by {size(-spare)}"
    memory = result.audit.memory
    yield _buffers(memory.largest if memory else ())


def _buffers(largest: Iterable[LiveBuffer]) -> str:
    return ", ".join(f"{size(it.nbytes)} {it.shape.partition('{')[0]}" for it in largest)


def _cells(row: TargetRow) -> Iterator[list[str | Text]]:
    mesh = str(row.plan.mesh)
    if row.result is None:
        yield [row.strategy, mesh, *[""] * 8, Text("✗", style="bold red"), str(row.error)]
        return
    notes = {over.axes: list(_notes(row, over.axes)) for over in row.result.changes.over}
    disagree = {over.axes for over in row.result.changes.over if not over.agrees}
    for i, kind in enumerate(row.kinds):
        told = "; ".join(notes.pop(kind.axes, ()))
        wrong = kind.axes in disagree
        yield [
            row.strategy if i == 0 else "",
            mesh if i == 0 else "",
            kind.kind,
            ",".join(kind.axes),
            kind.links,
            _pair(str(kind.asked_count), str(kind.compiled_count)),
            _pair(size(kind.asked_bytes), size(kind.compiled_bytes)),
            size(kind.wire_bytes),
            _async(kind),
            "–" if kind.exposed_fraction is None else f"{kind.exposed_fraction:.0%}",
            Text("✗", style="bold red") if wrong else Text("✓", style="green"),
            literal(told, style="red" if wrong else "dim"),
        ]


def _notes(row: TargetRow, axes: tuple[str, ...]) -> Iterator[str]:
    assert row.result is not None
    for over in row.result.changes.over:
        if over.axes != axes:
            continue
        for change in over.changes:
            extra = change.extra_wire_bytes
            cost = f", {size(abs(extra))} {'more' if extra > 0 else 'less'} wire" if extra else ""
            yield f"{change}: {size(change.payload_bytes)}{cost}"
        if over.narrowed_bytes:
            word = "narrower" if over.narrowed_bytes > 0 else "wider"
            yield f"{word} types: {size(abs(over.narrowed_bytes))}"
        if over.reason:
            yield over.reason


def _pair(asked: str, compiled: str) -> str:
    return asked if asked == compiled else f"{asked} / {compiled}"


def _async(kind: KindOnTarget) -> str:
    if not kind.num_operations:
        return "–"
    if kind.num_async in (0, kind.num_operations):
        return "all" if kind.num_async else "none"
    return f"{kind.num_async} of {kind.num_operations}"


def verdict(tour: TargetTour) -> Text:
    """One sentence: what differs from the closed form, and what could not be compiled."""
    failed = [row.strategy for row in tour.rows if row.result is None]
    differ = [row.strategy for row in tour.rows if row.result is not None and not row.agrees]
    large = [row.strategy for row in tour.rows if row.result is not None and not row.result.fits]
    parts = []
    if large:
        parts.append(f"Too large for a device: {', '.join(large)}.")
    if differ:
        parts.append(f"Other elements than asked for in {', '.join(differ)}: see the notes.")
    if failed:
        parts.append(f"Not compiled: {', '.join(failed)}.")
    if parts:
        return literal(" ".join(parts), style="bold red")
    return Text(
        f"Normalised payload = closed form on all {len(tour.rows)} rows in {tour.seconds:.0f} s.",
        style="green",
    )
