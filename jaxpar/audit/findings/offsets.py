"""What an index is on each device, where constants and the device's own number decide it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.dataflow import SAME_VALUE, Place
from jaxpar.audit.findings.values import Producers, operand_places, value_key
from jaxpar.audit.shape import Array

MAX_INSTRUCTIONS = 64
"""Instructions that are worked out for one index; JAX needs about ten."""

MAX_DEVICES = 1 << 14
"""Devices of a program up to which this is worked out: 16,384."""

_Values = NDArray[np.int64]
_NUMBERS = re.compile(r"[{}\s]*-?[0-9]{1,10}(?:[,{}\s]+-?[0-9]{1,10})*[{}\s]*")
_INTEGERS = ("s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "pred")
_SAME_NUMBER = SAME_VALUE | {"convert"}


def _divided(left: _Values, right: _Values) -> _Values:
    quotient = np.abs(left) // np.maximum(np.abs(right), 1)
    return np.where((left < 0) == (right < 0), quotient, -quotient)


_BINARY: Mapping[str, Callable[[_Values, _Values], _Values]] = MappingProxyType(
    {
        "add": lambda left, right: left + right,
        "subtract": lambda left, right: left - right,
        "multiply": lambda left, right: left * right,
        "divide": _divided,
        "remainder": lambda left, right: left - right * _divided(left, right),
        "and": lambda left, right: left & right,
        "or": lambda left, right: left | right,
        "shift-left": lambda left, right: left << np.clip(right, 0, 62),
        "shift-right-logical": lambda left, right: left >> np.clip(right, 0, 62),
        "minimum": np.minimum,
        "maximum": np.maximum,
    }
)
_COMPARED: Mapping[str, Callable[[_Values, _Values], NDArray[np.bool_]]] = MappingProxyType(
    {
        "EQ": np.equal,
        "NE": np.not_equal,
        "LT": np.less,
        "LE": np.less_equal,
        "GT": np.greater,
        "GE": np.greater_equal,
    }
)


def on_each_device(producers: Producers, place: Place) -> _Values | None:
    """The integer at `place` on each partition, [devices]; None where it is not decided by that.

    Integers of any width are taken to be wide enough.
    """
    devices = producers.reading.module.partitions
    if devices is None or devices > MAX_DEVICES or producers.reading.module.replicas != 1:
        return None
    known: dict[object, _Values] = {}
    todo = [place]
    for _ in range(4 * MAX_INSTRUCTIONS):
        if not todo:
            break
        end = producers.end(todo[-1], through=_SAME_NUMBER)
        if end is None or end.instruction is None or len(known) > MAX_INSTRUCTIONS:
            return None
        key = value_key(end)
        if key in known:
            todo.pop()
            continue
        given = [producers.end(it, through=_SAME_NUMBER) for it in _operands(end)]
        missing = [it for it in given if it is not None and value_key(it) not in known]
        if missing:
            todo += missing
            continue
        operands = [known[value_key(it)] for it in given if it is not None]
        made = _made(end, operands, devices) if len(operands) == len(given) else None
        if made is None:
            return None
        known[key] = made
    end = producers.end(place, through=_SAME_NUMBER)
    return None if end is None else known.get(value_key(end))


def _operands(end: Place) -> list[Place]:
    return [] if end.instruction is None else operand_places(end.instruction, end)


def _made(end: Place, operands: list[_Values], devices: int) -> _Values | None:
    """The result of one instruction, [devices], or the entries of a table, [1, entries]."""
    found = end.instruction
    if found is None or not isinstance(found.shape, Array) or found.shape.dtype not in _INTEGERS:
        return None
    if found.opcode == "partition-id":
        return np.arange(devices, dtype=np.int64)
    if found.opcode == "constant":
        return _constant(found.operands_text, found.shape.dims, devices)
    if found.opcode == "dynamic-slice" and len(operands) == 2 and found.shape.dims == (1,):
        table, index = operands
        return table[0][np.clip(index, 0, table.shape[1] - 1)] if table.ndim == 2 else None
    if any(it.ndim != 1 for it in operands):
        return None
    with np.errstate(over="ignore"):
        if found.opcode in _BINARY and len(operands) == 2:
            return _BINARY[found.opcode](*operands)
        if found.opcode == "compare" and len(operands) == 2:
            compared = _COMPARED.get(found.attributes.get("direction", ""))
            return None if compared is None else compared(*operands).astype(np.int64)
        if found.opcode == "select" and len(operands) == 3:
            return np.where(operands[0] != 0, operands[1], operands[2])
        if found.opcode == "clamp" and len(operands) == 3:
            return np.minimum(np.maximum(operands[1], operands[0]), operands[2])
    return None


def _constant(text: str, dims: tuple[int, ...], devices: int) -> _Values | None:
    """A number, the same on every device, or a table."""
    text = text.replace("true", "1").replace("false", "0")
    if len(text) > 12 * MAX_DEVICES or not _NUMBERS.fullmatch(text):
        return None
    numbers = np.array([int(it) for it in re.findall(r"-?[0-9]+", text)], dtype=np.int64)
    if not dims and len(numbers) == 1:
        return np.full(devices, numbers[0])
    return numbers[None] if dims == (len(numbers),) else None
