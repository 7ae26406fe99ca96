"""The part of a module that decides loops and branches, cut out and prepared to be executed.

A backward slice: from the conditions of loops and the indices of branches back through tuples,
loop state, fusions and calls to constants and device ids. Values are followed one array at a time,
so a loop that carries tensors beside its counter costs its counter. Nothing is executed here; what
cannot be followed or evaluated becomes `Unknown` and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.evaluate import operation
from jaxpar.audit.exchange import EXCHANGES
from jaxpar.audit.execution import trip_count
from jaxpar.audit.moving import plain_layout
from jaxpar.audit.plan import (
    Call,
    Carried,
    Compute,
    Key,
    Loop,
    Passed,
    Path,
    Plan,
    Step,
    Stop,
    Unknown,
)
from jaxpar.audit.reader import Computation, Instruction, Module, Operand
from jaxpar.audit.shape import Array, Shape, integer
from jaxpar.audit.values import Machine, Operation, Undecidable, called
from jaxpar.errors import AuditError

MAX_WANTED = 50_000
"""Arrays that are followed, in all computations together."""

MAX_WORK = 1_000_000
"""Steps that finding and connecting them may take."""

MAX_PATH = 64

_SAME = frozenset({"copy", "opt-barrier", "add-dependency", "domain"})


class Slice:
    """Collects what is wanted, then turns it into plans.

    `open` are the computations in which something undecided leads to a computation of `above`,
    those that hold communication or run what does.
    """

    def __init__(self, flow: Dataflow, machine: Machine, above: set[str], open_: set[str]) -> None:
        self.flow = flow
        self.module: Module = flow.module
        self.machine = machine
        self.above = above
        self.open = open_
        self._wanted: dict[str, dict[Key, Key | Operation | Unknown | None]] = {}
        self._todo: list[tuple[Computation, Key]] = []
        self._known_trips: dict[tuple[str, str], int | None] = {}
        self._parameters: dict[str, dict[tuple[int, Path], None]] = {}
        self._sites: dict[str, dict[tuple[str, str], tuple[Computation, Instruction]]] = {}
        self._calls: dict[str, dict[str, Instruction]] = {}
        self._num_wanted = 0
        self._work = 0

    def plans(self) -> dict[str, Plan]:
        """A plan for each computation that has to be executed. Stop when there is too much."""
        for name in self.open:
            computation = self.module.computations[name]
            for found in computation.calling:
                if any(callee in self.above for _, callee in found.called):
                    self._control(computation, found)
        while self._todo:
            home, key = self._todo.pop()
            try:
                self._wanted[home.name][key] = self._trace(home, *key)
            except Undecidable as why:
                self._wanted[home.name][key] = Unknown(reason=str(why))
            except AuditError:
                reason = f"{key[0]} in {home.name}, which cannot be read"
                self._wanted[home.name][key] = Unknown(reason=reason)
        plans = {name: Plan() for name in {*self.open, *self._wanted, *self._calls}}
        for name, plan in plans.items():
            self._fill(self.module.computations[name], plan)
        for name, plan in plans.items():
            for step in plan.steps:
                if isinstance(step, Call):
                    self._bind(self.module.computations[name], plan, step, plans)
                elif isinstance(step, Loop):
                    self._bind_loop(self.module.computations[name], plan, step, plans)
        return plans

    def _trips(self, home: Computation, loop: Instruction) -> int | None:
        """Trips of a loop as printed or deduced; None where its condition is to be executed."""
        key = (home.name, loop.name)
        if key not in self._known_trips:
            trips = trip_count(loop, home, self.flow)
            tested = dict(loop.called).get("condition") in self.open
            self._known_trips[key] = None if tested else trips
        return self._known_trips[key]

    def _want(self, home: Computation, operand: Operand, path: Path = ()) -> Key:
        key = (operand.name, (*operand.path, *path))
        wanted = self._wanted.setdefault(home.name, {})
        if key not in wanted:
            self._num_wanted += 1
            if self._num_wanted > MAX_WANTED:
                raise Stop(f"control depends on more than {MAX_WANTED} values")
            if len(key[1]) > MAX_PATH:
                raise Stop(f"control depends on values in more than {MAX_PATH} nested tuples")
            wanted[key] = None
            self._todo.append((home, key))
        return key

    def want_root(self, home: Computation, path: Path) -> None:
        """Follows an array of what a computation returns, at `path` in its tuple."""
        if home.root is not None:
            self._want(home, Operand(name=home.root.name), path)

    def _control(self, home: Computation, found: Instruction) -> None:
        """`found` leads to communication: what decides how often."""
        if found.opcode.endswith(("-done", "-update")):
            return  # it ran where it started
        self._calls.setdefault(home.name, {})[found.name] = found
        if found.opcode == "conditional":
            if found.operands:
                self._want(home, found.operands[0])
            self._visit(home, found)
        elif found.opcode == "while":
            if any(name in self.open for _, name in found.called):
                self._visit(home, found)
            self._test(home, found)
        elif found.opcode in ("call", "fusion") or found.opcode.endswith("-start"):
            self._visit(home, found)

    def _test(self, home: Computation, loop: Instruction) -> None:
        """Wants the condition of a loop, unless its trips are known."""
        if self._trips(home, loop) is None:
            self._visit(home, loop)
            condition = self.module.computations.get(dict(loop.called).get("condition", ""))
            if condition is not None:
                self.want_root(condition, ())

    def _visit(self, home: Computation, found: Instruction) -> None:
        """Remembers who passes arguments to what `found` runs."""
        for _, name in found.called:
            sites = self._sites.setdefault(name, {})
            if (home.name, found.name) not in sites:
                sites[home.name, found.name] = (home, found)
                for number, path in list(self._parameters.get(name, ())):
                    self._feed(home, found, name, number, path)

    def _feed(
        self, home: Computation, found: Instruction, callee: str, number: int, path: Path
    ) -> None:
        """Wants, where `found` runs `callee`, what it passes as a parameter."""
        for operand in self._passed(found, callee, number):
            self._want(home, operand, path)
        if found.opcode == "while":
            body = self.module.computations.get(dict(found.called).get("body", ""))
            if body is not None:
                self.want_root(body, path)

    def _passed(self, found: Instruction, callee: str, number: int) -> Iterator[Operand]:
        self._spend(1 + len(found.called))
        for position, (_, name) in enumerate(found.called):
            if name == callee and (at := _operand_for(found, position, number)) is not None:
                yield at

    def _trace(self, home: Computation, name: str, path: Path) -> Key | Operation | Unknown | None:
        """What makes an array: another one, a function, or None for a parameter or a call."""
        found = home.get(name)
        if found is None:
            raise Undecidable(f"{name}, which no line of {home.name} makes")
        if home.problems or (home.root is not None and not home.root.is_root):
            raise Undecidable(f"{called(found)}, in {home.name}, of which the text is damaged")
        result = _array(found, path)
        if found.opcode == "parameter":
            number = integer(found.operands_text, f"parameter {name}")
            if home is self.module.entry:
                raise Undecidable(f"parameter {number} of the entry, which is data")
            self._parameters.setdefault(home.name, {})[number, path] = None
            for caller, site in list(self._sites.get(home.name, {}).values()):
                self._feed(caller, site, home.name, number, path)
            return None
        if (same := self._same(home, found, path)) is not None:
            return self._want(home, *same)
        if found.opcode in ("while", "conditional", "call", "fusion") or (
            found.opcode.endswith("-start") and found.called
        ):
            self._result(home, found, path)
            return None
        if path not in ((), (1,)) or (
            path and found.opcode.removesuffix("-start") not in EXCHANGES
        ):
            raise Undecidable(f"{called(found)}, whose opcode {found.opcode} is not evaluated")
        return self._operation(home, found, result)

    def _operation(self, home: Computation, found: Instruction, result: Array) -> Operation:
        shapes: list[Array] = []
        for operand in found.operands:
            maker = home.get(operand.name)
            if maker is None:
                raise Undecidable(f"{operand.name}, which no line of {home.name} makes")
            array = _inside(maker.shape, operand.path)
            if array is None:
                raise Undecidable(f"{called(found)}, which reads a tuple")
            if found.opcode == "bitcast" and not plain_layout(maker, array):
                raise Undecidable(f"{called(found)}, which changes the order of dimensions")
            shapes.append(array)
        function = operation(found, result, shapes, self.machine)
        for operand in found.operands:
            self._want(home, operand)
        return function

    def _same(
        self, home: Computation, found: Instruction, path: Path
    ) -> tuple[Operand, Path] | None:
        """The operand, and where in it, that is the same array as this one."""
        if not found.operands:
            return None
        first = found.operands[0]
        if found.opcode == "get-tuple-element":
            return first, (integer(found.attributes.get("index", ""), "index"), *path)
        if found.opcode == "tuple" and path and 0 <= path[0] < len(found.operands):
            return found.operands[path[0]], path[1:]
        if found.opcode in _SAME:
            return first, path
        if found.opcode == "copy-start" and path in ((0,), (1,)):
            return first, ()
        if found.opcode == "copy-done":
            return first, (0, *path)
        if found.opcode.endswith(("-done", "-update")):
            started = home.get(first.name)
            plain = started is not None and isinstance(started.shape, Array)
            whole = plain or found.opcode.endswith("-update")
            return first, path if whole else (1, *path)
        if found.opcode.endswith("-start") and path[:1] == (0,):
            if len(path) == 1 and found.opcode.removesuffix("-start") in EXCHANGES:
                return first, ()
            if len(path) > 1 and 0 <= path[1] < len(found.operands):
                return found.operands[path[1]], path[2:]
        if found.opcode == "while" and path:
            body = self.module.computations.get(dict(found.called).get("body", ""))
            if body is not None and self.flow.invariant(body, path[0]):
                return first, path
        return None

    def _result(self, home: Computation, found: Instruction, path: Path) -> None:
        """Wants what the computations that `found` runs return."""
        inner = path
        if found.opcode.endswith("-start"):
            if path[:1] != (1,):
                raise Undecidable(f"{called(found)}, which is not evaluated")
            inner = path[1:]
        if not found.called or (found.opcode in ("while", "conditional") and not found.operands):
            raise Undecidable(f"{called(found)}, which lacks what it runs or reads")
        self._calls.setdefault(home.name, {})[found.name] = found
        self._visit(home, found)
        for key, name in found.called:
            callee = self.module.computations.get(name)
            if callee is None or callee.root is None:
                raise Undecidable(f"{called(found)}, which runs {name}, of which there is no text")
            if key != "condition":
                self.want_root(callee, inner)
        if found.opcode == "while":
            self._want(home, found.operands[0], path)
            self._test(home, found)
        elif found.opcode == "conditional":
            self._want(home, found.operands[0])

    def _fill(self, home: Computation, plan: Plan) -> None:
        """Slots for all arrays and steps for all instructions, in the order of the text."""
        wanted = self._wanted.get(home.name, {})
        calls = self._calls.get(home.name, {})
        lines = {key: self._line(home, key[0]) for key in wanted}
        order: list[tuple[int, int, Any]] = [(lines[key], 1, key) for key in wanted]
        order += [(found.line, 0, found) for found in calls.values()]
        for _, kind, what in sorted(order, key=lambda item: item[:2]):
            if kind == 0:
                plan.steps.append(self._step(home, what))
            else:
                self._slot(home, plan, what, wanted[what])

    def _step(self, home: Computation, found: Instruction) -> Step:
        names = dict(found.called)
        known = names.get("body", "") in self.module.computations and found.operands
        if found.opcode != "while" or not known:
            return Call(found=found)
        return Loop(
            found=found,
            condition=names.get("condition", ""),
            body=names["body"],
            trips=self._trips(home, found),
        )

    def _line(self, home: Computation, name: str) -> int:
        found = home.get(name)
        return 0 if found is None else found.line

    def _slot(
        self, home: Computation, plan: Plan, key: Key, source: Key | Operation | Unknown | None
    ) -> None:
        """A slot for one array, and how to fill it."""
        found = home.get(key[0])
        if isinstance(source, tuple):
            plan.slots[key] = plan.slot(source)
        elif isinstance(source, Unknown) or found is None:
            plan.slots[key] = plan.nothing(source.reason if isinstance(source, Unknown) else key[0])
        else:
            slot = plan.slots[key] = plan.nothing(f"{called(found)}, to which nothing is passed")
            if source is not None:
                inputs = tuple(plan.slot((given.name, given.path)) for given in found.operands)
                plan.steps.append(Compute(found=found, function=source, inputs=inputs, output=slot))
            elif found.opcode == "parameter":
                number = integer(found.operands_text, f"parameter {found.name}")
                plan.arguments[number, key[1]] = slot
            else:
                plan.results.setdefault(found.name, []).append((key[1], slot))

    def _bind(self, home: Computation, plan: Plan, call: Call, plans: dict[str, Plan]) -> None:
        """Connects the slots of a call with those of what it runs."""
        found = call.found
        for position, (_, name) in enumerate(found.called):
            passes: Passed = []
            returns: Passed = []
            callee, inner = plans.get(name), self.module.computations.get(name)
            if callee is not None and inner is not None:
                self._spend(len(callee.arguments) + len(plan.results.get(found.name, ())))
                for (number, path), slot in callee.arguments.items():
                    given = _operand_for(found, position, number)
                    if given is not None and _same_type(home, given, path, inner, number):
                        passes.append((plan.slot((given.name, (*given.path, *path))), slot))
                for path, slot in plan.results.get(found.name, ()):
                    there = path[1:] if found.opcode.endswith("-start") else path
                    if inner.root is None or (inner.root.name, there) not in callee.slots:
                        continue
                    if _inside(found.shape, path) == _inside(inner.root.shape, there):
                        returns.append((callee.slots[inner.root.name, there], slot))
            call.passes.append(passes)
            call.returns.append(returns)
        if found.opcode == "conditional" and found.operands:
            call.index = plan.slots.get((found.operands[0].name, found.operands[0].path))

    def _bind_loop(self, home: Computation, plan: Plan, loop: Loop, plans: dict[str, Plan]) -> None:
        """Connects the slots of a loop's state outside, in its condition and in its body."""
        condition, body = plans.get(loop.condition, Plan()), plans.get(loop.body, Plan())
        outputs = dict(plan.results.get(loop.found.name, ()))
        paths = {path for number, path in condition.arguments if number == 0} | outputs.keys()
        paths |= {path for number, path in body.arguments if number == 0}
        test = self.module.computations.get(loop.condition)
        root = self.module.computations[loop.body].root
        if test is not None and test.root is not None:
            loop.more = condition.slots.get((test.root.name, ()))
        self._spend(len(paths))
        first = loop.found.operands[0]
        for path in sorted(paths):
            end = None if root is None else body.slots.get((root.name, path))
            if (
                end is None
                or root is None
                or _inside(root.shape, path) != _inside(loop.found.shape, path)
            ):
                end = body.nothing(f"{called(loop.found)}, whose state does not fit together")
            loop.state.append(
                Carried(
                    first=plan.slot((first.name, (*first.path, *path))),
                    output=outputs.get(path),
                    test=condition.arguments.get((0, path)),
                    body=body.arguments.get((0, path)),
                    root=end,
                )
            )

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise Stop("computations call each other in too many ways")


def _operand_for(found: Instruction, position: int, number: int) -> Operand | None:
    """What is passed as parameter `number` of the computation at `position` of `found.called`."""
    at = number
    if found.opcode == "conditional":
        at = position + 1 if number == 0 else -1
    elif found.opcode == "while" and number:
        at = -1
    return found.operands[at] if 0 <= at < len(found.operands) else None


def _inside(shape: Shape, path: Path) -> Array | None:
    """The array type at a path into a type; None when there is none."""
    for step in path:
        if isinstance(shape, Array) or not 0 <= step < len(shape):
            return None
        shape = shape[step]
    return shape if isinstance(shape, Array) else None


def _array(found: Instruction, path: Path) -> Array:
    array = _inside(found.shape, path)
    if array is None:
        raise Undecidable(f"{called(found)}, whose type does not fit what reads it")
    return array


def _same_type(
    home: Computation, given: Operand, path: Path, callee: Computation, number: int
) -> bool:
    maker, parameter = home.get(given.name), callee.parameters.get(number)
    if maker is None or parameter is None:
        return False
    array = _inside(maker.shape, (*given.path, *path))
    return array is not None and array == _inside(parameter.shape, path)
