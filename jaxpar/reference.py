"""The same training on one device, in plain JAX: what every strategy has to equal.

It shares the model's modules with the strategies and nothing else: no mesh, no shard_map, no
accumulation, the whole vocabulary's logits, jax.grad's gradients and optax's own clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.model.routing import drop_over_capacity
from jaxpar.model.transformer import Params, init_params
from jaxpar.strategies.plan import Plan
from jaxpar.text import Batch
from jaxpar.train import Metrics, run_once, token_loss
from jaxpar.update import TrainState, apply_gradients, balance_experts


def reference_init(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int = 0
) -> TrainState:
    """The state that TrainStep.init makes, whole, on one device."""
    params = run_once(partial(init_params, config, seed))
    return TrainState(params, optimizer.init(params))


def one_device(plan: Plan) -> Parallel:
    """What a plan changes about the mathematics, and so on one device too: who drops tokens."""
    if plan.experts == "dropless":
        return Parallel()
    return Parallel(
        drop=partial(drop_over_capacity, factor=plan.capacity_factor, policy=plan.drop_policy)
    )


def plain_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float = 1.0,
    compute_dtype: str = "float32",
    parallel: Parallel | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """One training step on a global batch that knows of no devices; jit it where you like.

    On one device it is the reference. With shardings on its arguments, and `parallel` to pin
    activations down, it is the program that XLA's partitioner splits by itself (GSPMD), which
    explicit steps are timed against.
    """
    parallel = parallel or Parallel()

    def mean_loss(params: Params, batch: Batch) -> tuple[jax.Array, Stats]:
        total, stats = token_loss(config, params, batch, parallel, jnp.dtype(compute_dtype))
        return total / count(batch).astype(jnp.float32), stats

    def count(batch: Batch) -> jax.Array:
        return jnp.sum(batch.mask_BS != 0, dtype=jnp.int32)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if config.dropout and batch.numbers_BS is None:
            raise PlanError(
                f"dropout={config.dropout}, and the batch's numbers_BS is missing. Corpus.batch "
                f"numbers tokens."
            )
        (loss, stats), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params, batch)
        norm = optax.tree.norm(gradients)
        clipped, _ = optax.clip_by_global_norm(clip_norm).update(gradients, optax.EmptyState())
        new_state = apply_gradients(state, clipped, optimizer)
        new_state = balance_experts(config, state, new_state, stats)
        return new_state, Metrics(loss, norm, count(batch), stats)

    return step
