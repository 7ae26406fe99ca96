"""What opcodes mean on small arrays, for all devices at once, with NumPy.

A value is an array [devices or 1, *dims]: one row per device, or one for all of them. Only what
every backend computes alike is evaluated: integers and booleans as XLA defines them, and
floating-point results that need no rounding. All else raises `Undecidable`, which says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.exchange import EXCHANGES, exchange
from jaxpar.audit.reader import Instruction, Module
from jaxpar.audit.shape import Array, integer
from jaxpar.errors import AuditError

MAX_ELEMENTS = 1 << 16
"""Elements of an array on one device; a larger one is taken to be data."""

MAX_VALUES = 1 << 22
"""Elements of an array on all devices together."""

MAX_RANK = 16

Values: TypeAlias = NDArray[Any]
Operation: TypeAlias = Callable[..., Values]

_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {
        **{"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64},
        **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
        **{"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64},
    }
)
_NUMBER = re.compile(r"[^\s{},]+")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_RANGE = re.compile(r"\[(\d{1,18}):(\d{1,18})(?::(\d{1,18}))?\]")
_LAYOUT = re.compile(r"\]\{([\d,]*)")
_COMPARED = MappingProxyType(
    {
        **{"EQ": np.equal, "NE": np.not_equal, "LT": np.less},
        **{"LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal},
    }
)
_REDUCERS = MappingProxyType(
    {
        **{"add": np.add, "multiply": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or},
        **{"maximum": np.maximum, "minimum": np.minimum},
    }
)


class Undecidable(Exception):
    """A value that is not known; the text says, as the end of a sentence, what it depends on."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What runs the module: `num_devices` rows of every value, 1 when their number is unknown."""

    module: Module
    num_devices: int


def called(found: Instruction) -> str:
    """How a sentence names an instruction."""
    return f"{found.name} (line {found.line})"


def operation(
    found: Instruction, result: Array, operands: Sequence[Array], machine: Machine
) -> Operation:
    """The function of the operands' values that `found` is, for its result of type `result`.

    Undecidable, now or when it is called, for what is not evaluated. NumPy's warnings about numbers
    are to be ignored around the call (`np.errstate`): integers wrap here.
    """
    opcode = found.opcode.removesuffix("-start")
    if opcode not in _OPCODES:
        raise Undecidable(f"{called(found)}, whose opcode {opcode} is not evaluated")
    dtype = _dtype(found, result)
    for array in operands:
        _dtype(found, array)
    try:
        function = _OPCODES[opcode](found, result, list(operands), machine)
    except (AuditError, ValueError, IndexError, KeyError) as error:
        raise _damaged(found) from error
    num_elements = math.prod(result.dims)

    def checked(*values: Values) -> Values:
        if max((len(value) for value in values), default=1) * num_elements > MAX_VALUES:
            raise _large(found, num_elements)
        try:
            answer = function(*values)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise _damaged(found) from error
        if answer.dtype != dtype or answer.shape[1:] != result.dims:
            raise _damaged(found)
        return answer

    return checked


def absorbed(
    found: Instruction, values: Sequence[Values | None], devices: NDArray[np.bool_]
) -> Any:
    """The value of `found` on `devices` though some operands (None) are unknown, or None.

    A select that takes the known side everywhere, and `false and …`, `true or …`.
    """
    if found.opcode == "select" and len(values) == 3 and values[0] is not None:
        chosen = values[0][devices] if len(values[0]) > 1 else values[0]
        if chosen.all():
            return values[1]
        return None if chosen.any() else values[2]
    if found.opcode in ("and", "or") and len(values) == 2:
        for value in values:
            if value is not None and value.dtype == np.bool_:
                rows = value[devices] if len(value) > 1 else value
                if (rows == (found.opcode == "or")).all():
                    return value
    return None


def _dtype(found: Instruction, array: Array) -> np.dtype[Any]:
    if array.dtype not in _DTYPES:
        raise Undecidable(f"{called(found)} of type {array.dtype}, which is not evaluated")
    if len(array.dims) > MAX_RANK:
        raise Undecidable(f"{called(found)}, which has {len(array.dims)} dimensions")
    if (num_elements := math.prod(array.dims)) > MAX_ELEMENTS:
        raise _large(found, num_elements)
    return np.dtype(_DTYPES[array.dtype])


def _large(found: Instruction, num_elements: int) -> Undecidable:
    return Undecidable(f"{called(found)}, an array of {num_elements} elements, which is too large")


def _damaged(found: Instruction) -> Undecidable:
    return Undecidable(f"{called(found)}, which does not fit together with its operands")


def _rounded(found: Instruction) -> Undecidable:
    return Undecidable(f"{called(found)}, whose result is rounded")


def _numbers(found: Instruction, key: str) -> list[int]:
    """The numbers of an attribute such as `dimensions={0,1}`."""
    words = found.attributes[key].strip("{}").split(",")
    return [integer(word, key) for word in words if word.strip()]


# One function per opcode: (instruction, type of the result, types of the operands, machine) to the
# function of the values. They may assume small arrays of evaluated types.


def _constant(found: Instruction, result: Array, _: list[Array], machine: Machine) -> Operation:
    dtype = np.dtype(_DTYPES[result.dtype])
    text = _COMMENT.sub("", found.operands_text)
    if "..." in text:
        raise Undecidable(f"{called(found)}, a constant whose elements were not printed")
    words = _NUMBER.findall(text)
    if dtype.kind == "f":
        numbers: list[Any] = [float(word) for word in words]
    else:
        named = {"true": "1", "false": "0"}
        numbers = [int(named.get(word, word)) for word in words if len(word) <= 20]
        bounds = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if numbers and not (bounds[0] <= min(numbers) and max(numbers) <= bounds[1]):
            raise _damaged(found)
    with np.errstate(all="ignore"):
        value = np.array(numbers, dtype=dtype).reshape(1, *result.dims)
    return lambda: value


def _iota(found: Instruction, result: Array, _: list[Array], machine: Machine) -> Operation:
    axis = integer(found.attributes["iota_dimension"], "iota_dimension")
    steps = np.arange(result.dims[axis]).astype(_DTYPES[result.dtype])
    shape = [1] * (len(result.dims) + 1)
    shape[axis + 1] = -1
    value = np.broadcast_to(steps.reshape(shape), (1, *result.dims))
    return lambda: value


def _partition(found: Instruction, result: Array, _: list[Array], machine: Machine) -> Operation:
    module = machine.module
    printed = "num_partitions" if found.opcode == "partition-id" else "replica_count"
    replicas, partitions = module.replicas, module.partitions
    known = module.header is not None and printed in module.header  # else that text may be lost
    if not known or not replicas or not partitions or replicas * partitions != machine.num_devices:
        raise Undecidable(f"{called(found)}, and the text does not say how many devices there are")
    ids = np.arange(machine.num_devices)
    ids = ids % partitions if found.opcode == "partition-id" else ids // partitions
    value = ids.astype(_DTYPES[result.dtype])
    return lambda: value


def _elementwise(function: Callable[..., Any], num_operands: int) -> Callable[..., Operation]:
    def build(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
        if len(given) != num_operands or any(array.dims != result.dims for array in given):
            raise _damaged(found)
        if any(array.dtype != given[0].dtype for array in given):
            raise _damaged(found)
        if given[0].dtype[0] != "f":
            return function
        if given[0].dtype == "f64":
            raise Undecidable(f"{called(found)}, arithmetic in f64, which is not evaluated")
        return _exact(found, function)

    return build


def _exact(found: Instruction, function: Callable[..., Any]) -> Operation:
    """Of at most 32-bit floats: the result in 64 bits, when fewer hold it too."""

    def apply(*values: Values) -> Values:
        wide = function(*(value.astype(np.float64) for value in values))
        narrow: Values = wide.astype(values[0].dtype)
        if not (np.isfinite(wide).all() and (narrow == wide).all()):
            raise _rounded(found)
        return narrow

    return apply


def _divide(left: Values, right: Values) -> Values:
    """Rounds towards zero; by zero: all bits set; the lowest number by -1: itself."""
    if left.dtype.kind == "f":
        quotient: Values = left / right
        if (quotient * right != left).any() or (np.abs(quotient) > 1 << 24).any():
            return np.full_like(quotient, np.nan)  # not exact: refused by who asked
        return quotient
    safe = np.where(right == 0, 1, right).astype(left.dtype)
    if left.dtype.kind == "u":
        return np.where(right == 0, np.iinfo(left.dtype).max, left // safe)
    negated = safe == -1
    safe = np.where(negated, 1, safe).astype(left.dtype)
    floor = left // safe
    rest = left - floor * safe
    quotient = floor + ((rest != 0) & ((left < 0) != (safe < 0))).astype(left.dtype)
    quotient = np.where(negated, np.negative(left), quotient)
    return np.where(right == 0, left.dtype.type(-1), quotient)


def _remainder(left: Values, right: Values) -> Values:
    """With the sign of the dividend; by zero: the dividend."""
    if left.dtype.kind == "f":
        return np.fmod(left, right)
    return np.where(right == 0, left, left - _divide(left, right) * right)


def _shift(kind: str) -> Callable[[Values, Values], Values]:
    """Shifts by a number without sign; those by the width or more push every bit out."""

    def apply(value: Values, amount: Values) -> Values:
        bits = value.dtype.itemsize * 8
        unsigned = np.dtype(f"u{value.dtype.itemsize}")
        steps = amount.view(unsigned)
        over = steps >= bits
        small = np.where(over, 0, steps).astype(unsigned)
        if kind == "arithmetic":
            held = np.where(over, bits - 1, steps).astype(value.dtype)
            signed = value.view(np.dtype(f"i{value.dtype.itemsize}"))
            return (signed >> held.view(signed.dtype)).view(value.dtype)
        raw = np.ascontiguousarray(value).view(unsigned)
        moved = raw << small if kind == "left" else raw >> small
        return np.where(over, unsigned.type(0), moved).astype(unsigned).view(value.dtype)

    return apply


def _bitwise(function: Callable[..., Any], num_operands: int) -> Callable[..., Operation]:
    def build(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
        if result.dtype[0] == "f":
            raise _damaged(found)
        return _elementwise(function, num_operands)(found, result, given, machine)

    return build


def _ordered(function: Callable[..., Any], num_operands: int) -> Callable[..., Operation]:
    """Needs no rounding in any float type, but backends disagree about NaN and signed zeros."""

    def build(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
        if len(given) != num_operands or any(array.dtype != result.dtype for array in given):
            raise _damaged(found)
        return lambda *values: _no_nan(found, function(*_spread(values)))

    return build


def _no_nan(found: Instruction, value: Values) -> Values:
    if value.dtype.kind == "f" and np.isnan(value).any():
        raise Undecidable(f"{called(found)}, which is not a number")
    return value


def _spread(values: Sequence[Values]) -> list[Values]:
    """Scalars made to fit beside arrays (a clamp's bounds, a select's predicate)."""
    rank = max(value.ndim for value in values)
    return [
        value.reshape(len(value), *[1] * (rank - 1)) if value.ndim == 1 else value
        for value in values
    ]


def _clamp(low: Values, value: Values, high: Values) -> Values:
    return np.minimum(np.maximum(low, value), high)


def _select(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    chosen, left, right = given
    if chosen.dtype != "pred" or left != right:
        raise _damaged(found)
    return lambda *values: np.where(*_spread(values))


def _compare(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    left, right = given
    floats = left.dtype[0] == "f"
    if left != right or (floats and found.attributes.get("type") == "TOTALORDER"):
        raise _damaged(found)
    return _COMPARED[found.attributes["direction"]]


def _convert(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    to = np.dtype(_DTYPES[result.dtype])

    def apply(value: Values) -> Values:
        if to.kind == "b":
            return value != 0
        if value.dtype.kind != "f" and to.kind != "f":
            return value.astype(to)  # wraps
        if value.dtype.kind == "f" and to.kind != "f":
            whole = np.trunc(value.astype(np.float64))
            if not (np.isfinite(whole).all() and (np.abs(whole) < 1 << 53).all()):
                raise Undecidable(f"{called(found)}, which is out of range")
            answer = whole.astype(np.int64).astype(to)
            if (answer.astype(np.float64) != whole).any():
                raise Undecidable(f"{called(found)}, which is out of range")
            return answer
        answer = value.astype(to)
        if not (answer.astype(value.dtype) == value).all():
            raise _rounded(found)
        return answer

    return apply


def _bitcast(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    (source,), to = given, np.dtype(_DTYPES[result.dtype])
    if to.itemsize != np.dtype(_DTYPES[source.dtype]).itemsize:
        raise _damaged(found)
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


def _broadcast(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    (source,), axes = given, _numbers(found, "dimensions")
    shape = [1] * len(result.dims)
    for axis, size in zip(axes, source.dims, strict=True):
        if axis < 0 or result.dims[axis] != size:
            raise _damaged(found)
        shape[axis] = size
    if axes != sorted(axes):
        raise Undecidable(f"{called(found)}, which changes the order of dimensions")
    return lambda value: np.broadcast_to(
        value.reshape(len(value), *shape), (len(value), *result.dims)
    )


def _reshape(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    return lambda value: value.reshape(len(value), *result.dims)


def _transpose(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    order = [0, *(axis + 1 for axis in _numbers(found, "dimensions"))]
    return lambda value: value.transpose(order)


def _reverse(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    axes = tuple(axis + 1 for axis in _numbers(found, "dimensions"))
    return lambda value: np.flip(value, axes)


def _concatenate(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    (axis,) = _numbers(found, "dimensions")

    def apply(*values: Values) -> Values:
        rows = max(map(len, values))
        full = [np.broadcast_to(value, (rows, *value.shape[1:])) for value in values]
        return np.concatenate(full, axis=axis + 1)

    return apply


def _slice(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    ranges = _RANGE.findall(found.attributes["slice"])
    parts = tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in ranges)
    if any(part.stop > size for part, size in zip(parts, given[0].dims, strict=True)):
        raise _damaged(found)
    return lambda value: value[(slice(None), *parts)]


def _pad(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
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
        raise _damaged(found)


def _dynamic_slice(
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


def _dynamic_update_slice(
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


def _reduce(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    source, _ = given
    combine = reducer(found, machine.module)
    rounds = source.dtype[0] == "f" and combine in (np.add, np.multiply)
    axes = tuple(axis + 1 for axis in _numbers(found, "dimensions"))

    def apply(value: Values, first: Values) -> Values:
        if rounds:
            raise _rounded(found)
        inner = combine.reduce(_no_nan(found, value), axis=axes, initial=None, dtype=value.dtype)
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


def _exchanged(
    found: Instruction, result: Array, given: list[Array], machine: Machine
) -> Operation:
    if len(given) != 1:
        raise Undecidable(f"{called(found)}, which passes several arrays")
    combine = None
    if found.opcode.startswith("all-reduce"):
        combine = reducer(found, machine.module)
    exchanged = exchange(found, machine.module, machine.num_devices, combine)
    rounds = given[0].dtype[0] == "f" and combine in (np.add, np.multiply)

    def apply(value: Values) -> Values:
        if rounds:
            raise _rounded(found)
        return exchanged(value)

    return apply


_OPCODES: Mapping[str, Callable[..., Operation]] = MappingProxyType(
    {
        **{"constant": _constant, "iota": _iota, "compare": _compare, "convert": _convert},
        **{"partition-id": _partition, "replica-id": _partition, "select": _select},
        "add": _elementwise(np.add, 2),
        "subtract": _elementwise(np.subtract, 2),
        "multiply": _elementwise(np.multiply, 2),
        "divide": _elementwise(_divide, 2),
        "remainder": _bitwise(_remainder, 2),
        "and": _bitwise(np.bitwise_and, 2),
        "or": _bitwise(np.bitwise_or, 2),
        "xor": _bitwise(np.bitwise_xor, 2),
        "not": _bitwise(np.invert, 1),
        "shift-left": _bitwise(_shift("left"), 2),
        "shift-right-logical": _bitwise(_shift("logical"), 2),
        "shift-right-arithmetic": _bitwise(_shift("arithmetic"), 2),
        "maximum": _ordered(np.maximum, 2),
        "minimum": _ordered(np.minimum, 2),
        "clamp": _ordered(_clamp, 3),
        "negate": _ordered(np.negative, 1),
        "abs": _ordered(np.abs, 1),
        "sign": _ordered(np.sign, 1),
        "floor": _ordered(np.floor, 1),
        "ceil": _ordered(np.ceil, 1),
        **{"bitcast": _bitcast, "bitcast-convert": _bitcast, "broadcast": _broadcast},
        **{"reshape": _reshape, "transpose": _transpose, "reverse": _reverse, "pad": _pad},
        **{"concatenate": _concatenate, "slice": _slice, "dynamic-slice": _dynamic_slice},
        **{"dynamic-update-slice": _dynamic_update_slice, "reduce": _reduce},
        **dict.fromkeys(EXCHANGES, _exchanged),
    }
)
