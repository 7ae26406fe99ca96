"""Opcodes that move elements, or combine those of one array, on small arrays with NumPy.

One function per opcode, as in `evaluate`: of the instruction, the types of its result and of its
operands, and the machine; it returns the function of the operands' values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxpar.audit.exchange import exchange
from jaxpar.audit.reader import Instruction, Module
from jaxpar.audit.shape import Array, integer
from jaxpar.audit.values import (
    NUMPY_DTYPES,
    Machine,
    Operation,
    Undecidable,
    Values,
    called,
    damaged,
    no_nan,
    numbers_of,
    rounded,
)

_RANGE = re.compile(r"\[(\d{1,18}):(\d{1,18})(?::(\d{1,18}))?\]")
_LAYOUT = re.compile(r"\]\{([\d,]*)")
_REDUCERS = MappingProxyType(
    {
        **{"add": np.add, "multiply": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or},
        **{"maximum": np.maximum, "minimum": np.minimum},
    }
)


def bitcast(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    (source,), to = given, np.dtype(NUMPY_DTYPES[result.dtype])
    if to.itemsize != np.dtype(NUMPY_DTYPES[source.dtype]).itemsize:
        raise damaged(found)
    if found.opcode == "bitcast" and not plain_layout(found, result):
        raise Undecidable(f"{called(found)}, which changes the order of dimensions")
    shape = result.dims
    return lambda value: np.ascontiguousarray(value).view(to).reshape(len(value), *shape)


def plain_layout(found: Instruction, array: Array) -> bool:
    """Whether the value of `found`, of type `array`, is laid out row by row."""
    if sum(size != 1 for size in array.dims) < 2:
        return True
    if not isinstance(found.shape, Array):
        return False
    layout = _LAYOUT.search(found.type_text)
    order = [] if layout is None else [int(word) for word in layout[1].split(",") if word]
    return order == sorted(order, reverse=True)


def broadcast(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    (source,), axes = given, numbers_of(found, "dimensions")
    shape = [1] * len(result.dims)
    for axis, size in zip(axes, source.dims, strict=True):
        if axis < 0 or result.dims[axis] != size:
            raise damaged(found)
        shape[axis] = size
    if axes != sorted(axes):
        raise Undecidable(f"{called(found)}, which changes the order of dimensions")
    return lambda value: np.broadcast_to(
        value.reshape(len(value), *shape), (len(value), *result.dims)
    )


def reshape(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    return lambda value: value.reshape(len(value), *result.dims)


def transpose(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    order = [0, *(axis + 1 for axis in numbers_of(found, "dimensions"))]
    return lambda value: value.transpose(order)


def reverse(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    axes = tuple(axis + 1 for axis in numbers_of(found, "dimensions"))
    return lambda value: np.flip(value, axes)


def concatenate(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    (axis,) = numbers_of(found, "dimensions")

    def apply(*values: Values) -> Values:
        rows = max(map(len, values))
        full = [np.broadcast_to(value, (rows, *value.shape[1:])) for value in values]
        return np.concatenate(full, axis=axis + 1)

    return apply


def strided_slice(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    ranges = _RANGE.findall(found.attributes["slice"])
    parts = tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in ranges)
    if any(part.stop > size for part, size in zip(parts, given[0].dims, strict=True)):
        raise damaged(found)
    return lambda value: value[(slice(None), *parts)]


def pad(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    config = [
        [integer(word, "padding") for word in part.split("_")]
        for part in found.attributes["padding"].split("x")
    ]
    if any(min(part) < 0 or any(part[2:]) for part in config):
        raise Undecidable(f"{called(found)}, a padding that is not evaluated")
    source = given[0]
    at = tuple(
        slice(part[0], part[0] + size) for part, size in zip(config, source.dims, strict=True)
    )

    def apply(value: Values, fill: Values) -> Values:
        rows = max(len(value), len(fill))
        answer = np.empty((rows, *result.dims), value.dtype)
        answer[...] = fill.reshape(len(fill), *[1] * len(result.dims))
        answer[(slice(None), *at)] = value
        return answer

    return apply


def _starts(values: Sequence[Values], dims: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Index arrays for a window of `sizes`, its start moved inside `dims`, per device."""
    rows = max((len(value) for value in values), default=1)
    rank = len(dims) + 1
    index: list[Values] = [np.arange(rows).reshape(-1, *[1] * (rank - 1))]
    for axis, (start, dim, size) in enumerate(zip(values, dims, sizes, strict=True), 1):
        highest = dim - size
        wide = start.astype(np.int64) if start.dtype != np.uint64 else np.minimum(start, 1 << 62)
        inside = np.clip(wide.astype(np.int64), 0, highest)
        shape = [1] * rank
        shape[axis] = -1
        index.append(inside.reshape(-1, *[1] * (rank - 1)) + np.arange(size).reshape(shape))
    return tuple(index)


def _fits(found: Instruction, starts: Sequence[Array], inner: Array, outer: Array) -> None:
    """Refuses windows that do not fit, or starts that are no integers."""
    integral = all(start.dims == () and start.dtype[0] in "su" for start in starts)
    smaller = len(inner.dims) == len(outer.dims) and all(
        size <= dim for size, dim in zip(inner.dims, outer.dims, strict=True)
    )
    if not integral or not smaller or inner.dtype != outer.dtype:
        raise damaged(found)


def dynamic_slice(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    source, *starts = given
    _fits(found, starts, result, source)

    def apply(value: Values, *at: Values) -> Values:
        index = _starts([*at], source.dims, result.dims)
        if len(value) == 1:
            index = (np.zeros_like(index[0]), *index[1:])
        elif len(index[0]) == 1:
            index = (np.arange(len(value)).reshape(-1, *[1] * len(source.dims)), *index[1:])
        return value[index]

    return apply


def dynamic_update_slice(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    source, update, *starts = given
    _fits(found, starts, update, source)

    def apply(value: Values, new: Values, *at: Values) -> Values:
        rows = max(len(value), len(new), *map(len, at), 1)
        at = tuple(np.broadcast_to(start, (rows,)) for start in at)
        answer = np.broadcast_to(value, (rows, *value.shape[1:])).copy()
        answer[_starts(at, source.dims, update.dims)] = new
        return answer

    return apply


def reduce(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    source, _ = given
    combine = reducer(found, machine.module)
    rounds = source.dtype[0] == "f" and combine in (np.add, np.multiply)
    axes = tuple(axis + 1 for axis in numbers_of(found, "dimensions"))

    def apply(value: Values, first: Values) -> Values:
        if rounds:
            raise rounded(found)
        inner = combine.reduce(no_nan(found, value), axis=axes, initial=None, dtype=value.dtype)
        return combine(inner, first.reshape(len(first), *[1] * len(result.dims)))

    if not math.prod(source.dims):
        raise Undecidable(f"{called(found)}, a reduction of nothing")
    return apply


def reducer(found: Instruction, module: Module) -> Any:
    """The ufunc that the computation `to_apply` of a reduction is. Undecidable if it is none."""
    computation = module.computations.get(found.attributes.get("to_apply", "").removeprefix("%"))
    root = computation.root if computation is not None else None
    if computation is not None and root is not None and root.opcode in _REDUCERS:
        given = {number: value.name for number, value in computation.parameters.items()}
        read = sorted(operand.name for operand in root.operands)
        if set(given) == {0, 1} and read == sorted(given.values()):
            return _REDUCERS[root.opcode]
    raise Undecidable(f"{called(found)}, a reduction that is not evaluated")


def exchanged(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    if len(given) != 1:
        raise Undecidable(f"{called(found)}, which passes several arrays")
    combine = None
    if found.opcode.startswith("all-reduce"):
        combine = reducer(found, machine.module)
    exchanged = exchange(found, machine.module, machine.num_devices, combine)
    rounds = given[0].dtype[0] == "f" and combine in (np.add, np.multiply)

    def apply(value: Values) -> Values:
        if rounds:
            raise rounded(found)
        return exchanged(value)

    return apply
