"""How often each computation of a module runs per step, on one device.

The entry runs once; calls, fusions and asynchronous starts run what they call as often as they run
themselves; a loop multiplies; a branch may or may not be taken. Functions that are applied to
elements (the `to_apply` of a reduction, comparators) run an unknown number of times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.dataflow import Dataflow, Place
from jaxpar.audit.reader import Computation, Instruction, Module, Operand
from jaxpar.errors import AuditError

MAX_COUNT = 10**15
"""Larger counts are refused: no step runs anything so often, and numbers stay short."""

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d{1,18})"?')
_INTEGER = re.compile(r"-?\d{1,18}")
_SAME_NUMBER = frozenset(
    {"copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier", "convert"}
)
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True, kw_only=True)
class Count:
    """Executions: at least `low`, at most `high` (None: no bound is known)."""

    low: int
    high: int | None

    @property
    def exact(self) -> int | None:
        return self.low if self.low == self.high else None

    def __add__(self, other: Count) -> Count:
        both = self.high is not None and other.high is not None
        high = (self.high or 0) + (other.high or 0) if both else None
        return _checked(self.low + other.low, high)

    def __mul__(self, other: Count) -> Count:
        if self.high == 0 or other.high == 0:
            return NEVER
        both = self.high is not None and other.high is not None
        high = (self.high or 0) * (other.high or 0) if both else None
        return _checked(self.low * other.low, high)


NEVER = Count(low=0, high=0)
ONCE = Count(low=1, high=1)
ANY = Count(low=0, high=None)


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """A loop or conditional on the way to communication that data decides; `reason` says how."""

    instruction: Instruction
    reason: str


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The answer for a module.

    `counts` holds every computation that can run and is not inert; `unknown_loops` the loops whose
    number of trips the text does not tell; `missing` the computations that are called and not in
    the text; `waits` the computations that run inside an asynchronous start.
    `device_counts` are the executions on each device, [num_devices], of computations that do not
    run equally often on all of them; `counts` then holds the least and the most.
    """

    counts: Mapping[str, Count]
    unknown_loops: tuple[Instruction, ...]
    missing: tuple[str, ...]
    waits: frozenset[str]
    undecided: tuple[Undecided, ...] = ()
    device_counts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


def execution(module: Module, flow: Dataflow) -> Execution:
    """Counts for every computation. AuditError for computations that call themselves.

    Without an ENTRY, whatever nobody calls is taken to run once (and the module has a problem).
    """
    called = flow.callers.keys()
    roots = [found.name for found in module.active if found.name not in called]
    if module.entry is not None:
        roots = [module.entry.name]
    counts = dict.fromkeys(roots, ONCE)
    unknown: list[Instruction] = []
    missing: dict[str, None] = {}
    waits: set[str] = set()
    for computation in callers_first(module, roots):
        count = counts.get(computation.name, NEVER)
        for found in computation.calling:
            for name, times in calls_of(found, computation, flow, unknown):
                if name not in module.computations:
                    missing[name] = None
                    continue
                if module.computations[name].inert:
                    continue
                counts[name] = counts.get(name, NEVER) + count * times
                if found.opcode.endswith("-start") or computation.name in waits:
                    waits.add(name)
    return Execution(
        counts=counts,
        unknown_loops=tuple(unknown),
        missing=tuple(missing),
        waits=frozenset(waits),
    )


def trip_count(loop: Instruction, computation: Computation, flow: Dataflow) -> int | None:
    """Trips of a `while` in `computation`: as XLA prints them, else deduced from the condition.

    Deduced when the condition compares a counter with a constant, and the counter starts at a
    constant and changes by a constant. None when that is not so.
    """
    printed = printed_trips(loop)
    return deduced_trips(loop, computation, flow) if printed is None else printed


def printed_trips(loop: Instruction) -> int | None:
    """Trips of a `while` as XLA prints them, if it does."""
    known = _KNOWN.search(loop.attributes.get("backend_config", ""))
    return int(known[1]) if known else None


def deduced_trips(loop: Instruction, computation: Computation, flow: Dataflow) -> int | None:
    """Trips of a `while` by its condition, whatever is printed."""
    called = dict(loop.called)
    condition = flow.module.computations.get(called.get("condition", ""))
    body = flow.module.computations.get(called.get("body", ""))
    if condition is None or body is None or condition.root is None or not loop.operands:
        return None
    start = Place(computation=condition, operand=Operand(name=condition.root.name))
    test = flow.origin(start, through=_SAME_NUMBER, stop=condition.name)
    if test is None or test.instruction is None or test.instruction.opcode != "compare":
        return None
    loop_place = Place(computation=computation, operand=loop.operands[0])
    left, right = (
        _counter_or_number(test, number, condition, body, loop_place, flow) for number in (0, 1)
    )
    direction = test.instruction.attributes.get("direction", "")
    if isinstance(left, int) and isinstance(right, _Counter):
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    if not isinstance(left, _Counter) or not isinstance(right, int):
        return None
    first = _number(loop_place, left.path, flow)
    step = _step(body, left.path, loop_place, flow)
    if first is None or step is None:
        return None
    return _trips(first, right, step, direction)


@dataclass(frozen=True, kw_only=True)
class _Counter:
    """An element of the loop's state that the body changes."""

    path: tuple[int, ...]


def _trips(first: int, bound: int, step: int, direction: str) -> int | None:
    """How often a counter passes a test; None for a loop that would not end."""
    distance = bound - first
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if direction == "NE":
        ends = step != 0 and distance % step == 0 and distance // step >= 0
        return distance // step if ends else None
    if direction not in ("LT", "LE", "GT", "GE"):
        return None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _counter_or_number(
    place: Place,
    number: int,
    inner: Computation,
    body: Computation,
    loop: Place,
    flow: Dataflow,
) -> _Counter | int | None:
    """Operand `number` of the instruction at `place`: part of the loop's state, or a number."""
    found = place.instruction
    if found is None or number >= len(found.operands):
        return None
    start = Place(computation=place.computation, operand=found.operands[number], calls=place.calls)
    end = flow.origin(start, through=_SAME_NUMBER, stop=inner.name)
    if end is None or end.instruction is None:
        return None
    if end.instruction.opcode == "parameter":
        path = end.operand.path
        if len(path) <= 1 and flow.invariant(body, path[0] if path else 0):
            return _number(loop, path, flow)
        return _Counter(path=path)
    return _literal(end.instruction)


def _step(body: Computation, path: tuple[int, ...], loop: Place, flow: Dataflow) -> int | None:
    """What one trip adds to an element of the loop's state, when it is a constant."""
    if body.root is None:
        return None
    start = Place(computation=body, operand=Operand(name=body.root.name, path=path))
    end = flow.origin(start, through=_SAME_NUMBER, stop=body.name)
    if end is None or end.instruction is None:
        return None
    opcode = end.instruction.opcode
    left, right = (_counter_or_number(end, number, body, body, loop, flow) for number in (0, 1))
    if opcode == "add" and isinstance(left, int):
        left, right = right, left
    if left != _Counter(path=path) or not isinstance(right, int):
        return None
    return {"add": right, "subtract": -right}.get(opcode)


def _number(loop: Place, path: tuple[int, ...], flow: Dataflow) -> int | None:
    """The constant with which an element of the loop's state starts."""
    operand = Operand(name=loop.operand.name, path=(*loop.operand.path, *path))
    start = Place(computation=loop.computation, operand=operand)
    end = flow.origin(start, through=_SAME_NUMBER)
    return _literal(end.instruction) if end is not None and end.instruction is not None else None


def _literal(found: Instruction) -> int | None:
    text = found.operands_text.strip()
    integral = found.type_text[:1] in ("s", "u") and "[]" in found.type_text
    if found.opcode == "constant" and integral and _INTEGER.fullmatch(text):
        return int(text)
    return None


def calls_of(
    found: Instruction, computation: Computation, flow: Dataflow, unknown: list[Instruction]
) -> Iterator[tuple[str, Count]]:
    """(computation, how often per execution of `found`) for everything `found` runs.

    `unknown` grows by `found` when it is a loop whose trips the text does not tell.
    """
    if found.opcode.endswith(("-done", "-update")):
        return  # started once, printed up to three times
    if found.opcode == "while":
        trips = trip_count(found, computation, flow)
        if trips is None:
            unknown.append(found)
        times = ANY if trips is None else Count(low=trips, high=trips)
        for key, name in found.called:
            yield name, times + ONCE if key == "condition" else times
    elif found.opcode == "conditional":
        branches = [name for _, name in found.called]
        for name in dict.fromkeys(branches):
            yield name, Count(low=int(branches.count(name) == len(branches)), high=1)
    elif found.opcode in ("call", "fusion") or found.opcode.endswith("-start"):
        for _, name in found.called:
            yield name, ONCE
    else:
        for _, name in found.called:
            yield name, ANY


def callers_first(module: Module, roots: list[str]) -> list[Computation]:
    """What can be reached, each after everything that calls it. AuditError for a cycle."""
    finished: list[Computation] = []
    done: dict[str, bool] = {}  # False while its callees are being visited
    todo: list[tuple[Computation, Iterator[str]]] = []

    def enter(name: str) -> None:
        computation = module.computations[name]
        done[name] = False
        todo.append((computation, _callees(computation)))

    for root in roots:
        if root not in done:
            enter(root)
        while todo:
            computation, callees = todo[-1]
            callee = next(callees, None)
            if callee is None:
                todo.pop()
                done[computation.name] = True
                finished.append(computation)
            elif callee not in module.computations or module.computations[callee].inert:
                continue
            elif callee not in done:
                enter(callee)
            elif done.get(callee) is False:
                raise AuditError(
                    f"Computation {callee!r} calls itself, which no HLO program does. "
                    "The text is damaged; print it again with compiled.as_text()."
                )
    return finished[::-1]


def _callees(computation: Computation) -> Iterator[str]:
    return (name for found in computation.calling for _, name in found.called)


def _checked(low: int, high: int | None) -> Count:
    if low > MAX_COUNT or (high is not None and high > MAX_COUNT):
        raise AuditError(
            f"A computation would run more than {MAX_COUNT} times per step. No program does; "
            "check the trip counts in the text."
        )
    return Count(low=low, high=high)
