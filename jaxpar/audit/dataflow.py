"""Where values come from and who uses them, across computations.

Both questions are walks of bounded length without recursion over the text's own graph; a walk that
gets too long, or that meets a computation called from several places, ends in "not known".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from jaxpar.audit.reader import Computation, Instruction, Module, Operand
from jaxpar.audit.shape import integer

MAX_STEPS = 200
"""Longest walk through values; XLA needs about ten."""

MAX_DEPTH = 16
"""Loops within loops that are looked through for a value that none of them changes."""

SAME_VALUE = frozenset({"copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier"})
"""Opcodes whose result is their first operand, element by element."""

Calls: TypeAlias = "tuple[tuple[Computation, Instruction], ...]"


class Place:
    """A value: a name in a computation, a path into its tuple, and the calls we came in by.

    Not to be changed. Slots and a cache by hand, since walks make hundreds of thousands of them.
    """

    __slots__ = ("_instruction", "calls", "computation", "operand")

    def __init__(
        self,
        computation: Computation,
        operand: Operand,
        calls: Calls = (),
        instruction: Instruction | None = None,
    ) -> None:
        self.computation = computation
        self.operand = operand
        self.calls = calls
        self._instruction = instruction

    @property
    def instruction(self) -> Instruction | None:
        """What makes the value; None where no line does."""
        if self._instruction is None:
            self._instruction = self.computation.get(self.operand.name)
        return self._instruction


class Dataflow:
    """Answers about one module; `callers` are those outside inert computations.

    `narrow`: whether the text has any 16-bit type.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in module.active:
            for found in computation.calling:
                # An asynchronous call is printed up to three times and runs where it starts.
                if not found.opcode.endswith(("-done", "-update")):
                    for _, name in found.called:
                        self.callers.setdefault(name, []).append((computation, found))
        self.narrow = "16[" in module.text
        self._invariant: dict[tuple[str, int], bool] = {}
        self._depth = 0

    def above(self, names: Iterable[str]) -> set[str]:
        """These computations, and whatever runs one of them."""
        above = set(names)
        todo = list(above)
        while todo:
            for computation, _ in self.callers.get(todo.pop(), []):
                if computation.name not in above:
                    above.add(computation.name)
                    todo.append(computation.name)
        return above

    def origin(
        self, place: Place, *, through: Collection[str] = SAME_VALUE, stop: str = ""
    ) -> Place | None:
        """Back to the instruction that makes this value, through tuples, calls and `through`.

        Ends at a parameter of the computation named `stop`, with what path of it is read. None
        when the way is not unique or too long.
        """
        for _ in range(MAX_STEPS):
            found = place.instruction
            if found is None:
                return None
            if found.opcode == "parameter":
                if not place.calls and place.computation.name == stop:
                    return place
                outside = self._outside(place, found)
                if outside is None:
                    return None
                place = outside
                continue
            step = self._inside(place, found, through)
            if step is None or step is place:
                return step
            place = step
        return None

    def invariant(self, body: Computation, index: int) -> bool:
        """Whether element `index` of a loop's state leaves `body` as it came in."""
        key = (body.name, index)
        root = body.root
        if key not in self._invariant:
            self._invariant[key] = False  # also the answer to anybody who asks in a circle
            if root is not None and self._depth < MAX_DEPTH:
                self._depth += 1
                start = Place(computation=body, operand=Operand(name=root.name, path=(index,)))
                end = self.origin(start, stop=body.name)
                self._depth -= 1
                self._invariant[key] = (
                    end is not None
                    and end.operand.path == (index,)
                    and end.instruction is not None
                    and end.instruction.opcode == "parameter"
                )
        return self._invariant[key]

    def _inside(self, place: Place, found: Instruction, through: Collection[str]) -> Place | None:
        """One step back within a computation, or into one; `place` itself where the way ends."""
        path = place.operand.path
        if found.opcode == "get-tuple-element" and found.operands:
            index = integer(found.attributes.get("index", ""), f"index of {found.name}")
            return _at(place, found.operands[0], (index, *path))
        if found.opcode == "tuple":
            if not path or path[0] >= len(found.operands):
                return place
            return _at(place, found.operands[path[0]], path[1:])
        if found.opcode in through and found.operands:
            return _at(place, found.operands[0], path)
        if found.opcode in ("fusion", "call") and len(found.called) == 1:
            callee = self.module.computations.get(found.called[0][1])
            root = None if callee is None else callee.root
            if callee is None or root is None:
                return None
            calls = (*place.calls, (place.computation, found))
            return Place(callee, Operand(root.name, path), calls, root)
        if found.opcode == "while" and path and found.operands:
            body = self.module.computations.get(dict(found.called).get("body", ""))
            if body is not None and self.invariant(body, path[0]):
                return _at(place, found.operands[0], path)
        return place

    def _outside(self, place: Place, parameter: Instruction) -> Place | None:
        """From a parameter to what the caller passes."""
        number = integer(parameter.operands_text, f"parameter {parameter.name}")
        path = place.operand.path
        if place.calls:
            computation, call = place.calls[-1]
            calls = place.calls[:-1]
        else:
            sites = self.callers.get(place.computation.name, [])
            if len(sites) != 1:
                return None
            (computation, call), calls = sites[0], ()
            if call.opcode == "while":
                body = self.module.computations.get(dict(call.called).get("body", ""))
                if body is None or not path or not self.invariant(body, path[0]):
                    return None
            elif call.opcode not in ("fusion", "call"):
                return None
        if number >= len(call.operands):
            return None
        operand = call.operands[number]
        if path:
            operand = Operand(operand.name, (*operand.path, *path))
        return Place(computation, operand, calls)


def _at(place: Place, operand: Operand, path: tuple[int, ...]) -> Place:
    """Another value where `place` is: element `path` of an operand."""
    if path:
        operand = Operand(operand.name, (*operand.path, *path))
    return Place(place.computation, operand, place.calls)
