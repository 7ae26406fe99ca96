"""Reads the text of an HLO module into computations of instructions. Executes nothing.

Strict about what is missing: whatever cannot be read is kept in `Module.problems`, because a number
that silently leaves something out is worse than none. Time is linear in the text, and most of it is
never looked at: the text is cut into computations, and of these only the ones are read that can
communicate. Those called only as a fusion or for elements, and without any sign of communication,
are `inert`; they are read when somebody asks for their instructions.
"""

from __future__ import annotations

import gc
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from jaxpar.audit.computation import Computation, occurrences, problem
from jaxpar.audit.instruction import Instruction, Operand, name_on, parse, split_top
from jaxpar.audit.shape import integer
from jaxpar.errors import AuditError

__all__ = ["Computation", "Instruction", "Module", "Operand", "read_hlo"]

MAX_PROBLEMS = 20
"""Unreadable lines that are described one by one; further ones are only counted."""

MAX_READ = 1 << 14
"""Computations in memory beyond which those that were only looked into are forgotten."""

_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{", re.DOTALL)
_END = re.compile(  # of a computation, and the header of the next where that follows
    r"\n\}(?:[^\n]*+\n\n(ENTRY )?%?([^\s({]++)[^\n]*\{(?=\n))?"
)
_DEFINITION = re.compile(r"\s*(?:ROOT\s+)?%?[^\s=]+\s+=\s+")
_QUOTED = r'"((?:[^"\\]++|\\.)*+)(?:"|\\?\Z)'  # never fails after its first quote: linear
_FIELD = re.compile(rf"\b(\w++)=(?:{_QUOTED}|(\d{{1,18}}))", re.DOTALL)
_FRAME = re.compile(r"stack_frame_id=(\d{1,9})[ }]")
_TABLE_ROW = re.compile(rf"(\d{{1,9}})\s+(?:{_QUOTED}|\{{(.*)\}})", re.DOTALL)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_USED = re.compile(r"%([^\s,(){}=\"#]+)")
_DEFINED = re.compile(r"%([^\s%]++)\s++= ")
_UNPARTITIONED = re.compile(
    r'custom_call_target="(?:xla\.sdy\.|Sharding"|SPMDFullToShardShape"|SPMDShardToFullShape")'
    r"|xla\.sdy\.(?:sharding|meshes|manual_axes)="
)
_PLATFORM_MARKS = (
    ("tpu", '"flag_configs"'),
    ("gpu", '"operation_queue_id"'),
    ("cpu", '"outer_dimension_partitions"'),
)
_COMMUNICATES = ("replica_groups=", "source_target_pairs=", "channel_id=", "AsyncCollective")
_OPCODES = (" all-", " collective-", " ragged-", " reduce-scatter")
_FOR_ELEMENTS = "to_apply"  # of everything but a call
_OWN_FRAMES = ("jaxpar/collectives.py",)  # the caller is what a reader wants to see


@dataclass(frozen=True, kw_only=True)
class Module:
    """A whole text. `problems` says in words what is missing; empty for an intact text.

    `read` are the computations whose instructions are in memory.
    `unpartitioned` is the first line that still awaits XLA's partitioner, 0 when there is none.
    `platform` is a guess by what only one backend prints: cpu, gpu, tpu or unknown.
    """

    name: str
    text: str
    header: Mapping[str, str] | None
    computations: Mapping[str, Computation]
    entry: Computation | None
    tables: Mapping[str, Mapping[int, str]]
    platform: str
    differentiated: bool
    unpartitioned: int
    problems: tuple[str, ...]
    read: list[Computation]

    def forget_inert(self, unless: int = 0) -> None:
        """Forget what was read of inert computations, `unless` no more than that were read."""
        if len(self.read) <= unless:
            return
        inert = [computation for computation in self.read if computation.inert]
        self.read[:] = [computation for computation in self.read if not computation.inert]
        for computation in inert:
            computation.forget()

    @property
    def scheduled(self) -> bool:
        return self.header is not None and self.header.get("is_scheduled") == "true"

    @property
    def partitions(self) -> int | None:
        """num_partitions, 1 when the header does not say, None without a header."""
        return self._number("num_partitions")

    @property
    def replicas(self) -> int | None:
        """replica_count, 1 when the header does not say, None without a header."""
        return self._number("replica_count")

    def _number(self, key: str) -> int | None:
        if self.header is None:
            return None
        text = self.header.get(key, "1")
        return None if text == "unknown" else max(1, integer(text, key))

    @cached_property
    def active(self) -> list[Computation]:
        """Computations that are not inert, in the order printed."""
        return [found for found in self.computations.values() if not found.inert]

    def find(self, *words: str) -> Sequence[tuple[Computation, Instruction]]:
        """Instructions whose line contains one of `words`, in the order printed.

        A search of the text, cheaper than reading it. The words may stand anywhere in the line:
        look at the opcode of what comes back.
        """
        if words not in self._found:
            self._found[words] = list(self._find(words))
        return self._found[words]

    def mentioning(self, *words: str) -> set[str]:
        """The names of the computations whose text holds one of `words`."""
        offsets = (offset for word in words for offset in occurrences(self.text, word))
        homes = (self._home(offset) for offset in offsets)
        return {home.name for home in homes if home is not None}

    def _find(self, words: tuple[str, ...]) -> Iterator[tuple[Computation, Instruction]]:
        starts = set()
        for word in words:
            for offset in occurrences(self.text, word):
                starts.add(self.text.rfind("\n", 0, offset) + 1)
        for start in sorted(starts):
            home = self._home(start)
            found = home.get(name_on(self.text, start)) if home is not None else None
            if home is not None and found is not None:
                yield home, found

    def _home(self, offset: int) -> Computation | None:
        """The computation around an offset."""
        homes, ends = self._ends
        at = bisect_right(ends, offset)
        return homes[at] if at < len(homes) and homes[at].start <= offset else None

    @cached_property
    def _ends(self) -> tuple[list[Computation], list[int]]:
        homes = list(self.computations.values())
        return homes, [home.end for home in homes]

    @cached_property
    def _found(self) -> dict[tuple[str, ...], list[tuple[Computation, Instruction]]]:
        return {}

    def undefined(self) -> list[str]:
        """Values that are read and made by no line: lines are missing from the middle.

        A fusion's body is looked at only where the backend fuses communication, which CPUs never
        do and GPUs in custom fusions only.
        """
        missing = [
            f"{name} (read on line {users[0].line})"
            for computation in self.active
            for name, users in computation.all_users.items()
            if name not in computation.instructions
        ]
        if self.platform == "cpu":
            return missing
        for computation in self.computations.values():
            if not computation.inert:
                continue
            used = set(_USED.findall(self.text, computation.start, computation.end))
            used.difference_update(_DEFINED.findall(self.text, computation.start, computation.end))
            if used and not used <= self.computations.keys():
                missing += [
                    f"{name} (read on line {users[0].line})"
                    for name, users in computation.all_users.items()
                    if name not in computation.instructions
                ]
        return missing

    def source_of(self, instruction: Instruction) -> str | None:
        """`file:line` of the innermost frame that is not jaxpar's own collectives, if recorded."""
        metadata = instruction.attributes.get("metadata", "")
        frame = _FRAME.search(metadata)
        if frame is None:
            fields = _fields(metadata)
            return _place(fields.get("source_file", ""), fields.get("source_line", ""))
        if frame[1] not in self._places:
            self._places[frame[1]] = self._place_of(int(frame[1]))
        return self._places[frame[1]]

    @cached_property
    def _places(self) -> dict[str, str | None]:
        return {}

    def _place_of(self, frame: int) -> str | None:
        best = None
        for _ in range(100):
            row = _fields(self.tables["StackFrames"].get(frame, ""))
            at = _id(row, "file_location_id")
            location = _fields(self.tables["FileLocations"].get(at, ""))
            file = self.tables["FileNames"].get(_id(location, "file_name_id"), "")
            place = _place(file, location.get("line", ""))
            best = best or place
            if place and not file.replace("\\", "/").endswith(_OWN_FRAMES):
                return place
            frame = _id(row, "parent_frame_id") - 1  # printed with 1 added, so 1 is none
            if frame <= 0:
                break
        return best


def read_hlo(text: str | Iterable[str]) -> Module:
    """The module that a text, or its lines, prints. AuditError for no HLO and for two modules."""
    if not isinstance(text, str):
        text = "\n".join(line.rstrip("\n") for line in text)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    with no_collection():
        reader = _Reader(text)
        reader.cut()
        return reader.finish()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: it would walk, again and again, a growing tree that all lives."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reader:
    """Cuts a text into computations, and finds out which of them matter."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name = ""
        self.header: dict[str, str] | None = None
        self.computations: dict[str, Computation] = {}
        self.entry: Computation | None = None
        self.tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
        self.platform = next((name for name, mark in _PLATFORM_MARKS if mark in text), "unknown")
        self.problems: list[str] = []
        self.read: list[Computation] = []
        self.table = ""

    def cut(self) -> None:
        """Through the lines outside computations, over the computations themselves."""
        text, at, number = self.text, 0, 0
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[at:end].rstrip()
            number += 1
            at = end + 1
            if line.endswith("{") and (found := _COMPUTATION.fullmatch(line)):
                at, number = self._row(found[2], bool(found[1]), end, number)
            elif line:
                self._outside(line, number)

    def _row(self, name: str, is_entry: bool, start: int, number: int) -> tuple[int, int]:
        """A computation, and those after it without anything between; where to go on."""
        text = self.text
        while True:
            found = _END.search(text, start)
            end = found.start() if found else len(text)
            if found is None:
                self.problems.append(f"the text ends inside computation {name!r}")
            self._computation(name, is_entry, start, end, number)
            if found is None or found[2] is None:
                number += text.count("\n", start, end) + 1
                return text.find("\n", end + 1) + 1 or len(text), number
            number += text.count("\n", start, found.end())
            start = found.end()
            name, is_entry = found[2], found[1] is not None

    def finish(self) -> Module:
        if not self.computations:
            raise AuditError(
                "This text holds no HLO computation. Give what compiled.as_text() prints, or a "
                "file that XLA wrote under xla_dump_to."
            )
        if self.entry is None:
            self.problems.append("there is no ENTRY computation")
        self._activate()
        for computation in self.computations.values():
            if not computation.inert:
                self.problems += computation.problems
        if len(self.problems) > MAX_PROBLEMS:
            more = len(self.problems) - MAX_PROBLEMS
            self.problems[MAX_PROBLEMS:] = [f"and {more} more"]
        return Module(
            name=self.name,
            text=self.text,
            header=self.header,
            computations=self.computations,
            entry=self.entry,
            tables=self.tables,
            platform=self.platform,
            differentiated=self._is_differentiated(),
            unpartitioned=self._unpartitioned(),
            problems=tuple(self.problems),
            read=self.read,
        )

    def _outside(self, line: str, number: int) -> None:
        if line.startswith("HloModule"):
            self._module(line, number)
        elif line in self.tables:
            self.table = line
        elif self.table and (row := _TABLE_ROW.match(line)):
            self.tables[self.table][int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.startswith("}") or _DEFINITION.match(line):
            self.problems.append(problem(number, "stands outside any computation", line))
        elif line.lstrip().startswith(("module @", "module {", "#loc", "func.func")):
            raise AuditError(
                f"Line {number} is StableHLO (MLIR), which is not compiled and has no final "
                "collectives. Pass the Lowered itself, or compiled.as_text()."
            )

    def _module(self, line: str, number: int) -> None:
        if self.header is not None or self.computations:
            raise AuditError(
                f"A second HloModule starts on line {number}. One audit is about one module; "
                "cut the text into one file per module."
            )
        name, *attributes = split_top(line.removeprefix("HloModule")) or [""]
        self.name = name.strip()
        pairs = (part.strip().partition("=") for part in attributes)
        self.header = {key: value for key, _, value in pairs}

    def _computation(self, name: str, is_entry: bool, start: int, end: int, number: int) -> None:
        self.table = ""
        if name in self.computations:
            self.problems.append(problem(number, "defines a computation a second time", name))
            del self.computations[name]  # the order stays that of the text
        computation = Computation(name, self.text, start, end, number, self.read)
        self.computations[name] = computation
        if is_entry:
            if self.entry is not None:
                self.problems.append(problem(number, "is a second ENTRY", name))
            self.entry = computation

    def _activate(self) -> None:
        """Mark what is not inert: what runs as a whole, and whatever shows communication."""
        computations = list(self.computations.values())
        ends = [computation.end for computation in computations]
        todo = [computations] if self.entry is None else [[self.entry]]
        # A CPU never fuses communication; a text without these attributes is damaged.
        for word in _COMMUNICATES if self.platform == "cpu" else _COMMUNICATES + _OPCODES:
            for offset in occurrences(self.text, word):
                at = bisect_right(ends, offset)
                if at < len(ends) and computations[at].start <= offset and computations[at].inert:
                    todo.append([computations[at]])
        while todo:
            for computation in todo.pop():
                if computation.inert:
                    computation.inert = False
                    todo.append(list(self._runs(computation)))
        for computation in computations:
            if not computation.inert:
                instructions = computation.instructions.values()
                computation.calling = [it for it in instructions if self._matters(it)]

    def _runs(self, computation: Computation) -> Iterator[Computation]:
        """The computations that this one runs, but for fusions and functions of elements."""
        for found in computation.instructions.values():
            if found.opcode != "fusion" and _may_call(found.attributes_text):
                for key, name in found.called:
                    whole = key != _FOR_ELEMENTS or found.opcode == "call"
                    if whole and name in self.computations:
                        yield self.computations[name]

    def _matters(self, found: Instruction) -> bool:
        """Whether an instruction runs a computation that is not inert, or not there."""
        if _may_call(found.attributes_text):
            for _, name in found.called:
                callee = self.computations.get(name)
                if callee is None or not callee.inert:
                    return True
        return False

    def _is_differentiated(self) -> bool:
        """Whether an op_name speaks of a transposition; the opcode has a blank before it."""
        for offset in occurrences(self.text, "transpose("):
            if self.text[offset - 1 : offset] != " ":
                start = self.text.rfind("\n", 0, offset) + 1
                name = self.text.rfind('op_name="', start, offset)
                if name >= 0 and '"' not in self.text[name + 9 : offset]:
                    return True
        return False

    def _unpartitioned(self) -> int:
        """The first line that XLA's partitioner has not yet seen, or 0."""
        scheduled = self.header is not None and self.header.get("is_scheduled") == "true"
        # A final program for one device keeps annotations, which nobody has to read any more.
        words = ["custom_call_target="] if scheduled else ["custom_call_target=", "xla.sdy."]
        offsets = sorted(
            offset
            for word in words
            for offset in occurrences(self.text, word)
            if _UNPARTITIONED.match(self.text, offset)
        )
        if not scheduled:
            for offset in occurrences(self.text, "sharding={"):
                start = self.text.rfind("\n", 0, offset) + 1
                end = self.text.find("\n", offset)
                found = parse(self.text[start : end if end >= 0 else None], 0)
                # The partitioner leaves annotations on what enters and leaves.
                leaves = found is None or found.opcode in ("parameter", "tuple")
                if found and not leaves and "sharding" in found.attributes:
                    offsets.append(offset)
                    break
        return self.text.count("\n", 0, min(offsets)) + 1 if offsets else 0


def _may_call(text: str) -> bool:
    """Whether attributes may name computations; in place of a loop, for every line comes here."""
    return (
        "calls=" in text
        or "to_apply=" in text
        or "condition=" in text
        or "body=" in text
        or "computations=" in text
        or "_computation=" in text
    )


def _fields(text: str) -> dict[str, str]:
    return {key: quoted or number for key, quoted, number in _FIELD.findall(text)}


def _id(fields: Mapping[str, str], key: str) -> int:
    text = fields.get(key, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _place(file: str, line: str) -> str | None:
    return f"{file}:{line}" if file and line else file or None
