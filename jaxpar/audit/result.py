"""What an audit says, as data: frozen records, and the JSON that scripts and CI read.

Bytes are bytes, counts are executions per step on each device, `None` is "not known".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = "jaxpar.audit/1"


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One of the buffers that an operation passes: wire dtype, bytes, and the phase that asked."""

    dtype: str
    payload_bytes: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One communicating operation of the compiled program, counted once however it is printed.

    `payload_bytes` is the full logical buffer of one execution as one group sees it (all-gather:
    its output, reduce-scatter: its input, others the local buffer), `wire_bytes` what each device
    sends for it in the best ring algorithm. `count` is None when only `count_min` and `count_max`
    are known (`count_max` None: no bound). `axes` is None when the devices are no whole axes;
    `axes_note` then says what they are. `dtype` goes over the wire, `program_dtype` is what the
    program asked for; several types are joined by "+". `buffers` are what was merged into it, each
    with its part of the payload; their number is `parts`.
    `exposed_fraction` is the part of its time during which the device computes nothing: 1.0 for a
    synchronous operation, None where the chip is not known that would tell how long anything takes.
    `num_overlapped` counts the instructions that run while it is under way; `overlapped` names the
    longest of them; `transfer_s` is its own time on the chip's links, in seconds.
    `device_counts` are the executions on each device where devices differ (then `count` is None
    and the bounds are those of all devices), else None. `groups` are the devices that exchange
    data, [groups, members] ([pairs, 2] of source and target for a permute), or one array per group
    where sizes differ; neither compared nor in the JSON.
    `name` and `line` say where in the HLO text it stands.
    """

    kind: str
    axes: tuple[str, ...] | None
    axes_note: str | None
    group_size: int
    num_groups: int
    dtype: str
    program_dtype: str
    count: int | None
    count_min: int
    count_max: int | None
    payload_bytes: int
    wire_bytes: int
    phase: str
    scope: str
    source: str | None
    is_async: bool
    exposed_fraction: float | None
    buffers: tuple[Buffer, ...]
    name: str = ""
    line: int = 0
    num_overlapped: int = 0
    overlapped: tuple[str, ...] = ()
    transfer_s: float | None = None
    device_counts: tuple[int, ...] | None = None
    groups: NDArray[np.int64] | tuple[NDArray[np.int64], ...] = field(
        default=(), compare=False, repr=False
    )

    @property
    def parts(self) -> int:
        return len(self.buffers)


@dataclass(frozen=True, kw_only=True)
class Total:
    """All collectives of one kind along the same axes: counts and bytes summed over the step.

    `count`, `payload_bytes`, `wire_bytes` are None as soon as one of the counts is not known.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int | None
    count_min: int
    count_max: int | None
    payload_bytes: int | None
    wire_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class AxesExposure:
    """All collectives along the same axes, over a step. Without a chip, transfer_s is None."""

    axes: tuple[str, ...] | None
    exposed_fraction: float | None
    transfer_s: float | None


@dataclass(frozen=True, kw_only=True)
class LiveBuffer:
    """A value that is in memory when the schedule needs the most; `shape` as HLO prints it."""

    name: str
    nbytes: int
    shape: str
    source: str | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device, in bytes.

    The first four are XLA's own analysis of a Compiled (of a text, arguments and outputs are those
    of its entry, the others None; peak is None where JAX does not tell). `live_bytes` is the most
    that the schedule keeps alive at once by our count, `largest` the biggest of those buffers; None
    and empty for a text without a schedule.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int | None
    peak_bytes: int | None
    live_bytes: int | None = None
    largest: tuple[LiveBuffer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something a reader should know. severity: info, warning, or error (the audit is incomplete).

    `source` is `file:line` or None; `remedy` says what to do. `evidence` names the instructions
    that were seen, each with its line in the text; `wire_bytes` is what is at stake: what each
    device would not have to send per step. None where that is not known, or not the point.
    """

    rule: str
    severity: str
    message: str
    source: str | None
    remedy: str
    evidence: tuple[str, ...] = ()
    wire_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that was read. `complete` False: numbers may be too small, findings say why."""

    name: str
    platform: str
    num_devices: int | None
    scheduled: bool
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a compiled program communicates. `mesh` is None when nobody gave one."""

    program: Program
    mesh: Mapping[str, int] | None
    collectives: tuple[Collective, ...]
    memory: Memory | None
    findings: tuple[Finding, ...]
    exposure: tuple[AxesExposure, ...] = ()

    @property
    def totals(self) -> tuple[Total, ...]:
        """Sums over a step by kind and axes, in order of first appearance."""
        sorted_in: dict[tuple[str, tuple[str, ...] | None], list[Collective]] = {}
        for found in self.collectives:
            sorted_in.setdefault((found.kind, found.axes), []).append(found)
        return tuple(_total(kind, axes, found) for (kind, axes), found in sorted_in.items())

    def to_json(self) -> dict[str, Any]:
        """The audit as plain data in the schema `jaxpar.audit/1`, ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "program": dataclasses.asdict(self.program),
            "mesh": None if self.mesh is None else dict(self.mesh),
            "collectives": [_collective_json(found) for found in self.collectives],
            "totals": [_listed(dataclasses.asdict(total)) for total in self.totals],
            "exposure": [_listed(dataclasses.asdict(row)) for row in self.exposure],
            "memory": None if self.memory is None else _listed(dataclasses.asdict(self.memory)),
            "findings": [_listed(dataclasses.asdict(finding)) for finding in self.findings],
        }


def _total(kind: str, axes: tuple[str, ...] | None, group: list[Collective]) -> Total:
    counts = [found.count for found in group]
    known = [count for count in counts if count is not None]
    bounds = [found.count_max for found in group if found.count_max is not None]
    exact = len(known) == len(group)
    weighted = list(zip(known, group, strict=True)) if exact else []
    return Total(
        kind=kind,
        axes=axes,
        count=sum(known) if exact else None,
        count_min=sum(found.count_min for found in group),
        count_max=sum(bounds) if len(bounds) == len(group) else None,
        payload_bytes=sum(n * found.payload_bytes for n, found in weighted) if exact else None,
        wire_bytes=sum(n * found.wire_bytes for n, found in weighted) if exact else None,
    )


def _collective_json(found: Collective) -> dict[str, Any]:
    fields = _listed(dataclasses.asdict(dataclasses.replace(found, groups=())))
    del fields["buffers"], fields["groups"]
    renamed = {"async" if key == "is_async" else key: value for key, value in fields.items()}
    return {**renamed, "parts": found.parts}


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, so that the data equals what a JSON reader gets back."""
    return {key: list(it) if isinstance(it, tuple) else it for key, it in fields.items()}
