"""A module with what was worked out about it: what overlap, memory and findings look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import Execution
from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.result import Collective


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a collective stands: its computation, and the only caller of that where there is one.

    `caller` matters where the backend wrapped the operation (`async-start`, a fusion): then the
    place in the schedule is the caller's, in the computation `caller_home`.
    """

    collective: Collective
    computation: Computation
    instruction: Instruction
    caller: Instruction | None = None
    caller_home: Computation | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One module, read. Nothing here changes it; `sites` are in the order of the collectives."""

    module: Module
    flow: Dataflow
    runs: Execution
    sites: tuple[Site, ...]
    mesh: Mapping[str, int] | None
    num_devices: int | None
    platform: str
    devices_per_host: int | None = None
