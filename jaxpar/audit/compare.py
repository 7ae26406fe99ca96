"""Predicted, asked, compiled: three counts of the same communication, held against each other.

predicted = asked has to hold exactly: kind, axes, phase, dtype, bytes of one execution, and how
often. asked = compiled has to hold in bytes, unless the backend rewrote the program in a way that
is recognised here, checked to the byte, and named:

* merged: several buffers go over the wire in one operation; the buffers are the same.
* widened: the backend reduces or gathers in a wider dtype; the elements are the same.
* hoisted: a gather of what a loop does not change runs once before the loop.

Anything else is a disagreement, with the numbers.
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
    """Executions per step and device, and the bytes of all of them; None when not known."""

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
    difference, is_hoisted = _compiled_difference(asked, compiled)
    by_phase = _by_phase(compiled)
    phases = dict.fromkeys([*(row.phase for row in (*predicted, *asked)), *by_phase])
    lines = []
    for phase in phases:
        mine = [row for row in predicted if row.phase == phase]
        theirs = [row for row in asked if row.phase == phase]
        differences = [*_difference(mine, theirs), *difference]
        amounts = _amount(mine), _amount(theirs), by_phase.get(phase)
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


def _difference(predicted: Sequence[Counted], asked: Sequence[Asked]) -> list[str]:
    """What one column has and the other has not, in words; empty when they are equal."""
    if any(row.count is None for row in asked):
        return ["how often it is asked for depends on data"]
    mine, theirs = _executions(predicted), _executions(asked)
    only = [("predicted, not asked", mine - theirs), ("asked, not predicted", theirs - mine)]
    return [
        f"{what}: " + ", ".join(f"{n} × {size:,} B {dtype}" for (dtype, size), n in rows.items())
        for what, rows in only
        if rows
    ]


def _executions(rows: Sequence[Counted]) -> Counter[tuple[str, int]]:
    total: Counter[tuple[str, int]] = Counter()
    for row in rows:
        total[row.dtype, row.payload_bytes] += row.count or 0
    return total


def _amount(rows: Sequence[Counted]) -> Amount:
    counts = [row.count for row in rows]
    return Amount(
        count=None if None in counts else sum(c or 0 for c in counts),
        payload_bytes=None
        if None in counts
        else sum((row.count or 0) * row.payload_bytes for row in rows),
        dtype="+".join(sorted({row.dtype for row in rows})),
    )


def _wire(group: Group, amount: Amount, audit: Audit) -> int | None:
    kind, axes = group
    if amount.payload_bytes is None or not audit.mesh or not set(axes) <= set(audit.mesh):
        return None
    return wire_bytes(kind, amount.payload_bytes, math.prod(audit.mesh[axis] for axis in axes))


# --- asked = compiled ------------------------------------------------------------------------


def _compiled_difference(
    asked: Sequence[Asked], compiled: Sequence[Collective]
) -> tuple[list[str], bool]:
    """What the compiled program moves that was not asked for, or the reverse; empty when equal.

    Equal also when the same elements go over the wire in a wider dtype, or gathers moved out of
    loops; the second answer says whether they did.
    """
    if any(found.count is None for found in compiled):
        return ["compiled: how often it runs is not known"], False
    known = [row for row in asked if row.count is not None]
    have: Counter[tuple[str, int]] = Counter()
    for found in compiled:
        for buffer in found.buffers:
            have[buffer.dtype, buffer.payload_bytes] += found.count or 0
    kept = {dtype for dtype, _ in have}
    for is_hoisted in (False, True):
        want = _executions(_hoisted(known, compiled) if is_hoisted else known)
        if _same(want, have) or _same(_widened(want, keep=kept), have):
            return [], is_hoisted
    want = _executions(known)
    totals = [sum(size * n for (_, size), n in rows.items()) for rows in (want, have)]
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


def _widened(executions: Counter[tuple[str, int]], keep: set[str]) -> Counter[tuple[str, int]]:
    """The same elements in the dtypes of a backend that computes narrow floats in float32.

    A dtype in `keep` is one that the backend does use as it is.
    """
    total: Counter[tuple[str, int]] = Counter()
    for (dtype, size), count in executions.items():
        bits = DTYPE_BITS[dtype] if "+" not in dtype else 32
        if dtype.startswith(("bf", "f")) and bits < 32 and dtype not in keep:
            total["f32", size * 32 // bits] += count
        else:
            total[dtype, size] += count
    return total


def _same(want: Counter[tuple[str, int]], have: Counter[tuple[str, int]]) -> bool:
    """Equal buffer by buffer; or, where a backend concatenates buffers, byte by byte per dtype."""
    return want == have or _bytes_by_dtype(want) == _bytes_by_dtype(have)


def _bytes_by_dtype(executions: Counter[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for (dtype, size), count in executions.items():
        total[dtype] += size * count
    return dict(total)


def _by_phase(compiled: Sequence[Collective]) -> dict[str, Amount]:
    """The compiled bytes of each phase, as far as XLA's metadata tells phases apart.

    An operation merged from several phases counts as an execution in each of them.
    """
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    dtypes: dict[str, set[str]] = defaultdict(set)
    unknown: set[str] = set()
    for found in compiled:
        for phase in {buffer.phase for buffer in found.buffers}:
            counts[phase] += found.count or 0
            unknown |= {phase} if found.count is None else set()
        for buffer in found.buffers:
            sizes[buffer.phase] += (found.count or 0) * buffer.payload_bytes
            dtypes[buffer.phase].add(buffer.dtype)
    return {
        phase: Amount(
            count=None if phase in unknown else counts[phase],
            payload_bytes=None if phase in unknown else sizes[phase],
            dtype="+".join(sorted(dtypes[phase])),
        )
        for phase in counts
    }
