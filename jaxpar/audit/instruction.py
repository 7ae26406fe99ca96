"""One line of HLO text: cut into its name, type, opcode, operands and attributes.

Tolerant of what differs between XLA versions and backends: operands with or without types, names
with or without `%`, elided get-tuple-elements. Each part is looked into only when somebody asks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxpar.audit.shape import Shape, close, integer, parse_shape

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

_PLAIN = re.compile(  # an instruction without a tuple type and without brackets among its operands
    r"\s*(ROOT\s+)?%?([^\s=]+)\s+=\s+([a-z]\w*\[[^\[\]]*\](?:\{[^{}]*\})?)\s+"
    r"([a-z][\w\-]*)\(([^()\"]*)\)(.*)",
    re.DOTALL,
)
_LINE = re.compile(  # the same exactly as XLA prints it, in the middle of a text
    r"  (ROOT )?%?([^\s=]++) = ([a-z]\w*+\[[^\[\]\n]*+\](?:\{[^{}\n]*+\})?) "
    r"([a-z][\w\-]*+)\(([^()\"\n]*+)\)([^\n]*+)"
)
_START = re.compile(r"\s*(ROOT\s+)?%?([^\s=]+)\s+=\s+")
_TYPE_WORD = re.compile(r"[^\s(\[{]*")
_OPCODE = re.compile(r"\s+([a-z][\w\-]*)\(")
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[()\[\]{},]', re.DOTALL)
_NAME = re.compile(r"%?([^\s%,{}()]+)")
_FUSED = re.compile(r", kind=\w+, calls=%([^\s,(){}]+)(?=,|\Z)")
_NAMES = re.compile(r"%[\w.\-]++(?:, %[\w.\-]++)*+")  # operands as XLA prints most of them
_READ = re.compile(r"%([^\s,(){}#]+)")
_QUOTED = r'"((?:[^"\\]++|\\.)*+)(?:"|\\?\Z)'  # never fails after its first quote: linear
_QUOTE = r'"(?:[^"\\]++|\\.)*+"'
_TEXT = rf'[^"{{}}]++|{_QUOTE}'
_VALUE = (  # of an attribute, with braces in braces in braces; whatever is deeper goes the long way
    rf'[^,{{}}\[\]()"]++|{_QUOTE}|\[[^\[\]"]*+\]|\([^()"]*+\)'
    rf"|\{{(?:{_TEXT}|\{{(?:{_TEXT}|\{{(?:{_TEXT})*+\}})*+\}})*+\}}"
)
_ATTRIBUTE = re.compile(rf", (\w++)=((?:{_VALUE})++)", re.DOTALL)
_NESTED = re.compile(r"[\[({\"]")
_CHAIN = re.compile(r'\bchain_id="(\w+)"')
_OP_NAME = re.compile(rf"op_name={_QUOTED}", re.DOTALL)


class Operand(NamedTuple):
    """A value an instruction reads; `path` is not empty where HLO elides get-tuple-elements."""

    name: str
    path: tuple[int, ...] = ()


class Instruction:
    """One line of a computation, not to be changed. Reading parts of it may raise AuditError.

    Slots and caches by hand, since a program has hundreds of thousands of them.
    """

    __slots__ = (
        "_attributes",
        "_called",
        "_operands",
        "_shape",
        "attributes_text",
        "is_root",
        "line",
        "name",
        "opcode",
        "operands_text",
        "type_text",
    )

    def __init__(
        self,
        name: str,
        opcode: str,
        type_text: str,
        operands_text: str,
        attributes_text: str,
        line: int,
        is_root: bool,
    ) -> None:
        self.name = name
        self.opcode = sys.intern(opcode)  # few, and each many times
        self.type_text = sys.intern(type_text)
        self.operands_text = operands_text
        self.attributes_text = attributes_text
        self.line = line
        self.is_root = is_root
        self._attributes: Mapping[str, str] | None = None
        self._called: tuple[tuple[str, str], ...] | None = None
        self._operands: tuple[Operand, ...] | None = None
        self._shape: Shape | None = None

    def __repr__(self) -> str:
        return f"<{self.name} = {self.type_text} {self.opcode}(…), line {self.line}>"

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            self._shape = parse_shape(self.type_text)
        return self._shape

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self._operands is None:
            self._operands = _operands(self.opcode, self.operands_text)
        return self._operands

    @property
    def reads(self) -> Collection[str]:
        """The names of the operands, each once, in order: what `operands` says, for less."""
        if _NAMES.fullmatch(self.operands_text):
            names = self.operands_text[1:].split(", %")
            return names if len(names) == 1 else dict.fromkeys(names)
        if "%" in self.operands_text and '"' not in self.operands_text:
            return dict.fromkeys(_READ.findall(self.operands_text))
        return dict.fromkeys(operand.name for operand in self.operands)

    @property
    def attributes(self) -> Mapping[str, str]:
        """Attribute text by name, brackets and quotes as printed; the first of a name counts."""
        if self._attributes is None:
            self._attributes = _attributes(self.attributes_text)
        return self._attributes

    @property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(attribute, computation name) for each computation this instruction runs, in order."""
        if self.opcode == "fusion" and (simple := _FUSED.match(self.attributes_text)):
            return (("calls", simple[1]),)  # not kept, since most instructions are such
        if self._called is None:
            self._called = self._find_called()
        return self._called

    def _find_called(self) -> tuple[tuple[str, str], ...]:
        if not any(key in self.attributes_text for key in CALL_KEYS):
            return ()
        attributes = self.attributes
        return tuple(
            (key, name)
            for key in CALL_KEYS
            if key in attributes
            for name in _NAME.findall(attributes[key])
        )

    @property
    def chain(self) -> str:
        """The chain_id that ties the pieces of an asynchronous TPU collective together, or ""."""
        if "chain_id" not in self.attributes_text:
            return ""
        found = _CHAIN.search(self.attributes.get("frontend_attributes", ""))
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """The path JAX gave the operation while tracing; "" when there is none."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return found[1] if found else ""


def _operands(opcode: str, text: str) -> tuple[Operand, ...]:
    if opcode in ("constant", "parameter", "iota"):
        return ()
    if _NAMES.fullmatch(text):
        return tuple(map(Operand, text[1:].split(", %")))
    parts = split_top(text) if _NESTED.search(text) else text.split(",")
    return tuple(_operand(words[-1]) for words in map(str.split, parts) if words)


def _attributes(text: str) -> dict[str, str]:
    pairs = _ATTRIBUTE.findall(text)
    length = 3 * len(pairs)
    for key, value in pairs:
        length += len(key) + len(value)
    if length == len(text) and ", device_ids=" not in text:
        return dict(reversed(pairs))
    found: dict[str, str] = {}
    previous = ""
    for part in split_top(text):
        key, equals, value = part.strip().partition("=")
        if key == "device_ids" and previous == "replica_groups":
            found[previous] += ", " + part.strip()  # `mesh['a'=8], device_ids=(…) {'a'}`
        elif equals and key not in found:
            found[key] = value
            previous = key
    return found


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


def parse(line: str, number: int) -> Instruction | None:
    """The instruction on a line, or None when there is none."""
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
    return Instruction(name, opcode, type_text, operands, attributes, number, root is not None)


def parse_at(text: str, start: int, end: int, number: int) -> tuple[Instruction | None, int]:
    """The instruction on the line that starts at `start`, and where that line ends: by `end`."""
    if plain := _LINE.match(text, start, end):
        root, name, type_text, opcode, operands, attributes = plain.groups()
        return Instruction(
            name, opcode, type_text, operands, attributes, number, root is not None
        ), plain.end()
    stop = text.find("\n", start, end)
    stop = end if stop < 0 else stop
    return parse(text[start:stop], number), stop


def name_on(text: str, start: int) -> str:
    """The name that the line which starts at `start` defines, "" for none."""
    found = _START.match(text, start)
    return found[2] if found else ""


def _operand(word: str) -> Operand:
    name = word.rpartition("*/")[2].removeprefix("%")  # `/*index=5*/%name`
    if "#" not in name:
        return Operand(name=name)
    name, *path = name.split("#")
    return Operand(name=name, path=tuple(integer(step, f"operand {word[:40]}") for step in path))
