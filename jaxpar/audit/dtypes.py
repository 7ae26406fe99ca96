"""The element type a program asked for, where the backend put another one on the wire.

XLA on CPU turns 16-bit collectives into 32-bit ones: it converts before and after. For reductions
it says so in the name of the reducer; of the other operations only the converts tell.
"""

from __future__ import annotations

from jaxpar.audit.dataflow import SAME_VALUE, Dataflow, Place
from jaxpar.audit.reader import Computation, Instruction, Operand
from jaxpar.audit.shape import Array, Shape, leaves

MAX_USERS = 32
"""Users of a value that are looked at; a value with more is not judged."""

_MOVES = SAME_VALUE | {"transpose", "slice", "dynamic-slice"}
_PROMOTED_FROM = {"f32": "bf16", "s32": "s16", "u32": "u16"}
_REDUCTIONS = ("all-reduce", "reduce-scatter")


def program_dtype(
    flow: Dataflow, computation: Computation, found: Instruction, results: Shape, platform: str
) -> str:
    """Element types the program asked for, joined by "+"; those of the wire where nothing tells.

    A reduction counts as promoted when its reducer is named so, or when it is converted both
    before and after; anything else when it is converted before, or by everybody after.
    """
    arrays = list(leaves(results))
    if platform not in ("cpu", "unknown") or not flow.narrow:
        return "+".join(dict.fromkeys(array.dtype for array in arrays))
    reduces = found.opcode.removesuffix("-start") in _REDUCTIONS
    promoted = found.attributes.get("to_apply", "").endswith("_promoted")
    dtypes = []
    for index, array in enumerate(arrays):
        if array.dtype not in _PROMOTED_FROM or index >= len(found.operands):
            dtypes.append(array.dtype)
            continue
        before = _before(flow, computation, found.operands[index], array.dtype)
        after = None
        if (before is not None) == (reduces and not promoted):  # else the one answer is enough
            path = (index,) if len(arrays) > 1 else ()
            value = Operand(name=found.name, path=path)
            after = _after(flow, computation, value, array.dtype, strict=not reduces)
        if promoted:
            dtypes.append(before or after or _PROMOTED_FROM[array.dtype])
        elif reduces:
            dtypes.append(before if before and before == after else array.dtype)
        else:
            dtypes.append(before or after or array.dtype)
    return "+".join(dict.fromkeys(dtypes))


def _before(flow: Dataflow, computation: Computation, operand: Operand, wire: str) -> str | None:
    """The narrower type from which `operand` was converted, if it was."""
    maker = computation.get(operand.name)
    if maker is not None and maker.opcode == "fusion" and not _converts(flow, maker):
        return None
    end = flow.origin(Place(computation=computation, operand=operand), through=_MOVES)
    if end is None or end.instruction is None or end.instruction.opcode != "convert":
        return None
    if not end.instruction.operands:
        return None
    given = end.computation.get(end.instruction.operands[0].name)
    return _narrower(given, wire)


def _after(
    flow: Dataflow, computation: Computation, value: Operand, wire: str, *, strict: bool
) -> str | None:
    """The narrower type to which every user converts `value`, if all do.

    `strict`: conversions that the program wrote itself do not count.
    """
    todo = [(computation, value.name, value.path)]
    found: set[str | None] = set()
    seen = 0
    while todo:
        place, name, path = todo.pop()
        for user in place.users(name):
            seen += 1
            if seen > MAX_USERS:
                return None
            if user.opcode == "get-tuple-element" and path:
                if user.attributes.get("index") == str(path[0]):
                    todo.append((place, user.name, path[1:]))
            elif user.opcode == "convert":
                # XLA's own conversions carry no name; one with a name is the program's.
                found.add(None if strict and user.op_name else _narrower(user, wire))
            elif user.opcode in _MOVES:
                todo.append((place, user.name, path))
            elif user.opcode == "fusion" and len(user.called) == 1:
                if not _converts(flow, user):
                    return None
                callee = flow.module.computations.get(user.called[0][1])
                for number, operand in enumerate(user.operands):
                    if operand.name == name and callee and number in callee.parameters:
                        todo.append((callee, callee.parameters[number].name, path))
            else:
                return None
    return found.pop() if len(found) == 1 else None


def _converts(flow: Dataflow, fusion: Instruction) -> bool:
    """Whether a fusion can be a conversion, which its text tells without being read."""
    callees = (flow.module.computations.get(name) for _, name in fusion.called)
    return any(callee is not None and callee.mentions(" convert(") for callee in callees)


def _narrower(found: Instruction | None, wire: str) -> str | None:
    if found is None or not isinstance(found.shape, Array):
        return None
    dtype = found.shape.dtype
    return dtype if dtype[0] == wire[0] or dtype == "bf16" else None
