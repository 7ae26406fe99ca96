"""A prefill, decode or training step compiled for hardware that is not here, and audited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import AbstractMesh

from jaxpar.audit import audit
from jaxpar.audit.asked import asked
from jaxpar.audit.result import Audit
from jaxpar.serve.plan import Kind
from jaxpar.serve.step import ServeStep
from jaxpar.targets.cache import Cache
from jaxpar.targets.changes import Changes, changes
from jaxpar.targets.compiler import Limits
from jaxpar.targets.on_target import compile_for, compile_traced, laid_out
from jaxpar.targets.target import Target
from jaxpar.train import TrainStep


class ServeStepOnTarget(ServeStep):
    """A ServeStep on devices that are only described: it can be traced and lowered, and not run."""

    @cached_property
    def mesh(self) -> AbstractMesh:  # type: ignore[override]
        return self.plan.mesh.abstract()


@dataclass(frozen=True, kw_only=True)
class There:
    """What the target's compiler made of a step: its audit, and how that differs from the asked."""

    audit: Audit
    changes: Changes

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


def serving_there(
    step: ServeStep, kind: Kind, target: Target, *, limits: Limits | None, cache: Cache | None
) -> There:
    """Of a prefill or decode step. Raises TargetError as `jaxpar.targets.compile_for` does."""
    placement, mesh = laid_out(step.plan.mesh, target)
    there = ServeStepOnTarget(config=step.config, plan=replace(step.plan, mesh=mesh))
    traced = there.jitted[kind].trace(*there.abstract_inputs(kind))
    compiled = compile_traced(traced, target, placement, limits=limits, cache=cache)
    found = audit(compiled.text, mesh=step.plan.mesh.all_axes, chip=target.hardware)
    return There(audit=found, changes=changes(asked(traced.jaxpr), found))


def training_there(
    step: TrainStep, target: Target, *, limits: Limits | None, cache: Cache | None
) -> There:
    """Of a training step."""
    found = compile_for(step, target, limits=limits, cache=cache)
    return There(audit=found.audit, changes=found.changes)
