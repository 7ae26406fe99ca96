"""Errors for people: what was given, which rule, the numbers, what to change."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any


class JaxparError(ValueError):
    """Anything a user of jaxpar can put right. Always raised before tracing."""


class MeshError(JaxparError):
    """A mesh file, a MeshSpec or the machine's devices do not fit together."""


class TextError(JaxparError):
    """A text file, or a batch of a size that the text cannot fill."""


class ConfigError(JaxparError):
    """A model configuration or preset that cannot exist."""


class PlanError(JaxparError):
    """A plan that this mesh or this model cannot carry out."""


class AuditError(JaxparError):
    """Something that cannot be read as a compiled program."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence naming the closest known word, or all of them when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, as the end of a sentence: '8 or 12'."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def nearest_divisors(value: int, target: int) -> str:
    """The divisors of `value` closest to `target`, as the end of a sentence: '2 or 4'."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    best = sorted(divisors, key=lambda d: (abs(d - target), d))[:2]
    return " or ".join(str(d) for d in sorted(best))


def is_whole(value: Any) -> bool:
    """An `int` and nothing that merely compares like one: not True, not 2.0."""
    return isinstance(value, int) and not isinstance(value, bool)


def nearest_whole(value: Any, smallest: int, largest: int) -> int:
    """The whole number in range that was most likely meant. NaN and words count as `smallest`."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value.strip()):
        value = int(value)
    number = value if isinstance(value, int | float) else smallest
    return round(min(largest, max(smallest, number)))


def shown(value: Any) -> str:
    """`repr`, short, also for an integer with more digits than Python agrees to print."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200  # room for a path
    try:
        return short.repr(value)
    except ValueError:
        return "a huge number"
