"""Proof that replicas share nothing: no collective of any of their programs joins two of them.

It is read off compiled programs, device by device. A program says which devices it runs on and, for
each collective, which of these exchange data; a replica is a set of devices. Replicas are
independent if every group of every collective lies within one set, and every device of a program
belongs to a replica. What is not known is no proof: an incomplete audit, or a collective whose
groups cannot be told, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.audit.result import Audit, Collective
from jaxpar.errors import IndependenceError


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A collective of one program that joins devices of several replicas."""

    program: str
    collective: Collective
    replicas: tuple[int, ...]

    def __str__(self) -> str:
        found = self.collective
        return (
            f"{self.program}: {found.kind} {found.name} (line {found.line}) joins replicas "
            f"{', '.join(map(str, self.replicas))}"
        )


@dataclass(frozen=True, kw_only=True)
class Independence:
    """What was looked at, and every crossing that was found."""

    num_programs: int
    num_collectives: int
    crossings: tuple[Crossing, ...]

    @property
    def holds(self) -> bool:
        return not self.crossings


def replicas_along(sizes: Mapping[str, int], axis: str) -> tuple[int, ...]:
    """The replica of each device of one program, by its place along `axis` of the program's mesh.

    sizes: axis -> size in the mesh's order, such as `plan.mesh.all_axes`.
    """
    grid = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    place = np.indices(grid.shape)[list(sizes).index(axis)]
    return tuple(int(number) for number in place.reshape(-1))


def crossings(name: str, audit: Audit, replica_of: Sequence[int]) -> list[Crossing]:
    """Collectives of one program that join replicas. replica_of: of the program's i-th device.

    Raises IndependenceError where the audit does not know enough to tell.
    """
    if not audit.program.complete:
        raise IndependenceError(
            f"{name}: the program was not read to its end, so nothing is proven. Its findings say "
            f"what is missing: {'; '.join(found.message for found in audit.findings) or 'nothing'}."
        )
    num_devices = audit.program.num_devices
    if num_devices is not None and num_devices != len(replica_of):
        raise IndependenceError(
            f"{name}: the program runs on {num_devices} devices, and replicas are given for "
            f"{len(replica_of)}. Give the replica of each of its devices, in its order."
        )
    numbers = np.asarray(replica_of, np.int64)
    found_all = []
    for found in audit.collectives:
        groups = [np.asarray(group, np.int64) for group in found.groups]
        if not groups:
            raise IndependenceError(
                f"{name}: which devices {found.kind} {found.name} (line {found.line}) joins is not "
                f"known, so nothing is proven. Audit the compiled program of this process."
            )
        joined: set[int] = set()
        for group in groups:
            members = {int(number) for number in numbers[group]}
            if len(members) > 1:
                joined |= members
        if joined:
            crossing = Crossing(program=name, collective=found, replicas=tuple(sorted(joined)))
            found_all.append(crossing)
    return found_all


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program: its audit, and its devices in the order in which its groups count."""

    name: str
    audit: Audit
    devices: tuple[Any, ...]


def prove(programs: Iterable[Compiled], replicas: Sequence[Iterable[Any]]) -> Independence:
    """Whether these programs, all there are, keep to one replica each or join none.

    replicas: the devices of each. Raises IndependenceError for replicas that share a device, for a
    program on a device of none, and for what an audit does not know.
    """
    owner: dict[Any, int] = {}
    for number, devices in enumerate(replicas):
        for device in devices:
            if device in owner:
                raise IndependenceError(
                    f"{device} belongs to replicas {owner[device]} and {number}; independent ones "
                    f"share no device."
                )
            owner[device] = number
    looked = list(programs)
    found: list[Crossing] = []
    num_collectives = 0
    for program in looked:
        for device in program.devices:
            if device not in owner:
                raise IndependenceError(
                    f"{program.name} runs on {device}, which belongs to no replica."
                )
        replica_of = [owner[device] for device in program.devices]
        found += crossings(program.name, program.audit, replica_of)
        num_collectives += len(program.audit.collectives)
    return Independence(
        num_programs=len(looked), num_collectives=num_collectives, crossings=tuple(found)
    )
