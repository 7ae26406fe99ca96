"""Rules about where communication stands: beside what, and between which devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxpar.audit.collect import KINDS
from jaxpar.audit.cost import Cost
from jaxpar.audit.findings.common import axes_text, finding, step_bytes
from jaxpar.audit.findings.values import Groups, standing
from jaxpar.audit.groups import parse_groups, parse_pairs
from jaxpar.audit.links import Transfers
from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding
from jaxpar.hardware import chip

MIN_EXPOSED_BYTES = 1 << 20
"""Payload below which it does not pay to move an operation elsewhere in the schedule."""

MAX_EXAMINED = 4
"""Exposed collectives of one computation that are examined: the largest."""

_TYPICAL = {"gpu": "h100", "tpu": "v5p"}  # the chip of the text is not known
_GROUPS, _PAIRS = "replica_groups=", "source_target_pairs="


def exposed_with_independent_compute(reading: Reading) -> Iterator[Finding]:
    """A large collective beside which nothing runs, though work that would hide it is there.

    Times are those of a typical chip, and only decide whether the work would be enough.
    """
    name = _TYPICAL.get(reading.platform)
    if name is None or not reading.module.scheduled:
        return
    homes: dict[str, dict[str, Site]] = {}
    for site in reading.sites:
        exposed = site.collective.exposed_fraction == 1.0
        if exposed and site.collective.payload_bytes >= MIN_EXPOSED_BYTES:
            home, found = standing(site)
            homes.setdefault(home.name, {})[found.name] = site
    if not homes:
        return
    typical = chip(name)
    cost, transfers = Cost(reading.flow, typical), Transfers(typical)
    for home_name, sites in homes.items():
        home = reading.module.computations[home_name]
        largest = sorted(sites.items(), key=lambda it: -it[1].collective.payload_bytes)
        work = _Work(home, cost)
        for found_name, site in largest[:MAX_EXAMINED]:
            beside = work.enough_beside(found_name, transfers.seconds(site.collective))
            if not beside:
                continue
            longest = sorted(beside, key=lambda it: -work.seconds[it])[:3]
            yield finding(
                reading,
                "exposed-with-independent-compute",
                f"nothing runs while {found_name} sends {site.collective.payload_bytes:,} bytes "
                f"{axes_text(site)}, though {longest[0]} and other work in "
                "the same computation, long enough to hide it, neither needs it nor makes it",
                "Let the compiler overlap them: jax.jit(f, compiler_options={"
                + _OVERLAP[reading.platform]
                + "}); in the program, issue the collective before that work (software pipelining "
                "in lax.scan: gather the next layer while this one computes), and tie the order "
                "with lax.optimization_barrier.",
                [home.instructions[it] for it in (found_name, *longest)],
                severity="info",
                source=site.collective.source,
            )


_OVERLAP = {
    "gpu": '"xla_gpu_enable_latency_hiding_scheduler": True',
    "tpu": '"xla_tpu_enable_sparse_core_collective_offload_all_gather": True (or _reduce_scatter, '
    "_all_reduce)",
}


class _Work:
    """What one computation computes, and what of it does not depend on a given instruction.

    `seconds` are worked out as they are needed.
    """

    def __init__(self, home: Computation, cost: Cost) -> None:
        self.home = home
        self.cost = cost
        self.reads = {found.name: found.reads for found in home.instructions.values()}
        self.seconds: dict[str, float] = {}

    def enough_beside(self, name: str, seconds: float) -> list[str]:
        """Independent instructions that compute for as long as that together; [] if none do."""
        beside: list[str] = []
        total = 0.0
        for other in self._independent(name):
            if other not in self.seconds:
                self.seconds[other] = self.cost.seconds(self.home, self.home.instructions[other])
            if self.seconds[other] > 0:
                beside.append(other)
                total += self.seconds[other]
                if total >= seconds:
                    return beside
        return []

    def _independent(self, name: str) -> Iterator[str]:
        """What neither reads the result of `name`, nor makes what it reads.

        In the order of the schedule, which has every value made before it is read.
        """
        after, before = {name}, {name}
        for other, reads in self.reads.items():
            if not after.isdisjoint(reads):
                after.add(other)
        for other in reversed(self.reads):
            if other in before:
                before.update(self.reads[other])
        return (other for other in self.reads if other not in after and other not in before)


def crosses_slower_link(reading: Reading) -> Iterator[Finding]:
    """An axis that leaves the hosts though another with less traffic stays within them."""
    hosts, mesh = reading.devices_per_host, reading.mesh
    if hosts is None or mesh is None or hosts < 2:
        return
    traffic = _traffic(reading)
    inside = {name for name in mesh if mesh[name] > 1 and _stays_within(mesh, name, hosts)}
    for name, size in mesh.items():
        if size < 2 or name in inside or hosts % size:
            continue
        moved, sites = traffic.get(name, (0, []))
        rivals = [(traffic.get(other, (0, []))[0], other) for other in mesh if other in inside]
        known = [(less, other) for less, other in rivals if less is not None]
        if moved is None or not known or min(known)[0] >= moved:
            continue
        less, other = min(known)
        order = {axis: mesh[axis] for axis in (*(it for it in mesh if it != name), name)}
        largest = sorted(sites, key=lambda site: -(step_bytes(site) or 0))[:3]
        yield finding(
            reading,
            "crosses-slower-link",
            f"axis {name!r} crosses hosts of {hosts} devices with {moved:,} bytes per step from "
            f"each device, while axis {other!r} stays within a host with {less:,}",
            f"Put {name!r} last in the mesh: "
            + ",".join(f"{axis}={order[axis]}" for axis in order)
            + f", so that its {size} devices share a host.",
            [site.instruction for site in largest],
            wire_bytes=moved,
        )


def _traffic(reading: Reading) -> dict[str, tuple[int | None, list[Site]]]:
    """Bytes that a device sends per step along each axis alone, None for unknown; and by what."""
    traffic: dict[str, tuple[int | None, list[Site]]] = {}
    for site in reading.sites:
        if site.collective.axes is not None and len(site.collective.axes) == 1:
            (axis,) = site.collective.axes
            total, sites = traffic.get(axis, (0, []))
            more = step_bytes(site)
            known = total is not None and more is not None
            sites.append(site)
            traffic[axis] = ((total or 0) + (more or 0) if known else None, sites)
    return traffic


def _stays_within(mesh: Mapping[str, int], name: str, hosts: int) -> bool:
    """Whether all devices along an axis share a host, wherever they are along the others."""
    axis = list(mesh).index(name)
    stride = math.prod(list(mesh.values())[axis + 1 :])
    return hosts % (mesh[name] * stride) == 0


def size_one_groups(reading: Reading) -> Iterator[Finding]:
    """Operations that stay in the program and move nothing: groups of one device."""
    alone: dict[str, bool] = {}
    idle: list[Instruction] = []
    num_runs: int | None = 0
    for home, found in reading.module.find(_GROUPS, _PAIRS):
        count = reading.runs.counts.get(home.name)
        if count is None or count.high == 0:
            continue
        if found.opcode.removesuffix("-start") in KINDS and _is_alone(reading, found, alone):
            idle.append(found)
            known = num_runs is not None and count.exact is not None
            num_runs = (num_runs or 0) + (count.exact or 0) if known else None
    if idle:
        times = "an unknown number of" if num_runs is None else str(num_runs)
        yield finding(
            reading,
            "size-one-groups",
            f"{len(idle)} operation{'s' * (len(idle) > 1)} ({times} executions per step) "
            "communicate in groups of one device: they move nothing and stay in the program",
            "Leave the call out where the axis has one device: if lax.axis_size(axis) > 1.",
            idle,
            severity="info",
            wire_bytes=0,
        )


def _is_alone(reading: Reading, found: Instruction, known: dict[str, bool]) -> bool:
    """Whether no device gets anything from another; worked out once for the same text."""
    paired = found.opcode.startswith("collective-permute")
    text = found.attributes.get("source_target_pairs" if paired else "replica_groups", "")
    key = f"{paired}{text}"
    if key not in known:
        if paired:
            pairs = parse_pairs(text)
            known[key] = bool((pairs[:, 0] == pairs[:, 1]).all())
        else:
            groups = parse_groups(text, reading.num_devices)
            known[key] = all(len(group) == 1 for group in groups)
    return known[key]


def irregular_groups(reading: Reading) -> Iterator[Finding]:
    """Groups of devices that are no axis of the mesh; one finding for the same groups."""
    groups = Groups()
    alike: dict[int, list[Site]] = {}
    for site in reading.sites:
        if site.collective.axes is None and site.collective.kind != "collective-permute":
            alike.setdefault(groups.number(site), []).append(site)
    for sites in alike.values():
        found = sites[0].collective
        uneven = not isinstance(found.groups, np.ndarray)
        lengths = sorted({len(group) for group in found.groups})
        largest = f"; the groups of {lengths[-1]} make the others wait" if uneven else ""
        yield finding(
            reading,
            "irregular-groups",
            f"{len(sites)} operation{'s' * (len(sites) > 1)} communicate in groups that form no "
            f"axis of the mesh: {found.axes_note}{largest}",
            "Give axis_index_groups groups of one size, each device in one of them; better, split "
            "the axis of the mesh in two with names of their own, and name the one that is meant.",
            [site.instruction for site in sites],
            severity="warning" if uneven else "info",
        )


RULES = (
    exposed_with_independent_compute,
    crosses_slower_link,
    size_one_groups,
    irregular_groups,
)
