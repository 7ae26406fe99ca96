"""The tour: every strategy trained, held against one device, audited, held against its closed form.

This computes; `jaxpar.report` prints. The rows are whatever the strategies say they are (see
`Variant` in strategies/strategy.py), so a new strategy file appears here by being written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxpar import recipes
from jaxpar.audit import audit
from jaxpar.audit.asked import asked
from jaxpar.audit.compare import Line, agree, compare
from jaxpar.errors import PlanError, did_you_mean
from jaxpar.mesh import use_cpu_devices
from jaxpar.model.config import ModelConfig, preset
from jaxpar.model.transformer import Params
from jaxpar.numerics import relative_error
from jaxpar.predict.volume import expected
from jaxpar.reference import one_device, plain_step, reference_init
from jaxpar.strategies import compose
from jaxpar.strategies.plan import Plan, plan_json
from jaxpar.strategies.strategy import Variant
from jaxpar.text import Batch, Corpus
from jaxpar.train import Metrics, TrainState, TrainStep

LOSS_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-4
"""Relative errors allowed in float32 against one device, after all steps of the tour."""

SCHEMA = "jaxpar.tour/1"


def default_optimizer() -> optax.GradientTransformation:
    """AdamW with Llama 2's settings (Touvron et al. 2023 §2.2), at a rate fit for a tiny model.

    The epsilon matters when runs are compared: Adam divides by the gradient's size, so where a
    gradient is nearly zero, a smaller one turns rounding into a whole step.
    """
    return optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on one mesh. Errors are relative to the one-device reference."""

    strategy: str
    plan: Plan
    lines: list[Line]
    loss_error: float
    gradient_norm_error: float
    parameter_error: float

    @property
    def numbers_agree(self) -> bool:
        return (
            max(self.loss_error, self.gradient_norm_error) <= LOSS_TOLERANCE
            and self.parameter_error <= PARAMETER_TOLERANCE
        )

    @property
    def agrees(self) -> bool:
        return self.numbers_agree and agree(self.lines)

    def to_json(self) -> dict[str, Any]:
        plan = plan_json(self.plan)
        mesh = plan.pop("mesh")
        return {
            "strategy": self.strategy,
            "plan": plan,
            "mesh": mesh,
            "agrees": self.agrees,
            "loss_error": _finite(self.loss_error),
            "gradient_norm_error": _finite(self.gradient_norm_error),
            "parameter_error": _finite(self.parameter_error),
            "comparison": [line.to_json() for line in self.lines],
        }


def _finite(error: float) -> float | None:
    """JSON has no infinity; null is an error beyond measure."""
    return error if math.isfinite(error) else None


@dataclass(frozen=True, kw_only=True)
class Tour:
    """All rows, and what they were run on."""

    seconds: float
    model: str
    corpus: str
    num_steps: int
    rows: list[Row]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "seconds": self.seconds,
            "model": self.model,
            "corpus": self.corpus,
            "num_steps": self.num_steps,
            "jax": jax.__version__,
            "rows": [row.to_json() for row in self.rows],
        }


def take_tour(
    *,
    corpus: Corpus | None = None,
    config: ModelConfig | None = None,
    only: Sequence[str] = (),
    num_steps: int = 5,
    batch_size: int = 16,
    seq_len: int = 64,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Tour:
    """Run every variant of every strategy (or those named in `only`) on CPU devices.

    `config` is the model of all rows but those that name their own, `tiny` unless given.
    `progress(name, done, total)` is called before each row and once at the end. Raises PlanError
    for a name that no strategy has, MeshError when JAX is already running with too few devices.
    """
    started = time.perf_counter()
    config, corpus = config or preset("tiny"), corpus or Corpus.standard_library()
    variants = chosen(only)
    models = [preset(v.model) if v.model else config for v in variants]
    plans = [v.plan(batch_size=batch_size, seq_len=seq_len) for v in variants]
    use_cpu_devices(max(plan.mesh.num_devices for plan in plans))

    batches = [
        corpus.batch(step, batch_size=batch_size, seq_len=seq_len) for step in range(num_steps)
    ]
    optimizer = default_optimizer()
    references: dict[Any, Trained] = {}

    def reference(config: ModelConfig, plan: Plan) -> Trained:
        """Of this model on one device, which drops the tokens that the plan drops."""
        places = plan.experts, plan.capacity_factor, plan.drop_policy
        key = config, places if config.num_experts else None
        if key not in references:
            run = jax.jit(plain_step(config, optimizer, parallel=one_device(plan)))
            references[key] = train(reference_init(config, optimizer), run, batches)
        return references[key]

    progress("one device", 0, len(variants) + 1)
    rows = []
    for i, (variant, model, plan) in enumerate(zip(variants, models, plans, strict=True)):
        want = reference(model, plan)
        progress(variant.name, i + 1, len(variants) + 1)
        step = TrainStep(config=model, plan=plan, optimizer=optimizer)
        rows.append(take_row(variant.name, step, batches, want))
    progress("done", len(variants) + 1, len(variants) + 1)
    return Tour(
        seconds=time.perf_counter() - started,
        model=" and ".join(dict.fromkeys(model.name for model in models)),
        corpus=corpus.name,
        num_steps=num_steps,
        rows=rows,
    )


class Trained(NamedTuple):
    """Losses and gradient norms of all steps, float32 [num_steps]; parameters after and before.

    The norms are there because Adam forgives a gradient that is wrong by a factor.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    params: Params
    start: Params


def take_row(name: str, step: TrainStep, batches: Sequence[Batch], reference: Trained) -> Row:
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
    return Row(
        strategy=name,
        plan=step.plan,
        lines=lines,
        loss_error=relative_error(trained.losses, reference.losses),
        gradient_norm_error=relative_error(trained.gradient_norms, reference.gradient_norms),
        parameter_error=relative_error(step.in_layer_order(trained.params), reference.params),
    )


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


def chosen(only: Sequence[str]) -> list[Variant]:
    """Rows of these names, or all. PlanError for a name that no strategy has."""
    of_strategies = (v for s in compose.all_strategies().values() for v in s.variants)
    every = {v.name: v for v in (*of_strategies, *recipes.VARIANTS)}
    for name in only:
        if name not in every:
            raise PlanError(f"The tour has no row {name!r}. {did_you_mean(name, every)}")
    return [v for v in every.values() if not only or v.name in only]
