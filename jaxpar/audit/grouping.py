"""Sums over the collectives of an audit: by axis, kind, phase, scope, source or layer.

A count that is not known makes a sum a lower bound (`Bounds`), never a smaller number that looks
exact. Budgets and diffs add up with the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.result import Audit, Buffer, Collective
from jaxpar.audit.scope import MERGED
from jaxpar.errors import AuditError, require_choice

Key = TypeVar("Key", bound=Hashable)

MAX_LAYERS_NAMED = 3
"""Layers that an operation merged from several is named after; with more, their number is told."""

NO_LAYER = "no layer"

_LAYER_WORD = r"(?:[a-z0-9_]*(?:layer|block)s?|h)"
_INDEXED = re.compile(rf"{_LAYER_WORD}[._-]?\[?\d+\]?", re.IGNORECASE)
_NAMED = re.compile(_LAYER_WORD, re.IGNORECASE)
_LOOPED = re.compile(r"layers?|blocks?", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A number that is at least `low` and at most `high` (None: no bound is known)."""

    low: int
    high: int | None

    @property
    def exact(self) -> int | None:
        return self.low if self.low == self.high else None

    def __add__(self, other: Bounds) -> Bounds:
        known = self.high is not None and other.high is not None
        high = (self.high or 0) + (other.high or 0) if known else None
        return Bounds(low=self.low + other.low, high=high)

    def times(self, factor: int) -> Bounds:
        """Of something that takes `factor` each time; nothing stays nothing."""
        high = 0 if factor == 0 else None if self.high is None else self.high * factor
        return Bounds(low=self.low * factor, high=high)

    def to_json(self, name: str) -> dict[str, int | None]:
        """`name` (None unless exact), `name_min`, `name_max`."""
        return {name: self.exact, f"{name}_min": self.low, f"{name}_max": self.high}


ZERO = Bounds(low=0, high=0)


@dataclass(frozen=True, kw_only=True)
class Group:
    """What a step spends on the collectives that share `key`; bytes are those of all executions.

    `wire_share` is the part of all bytes on the wire, None where some count is not known.
    `exposed_fraction` is the part of the group's own bytes on the wire that no computation hides,
    None where that is not known of all of them.
    """

    key: str
    num_operations: int
    count: Bounds
    payload_bytes: Bounds
    wire_bytes: Bounds
    wire_share: float | None
    exposed_fraction: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "num_operations": self.num_operations,
            **self.count.to_json("count"),
            **self.payload_bytes.to_json("payload_bytes"),
            **self.wire_bytes.to_json("wire_bytes"),
            "wire_share": self.wire_share,
            "exposed_fraction": self.exposed_fraction,
        }


@dataclass(frozen=True, kw_only=True)
class Portion:
    """The part of a collective that is asked about: all of it, or some of its buffers."""

    collective: Collective
    payload_bytes: int
    wire_bytes: int

    @property
    def count(self) -> Bounds:
        return executions(self.collective)


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Several portions together, over a step."""

    num_operations: int
    count: Bounds
    payload_bytes: Bounds
    wire_bytes: Bounds


def executions(found: Collective) -> Bounds:
    """How often an operation runs per step on a device."""
    if found.count is not None:
        return Bounds(low=found.count, high=found.count)
    return Bounds(low=found.count_min, high=found.count_max)


def axis_label(found: Collective) -> str:
    """The axes as tables print them: "data,tensor"; a sentence where the devices are no axes."""
    return ",".join(found.axes) if found.axes else found.axes_note or "?"


def whole(found: Collective) -> Portion:
    return Portion(collective=found, payload_bytes=found.payload_bytes, wire_bytes=found.wire_bytes)


def divided(found: Collective, key: Callable[[Buffer], Key]) -> dict[Key, Portion]:
    """A collective by a property of its buffers. The portions add up to it, to the byte."""
    payloads: dict[Key, int] = {}
    for buffer in found.buffers:
        payloads[key(buffer)] = payloads.get(key(buffer), 0) + buffer.payload_bytes
    total = sum(payloads.values())
    if not total:  # nothing to divide by: the first has it all
        own = Buffer(dtype=found.dtype, payload_bytes=0, phase=found.phase)
        return {next(iter(payloads), key(own)): whole(found)}
    portions: dict[Key, Portion] = {}
    before = 0
    for name, payload in payloads.items():
        after = before + payload
        portions[name] = Portion(
            collective=found,
            payload_bytes=_between(found.payload_bytes, before, after, total),
            wire_bytes=_between(found.wire_bytes, before, after, total),
        )
        before = after
    return portions


def _between(amount: int, start: int, end: int, total: int) -> int:
    return amount * end // total - amount * start // total


def add_up(portions: Iterable[Portion]) -> Sum:
    """Operations, executions and bytes of all of them over a step."""
    number, count, payload, wire = 0, ZERO, ZERO, ZERO
    for portion in portions:
        number += 1
        times = portion.count
        count += times
        payload += times.times(portion.payload_bytes)
        wire += times.times(portion.wire_bytes)
    return Sum(num_operations=number, count=count, payload_bytes=payload, wire_bytes=wire)


def exposure(portions: Sequence[Portion]) -> tuple[float, float] | None:
    """At least and at most this part of the bytes on the wire is exposed.

    None where nothing is sent, or where a count is not known: then nothing can be weighed.
    """
    weights = [(portion.count.times(portion.wire_bytes).exact, portion) for portion in portions]
    total = sum(weight for weight, _ in weights if weight is not None)
    if not total or any(weight is None for weight, _ in weights):
        return None
    low = high = 0.0
    for weight, portion in weights:
        fraction = portion.collective.exposed_fraction
        low += (weight or 0) * (0.0 if fraction is None else fraction)
        high += (weight or 0) * (1.0 if fraction is None else fraction)
    return min(low / total, 1.0), min(high / total, 1.0)


def grouped(audit: Audit, by: str) -> tuple[Group, ...]:
    """The audit's collectives summed by one of `GROUPINGS`, most bytes on the wire first.

    Layers come in their own order. By phase, an operation that was merged from several phases
    counts in each, and its bytes are divided. Raises AuditError for an unknown grouping.
    """
    require_choice(AuditError, "group by", by, GROUPINGS)
    members: dict[str, list[Portion]] = {}
    for found in audit.collectives:
        for key, portion in GROUPINGS[by](found).items():
            members.setdefault(key, []).append(portion)
    total = add_up(whole(found) for found in audit.collectives).wire_bytes.exact
    groups = [_group(key, portions, total) for key, portions in members.items()]
    if by == "layer":
        return tuple(sorted(groups, key=lambda group: _natural(group.key)))
    return tuple(sorted(groups, key=lambda group: (-group.wire_bytes.low, _natural(group.key))))


def _group(key: str, portions: list[Portion], total: int | None) -> Group:
    together = add_up(portions)
    exposed = exposure(portions)
    wire = together.wire_bytes.exact
    return Group(
        key=key,
        num_operations=together.num_operations,
        count=together.count,
        payload_bytes=together.payload_bytes,
        wire_bytes=together.wire_bytes,
        wire_share=wire / total if total and wire is not None else None,
        exposed_fraction=exposed[0] if exposed and exposed[0] == exposed[1] else None,
    )


def by_outer_axis(
    matrix: NDArray[np.int64], mesh: Mapping[str, int] | None
) -> tuple[list[str], NDArray[np.int64]] | None:
    """Bytes between devices, [n, n], added up along all but the outermost axis of the mesh.

    Gives the names of the k rows ("data=0", …) and the matrix [k, k], whose diagonal stays within
    a row's devices. None without a mesh that has more than one device and fits.
    """
    axis, k = next(((axis, k) for axis, k in (mesh or {}).items() if k > 1), ("", 1))
    n = len(matrix)
    if k == 1 or n % k:
        return None
    names = [f"{axis}={i}" for i in range(k)]
    return names, matrix.reshape(k, n // k, k, n // k).sum(axis=(1, 3))


def layer_of(scope: str) -> str:
    """The layer that a scope names, `NO_LAYER` if none.

    It is the outermost part of the scope that ends in "layer", "layers", "block", "blocks" or is
    "h", together with its number: `layers_3`, `decoder/block3`, `h.3`, `layers[3]`, or `layers/3`.
    Without a number, as in the body of a scan over layers, it is "layers (scan)". What an operation
    was merged from is joined by " + ".
    """
    layers = dict.fromkeys(_one_layer(part) for part in scope.split(MERGED))
    if len(layers) > MAX_LAYERS_NAMED:
        return f"{len(layers)} layers merged"
    return MERGED.join(layers)


def _one_layer(scope: str) -> str:
    words = scope.split("/")
    for at, word in enumerate(words):
        if _INDEXED.fullmatch(word):
            return "/".join(words[: at + 1])
        following = words[at + 1] if at + 1 < len(words) else ""
        if following.isdecimal() and _NAMED.fullmatch(word):
            return "/".join(words[: at + 2])
        if _LOOPED.fullmatch(word):
            return "/".join(words[: at + 1]) + " (scan)"
    return NO_LAYER


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sorts layers_2 before layers_10; numbers of any length, compared by length and digits."""
    parts = _NUMBER.split(text)
    return [(i % 2, len(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _by(name: Callable[[Collective], str]) -> Callable[[Collective], dict[str, Portion]]:
    return lambda found: {name(found): whole(found)}


GROUPINGS: Mapping[str, Callable[[Collective], dict[str, Portion]]] = MappingProxyType(
    {
        "axis": _by(axis_label),
        "kind": _by(lambda found: found.kind),
        "phase": lambda found: divided(found, lambda buffer: buffer.phase),
        "scope": _by(lambda found: found.scope or "no scope"),
        "source": _by(lambda found: found.source or "unknown source"),
        "layer": _by(lambda found: layer_of(found.scope)),
    }
)
"""How collectives can be grouped, and the portion of one that falls into each group."""
