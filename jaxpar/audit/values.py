"""Small arrays that stand for HLO values on all devices, and why a value is not known.

A value is an array [devices or 1, *dims]: one row per device, or one for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.reader import Instruction, Module
from jaxpar.audit.shape import Array, integer

MAX_ELEMENTS = 1 << 16
"""Elements of an array on one device; a larger one is taken to be data."""

MAX_VALUES = 1 << 22
"""Elements of an array on all devices together."""

MAX_RANK = 16

Values: TypeAlias = NDArray[Any]
Operation: TypeAlias = Callable[..., Values]

NUMPY_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {
        **{"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64},
        **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
        **{"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64},
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


def numpy_dtype(found: Instruction, array: Array) -> np.dtype[Any]:
    if array.dtype not in NUMPY_DTYPES:
        raise Undecidable(f"{called(found)} of type {array.dtype}, which is not evaluated")
    if len(array.dims) > MAX_RANK:
        raise Undecidable(f"{called(found)}, which has {len(array.dims)} dimensions")
    if (num_elements := math.prod(array.dims)) > MAX_ELEMENTS:
        raise large(found, num_elements)
    return np.dtype(NUMPY_DTYPES[array.dtype])


def large(found: Instruction, num_elements: int) -> Undecidable:
    return Undecidable(f"{called(found)}, an array of {num_elements} elements, which is too large")


def damaged(found: Instruction) -> Undecidable:
    return Undecidable(f"{called(found)}, which does not fit together with its operands")


def rounded(found: Instruction) -> Undecidable:
    return Undecidable(f"{called(found)}, whose result is rounded")


def numbers_of(found: Instruction, key: str) -> list[int]:
    """The numbers of an attribute such as `dimensions={0,1}`."""
    words = found.attributes[key].strip("{}").split(",")
    return [integer(word, key) for word in words if word.strip()]


def no_nan(found: Instruction, value: Values) -> Values:
    if value.dtype.kind == "f" and np.isnan(value).any():
        raise Undecidable(f"{called(found)}, which is not a number")
    return value
