"""Synchronous HLO rewritten into the asynchronous forms that other backends print."""

from __future__ import annotations

import re

from jaxpar.audit.collect import KINDS
from jaxpar.audit.reader import Computation, Instruction, read_hlo
from jaxpar.audit.shape import Array, parse_shape

_METADATA = re.compile(r", metadata=\{.*?\}(?=,|$)")


def started(text: str) -> str:
    """Every collective as `<kind>-start` and `<kind>-done`, as GPUs print them.

    The type of a start holds the operands before the result, but for an all-reduce of several
    buffers, which XLA also prints with its results alone.
    """
    return _rewritten(text, _start_and_done)


def wrapped(text: str) -> str:
    """Every collective in a computation of its own, run by `async-start` and `async-done`."""
    return _rewritten(text, _wrapper)


def _rewritten(text: str, rewrite: object) -> str:
    module = read_hlo(text)
    lines = text.split("\n")
    added: dict[int, list[str]] = {}
    for computation in module.computations.values():
        for found in computation.instructions.values():
            if found.opcode in KINDS:
                before, now = rewrite(computation, found)  # type: ignore[operator]
                added.setdefault(computation.line - 1, []).extend(before)
                lines[found.line - 1] = now
    return "\n".join("\n".join([*added.get(number, []), line]) for number, line in enumerate(lines))


def _start_and_done(computation: Computation, found: Instruction) -> tuple[list[str], str]:
    types = _operand_types(computation, found)
    result = found.type_text
    if found.opcode == "all-reduce" and isinstance(parse_shape(result), tuple):
        start_type = result
    else:
        start_type = f"(({', '.join(types)}), {result})"
    start = f"%{found.name}.start"
    root = "ROOT " if found.is_root else ""
    return [], (
        f"  {start} = {start_type} {found.opcode}-start({found.operands_text})"
        f"{found.attributes_text}\n"
        f"  {root}%{found.name} = {result} {found.opcode}-done({start})"
        f"{_metadata(found)}"
    )


def _wrapper(computation: Computation, found: Instruction) -> tuple[list[str], str]:
    types = _operand_types(computation, found)
    name = f"wrapped_{found.name}"
    names = [f"p{number}.{name}" for number in range(len(types))]
    parameters = ", ".join(
        f"{one}: {_bare(type_)}" for one, type_ in zip(names, types, strict=True)
    )
    body = [
        f"%{name} ({parameters}) -> {_bare(found.type_text)} {{",
        *(
            f"  %{one} = {type_} parameter({number})"
            for number, (one, type_) in enumerate(zip(names, types, strict=True))
        ),
        f"  ROOT %{name}.op = {found.type_text} {found.opcode}"
        f"({', '.join('%' + one for one in names)}){found.attributes_text}",
        "}",
        "",
    ]
    start = f"%{found.name}.start"
    root = "ROOT " if found.is_root else ""
    return body, (
        f"  {start} = (({', '.join(types)}), {found.type_text}, u32[]) "
        f"async-start({found.operands_text}), calls=%{name}{_metadata(found)}\n"
        f"  {root}%{found.name} = {found.type_text} async-done({start}), calls=%{name}"
        f"{_metadata(found)}"
    )


def _operand_types(computation: Computation, found: Instruction) -> list[str]:
    types = []
    for operand in found.operands:
        maker = computation.instructions[operand.name]
        assert not operand.path
        assert isinstance(maker.shape, Array)
        types.append(maker.type_text)
    return types


def _metadata(found: Instruction) -> str:
    given = found.attributes.get("metadata")
    return f", metadata={given}" if given else ""


def _bare(type_text: str) -> str:
    return re.sub(r"\{[^}]*\}", "", type_text)
