"""Rows of strategies: a few steps of training, held against the same steps on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxpar.audit import audit
from jaxpar.audit.asked import asked
from jaxpar.audit.compare import compare
from jaxpar.model.transformer import Params
from jaxpar.numerics import relative_error
from jaxpar.predict.volume import expected
from jaxpar.reference import one_device, plain_step, reference_init
from jaxpar.strategies.plan import Plan, plan_json
from jaxpar.text import Batch
from jaxpar.tour.row import Row, finite, short
from jaxpar.train import Metrics, TrainState, TrainStep

LOSS_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-4
"""Relative errors allowed in float32 against one device, after all steps of the tour."""


def default_optimizer() -> optax.GradientTransformation:
    """AdamW with Llama 2's settings (Touvron et al. 2023 §2.2), at a rate fit for a tiny model.

    The epsilon matters when runs are compared: Adam divides by the gradient's size, so where a
    gradient is nearly zero, a smaller one turns rounding into a whole step.
    """
    return optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Row):
    """Errors are relative to the one-device reference."""

    plan: Plan
    loss_error: float
    gradient_norm_error: float
    parameter_error: float

    @property
    def numbers_agree(self) -> bool:
        return (
            max(self.loss_error, self.gradient_norm_error) <= LOSS_TOLERANCE
            and self.parameter_error <= PARAMETER_TOLERANCE
        )

    def numbers(self) -> dict[str, Any]:
        return {
            "loss_error": finite(self.loss_error),
            "gradient_norm_error": finite(self.gradient_norm_error),
            "parameter_error": finite(self.parameter_error),
        }

    def told(self) -> list[str]:
        return [
            f"loss {short(self.loss_error)}",
            f"params {short(self.parameter_error)}",
            f"norm {short(self.gradient_norm_error)}",
        ]

    def plan_json(self) -> dict[str, Any]:
        return plan_json(self.plan)


class Trained(NamedTuple):
    """Losses and gradient norms of all steps, float32 [num_steps]; parameters after and before.

    The norms are there because Adam forgives a gradient that is wrong by a factor.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    params: Params
    start: Params


def train(
    state: TrainState,
    run: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    batches: Sequence[Batch],
) -> Trained:
    """Run one step per batch, whoever runs it."""
    losses, norms = [], []
    start = jax.tree.map(np.array, state.params)  # a copy: the first step reuses the memory
    for batch in batches:
        state, metrics = run(state, batch)
        losses.append(metrics.loss)
        norms.append(metrics.gradient_norm)
    return Trained(np.array(losses), np.array(norms), jax.device_get(state.params), start)


class References:
    """Trainings on one device, each run once: many plans are held against each."""

    def __init__(self) -> None:
        self._trained: dict[Any, Trained] = {}

    def __call__(self, step: TrainStep, batches: Sequence[Batch]) -> Trained:
        """Of the step's model and optimizer, dropping the tokens that its plan drops.

        batches: as many of one shape are the same ones in every call.
        """
        config, plan, optimizer = step.config, step.plan, step.optimizer
        places = plan.experts, plan.capacity_factor, plan.drop_policy
        shape = len(batches), *batches[0].tokens_BS.shape, plan.packed
        key = config, optimizer, shape, places if config.num_experts else None
        if key not in self._trained:
            run = jax.jit(plain_step(config, optimizer, parallel=one_device(plan)))
            self._trained[key] = train(reference_init(config, optimizer), run, batches)
        return self._trained[key]


def take_row(
    name: str, step: TrainStep, batches: Sequence[Batch], reference: Trained
) -> TrainingRow:
    """Run, audit and compare one step; nothing is compiled twice."""
    traced = step.jitted.trace(*step.abstract_inputs)
    compiled = traced.lower().compile()
    lines = compare(
        expected(step.config, step.plan),
        asked(traced.jaxpr),
        audit(compiled, mesh=step.plan.mesh.all_axes),
    )
    trained = train(
        step.init_from(reference.start),
        lambda state, batch: compiled(state, step.place(batch)),
        batches,
    )
    return TrainingRow(
        strategy=name,
        plan=step.plan,
        lines=lines,
        loss_error=relative_error(trained.losses, reference.losses),
        gradient_norm_error=relative_error(trained.gradient_norms, reference.gradient_norms),
        parameter_error=relative_error(step.in_layer_order(trained.params), reference.params),
    )
