"""The communication signature of a program: what a snapshot keeps and a diff compares.

Kind, axes, dtype, bytes, executions; no HLO text, no names of instructions, no source lines, so it
changes only when the communication does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.audit.grouping import Bounds, axis_label, divided, executions
from jaxpar.audit.result import Audit, Collective
from jaxpar.errors import AuditError, is_whole, shown

SCHEMA = "jaxpar.comm/1"

MAX_SNAPSHOT_BYTES = 1 << 26
"""Of one file: half a million different operations."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One operation, or several alike: bytes are those of one execution.

    `axes` is the text of `axis_label`. In a signature `phase` and `scope` are "". `is_part` marks
    the further parts of an operation that another entry already counts.
    """

    kind: str
    axes: str
    group_size: int
    dtype: str
    payload_bytes: int
    wire_bytes: int
    count: Bounds
    phase: str = ""
    scope: str = ""
    is_part: bool = False


def signature(audit: Audit) -> tuple[Entry, ...]:
    """The operations of a program, those that are alike added up, in a fixed order."""
    exact: dict[Entry, int] = {}
    others: list[Entry] = []
    for found in audit.collectives:
        entry = _entry(found)
        if entry.count.exact is None:
            others.append(entry)
        else:
            key = replace(entry, count=Bounds(low=0, high=0))
            exact[key] = exact.get(key, 0) + entry.count.low
    entries = [replace(key, count=Bounds(low=n, high=n)) for key, n in exact.items()]
    return tuple(sorted([*entries, *others], key=_order))


def parts(audit: Audit) -> tuple[Entry, ...]:
    """The operations with phase and scope; merged ones divided by the dtype and phase of a part."""
    return tuple(entry for found in audit.collectives for entry in _parts(found))


def _parts(found: Collective) -> Iterable[Entry]:
    portions = divided(found, lambda buffer: (buffer.dtype, buffer.phase))
    for i, ((dtype, phase), portion) in enumerate(portions.items()):
        yield replace(
            _entry(found),
            dtype=dtype,
            phase=phase,
            scope=found.scope,
            payload_bytes=portion.payload_bytes,
            wire_bytes=portion.wire_bytes,
            is_part=i > 0,
        )


def _entry(found: Collective) -> Entry:
    return Entry(
        kind=found.kind,
        axes=axis_label(found),
        group_size=found.group_size,
        dtype="+".join(sorted(found.dtype.split("+"))),
        payload_bytes=found.payload_bytes,
        wire_bytes=found.wire_bytes,
        count=executions(found),
    )


def _order(entry: Entry) -> tuple[Any, ...]:
    high = -1 if entry.count.high is None else entry.count.high
    what = (entry.kind, entry.axes, entry.group_size, entry.dtype)
    return (*what, -entry.payload_bytes, entry.wire_bytes, entry.count.low, high)


def to_text(entries: Iterable[Entry]) -> str:
    """A signature as JSON, one operation per line so that version control shows what changed."""
    lines = (json.dumps(_entry_json(entry), ensure_ascii=False) for entry in entries)
    rows = ",\n".join(f"  {line}" for line in lines)
    inside = f"[\n{rows}\n ]" if rows else "[]"
    return f'{{\n "schema": "{SCHEMA}",\n "collectives": {inside}\n}}\n'


def _entry_json(entry: Entry) -> dict[str, Any]:
    fields = {key: getattr(entry, key) for key in (*_TEXTS, *_NUMBERS)}
    if entry.count.exact is not None:
        return {**fields, "count": entry.count.exact}
    return {**fields, "count_min": entry.count.low, "count_max": entry.count.high}


_TEXTS = ("kind", "axes", "dtype")
_NUMBERS = ("group_size", "payload_bytes", "wire_bytes")


def from_text(text: str) -> tuple[Entry, ...]:
    """The signature that `to_text` wrote. AuditError for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AuditError(f"This is no snapshot: no JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        given = shown(data.get("schema")) if isinstance(data, dict) else type(data).__name__
        raise AuditError(f'This is no snapshot: its schema is {given}, not "{SCHEMA}".')
    rows = data.get("collectives")
    if not isinstance(rows, list):
        raise AuditError("This snapshot has no list of collectives.")
    return tuple(sorted(map(_entry_of, rows), key=_order))


def _entry_of(row: Any) -> Entry:
    if not isinstance(row, dict):
        raise AuditError(f"A collective of this snapshot is {shown(row)}, no object.")
    low: Any = row.get("count", row.get("count_min"))
    high: Any = row.get("count", row.get("count_max"))
    numbers = [*(row.get(key) for key in _NUMBERS), low, *([] if _is_open(row) else [high])]
    good = all(is_whole(number) and number >= 0 for number in numbers)
    if not good or not all(isinstance(row.get(key), str) for key in _TEXTS):
        raise AuditError(
            f"A collective of this snapshot is {shown(row)}; it needs {', '.join(_TEXTS)} as text, "
            f"{', '.join(_NUMBERS)} and count as whole numbers."
        )
    fields = {key: row[key] for key in (*_TEXTS, *_NUMBERS)}
    return Entry(**fields, count=Bounds(low=low, high=high))


def _is_open(row: dict[str, Any]) -> bool:
    """Whether it says that its executions have no bound."""
    return "count" not in row and row.get("count_max", 0) is None
