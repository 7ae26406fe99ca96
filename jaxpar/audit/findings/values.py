"""What a value is made of: which collective makes it, and whether all of it comes from somewhere.

Walks backward, bounded, without recursion; what they cannot decide is "no" or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import numpy as np

from jaxpar.audit.dataflow import SAME_VALUE, Place
from jaxpar.audit.groups import Ids
from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.shape import Array

Key: TypeAlias = tuple[str, str, tuple[int, ...]]

MAX_VALUES = 48
"""Values that are looked at to find out what another is made of."""

ELEMENTWISE = frozenset(
    {"abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert"}
    | {"cosine", "divide", "erf", "exponential", "exponential-minus-one", "floor", "imag"}
    | {"is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate"}
    | {"not", "or", "popcnt", "power", "real", "reduce-precision", "remainder"}
    | {"round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left"}
    | {"shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan"}
    | {"tanh", "xor"}
)
"""Opcodes that make element i of the result of elements i of the operands."""

REARRANGED = SAME_VALUE | {"convert", "transpose"}
"""Opcodes whose result holds the same elements, in another order or type."""

CONSTANTS = frozenset({"constant", "iota"})

PURE = ELEMENTWISE | REARRANGED | {"broadcast", "slice", "reduce", "dot", "concatenate", "pad"}
"""Opcodes whose result is decided by their operands, whatever device runs them."""

_DECIDED = PURE | {"reduce-window"}
_SAME_FOR_ALL = frozenset({"all-gather", "all-reduce"})
_DONE = ("-done", "-update")


class Producers:
    """Which collective makes a value; worked out once for all values of a module."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        entry = reading.module.entry
        self._entry = entry.name if entry is not None else ""
        self._made: dict[tuple[str, str], Site] = {}
        self._wrapped: dict[tuple[str, str], Site | None] = {}
        for site in reading.sites:
            self._made[site.computation.name, site.instruction.name] = site
            home, call = standing(site)
            if call is not site.instruction:
                key = (home.name, call.name)
                self._wrapped[key] = None if key in self._wrapped else site

    def end(self, place: Place, *, through: Collection[str] = SAME_VALUE) -> Place | None:
        """Where a value comes from, back to the arguments of the program; None if not known.

        What a loop changes comes from the state of that loop: then the parameter of its body.
        """
        flow = self.reading.flow
        return flow.origin(place, through=through, stop=self._entry) or flow.origin(
            place, through=through, stop=place.computation.name
        )

    def of(
        self, place: Place, *, through: Collection[str] = SAME_VALUE
    ) -> tuple[Site, tuple[int, ...]] | None:
        """The collective whose result a value is, and which element of the result."""
        end = self.end(place, through=through)
        return None if end is None else self.at(end)

    def at(self, end: Place) -> tuple[Site, tuple[int, ...]] | None:
        """The same for a value that was followed back already."""
        for home, call in end.calls:  # a fusion that is one collective as a whole
            site = self._wrapped.get((home.name, call.name))
            if site is not None:
                return site, end.operand.path
        made = end.instruction
        for _ in range(2):  # from done over update to start
            if made is not None and made.opcode.endswith(_DONE) and made.operands:
                made = end.computation.get(made.operands[0].name)
        if made is None:
            return None
        key = (end.computation.name, made.name)
        site = self._made.get(key) or self._wrapped.get(key)
        return None if site is None else (site, end.operand.path)

    def made_from(self, place: Place, decide: Callable[[Place], bool | None]) -> bool:
        """Whether `decide` says True to everything that a value is made of.

        It is asked about each value on the way back and answers True or False, or None to be asked
        about the operands of that instruction instead.
        """
        todo = deque([place])  # nearest first: what says no is seldom far
        seen: set[Key] = set()
        while todo:
            end = self.end(todo.popleft())
            if end is None or end.instruction is None:
                return False
            key = value_key(end)
            if key in seen:
                continue
            seen.add(key)
            verdict = decide(end)
            if verdict is False or len(seen) > MAX_VALUES:
                return False
            if verdict is None:
                if not end.instruction.operands:
                    return False
                todo += operand_places(end.instruction, end)
        return True


def operand_places(found: Instruction, at: Place) -> list[Place]:
    """The operands of `found`, which stands where `at` is, as values to follow further."""
    operands = found.operands[: MAX_VALUES + 1]
    return [Place(computation=at.computation, operand=it, calls=at.calls) for it in operands]


def value_key(end: Place) -> Key:
    """What makes a value that was followed back the same as another, within one module."""
    home, operand = end.computation.name, end.operand
    if end.calls:
        home = "/".join([*(call.name for _, call in end.calls), home])
    return home, operand.name, operand.path


class Groups:
    """Compares the device groups of collectives, each pair of groups once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._known: dict[tuple[bytes, ...], int] = {}
        self._labels: dict[int, dict[int, int]] = {}
        self._within: dict[tuple[int, int], bool] = {}
        self._parallel: dict[tuple[int, int], bool] = {}
        self._kept: list[object] = []  # so that no id is used twice

    def number(self, site: Site) -> int:
        """The same number for the same groups."""
        groups = site.collective.groups
        if id(groups) not in self._numbers:
            text = tuple(np.asarray(group).tobytes() for group in groups)
            self._numbers[id(groups)] = self._known.setdefault(text, len(self._known))
            self._kept.append(groups)
        return self._numbers[id(groups)]

    def within(self, inner: Site, outer: Site) -> bool:
        """Whether each group of `inner` is part of a group of `outer`."""
        key = (self.number(inner), self.number(outer))
        if key not in self._within:
            if key[1] not in self._labels:
                self._labels[key[1]] = _labels(outer.collective.groups)
            labels = self._labels[key[1]]
            self._within[key] = all(
                len({labels.get(device, -1 - device) for device in np.asarray(group).tolist()}) == 1
                for group in inner.collective.groups
            )
        return self._within[key]

    def parallel(self, site: Site, other: Site) -> bool:
        """Whether those who share a group of `site` meet the same groups of it in `other`.

        So it is for two axes of a mesh: a gather along one keeps what is the same along the other.
        """
        key = (self.number(site), self.number(other))
        if key not in self._parallel:
            self._parallel[key] = _parallel(site.collective.groups, other.collective.groups)
        return self._parallel[key]


def _parallel(groups: Iterable[Ids], others: Iterable[Ids]) -> bool:
    labels = _labels(groups)
    met: dict[int, tuple[int, ...]] = {}
    for other in others:
        row = tuple(labels.get(device, -1 - device) for device in np.asarray(other).tolist())
        if any(met.setdefault(label, row) != row for label in set(row)):
            return False
    return True


def _labels(groups: Iterable[Ids]) -> dict[int, int]:
    return {
        device: number
        for number, group in enumerate(groups)
        for device in np.asarray(group).tolist()
    }


def same_within(producers: Producers, groups: Groups, site: Site, place: Place) -> bool:
    """Whether a value is known to be the same on all devices of each group of `site`.

    Not known of arguments of the program, except for numbers and what the text calls replicated.
    """

    def decide(end: Place) -> bool | None:
        made = producers.at(end)
        if made is not None:
            if made[0].collective.kind not in _SAME_FOR_ALL:
                return False
            if groups.within(site, made[0]):
                return True
            return None if groups.parallel(site, made[0]) else False  # as long as its operand is
        found = end.instruction
        if found is None or found.opcode == "parameter":
            return found is not None and _is_on_all(found)
        return True if found.opcode in CONSTANTS else (None if found.opcode in _DECIDED else False)

    return producers.made_from(place, decide)


def _is_on_all(argument: Instruction) -> bool:
    if argument.attributes.get("sharding", "") == "{replicated}":
        return True
    return isinstance(argument.shape, Array) and not argument.shape.dims


def standing(site: Site) -> tuple[Computation, Instruction]:
    """Where a collective stands among other work: itself, or what the backend wrapped it in."""
    call, home = site.caller, site.caller_home
    if call is not None and home is not None and is_wrapper(call):
        return home, call
    return site.computation, site.instruction


def is_wrapper(call: Instruction) -> bool:
    """Whether a call stands for the collective that it runs."""
    return call.opcode == "fusion" or call.opcode.endswith("-start")


def result_paths(site: Site) -> list[tuple[int, ...]]:
    """The results of a collective, one for each operand."""
    number = len(site.instruction.operands)
    return [()] if number == 1 else [(index,) for index in range(number)]


def operand_bytes(site: Site, number: int) -> int:
    """Wire bytes of one execution for one of the operands."""
    collective = site.collective
    if collective.parts == 1 or number >= collective.parts or not collective.payload_bytes:
        return collective.wire_bytes
    part = collective.buffers[number].payload_bytes
    return collective.wire_bytes * part // collective.payload_bytes


def reducer(reading: Reading, site: Site) -> str:
    """What an all-reduce or reduce-scatter does with two elements: the opcode, "" for unknown."""
    called = dict(site.instruction.called).get("to_apply", "")
    applied = reading.module.computations.get(called)
    root = applied.root if applied is not None else None
    if root is not None and root.opcode == "convert" and root.operands and applied is not None:
        # A reducer that was promoted adds in float32 and rounds what it returns.
        root = applied.get(root.operands[0].name)
    return root.opcode if root is not None else ""
