"""Copies between a device and its host's memory that a compiled program says it makes.

XLA writes the memory an array lies in into its layout: `S(5)` is the host's. On TPUs each copy is
asynchronous and one of three instructions, whose results begin with what they read and write (for
a `copy-start`, the destination first). On CPUs there are none, since pinned memory is where arrays
are anyway; a CUDA program compiled without a device has lost the requests to copy.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from jaxpar.audit.shape import bit_width, integer

Direction = Literal["to host", "to device"]


class HostCopy(NamedTuple):
    """One copy in a program; `executions` is None inside loops, whose turns are not counted."""

    direction: Direction
    executions: int | None
    num_bytes: int


class OffloadIgnoredWarning(UserWarning):
    """A program was to move arrays to host memory, and the compiled one does not."""


class Copied(Protocol):
    """What is asked of a copy here (strategies' `Transfer` has it)."""

    @property
    def direction(self) -> Direction: ...
    @property
    def num_bytes(self) -> int: ...


class _Leaf(NamedTuple):
    num_bytes: int
    is_on_host: bool


_COPY = re.compile(
    r"^\s*(?:ROOT )?\S+ = (.*?) (copy|dynamic-update-slice|dynamic-slice)-start\(", re.MULTILINE
)
_ARRAY = re.compile(r"\b([a-z]\w{0,15})\[([\d,]{0,400})\](\{[^{}]{0,400}\})?")


def host_copies(text: str) -> list[HostCopy]:
    """The copies of an HLO text, in its order. AuditError for types it cannot read."""
    return list(_copies(text)) if "S(5)" in text else []


def _copies(text: str) -> Iterator[HostCopy]:
    entry = text.find("\nENTRY ")
    for found in _COPY.finditer(text):
        if "S(5)" not in found[1]:
            continue
        first, second, *more = (_leaf(array) for array in _ARRAY.finditer(found[1]))
        if found[2] == "copy":
            to, of = first, second
        elif found[2] == "dynamic-update-slice":
            to, of = first._replace(num_bytes=second.num_bytes), second
        else:
            to, of = more[-2], first  # indices come between, and a context last
        if to.is_on_host != of.is_on_host:
            direction: Direction = "to host" if to.is_on_host else "to device"
            yield HostCopy(direction, 1 if found.start() > entry else None, to.num_bytes)


def _leaf(array: re.Match[str]) -> _Leaf:
    sizes = [integer(size, "a dimension") for size in array[2].split(",") if size]
    bits = math.prod(sizes) * bit_width(array[1])
    return _Leaf((bits + 7) // 8, "S(5)" in (array[3] or ""))


def warn_if_ignored(asked: Iterable[Copied], text: str, platform: str) -> None:
    """Warn of a direction in which a program was asked to copy and the compiled one never does.

    On a CPU nothing is expected: there is one memory.
    """
    if platform == "cpu":
        return
    made = {copy.direction for copy in host_copies(text)}
    for direction in ("to host", "to device"):
        wanted = [copy for copy in asked if copy.direction == direction]
        if wanted and direction not in made:
            warnings.warn(
                f"The program asks for {len(wanted)} kinds of copies {direction} memory (the "
                f"largest of {max(copy.num_bytes for copy in wanted):,} B), and what {platform} "
                f"compiled makes none: its offload is not in effect, and device memory holds it "
                f"all. Expect the memory of offload=None.",
                OffloadIgnoredWarning,
                stacklevel=2,
            )
