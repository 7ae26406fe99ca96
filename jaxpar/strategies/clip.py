"""Clipping by the global norm, which counts every parameter once whatever its sharding.

What is split    nothing new: each device squares and sums the gradient shards it holds.
Why              an optimizer's own clipping sees the local shards only, so each device would scale
                 its gradients differently.
What it costs    one 4-byte all-reduce for each set of axes that some parameter is split over.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", §3.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.collectives import all_reduce
from jaxpar.model.config import ModelConfig
from jaxpar.model.transformer import Params
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy

CARD = Card(
    name="clip",
    axis="every axis a parameter is split over",
    splits="nothing: it sums squares of the shards there are",
    why="one scale for all gradients, the same on every device",
    costs="one 4-byte all-reduce per set of axes in the PartitionSpecs",
    source="Pascanu et al. 2013, §3.2",
)

# --- communication ---------------------------------------------------------------------------


def global_norm(gradients: Params, split_axes: Params) -> Array:
    """2-norm of all gradients as one vector, float32 scalar, the same on every device."""
    sums: dict[tuple[str, ...], Array] = {}
    for path, gradient in jax.tree.leaves_with_path(gradients):
        axes = split_axes
        for key in path:
            axes = axes[key.key]
        square = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
        sums[tuple(axes)] = sums[tuple(axes)] + square if tuple(axes) in sums else square
    with jax.named_scope("update"):
        return jnp.sqrt(
            sum(all_reduce(sums[axes], axes, scope="global_norm") for axes in sorted(sums))
        )


def clip(gradients: Params, norm: Array, max_norm: float) -> Params:
    """Gradients scaled so that their global norm is at most `max_norm`; infinity never clips.

    A norm that is not finite leaves them alone, so that it stays visible which of them are not.
    """
    scale = jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, max_norm / norm), 1.0)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    return [
        Expected(
            kind="all-reduce",
            axes=axes,
            count=1,
            payload_bytes=4,
            dtype="f32",
            phase="update",
            why="global gradient norm",
        )
        for axes in sorted({p.split_axes for p in layout if not plan.is_frozen(p.parameter.path)})
        if axes
    ]


STRATEGY = Strategy(
    card=CARD,
    axes=(),
    is_active=lambda plan: True,
    is_partial=lambda parameter: False,
    expected=expected,
)
