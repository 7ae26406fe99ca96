"""Schedules as CSV: one row per slot, one column per stage, as a spreadsheet shows them.

A cell holds what its stage does in that slot: nothing, `F3`, or a forward and what comes after it,
`F3 B0`. A number after a point is the chunk, `F3.1`. The first row may name the columns: `stage 0`,
`stage 1` and so on. Blank lines count as nothing, rows of empty cells as idle slots.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from jaxpar.errors import ScheduleError, shown
from jaxpar.strategies.pipeline.schedule import MAX_CELLS, Action, Cell, Kind, Schedule, Slot

MAX_BYTES = 1 << 23
"""Of a file. The longest table with the longest cells is smaller."""

_TITLE = re.compile(r"\s*(stage|device|rank)[ _]*[0-9]*\s*", re.ASCII | re.IGNORECASE)
_ACTION = re.compile(r"([A-Z])([0-9]{1,9})(?:\.([0-9]{1,9}))?", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """The table as text that `from_csv` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(f"stage {stage}" for stage in range(schedule.num_stages))
    writer.writerows([" ".join(map(str, cell)) for cell in slot] for slot in schedule.slots)
    return text.getvalue()


def read_csv(
    path: str | Path,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_virtual_stages: int | None = None,
) -> Schedule:
    """The schedule in a file, named after it. Raises ScheduleError, naming line and column.

    The sizes are those of the table unless they are given; then the table has to have them. Only
    then is a table refused that has no word of the last micro-batch, or of the last chunk.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a zero byte
        raise ScheduleError(f"{shown(str(path))} is no path: {error}.") from None
    if len(content) > MAX_BYTES:
        raise ScheduleError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no such table.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text in UTF-8, so no CSV table: {error}.") from None
    return from_csv(
        text,
        path.stem,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
    )


def from_csv(
    text: str,
    name: str = "table",
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_virtual_stages: int | None = None,
) -> Schedule:
    """As `read_csv`, from the text itself."""
    slots = _slots(text, name)
    width = len(slots[0])
    if num_stages is not None and num_stages != width:
        raise ScheduleError(
            f"Table {shown(name)} has {width} columns, one for each stage, and num_stages="
            f"{num_stages} are asked for. Nearest: {width}."
        )
    actions = [action for slot in slots for cell in slot for action in cell]
    if not actions:
        raise ScheduleError(f"Table {shown(name)} has no action. A cell holds one such as F0.")
    if num_microbatches is None:
        num_microbatches = 1 + max(action.microbatch for action in actions)
    if num_virtual_stages is None:
        num_virtual_stages = 1 + max(action.chunk for action in actions)
    return Schedule(
        name=name,
        num_stages=width,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
        slots=tuple(slots),
    )


def _slots(text: str, name: str) -> list[Slot]:
    """The rows that are no heading, all of one width."""
    slots: list[Slot] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    table = f"Table {shown(name)}"
    width = 0
    try:
        for row in reader:
            where = f"{table}, line {reader.line_num}"
            if not row:
                continue
            is_heading = not width and all(_TITLE.fullmatch(cell) for cell in row)
            width = width or len(row)
            if is_heading:
                continue
            if len(row) != width:
                raise ScheduleError(
                    f"{where}: {len(row)} columns, and the first row has {width}. Every row has a "
                    "column for each stage; an idle one is empty."
                )
            if (len(slots) + 1) * width > MAX_CELLS:
                raise ScheduleError(f"{where}: the table has more than {MAX_CELLS} cells.")
            cells = (_cell(cell, f"{where}, column {i}") for i, cell in enumerate(row, 1))
            slots.append(tuple(cells))
    except csv.Error as error:
        raise ScheduleError(f"{table}, line {reader.line_num}: no CSV ({error}).") from None
    if not slots:
        raise ScheduleError(f"{table} is empty. It has one row for each slot.")
    return slots


def _cell(text: str, where: str) -> Cell:
    return tuple(parse_action(word, where) for word in text.split())


def parse_action(word: str, where: str = "Action") -> Action:
    """'F3.1' as an action. Raises ScheduleError, opening with `where`."""
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ScheduleError(
            f"{where}: {shown(word)} is no action. One is a letter, a micro-batch and, after a "
            "point, a chunk, such as F3 or F3.1; two stand in one cell with a space between them."
        )
    letter, microbatch, chunk = match.groups()
    if letter not in list(Kind):
        kinds = ", ".join(f"{kind} ({kind.noun})" for kind in Kind)
        raise ScheduleError(f"{where}: {shown(word)} has the letter {letter!r}. Known: {kinds}.")
    return Action(Kind(letter), int(microbatch), int(chunk or 0))
