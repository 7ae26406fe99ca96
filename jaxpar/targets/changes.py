"""What a compiler made of the collectives it was asked for: the same data, as other kinds.

Operation counts differ from backend to backend, and so do element types; the normalised payload
does not: all elements that go over the same axes, whatever the kind and however many operations
share them. It is in the type that was asked for, so that bytes compare with the closed form. Kinds
change in ways that are recognised here, each with what it costs on the wire:

* reduce-scatter → all-reduce (and a slice): the full buffer twice around instead of once.
* all-gather → all-reduce (of zeros around the own part): the same.
* all-reduce → reduce-scatter and all-gather: the same bytes, in two operations.
* all-to-all → all-gather (and a slice), permute → all-to-all and the like.
* an all-reduce over several axes in layers: reduce-scatter over the inner ones, all-reduce over the
  outer ones, all-gather over the inner ones. Between slices this is the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.result import Audit, Collective
from jaxpar.audit.shape import DTYPE_BITS
from jaxpar.collectives import wire_bytes

Counts = NDArray[np.int64]
"""Of something on each device, or [1] where all devices do the same."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """One kind over the same axes, per step, on the device that has most of it."""

    kind: str
    count: int
    payload_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Payload that was asked for as `was` and goes as `now`, in bytes of the asked type.

    extra_wire_bytes: what each device sends for that beyond what it was asked to; may be negative.
    """

    was: str
    now: str
    payload_bytes: int
    extra_wire_bytes: int

    def __str__(self) -> str:
        return f"{self.was} → {self.now}"


@dataclass(frozen=True, kw_only=True)
class OverAxes:
    """Everything over one set of axes (or one irregular set of groups, then named so).

    asked, compiled: by kind. payload_bytes, normalised_bytes: of all kinds, asked for and compiled,
    both in asked types; equal where `agrees`. narrowed_bytes: what the compiler saved on the wire
    by sending a narrower type (negative: what a wider one costs), in payload. reason: why not,
    as far as the numbers tell.
    """

    axes: tuple[str, ...]
    asked: tuple[Totals, ...]
    compiled: tuple[Totals, ...]
    changes: tuple[Change, ...] = ()
    payload_bytes: int | None = None
    normalised_bytes: int | None = None
    narrowed_bytes: int = 0
    reason: str = ""

    @property
    def agrees(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Changes:
    """All axes of a program, in order of first appearance."""

    over: tuple[OverAxes, ...]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.over)

    def to_json(self) -> list[dict[str, Any]]:
        return [_json(row) for row in self.over]


def changes(asked: Sequence[Any], audit: Audit) -> Changes:
    """What became of `asked` in the audited program, whose mesh has to be known.

    asked: rows of `jaxpar.audit.asked`, or of a closed form.
    """
    compiled = audit.collectives
    names = dict.fromkeys([*(tuple(row.axes) for row in asked), *map(_axes, compiled)])
    sizes = audit.mesh or {}
    rows = {axes: [row for row in asked if row.axes == axes] for axes in names if axes}
    sums = {
        axes: (_Sum(mine), _Sum([found for found in compiled if _axes(found) == axes]))
        for axes, mine in rows.items()
    }
    layered = _layered(sums, sizes)
    over = [
        _over(axes, want, have, rows[axes], layered.get(axes, []), sizes)
        for axes, (want, have) in sums.items()
    ]
    return Changes(over=tuple(_with_padding_told(over)))


def _with_padding_told(over: Sequence[OverAxes]) -> Iterator[OverAxes]:
    """Layers that do not come out to the element: small buffers are padded to whole tiles."""
    cut = {
        row.axes
        for row in over
        if len(row.axes) > 1 and not row.compiled and "all-reduce missing" in row.reason
    }
    for row in over:
        inside = [axes for axes in cut if set(row.axes) < set(axes)]
        if row.axes in cut:
            yield replace(row, reason=f"{row.reason}: it is cut into layers, which are padded")
        elif row.reason and inside:
            whole = " and ".join(",".join(axes) for axes in inside)
            yield replace(row, reason=f"{row.reason}: padded layers of what goes over {whole}")
        else:
            yield row


def _axes(found: Collective) -> tuple[str, ...]:
    if found.axes is not None:
        return found.axes
    return (found.axes_note or "irregular groups",)


def _over(
    axes: tuple[str, ...],
    want: _Sum,
    have: _Sum,
    asked: Sequence[Any],
    layered: Sequence[Change],
    sizes: Mapping[str, int],
) -> OverAxes:
    answer = OverAxes(axes=axes, asked=want.totals, compiled=have.totals)
    if want.unknown or have.unknown:
        side = "asked for" if want.unknown else "compiled"
        unknown = want.unknown or have.unknown
        return replace(answer, reason=f"{side}: how often {unknown} runs is not known")
    group = math.prod(sizes.get(axis, 1) for axis in axes)
    found, missing, extra = _matched(want.elements, have.elements)
    told = [
        _change(was, now, elements, want.bytes_per_element(was), group)
        for was, now, elements in found
    ]
    # Elements have to be the same; what they are sent as is the compiler's choice.
    narrow = 0 if missing or extra or layered else want.total_bytes - have.total_bytes
    return replace(
        answer,
        changes=(*layered, *told),
        payload_bytes=want.total_bytes,
        normalised_bytes=want.total_bytes + _in_asked_bytes(want, missing, extra),
        narrowed_bytes=narrow - _doubled(found, want),
        reason=_reason(missing, extra, asked),
    )


def _layered(
    sums: Mapping[tuple[str, ...], tuple[_Sum, _Sum]], sizes: Mapping[str, int]
) -> dict[tuple[str, ...], list[Change]]:
    """All-reduces over several axes that were cut: scatter inside, reduce outside, gather inside.

    Between slices that is the rule: the slow links then carry one part of each buffer. What is
    recognised is put back into the elements of `sums`, as if it had not been cut.
    """
    told: dict[tuple[str, ...], list[Change]] = {}
    for axes, (want, have) in sums.items():
        for inner in sums:
            outer = tuple(axis for axis in axes if axis not in inner)
            if len(inner) + len(outer) != len(axes) or outer not in sums or not inner:
                continue
            size = math.prod(sizes.get(axis, 1) for axis in inner)
            elements = want.gap("all-reduce", have)
            for kind, share, part in (
                ("reduce-scatter", 1, inner), ("all-gather", 1, inner), ("all-reduce", size, outer),
            ):  # fmt: skip
                elements = np.minimum(elements, -sums[part][0].gap(kind, sums[part][1]) * share)
            if not (elements > 0).any():
                continue
            elements = elements.clip(0)
            have.add("all-reduce", elements)
            sums[inner][1].add("reduce-scatter", -elements)
            sums[inner][1].add("all-gather", -elements)
            sums[outer][1].add("all-reduce", -(elements // size))
            payload = round(int(elements.max()) * want.bytes_per_element("all-reduce"))
            inside, outside = ",".join(inner), ",".join(outer)
            now = (
                f"reduce-scatter over {inside} + all-reduce over {outside} + "
                f"all-gather over {inside}"
            )
            change = Change(was="all-reduce", now=now, payload_bytes=payload, extra_wire_bytes=0)
            told.setdefault(axes, []).append(change)
    return told


class _Sum:
    """Executions, elements and bytes of some collectives, by kind, on each device."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.elements: dict[str, Counts] = {}
        self._counts: dict[str, Counts] = {}
        self._bytes: dict[str, Counts] = {}
        self._dtypes: dict[str, dict[str, None]] = {}
        self.unknown = ""
        for row in rows:
            counts = _counts(row)
            if counts is None:
                self.unknown = self.unknown or f"an {row.kind}"
                continue
            kind = row.kind
            amounts = (1, row.payload_bytes, _elements(row))
            for name, amount in zip(
                (self._counts, self._bytes, self.elements), amounts, strict=True
            ):
                name[kind] = _added(name.get(kind, np.zeros(1, np.int64)), counts * amount)
            self._dtypes.setdefault(kind, {})[row.dtype] = None

    @property
    def totals(self) -> tuple[Totals, ...]:
        return tuple(
            Totals(
                kind=kind,
                count=int(self._counts[kind].max()),
                payload_bytes=int(self._bytes[kind].max()),
                dtypes=tuple(self._dtypes[kind]),
            )
            for kind in self._counts
        )

    @property
    def total_bytes(self) -> int:
        total = np.zeros(1, np.int64)
        for each in self._bytes.values():
            total = _added(total, each)
        return int(total.max())

    def gap(self, kind: str, other: _Sum) -> Counts:
        """Elements of a kind that the other has too few of."""
        zero = np.zeros(1, np.int64)
        return self.elements.get(kind, zero) - other.elements.get(kind, zero)

    def add(self, kind: str, elements: Counts) -> None:
        self.elements[kind] = _added(self.elements.get(kind, np.zeros(1, np.int64)), elements)

    def bytes_per_element(self, kind: str) -> float:
        elements = int(self.elements[kind].sum()) if kind in self.elements else 0
        return int(self._bytes[kind].sum()) / elements if elements else 4.0


def _counts(row: Any) -> Counts | None:
    on_each = getattr(row, "device_counts", None)
    if on_each is not None:
        return np.array(on_each, np.int64)
    return None if row.count is None else np.array([row.count], np.int64)


def _elements(row: Any) -> int:
    buffers = getattr(row, "buffers", None) or (row,)
    return sum(b.payload_bytes * 8 // DTYPE_BITS.get(b.dtype, 8) for b in buffers)


def _added(a: Counts, b: Counts) -> Counts:
    total: Counts = a + b  # [1] and [devices] broadcast
    return total


# --- which kind became which -----------------------------------------------------------------

_USUAL = (
    ("reduce-scatter", "all-reduce"),
    ("all-gather", "all-reduce"),
    ("all-to-all", "all-gather"),
    ("ragged-all-to-all", "all-to-all"),
)


def _matched(
    want: Mapping[str, Counts], have: Mapping[str, Counts]
) -> tuple[list[tuple[str, str, Counts]], dict[str, Counts], dict[str, Counts]]:
    """(was, now, elements) of what changed its kind; what is missing then, and what is too much."""
    zero = np.zeros(1, np.int64)
    gap = {kind: want.get(kind, zero) - have.get(kind, zero) for kind in {**want, **have}}
    found: list[tuple[str, str, Counts]] = []

    def move(was: str, now: str, elements: Counts) -> None:
        found.append((was, now, elements))
        gap[was] = gap[was] - elements
        gap[now] = gap[now] + elements

    both = ("reduce-scatter", "all-gather")
    if "all-reduce" in gap and all(kind in gap for kind in both):
        # An all-reduce in two halves: its elements appear in both.
        halves = np.minimum(gap["all-reduce"], np.minimum(-gap[both[0]], -gap[both[1]])).clip(0)
        if halves.any():
            move("all-reduce", "reduce-scatter", halves)
            gap["all-gather"] = gap["all-gather"] + halves
            found[-1] = ("all-reduce", "reduce-scatter + all-gather", halves)
    others = [(was, now) for was in gap for now in gap if (was, now) not in _USUAL]
    for was, now in (*_USUAL, *others):
        if was != now and was in gap and now in gap:
            elements = np.minimum(gap[was], -gap[now]).clip(0)
            if elements.any():
                move(was, now, elements)
    missing = {kind: it.clip(0) for kind, it in gap.items() if (it > 0).any()}
    extra = {kind: (-it).clip(0) for kind, it in gap.items() if (it < 0).any()}
    return found, missing, extra


def _change(was: str, now: str, elements: Counts, each: float, group: int) -> Change:
    payload = round(int(elements.max()) * each)
    after = sum(wire_bytes(kind, payload, group) for kind in now.split(" + "))
    return Change(
        was=was,
        now=now,
        payload_bytes=payload,
        extra_wire_bytes=after - wire_bytes(was, payload, group),
    )


def _doubled(found: Iterable[tuple[str, str, Counts]], want: _Sum) -> int:
    """Payload that stands in the compiled program twice, as both halves of an all-reduce."""
    return -sum(
        round(int(elements.max()) * want.bytes_per_element(was))
        for was, now, elements in found
        if "+" in now
    )


def _in_asked_bytes(want: _Sum, missing: Mapping[str, Counts], extra: Mapping[str, Counts]) -> int:
    total = 0.0
    for rows, sign in ((extra, 1), (missing, -1)):
        for kind, elements in rows.items():
            total += sign * int(elements.max()) * want.bytes_per_element(kind)
    return round(total)


def _reason(
    missing: Mapping[str, Counts],
    extra: Mapping[str, Counts],
    asked: Sequence[Any],
) -> str:
    """Why elements differ, in words; "" where they do not."""
    parts = []
    for rows, word in ((missing, "missing"), (extra, "more")):
        for kind, elements in rows.items():
            n = int(elements.max())
            why = ""
            if word == "missing" and _is_moved_out(n, [row for row in asked if row.kind == kind]):
                why = ", just those of trips of a loop: it runs once, outside"
            if kind == "collective-permute" and not any(row.kind == kind for row in asked):
                why = ", none of them asked for: the compiler's own, beside scatters and gathers"
            parts.append(f"{n:,} elements of {kind} {word}{why}")
    return "; ".join(parts)


_MOST_SUMS = 100_000


def _is_moved_out(missing: int, asked: Sequence[Any]) -> bool:
    """Whether some of these, run outside of inner loops, would leave out so many elements."""
    reachable = {0}
    for row in asked:
        loops, each = getattr(row, "loops", None) or (), _elements(row)
        savings = {
            0,
            *(each * (math.prod(loops) - math.prod(loops[:n])) for n in range(len(loops))),
        }
        reachable = {a + b for a in reachable for b in savings if a + b <= missing}
        if len(reachable) > _MOST_SUMS:
            return False
    return missing in reachable


def _json(row: OverAxes) -> dict[str, Any]:
    def totals(rows: Sequence[Totals]) -> list[dict[str, Any]]:
        return [{**vars(it), "dtypes": list(it.dtypes)} for it in rows]

    return {
        "axes": list(row.axes),
        "asked": totals(row.asked),
        "compiled": totals(row.compiled),
        "changes": [dict(vars(change)) for change in row.changes],
        "payload_bytes": row.payload_bytes,
        "normalised_bytes": row.normalised_bytes,
        "narrowed_bytes": row.narrowed_bytes,
        "agrees": row.agrees,
        "reason": row.reason,
    }
