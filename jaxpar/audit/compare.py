"""Predicted, asked, compiled: three counts of the same communication, held against each other.

predicted = asked has to hold exactly: kind, axes, phase, dtype, bytes of one execution, and how
often. asked = compiled has to hold in bytes, unless the backend rewrote the program in a way that
is recognised here, checked to the byte, and named:

* merged: several buffers go over the wire in one operation; the buffers are the same.
* widened: the backend reduces or gathers in a wider dtype; the elements are the same.
* hoisted: a gather of what a loop does not change runs once before the loop.

Anything else is a disagreement, with the numbers. Where devices do different things, as the stages
of a pipeline do, all of this has to hold on every device; what is shown is the busiest one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpar.audit.asked import Asked
from jaxpar.audit.result import Audit, Buffer, Collective
from jaxpar.audit.shape import DTYPE_BITS
from jaxpar.collectives import wire_bytes


class Counted(Protocol):
    """What a closed form has to say of a collective (strategies' `Expected` does)."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def count(self) -> int | None: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def phase(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Executions per step and device, and the bytes of all of them; None when not known.

    Where devices differ, the most that any device has of each.
    """

    count: int | None
    payload_bytes: int | None
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of collective on one set of axes in one phase, counted three times.

    `compiled` is None where XLA kept no trace of the phase and another line holds the bytes.
    `wire_bytes` is what each device sends for the predicted payload, all executions together.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    predicted: Amount
    asked: Amount
    compiled: Amount | None
    wire_bytes: int | None
    agrees: bool
    note: str

    def to_json(self) -> dict[str, Any]:
        amounts = {
            name: None
            if amount is None
            else {
                "count": amount.count,
                "payload_bytes": amount.payload_bytes,
                "dtype": amount.dtype,
            }
            for name, amount in (
                ("predicted", self.predicted),
                ("asked", self.asked),
                ("compiled", self.compiled),
            )
        }
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "phase": self.phase,
            **amounts,
            "wire_bytes": self.wire_bytes,
            "agrees": self.agrees,
            "note": self.note,
        }


_PHASES = ("forward", "recompute", "backward", "update", "unknown")

Group = tuple[str, tuple[str, ...]]
"""(kind, axes): the level at which compiled bytes have to match what was asked."""


def compare(predicted: Sequence[Counted], asked: Sequence[Asked], audit: Audit) -> list[Line]:
    """One line for each (kind, axes, phase) that any of the three knows, in a step's order."""
    compiled: dict[Group, list[Collective]] = defaultdict(list)
    for found in audit.collectives:
        compiled[found.kind, found.axes or (found.axes_note or "irregular groups",)].append(found)
    groups = dict.fromkeys([*((row.kind, row.axes) for row in (*predicted, *asked)), *compiled])
    lines: list[Line] = []
    for group in groups:
        lines += _group_lines(
            group,
            [row for row in predicted if (row.kind, row.axes) == group],
            [row for row in asked if (row.kind, row.axes) == group],
            compiled[group],
            audit,
        )
    return sorted(lines, key=lambda line: (_PHASES.index(line.phase), line.kind, line.axes))


def agree(lines: Iterable[Line]) -> bool:
    return all(line.agrees for line in lines)


def _group_lines(
    group: Group,
    predicted: Sequence[Counted],
    asked: Sequence[Asked],
    compiled: Sequence[Collective],
    audit: Audit,
) -> list[Line]:
    devices = _devices((*predicted, *asked, *compiled))
    difference, is_hoisted = _compiled_difference(asked, compiled, devices)
    by_phase = _by_phase(compiled, devices)
    phases = dict.fromkeys([*(row.phase for row in (*predicted, *asked)), *by_phase])
    lines = []
    for phase in phases:
        mine = [row for row in predicted if row.phase == phase]
        theirs = [row for row in asked if row.phase == phase]
        differences = [*_difference(mine, theirs, devices), *difference]
        amounts = _amount(mine, devices), _amount(theirs, devices), by_phase.get(phase)
        lines.append(
            Line(
                kind=group[0],
                axes=group[1],
                phase=phase,
                predicted=amounts[0],
                asked=amounts[1],
                compiled=amounts[2],
                wire_bytes=_wire(group, amounts[0], audit),
                agrees=not differences,
                note="; ".join(differences or _rewrites(*amounts[1:], is_hoisted, audit)),
            )
        )
    return lines


# --- predicted = asked -----------------------------------------------------------------------


def _difference(
    predicted: Sequence[Counted], asked: Sequence[Asked], devices: Devices
) -> list[str]:
    """What one column has and the other has not, in words; empty when they are equal."""
    if not all(map(_is_known, asked)):
        return ["how often it is asked for depends on data"]
    mine, theirs = _executions(predicted, devices), _executions(asked, devices)
    only = [("predicted, not asked", mine - theirs), ("asked, not predicted", theirs - mine)]
    return [
        f"{what}: "
        + ", ".join(
            f"{n} × {size:,} B {dtype}" + ("" if device is None else f" on device {device}")
            for (dtype, size, device), n in rows.items()
        )
        for what, rows in only
        if rows
    ]


def _amount(rows: Sequence[Counted], devices: Devices) -> Amount:
    dtype = "+".join(sorted({row.dtype for row in rows}))
    if not all(map(_is_known, rows)):
        return Amount(count=None, payload_bytes=None, dtype=dtype)
    counts = [[_count(row, device) for row in rows] for device in devices]
    return Amount(
        count=max(map(sum, counts)),
        payload_bytes=max(
            sum(n * row.payload_bytes for n, row in zip(some, rows, strict=True)) for some in counts
        ),
        dtype=dtype,
    )


def _wire(group: Group, amount: Amount, audit: Audit) -> int | None:
    kind, axes = group
    if amount.payload_bytes is None or not audit.mesh or not set(axes) <= set(audit.mesh):
        return None
    return wire_bytes(kind, amount.payload_bytes, math.prod(audit.mesh[axis] for axis in axes))


# --- asked = compiled ------------------------------------------------------------------------


def _compiled_difference(
    asked: Sequence[Asked], compiled: Sequence[Collective], devices: Devices
) -> tuple[list[str], bool]:
    """What the compiled program moves that was not asked for, or the reverse; empty when equal.

    Equal also when the same elements go over the wire in a wider dtype, or gathers moved out of
    loops; the second answer says whether they did.
    """
    if not all(map(_is_known, compiled)):
        return ["compiled: how often it runs is not known"], False
    known = list(filter(_is_known, asked))
    have: Executions = Counter()
    for found in compiled:
        for buffer in found.buffers:
            for device in devices:
                have[buffer.dtype, buffer.payload_bytes, device] += _count(found, device)
    kept = {dtype for dtype, _, _ in have}
    for is_hoisted in (False, True) if devices == _ALIKE else (False,):
        want = _executions(_hoisted(known, compiled) if is_hoisted else known, devices)
        if _same(want, have) or _same(_widened(want, keep=kept), have):
            return [], is_hoisted
    totals = [
        max(
            sum(size * n for (_, size, on), n in rows.items() if on == device) for device in devices
        )
        for rows in (_executions(known, devices), have)
    ]
    return ["asked {:,} B, compiled {:,} B".format(*totals)], False


def _rewrites(asked: Amount, compiled: Amount | None, is_hoisted: bool, audit: Audit) -> list[str]:
    """The names of what the backend did to one line whose bytes are accounted for."""
    if compiled is None:
        return ["XLA says another phase"] if asked.count else []
    notes = []
    if compiled.dtype != asked.dtype and asked.dtype:
        notes.append(f"{audit.program.platform}: {asked.dtype} goes as {compiled.dtype}")
    if asked.count is not None and compiled.count is not None:
        if compiled.count < asked.count:
            notes.append("hoisted" if is_hoisted else "merged")
        elif compiled.count > asked.count:
            notes.append("split" if asked.count else "XLA says this phase")
    return notes


def _hoisted(asked: Sequence[Asked], compiled: Sequence[Collective]) -> list[Asked]:
    """The same gathers, moved out of inner loops as far as makes the compiled counts come out.

    Only gathers: what others read changes in a loop, or a backend leaves them where they are.
    """
    have: Counter[float] = Counter()
    for found in compiled:
        for buffer in found.buffers:
            have[_num_elements(buffer)] += found.count or 0
    moved: list[Asked] = []
    for elements in dict.fromkeys(_num_elements(row) for row in asked):
        rows = [row for row in asked if _num_elements(row) == elements]
        reachable: dict[int, list[Asked]] = {0: []}
        for row in rows:
            depth = len(row.loops or ()) if row.kind == "all-gather" else 0
            options = [row, *(replace(row, loops=(row.loops or ())[:n]) for n in range(depth))]
            after: dict[int, list[Asked]] = {}
            for total, before in reachable.items():
                for option in options:
                    after.setdefault(total + (option.count or 0), [*before, option])
            reachable = after
        moved += reachable.get(have[elements], rows)
    return moved


def _num_elements(buffer: Asked | Buffer) -> float:
    return buffer.payload_bytes * 8 / DTYPE_BITS.get(buffer.dtype, 8)


def _widened(executions: Executions, keep: set[str]) -> Executions:
    """The same elements in the dtypes of a backend that computes narrow floats in float32.

    A dtype in `keep` is one that the backend does use as it is.
    """
    total: Executions = Counter()
    for (dtype, size, device), count in executions.items():
        bits = DTYPE_BITS[dtype] if "+" not in dtype else 32
        if dtype.startswith(("bf", "f")) and bits < 32 and dtype not in keep:
            total["f32", size * 32 // bits, device] += count
        else:
            total[dtype, size, device] += count
    return total


def _same(want: Executions, have: Executions) -> bool:
    """Equal buffer by buffer; or, where a backend concatenates buffers, byte by byte per dtype."""
    return +want == +have or _bytes_by_dtype(want) == _bytes_by_dtype(have)


def _bytes_by_dtype(executions: Executions) -> dict[tuple[str, int | None], int]:
    total: Counter[tuple[str, int | None]] = Counter()
    for (dtype, size, device), count in executions.items():
        total[dtype, device] += size * count
    return dict(+total)


def _by_phase(compiled: Sequence[Collective], devices: Devices) -> dict[str, Amount]:
    """The compiled bytes of each phase, as far as XLA's metadata tells phases apart.

    An operation merged from several phases counts as an execution in each of them.
    """
    phases = dict.fromkeys(buffer.phase for found in compiled for buffer in found.buffers)
    amounts = {}
    for phase in phases:
        mine = [
            (found, [buffer for buffer in found.buffers if buffer.phase == phase])
            for found in compiled
        ]
        mine = [(found, buffers) for found, buffers in mine if buffers]
        is_known = all(_is_known(found) for found, _ in mine)
        sizes = [(found, sum(b.payload_bytes for b in buffers)) for found, buffers in mine]
        amounts[phase] = Amount(
            count=max(sum(_count(found, on) for found, _ in mine) for on in devices)
            if is_known
            else None,
            payload_bytes=max(
                sum(_count(found, on) * size for found, size in sizes) for on in devices
            )
            if is_known
            else None,
            dtype="+".join(sorted({b.dtype for _, buffers in mine for b in buffers})),
        )
    return amounts


# --- devices that do different things ---------------------------------------------------------

Devices = Sequence[int | None]
"""The devices to count on, or None alone where all of them do the same."""

Executions = Counter[tuple[str, int, int | None]]
"""How often a buffer (dtype, bytes) goes over the wire on a device."""

_ALIKE: Devices = (None,)


def _devices(rows: Iterable[Any]) -> Devices:
    on_each = [counts for row in rows if (counts := _device_counts(row)) is not None]
    return range(min(map(len, on_each))) if on_each else _ALIKE


def _device_counts(row: Any) -> tuple[int, ...] | None:
    return getattr(row, "device_counts", None)


def _is_known(row: Any) -> bool:
    return row.count is not None or _device_counts(row) is not None


def _count(row: Any, device: int | None) -> int:
    on_each = _device_counts(row)
    if on_each is None or device is None:
        return row.count or 0
    return on_each[device]


def _executions(rows: Iterable[Any], devices: Devices) -> Executions:
    total: Executions = Counter()
    for row in rows:
        for device in devices:
            total[row.dtype, row.payload_bytes, device] += _count(row, device)
    return total
