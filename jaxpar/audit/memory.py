"""Bytes that are alive over the schedule of one device, and the buffers that make up the peak.

XLA's own analysis of a Compiled gives totals and no names; this walk over the scheduled text gives
the names, for any text. Values that share memory are counted once: tuples and their elements,
bitcasts, the state of a loop, what an asynchronous operation starts and ends, an update in place,
an output written over a donated argument. What XLA's allocator adds by alignment, or saves by
writing a result over an operand that is read for the last time, is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.result import LiveBuffer, Memory
from jaxpar.audit.shape import Array, Shape, leaves, nbytes

NUM_LARGEST = 5
"""Buffers of the peak that are named."""

MAX_DEPTH = 64
"""Calls within calls whose temporaries are followed."""

Leaf: TypeAlias = tuple[str, int]  # who allocates it, and which of its results (-1: the only one)

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
    done: dict[str, Live] = {}
    todo = [module.entry]
    while todo:  # callees first, without recursion
        computation = todo[-1]
        callees = [
            module.computations[name]
            for found in computation.calling
            for _, name in found.called
            if name in module.computations and not module.computations[name].inert
        ]
        open_ones = [callee for callee in callees if callee.name not in done]
        if open_ones and len(todo) <= MAX_DEPTH:
            done.update((callee.name, NOTHING) for callee in open_ones)  # ends any circle
            todo.extend(open_ones)
            continue
        done[todo.pop().name] = _Schedule(module, computation, done).peak()
    return done[module.entry.name]


class _Schedule:
    """One computation: which leaves its values are made of, and from when to when they live."""

    def __init__(self, module: Module, computation: Computation, inner: Mapping[str, Live]) -> None:
        self.module = module
        self.computation = computation
        self.inner = inner
        self.is_entry = computation is module.entry
        self.values: dict[str, tuple[Leaf, ...]] = {}
        self.sizes: dict[Leaf, int] = {}
        self.begins: dict[Leaf, int] = {}
        self.ends: dict[Leaf, int] = {}

    def peak(self) -> Live:
        instructions = self.computation.instructions
        users = self.computation.users
        if not instructions:
            return NOTHING
        first = self.computation.line
        last = first
        for last_read in instructions.values():
            last = max(last, last_read.line)
        for found in instructions.values():
            self.values[found.name] = made_of = self._leaves(found)
            readers = users.get(found.name)
            end = readers[-1].line if readers else found.line
            for leaf in made_of:
                if self.ends.get(leaf, -1) < end:
                    self.ends[leaf] = end
        self._keep_results(last)

        change = np.zeros(last - first + 2, dtype=np.float64)  # exact to 2^53, and never overflows
        for leaf, size in self.sizes.items():
            change[self.begins[leaf] - first] += size
            change[self.ends[leaf] - first + 1] -= size
        alive = np.cumsum(change)
        inside: dict[int, Live] = {}
        for found in self.computation.calling:
            called = [self.inner.get(name, NOTHING) for _, name in found.called]
            most = max(called, key=lambda live: live.nbytes, default=NOTHING)
            inside[found.line] = most
            alive[found.line - first] += most.nbytes
        at = int(np.argmax(alive)) + first
        held = [
            (size, instructions[leaf[0]])
            for leaf, size in self.sizes.items()
            if size and self.begins[leaf] <= at <= self.ends[leaf]
        ]
        held.extend(inside.get(at, NOTHING).largest)
        held.sort(key=lambda pair: (-pair[0], pair[1].line))
        return Live(nbytes=int(alive[at - first]), largest=tuple(held[:NUM_LARGEST]))

    def _leaves(self, found: Instruction) -> tuple[Leaf, ...]:
        opcode = found.opcode
        if opcode == "parameter":
            return self._new(found, found.shape, held_outside=not self.is_entry)
        if opcode == "get-tuple-element":
            return self._element(found)
        if opcode == "tuple":
            return tuple(leaf for operand in found.operands for leaf in self._value(operand.name))
        if opcode in _ALIASES or opcode.endswith(("-done", "-update")):
            return self._value(found.operands[0].name) if found.operands else ()
        if opcode.endswith("-start"):
            ends = (user for user in self.computation.users.get(found.name, ()))
            done = next((user for user in ends if user.opcode.endswith("-done")), found)
            return self._new(found, done.shape)
        if over := self._written_over(found):
            return over
        return self._new(found, found.shape)

    def _value(self, name: str) -> tuple[Leaf, ...]:
        return self.values.get(name, ())

    def _new(
        self, found: Instruction, shape: Shape, held_outside: bool = False
    ) -> tuple[Leaf, ...]:
        if isinstance(shape, Array):
            leaf = (found.name, -1)
            elsewhere = held_outside or _HOST in found.type_text
            self.sizes[leaf] = 0 if elsewhere else shape.nbytes
            self.begins[leaf] = self.ends[leaf] = found.line
            return (leaf,)
        arrays = list(leaves(shape))
        made = []
        for index, array in enumerate(arrays):
            leaf = (found.name, index if len(arrays) > 1 else -1)
            self.sizes[leaf] = 0 if held_outside else array.nbytes
            self.begins[leaf] = self.ends[leaf] = found.line
            made.append(leaf)
        return tuple(made)

    def _element(self, found: Instruction) -> tuple[Leaf, ...]:
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

    def _written_over(self, found: Instruction) -> tuple[Leaf, ...]:
        """The operand that an update overwrites, where nobody reads it later."""
        updates = found.opcode in _IN_PLACE
        if found.opcode == "fusion":
            callees = (self.module.computations.get(name) for _, name in found.called)
            updates = any(
                callee is not None and callee.mentions(f" {opcode}(")
                for callee in callees
                for opcode in _IN_PLACE
            )
        if not updates:
            return ()
        for operand in found.operands:
            given = self.computation.instructions.get(operand.name)
            readers = self.computation.users.get(operand.name, [])
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
            for leaf, size in self.sizes.items():  # arguments are the caller's, all the time
                if size and self.computation.instructions[leaf[0]].opcode == "parameter":
                    self.ends[leaf] = last
        for result, place in self._places(len(results)).items():
            leaf = results[result]
            free = self.begins[leaf] >= self._last_read(place)
            if leaf != place and place in self.begins and free:
                self.sizes[leaf] = 0

    def _last_read(self, place: Leaf) -> int:
        """When a parameter is read for the last time, whoever keeps it alive after that."""
        name, index = place
        readers = self.computation.users.get(name, [])
        if index < 0:
            return readers[-1].line if readers else 0
        last = 0
        for user in readers:
            if user.opcode == "get-tuple-element" and user.attributes.get("index") == str(index):
                further = self.computation.users.get(user.name, [])
                last = max(last, further[-1].line if further else user.line)
        return last

    def _places(self, num_results: int) -> dict[int, Leaf]:
        """Which parameter's memory a result may take: a loop's state, or a donated argument."""
        parameters = self.computation.parameters
        if self.is_entry:
            text = (self.module.header or {}).get("input_output_alias", "")
            pairs = ((int(out or 0), int(given)) for out, given in _ALIASED_OUTPUT.findall(text))
            return {
                out: (parameters[given].name, -1)
                for out, given in pairs
                if out < num_results and given in parameters
            }
        if len(parameters) != 1 or 0 not in parameters:
            return {}
        state = self._value(parameters[0].name)
        return dict(enumerate(state)) if len(state) == num_results else {}
