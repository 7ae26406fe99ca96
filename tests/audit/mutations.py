"""Damage done to HLO text on purpose: seeded, so that a case is named by dump, operator and seed.

Operators that remove, repeat or misplace text may never lead to a smaller total in silence. Those
that rewrite a number or a word may turn a program into a different one that is just as valid; what
they lead to is reported, and only errors, time and crashes are judged.
"""

from __future__ import annotations

import functools
import gzip
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxpar.audit import Audit

_COMMUNICATES = re.compile(
    rb"^.* (?:all-|collective-|reduce-scatter|ragged-|while\(|send|async-|custom-call-start).*",
    re.MULTILINE,
)
_DECIDES = re.compile(
    rb"^(?:HloModule|ENTRY|%\S+ \(|\}|.*ROOT |.* (?:conditional|call|tuple|compare|add|constant|"
    rb"parameter|get-tuple-element)\().*",
    re.MULTILINE,
)
_NUMBER = re.compile(rb"(?<![\w.])\d+(?![\w.])")
_NAME = re.compile(rb"%[\w.\-]+")
_ATTRIBUTE = re.compile(rb", [a-z_]+=(?:\{[^\n]*?\}+(?=,|\n)|[^\s,{}]+)")
_CALLED = re.compile(rb"(?:calls|to_apply|body|condition)=%?[\w.\-]+")
_GROUPS = re.compile(
    rb"(?:replica_groups|source_target_pairs)="
    rb"(?:\{\{[\d,{} ]*\}\}|\{\}|\[[^\s]*?(?=, |\n)|mesh[^\n]*?\})"
)
_TRIPS = re.compile(rb'"n":"\d+"|constant\(\d+\)')
_DIMS = re.compile(rb"[a-z]+\d*\[([\d,]*)\]")
_OPCODE = re.compile(rb" ([a-z][a-z\-]+)\(")
_DTYPE = re.compile(rb"\b(?:f32|bf16|s32|pred|u32|f16)(?=\[)")
_COUNTS = re.compile(rb"(?:num_partitions|replica_count)=\d+|is_scheduled=true")
_STRUCTURE = re.compile(
    rb"^HloModule[^\n]*|\bENTRY |\bROOT |^\}[^\n]*|\{$|[{}()\[\]=]", re.MULTILINE
)
_BLOCK = re.compile(rb"^(?:ENTRY )?%?\S+ [^\n]*\{\n.*?^\}[^\n]*\n", re.MULTILINE | re.DOTALL)

_NUMBERS = (b"", b"0", b"1", b"2", b"-1", b"7", b"1" + b"0" * 30, b"9" * 18, b"0x10", b"1e9", b"+4",
            b" ", b"4 4", b"1_0", "٣".encode())  # fmt: skip
_HOSTILE_GROUPS = (b"[1000000,1000000]<=[1000000000000]", b"[1,131072]<=[131072]", b"{{0,0},{0,0}}",
    b"{{},{}}", b"{{0,1},{1,2}}", b"{{0,1,2},{3}}", b"{{99999999}}", b"[2,4]<=[8]T(0,0)", b"{{0,",
    b"[2,4]<=[4,2]T(1)", b"mesh['a'=1000000,'b'=1000000] {'a'}", b"mesh['a'=8] {'b'}", b"{{-1,0}}",
    b"mesh['a'=8] {'a':(3)2}", b"[0]<=[0]", b"[" + b"2," * 40 + b"1]<=[8]", b"{}", b"")  # fmt: skip
_JUNK = (b"\0", b"\xff\xfe", b"\xc3\x28", b"\x1b[2J", b"\x7f", b"\xef\xbb\xbf", b"\r", b"\r\n",
    b"\x0b", b"\x0c", b"\xe2\x80\xa8", b"\xc2\x85", b"\\", b"/*", b"*/", b"#", b"%", b"=", b" ",
    b"\t", b"\xed\xa0\x80", b"HloModule x\n", b"\n}\n", b"\n\n", b"ENTRY e {\n",
    b"ROOT ")  # fmt: skip
_OPCODES = (
    b"all-reduce all-gather reduce-scatter all-to-all collective-permute collective-broadcast "
    b"all-gather-start all-gather-done all-reduce-start async-start async-done while conditional "
    b"call fusion custom-call tuple get-tuple-element parameter constant partition-id add copy "
    b"send recv"
).split()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One way of damaging text. `strict`: the result may not be smaller in silence.

    `damage` takes the text, a source of chance, and other dumps to take pieces from.
    """

    damage: Callable[[bytes, random.Random, Sequence[bytes]], bytes]
    strict: bool


def mutate(text: bytes, operator: str, seed: int, donors: Sequence[bytes]) -> bytes:
    """The same bytes for the same arguments. The operator "container" gives a damaged .gz file."""
    return OPERATORS[operator].damage(text, random.Random(f"{operator}:{seed}"), donors)


Totals = Mapping[tuple[str, str], float]


def totals(audit: Audit) -> Totals:
    """Most executions, payload and wire bytes by kind; infinity where no bound is known."""
    sums: dict[tuple[str, str], float] = {}
    for found in audit.collectives:
        for what, each in (
            ("count", 1),
            ("payload", found.payload_bytes),
            ("wire", found.wire_bytes),
        ):
            before = sums.get((found.kind, what), 0)
            if found.count_max is None or before == math.inf:
                sums[found.kind, what] = math.inf
            else:
                sums[found.kind, what] = before + found.count_max * each
    return sums


def smaller(before: Totals, after: Totals) -> list[str]:
    """What is less than it was, in words; empty when nothing is."""
    return [
        f"{kind} {what}: {after.get((kind, what), 0):.0f} < {value:.0f}"
        for (kind, what), value in before.items()
        if after.get((kind, what), 0) < value
    ]


@functools.lru_cache(maxsize=32)
def _places(text: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The lines that communicate, and those that decide how often."""
    return [it.span() for it in _COMMUNICATES.finditer(text)], [
        it.span() for it in _DECIDES.finditer(text)
    ]


def _at(text: bytes, chance: random.Random) -> int:
    """A place in the text: anywhere, on a line that communicates, or on one that decides."""
    kinds = [[(0, len(text))], *_places(text)]
    lines = chance.choice(kinds) or kinds[0]
    return chance.randint(*chance.choice(lines))


def _hit(pattern: re.Pattern[bytes], text: bytes, chance: random.Random) -> re.Match[bytes] | None:
    """A match of `pattern`: the first one after some place, so that dense lines do not win."""
    return pattern.search(text, _at(text, chance)) or pattern.search(text)


def _replaced(
    pattern: re.Pattern[bytes], text: bytes, chance: random.Random, by: Sequence[bytes]
) -> bytes:
    found = _hit(pattern, text, chance)
    if found is None:
        return text
    return text[: found.start()] + chance.choice(by) + text[found.end() :]


def _line_at(text: bytes, at: int) -> tuple[int, int]:
    start = text.rfind(b"\n", 0, at) + 1
    end = text.find(b"\n", at)
    return start, len(text) if end < 0 else end + 1


def _truncate(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(text, chance)
    return text[:at] if chance.random() < 0.7 else text[at:]


def _delete_lines(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _line_at(text, _at(text, chance))
    for _line in range(chance.choice((0, 0, 0, 1, 6, 40))):
        end = _line_at(text, end)[1]
    return text[:start] + text[end:]


def _delete_bytes(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(text, chance)
    return text[:at] + text[at + chance.choice((1, 1, 1, 2, 3, 8, 100, 5000)) :]


def _delete_computation(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_BLOCK, text, chance, [b""])


def _delete_attribute(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_ATTRIBUTE, text, chance, [b""])


def _delete_name(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_NAME, text, chance, [b"", b"%"])


def _delete_structure(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_STRUCTURE, text, chance, [b""])


def _swap_lines(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    (a, b), (c, d) = sorted(_line_at(text, _at(text, chance)) for _ in range(2))
    return text if b > c else text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def _repeat_lines(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _line_at(text, _at(text, chance))
    to = _line_at(text, _at(text, chance))[0] if chance.random() < 0.5 else end
    return text[:to] + text[start:end] * chance.choice((1, 1, 3, 2000)) + text[to:]


def _splice_line(text: bytes, chance: random.Random, donors: Sequence[bytes]) -> bytes:
    donor = chance.choice(donors)
    start, end = _line_at(donor, _at(donor, chance))
    at, after = _line_at(text, _at(text, chance))
    return text[:at] + donor[start:end] + text[after if chance.random() < 0.5 else at :]


def _splice_computation(text: bytes, chance: random.Random, donors: Sequence[bytes]) -> bytes:
    donor = chance.choice(donors)
    block = _hit(_BLOCK, donor, chance)
    found = _hit(_BLOCK, text, chance)
    if block is None or found is None:
        return text
    after = found.end() if chance.random() < 0.5 else found.start()
    return text[: found.start()] + block[0] + b"\n" + text[after:]


def _splice_tail(text: bytes, chance: random.Random, donors: Sequence[bytes]) -> bytes:
    donor = chance.choice(donors)
    return text[: _at(text, chance)] + donor[_at(donor, chance) :]


def _number(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_NUMBER, text, chance, (*_NUMBERS, b"8" * 1_000_000))


def _rename(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    other = _hit(_NAME, text, chance)
    return _replaced(_NAME, text, chance, [other[0] if other else b"%x"])


def _recall(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Another computation is called, perhaps one that encloses the call."""
    names = re.findall(rb"^(?:ENTRY )?(%?[\w.\-]+) [^\n]*\{$", text, re.MULTILINE)
    found = _hit(_CALLED, text, chance)
    if found is None or not names:
        return text
    key = found[0].partition(b"=")[0]
    return text[: found.start()] + key + b"=" + chance.choice(names) + text[found.end() :]


def _junk(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(text, chance)
    times = chance.choice((1, 1, 1, 2, 1000, 100_000))
    return text[:at] + chance.choice(_JUNK) * times + text[at:]


def _nest(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = _at(text, chance)
    opening, closing = chance.choice(((b"(", b")"), (b"{", b"}"), (b"[", b"]"), (b"a={", b"}"),
                                      (b'"', b""), (b"'", b"'"), (b"/*", b"*/")))  # fmt: skip
    depth = chance.choice((1, 2, 70, 1000, 100_000))
    inside = text[at : at + chance.choice((0, 0, 10))]
    closed = closing * (depth if chance.random() < 0.5 else 0)
    return text[:at] + opening * depth + inside + closed + text[at + len(inside) :]


def _quotes(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(
        re.compile(rb'["\']'), text, chance, [b"", b'""', b'\\"', b"\\", b'"{', b'\n"']
    )


def _groups(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    found = _hit(_GROUPS, text, chance)
    if found is None:
        return text
    key = found[0].partition(b"=")[0]
    value = chance.choice(_HOSTILE_GROUPS)
    if chance.random() < 0.1:
        value = b"{{" + b",".join(b"%d" % i for i in range(200_000)) + b"}}"
    return text[: found.start()] + key + b"=" + value + text[found.end() :]


def _trips(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    counts = (b"0", b"-1", b"1" + b"0" * 14, b"9" * 18, b"9" * 100_000, b"", b"1.5")
    value = chance.choice(counts)
    return _replaced(_TRIPS, text, chance, [b'"n":"' + value + b'"', b"constant(" + value + b")"])


def _dims(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    dims = (b"", b"0", b"9" * 1_000_000, b"9" * 18, b"999999999999999999," * 60, b"?", b"<=8",
            b"-4", b"1," * 100_000, b"2,2,2")  # fmt: skip
    found = _hit(_DIMS, text, chance)
    if found is None:
        return text
    return text[: found.start(1)] + chance.choice(dims) + text[found.end(1) :]


def _opcode(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_OPCODE, text, chance, [b" " + opcode + b"(" for opcode in _OPCODES])


def _dtype(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    dtypes = (b"bf16", b"f64", b"s4", b"f7e1m5", b"token", b"opaque", b"", b"c128", b"(f32")
    return _replaced(_DTYPE, text, chance, dtypes)


def _header(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return _replaced(_COUNTS, text, chance, [b"num_partitions=" + n for n in _NUMBERS] + [b"x"])


def _several(text: bytes, chance: random.Random, donors: Sequence[bytes]) -> bytes:
    for _time in range(chance.randint(2, 6)):
        text = OPERATORS[chance.choice(_MIXED)].damage(text, chance, donors)
    return text[: 8 << 20]


def _container(text: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    packed = bytearray(gzip.compress(text, 1, mtime=0))
    at = chance.randrange(2, len(packed))
    match chance.randrange(4):
        case 0:
            return bytes(packed[:at])
        case 1:
            packed[at] ^= 1 << chance.randrange(8)
        case 2:
            del packed[at : at + chance.choice((1, 100))]
        case _:
            return bytes(packed) + chance.choice((b"\0" * 100, b"junk", bytes(packed[:at])))
    return bytes(packed)


_STRICT: dict[str, Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = {
    "truncate": _truncate,
    "delete-lines": _delete_lines,
    "delete-bytes": _delete_bytes,
    "delete-computation": _delete_computation,
    "delete-attribute": _delete_attribute,
    "delete-name": _delete_name,
    "delete-structure": _delete_structure,
    "swap-lines": _swap_lines,
    "repeat-lines": _repeat_lines,
    "splice-line": _splice_line,
    "splice-computation": _splice_computation,
    "splice-tail": _splice_tail,
    "junk": _junk,
    "nest": _nest,
    "quotes": _quotes,
    "container": _container,
}
_REWRITES: dict[str, Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = {
    "number": _number,
    "rename": _rename,
    "recall": _recall,
    "groups": _groups,
    "trips": _trips,
    "dims": _dims,
    "opcode": _opcode,
    "dtype": _dtype,
    "header": _header,
    "several": _several,
}
_MIXED = sorted({*_STRICT, *_REWRITES} - {"several", "container"})

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: Operator(damage=damage, strict=True) for name, damage in _STRICT.items()}
    | {name: Operator(damage=damage, strict=False) for name, damage in _REWRITES.items()}
)
"""By name, the strict ones first."""
