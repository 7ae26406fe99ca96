"""Errors for people: what was given, which rule, the numbers, what to change."""

from __future__ import annotations

import difflib
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

MAX_SIZE = (1 << 31) - 1
"""Of anything that is counted: as far as JAX's int32 indices reach."""


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


class ScheduleError(JaxparError):
    """A table of pipeline actions that cannot be read, or that no pipeline can carry out."""


class CheckpointError(JaxparError):
    """A folder that holds no checkpoint of this training, or cannot hold one."""


class RequestError(JaxparError):
    """A request that cannot be served: what it asks for, or what the plan has room for."""


class LostError(JaxparError):
    """A request that nobody is left to serve: every device that could was lost. No wrong input."""

    exit_code = 1


class IndependenceError(JaxparError):
    """Replicas that communicate, or of which it cannot be told that they do not."""

    exit_code = 1


class ExperimentError(JaxparError):
    """A script that says what to train and cannot be read, or says what cannot be."""


class DivergedError(JaxparError):
    """Training that came to a loss, gradient or parameter that is not finite; not a user's input.

    step: which one, counted from 1. leaf: the first of the state that is not finite, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, step: int, leaf: str | None) -> None:
        super().__init__(message)
        self.step, self.leaf = step, leaf


class TargetError(JaxparError):
    """Hardware to compile for that does not exist, that a mesh does not fit, or that cannot be
    compiled for here."""


class CompilerError(TargetError):
    """A target's compiler that refused the program, ended, or took too long or too much memory."""

    exit_code = 1


class OutOfDeviceMemoryError(CompilerError):
    """A program that does not fit into the memory of one device, in bytes where they are told."""

    def __init__(
        self, message: str, *, used_bytes: int | None = None, available_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.used_bytes, self.available_bytes = used_bytes, available_bytes


class AuditError(JaxparError):
    """Something that cannot be read as a compiled program; `line` is where, if that is known."""

    line: int | None = None

    def at(self, line: int) -> AuditError:
        """The same error, at this line unless an inner one is known."""
        self.line = self.line or line
        return self


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence naming the closest known word, or all of them when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def nearest_multiples(value: int, step: int, at_most: int = MAX_SIZE) -> str:
    """The multiples of `step` around `value`, as the end of a sentence: '8 or 12', '' for none."""
    below = value // step * step
    return " or ".join(str(m) for m in (below, below + step) if 0 < m <= at_most)


def nearest_divisors(value: int, target: int, fits: Callable[[int], bool] = lambda d: True) -> str:
    """The divisors of `value` around `target` that fit, as for `nearest_multiples`: '2 or 4'."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted(d for d in {*small, *(value // d for d in small)} if fits(d))
    below, above = ([d for d in divisors if (d > target) == side] for side in (False, True))
    return " or ".join(str(d) for d in (*below[-1:], *above[:1]))


def is_whole(value: Any) -> bool:
    """An `int` and nothing that merely compares like one: not True, not 2.0."""
    return isinstance(value, int) and not isinstance(value, bool)


def nearest_whole(value: Any, smallest: int, largest: int) -> int:
    """The whole number in range that was most likely meant. NaN and words count as `smallest`."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value.strip()):
        value = int(value)
    number: Any = value if isinstance(value, numbers.Real) else smallest
    return round(min(largest, max(smallest, number)))


def require_whole(error: type[JaxparError], field: str, value: Any, at_least: int = 1) -> None:
    """Raise `error` unless `value` is a whole number from `at_least` to MAX_SIZE."""
    if not is_whole(value) or not at_least <= value <= MAX_SIZE:
        raise error(
            f"{field}={shown(value)} ({type(value).__name__}) must be a whole number from "
            f"{at_least} to {MAX_SIZE}. Nearest: {nearest_whole(value, at_least, MAX_SIZE)}."
        )


def require_positive(
    error: type[JaxparError], field: str, value: Any, example: float, note: str = ""
) -> None:
    """Raise `error` unless `value` is a number above 0 that float32 has; True is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1e-37 < value < 1e38:
        raise error(
            f"{field}={shown(value)} ({type(value).__name__}) must be a number above 0 that "
            f"float32 can hold, such as {example}{note}."
        )


def require_kind(
    error: type[JaxparError], field: str, value: Any, kind: type, example: str
) -> None:
    """Raise `error` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise error(
            f"{field}={shown(value)} ({type(value).__name__}) must be a {kind.__name__}, such as "
            f"{example}."
        )


def require_choice(
    error: type[JaxparError], field: str, value: Any, choices: Iterable[str | int | None]
) -> None:
    """Raise `error` unless `value` is one of `choices`, type included: 1 is not True."""
    choices = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise error(
            f"{field}={shown(value)} ({type(value).__name__}) must be one of: "
            f"{', '.join(map(repr, choices))}."
        )


def in_a_line(error: BaseException) -> str:
    """Of somebody else's error: what it is called, and the first line of what it says."""
    text = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: Any) -> str:
    """`repr`, short, also for an integer with more digits than Python agrees to print."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200  # room for a path
    try:
        return short.repr(value)
    except ValueError:
        return "a huge number"
