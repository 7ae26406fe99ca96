"""What opcodes mean on small arrays, for all devices at once, with NumPy.

Only what every backend computes alike is evaluated: integers and booleans as XLA defines them, and
floating-point results that need no rounding. All else raises `Undecidable`, which says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit import moving
from jaxpar.audit.exchange import EXCHANGES
from jaxpar.audit.reader import Instruction
from jaxpar.audit.shape import Array, integer
from jaxpar.audit.values import (
    MAX_VALUES,
    NUMPY_DTYPES,
    Machine,
    Operation,
    Undecidable,
    Values,
    called,
    damaged,
    large,
    no_nan,
    numpy_dtype,
    rounded,
)
from jaxpar.errors import AuditError

_NUMBER = re.compile(r"[^\s{},]+")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_COMPARED = MappingProxyType(
    {
        **{"EQ": np.equal, "NE": np.not_equal, "LT": np.less},
        **{"LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal},
    }
)


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
    dtype = numpy_dtype(found, result)
    for array in operands:
        numpy_dtype(found, array)
    try:
        function = _OPCODES[opcode](found, result, list(operands), machine)
    except (AuditError, ValueError, IndexError, KeyError) as error:
        raise damaged(found) from error
    num_elements = math.prod(result.dims)

    def checked(*values: Values) -> Values:
        if max((len(value) for value in values), default=1) * num_elements > MAX_VALUES:
            raise large(found, num_elements)
        try:
            answer = function(*values)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise damaged(found) from error
        if answer.dtype != dtype or answer.shape[1:] != result.dims:
            raise damaged(found)
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


# One function per opcode: (instruction, type of the result, types of the operands, machine) to the
# function of the values. They may assume small arrays of evaluated types.


def _constant(found: Instruction, result: Array, _: list[Array], machine: Machine) -> Operation:
    dtype = np.dtype(NUMPY_DTYPES[result.dtype])
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
            raise damaged(found)
    with np.errstate(all="ignore"):
        value = np.array(numbers, dtype=dtype).reshape(1, *result.dims)
    return lambda: value


def _iota(found: Instruction, result: Array, _: list[Array], machine: Machine) -> Operation:
    axis = integer(found.attributes["iota_dimension"], "iota_dimension")
    steps = np.arange(result.dims[axis]).astype(NUMPY_DTYPES[result.dtype])
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
    value = ids.astype(NUMPY_DTYPES[result.dtype])
    return lambda: value


def _elementwise(function: Callable[..., Any], num_operands: int) -> Callable[..., Operation]:
    def build(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
        if len(given) != num_operands or any(array.dims != result.dims for array in given):
            raise damaged(found)
        if any(array.dtype != given[0].dtype for array in given):
            raise damaged(found)
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
            raise rounded(found)
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
            raise damaged(found)
        return _elementwise(function, num_operands)(found, result, given, machine)

    return build


def _ordered(function: Callable[..., Any], num_operands: int) -> Callable[..., Operation]:
    """Needs no rounding in any float type, but backends disagree about NaN and signed zeros."""

    def build(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
        if len(given) != num_operands or any(array.dtype != result.dtype for array in given):
            raise damaged(found)
        return lambda *values: no_nan(found, function(*_spread(values)))

    return build


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
        raise damaged(found)
    return lambda *values: np.where(*_spread(values))


def _compare(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    left, right = given
    floats = left.dtype[0] == "f"
    if left != right or (floats and found.attributes.get("type") == "TOTALORDER"):
        raise damaged(found)
    return _COMPARED[found.attributes["direction"]]


def _convert(found: Instruction, result: Array, given: list[Array], machine: Machine) -> Operation:
    to = np.dtype(NUMPY_DTYPES[result.dtype])

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
            raise rounded(found)
        return answer

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
        "bitcast": moving.bitcast,
        "bitcast-convert": moving.bitcast,
        "broadcast": moving.broadcast,
        "reshape": moving.reshape,
        "transpose": moving.transpose,
        "reverse": moving.reverse,
        "pad": moving.pad,
        "concatenate": moving.concatenate,
        "slice": moving.strided_slice,
        "dynamic-slice": moving.dynamic_slice,
        "dynamic-update-slice": moving.dynamic_update_slice,
        "reduce": moving.reduce,
        **dict.fromkeys(EXCHANGES, moving.exchanged),
    }
)
