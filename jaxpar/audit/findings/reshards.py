"""Rules about data that goes from one layout to another by a detour."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxpar.audit.dataflow import Place
from jaxpar.audit.findings.common import Use, axes_text, finding, step_bytes, uses
from jaxpar.audit.findings.gathered import MIN_BYTES, Gather
from jaxpar.audit.findings.values import (
    REARRANGED,
    Groups,
    Producers,
    operand_bytes,
    operand_places,
    standing,
)
from jaxpar.audit.reader import Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding
from jaxpar.audit.shape import nbytes

_PIECES = REARRANGED | {"slice", "concatenate"}
_RESHARDS = frozenset({"all-to-all", "collective-permute"})
_DEVICE_IDS = frozenset({"partition-id", "replica-id"})


def gathered_then_sliced(reading: Reading, found: list[Gather]) -> Iterator[Finding]:
    """An all-gather, or several in a row, of which each device uses only a piece by its number."""
    producers = Producers(reading)
    chains: dict[tuple[str, ...], list[tuple[Site, list[Instruction], int]]] = {}
    for gather in found:
        site = gather.site
        group_size = site.collective.group_size
        if gather.ends and all(_is_piece(producers, end, group_size) for end in gather.ends):
            cuts = [end.instruction for end in gather.ends]
            kept = sum(nbytes(cut.shape) for cut in cuts) / gather.array.nbytes
            saved = round(operand_bytes(site, gather.number) * max(0.0, 1 - kept))
            key = tuple(sorted(cut.name for cut in cuts))
            chains.setdefault(key, []).append((site, cuts, saved))
    for chain in chains.values():
        yield _gather_chain(reading, chain)


def _gather_chain(reading: Reading, chain: list[tuple[Site, list[Instruction], int]]) -> Finding:
    steps = [step_bytes(site, wire_bytes=saved) for site, _, saved in chain]
    known = [step for step in steps if step is not None]
    sites, cuts = [site for site, _, _ in chain], chain[0][1]
    num_gathered = math.prod(site.collective.group_size for site in sites)
    message = (
        f"{' and '.join(site.instruction.name for site in sites)} "
        f"gather{'s' * (len(sites) == 1)} {axes_text(sites[0])}, and each device keeps only the "
        f"piece that {cuts[0].name} cuts out by its own number: this is a resharding"
    )
    if num_gathered == reading.num_devices:
        message += " by way of the whole array on every device (XLA's last resort, which it calls "
        message += "involuntary full rematerialization)"
    return finding(
        reading,
        "resharding-chain",
        message,
        "Name the sharding that is wanted in one step that XLA can do piecewise: "
        "lax.all_to_all(x, axis, split_axis, concat_axis, tiled=True) (or lax.ppermute) in "
        "shard_map; under jit a with_sharding_constraint in between that differs from either side "
        "in one axis only.",
        [*(site.instruction for site in sites), *cuts],
        wire_bytes=sum(known) if len(known) == len(steps) else None,
    )


def _is_piece(producers: Producers, end: Use, group_size: int) -> bool:
    """Whether a use takes at most 1/`group_size` of the value, by the number of the device."""
    cut = end.instruction
    if end.escapes or cut.opcode != "dynamic-slice" or end.index != 0:
        return False
    given = end.computation.get(cut.operands[0].name)
    if given is None or nbytes(cut.shape) * group_size > nbytes(given.shape):
        return False
    at = Place(computation=end.computation, operand=cut.operands[0], calls=end.calls)
    asked: set[str] = set()

    def note(end: Place) -> bool | None:
        made = end.instruction
        asked.add(made.opcode if made is not None else "")
        return None if made is not None and made.operands else True

    for offset in operand_places(cut, at)[1:]:
        producers.made_from(offset, note)
    return not asked.isdisjoint(_DEVICE_IDS)


def resharded_twice(reading: Reading) -> Iterator[Finding]:
    """Two all-to-alls, or one and a permute, with nothing but rearrangement in between."""
    producers, groups = Producers(reading), Groups()
    for site in reading.sites:
        if site.collective.kind not in _RESHARDS or site.collective.payload_bytes < MIN_BYTES:
            continue
        source = _moved_from(producers, site)
        if source is None or site.collective.kind == source.collective.kind != "all-to-all":
            continue
        if not _only_for(reading, source, site):
            continue
        again = groups.number(site) == groups.number(source)
        first, second = source.collective, site.collective
        together = 1 if again else first.group_size
        once = second.payload_bytes * (1 - 1 / (second.group_size * together))
        spared = max(0, round(first.wire_bytes + second.wire_bytes - once))
        yield finding(
            reading,
            "resharding-chain",
            f"{source.instruction.name} {axes_text(source)} and {site.instruction.name} "
            f"{axes_text(site)} follow one another with nothing but rearrangement in between"
            + (": they move the same data there and back" if again else ""),
            "Go from the first layout to the last in one step: one lax.all_to_all in shard_map "
            "(over both axes, where they differ); under jit, drop the with_sharding_constraint in "
            "between, or keep the order of the mesh axes in both PartitionSpecs.",
            [source.instruction, site.instruction],
            severity="warning" if again else "info",
            wire_bytes=step_bytes(site, wire_bytes=spared),
        )


def _moved_from(producers: Producers, site: Site) -> Site | None:
    """The one all-to-all or permute whose results are all that a collective moves on."""
    sources: dict[int, Site] = {}

    def decide(end: Place) -> bool | None:
        made = producers.at(end)
        if made is not None:
            sources[id(made[0])] = made[0]
            return made[0].collective.kind in _RESHARDS and len(sources) == 1
        return None if end.instruction is not None and end.instruction.opcode in _PIECES else False

    if not site.instruction.operands:
        return None
    place = Place(computation=site.computation, operand=site.instruction.operands[0])
    if not producers.made_from(place, decide):
        return None
    return next(iter(sources.values()), None)


def _only_for(reading: Reading, source: Site, site: Site) -> bool:
    """Whether the results of `source` are used by `site` alone."""
    start = (reading, source.computation, source.instruction)
    ends = uses(*start, through=REARRANGED, passes=lambda use: use.instruction.opcode in _PIECES)
    used_by = (site.instruction, standing(site)[1])
    return bool(ends) and all(end.instruction in used_by for end in ends or ())


RULES = (resharded_twice,)
