"""One computation of a module, of whose text no more is read than somebody asks for.

A large program has ten times as many lines in the bodies of fusions as outside them, and of most
bodies a question concerns one line or two: the root, a parameter, who makes a value. These lines
are found by searching the text, as XLA prints it; a body that is printed in any other way is read
from beginning to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxpar.audit.instruction import Instruction, parse_at
from jaxpar.audit.shape import integer

MAX_SEARCHED = 1 << 14
"""Characters of a computation up to which single lines of it are looked for."""


class Computation:
    """Instructions by name, in the order printed (the schedule, in a scheduled module).

    `line` is where its header stands; its text is that of the module from `start` to `end`, and
    begins with the end of that line. `inert` ones neither communicate nor decide what does, and are
    read line by line; the others as a whole. `calling` are the instructions that run others, and
    not only inert ones. `all_read` grows by this one when the first of its lines is read.
    """

    __slots__ = (
        "_all_read",
        "_lines",
        "_made",
        "_parameters",
        "_read",
        "_root",
        "_text",
        "_users",
        "calling",
        "end",
        "inert",
        "line",
        "name",
        "start",
    )

    def __init__(
        self, name: str, text: str, start: int, end: int, line: int, all_read: list[Computation]
    ) -> None:
        self.name = name
        self.start = start
        self.end = end
        self.line = line
        self.inert = True
        self.calling: Sequence[Instruction] = ()
        self._text = text
        self._all_read = all_read
        self.forget()

    def forget(self) -> None:
        """Give the memory back; what is asked for again is read again."""
        self._lines: dict[int, Instruction | None] | None = None  # by the offset of the line
        self._made: dict[str, Instruction] | None = None  # of these, what was asked for by name
        self._read: tuple[dict[str, Instruction], Sequence[str]] | None = None
        self._users: dict[str, list[Instruction]] | None = None
        self._parameters: dict[int, Instruction] | None = None
        self._root: Instruction | None = None

    def mentions(self, word: str) -> bool:
        """Whether the text of this computation holds `word`; reads nothing."""
        return self._text.find(word, self.start, self.end) >= 0

    @property
    def instructions(self) -> Mapping[str, Instruction]:
        return self._whole()[0]

    @property
    def problems(self) -> Sequence[str]:
        """Lines that cannot be read, in words."""
        return self._whole()[1]

    def get(self, name: str) -> Instruction | None:
        """The instruction that makes the value `name`, None when no line does."""
        if self._read is not None:
            return self._read[0].get(name)
        if self._in_parts:
            if self._made is not None and name in self._made:
                return self._made[name]
            at = self._text.rfind(f"\n  %{name} = ", self.start, self.end) + 1
            at = at or self._text.rfind(f"\n  ROOT %{name} = ", self.start, self.end) + 1
            found = self._at(at) if at else None
            if found is not None and found.name == name:
                if self._made is None:
                    self._made = {}
                self._made[name] = found
                return found
        return self.instructions.get(name)

    @property
    def root(self) -> Instruction | None:
        """What the computation returns: the line that says ROOT, else the last."""
        if self._root is None:
            self._root = self._marked_root() if self._in_parts else None
            for found in self._whole()[0].values() if self._root is None else ():
                self._root = found
                if found.is_root:
                    break
        return self._root

    @property
    def parameters(self) -> Mapping[int, Instruction]:
        """By number. AuditError for a number that is none."""
        if self._parameters is None:
            if self._in_parts:
                lines = map(self._on, occurrences(self._text, " parameter(", self.start, self.end))
                found = [line for line in lines if line is not None]
            else:
                found = list(self._whole()[0].values())
            self._parameters = {
                integer(it.operands_text, f"parameter {it.name}"): it
                for it in found
                if it.opcode == "parameter"
            }
        return self._parameters

    def users(self, name: str) -> Sequence[Instruction]:
        """The instructions that read the value `name`, in order; also one that no line makes."""
        value = f"%{name}"
        if self._in_parts and self._text.find(f"{value} = ", self.start, self.end) >= 0:
            lines = map(self._on, occurrences(self._text, value, self.start, self.end))
            return [
                line for line in dict.fromkeys(lines) if line is not None and name in line.reads
            ]
        return self.all_users.get(name, ())

    @property
    def all_users(self) -> Mapping[str, list[Instruction]]:
        """Who reads a value, by its name; also of names that no line defines."""
        if self._users is None:
            self._users = {}
            for found in self._whole()[0].values():
                for read in found.reads:
                    if read in self._users:
                        self._users[read].append(found)
                    else:
                        self._users[read] = [found]
        return self._users

    @property
    def _in_parts(self) -> bool:
        """Whether to look for single lines: each search may go over the whole text."""
        return self.inert and self._read is None and self.end - self.start < MAX_SEARCHED

    def _marked_root(self) -> Instruction | None:
        """The line that alone says ROOT."""
        at = self._text.rfind("\n  ROOT ", self.start, self.end) + 1
        if not at or self._text.find("ROOT ", self.start, at) >= 0:
            return None
        found = self._at(at)
        return found if found is not None and found.is_root else None

    def _on(self, offset: int) -> Instruction | None:
        """The instruction on the line around an offset, None when that line is none."""
        return self._at(self._text.rfind("\n", self.start, offset) + 1)

    def _at(self, start: int) -> Instruction | None:
        """The instruction on the line that starts there."""
        if self._lines is None:
            self._lines = {}
            self._all_read.append(self)
        if start not in self._lines:
            number = self.line + self._text.count("\n", self.start, start)
            self._lines[start], _ = parse_at(self._text, start, self.end, number)
        return self._lines[start]

    def _whole(self) -> tuple[dict[str, Instruction], Sequence[str]]:
        """All instructions, and what cannot be read."""
        if self._read is None:
            self._read = self._read_whole()
        return self._read

    def _read_whole(self) -> tuple[dict[str, Instruction], Sequence[str]]:
        known = self._lines or {}
        if self._lines is None:
            self._all_read.append(self)
        instructions: dict[str, Instruction] = {}
        problems = []
        start, number = self.start + 1, self.line + 1
        while start < self.end:
            found, end = parse_at(self._text, start, self.end, number)
            if known:
                found = known.get(start) or found
            if found is not None:
                if found.name in instructions:
                    line = self._text[start:end]
                    problems.append(problem(number, "defines a value a second time", line))
                instructions[found.name] = found
            elif not (line := self._text[start:end]).isspace() and line:
                problems.append(problem(number, "is no instruction", line))
            start, number = end + 1, number + 1
        return instructions, problems


def occurrences(text: str, word: str, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Where `word` stands in `text`, from `start` to `end`."""
    at = text.find(word, start, end)
    while at >= 0:
        yield at
        at = text.find(word, at + len(word), end)


def problem(number: int, what: str, line: str) -> str:
    """A line that cannot be read, in words."""
    return f"line {number} {what}: {line.strip()[:60]!r}"
