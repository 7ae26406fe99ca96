"""ZeRO-1: every device computes with the whole model, and updates its part of it.

What is split    the batch, master weights and optimizer state over `fsdp`; weights and gradients
                 in the step are whole.
Why              of the 16 bytes per parameter in mixed precision, 12 become 12/n: 4 + 12/n.
What it costs    (c+g)(n-1)/n bytes on the wire per parameter and step, c and g being the bytes of
                 the gather and the reduce dtype, however many micro-batches there are. In one
                 dtype that is what the all-reduce of data parallelism sends.

W = bytes of a parameter, all layers, in the gather dtype, G = in the reduce dtype; per matrix:

| collective     | phase    | count | payload_bytes | why                                        |
|----------------|----------|-------|---------------|--------------------------------------------|
| all-gather     | forward  | 1     | W             | what each device has updated, to all       |
| reduce-scatter | backward | 1     | G             | the sum of its gradients, to its owner     |

The gather opens the step instead of closing it: the same gather, and what is kept between steps is
one float32 shard and no whole copy. Gradients of m micro-batches add up whole, in the wider of both
dtypes, and are scattered once.

Source: Rajbhandari et al. 2020 (ZeRO) §5.1, §7.2.1; Narayanan et al. 2021 (Megatron-LM), where it
is the distributed optimizer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params
from jaxpar.strategies import shards
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.shards import AXIS, by_path, map_paths
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="zero1",
    axis=AXIS,
    splits="the batch, master weights and optimizer state; weights in use and gradients are whole",
    why="optimizer state, most of the bytes, once per n devices; nothing happens inside the layers",
    costs="one gather of all weights and one reduce-scatter of all gradients per step",
    source="Rajbhandari et al. 2020, §5.1",
)

# --- communication ---------------------------------------------------------------------------


def gather_once(plan: Plan, layout: Layout, params: Params, *, are_held: bool) -> dict[str, Array]:
    """Split parameters, whole and in the compute dtype, by path; all layers at once.

    are_held: those whose gradient is to be whole as well, or the others.
    """
    weights = shards.weights(plan, layout)
    whole = {}
    with jax.named_scope("forward"):
        for path, shard in by_path(params).items():
            weight = weights[path]
            if weight.dim is not None and weight.is_held == are_held:
                weight = weight.stacked() if weight.is_stacked else weight
                whole[path] = weight.gather(shard)
    return whole


def start(
    plan: Plan, layout: Layout, params: Params, parallel: Parallel
) -> tuple[Params, Parallel]:
    """The step computes with whole weights, and so gets whole gradients of what is held."""
    whole = gather_once(plan, layout, params, are_held=True)
    return map_paths(lambda path, shard: whole.get(path, shard), params), parallel


def finish(plan: Plan, layout: Layout, gradients: Params) -> Params:
    """Sums of gradients, each device's part, float32."""
    weights = shards.weights(plan, layout)

    def scatter(path: str, gradient: Array) -> Array:
        weight = weights[path]
        if weight.is_held:
            gradient = (weight.stacked() if weight.is_stacked else weight).scatter(gradient)
        return gradient.astype(jnp.float32)

    with jax.named_scope("backward"):
        return map_paths(scatter, gradients)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    return shards.held(plan, layout)


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    shards.check(config, plan)
    if plan.overlap_gradients:
        raise PlanError(
            "overlap_gradients=True reduces gradients layer by layer, and with zero=1 they are "
            "reduced once per step, when all are there. Set zero=2, or overlap_gradients=False."
        )


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.size(AXIS) > 1 and plan.zero == 1,
    is_partial=lambda parameter: True,
    check=check,
    splits=shards.splits,
    start=start,
    finish=finish,
    expected=expected,
    variants=(Variant(name="zero1", mesh="fsdp=8", fields={"zero": 1}),),
)
