"""Rules about what is gathered whole, or in a wide type, although less would do.

They follow the result of an all-gather to its uses. What is used in some way that a rule does not
understand is taken to be needed as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from jaxpar.audit.dataflow import SAME_VALUE, Place
from jaxpar.audit.findings.common import Use, axes_text, finding, step_bytes, uses
from jaxpar.audit.findings.gathered import MIN_BYTES, Gather, dims_in, gathers, result_array
from jaxpar.audit.findings.opaque import before_opaque_call
from jaxpar.audit.findings.reshards import gathered_then_sliced
from jaxpar.audit.findings.values import (
    REARRANGED,
    Groups,
    Producers,
    operand_bytes,
    operand_places,
    result_paths,
    same_within,
)
from jaxpar.audit.reader import Computation, Instruction, Operand
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding
from jaxpar.audit.shape import Array, bit_width, leaves, nbytes

MIN_STACK_BYTES = 1 << 20
"""Gathered stacks below this do not matter for memory."""

_MOVED = SAME_VALUE | {"transpose"}
_FIRST_FEW = REARRANGED | {"slice"}
_TAKES_FEW = frozenset({"gather", "dynamic-slice", "reduce-scatter"})
_PICKS_TOP = ("TopK", "topk", "PartialReduce")
_WINDOW = re.compile(r"\bsize=(\d{1,18}(?:x\d{1,18})*)")


def whole_stack_gathered(reading: Reading, found: list[Gather]) -> Iterator[Finding]:
    """An all-gather of a stack of which the loop after it reads one slice per trip."""
    stacks = _Stacks(Producers(reading))
    for gather in found:
        if gather.array.nbytes >= MIN_STACK_BYTES:
            slices = [cut for end in gather.ends for cut in stacks.slices(end, gather)]
            if slices:
                yield _whole_stack(reading, gather, slices)


def _whole_stack(
    reading: Reading, gather: Gather, slices: list[tuple[Instruction, int]]
) -> Finding:
    site, stack = gather.site, gather.array
    cut, num_layers = slices[0]
    if gather.dim == 0:
        remedy = (
            "Shard the stack along another dim than the one the loop goes over (its leading one), "
            "so that each trip gathers its own slice."
        )
    else:
        remedy = (
            "Gather inside the loop: lax.all_gather of the slice in the body of lax.scan, under "
            "jax.checkpoint so that the backward pass gathers again; under jit, a "
            "with_sharding_constraint on the slice in the body."
        )
    return finding(
        reading,
        "whole-stack-gathered",
        f"{site.instruction.name} gathers {stack.nbytes:,} bytes {axes_text(site)} before a loop "
        f"that reads 1/{num_layers} of it per trip ({cut.name}): all of it stays in memory "
        f"where {stack.nbytes // num_layers:,} bytes would do",
        remedy,
        [site.instruction, *dict.fromkeys(cut for cut, _ in slices)],
    )


class _Stacks:
    """Which elements of a loop's state are gathered, and read slice by slice; once per loop."""

    def __init__(self, producers: Producers) -> None:
        self.producers = producers
        self.reading = producers.reading
        self._gathered: dict[tuple[str, str], dict[tuple[int, tuple[int, ...]], list[int]]] = {}

    def slices(self, end: Use, gather: Gather) -> list[tuple[Instruction, int]]:
        """How the loop at `end` cuts a result, each with the number of slices.

        Empty when `end` is no loop, or one that needs the result whole.
        """
        loop = end.instruction
        if loop.opcode != "while" or end.calls:
            return []
        key = (end.computation.name, loop.name)
        if key not in self._gathered:
            self._gathered[key] = self._find(end.computation, loop)
        body = self.reading.module.computations.get(dict(loop.called).get("body", ""))
        found: list[tuple[Instruction, int]] = []
        for index in self._gathered[key].get((id(gather.site), gather.path), ()):
            cuts = [] if body is None else _slices_per_trip(self.reading, body, index)
            if not cuts:
                return []
            found += cuts
        return found

    def _find(
        self, home: Computation, loop: Instruction
    ) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        """Indices into the state, by the gather and the element of its result that they hold."""
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        if isinstance(loop.shape, Array) or not loop.operands:
            return found
        state = loop.operands[0]
        for index, shape in enumerate(loop.shape):
            if not isinstance(shape, Array) or shape.nbytes < MIN_STACK_BYTES:
                continue
            operand = Operand(name=state.name, path=(*state.path, index))
            place = Place(computation=home, operand=operand)
            made = self.producers.of(place, through=REARRANGED)
            if made is not None:
                found.setdefault((id(made[0]), made[1]), []).append(index)
        return found


def _slices_per_trip(
    reading: Reading, body: Computation, index: int
) -> list[tuple[Instruction, int]]:
    """The slices along the leading dim that are all that `body` reads of its state's `index`."""
    state = body.parameters.get(0)
    if state is None or not reading.flow.invariant(body, index):
        return []
    found: list[tuple[Instruction, int]] = []
    for end in uses(reading, body, state, (index,)) or ():
        if end.escapes and end.computation is body and end.path == (index,):
            continue  # handed on to the next trip
        num_slices = _num_slices(reading, body, end)
        if num_slices < 2:
            return []
        found.append((end.instruction, num_slices))
    return found


def _num_slices(reading: Reading, body: Computation, end: Use) -> int:
    """How many slices like the one at `end` make the whole; 0 where it is none that moves on."""
    cut = end.instruction
    if cut.opcode != "dynamic-slice" or end.index != 0 or len(cut.operands) < 2:
        return 0
    given = end.computation.get(cut.operands[0].name)
    if given is None or not isinstance(given.shape, Array) or not isinstance(cut.shape, Array):
        return 0
    whole, part = given.shape.dims, cut.shape.dims
    if len(whole) != len(part) or whole[1:] != part[1:] or not part[0]:
        return 0
    offset = Place(computation=end.computation, operand=cut.operands[1], calls=end.calls)
    start = reading.flow.origin(offset, stop=body.name)
    if start is not None and start.instruction is not None:
        return 0 if start.instruction.opcode == "constant" else whole[0] // part[0]
    return 0


def gather_before_narrowing(reading: Reading) -> Iterator[Finding]:
    """An all-gather of which everybody converts the result to a narrower type.

    Not where the backend put the wider type on the wire: that is `promoted_dtype`.
    """
    for site in reading.sites:
        collective = site.collective
        if collective.kind != "all-gather" or collective.payload_bytes < MIN_BYTES:
            continue
        if collective.program_dtype != collective.dtype:
            continue
        saved, converts, narrow = 0, [], ""
        for number, path in enumerate(result_paths(site)):
            array = result_array(site, number)
            ends = uses(reading, site.computation, site.instruction, path, through=_MOVED)
            found = _narrowed(array, ends or ())
            if array is not None and found:
                dtype = max(found, key=bit_width)
                part = 1 - bit_width(dtype) / bit_width(array.dtype)
                saved += round(operand_bytes(site, number) * part)
                converts += [end.instruction for end in ends or ()]
                narrow = narrow or dtype
        if saved:
            yield finding(
                reading,
                "gather-before-narrowing",
                f"{site.instruction.name} gathers {collective.dtype} {axes_text(site)}, and all "
                f"that becomes of it is converted to {narrow}",
                f"Convert the shard before the gather: lax.all_gather(x.astype({narrow}), axis), "
                "or under jit x.astype(...) before the with_sharding_constraint.",
                [site.instruction, *converts],
                wire_bytes=step_bytes(site, wire_bytes=saved),
            )


def _narrowed(array: Array | None, ends: tuple[Use, ...]) -> list[str]:
    """The narrower types that all `ends` convert to; empty if one does anything else."""
    dtypes = []
    for end in ends:
        to = end.instruction.shape
        if array is None or end.escapes or end.instruction.opcode != "convert":
            return []
        if not isinstance(to, Array) or bit_width(to.dtype) >= bit_width(array.dtype):
            return []
        dtypes.append(to.dtype)
    return dtypes


def promoted_dtype(reading: Reading) -> Iterator[Finding]:
    """What the backend sends in a wider type than the program passes; one finding per kind."""
    alike: dict[str, list[Site]] = {}
    for site in reading.sites:
        if site.collective.program_dtype != site.collective.dtype:
            alike.setdefault(site.collective.kind, []).append(site)
    for kind, sites in alike.items():
        steps = [_widened_bytes(site) for site in sites]
        known = [step for step in steps if step is not None]
        types = [(site.collective.program_dtype, site.collective.dtype) for site in sites]
        changes = ", ".join(f"{asked} as {sent}" for asked, sent in dict.fromkeys(types))
        yield finding(
            reading,
            "promoted-dtype",
            f"{len(sites)} {kind} operation{'s' * (len(sites) > 1)} go over the wire in a wider "
            f"type than the program passes ({changes}): this backend ({reading.platform}) widens "
            "them",
            "Nothing to change in the program. TPUs and GPUs send the narrow type: compile for the "
            "target before comparing bytes.",
            [site.instruction for site in sites],
            severity="info",
            wire_bytes=sum(known) if len(known) == len(steps) else None,
        )


def _widened_bytes(site: Site) -> int | None:
    """What the wider type adds per step; None for several types, of unknown parts."""
    asked, sent = site.collective.program_dtype, site.collective.dtype
    if "+" in asked or "+" in sent:
        return None
    return step_bytes(site, max(0.0, 1 - bit_width(asked) / bit_width(sent)))


def gathered_to_reduce(reading: Reading, found: list[Gather]) -> Iterator[Finding]:
    """An all-gather of which only maxima, sums or the like along the gathered dim are used."""
    producers, groups = Producers(reading), Groups()
    for gather in found:
        ends = _reductions(reading, gather)
        if not ends or _is_local_top(producers, gather):
            continue
        if not all(_same_for_all(producers, groups, gather, end) for end in ends):
            continue
        reductions = {end.instruction: _bytes_instead(reading, end, gather) for end in ends}
        part = 1 - sum(reductions.values()) / gather.array.nbytes
        if part <= 0:
            continue
        site, first = gather.site, ends[0].instruction
        yield finding(
            reading,
            "gathered-to-reduce",
            f"{site.instruction.name} gathers {gather.array.nbytes:,} bytes {axes_text(site)}, and "
            "all that becomes of it is reduced along the dim that was gathered "
            f"({first.name}): logits or activations gathered whole",
            "Reduce the shard first and communicate the result: lax.pmax(x.max(-1), axis) and "
            "lax.psum(jnp.exp(x - m).sum(-1), axis) for a softmax or its loss; the local "
            "lax.top_k, then the gather of k candidates, for a choice of tokens.",
            [site.instruction, *reductions],
            wire_bytes=step_bytes(site, part, operand_bytes(site, gather.number)),
        )


def _reductions(reading: Reading, gather: Gather) -> list[Use]:
    """The reductions along the gathered dim that are all that a result is for.

    Besides them, few elements may be taken, or each device's own: the label's logit, a gradient.
    """
    dims = gather.array.dims
    if gather.dim is None or gather.dim >= len(dims):
        return []
    found = []
    for end in gather.ends:
        if not end.escapes and end.instruction.opcode in _TAKES_FEW and end.index == 0:
            continue
        if not _reduces(reading, end, dims[gather.dim]):
            return []
        found.append(end)
    return found


def _same_for_all(producers: Producers, groups: Groups, gather: Gather, end: Use) -> bool:
    """Whether the devices reduce the same: no all-reduce gives each of them another result."""
    made = Operand(name=end.instruction.name)
    at = Place(computation=end.computation, operand=made, calls=end.calls)
    operands = operand_places(end.instruction, at)
    return all(same_within(producers, groups, gather.site, place) for place in operands)


def _bytes_instead(reading: Reading, end: Use, gather: Gather) -> int:
    """What to communicate instead: the result of a reduction, or the k best of every shard."""
    found = end.instruction
    if not _picks_top(reading, end):
        return nbytes(found.shape)
    if found.opcode == "sort":
        cuts = uses(reading, end.computation, found, calls=end.calls) or ()
        best = sum(nbytes(cut.instruction.shape) for cut in cuts)
    elif isinstance(found.shape, Array):
        best = found.shape.nbytes
    else:  # values and indices, of which only one may be wanted
        results = enumerate(found.shape)
        best = sum(nbytes(it) for index, it in results if _is_used(reading, end, index))
    return best * gather.site.collective.group_size


def _is_used(reading: Reading, end: Use, index: int) -> bool:
    return uses(reading, end.computation, end.instruction, (index,), calls=end.calls) != ()


def _is_local_top(producers: Producers, gather: Gather) -> bool:
    """Whether what is gathered are the first few of each shard already."""
    site = gather.site
    operand = site.instruction.operands[gather.number]
    end = producers.end(Place(computation=site.computation, operand=operand), through=_FIRST_FEW)
    if end is None or end.instruction is None:
        return False
    if end.instruction.opcode != "sort":
        return _is_top_call(end.instruction)
    whole = next(leaves(end.instruction.shape), None)
    if whole is None:
        return False
    shard = math.prod(gather.array.dims) // site.collective.group_size
    return 2 * shard <= math.prod(whole.dims)


def _reduces(reading: Reading, end: Use, gathered: int) -> bool:
    """Whether a use leaves nothing of a dim of that size, and no other dim has this size."""
    found = end.instruction
    if end.index >= len(found.operands):
        return False
    given = end.computation.get(found.operands[end.index].name)
    if given is None or not isinstance(given.shape, Array):
        return False
    dims = given.shape.dims
    reduced: set[int] = set()
    if found.opcode == "reduce" and end.index < len(found.operands) // 2:
        reduced = set(dims_in(found.attributes.get("dimensions", "")))
    elif found.opcode == "reduce-window" and end.index < len(found.operands) // 2:
        reduced = _windowed(found, given.shape)
    elif _picks_top(reading, end):
        reduced = {_sorted_dim(found, len(dims))}
    of_size = {dim for dim, size in enumerate(dims) if size == gathered}
    return bool(of_size) and of_size <= reduced


def _windowed(found: Instruction, given: Array) -> set[int]:
    """The dims that a reduce-window makes at least twice smaller, window by window."""
    window = _WINDOW.search(found.attributes.get("window", ""))
    result = next(leaves(found.shape), None)
    if window is None or result is None or len(result.dims) != len(given.dims):
        return set()
    sizes = enumerate(zip(given.dims, result.dims, strict=True))
    return {dim for dim, (before, after) in sizes if 2 * after <= before}


def _picks_top(reading: Reading, end: Use) -> bool:
    """Whether a use keeps only the first few of a sorted dim."""
    found = end.instruction
    if _is_top_call(found):
        return True
    if found.opcode != "sort":
        return False
    ends = uses(reading, end.computation, found, calls=end.calls)
    return bool(ends) and all(
        it.instruction.opcode == "slice" and 2 * nbytes(it.instruction.shape) <= _bytes_read(it)
        for it in ends or ()
    )


def _is_top_call(found: Instruction) -> bool:
    target = found.attributes.get("custom_call_target", "")
    return found.opcode == "topk" or (
        found.opcode == "custom-call" and any(word in target for word in _PICKS_TOP)
    )


def _bytes_read(use: Use) -> int:
    given = use.computation.get(use.instruction.operands[use.index].name)
    return 0 if given is None else nbytes(given.shape)


def _sorted_dim(found: Instruction, num_dims: int) -> int:
    return next(iter(dims_in(found.attributes.get("dimensions", ""))), num_dims - 1)


def needless_gathers(reading: Reading) -> Iterator[Finding]:
    """What the rules say that share one walk over the uses of all all-gathers."""
    found = gathers(reading)
    yield from whole_stack_gathered(reading, found)
    yield from gathered_then_sliced(reading, found)
    yield from gathered_to_reduce(reading, found)
    yield from before_opaque_call(reading, found)


RULES = (needless_gathers, gather_before_narrowing, promoted_dtype)
