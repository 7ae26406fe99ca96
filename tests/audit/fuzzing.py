"""One case of fuzzing: a dump, an operator, a seed; and what the auditor made of the result."""

from __future__ import annotations

import functools
import gzip
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.audit import audit
from jaxpar.errors import AuditError
from tests.audit.mutations import OPERATORS, Totals, mutate, smaller, totals

HLO = Path(__file__).parent / "hlo"
DUMPS = tuple(sorted(path.name.removesuffix(".txt.gz") for path in HLO.glob("*.txt.gz")))

SLOW_S = 1.0
"""CPU time of one audit that is too long; wall time would blame the neighbours of the process."""

OUTCOMES = ("refused", "incomplete", "not smaller", "explained", "smaller")
BAD_OUTCOMES = ("silent", "crash", "slow", "hang")

_MAX_MESSAGE = 1000
_DONORS = ("trip_nested.cpu", "meta.gpu_1x1x8", "micro_rs_v5p_fused", "cond_cond.tpu_v5e_2x4",
           "lax_async_rs.gpu_1x1x8", "gspmd.cpu", "tp.cpu")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Names one mutation; the text of it is `dump:operator:seed`."""

    dump: str
    operator: str
    seed: int

    def __str__(self) -> str:
        return f"{self.dump}:{self.operator}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` gave. ValueError when it names no dump or operator."""
        dump, operator, seed = text.split(":")
        if dump not in DUMPS or operator not in OPERATORS:
            raise ValueError(f"{text!r} names no dump or no operator")
        return cls(dump=dump, operator=operator, seed=int(seed))

    def damaged(self) -> bytes:
        """The bytes that are audited."""
        donors = [text_of(name) for name in _DONORS]
        return mutate(text_of(self.dump), self.operator, self.seed, donors)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case, one of OUTCOMES or BAD_OUTCOMES, and why, in words.

    refused: the project's own error. incomplete: said so. smaller: a total shrank after a rewrite
    that may have made another program; explained: after a removal that did make one. silent: after
    any other removal. crash: another exception, or an error that is no message.
    """

    name: str
    why: str
    time_s: float


def cases(
    num: int,
    seed: int,
    dumps: Sequence[str] = DUMPS,
    operators: Sequence[str] = tuple(OPERATORS),
    preference: float = 0.5,
) -> list[Case]:
    """Every operator equally often, every dump at least once, small ones more often.

    By `preference`: with 0 all equally often, with 1 as much text of each.
    """
    chance = random.Random(seed)
    weights = [len(text_of(dump)) ** -preference for dump in dumps]
    picked = [*dumps, *chance.choices(dumps, weights, k=max(0, num - len(dumps)))][:num]
    return [
        Case(dump=dump, operator=operators[i % len(operators)], seed=chance.randrange(10**9))
        for i, dump in enumerate(picked)
    ]


def run(case: Case, folder: Path) -> Outcome:
    """Audit the damaged dump as a file in `folder`."""
    damaged = case.damaged()
    path = folder / ("case.txt.gz" if case.operator == "container" else "case.txt")
    path.write_bytes(damaged)
    start = time.process_time()
    try:
        result = audit(path)
        result.to_json()
    except AuditError as error:
        name, why = _judged(str(error))
        return _timed(name, why, start)
    except Exception as error:  # whatever it is: that is what is looked for
        return _timed("crash", f"{type(error).__name__}: {error}"[:300], start)
    if not result.program.complete:
        first = next(it.message for it in result.findings if it.severity == "error")
        return _timed("incomplete", first, start)
    outcome = _timed("not smaller", "", start)
    less = smaller(totals_of(case.dump), totals(result))
    if not less or outcome.name == "slow":
        return outcome
    name = "smaller"
    if OPERATORS[case.operator].strict:
        name = "explained" if explained(text_of(case.dump), damaged) else "silent"
    return Outcome(name=name, why="; ".join(less), time_s=outcome.time_s)


@functools.cache
def text_of(dump: str) -> bytes:
    with gzip.open(HLO / f"{dump}.txt.gz") as file:
        return file.read()


@functools.cache
def totals_of(dump: str) -> Totals:
    return totals(audit(HLO / f"{dump}.txt.gz"))


def _judged(message: str) -> tuple[str, str]:
    if not message.strip() or len(message) > _MAX_MESSAGE:
        return "crash", f"an error of {len(message)} characters: {message[:200]}"
    return "refused", message


def _timed(name: str, why: str, start: float) -> Outcome:
    time_s = time.process_time() - start
    if time_s > SLOW_S and name != "crash":
        return Outcome(name="slow", why=f"{name} after {time_s:.1f} s: {why}", time_s=time_s)
    return Outcome(name=name, why=why, time_s=time_s)


_DECIDING = re.compile(rb"(.* = [su]\d+\[\]\S* constant\()-?\d{1,18}(\).*)")
_ENTRY = re.compile(rb"^ENTRY .*\Z", re.MULTILINE | re.DOTALL)


def explained(before: bytes, after: bytes) -> bool:
    """Whether damage made a program that is as valid as the one before: it may be smaller.

    Two ways are known. One integer constant changed: TPU programs print no trip counts, so that a
    bound which lost a digit is simply another bound. Or the whole entry, with which XLA ends a
    text, is that of another dump.
    """
    entry = _ENTRY.search(after)
    others = {_entry(text_of(name)) for name in _DONORS} - {_entry(before)}
    if entry is not None and entry[0] in others:
        return True
    old, new = before.split(b"\n"), after.split(b"\n")
    changed = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
    if len(old) != len(new) or len(changed) != 1:
        return False
    was, now = map(_DECIDING.fullmatch, changed[0])
    return was is not None and now is not None and was.groups() == now.groups()


def _entry(text: bytes) -> bytes:
    found = _ENTRY.search(text)
    return found[0] if found else b""
