"""Rules about communication whose result is already there, or could be had with fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxpar.audit.dataflow import Place
from jaxpar.audit.findings.common import Use, axes_text, finding, home_of, step_bytes, uses
from jaxpar.audit.findings.offsets import on_each_device
from jaxpar.audit.findings.values import (
    CONSTANTS,
    ELEMENTWISE,
    PURE,
    REARRANGED,
    Groups,
    Producers,
    operand_bytes,
    operand_places,
    reducer,
    result_paths,
    value_key,
)
from jaxpar.audit.reader import Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding
from jaxpar.audit.shape import Array

_SLICED_LATER = REARRANGED - {"transpose"} | ELEMENTWISE
_REPEATABLE = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
_AGAIN = frozenset({"recompute", "backward"})  # fetching once more saves memory, and is meant


_WRITE_SCATTER = (
    "Write lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True) in place of lax.psum and the "
    "slice."
)
_COMPILERS_CHOICE = (
    "The program asks for lax.psum_scatter, and the compiler chose this: larger shards, or a mesh "
    "where the axis runs along one dimension of the torus, make it a reduce-scatter."
)


def all_reduce_then_slice(reading: Reading) -> Iterator[Finding]:
    """An all-reduce of which every device uses nothing but its own n-th part."""
    producers = Producers(reading)
    for site in reading.sites:
        if site.collective.kind != "all-reduce" or reducer(reading, site) != "add":
            continue
        slices: list[Instruction] = []
        for path in result_paths(site):
            found = _own_slices(producers, site, path)
            slices += found
            if not found:
                break
        else:
            yield finding(
                reading,
                "all-reduce-then-slice",
                f"{site.instruction.name} sums {_size(site)} {axes_text(site)}, and each device "
                f"keeps 1/{site.collective.group_size} of the sum: a reduce-scatter would do",
                _COMPILERS_CHOICE if _asked_to_scatter(reading, site) else _WRITE_SCATTER,
                [site.instruction, *slices],
                wire_bytes=step_bytes(site, 0.5),
            )


def _own_slices(producers: Producers, site: Site, path: tuple[int, ...]) -> list[Instruction]:
    """The slices that are all that becomes of a result, each device's own; [] if there is more.

    An operation on all elements before the slice could as well come after it.
    """
    ends = uses(
        producers.reading,
        site.computation,
        site.instruction,
        path,
        through=_SLICED_LATER,
        wanted=lambda end: _is_own_slice(producers, end, site),
    )
    return [end.instruction for end in ends or ()]


def _is_own_slice(producers: Producers, end: Use, site: Site) -> bool:
    """Whether a use is to cut out 1/n, and no two devices of a group of n cut out the same."""
    cut = end.instruction
    if end.escapes or cut.opcode != "dynamic-slice" or end.index != 0:
        return False
    given = end.computation.get(cut.operands[0].name)
    num_kept = _num_elements(cut) * site.collective.group_size
    if given is None or not num_kept or _num_elements(given) != num_kept:
        return False
    at = Place(computation=end.computation, operand=cut.operands[0], calls=end.calls)
    corner = [on_each_device(producers, offset) for offset in operand_places(cut, at)[1:]]
    known = [offset for offset in corner if offset is not None and offset.ndim == 1]
    if not known or len(known) < len(corner):
        return False
    where = np.stack(known, axis=1)
    return all(
        group.max() < len(where) and len(np.unique(where[group], axis=0)) == len(group)
        for group in map(np.asarray, site.collective.groups)
    )


def _asked_to_scatter(reading: Reading, site: Site) -> bool:
    """Whether the program wrote a reduce-scatter: the function that adds keeps its name."""
    applied = reading.module.computations.get(dict(site.instruction.called).get("to_apply", ""))
    parameters = applied.parameters.values() if applied is not None else ()
    return any("reduce_scatter" in f"{it.name} {it.op_name}" for it in parameters)


def _num_elements(found: Instruction) -> int:
    return math.prod(found.shape.dims) if isinstance(found.shape, Array) else 0


def repeated_collective(reading: Reading) -> Iterator[Finding]:
    """The same value communicated more than once in the same way.

    Not what a backward pass gathers again. Values are not followed into branches, which may not
    run, so that only what is twice in the same branch counts there.
    """
    producers, groups = Producers(reading), Groups()
    same: dict[tuple[object, ...], list[tuple[Site, int]]] = {}
    homes: dict[tuple[object, ...], str] = {}
    for site in reading.sites:
        kind = site.collective.kind
        if kind not in _REPEATABLE:
            continue
        how = "" if kind == "all-gather" else reducer(reading, site)
        if kind == "reduce-scatter":  # along another dimension it is another part
            how += site.instruction.attributes.get("dimensions", "")
        for number, operand in enumerate(site.instruction.operands):
            place = Place(computation=site.computation, operand=operand)
            end = producers.end(place, through=REARRANGED)
            if end is None or end.instruction is None or end.instruction.opcode in CONSTANTS:
                continue
            again = kind == "all-gather" and site.collective.phase in _AGAIN
            key = (kind, how, groups.number(site), again, *value_key(end))
            same.setdefault(key, []).append((site, number))
            homes[key] = home_of(end).name
    for value, found in same.items():
        if len(found) > 1:
            yield _repetition(reading, found, homes[value])


def _repetition(reading: Reading, found: list[tuple[Site, int]], home: str) -> Finding:
    site = found[0][0]
    times = reading.runs.counts.get(home)
    each = sorted(operand_bytes(site, number) for site, number in found)[:-1]
    exact = times.exact if times is not None else None
    verb = "gathered" if site.collective.kind == "all-gather" else "reduced"
    return finding(
        reading,
        "repeated-collective",
        f"the same value is {verb} {len(found)} times {axes_text(site)}",
        f"Communicate it once and use the result {len(found)} times: one "
        f"{_JAX[site.collective.kind]}, before both uses, in one layout and dtype.",
        [site.instruction for site, _ in found],
        wire_bytes=None if exact is None else exact * sum(each),
    )


_JAX = {
    "all-gather": "lax.all_gather",
    "all-reduce": "lax.psum",
    "reduce-scatter": "lax.psum_scatter",
}


def reduction_of_replicated(reading: Reading) -> Iterator[Finding]:
    """An all-reduce of what is the same on all devices of the group already."""
    producers, groups = Producers(reading), Groups()
    for site in reading.sites:
        if site.collective.kind != "all-reduce":
            continue
        evidence: list[Instruction] = []
        at_stake = 0
        for number, operand in enumerate(site.instruction.operands):
            place = Place(computation=site.computation, operand=operand)
            seen = _replicated_from(producers, groups, site, place)
            if seen is not None:
                evidence += seen
                at_stake += operand_bytes(site, number)
        if not at_stake:
            continue
        what = "the result of " + evidence[0].opcode if evidence else "a constant"
        yield finding(
            reading,
            "reduction-of-replicated",
            f"{site.instruction.name} reduces {axes_text(site)} what is the same on each of these "
            f"devices already, made from {what}"
            + (": the sum is that value times " if reducer(reading, site) == "add" else " of ")
            + str(site.collective.group_size),
            "Leave out the second lax.psum, or multiply by lax.axis_size(axis) if that is meant.",
            [site.instruction, *dict.fromkeys(evidence)],
            wire_bytes=step_bytes(site, wire_bytes=at_stake),
        )


def _replicated_from(
    producers: Producers, groups: Groups, site: Site, place: Place
) -> list[Instruction] | None:
    """The collectives that made a value the same on all devices of `site`; None if it is not."""
    seen: list[Instruction] = []

    def decide(end: Place) -> bool | None:
        made = producers.at(end)
        if made is not None:
            source, _ = made
            same = source.collective.kind in ("all-reduce", "all-gather")
            seen.append(source.instruction)
            return same and source is not site and groups.within(site, source)
        opcode = end.instruction.opcode if end.instruction is not None else ""
        if opcode in CONSTANTS:
            return True
        return None if opcode in PURE else False

    return seen if producers.made_from(place, decide) else None


def gather_of_scatter(reading: Reading) -> Iterator[Finding]:
    """An all-gather of what a reduce-scatter just made, with nothing in between."""
    producers, groups = Producers(reading), Groups()
    for site in reading.sites:
        operands = site.instruction.operands
        if site.collective.kind != "all-gather" or len(operands) != 1:
            continue
        made = producers.of(Place(computation=site.computation, operand=operands[0]))
        if made is None or made[0].collective.kind != "reduce-scatter":
            continue
        source, path = made
        ends = uses(reading, source.computation, source.instruction, path)
        alone = ends is not None and len(ends) == 1 and ends[0].instruction is site.instruction
        if alone and groups.number(site) == groups.number(source):
            yield finding(
                reading,
                "gather-of-scatter",
                f"{site.instruction.name} gathers {axes_text(site)} what "
                f"{source.instruction.name} just scattered: together they are one all-reduce",
                "Write one lax.psum, unless work on the shard is to come between them.",
                [site.instruction, source.instruction],
                severity="info",
            )


def _size(site: Site) -> str:
    return f"{site.collective.payload_bytes:,} bytes"


RULES = (
    all_reduce_then_slice,
    repeated_collective,
    reduction_of_replicated,
    gather_of_scatter,
)
