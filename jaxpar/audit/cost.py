"""How long one scheduled instruction computes, on a named chip.

TPU programs say it themselves: `estimated_cycles`. Elsewhere it is a roofline: the longer of the
FLOPs of its matmuls and convolutions at the chip's peak, and the bytes it reads and writes at the
bandwidth of the memory. Both are what the instruction takes at best, so a transfer is never said
to be hidden by time that is not there.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from jaxpar.audit.collect import KINDS
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import trip_count
from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.shape import Array, Shape, leaves, nbytes
from jaxpar.errors import AuditError
from jaxpar.hardware import Chip

MAX_DEPTH = 16
"""Computations within computations that are costed; what is deeper counts nothing."""

_MOST = 10**30  # FLOPs or bytes; damaged text may speak of more than a float can hold
_LONGEST = 1e12  # seconds
_CYCLES = re.compile(r'"estimated_cycles":"?(\d{1,19})')
_NO_CYCLES = 2**63 - 1  # where XLA has no estimate
_TARGET = re.compile(r'custom_call_target="([^"]{1,99})"')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[((?:"?\d{1,3}"?,?){0,9})\]')
_BOOKKEEPING = re.compile(r"(?:[su]\d+|pred)\[\]")  # counters, tests and offsets of loops
_RUNS_OTHERS = ("while", "conditional", "call")
_STARTS = ("fusion-start", "async-start")
_FUSED = ("fusion", *_STARTS)
_ELSEWHERE = ('async_execution_thread="sparsecore"', 'async_execution_thread="host"')
_SEEING = ("bitcast", "reshape", "copy", "convert")
_NEEDS_READING = re.compile(
    r" (?:dot|convolution|custom-call|fusion|slice|dynamic-slice|dynamic-update-slice|gather)\("
)
_PARTIAL = ("dynamic-slice", "slice", "gather")
_NO_WORK = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("after-all", "add-dependency", "domain", "partition-id", "replica-id"),
        *("infeed", "outfeed", "send", "recv"),
        *KINDS,
    }
)
_NO_KERNEL = frozenset(
    {
        *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"),
        *("AsyncCollectiveStart", "AsyncCollectiveDone"),
    }
)


class Cost:
    """Costs of the instructions of one module; without a chip, only whether they compute."""

    def __init__(self, flow: Dataflow, chip: Chip | None) -> None:
        self.flow = flow
        self.chip = chip
        self._computes: dict[str, bool] = {}
        self._seconds: dict[str, float] = {}
        self._work: dict[str, tuple[Counter[str], int] | None] = {}

    def computes(self, found: Instruction, depth: int = 0) -> bool:
        """Whether the device computes while it runs `found`; loops do if anything in them does."""
        opcode = found.opcode
        if opcode in _NO_WORK or opcode.endswith(("-done", "-update")):
            return False
        if opcode in _RUNS_OTHERS:
            return any(self._any(name, depth) for _, name in found.called)
        if opcode.endswith("-start"):
            elsewhere = any(thread in found.attributes_text for thread in _ELSEWHERE)
            return opcode in _STARTS and not elsewhere
        if opcode == "custom-call":
            return _target(found) not in _NO_KERNEL
        return _BOOKKEEPING.match(found.type_text) is None

    def seconds(self, home: Computation, found: Instruction, depth: int = 0) -> float:
        """Seconds that one execution of `found`, in `home`, computes; 0.0 for what does not.

        A loop costs its body as often as it runs (once, where that is unknown), a conditional its
        cheapest branch. AuditError for shapes that cannot be read.
        """
        chip = self.chip
        if chip is None or not self.computes(found):
            return 0.0
        if found.opcode == "while":
            trips = trip_count(found, home, self.flow)
            body = self._total(dict(found.called).get("body", ""), depth)
            return min(body * (1 if trips is None else trips), _LONGEST)
        if found.opcode in ("conditional", "call"):
            return min((self._total(name, depth) for _, name in found.called), default=0.0)
        if chip.clock_hz and (cycles := estimated_cycles(found)):
            return min(cycles / chip.clock_hz, _LONGEST)
        flops, moved = self._fused(found, depth) or (_flops(home, found), _bytes(home, found))
        compute = sum(min(n, _MOST) / chip.flops_per_s(dtype) for dtype, n in flops.items())
        memory = min(moved, _MOST) / chip.device_hbm_bytes_per_s
        return min(max(0.0, compute, memory), _LONGEST)  # damaged dims may be below zero

    def _any(self, name: str, depth: int) -> bool:
        if name not in self._computes:
            self._computes[name] = False  # also the answer to whoever asks in a circle
            inner = self.flow.module.computations.get(name)
            if inner is not None and depth < MAX_DEPTH:
                instructions = inner.instructions.values()
                self._computes[name] = any(
                    self.computes(found, depth + 1) for found in instructions
                )
        return self._computes[name]

    def _total(self, name: str, depth: int) -> float:
        if name not in self._seconds:
            self._seconds[name] = 0.0
            inner = self.flow.module.computations.get(name)
            if inner is not None and depth < MAX_DEPTH:
                instructions = inner.instructions.values()
                self._seconds[name] = sum(self.seconds(inner, it, depth + 1) for it in instructions)
        return self._seconds[name]

    def _fused(self, found: Instruction, depth: int) -> tuple[Counter[str], int] | None:
        """FLOPs by element type, and bytes, of what `found` fuses; None if its own types tell."""
        if found.opcode not in _FUSED or len(found.called) != 1:
            return None
        name = found.called[0][1]
        if name not in self._work:
            self._work[name] = None
            module = self.flow.module
            inner = module.computations.get(name)
            if inner is None or depth >= MAX_DEPTH:
                return None
            # Reading all bodies would take longer than the rest of an audit.
            if not _NEEDS_READING.search(module.text, inner.start, inner.end):
                return None
            flops: Counter[str] = Counter()
            for part in inner.instructions.values():
                nested = self._fused(part, depth + 1)
                flops += nested[0] if nested else _flops(inner, part)
            read = sum(_read_bytes(inner, given) for given in inner.parameters.values())
            self._work[name] = (flops, read + _written_bytes(inner))
        return self._work[name]


def estimated_cycles(found: Instruction) -> int:
    """XLA's own estimate, 0 when it gives none."""
    cycles = _CYCLES.search(found.attributes_text)
    return int(cycles[1]) if cycles and int(cycles[1]) < _NO_CYCLES else 0


def _target(found: Instruction) -> str:
    if found.opcode != "custom-call":
        return ""
    target = _TARGET.search(found.attributes_text)
    return target[1] if target else ""


def _shape(home: Computation, name: str) -> Shape | None:
    producer = home.instructions.get(name)
    return producer.shape if producer is not None else None


def _flops(home: Computation, found: Instruction) -> Counter[str]:
    """FLOPs by element type of a matmul or a convolution; others have none that matter."""
    is_dot = found.opcode == "dot" or _target(found).startswith("__cublas")
    if not is_dot and "dim_labels=" not in found.attributes_text:
        return Counter()
    given = [_shape(home, operand.name) for operand in found.operands[:2]]
    left, right = given if len(given) == 2 else (None, None)
    if not isinstance(left, Array) or not isinstance(right, Array):
        return Counter()
    count = _dot_flops(found, left) if is_dot else _convolution_flops(found, left, right)
    return Counter({left.dtype: count})


def _bytes(home: Computation, found: Instruction) -> int:
    """Bytes read and written: of a slice what it takes, of an update what it puts."""
    if found.opcode in _PARTIAL:
        return 2 * nbytes(found.shape)
    operands = [_shape(home, operand.name) for operand in found.operands]
    sizes = [nbytes(shape) if shape is not None else 0 for shape in operands]
    if found.opcode == "dynamic-update-slice":
        return 2 * (sizes[1] if len(sizes) > 1 else 0)
    return sum(sizes) + nbytes(found.shape)


def _dot_flops(found: Instruction, left: Array) -> int:
    """Two FLOPs for each element of the result and each step along the contracted dims."""
    text = found.attributes.get("lhs_contracting_dims", "")
    if not text and (printed := _CONTRACTED.search(found.attributes_text)):
        text = printed[1]
    dims = [int(number) for number in re.findall(r"\d{1,3}", text)]
    if any(dim >= len(left.dims) for dim in dims):
        raise AuditError(
            f"{found.name} (line {found.line}) contracts dim {max(dims)} of an operand that has "
            f"{len(left.dims)}. The text is damaged; print it again with compiled.as_text()."
        )
    result = next(leaves(found.shape), None)  # of a library call, before its work space
    return 2 * math.prod(result.dims if result else ()) * math.prod(left.dims[d] for d in dims)


def _convolution_flops(found: Instruction, image: Array, kernel: Array) -> int:
    """Two FLOPs for each element of the result and of the kernel's part that makes it.

    A kernel larger than the image (TPU's transposed matmuls) meets at most all of the image.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", found.attributes.get("dim_labels", ""))
    result = next(leaves(found.shape), None)
    if not labels or result is None or len(labels[2]) != len(kernel.dims):
        return 0
    steps = 1
    for label, size in zip(labels[2], kernel.dims, strict=True):
        if label == "i":
            steps *= size
        elif label != "o":
            at = labels[1].find(label)
            steps *= min(size, image.dims[at]) if 0 <= at < len(image.dims) else size
    return 2 * math.prod(result.dims) * steps


def _read_bytes(inner: Computation, given: Instruction) -> int:
    """What a fusion reads of one parameter: only the slices, where it takes nothing else."""
    read = 0
    todo = [given.name]
    for name in todo:
        for user in inner.all_users.get(name, ()):
            first = bool(user.operands) and user.operands[0].name == name
            if first and user.opcode in _PARTIAL:
                read += nbytes(user.shape)
            elif first and user.opcode in _SEEING and len(todo) <= MAX_DEPTH:
                todo.append(user.name)
            elif not first or user.opcode != "dynamic-update-slice":
                return nbytes(given.shape)  # read as a whole, not written in place
    return min(read, nbytes(given.shape))


def _written_bytes(inner: Computation) -> int:
    """What a fusion writes: only the new part, where it updates a parameter in place."""
    root = inner.root
    if root is None:
        return 0
    names = [operand.name for operand in root.operands] if root.opcode == "tuple" else [root.name]
    written = 0
    for name in names:
        found = inner.instructions.get(name)
        for _ in range(MAX_DEPTH):
            if found is None or found.opcode not in _SEEING or not found.operands:
                break
            found = inner.instructions.get(found.operands[0].name)
        if found is not None and found.opcode == "dynamic-update-slice":
            update = _shape(inner, found.operands[1].name) if len(found.operands) > 1 else None
            written += nbytes(update) if update is not None else 0
        elif (shape := _shape(inner, name)) is not None:
            written += nbytes(shape)
    return written
