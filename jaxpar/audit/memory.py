"""Bytes that are alive over the schedule of one device, and the buffers that make up the peak.

XLA's own analysis of a Compiled gives totals and no names; this walk over the scheduled text gives
the names, for any text. Values that share memory are counted once: tuples and their elements,
bitcasts, the state of a loop, what an asynchronous operation starts and ends, an update in place,
an output written over a donated argument. What XLA's allocator adds by alignment, or saves by
writing a result over an operand that is read for the last time, is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.result import LiveBuffer, Memory
from jaxpar.audit.shape import Array, Shape, leaves, nbytes

NUM_LARGEST = 5
"""Buffers of the peak that are named."""

MAX_DEPTH = 64
"""Calls within calls whose temporaries are followed."""

_HOST = "S(5)"  # the memory space of the host, in a layout
_ALIASES = frozenset({"bitcast", "opt-barrier", "while", "domain", "after-all"})
_IN_PLACE = ("dynamic-update-slice", "scatter")
_ALIASED_OUTPUT = re.compile(r"\{(\d{0,9})\}:\s*\((\d{1,9}),\s*\{\}")


@dataclass(frozen=True, kw_only=True)
class Live:
    """The most bytes that a computation keeps alive beyond what its caller holds, and of what."""

    nbytes: int
    largest: tuple[tuple[int, Instruction], ...]


NOTHING = Live(nbytes=0, largest=())


def memory(module: Module) -> Memory | None:
    """Memory as the text tells it; None without an entry. AuditError for types beyond reading."""
    if module.entry is None or module.entry.root is None:
        return None
    arguments = sum(nbytes(given.shape) for given in module.entry.parameters.values())
    live = live_peak(module) if module.scheduled else None
    return Memory(
        argument_bytes=arguments,
        output_bytes=nbytes(module.entry.root.shape),
        temp_bytes=None,
        peak_bytes=None,
        live_bytes=None if live is None else live.nbytes,
        largest=()
        if live is None
        else tuple(
            LiveBuffer(
                name=found.name,
                nbytes=size,
                shape=found.type_text if len(found.type_text) <= 80 else "tuple",
                source=module.source_of(found),
            )
            for size, found in live.largest
        ),
    )


def live_peak(module: Module) -> Live:
    """The peak of a scheduled module, arguments included."""
    assert module.entry is not None
    updating = module.mentioning(*(f" {opcode}(" for opcode in _IN_PLACE))
    done: dict[str, Live] = {}
    todo = [module.entry]
    while todo:  # callees first, without recursion
        computation = todo[-1]
        callees = dict.fromkeys(
            module.computations[name]
            for found in computation.calling
            for _, name in found.called
            if name in module.computations and not module.computations[name].inert
        )
        open_ones = [callee for callee in callees if callee.name not in done]
        if open_ones and len(todo) <= MAX_DEPTH:
            done.update((callee.name, NOTHING) for callee in open_ones)  # ends any circle
            todo.extend(open_ones)
            continue
        done[todo.pop().name] = _Schedule(module, computation, done, updating).peak()
    return done[module.entry.name]


class _Schedule:
    """One computation: which leaves its values are made of, and from when to when they live.

    A leaf is an array that an instruction allocates. Leaves are numbered; `sizes`, `begins`, `ends`
    (in lines) and `makers` (who allocates it, as which of several results, -1 for the only one)
    tell about each.
    """

    def __init__(
        self,
        module: Module,
        computation: Computation,
        inner: Mapping[str, Live],
        updating: Collection[str],
    ) -> None:
        self.module = module
        self.computation = computation
        self.inner = inner
        self.updating = updating
        self.is_entry = computation is module.entry
        self.values: dict[str, tuple[int, ...]] = {}
        self.sizes: list[int] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.makers: list[tuple[Instruction, int]] = []

    def peak(self) -> Live:
        instructions = self.computation.instructions
        users = self.computation.all_users
        if not instructions:
            return NOTHING
        first = last = self.computation.line
        values, ends = self.values, self.ends
        for name, found in instructions.items():
            values[name] = made_of = self._leaves(found)
            readers = users.get(name)
            end = readers[-1].line if readers else found.line
            for leaf in made_of:
                if ends[leaf] < end:
                    ends[leaf] = end
            if found.line > last:
                last = found.line
        self._keep_results(last)

        # Sums of floats are exact to 2^53, and never overflow.
        sizes = np.array(self.sizes, dtype=np.float64)
        num_lines = last - first + 2
        begins, after = np.array(self.begins, int) - first, np.array(self.ends, int) - first + 1
        change = np.bincount(begins, sizes, num_lines) - np.bincount(after, sizes, num_lines)
        alive = np.cumsum(change)
        inside: dict[int, Live] = {}
        for found in self.computation.calling:
            called = [self.inner.get(name, NOTHING) for _, name in found.called]
            most = max(called, key=lambda live: live.nbytes, default=NOTHING)
            inside[found.line] = most
            alive[found.line - first] += most.nbytes
        at = int(np.argmax(alive)) + first
        held = [
            (size, maker)
            for size, begin, end, (maker, _) in zip(
                self.sizes, self.begins, self.ends, self.makers, strict=True
            )
            if size and begin <= at <= end
        ]
        held.extend(inside.get(at, NOTHING).largest)
        held.sort(key=lambda pair: (-pair[0], pair[1].line))
        return Live(nbytes=int(alive[at - first]), largest=tuple(held[:NUM_LARGEST]))

    def _leaves(self, found: Instruction) -> tuple[int, ...]:
        opcode = found.opcode
        if opcode == "fusion":
            updates = self.updating and any(name in self.updating for _, name in found.called)
            over = self._written_over(found) if updates else ()
            return over or self._new(found, found.shape)
        if opcode == "parameter":
            return self._new(found, found.shape, held_outside=not self.is_entry)
        if opcode == "get-tuple-element":
            return self._element(found)
        if opcode == "tuple":
            return tuple(leaf for operand in found.operands for leaf in self._value(operand.name))
        if opcode in _ALIASES or opcode.endswith(("-done", "-update")):
            return self._value(found.operands[0].name) if found.operands else ()
        if opcode.endswith("-start"):
            ends = (user for user in self.computation.all_users.get(found.name, ()))
            done = next((user for user in ends if user.opcode.endswith("-done")), found)
            return self._new(found, done.shape)
        if opcode in _IN_PLACE and (over := self._written_over(found)):
            return over
        return self._new(found, found.shape)

    def _value(self, name: str) -> tuple[int, ...]:
        return self.values.get(name, ())

    def _new(self, found: Instruction, shape: Shape, held_outside: bool = False) -> tuple[int, ...]:
        first = len(self.sizes)
        if isinstance(shape, Array):
            elsewhere = held_outside or _HOST in found.type_text
            self.sizes.append(0 if elsewhere else shape.nbytes)
            self.begins.append(found.line)
            self.ends.append(found.line)
            self.makers.append((found, -1))
            return (first,)
        arrays = list(leaves(shape))
        for index, array in enumerate(arrays):
            self.sizes.append(0 if held_outside else array.nbytes)
            self.begins.append(found.line)
            self.ends.append(found.line)
            self.makers.append((found, index if len(arrays) > 1 else -1))
        return tuple(range(first, len(self.sizes)))

    def _element(self, found: Instruction) -> tuple[int, ...]:
        if not found.operands:
            return ()
        made_of = self._value(found.operands[0].name)
        producer = self.computation.instructions.get(found.operands[0].name)
        index = found.attributes.get("index", "")
        if producer is None or not index.isdecimal() or len(index) > 9:
            return ()
        shape = producer.shape
        if not isinstance(shape, tuple) or int(index) >= len(shape):
            return ()
        if len(shape) == len(made_of):  # no tuple inside
            return made_of[int(index) : int(index) + 1]
        before = sum(len(list(leaves(part))) for part in shape[: int(index)])
        return made_of[before : before + len(list(leaves(shape[int(index)])))]

    def _written_over(self, found: Instruction) -> tuple[int, ...]:
        """The operand that an update overwrites, where nobody reads it later."""
        for operand in found.operands:
            given = self.computation.instructions.get(operand.name)
            readers = self.computation.all_users.get(operand.name, [])
            if given is None or operand.path or readers[-1:] != [found]:
                continue
            if given.shape == found.shape:
                return self._value(operand.name)
        return ()

    def _keep_results(self, last: int) -> None:
        """Results live to the end; those that belong where a parameter was take its place."""
        root = self.computation.root
        if root is None:
            return
        results = self._value(root.name)
        for leaf in results:
            self.ends[leaf] = last
        if self.is_entry:
            for leaf, (maker, _) in enumerate(self.makers):
                if maker.opcode == "parameter":  # arguments are the caller's, all the time
                    self.ends[leaf] = last
        for result, place in self._places(len(results)).items():
            leaf = results[result]
            if leaf != place and self.begins[leaf] >= self._last_read(place):
                self.sizes[leaf] = 0

    def _last_read(self, place: int) -> int:
        """When a parameter is read for the last time, whoever keeps it alive after that."""
        maker, index = self.makers[place]
        readers = self.computation.all_users.get(maker.name, [])
        if index < 0:
            return readers[-1].line if readers else 0
        last = 0
        for user in readers:
            if user.opcode == "get-tuple-element" and user.attributes.get("index") == str(index):
                further = self.computation.all_users.get(user.name, [])
                last = max(last, further[-1].line if further else user.line)
        return last

    def _places(self, num_results: int) -> dict[int, int]:
        """Which parameter's memory a result may take: a loop's state, or a donated argument."""
        parameters = self.computation.parameters
        if self.is_entry:
            text = (self.module.header or {}).get("input_output_alias", "")
            places = {}
            for out, given in _ALIASED_OUTPUT.findall(text):
                parameter = parameters.get(int(given))
                place = () if parameter is None else self._value(parameter.name)
                if int(out or 0) < num_results and len(place) == 1:
                    places[int(out or 0)] = place[0]
            return places
        if len(parameters) != 1 or 0 not in parameters:
            return {}
        state = self._value(parameters[0].name)
        return dict(enumerate(state)) if len(state) == num_results else {}
