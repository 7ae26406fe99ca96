"""A step compiled for hardware that is not here, and what its compiler made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar import compat
from jaxpar.audit import audit
from jaxpar.audit.asked import Asked, asked
from jaxpar.audit.result import Audit, Collective, Memory
from jaxpar.mesh import MeshSpec
from jaxpar.predict.volume import expected
from jaxpar.strategies.plan import OnMesh
from jaxpar.strategies.strategy import Expected
from jaxpar.targets.cache import Cache
from jaxpar.targets.changes import Changes, changes
from jaxpar.targets.compiler import (
    Compiled,
    Limits,
    Options,
    Progress,
    compile_module,
    require_compiler,
    silent,
)
from jaxpar.targets.placement import Placement, place
from jaxpar.targets.target import Target
from jaxpar.train import TrainStep

_LOWERED_FOR = {"tpu": "tpu", "gpu": "cuda"}


class StepOnTarget(TrainStep):
    """A step on devices that are only described: it can be traced and lowered, and not run.

    Made like a TrainStep; it starts no device, so that a mesh of thousands costs nothing.
    """

    @cached_property
    def mesh(self) -> AbstractMesh:  # type: ignore[override]
        return self.plan.mesh.abstract()


@dataclass(frozen=True, kw_only=True)
class OnTarget:
    """What a compiler made of a step of `plan`.

    expected, asked: the closed form and the jaxpr's own count. audit: of the compiled program, with
    times on the target's chip. changes: how the compiled differs from the asked.
    """

    plan: OnMesh
    target: Target
    placement: Placement
    compiled: Compiled
    expected: tuple[Expected, ...]
    asked: tuple[Asked, ...]
    audit: Audit

    @cached_property
    def changes(self) -> Changes:
        return changes(self.asked, self.audit)

    def links(self, collective: Collective) -> str:
        """Which links one of audit.collectives uses, see `Where.links`."""
        return self.compiled.where.links(collective)

    @property
    def exposed_part(self) -> float | None:
        """Of the time that collectives take on the target's links, how much of it the device
        computes nothing; None where the audit cannot tell."""
        total = exposed = 0.0
        for row in self.audit.exposure:
            if row.transfer_s is None or row.exposed_fraction is None:
                return None
            total += row.transfer_s
            exposed += row.transfer_s * row.exposed_fraction
        return exposed / total if total else None

    @property
    def available_bytes(self) -> int:
        """Memory of one device."""
        return self.target.hardware.hbm_bytes // self.target.devices_per_chip

    @property
    def fits(self) -> bool:
        return self.compiled.device_bytes <= self.available_bytes


def laid_out(mesh: MeshSpec, target: Target) -> tuple[Placement, MeshSpec]:
    """Where a mesh lies on a target, and the mesh as one of the target's devices.

    Raises TargetError where it does not fit, and where the target's compiler is not installed.
    """
    require_compiler(target)
    placement = place(mesh.named_axes, target.dims, str(target))
    return placement, replace(mesh, platform=target.platform, target=target.told.strip("'"))


def compile_traced(
    traced: Any,
    plan: OnMesh,
    closed_form: Iterable[Expected],
    target: Target,
    placement: Placement,
    *,
    progress: Progress,
    **how: Any,
) -> OnTarget:
    """What the target's compiler makes of a step that was traced; `how` is `compile_module`'s."""
    lowered = traced.lower(lowering_platforms=(_LOWERED_FOR[target.platform],))
    compiled = compile_module(
        compat.portable_module(lowered),
        fingerprint=compat.fingerprint(lowered),
        target=target,
        placement=placement,
        progress=progress,
        **how,
    )
    progress("auditing", compiled.seconds, 0)
    found = audit(compiled.text, mesh=plan.mesh.all_axes, chip=target.hardware)
    return OnTarget(
        plan=plan,
        target=target,
        placement=placement,
        compiled=compiled,
        expected=tuple(closed_form),
        asked=tuple(asked(traced.jaxpr)),
        audit=replace(found, memory=_memory(found.memory, compiled)),
    )


def compile_for(
    step: TrainStep,
    target: Target | str,
    *,
    options: Options | None = None,
    limits: Limits | None = None,
    cache: Cache | None = None,
    progress: Progress = silent,
) -> OnTarget:
    """Compile a step for a target ("v5e:2x4", "h100:1x8") and audit it. Nothing runs.

    options: XLA's, by name, such as {"xla_tpu_enable_latency_hiding_scheduler": True}. cache: where
    compiled programs are kept; None keeps none. Raises TargetError for a mesh that does not fit the
    target, and see `compile_module`.
    """
    if isinstance(target, str):
        target = Target.parse(target)
    placement, mesh = laid_out(step.plan.mesh, target)
    step = StepOnTarget(
        config=step.config,
        plan=replace(step.plan, mesh=mesh),
        optimizer=step.optimizer,
        clip_norm=step.clip_norm,
    )
    progress("tracing", 0.0, 0)
    return compile_traced(
        step.jitted.trace(*step.abstract_inputs),
        step.plan,
        expected(step.config, step.plan),
        target,
        placement,
        options=options,
        limits=limits,
        cache=cache,
        progress=progress,
    )


def _memory(memory: Memory | None, compiled: Compiled) -> Memory:
    """XLA's own account, with the largest buffers that the schedule keeps alive."""
    told = compiled.memory
    known = memory or Memory(argument_bytes=0, output_bytes=0, temp_bytes=None, peak_bytes=None)
    return replace(
        known,
        argument_bytes=told["argument_bytes"] or 0,
        output_bytes=told["output_bytes"] or 0,
        temp_bytes=told["temp_bytes"],
        peak_bytes=told["peak_bytes"],
    )
