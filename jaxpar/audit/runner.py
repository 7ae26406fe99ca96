"""Executes the plans of a module's control slice: who runs what, and how often.

Devices that do not agree are told apart by masks, [num_devices]: those that certainly run something
(`sure`), and those that may (`may`). The two differ only below a condition that could not be
evaluated. Costs are counted and limited, since a text may hold loops without end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.evaluate import absorbed
from jaxpar.audit.execution import MAX_COUNT, Undecided
from jaxpar.audit.plan import Call, Compute, Loop, Plan, Stop, Unknown, Value
from jaxpar.audit.reader import Instruction
from jaxpar.audit.values import Machine, Undecidable, called

MAX_COST = 70_000
"""Instructions that are evaluated, large arrays counting as several: less than a second."""

MAX_EVENTS = 10_000

MAX_EVENT_ENTRIES = 1 << 26
"""Entries of the masks of all events: 64 MiB."""

MAX_CALLS = 64
"""Computations that run inside each other."""

_ELEMENTS_PER_COST = 4096

Mask: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]
Closed: TypeAlias = Mapping[str, Sequence[tuple[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Event:
    """`computation` ran `times` times in a row on `devices`, a mask [num_devices]."""

    computation: str
    devices: Mask
    times: int


@dataclass(frozen=True)
class _Who:
    """The devices that run a computation, and in how many others it runs."""

    sure: Mask
    may: Mask
    depth: int

    def only(self, taken: Mask) -> _Who:
        return _Who(self.sure & taken, self.may & taken, self.depth)


class Runner:
    """One execution of the plans.

    `homes` communicate, and lie below the computations `above`. What the `closed` ones call is not
    executed but multiplied: `closed` tells how often. After `run`, `low` and `high` are the least
    and most executions per device (without limit for `unbounded` ones), and `undecided` what was.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        machine: Machine,
        *,
        homes: Collection[str],
        above: Collection[str],
        closed: Closed,
    ) -> None:
        self.low = {name: np.zeros(machine.num_devices, np.int64) for name in above}
        self.high = {name: np.zeros(machine.num_devices, np.int64) for name in above}
        self.unbounded: set[str] = set()
        self.events: list[Event] = []
        self.events_end: str | None = None
        self.undecided: dict[int, Undecided] = {}
        self._plans = plans
        self._module = machine.module
        self._homes = homes
        self._closed = closed
        self._everyone: Mask = np.ones(machine.num_devices, np.bool_)
        self._max_events = min(MAX_EVENTS, MAX_EVENT_ENTRIES // machine.num_devices)
        self._cost = 0
        self._mask_cost = machine.num_devices // _ELEMENTS_PER_COST

    def run(self, entry: str) -> None:
        """The program once, on every device. Stop when that costs too much."""
        self.everywhere(entry)
        for name, calls in self._closed.items():
            for callee, times in calls:
                if int(np.max(self.high[name])) * times > MAX_COUNT:
                    raise Stop(f"{callee} would run more than {MAX_COUNT} times")
                self.low[callee] += self.low[name] * times
                self.high[callee] += self.high[name] * times
        todo = list(self.unbounded)
        while todo:
            for found in self._module.computations[todo.pop()].calling:
                for _, name in found.called:
                    if name in self.low and name not in self.unbounded:
                        self.unbounded.add(name)
                        todo.append(name)

    def everywhere(self, name: str) -> list[Value] | None:
        """The values of one run of a computation without arguments, on every device."""
        with np.errstate(all="ignore"):
            return self._enter(name, [], _Who(self._everyone, self._everyone, 0))

    def _enter(self, name: str, given: list[tuple[int, Value]], who: _Who) -> list[Value] | None:
        """One run of a computation; its values, None when nobody wants any."""
        self._count(name, who, 1)
        plan = self._plans.get(name)
        if plan is None:
            return None
        if who.depth > MAX_CALLS:
            raise Stop(f"more than {MAX_CALLS} computations run inside each other")
        values = plan.template.copy()
        for slot, value in given:
            values[slot] = value
        who = _Who(who.sure, who.may, who.depth + 1)
        self._spend(1 + self._mask_cost)
        for step in plan.steps:
            if isinstance(step, Compute):
                values[step.output] = self._computed(step, values, who)
            elif isinstance(step, Loop):
                self._loop(step, values, who)
            elif step.found.opcode == "conditional":
                self._branch(step, values, who)
            else:
                self._call(step, values, who)
        return values

    def _computed(self, step: Compute, values: list[Value], who: _Who) -> Value:
        inputs = [values[slot] for slot in step.inputs]
        known = [None if isinstance(value, Unknown) else value for value in inputs]
        self._spend(1)
        for value in inputs:
            if isinstance(value, Unknown):
                answer = absorbed(step.found, known, who.may)
                return value if answer is None else answer
        try:
            result = step.function(*known)
        except Undecidable as why:
            return Unknown(reason=str(why))
        self._spend(result.size // _ELEMENTS_PER_COST)
        return result

    def _call(self, call: Call, values: list[Value], who: _Who) -> None:
        """What is called runs once; below opcodes that are not understood nobody knows."""
        found = call.found
        names = [name for _, name in found.called]
        if found.opcode not in ("call", "fusion") and not found.opcode.endswith("-start"):
            what = f"{called(found)}, whose opcode {found.opcode} is not evaluated"
            below = [name for name in names if name in self.low]
            self.unbounded.update(below)
            if below:
                self._undecided(found, f"how often {below[0]} runs depends on {what}")
            return
        for name, passes, returns in zip(names, call.passes, call.returns, strict=True):
            inner = self._enter(name, [(there, values[here]) for here, there in passes], who)
            for there, here in returns:
                if inner is not None:
                    values[here] = inner[there]

    def _branch(self, call: Call, values: list[Value], who: _Who) -> None:
        """Runs each branch on the devices that take it, and puts the results together."""
        names = [name for _, name in call.found.called]
        slots = {slot: values[slot] for returns in call.returns for _, slot in returns}
        index = Unknown(reason="nothing") if call.index is None else values[call.index]
        if isinstance(index, Unknown):
            self._either(call, index, names, values, who)
            values[:] = [index if n in slots else value for n, value in enumerate(values)]
            return
        branch = np.where(index, 0, 1) if index.dtype == np.bool_ else index
        branch = np.where((branch < 0) | (branch >= len(names)), len(names) - 1, branch)
        results: dict[int, Value] = {}
        for position in np.unique(branch[who.may] if len(branch) > 1 else branch).tolist():
            taken = branch == position
            given = [(there, values[here]) for here, there in call.passes[position]]
            inner = self._enter(names[position], given, who.only(taken)) or []
            back = {slot: inner[there] for there, slot in call.returns[position] if inner}
            for slot, nothing in slots.items():
                value = back.get(slot, nothing)
                results[slot] = _merged(taken, value, results[slot]) if slot in results else value
        for slot, value in results.items():
            values[slot] = value

    def _either(
        self, call: Call, why: Unknown, names: list[str], values: list[Value], who: _Who
    ) -> None:
        """Any of the branches may run."""
        sure = who.sure
        if len(set(names)) > 1:
            sure = np.zeros_like(sure)
            if any(name in self.low for name in names):
                self._undecided(
                    call.found, f"the branch of {called(call.found)} depends on {why.reason}"
                )
        for position, name in enumerate(names):
            if name not in names[:position]:
                passes = call.passes[position] if names.count(name) == 1 else []
                given = [(there, values[here]) for here, there in passes]
                self._enter(name, given, _Who(sure, who.may, who.depth))

    def _loop(self, loop: Loop, values: list[Value], who: _Who) -> None:
        """Trip after trip while some device goes on; devices that are done keep their state."""
        wanted = any(carried.output is not None for carried in loop.state)
        opens = loop.body in self.low and loop.body not in self._closed
        if loop.trips is not None:
            self._count(loop.condition, who, loop.trips + 1)
            if not wanted and not opens:
                self._count(loop.body, who, loop.trips)
                return
        state = [values[carried.first] for carried in loop.state]
        going, num_trips = who, 0
        while loop.trips is None or num_trips < loop.trips:
            self._spend(1 + self._mask_cost)
            if loop.trips is None:
                more = self._more(loop, state, going)
                if isinstance(more, Unknown):
                    self._endless(loop, more)
                    state = [more] * len(state)
                    break
                going = going.only(more)
                if not going.may.any():
                    break
            given = [
                (carried.body, value)
                for carried, value in zip(loop.state, state, strict=True)
                if carried.body is not None
            ]
            inner = self._enter(loop.body, given, going)
            after = [
                Unknown(reason=called(loop.found)) if inner is None else inner[carried.root]
                for carried in loop.state
            ]
            if going.may is not who.may and not np.array_equal(going.may, who.may):
                pairs = zip(after, state, strict=True)
                after = [_merged(going.may, new, old) for new, old in pairs]
            state = after
            num_trips += 1
        for carried, value in zip(loop.state, state, strict=True):
            if carried.output is not None:
                values[carried.output] = value

    def _more(self, loop: Loop, state: list[Value], who: _Who) -> Value:
        """What the condition says about this state; [1] or [devices]."""
        given = [
            (carried.test, value)
            for carried, value in zip(loop.state, state, strict=True)
            if carried.test is not None
        ]
        inner = self._enter(loop.condition, given, who)
        if inner is None or loop.more is None:
            return Unknown(reason=f"{loop.condition}, of which there is no text")
        return inner[loop.more]

    def _endless(self, loop: Loop, why: Unknown) -> None:
        """Nobody knows how often the loop goes on."""
        names = [name for name in (loop.condition, loop.body) if name in self.low]
        self.unbounded.update(names)
        if names:
            reason = f"how often {called(loop.found)} goes on depends on {why.reason}"
            self._undecided(loop.found, reason)

    def _undecided(self, found: Instruction, reason: str) -> None:
        self.undecided.setdefault(id(found), Undecided(instruction=found, reason=reason))
        self.events_end = self.events_end or reason

    def _count(self, name: str, who: _Who, times: int) -> None:
        if name not in self.low or times == 0:
            return
        if times > MAX_COUNT:
            raise Stop(f"{name} would run more than {MAX_COUNT} times")
        self.low[name] += who.sure.astype(np.int64) * times
        self.high[name] += who.may.astype(np.int64) * times
        if self.events_end is None:
            for home, each in self._inside(name, times):
                if len(self.events) >= self._max_events:
                    self.events_end = f"there are more than {self._max_events}"
                    return
                self.events.append(Event(computation=home, devices=who.may, times=each))

    def _inside(self, name: str, times: int) -> Iterator[tuple[str, int]]:
        """The communicating computations that a run of `name` runs without a question, in order."""
        todo = [(name, times)]
        while todo:
            self._spend(1)
            at, each = todo.pop()
            if at in self._homes:
                yield at, each
            calls = self._closed.get(at, ())
            todo += [(callee, each * more) for callee, more in reversed(calls) if more]

    def _spend(self, cost: int) -> None:
        self._cost += cost
        if self._cost > MAX_COST:
            raise Stop(f"its control takes more than {MAX_COST} instructions to evaluate")


def _merged(taken: Mask, new: Value, old: Value) -> Value:
    """`new` on the devices that are `taken`, `old` on the others."""
    if isinstance(new, Unknown) or isinstance(old, Unknown):
        return new if isinstance(new, Unknown) else old
    shape = (len(taken), *[1] * (new.ndim - 1))
    return np.where(taken.reshape(shape), new, old)
