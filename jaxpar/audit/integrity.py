"""Whether a text says the same thing everywhere it says it: what is left out leaves a trace.

HLO is redundant: a header names the types of the entry, a computation has one root, a loop says
its state and often its trips, a list of groups every device. Damage that removes communication and
still reads as a program is found because one of these no longer agrees. Linear in what is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxpar.audit.collect import KINDS
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import deduced_trips, printed_trips
from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.shape import Shape, parse_shape
from jaxpar.errors import AuditError

_LAYOUT = re.compile(r"\{(\(.*\))->(.*)\}", re.DOTALL)
_GROUPS = ("replica_groups", "source_target_pairs")
_HANDS_ON = ("while", "call", "fusion")  # gives what it runs its own operands, and returns the root


def contradictions(module: Module, flow: Dataflow) -> Iterator[str]:
    """In words, with lines, where a text does not agree with itself; nothing for an intact one."""
    for computation in module.active:
        yield from _root(computation)
        for caller in computation.calling:
            yield from _call(module, flow, computation, caller)
    yield from _entry(module)
    for _, found in module.find(*(f"{key}=" for key in _GROUPS)):
        known = found.opcode.removesuffix("-start") in KINDS or found.opcode in ("send", "recv")
        if not known and any(key in found.attributes for key in _GROUPS):
            yield f"line {found.line}: {found.opcode} has device groups and is no known operation"


def _root(computation: Computation) -> Iterator[str]:
    """One root; each parameter once."""
    lines = computation.instructions.values()
    roots = [found for found in lines if found.is_root]
    if len(roots) != 1:
        yield f"line {computation.line}: {computation.name} has {len(roots)} roots, not one"
        return
    numbered = sum(found.opcode == "parameter" for found in lines)
    numbers = sorted(computation.parameters)
    if numbered != len(numbers) or numbers != list(range(numbered)):
        yield f"line {computation.line}: the parameters of {computation.name} are not 0, 1, …"


def _call(
    module: Module, flow: Dataflow, computation: Computation, caller: Instruction
) -> Iterator[str]:
    """As many operands as the callee has parameters, and the callee's result."""
    where = f"line {caller.line}: {caller.name}"
    called = caller.called
    if caller.opcode == "while":
        if sorted(key for key, _ in called) != ["body", "condition"]:
            yield f"{where} has no condition, or no body"
        printed = printed_trips(caller)
        deduced = deduced_trips(caller, computation, flow) if printed is not None else None
        if deduced is not None and deduced != printed:
            yield f"{where} is printed to run {printed} times, and its condition says {deduced}"
    elif caller.opcode == "conditional" and len(called) + 1 != len(caller.operands):
        yield f"{where} has {len(called)} branches for {len(caller.operands) - 1} operands"
    for key, name in called:
        callee = module.computations.get(name)
        if callee is None or callee.inert:
            continue
        if caller.opcode in _HANDS_ON and len(callee.parameters) != len(caller.operands):
            yield f"{where} gives {name} {len(caller.operands)} of {len(callee.parameters)} values"
        returns = caller.opcode in (*_HANDS_ON, "conditional") and key != "condition"
        if returns and callee.root is not None and callee.root.shape != caller.shape:
            yield f"{where} is of another type than {name}, which it runs"
        state = callee.parameters.get(0)
        if caller.opcode == "while" and state is not None and state.shape != caller.shape:
            yield f"{where} has another state than {name}"


def _entry(module: Module) -> Iterator[str]:
    """The entry takes and returns what the header says."""
    layout = (module.header or {}).get("entry_computation_layout")
    entry = module.entry
    if layout is None or entry is None or entry.root is None:
        return
    found = _LAYOUT.fullmatch(layout)
    given = tuple(entry.parameters[number].shape for number in sorted(entry.parameters))
    if found is None or _shape(found[1]) != given or _shape(found[2]) != entry.root.shape:
        yield f"line {entry.line}: the entry is not what entry_computation_layout says"


def _shape(text: str) -> Shape | None:
    try:
        return parse_shape(text)
    except AuditError:
        return None
