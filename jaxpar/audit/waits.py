"""Where an asynchronous collective starts in the schedule, and which instruction waits for it.

The two are usually in one computation. In a pipelined loop the start goes round through the loop's
state, and the next trip waits for it; a peeled loop starts the first one before the loop. Walks
over values are bounded; what they do not find is said in words, never guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.shape import integer

MAX_STEPS = 200
"""Values that are looked at between a start and its done; XLA needs about ten."""

MAX_DEPTH = 16
"""Wrappers around one collective; XLA needs two."""

SAME, NEXT, INSIDE, AFTER = range(4)
"""Where the done is: with the start; in the next trip of their loop; in a loop after the start; or
only after the loop that starts it."""

_SAME_VALUE = ("opt-barrier", "copy", "bitcast")
_UNFINISHED = "no instruction that waits for it was found"
_LEFT = "what waits for it stands outside the loop that starts it"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A transfer begins at `start` and is waited for at `done`; `loop` is the loop INSIDE it is."""

    start: Instruction
    done: Instruction
    where: int
    loop: Instruction | None = None


@dataclass(frozen=True, kw_only=True)
class _Value:
    """The running operation, as `path` of a value; `start` is where its data entered."""

    computation: Computation
    name: str
    path: tuple[int, ...]
    start: Instruction
    where: int
    loop: Instruction | None = None


def place_of(reading: Reading, site: Site) -> tuple[Computation, Instruction]:
    """The computation whose schedule a collective is part of, and the instruction it is there.

    Outwards through fusions and asynchronous starts, as far as each has one caller.
    """
    home, found = site.computation, site.instruction
    for _ in range(MAX_DEPTH):
        callers = reading.flow.callers.get(home.name, [])
        if len(callers) != 1:
            break
        outer, caller = callers[0]
        wraps = caller.opcode == "fusion" or caller.opcode.endswith("-start")
        if not wraps and not (caller.opcode == "call" and home.name in reading.runs.waits):
            break
        home, found = outer, caller
    return home, found


class Waits:
    """Finds what waits, for the starts of one module."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._chained: dict[tuple[str, str], Instruction] | None = None

    def of(self, home: Computation, start: Instruction) -> Wait | str:
        """What waits for `start` in `home`, or why that is not known."""
        if start.opcode == "fusion":
            return self._of_chain(home, start)
        if not start.opcode.endswith("-start") and start.opcode not in ("send", "recv"):
            return _UNFINISHED
        found = min(self._waits(home, start), key=lambda wait: wait.where, default=None)
        if found is None:
            return _UNFINISHED
        return _LEFT if found.where == AFTER else found

    def _of_chain(self, home: Computation, start: Instruction) -> Wait | str:
        """TPU async collective fusion: start and done are fusions that share a chain_id."""
        chained = self._dones()
        for chain in self._chains(start):
            done = chained.get((home.name, chain))
            if done is not None:
                return Wait(start=start, done=done, where=SAME)
        return _UNFINISHED

    def _dones(self) -> dict[tuple[str, str], Instruction]:
        """The fusions that end a chain, by their computation and chain_id."""
        if self._chained is None:
            self._chained = {}
            reading = self._reading
            for inner, found in reading.module.find("AsyncCollectiveDone"):
                callers = reading.flow.callers.get(inner.name, [])
                if found.opcode == "custom-call" and len(callers) == 1:
                    home, caller = callers[0]
                    for chain in self._chains(caller):
                        self._chained[(home.name, chain)] = caller
        return self._chained

    def _chains(self, fusion: Instruction) -> Iterator[str]:
        for _, name in fusion.called:
            inner = self._reading.module.computations.get(name)
            for part in inner.instructions.values() if inner is not None else ():
                if chain := part.chain:
                    yield chain

    def _waits(self, home: Computation, start: Instruction) -> Iterator[Wait]:
        """Every -done that a start can be followed to, with where it is."""
        first = _Value(computation=home, name=start.name, path=(), start=start, where=SAME)
        todo = deque([first])
        seen = {(home.name, start.name, first.path)}
        while todo and len(seen) < MAX_STEPS:
            value = todo.popleft()
            for user in value.computation.users(value.name):
                if not value.path and user.opcode.endswith("-done"):
                    yield Wait(start=value.start, done=user, where=value.where, loop=value.loop)
            for step in self._steps(value):
                key = (step.computation.name, step.name, step.path)
                if key not in seen:
                    seen.add(key)
                    todo.append(step)

    def _steps(self, value: _Value) -> Iterator[_Value]:
        """Where a value goes within its computation, into a loop, round it, and out of it."""
        path = value.path
        for user in value.computation.users(value.name):
            if not path and user.opcode.endswith("-update"):
                # SparseCore: the start only loads the program, the update brings the data.
                begins = user if len(user.operands) > 1 else value.start
                yield replace(value, name=user.name, start=begins)
            elif user.opcode == "tuple":
                for index, operand in enumerate(user.operands):
                    if operand.name == value.name:
                        yield replace(value, name=user.name, path=(index, *path))
            elif user.opcode == "get-tuple-element":
                index = integer(user.attributes.get("index", ""), f"index of {user.name}")
                if path and path[0] == index:
                    yield replace(value, name=user.name, path=path[1:])
            elif user.opcode in _SAME_VALUE:
                yield replace(value, name=user.name)
            elif user.opcode == "while" and value.where == SAME:
                yield from self._into(user, value, INSIDE, user)
        root = value.computation.root
        if root is not None and root.name == value.name:
            yield from self._round(value)

    def _round(self, value: _Value) -> Iterator[_Value]:
        """From the state that a trip leaves to the next trip, and to what the loop gives."""
        callers = self._reading.flow.callers.get(value.computation.name, [])
        if len(callers) != 1:
            return
        outer, loop = callers[0]
        if loop.opcode != "while" or dict(loop.called).get("body") != value.computation.name:
            return
        left = replace(value, computation=outer, name=loop.name, loop=None)
        if value.where == SAME:
            yield from self._into(loop, value, NEXT, None)
            yield replace(left, where=AFTER)
        elif value.where == INSIDE:
            yield replace(left, where=SAME)  # it passed the whole loop by

    def _into(
        self, loop: Instruction, value: _Value, where: int, inside: Instruction | None
    ) -> Iterator[_Value]:
        """The same place of the loop's state, as its body sees it."""
        body = self._reading.module.computations.get(dict(loop.called).get("body", ""))
        state = body.parameters.get(0) if body is not None else None
        if body is not None and state is not None and value.path:
            yield replace(value, computation=body, name=state.name, where=where, loop=inside)
