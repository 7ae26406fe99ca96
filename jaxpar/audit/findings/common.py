"""What all rules share: how a finding is worded, and where the result of a collective goes.

All walks are bounded and without recursion; one that gets too long answers "not known", and a rule
that does not know says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from jaxpar.audit.dataflow import SAME_VALUE, Place
from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding
from jaxpar.audit.shape import integer

MAX_EVIDENCE = 12
"""Instructions that one finding names; further ones are only counted."""

MAX_USES = 64
"""Places that are looked at to find out what a value is used for."""

MAX_USERS = 4096
"""Instructions among which uses are looked for: the state of a loop has many elements."""

MAX_CALLS = 8
"""Fusions within calls within fusions that a value is followed into."""

MAX_OPERANDS = 4096
"""Operands of one instruction that are looked through for a value; of more, it escapes."""

MAX_ABOVE = 64
"""Loops within branches within loops that are looked up through."""

_DONE = ("-done", "-update")
_ENTERED = ("fusion", "call")


def named(found: Instruction) -> str:
    """How evidence names an instruction."""
    return f"{found.name} (line {found.line})"


def step_bytes(site: Site, part: float = 1.0, wire_bytes: int | None = None) -> int | None:
    """Bytes that each device sends for `site` per step, times `part`; None for an unknown count.

    `wire_bytes` are those of one execution, of the whole operation when not given.
    """
    if site.collective.count is None:
        return None
    each = site.collective.wire_bytes if wire_bytes is None else wire_bytes
    return round(site.collective.count * each * part)


def finding(
    reading: Reading,
    rule: str,
    message: str,
    remedy: str,
    seen: Iterable[Instruction],
    *,
    severity: str = "warning",
    wire_bytes: int | None = None,
    source: str | None = None,
) -> Finding:
    """A finding whose evidence is the instructions `seen`; its source is that of the first."""
    instructions = tuple(seen)
    sources = (reading.module.source_of(found) for found in instructions)
    return Finding(
        rule=rule,
        severity=severity,
        message=message,
        source=source or next((place for place in sources if place), None),
        remedy=remedy,
        evidence=_evidence(instructions),
        wire_bytes=wire_bytes,
    )


def _evidence(seen: tuple[Instruction, ...]) -> tuple[str, ...]:
    names = tuple(named(found) for found in seen[:MAX_EVIDENCE])
    return names if len(seen) <= MAX_EVIDENCE else (*names, f"and {len(seen) - MAX_EVIDENCE} more")


def above(reading: Reading, computation: Computation) -> list[tuple[Computation, Instruction]]:
    """Who calls `computation`, who calls that, and so on; ends where the caller is not unique."""
    chain: list[tuple[Computation, Instruction]] = []
    callers = reading.flow.callers.get(computation.name, [])
    while len(callers) == 1 and len(chain) < MAX_ABOVE:
        chain.append(callers[0])
        callers = reading.flow.callers.get(callers[0][0].name, [])
    return chain


def home_of(place: Place) -> Computation:
    """The computation that a value belongs to, seen from outside the fusions it was traced into."""
    return place.calls[0][0] if place.calls else place.computation


def axes_text(site: Site) -> str:
    """Along which axes a collective communicates, in words."""
    collective = site.collective
    if collective.axes:
        return f"over {', '.join(collective.axes)}"
    return f"in groups of {collective.group_size} devices"


@dataclass(frozen=True, kw_only=True)
class Use:
    """An instruction that reads a value as its operand number `index` and makes another of it.

    `escapes`: the value leaves what we can follow (a result of the program, the state of a loop);
    `instruction` is then the last that hands it on, as element `path` of its result where that is a
    tuple. `calls` are the calls it was followed into.
    """

    computation: Computation
    instruction: Instruction
    index: int
    escapes: bool = False
    path: tuple[int, ...] = ()
    calls: tuple[tuple[Computation, Instruction], ...] = ()


@dataclass(frozen=True)
class _Value:
    computation: Computation
    name: str
    path: tuple[int, ...]
    calls: tuple[tuple[Computation, Instruction], ...]


def uses(
    reading: Reading,
    computation: Computation,
    found: Instruction,
    path: tuple[int, ...] = (),
    *,
    calls: tuple[tuple[Computation, Instruction], ...] = (),
    through: Collection[str] = SAME_VALUE,
    passes: Callable[[Use], bool] | None = None,
    wanted: Callable[[Use], bool] | None = None,
) -> tuple[Use, ...] | None:
    """What becomes of the value that `found` makes (of element `path` of it, where it is a tuple).

    The value is followed through `through`, tuples, calls and into fusions, and from the start of
    an asynchronous operation to its done; and through whatever else `passes` agrees to. `calls`:
    how we came to `computation`, where that is a fusion. None for more uses than anybody looks at,
    and as soon as one is not `wanted`.
    """
    ends: list[Use] = []
    todo = [_Value(computation, found.name, path, calls)]
    seen = set(todo)
    num_users = 0
    while todo:
        value = todo.pop()
        made = value.computation.get(value.name)
        onward: list[_Value] = []
        reached: list[Use] = []
        if made is not None and made is value.computation.root:
            onward += _after(reading, value, made, reached)
        users = value.computation.users(value.name)
        num_users += len(users)
        if num_users > MAX_USERS or len(seen) + len(ends) + len(reached) > MAX_USES:
            return None
        for user in users:
            onward += _through(reading, value, user, through, reached)
        for end in reached:
            if passes is not None and not end.escapes and passes(end):
                onward.append(_Value(end.computation, end.instruction.name, (), end.calls))
            elif wanted is not None and not wanted(end):
                return None
            else:
                ends.append(end)
        todo += [value for value in onward if value not in seen]
        seen.update(onward)
    return tuple(ends)


def _after(
    reading: Reading, value: _Value, root: Instruction, ends: list[Use]
) -> tuple[_Value, ...]:
    """The value as the caller of this computation sees it."""
    if value.calls:
        home, call = value.calls[-1]
        return (_Value(home, call.name, value.path, value.calls[:-1]),)
    sites = reading.flow.callers.get(value.computation.name, [])
    if len(sites) == 1 and _hands_back(sites[0][1]):
        home, call = sites[0]
        return (_Value(home, call.name, value.path, ()),)
    out = Use(
        computation=value.computation, instruction=root, index=0, escapes=True, path=value.path
    )
    ends.append(out)
    return ()


def _hands_back(call: Instruction) -> bool:
    return call.opcode in _ENTERED or call.opcode.endswith("-start")


def _through(
    reading: Reading, value: _Value, user: Instruction, through: Collection[str], ends: list[Use]
) -> list[_Value]:
    """The values that `user` makes of this one without changing it; else `ends` grows."""
    home, path, calls = value.computation, value.path, value.calls
    if user.opcode == "get-tuple-element":
        index = integer(user.attributes.get("index", ""), f"index of {user.name}")
        if path and path[0] != index:
            return []
        return [_Value(home, user.name, path[1:], calls)]
    onward: list[_Value] = []
    if len(user.operands) > MAX_OPERANDS:
        ends.append(Use(computation=home, instruction=user, index=0, escapes=True, calls=calls))
        return onward
    for index, operand in enumerate(user.operands):
        if operand.name != value.name or not _meets(operand.path, path):
            continue
        rest = path[len(operand.path) :]
        callee = None
        if user.opcode in _ENTERED and len(user.called) == 1 and len(calls) < MAX_CALLS:
            callee = reading.module.computations.get(user.called[0][1])
        if callee is not None and (parameter := callee.parameters.get(index)) is not None:
            onward.append(_Value(callee, parameter.name, rest, (*calls, (home, user))))
        elif user.opcode == "tuple":
            onward.append(_Value(home, user.name, (index, *rest), calls))
        elif (user.opcode in through or user.opcode.endswith(_DONE)) and index == 0:
            onward.append(_Value(home, user.name, rest, calls))
        else:
            ends.append(
                Use(
                    computation=home,
                    instruction=user,
                    index=index,
                    escapes=user.opcode == "while",
                    calls=calls,
                )
            )
    return onward


def _meets(given: tuple[int, ...], path: tuple[int, ...]) -> bool:
    """Whether an operand that reads element `given` of a value reads something of `path`."""
    shorter = min(len(given), len(path))
    return given[:shorter] == path[:shorter]
