"""Fully sharded data parallelism (ZeRO-3): no device keeps the whole model.

What is split    the batch, and with it every matrix, its gradient and its optimizer state, along
                 the embed dim, over `fsdp`. Norm scales stay whole: they are a few thousandths of a
                 percent of the bytes, and gathering them would cost more than it saves.
Why              16 bytes per parameter (float32 weight, gradient, two moments) become 16/n.
What it costs    each matrix is gathered where it is used and its gradient reduce-scattered there:
                 (2c+g)(n-1)/n bytes on the wire per parameter and micro-batch, c and g being the
                 bytes of the compute and the reduce dtype. Data parallelism sends 2g(n-1)/n per
                 step: as much with bf16 weights and float32 gradients, 2/3 of it in one dtype.

W = bytes of one layer's matrix in the compute dtype, G = in the reduce dtype; per matrix:

| collective     | phase     | count | payload_bytes | why                                      |
|----------------|-----------|-------|---------------|------------------------------------------|
| all-gather     | forward   | mL    | W             | before the layer                         |
| all-gather     | recompute | mL    | W             | again before its backward                |
| reduce-scatter | backward  | mL    | G             | its gradient, straight to the owners     |

with embedding and output instead gathered once per micro-batch (m) and kept until their backward.

Source: Rajbhandari et al. 2020 (ZeRO) §5.3, §7.2.2; Zhao et al. 2023 (PyTorch FSDP) §3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.collectives import all_gather, reduce_scatter
from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant

AXIS = "fsdp"
SPLIT_DIM = "embed"

CARD = Card(
    name="fsdp",
    axis=AXIS,
    splits="the batch, and every matrix with its gradient and optimizer state",
    why="weights and optimizer state of n devices hold one model instead of n copies",
    costs="gather each matrix forward and again backward, reduce-scatter its gradient",
    source="Rajbhandari et al. 2020, §5.3",
)

# --- communication ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(
    shard: Array, dim: int, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype
) -> Array:
    """[.., d/n, ..] float32 -> [.., d, ..] in compute_dtype; its gradient the other way.

    The rule is written by hand for one reason: the transpose of a cast and a gather would sum the
    gradient in the compute dtype, and in which dtype gradients are summed is the plan's choice.
    """
    return all_gather(shard.astype(compute_dtype), AXIS, dim=dim, scope="gather_weight")


def _gather_forward(
    shard: Array, dim: int, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype
) -> tuple[Array, None]:
    return gather_weight(shard, dim, compute_dtype, reduce_dtype), None


def _gather_backward(
    dim: int, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype, _: None, gradient: Array
) -> tuple[Array]:
    summed = reduce_scatter(gradient.astype(reduce_dtype), AXIS, dim=dim, scope="scatter_gradient")
    return (summed.astype(jnp.float32),)


gather_weight.defvjp(_gather_forward, _gather_backward)


def gather(state: nnx.State, compute_dtype: jnp.dtype, reduce_dtype: jnp.dtype) -> nnx.State:
    """A module's state with its matrices whole along the embed dim."""

    def whole(param: nnx.Param[Array]) -> nnx.Variable[Array]:
        if not is_split(param.dims):
            return param
        dim = param.dims.index(SPLIT_DIM)
        value = gather_weight(param[...], dim, compute_dtype, reduce_dtype)
        return param.replace(value)

    return jax.tree.map(whole, state, is_leaf=lambda x: isinstance(x, nnx.Param))


def checkpoint(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what the backward needs, except gathered weights: those are gathered again."""

    def keep(primitive: Any, *_: Any, **params: Any) -> bool:
        # A policy sees `gather_weight` from outside, as one call with a body.
        body = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else ()
        gathers = [eqn for eqn in body if eqn.primitive.name == "all_gather"]
        return not any(AXIS in eqn.params["axis_name"] for eqn in gathers)

    return jax.checkpoint(layer, policy=keep, prevent_cse=False)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    m, n = plan.num_accumulation_steps, plan.size(AXIS)
    rows = []
    for placed in layout:
        parameter = placed.parameter
        if not is_split(parameter.dims):
            continue
        num_layers = parameter.num_stacked or 1
        size = placed.local_size * n // num_layers  # elements, once gathered, of one layer

        def row(kind: str, phase: Phase, num_bytes: int, dtype: str, why: str) -> Expected:
            return Expected(
                kind=kind,
                axes=(AXIS,),
                count=m * num_layers,  # noqa: B023 - called in this iteration only
                payload_bytes=size * num_bytes,  # noqa: B023
                dtype=dtype,
                phase=phase,
                why=f"{why} {parameter.path}",  # noqa: B023
            )

        compute = plan.compute_bytes, DTYPES[plan.compute_dtype]
        reduce = plan.reduce_bytes, DTYPES[plan.reduce_dtype]
        rows.append(row("all-gather", "forward", *compute, "use"))
        if parameter.num_stacked:
            rows.append(row("all-gather", "recompute", *compute, "use again, backward,"))
        rows.append(row("reduce-scatter", "backward", *reduce, "gradient of"))
    return rows


# --- rules -----------------------------------------------------------------------------------


def is_split(dims: tuple[str, ...]) -> bool:
    return SPLIT_DIM in dims


def check(config: ModelConfig, plan: Plan) -> None:
    n = plan.size(AXIS)
    if config.embed % n:
        rest = plan.num_batch_shards // n * plan.num_accumulation_steps
        sizes = nearest_divisors(config.embed, n, lambda d: plan.batch_size % (rest * d) == 0)
        raise PlanError(
            f"{config.name}: embed={config.embed} cannot be split over fsdp={n}: it is not a "
            f"multiple. Nearest sizes of axis fsdp: {sizes}."
        )


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    return {SPLIT_DIM: AXIS} if is_split(parameter.dims) else {}


def hooks(config: ModelConfig, plan: Plan) -> dict[str, Callable[..., Any]]:
    compute_dtype, reduce_dtype = jnp.dtype(plan.compute_dtype), jnp.dtype(plan.reduce_dtype)
    return {
        "gather": lambda state: gather(state, compute_dtype, reduce_dtype),
        "checkpoint": checkpoint,
    }


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.size(AXIS) > 1,
    is_partial=lambda parameter: True,
    check=check,
    splits=splits,
    hooks=hooks,
    expected=expected,
    variants=(
        Variant(name="fsdp", mesh="fsdp=8"),
        Variant(name="fsdp+tensor", mesh="fsdp=4,tensor=2"),
        Variant(name="hsdp", mesh="data=2,fsdp=4"),
    ),
)
