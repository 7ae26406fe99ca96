"""A prefill or decode step compiled for hardware that is not here."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar.serve.closed_form import expected
from jaxpar.serve.plan import Kind
from jaxpar.serve.step import ServeStep
from jaxpar.targets.compiler import Progress, silent
from jaxpar.targets.on_target import OnTarget, compile_traced, laid_out
from jaxpar.targets.target import Target


class ServeStepOnTarget(ServeStep):
    """A ServeStep on devices that are only described: it can be traced and lowered, and not run."""

    @cached_property
    def mesh(self) -> AbstractMesh:  # type: ignore[override]
        return self.plan.mesh.abstract()


def compile_serving_for(
    step: ServeStep, kind: Kind, target: Target, *, progress: Progress = silent, **how: Any
) -> OnTarget:
    """What `jaxpar.targets.compile_for` is for a training step; `how` are its other options."""
    placement, mesh = laid_out(step.plan.mesh, target)
    there = ServeStepOnTarget(config=step.config, plan=replace(step.plan, mesh=mesh))
    progress("tracing", 0.0, 0)
    return compile_traced(
        there.jitted[kind].trace(*there.abstract_inputs(kind)),
        there.plan,
        expected(there.config, there.plan, kind),
        target,
        placement,
        progress=progress,
        **how,
    )
