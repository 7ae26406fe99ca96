"""What changed in the communication between two programs, or two compilations of one.

Order does not matter, nor how a backend merges operations: bytes are added up by kind, axes, phase
and dtype first, and where they agree, at most the number of operations differs ("merged", "split",
"regrouped"). Phases are what metadata tells, so bytes that only changed theirs ("phase") are no
difference either. What is left is paired with what it most likely was: the same kind on the same
axes in the same phase and scope, then with ever less in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.audit.grouping import ZERO, Bounds
from jaxpar.audit.result import Audit
from jaxpar.audit.scope import MERGED
from jaxpar.audit.signature import Entry, parts

REWRITES = ("merged", "split", "regrouped", "phase")
"""The same bytes in fewer operations, in more, in as many of other sizes, or in another phase."""

Key = Callable[[Entry], Hashable]
Sides = tuple[list[Entry], list[Entry]]

_FIELDS = {"kind": "kind", "axes": "axis", "phase": "phase", "dtype": "dtype", "count": "count"}
_JOINED = {"kind": "+", "axes": "; ", "phase": "+", "scope": MERGED, "dtype": "+"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """Some operations of one program: what they have in common, and what they add up to.

    Texts that differ among them are joined. `sizes` are the payloads of one execution.
    """

    kind: str
    axes: str
    phase: str
    scope: str
    dtype: str
    group_sizes: tuple[int, ...]
    sizes: tuple[int, ...]
    count: Bounds
    payload_bytes: Bounds
    wire_bytes: Bounds

    def to_json(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in _JOINED},
            "group_sizes": list(self.group_sizes),
            **self.count.to_json("count"),
            **self.payload_bytes.to_json("payload_bytes"),
            **self.wire_bytes.to_json("wire_bytes"),
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """Operations before and after; one of the two is None for what appeared or vanished.

    `what` is ("appeared",), ("vanished",), one of `REWRITES` (then `is_rewrite`: the same bytes go
    the same ways), or what differs, of "kind", "axis", "phase", "dtype", "count", "group size" and
    "bytes".
    """

    what: tuple[str, ...]
    before: Side | None
    after: Side | None
    is_rewrite: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": list(self.what), **_sides_json(self.before, self.after)}


@dataclass(frozen=True, kw_only=True)
class Total:
    """All operations of one kind over the same axes, before and after (None: there are none)."""

    kind: str
    axes: str
    before: Side | None
    after: Side | None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "axes": self.axes, **_sides_json(self.before, self.after)}


@dataclass(frozen=True, kw_only=True)
class Diff:
    """All changes, those that move most bytes first, and the totals by kind and axes."""

    changes: tuple[Change, ...]
    totals: tuple[Total, ...]

    @property
    def same(self) -> bool:
        """Whether the same bytes go the same ways: `REWRITES` are no difference."""
        return all(change.is_rewrite for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "changes": [change.to_json() for change in self.changes],
            "totals": [total.to_json() for total in self.totals],
        }


def diff(before: Audit, after: Audit) -> Diff:
    """What is different in `after`."""
    return compared(parts(before), parts(after))


def compared(before: Sequence[Entry], after: Sequence[Entry]) -> Diff:
    """The same for entries, such as those of two signatures."""
    sides: Sides = (list(before), list(after))
    changes: list[Change] = []
    for key in _EQUAL:
        sides = _without_equals(sides, key, changes)
    for key in _LIKELY:
        sides = _without_pairs(sides, key, changes)
    for old, new in _by_key(sides, lambda entry: (_cell(entry), entry.scope)).values():
        what = "vanished" if old else "appeared"
        changes.append(Change(what=(what,), before=_side(old), after=_side(new)))
    totals = [
        Total(kind=kind, axes=axes, before=_side(old), after=_side(new))
        for (kind, axes), (old, new) in _by_key((before, after), _way).items()
    ]
    return Diff(changes=tuple(sorted(changes, key=_importance)), totals=tuple(totals))


# --- what is equal ---------------------------------------------------------------------------


def _way(entry: Entry) -> tuple[str, str]:
    return entry.kind, entry.axes


def _cell(entry: Entry) -> Hashable:
    return entry.kind, entry.axes, entry.group_size, entry.dtype, entry.phase


def _amount(entry: Entry) -> Hashable:
    return entry.dtype, entry.payload_bytes, entry.count


_EQUAL: tuple[Key, ...] = (
    _cell,
    lambda entry: (entry.kind, entry.axes, entry.group_size, entry.dtype),
    lambda entry: (_cell(entry), entry.scope),
    lambda entry: (_cell(entry), _amount(entry)),
)
"""Within such groups bytes are compared; what is equal is not looked at again."""


def _without_equals(sides: Sides, key: Key, changes: list[Change]) -> Sides:
    """What is left when groups that move the same bytes are taken away; rewrites are noted."""
    left: Sides = ([], [])
    for old, new in _by_key(sides, key).values():
        if not old or not new or _bytes(old) != _bytes(new):
            left[0].extend(old)
            left[1].extend(new)
        elif what := _rewrite(old, new):
            change = Change(what=(what,), before=_side(old), after=_side(new), is_rewrite=True)
            changes.append(change)
    return left


def _bytes(entries: Sequence[Entry]) -> tuple[int, Counter[Hashable]]:
    """Payload per step where it is known, and each operation whose count is not."""
    known = sum(entry.payload_bytes * (entry.count.exact or 0) for entry in entries)
    return known, Counter(_amount(entry) for entry in entries if entry.count.exact is None)


def _rewrite(old: Sequence[Entry], new: Sequence[Entry]) -> str:
    """How the same bytes are sent differently; "" when they are not."""
    if {entry.phase for entry in old} != {entry.phase for entry in new}:
        return "phase"
    if _by_size(old) == _by_size(new):
        return "" if len({entry.phase for entry in old}) == 1 else "phase"
    was, now = (sum(entry.count.low for entry in entries) for entries in (old, new))
    return "merged" if now < was else "split" if now > was else "regrouped"


def _by_size(entries: Iterable[Entry]) -> Counter[int]:
    """Executions of each size, where they are known: two that run once are one that runs twice."""
    counts: Counter[int] = Counter()
    for entry in entries:
        counts[entry.payload_bytes] += entry.count.exact or 0
    return counts


# --- what it was ------------------------------------------------------------------------------

_LIKELY: tuple[Key, ...] = (
    lambda entry: (entry.kind, entry.axes, entry.phase, entry.scope),
    lambda entry: (entry.kind, entry.phase, entry.scope, _amount(entry)),
    lambda entry: (entry.kind, entry.axes, entry.phase),
    lambda entry: (entry.kind, entry.axes, _amount(entry)),
    lambda entry: (entry.kind, entry.phase, entry.scope) if entry.scope else None,
    lambda entry: (entry.kind, _amount(entry)),
    lambda entry: (entry.axes, entry.phase, entry.scope) if entry.scope else None,
    lambda entry: (entry.kind, entry.axes),
)
"""What a pair has in common, ever less: other axes, other scopes, other kinds, other phases."""


def _without_pairs(sides: Sides, key: Key, changes: list[Change]) -> Sides:
    """What is left when all that `key` pairs has become a change; None pairs nothing."""
    left: Sides = ([], [])
    for common, (old, new) in _by_key(sides, key).items():
        if common is not None and old and new:
            changes.append(_change(old, new))
        else:
            left[0].extend(old)
            left[1].extend(new)
    return left


def _by_key(
    sides: tuple[Sequence[Entry], Sequence[Entry]], key: Callable[[Entry], Any]
) -> dict[Any, Sides]:
    groups: dict[Any, Sides] = {}
    for i, entries in enumerate(sides):
        for entry in entries:
            groups.setdefault(key(entry), ([], []))[i].append(entry)
    return groups


def _change(old: list[Entry], new: list[Entry]) -> Change:
    before, after = _side(old), _side(new)
    what = [word for key, word in _FIELDS.items() if getattr(before, key) != getattr(after, key)]
    if "axis" not in what and _of(old, "group_size") != _of(new, "group_size"):
        what.append("group size")
    if _bytes(old) != _bytes(new) and _of(old, "payload_bytes") != _of(new, "payload_bytes"):
        what.append("bytes")
    # Of several operations the executions may have moved from one size to another.
    return Change(what=tuple(what) or ("bytes",), before=before, after=after)


def _of(entries: Sequence[Entry], field: str) -> tuple[int, ...]:
    return tuple(sorted({getattr(entry, field) for entry in entries}))


def _side(entries: Sequence[Entry]) -> Side | None:
    if not entries:
        return None
    count, payload, wire = ZERO, ZERO, ZERO
    whole = [entry for entry in entries if not entry.is_part]
    for entry in whole or entries:
        count += entry.count
    for entry in entries:
        payload += entry.count.times(entry.payload_bytes)
        wire += entry.count.times(entry.wire_bytes)
    return Side(
        **{key: _text(entries, key, joint) for key, joint in _JOINED.items()},
        group_sizes=_of(entries, "group_size"),
        sizes=_of(entries, "payload_bytes"),
        count=count,
        payload_bytes=payload,
        wire_bytes=wire,
    )


def _text(entries: Sequence[Entry], field: str, joint: str) -> str:
    """What the entries have there, each once, in alphabetical order."""
    texts = {text for entry in entries for text in getattr(entry, field).split(joint)}
    return joint.join(sorted(text for text in texts if text))


def _importance(change: Change) -> tuple[bool, int, str]:
    """Rewrites last; then by how many more or fewer bytes are sent, then by what moved."""
    old, new = (
        side.wire_bytes.low if side is not None else 0 for side in (change.before, change.after)
    )
    return change.is_rewrite, -abs(new - old) or -max(old, new), " ".join(change.what)


def _sides_json(before: Side | None, after: Side | None) -> dict[str, Any]:
    sides = {"before": before, "after": after}
    return {key: None if side is None else side.to_json() for key, side in sides.items()}
