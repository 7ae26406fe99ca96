"""Data parallelism: every device holds the whole model and a part of the batch.

What is split    the batch, over `slice` and `data`.
Why              more sequences per second with no change to the model's code.
What it costs    one all-reduce of every gradient per step, however many micro-batches it holds,
                 and a full copy of parameters and optimizer state on every device.

| collective | axes          | phase    | count per step   | payload_bytes            |
|------------|---------------|----------|------------------|--------------------------|
| all-reduce | data (± more) | backward | 1 per parameter  | its local bytes          |
|            |               |          | or mL, overlapped | of one layer            |
| all-reduce | data (± more) | forward  | 2                | 4: token count, and loss |

The reduction here serves every other strategy too: a gradient is summed over the axes along which
devices saw different tokens (or different heads) and which the parameter's PartitionSpec does not
name. Nothing else in the project reduces a gradient after the backward pass.

Source: Li et al. 2020, "PyTorch Distributed", §3; gradient accumulation, §3.2.4.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.collectives import all_reduce, vary
from jaxpar.errors import PlanError, did_you_mean
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Stats
from jaxpar.model.transformer import Params
from jaxpar.strategies import shards
from jaxpar.strategies.plan import DTYPE_BYTES, DTYPES, LOSS_AXES, TOKEN_AXES, Plan
from jaxpar.strategies.shards import Weight, is_param, path_of, used
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="data",
    axis="data",
    splits="the batch; parameters, gradients and optimizer state are whole on every device",
    why="more sequences per second without touching the model",
    costs="one all-reduce of all gradients per step: 2(n-1)/n of their bytes on the wire",
    source="Li et al. 2020, §3",
)

# --- communication ---------------------------------------------------------------------------


def count_tokens(mask_BS: Array) -> Array:
    """Valid tokens of the whole step, int32: the one number the loss is divided by."""
    with jax.named_scope("forward"):
        local_count = jnp.sum(mask_BS != 0, dtype=jnp.int32)
        return all_reduce(local_count, TOKEN_AXES, scope="count_tokens")


def sum_loss(local_loss: Array) -> Array:
    """The step's loss from each device's share of it, float32 scalars."""
    with jax.named_scope("forward"):
        return all_reduce(local_loss, LOSS_AXES, scope="sum_loss")


def sum_stats(stats: Stats) -> Stats:
    """What the layers counted, over all tokens of the step."""
    with jax.named_scope("forward"):
        return {
            name: all_reduce(local, LOSS_AXES, scope=f"sum_stats/{name}")
            for name, local in sorted(stats.items())
        }


def reduce_inside(state: nnx.State, weights: dict[str, Weight]) -> nnx.State:
    """A layer's weights as they are; their gradients are reduced as soon as they are there."""
    params = jax.tree.leaves(state, is_leaf=is_param)
    return used(state, weights) if weights[path_of(params[0])].is_stacked else state


def start_gradients(params: Params, reduced_axes: Params) -> Params:
    """Mark each parameter as varying over the axes its gradient will be reduced over.

    Without it JAX would reduce inside the backward pass, once per use and per micro-batch.
    """
    return jax.tree.map(vary, params, reduced_axes)


def reduce_gradients(gradients: Params, reduced_axes: Params, dtype: jnp.dtype) -> Params:
    """Sum each gradient once over its `reduced_axes`, in `dtype`; shapes stay."""

    def reduce(gradient: Array, axes: tuple[str, ...]) -> Array:
        summed = all_reduce(gradient.astype(dtype), axes, scope="reduce_gradients")
        return summed.astype(gradient.dtype)

    with jax.named_scope("backward"):
        return jax.tree.map(reduce, gradients, reduced_axes)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    m = plan.num_accumulation_steps
    dtype = DTYPES[plan.reduce_dtype]
    rows = [
        Expected(
            kind="all-reduce",
            axes=placed.reduced_axes,
            count=1,
            payload_bytes=placed.local_size * DTYPE_BYTES[dtype],
            dtype=dtype,
            phase="backward",
            why=f"gradient of {placed.parameter.path}",
        )
        for placed in layout
        if placed.reduced_axes
    ]
    for placed in layout:
        if placed.inner_axes:
            L, k = shards.num_layers(placed), shards.layers_at_once(plan)
            rows.append(
                Expected(
                    kind="all-reduce",
                    axes=placed.inner_axes,
                    count=m * L // k,
                    payload_bytes=placed.local_size // L * k * DTYPE_BYTES[dtype],
                    dtype=dtype,
                    phase="backward",
                    why=f"gradient of {placed.parameter.path}, layer by layer",
                )
            )
    for why, scalar, axes in (("token count", "s32", TOKEN_AXES), ("loss", "f32", LOSS_AXES)):
        if summed_axes := plan.in_mesh_order(axes):
            rows.append(
                Expected(
                    kind="all-reduce",
                    axes=summed_axes,
                    count=1,
                    payload_bytes=DTYPE_BYTES[scalar],
                    dtype=scalar,
                    phase="forward",
                    why=why,
                )
            )
    return rows


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    """Raises PlanError for frozen patterns that match nothing or leave no layer to train, and for
    what the mesh has no axis for."""
    shards.check_fields(plan)
    paths = [parameter.path for parameter in config.parameters]
    for pattern in plan.frozen:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise PlanError(
                f"frozen={pattern!r} matches no parameter of {config.name}. "
                f"{did_you_mean(pattern, paths)}"
            )
    layers = [path for path in paths if path.startswith("layers/")]
    if all(map(plan.is_frozen, layers)):
        raise PlanError(
            f"frozen={plan.frozen} leaves no parameter of {config.name}'s layers to train, and "
            f"then no gradient passes through them. Leave one out, such as {layers[-1]!r}."
        )


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    if not plan.overlap_gradients or plan.size(shards.AXIS) > 1:  # those who shard see to it
        return {}
    weights = shards.weights(plan, layout)
    return {"gather": lambda state: reduce_inside(state, weights)}


STRATEGY = Strategy(
    card=CARD,
    axes=("slice", "data"),
    # Always: a step on any mesh counts its tokens and reduces what its specs leave whole.
    is_active=lambda plan: True,
    is_partial=lambda parameter: True,
    check=check,
    hooks=hooks,
    expected=expected,
    variants=(Variant(name="data", mesh="data=8"),),
)
