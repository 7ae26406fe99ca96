"""Types as HLO prints them: `f32[8,128]{1,0:T(8,128)}`, `token[]`, tuples of tuples."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from jaxpar.errors import AuditError

MAX_NESTING = 64
"""Deepest tuple type that is read; XLA itself prints three levels."""

MAX_DIMS = 64
"""Most dimensions of an array; NumPy and XLA stop well before."""

MAX_ELEMENTS = 1 << 60
"""Elements of an array that no memory holds; what is larger no float need count."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
        **dict.fromkeys(("f8e3m4", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fn", "f8e4m3fnuz"), 8),
        **dict.fromkeys(("f8e5m2", "f8e5m2fnuz", "f8e8m0fnu", "pred"), 8),
        **{"f4e2m1fn": 4, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
        **{"token": 0, "opaque": 0},
    }
)
"""Bits of one element, by the name HLO gives the type."""

_ELEMENT = re.compile(r"([A-Za-z]\w*)\[([^\[\]]*)\]")
_OPENING = re.compile(r"(?:[A-Za-z]\w*)?\(")  # a buffer prints as b(f32[2])
_SKIP = re.compile(r"(?:[\s,]+|/\*[^*]*\*/)+")
_MAX_REMEMBERED = 200  # characters
_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[()\[\]{}]', re.DOTALL)


def close(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed (index after it), or -1. Linear."""
    depth = 0
    for token in _BRACKET.finditer(text, start):
        first = text[token.start()]
        if first in "([{":
            depth += 1
        elif first in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def integer(text: str, what: str) -> int:
    """A decimal number of at most 18 digits; `AuditError` otherwise, naming `what`."""
    text = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise AuditError(
            f"{what}: {text[:40]!r} is not a number of at most 18 digits. The HLO text is damaged; "
            "print it again with compiled.as_text()."
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array type: element type as HLO names it, and dimensions in elements."""

    dtype: str
    dims: tuple[int, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the array without padding; sub-byte types are packed.

        Raises AuditError for an element type of unknown width.
        """
        return (math.prod(self.dims) * bit_width(self.dtype) + 7) // 8


Shape: TypeAlias = "Array | tuple[Shape, ...]"


def bit_width(dtype: str) -> int:
    """Bits of one element of `dtype`; AuditError when this version does not know the type."""
    if dtype in DTYPE_BITS:
        return DTYPE_BITS[dtype]
    raise AuditError(
        f"Element type {dtype!r} has no known width, so bytes cannot be counted. "
        "Add it to jaxpar.audit.shape, or audit a program without it."
    )


def parse_shape(text: str) -> Shape:
    """The type that `text` prints; layouts and index comments are dropped. AuditError if none."""
    return _remembered(text) if len(text) <= _MAX_REMEMBERED else _parsed(text)


def _parsed(text: str) -> Shape:
    stack: list[list[Shape]] = [[]]
    at = 0
    while at < len(text):
        if skip := _SKIP.match(text, at):
            at = skip.end()
        elif opening := _OPENING.match(text, at):
            at = opening.end()
            stack.append([])
            if len(stack) > MAX_NESTING:
                raise _unreadable(text, f"tuples nest deeper than {MAX_NESTING}")
        elif text[at] == ")" and len(stack) > 1:
            done = tuple(stack.pop())
            stack[-1].append(done)
            at += 1
        elif text[at] == "{" and (end := close(text, at)) > 0:
            at = end
        elif element := _ELEMENT.match(text, at):
            dims = tuple(
                integer(size.strip().removeprefix("<="), "array dimension")
                for size in element[2].split(",")
                if size.strip()
            )
            if len(dims) > MAX_DIMS or math.prod(map(abs, dims)) > MAX_ELEMENTS:
                raise _unreadable(text, "no memory holds such an array")
            stack[-1].append(Array(dtype=element[1], dims=dims))
            at = element.end()
        else:
            raise _unreadable(text, f"nothing known starts at {text[at : at + 20]!r}")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise _unreadable(text, "its brackets do not close around one type")
    return stack[0][0]


_remembered = functools.lru_cache(maxsize=1 << 12)(_parsed)  # few types, many times each


def leaves(shape: Shape) -> Iterator[Array]:
    """The arrays in a type, left to right; without recursion."""
    todo = [shape]
    while todo:
        part = todo.pop()
        if isinstance(part, Array):
            yield part
        else:
            todo.extend(reversed(part))


def nbytes(shape: Shape) -> int:
    """Bytes of all arrays in a type together."""
    return sum(array.nbytes for array in leaves(shape))


def _unreadable(text: str, why: str) -> AuditError:
    return AuditError(
        f"{text[:60]!r} is not an HLO type: {why}. The text is damaged or not HLO; "
        "print it again with compiled.as_text()."
    )
