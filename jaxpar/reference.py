"""The same training on one device, in plain JAX: what every strategy has to equal.

It shares the model's modules with the strategies and nothing else: no mesh, no shard_map, no
accumulation, the whole vocabulary's logits, jax.grad's gradients and optax's own clipping.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params, init_params
from jaxpar.text import Batch
from jaxpar.train import Metrics, TrainState, apply_gradients, token_loss


def reference_init(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int = 0
) -> TrainState:
    """The state that TrainStep.init makes, whole, on one device."""
    params = jax.jit(partial(init_params, config, seed))()
    return TrainState(params, optimizer.init(params))


def reference_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float = 1.0,
    compute_dtype: str = "float32",
) -> Any:
    """A jitted (state, batch) -> (state, Metrics) on one device, for the same global batch."""

    def mean_loss(params: Params, batch: Batch) -> jax.Array:
        total = token_loss(config, params, batch, Parallel(), jnp.dtype(compute_dtype))
        return total / batch.mask_BS.sum().astype(jnp.float32)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, gradients = jax.value_and_grad(mean_loss)(state.params, batch)
        norm = optax.tree.norm(gradients)
        clipped, _ = optax.clip_by_global_norm(clip_norm).update(gradients, optax.EmptyState())
        metrics = Metrics(loss, norm, batch.mask_BS.sum().astype(jnp.int32))
        return apply_gradients(state, clipped, optimizer), metrics

    return jax.jit(step)
