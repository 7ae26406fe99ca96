"""Budgets: what a program may communicate at most, read from a small TOML file and checked.

    max_wire_bytes = "64 MiB"          # of the whole step, per device
    forbidden = ["all-to-all"]
    max_exposed_fraction = 0.2

    [[limit]]                          # of a part of it: any of kind, axis, phase
    kind = "all-reduce"
    axis = "tensor"                    # with this axis, alone or among others
    phase = "forward"
    max_count = 64
    max_payload_bytes = "1 GiB"

What is not known counts against a limit: an operation that runs an unknown number of times, an axis
or a phase that the program does not tell.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cattrs import Converter, ForbiddenExtraKeysError

from jaxpar.audit.collect import KINDS
from jaxpar.audit.grouping import Bounds, Portion, add_up, divided, exposure, whole
from jaxpar.audit.result import Audit, Collective
from jaxpar.audit.scope import PHASES
from jaxpar.errors import JaxparError, did_you_mean, is_whole, require_choice, shown

MAX_FILE_BYTES = 64 * 1024

MAX_AMOUNT = 1 << 62
"""Of a limit: more bytes than a step can send."""

_UNITS: Mapping[str, int] = MappingProxyType(
    {"B": 1}
    | {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGTP")}
    | {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGTP")}
)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) *([A-Za-z]{1,3})")
_AMOUNTS = ("max_count", "max_payload_bytes", "max_wire_bytes")
_UNKNOWN = "unknown"


class BudgetError(JaxparError):
    """A budget that cannot be read, or that says nothing about this program."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that the collectives of this `kind`, with this `axis`, in this `phase` may do.

    None of the three narrows it down to nothing in particular. `axis` is one name, or several
    joined by commas: all of them have to be among the collective's axes. `max_count` are
    executions per step on a device, bytes those of all executions and given as whole numbers or
    texts such as "64 MiB", `max_exposed_fraction` the part of the bytes on the wire that no
    computation hides. BudgetError for what cannot be.
    """

    kind: str | None = None
    axis: str | None = None
    phase: str | None = None
    max_count: int | None = None
    max_payload_bytes: int | None = None
    max_wire_bytes: int | None = None
    max_exposed_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.kind is not None:
            _check_kind(self.kind)
        if self.axis is not None and (not isinstance(self.axis, str) or not all(self.axes)):
            raise BudgetError(
                f"axis = {shown(self.axis)} names no axis; write one, such as "
                f'"tensor", or several with commas between.'
            )
        if self.phase is not None:
            require_choice(BudgetError, "phase", self.phase, PHASES)
        for key in _AMOUNTS:
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, _amount(key, value))
        fraction = self.max_exposed_fraction
        if fraction is not None and not (_is_number(fraction) and 0 <= fraction <= 1):
            raise BudgetError(
                f"max_exposed_fraction = {shown(fraction)} is no number from 0 to 1; 0.2 lets a "
                "fifth of the bytes wait for nothing else."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.axis.split(",")) if self.axis is not None else ()

    @property
    def allowed(self) -> dict[str, int | float]:
        """What is limited: key → the most that is allowed."""
        keys = (*_AMOUNTS, "max_exposed_fraction")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def __str__(self) -> str:
        kind = self.kind or "all collectives"
        over = f" over {self.axis}" if self.axis else ""
        return f"{kind}{over}{f', {self.phase}' if self.phase else ''}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits for a step: of everything, of parts (`limit`), and kinds that may not occur."""

    forbidden: Sequence[str] = ()
    max_count: int | None = None
    max_payload_bytes: int | None = None
    max_wire_bytes: int | None = None
    max_exposed_fraction: float | None = None
    limit: Sequence[Limit] = ()

    def __post_init__(self) -> None:
        if isinstance(self.forbidden, str) or not isinstance(self.forbidden, list | tuple):
            raise BudgetError(
                f'forbidden = {shown(self.forbidden)} is no list; write forbidden = ["all-to-all"].'
            )
        for kind in self.forbidden:
            _check_kind(kind)
        for limit in self.limit:
            if not isinstance(limit, Limit):
                raise BudgetError(f"limit has {shown(limit)} in it; every part is a Limit(...).")
            if not limit.allowed:
                raise BudgetError(f"the limit of {limit} has no max_…; write max_count = 4, say.")
        object.__setattr__(self, "forbidden", tuple(self.forbidden))
        object.__setattr__(self, "limit", tuple(self.limit))
        if not self.forbidden and not self.limits:
            raise BudgetError('it limits nothing; write max_wire_bytes = "64 MiB", say.')

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits that say something, the one of the whole step first."""
        keys = (*_AMOUNTS, "max_exposed_fraction")
        step = Limit(**{key: getattr(self, key) for key in keys})
        return (*([step] if step.allowed else []), *self.limit)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Budget:
        """Read a budget file. BudgetError for one that is missing, too large, or says nonsense."""
        given = os.fspath(path)
        try:
            with Path(given).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BudgetError(f"Budget file {shown(given)} cannot be read: {why}.") from None
        try:
            return _decoded(content)
        except BudgetError as error:
            raise BudgetError(f"Budget file {shown(given)}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One limit that is not kept. `key` is the limit's field, or "forbidden".

    The program comes to at least `actual_min` and at most `actual_max` (None: no bound is known).
    With `is_unknown` it may keep the limit, and nobody can tell. `portions` are the collectives
    that make it up, most bytes on the wire first.
    """

    what: str
    key: str
    allowed: int | float
    actual_min: int | float
    actual_max: int | float | None
    is_unknown: bool
    portions: tuple[Portion, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "key": self.key,
            "allowed": self.allowed,
            "actual_min": self.actual_min,
            "actual_max": self.actual_max,
            "unknown": self.is_unknown,
            "collectives": [_portion_json(portion) for portion in self.portions],
        }


def check(budget: Budget, audit: Audit) -> tuple[Violation, ...]:
    """The limits that the audited program does not keep; empty when it keeps all.

    Raises BudgetError for an axis that the program's mesh does not have. An incomplete audit may
    keep limits only because something is missing: see `audit.program.complete`.
    """
    violations: list[Violation] = []
    for kind in dict.fromkeys(budget.forbidden):
        portions = list(_matching(Limit(kind=kind), audit))
        if portions:
            count = add_up(portions).count
            violations.append(_violation(kind, "forbidden", 0, count.low, count.high, portions))
    for limit in budget.limits:
        check_axes(limit, audit)
        violations += _exceeded(limit, list(_matching(limit, audit)))
    return tuple(violations)


def _exceeded(limit: Limit, portions: list[Portion]) -> Iterable[Violation]:
    actual = add_up(portions)
    for key, allowed in limit.allowed.items():
        if key == "max_exposed_fraction":
            continue
        bounds: Bounds = getattr(actual, key.removeprefix("max_"))
        if bounds.high is None or bounds.high > allowed:
            yield _violation(str(limit), key, allowed, bounds.low, bounds.high, portions)
    most = limit.max_exposed_fraction
    sending = [portion for portion in portions if portion.count.times(portion.wire_bytes).high != 0]
    if most is not None and sending:
        low, high = exposure(sending) or (0.0, 1.0)
        if high > most:
            yield _violation(str(limit), "max_exposed_fraction", most, low, high, sending)


def _violation(
    what: str,
    key: str,
    allowed: int | float,
    low: int | float,
    high: int | float | None,
    portions: list[Portion],
) -> Violation:
    return Violation(
        what=what,
        key=key,
        allowed=allowed,
        actual_min=low,
        actual_max=high,
        is_unknown=low <= allowed,
        portions=tuple(sorted(portions, key=_largest_first)),
    )


def _largest_first(portion: Portion) -> tuple[bool, int]:
    wire = portion.count.times(portion.wire_bytes)
    return wire.high is not None, -(wire.low if wire.high is None else wire.high)


def _matching(limit: Limit, audit: Audit) -> Iterable[Portion]:
    """The collectives, or the parts of merged ones, that a limit is about."""
    for found in audit.collectives:
        if limit.kind not in (None, found.kind):
            continue
        if limit.axes and found.axes and not set(limit.axes) <= set(found.axes):
            continue
        if limit.phase is None:
            yield whole(found)
            continue
        # By whether the phase is meant, or may be.
        meant = divided(found, lambda buffer: buffer.phase in (limit.phase, _UNKNOWN))
        if True in meant:
            yield meant[True]


def check_axes(limit: Limit, audit: Audit) -> None:
    """BudgetError for an axis nobody has: nothing could exceed such a limit."""
    if not limit.axes or not (audit.mesh or audit.collectives):
        return
    seen = (axis for found in audit.collectives for axis in found.axes or ())
    known = list(audit.mesh or dict.fromkeys(seen))
    for axis in limit.axes:
        if axis not in known:
            advice = "" if audit.mesh else " Name the axes with --mesh, or mesh= in Python."
            close = did_you_mean(axis, known) if known else ""
            raise BudgetError(
                f"There is no axis {shown(axis)} in this program, so nothing can be said of it. "
                f"{close}{advice}".rstrip()
            )


def _portion_json(portion: Portion) -> dict[str, Any]:
    found: Collective = portion.collective
    return {
        "kind": found.kind,
        "axes": None if found.axes is None else list(found.axes),
        "axes_note": found.axes_note,
        "phase": found.phase,
        **portion.count.to_json("count"),
        "payload_bytes": portion.payload_bytes,
        "wire_bytes": portion.wire_bytes,
        "exposed_fraction": found.exposed_fraction,
        "scope": found.scope,
        "source": found.source,
        "name": found.name,
        "line": found.line,
    }


def _check_kind(kind: Any) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise BudgetError(
            f"there is no collective {shown(kind)}. {did_you_mean(str(kind)[:80], KINDS)}"
        )


def _amount(key: str, value: Any) -> int:
    """A whole number; for bytes also a text with a unit, rounded down to whole bytes."""
    unit_allowed = key.endswith("_bytes")
    if unit_allowed and isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        if match[2] not in _UNITS:
            raise BudgetError(f"{key} = {shown(value)}: {did_you_mean(match[2], _UNITS)}")
        value = int(Fraction(match[1]) * _UNITS[match[2]])
    if not is_whole(value) or not 0 <= value <= MAX_AMOUNT:
        form = (
            'bytes as a whole number or a text such as "64 MiB"'
            if unit_allowed
            else "a whole number"
        )
        raise BudgetError(
            f"{key} = {shown(value)} ({type(value).__name__}) must be {form}, from 0 to 2^62."
        )
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decoded(content: bytes) -> Budget:
    """The budget that a file's bytes describe; BudgetError for everything else."""
    if len(content) > MAX_FILE_BYTES:
        raise BudgetError(f"more than {MAX_FILE_BYTES:,} bytes; a budget takes a few lines.")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BudgetError(f"not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:  # ValueError: bad TOML, or digits without end
        raise BudgetError(f"not TOML: {error}.") from None
    tables = document.get("limit", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BudgetError("limit is no list of tables; write [[limit]] above each.")

    # The classes check values themselves, whoever makes them; cattrs matches keys with fields.
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook_func(lambda kind: kind not in (Budget, Limit), _as_it_is)
    try:
        limits = [converter.structure(table, Limit) for table in tables]
        return converter.structure({**document, "limit": limits}, Budget)
    except ForbiddenExtraKeysError as error:
        raise _unknown_key(min(error.extra_fields), error.cl) from None


def _as_it_is(value: Any, _type: Any) -> Any:
    return value


def _unknown_key(key: str, kind: type) -> BudgetError:
    keys = [field.name for field in fields(kind)]
    hint = did_you_mean(key[:80], keys)
    if kind is Limit and key in {field.name for field in fields(Budget)}:
        hint = "It belongs above the first [[limit]]."
    if kind is Budget and key in {field.name for field in fields(Limit)}:
        hint = "It belongs into a table of its own, below [[limit]]."
    where = " in a [[limit]]" if kind is Limit else ""
    return BudgetError(f"unknown key {shown(key)}{where}. {hint}")
