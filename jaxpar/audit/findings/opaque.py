"""What is gathered because XLA cannot partition the operation that reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxpar.audit.findings.common import Use, axes_text, finding, step_bytes
from jaxpar.audit.findings.gathered import Gather, dims_in
from jaxpar.audit.findings.values import operand_bytes
from jaxpar.audit.reader import Instruction
from jaxpar.audit.reading import Reading
from jaxpar.audit.result import Finding
from jaxpar.audit.shape import Array

_ASKED_FOR = ("all_gather", "all_gather_invariant", "all-gather", "all_gather_reduced")
_LIBRARY = frozenset({"cholesky", "fft", "sort", "topk", "triangular-solve"})
_NEUTRAL = re.compile(  # what backends put into partitioned programs, and markers
    r"__(?!gpu\$TopK)|AllocateBuffer|Assume|AsyncCollective|ConcatBitcast|GatherScatter"
    r"|LayoutConstraint|MoveTo|SPMD|Sharding|TODO|annotate_|\Z"
)
_TARGET = re.compile(r'"([^"]{0,200})"')


def before_opaque_call(reading: Reading, found: list[Gather]) -> Iterator[Finding]:
    """An all-gather that XLA put in because what follows cannot be partitioned."""
    for gather in found:
        site = gather.site
        if site.instruction.op_name.rpartition("/")[2].rstrip(")") in _ASKED_FOR:
            continue
        if not gather.ends or not all(_is_opaque(end, gather.dim) for end in gather.ends):
            continue
        calls = [end.instruction for end in gather.ends]
        yield finding(
            reading,
            "before-opaque-call",
            f"{site.instruction.name} gathers {gather.array.nbytes:,} bytes {axes_text(site)} for "
            f"{_called(calls[0])}, which XLA does not partition: every device then computes all of "
            "it",
            "Put the call into jax.shard_map over its batch dims, so that each device runs it on "
            "its own shard; a dim that the call works along has to be whole on each device.",
            [site.instruction, *dict.fromkeys(calls)],
            wire_bytes=step_bytes(site, wire_bytes=operand_bytes(site, gather.number)),
        )


def _is_opaque(end: Use, dim: int | None) -> bool:
    """Whether a use cannot be partitioned, and does not work along dim `dim` of its operand."""
    found = end.instruction
    if end.escapes:
        return False
    target = _TARGET.fullmatch(found.attributes.get("custom_call_target", ""))
    if target is not None and _NEUTRAL.match(target[1]):
        return False
    top = found.opcode == "topk" or (target is not None and "TopK" in target[1])
    if target is not None and not top:
        return True
    if not (top or found.opcode in _LIBRARY) or dim is None or end.index >= len(found.operands):
        return False
    given = end.computation.get(found.operands[end.index].name)
    if given is None or not isinstance(given.shape, Array):
        return False
    num_dims = len(given.shape.dims)
    if found.opcode == "sort":
        along = dims_in(found.attributes.get("dimensions", ""))
        return dim not in along
    if found.opcode == "fft":
        return dim < num_dims - len(found.attributes.get("fft_length", "").split(","))
    return dim < num_dims - (1 if top else 2)


def _called(found: Instruction) -> str:
    target = _TARGET.fullmatch(found.attributes.get("custom_call_target", ""))
    return f"{found.name} ({target[1] if target else found.opcode})"
