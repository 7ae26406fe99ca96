"""What is to be executed of a module: computations as lists of steps on numbered slots.

A slot holds one array of `values.Values`, or says why it is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from jaxpar.audit.reader import Instruction
from jaxpar.audit.values import Operation

Path: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[str, Path]  # an array: a name in a computation, and where in its tuple
Passed: TypeAlias = list[tuple[int, int]]  # slots here and there


class Stop(Exception):
    """The evaluation as a whole cannot go on; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """In place of a value: what it depends on, as the end of a sentence."""

    reason: str


Value: TypeAlias = "NDArray[Any] | Unknown"


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One instruction on arrays."""

    found: Instruction
    function: Operation
    inputs: tuple[int, ...]
    output: int


@dataclass(kw_only=True)
class Call:
    """One instruction that runs computations; which slots go in, and come back.

    `passes[i]` are the slots given to the i-th of `found.called`, `returns[i]` those taken from it.
    `index` is the slot that chooses among branches.
    """

    found: Instruction
    passes: list[Passed] = field(default_factory=list)
    returns: list[Passed] = field(default_factory=list)
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Carried:
    """An array in the state of a loop: its slots outside, in the condition and in the body."""

    first: int
    output: int | None
    test: int | None
    body: int | None
    root: int


@dataclass(kw_only=True)
class Loop:
    """A loop with what of its state matters; `more` is the slot of the condition's answer.

    `trips` is their number where the text tells, and then the condition is not executed.
    """

    found: Instruction
    condition: str
    body: str
    trips: int | None
    state: list[Carried] = field(default_factory=list)
    more: int | None = None


Step: TypeAlias = "Compute | Call | Loop"


@dataclass(kw_only=True)
class Plan:
    """What to do for one run of a computation: copy `template`, fill in arguments, do `steps`.

    `slots` are those of all arrays, `results` those that a call fills, by its name.
    """

    template: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    slots: dict[Key, int] = field(default_factory=dict)
    arguments: dict[tuple[int, Path], int] = field(default_factory=dict)
    results: dict[str, list[tuple[Path, int]]] = field(default_factory=dict)

    def slot(self, key: Key) -> int:
        """The slot of an array; a new one that says so where nothing makes it."""
        found = self.slots.get(key)
        return (
            self.nothing(f"{key[0]}, which is read before it is made") if found is None else found
        )

    def nothing(self, reason: str) -> int:
        """A new slot without a value."""
        self.template.append(Unknown(reason=reason))
        return len(self.template) - 1
