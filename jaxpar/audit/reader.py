"""Reads the text of an HLO module, one line at a time, into a light tree. Executes nothing.

Tolerant of what differs between XLA versions and backends (operands with or without types, names
with or without `%`, a missing header, elided get-tuple-elements) and strict about what is missing:
whatever cannot be read is kept in `Module.problems`, because a number that silently leaves
something out is worse than none. Time is linear in the text: an instruction is cut into its name,
type, opcode, operands and attributes, and each of these is looked into only when somebody asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxpar.audit.shape import Shape, close, integer, parse_shape
from jaxpar.errors import AuditError

CALL_KEYS = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)
"""Attributes by which an instruction names computations it runs."""

MAX_PROBLEMS = 20
"""Unreadable lines that are described one by one; further ones are only counted."""

_PLAIN = re.compile(  # an instruction without a tuple type and without brackets among its operands
    r"\s*(ROOT\s+)?%?([^\s=]+)\s+=\s+([a-z]\w*\[[^\[\]]*\](?:\{[^{}]*\})?)\s+"
    r"([a-z][\w\-]*)\(([^()\"]*)\)(.*)",
    re.DOTALL,
)
_START = re.compile(r"\s*(ROOT\s+)?%?([^\s=]+)\s+=\s+")
_TYPE_WORD = re.compile(r"[^\s(\[{]*")
_OPCODE = re.compile(r"\s+([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{", re.DOTALL)
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[()\[\]{},]', re.DOTALL)
_NAME = re.compile(r"%?([^\s%,{}()]+)")
_QUOTED = r'"((?:[^"\\]++|\\.)*+)(?:"|\\?\Z)'  # never fails after its first quote: linear
_NESTED = re.compile(r"[\[({\"]")
_OP_NAME = re.compile(rf"\bop_name={_QUOTED}", re.DOTALL)
_FIELD = re.compile(rf"\b(\w++)=(?:{_QUOTED}|(\d{{1,18}}))", re.DOTALL)
_TABLE_ROW = re.compile(rf"(\d{{1,9}})\s+(?:{_QUOTED}|\{{(.*)\}})", re.DOTALL)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TRANSPOSED = re.compile(r'op_name="[^"]*transpose\(')
_UNPARTITIONED = re.compile(
    r'custom_call_target="(?:xla\.sdy\.|Sharding"|SPMDFullToShardShape"|SPMDShardToFullShape")'
    r"|xla\.sdy\.(?:sharding|meshes|manual_axes)="
)
_PLATFORM_MARKS = (
    ("gpu", '"operation_queue_id"'),
    ("tpu", '"flag_configs"'),
    ("cpu", '"outer_dimension_partitions"'),
)
_OWN_FRAMES = ("jaxpar/collectives.py",)  # the caller is what a reader wants to see


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A value an instruction reads; `path` is not empty where HLO elides get-tuple-elements."""

    name: str
    path: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation. Reading `shape`, `operands` may raise AuditError."""

    name: str
    opcode: str
    type_text: str
    operands_text: str
    attributes_text: str
    line: int
    is_root: bool

    @cached_property
    def shape(self) -> Shape:
        return parse_shape(self.type_text)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        text = self.operands_text
        parts = split_top(text) if _NESTED.search(text) else text.split(",")
        return tuple(_operand(words[-1]) for words in map(str.split, parts) if words)

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attribute text by name, brackets and quotes as printed; the first of a name counts."""
        found: dict[str, str] = {}
        previous = ""
        for part in split_top(self.attributes_text):
            key, equals, value = part.strip().partition("=")
            if key == "device_ids" and previous == "replica_groups":
                found[previous] += ", " + part.strip()  # `mesh['a'=8], device_ids=(…) {'a'}`
            elif equals and key not in found:
                found[key] = value
                previous = key
        return found

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(attribute, computation name) for each computation this instruction runs, in order."""
        if not any(key in self.attributes_text for key in CALL_KEYS):
            return ()
        return tuple(
            (key, name)
            for key in CALL_KEYS
            if key in self.attributes
            for name in _NAME.findall(self.attributes[key])
        )

    @cached_property
    def op_name(self) -> str:
        """The path JAX gave the operation while tracing; "" when there is none."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return found[1] if found else ""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Instructions by name, in the order printed (the schedule, in a scheduled module)."""

    name: str
    is_entry: bool
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction | None:
        last = None
        for last in self.instructions.values():
            if last.is_root:
                return last
        return last

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {
            integer(found.operands_text, f"parameter {found.name}"): found
            for found in self.instructions.values()
            if found.opcode == "parameter"
        }


@dataclass(frozen=True, kw_only=True)
class Module:
    """A whole text. `problems` says in words what is missing; empty for an intact text.

    `unpartitioned` is the first line that still awaits XLA's partitioner, 0 when there is none.
    `platform` is a guess by what only one backend prints: cpu, gpu, tpu or unknown.
    """

    name: str
    header: Mapping[str, str] | None
    computations: Mapping[str, Computation]
    entry: Computation | None
    tables: Mapping[str, Mapping[int, str]]
    platform: str
    differentiated: bool
    unpartitioned: int
    problems: tuple[str, ...]

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
        return max(1, integer(self.header.get(key, "1"), key))

    def find(self, *words: str) -> Iterator[tuple[Computation, Instruction]]:
        """Instructions whose line contains one of `words`, which is cheaper than reading all.

        The words may stand anywhere in the line: look at the opcode of what comes back.
        """
        for computation in self.computations.values():
            for found in computation.instructions.values():
                texts = (f" {found.opcode}({found.operands_text})", found.attributes_text)
                if any(word in text for word in words for text in texts):
                    yield computation, found

    def undefined(self) -> list[str]:
        """Values that are read and made by no line: lines are missing from the middle."""
        return [
            f"{operand.name} (read on line {found.line})"
            for computation in self.computations.values()
            for found in computation.instructions.values()
            for operand in found.operands
            if operand.name not in computation.instructions
        ]

    def source_of(self, instruction: Instruction) -> str | None:
        """`file:line` of the innermost frame that is not jaxpar's own collectives, if recorded."""
        fields = _fields(instruction.attributes.get("metadata", ""))
        if "stack_frame_id" not in fields:
            return _place(fields.get("source_file", ""), fields.get("source_line", ""))
        best = None
        frame = _id(fields, "stack_frame_id")
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


def split_top(text: str) -> list[str]:
    """`text` cut at its commas outside brackets and quotes. Linear."""
    parts = []
    depth = start = 0
    for token in _TOKENS.finditer(text):
        first = text[token.start()]
        if first in "([{":
            depth += 1
        elif first in ")]}":
            depth -= 1
        elif first == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    parts.append(text[start:])
    return [part for part in parts if part and not part.isspace()]


def read_hlo(lines: Iterable[str]) -> Module:
    """The module that `lines` print. AuditError when they are not HLO at all, or two modules."""
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        reader.take(line.rstrip(), number)
    return reader.finish()


class _Reader:
    """Where in the text we are, and what was found so far."""

    def __init__(self) -> None:
        self.name = ""
        self.header: dict[str, str] | None = None
        self.computations: dict[str, Computation] = {}
        self.entry: Computation | None = None
        self.tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
        self.platform = "unknown"
        self.differentiated = False
        self.unpartitioned = 0
        self.problems: list[str] = []
        self.current: Computation | None = None
        self.table = ""

    def take(self, line: str, number: int) -> None:
        if not line:
            return
        if self.current is not None:
            if line.lstrip().startswith("}"):
                self.current = None
            else:
                self._instruction(self.current, line, number)
        elif line.startswith("HloModule"):
            self._module(line, number)
        elif line in self.tables:
            self.table = line
        elif self.table and (row := _TABLE_ROW.match(line)):
            self.tables[self.table][int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.endswith("{") and (found := _COMPUTATION.fullmatch(line)):
            self._computation(found[2], bool(found[1]), number)
        elif line.startswith("}") or _START.match(line):
            self._problem(number, "stands outside any computation", line)
        elif line.lstrip().startswith(("module @", "module {", "#loc", "func.func")):
            raise AuditError(
                f"Line {number} is StableHLO (MLIR), which is not compiled and has no final "
                "collectives. Pass the Lowered itself, or compiled.as_text()."
            )

    def finish(self) -> Module:
        if self.current is not None:
            self.problems.append(f"the text ends inside computation {self.current.name!r}")
        if not self.computations:
            raise AuditError(
                "This text holds no HLO computation. Give what compiled.as_text() prints, or a "
                "file that XLA wrote under xla_dump_to."
            )
        if self.entry is None:
            self.problems.append("there is no ENTRY computation")
        if len(self.problems) > MAX_PROBLEMS:
            more = len(self.problems) - MAX_PROBLEMS
            self.problems[MAX_PROBLEMS:] = [f"and {more} more"]
        return Module(
            name=self.name,
            header=self.header,
            computations=self.computations,
            entry=self.entry,
            tables=self.tables,
            platform=self.platform,
            differentiated=self.differentiated,
            unpartitioned=self.unpartitioned,
            problems=tuple(self.problems),
        )

    def _problem(self, number: int, what: str, line: str) -> None:
        self.problems.append(f"line {number} {what}: {line.strip()[:60]!r}")

    def _module(self, line: str, number: int) -> None:
        if self.header is not None or self.computations:
            raise AuditError(
                f"A second HloModule starts on line {number}. One audit is about one module; "
                "cut the text into one file per module."
            )
        name, *attributes = split_top(line.removeprefix("HloModule"))
        self.name = name.strip()
        pairs = (part.strip().partition("=") for part in attributes)
        self.header = {key: value for key, _, value in pairs}
        if _UNPARTITIONED.search(line) and not self._is_scheduled():
            self.unpartitioned = self.unpartitioned or number

    def _computation(self, name: str, is_entry: bool, number: int) -> None:
        self.table = ""
        self.current = Computation(name=name, is_entry=is_entry)
        if name in self.computations:
            self._problem(number, "defines a computation a second time", name)
        self.computations[name] = self.current
        if is_entry:
            if self.entry is not None:
                self._problem(number, "is a second ENTRY", name)
            self.entry = self.current

    def _instruction(self, computation: Computation, line: str, number: int) -> None:
        found = _parse(line, number)
        if found is None:
            self._problem(number, "is no instruction", line)
            return
        if found.name in computation.instructions:
            self._problem(number, "defines a value a second time", line)
        computation.instructions[found.name] = found
        rest = found.attributes_text
        if not self.differentiated and "transpose(" in rest and _TRANSPOSED.search(rest):
            self.differentiated = True
        if not self.unpartitioned and self._asks_for_partitioning(found):
            self.unpartitioned = number
        if self.platform == "unknown" and "backend_config=" in rest:
            for platform, mark in _PLATFORM_MARKS:
                if mark in rest:
                    self.platform = platform

    def _asks_for_partitioning(self, found: Instruction) -> bool:
        """Whether XLA's partitioner has not yet seen this instruction."""
        rest = found.attributes_text
        if found.opcode == "custom-call":
            return _UNPARTITIONED.search(rest) is not None
        if self._is_scheduled():
            return False  # final; a program for one device keeps annotations nobody has to read
        if "xla.sdy." in rest:
            return _UNPARTITIONED.search(rest) is not None
        if "sharding={" not in rest or found.opcode in ("parameter", "tuple"):
            return False  # the partitioner leaves annotations on what enters and leaves
        return "sharding" in found.attributes

    def _is_scheduled(self) -> bool:
        return self.header is not None and self.header.get("is_scheduled") == "true"


def _parse(line: str, number: int) -> Instruction | None:
    if plain := _PLAIN.fullmatch(line):
        root, name, type_text, opcode, operands, attributes = plain.groups()
    else:
        start = _START.match(line)
        if not start:
            return None
        root, name = start.groups()
        at = start.end()
        word = _TYPE_WORD.match(line, at)
        end = word.end() if word else at
        while 0 <= end < len(line) and line[end] in "([{":
            end = close(line, end)
        if end < 0 or not (opening := _OPCODE.match(line, end)):
            return None
        type_text, opcode = line[at:end], opening[1]
        end = close(line, opening.end() - 1)
        if end < 0:
            return None
        operands, attributes = line[opening.end() : end - 1], line[end:]
    return Instruction(
        name=name,
        opcode=opcode,
        type_text=type_text,
        operands_text=operands,
        attributes_text=attributes,
        line=number,
        is_root=root is not None,
    )


def _operand(word: str) -> Operand:
    name = word.rpartition("*/")[2].removeprefix("%")  # `/*index=5*/%name`
    if "#" not in name:
        return Operand(name=name)
    name, *path = name.split("#")
    return Operand(name=name, path=tuple(integer(step, f"operand {word}") for step in path))


def _fields(text: str) -> dict[str, str]:
    return {key: quoted or number for key, quoted, number in _FIELD.findall(text)}


def _id(fields: Mapping[str, str], key: str) -> int:
    text = fields.get(key, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _place(file: str, line: str) -> str | None:
    return f"{file}:{line}" if file and line else file or None
