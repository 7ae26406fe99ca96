"""ZeRO-2: whole weights, but no device ever holds more gradients than its own part.

What is split    the batch, master weights, optimizer state and gradients over `fsdp`; only the
                 weights in the step are whole.
Why              4 + 12/n bytes per parameter (ZeRO-1) become 2 + 14/n in mixed precision.
What it costs    c(n-1)/n bytes on the wire per parameter and step, c being those of the gather
                 dtype, and g(n-1)/n per micro-batch, g being those of the reduce dtype.

W = bytes of a parameter, all layers, in the gather dtype, G = of one layer in the reduce dtype:

| collective     | phase    | count | payload_bytes | why                                        |
|----------------|----------|-------|---------------|--------------------------------------------|
| all-gather     | forward  | 1     | W             | what each device has updated, to all       |
| reduce-scatter | backward | mL    | G             | a layer's gradient, straight to its owners |

with tables' gradients scattered once per micro-batch (m). Gradients are scattered where they come
into being, inside the backward of each layer, which is what keeps them from ever being whole; the
scattered ones add up in the reduce dtype. In a pipeline it is Gl times for layers, G slots having a
backward of l of them, and once per step for tables, which only two stages make gradients of.

Source: Rajbhandari et al. 2020 (ZeRO) §5.2, §7.2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array, lax

from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params
from jaxpar.strategies import shards, zero1
from jaxpar.strategies.pipeline.arrays import pick
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.shards import AXIS, Weight, is_param, map_paths, path_of, row, use
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="zero2",
    axis=AXIS,
    splits="the batch, master weights, optimizer state and gradients; weights in use are whole",
    why="no whole gradient in memory, and none carried from one micro-batch to the next",
    costs="one gather of all weights per step, one reduce-scatter of gradients per micro-batch",
    source="Rajbhandari et al. 2020, §5.2",
)

# --- communication ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def use_whole(shard: Array, whole: Array, weight: Weight) -> Array:
    """`whole`, which is what `shard` is a part of; its gradient goes to the shard, scattered."""
    return whole


def _use_forward(shard: Array, whole: Array, weight: Weight) -> tuple[Array, None]:
    return whole, None


def _use_backward(weight: Weight, _: None, gradient: Array) -> tuple[Array, None]:
    return weight.scatter(gradient), None


use_whole.defvjp(_use_forward, _use_backward)


def start(
    plan: Plan, layout: Layout, params: Params, parallel: Parallel
) -> tuple[Params, Parallel]:
    """The step computes with whole weights, and differentiates with respect to shards of them."""
    weights = shards.weights(plan, layout)
    params, parallel = zero1.start(plan, layout, params, parallel)
    whole = zero1.gather_once(plan, layout, params, are_held=False)

    def in_reduce_dtype(path: str, shard: Array) -> Array:
        # Nobody reads its values: it says where the gradient goes, and in which dtype.
        return shard.astype(weights[path].reduce_dtype) if path in whole else shard

    def of_chunk(chunk: Array) -> Parallel:
        v = plan.num_virtual_stages
        mine = {
            path: pick(w.reshape(v, -1, *w.shape[1:]), chunk) if path in staged else w
            for path, w in whole.items()
        }
        return replace(hooked, scan=partial(scan, whole=mine))

    def gather(state: nnx.State) -> nnx.State:
        def one(param: nnx.Variable[Array]) -> nnx.Variable[Array]:
            path = path_of(param)
            if weights[path].is_stacked or path not in whole:
                return param
            return param.replace(use_whole(param[...], whole[path], weights[path]))

        return jax.tree.map(one, state, is_leaf=is_param)

    def scan(
        body: Callable[..., Any], x_BSD: Array, stacked: nnx.State, whole: dict[str, Array] = whole
    ) -> tuple[Array, Any]:
        paths = [path_of(param) for param in jax.tree.leaves(stacked, is_leaf=is_param)]
        leaves, structure = jax.tree.flatten(stacked)

        def turn(x_BSD: Array, layer: tuple[list[Array], list[Array | None]]) -> Any:
            values = [
                (shard if weights[path].is_held else use(shard, weights[path]))
                if whole is None
                else use_whole(shard, whole, weights[path])
                for path, shard, whole in zip(paths, *layer, strict=True)
            ]
            return body(x_BSD, jax.tree.unflatten(structure, values))

        return lax.scan(turn, x_BSD, (leaves, [whole.get(path) for path in paths]))

    staged = {placed.parameter.path for placed in layout if "pipe" in placed.split_axes}
    hooked = replace(parallel, gather=gather, scan=scan)
    if staged:
        hooked = replace(hooked, of_chunk=of_chunk)
    return map_paths(in_reduce_dtype, params), hooked


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    runs, rows = runs_of(plan, config), shards.held(plan, layout)
    for placed in shards.passing(plan, layout):
        L, n = shards.num_layers(placed), shards.layers_per_run(placed, plan)
        rows.append(row("all-gather", "forward", placed, plan, count=1, of=L, why="use"))
        if placed.is_trained:
            count, why = runs.backwards * n, "gradient of"
            rows.append(row("reduce-scatter", "backward", placed, plan, count=count, of=1, why=why))
    return rows


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.size(AXIS) > 1 and plan.zero == 2,
    is_partial=lambda parameter: True,
    check=shards.check,
    splits=shards.splits,
    start=start,
    finish=zero1.finish,
    expected=expected,
    variants=(
        Variant(name="zero2", mesh="fsdp=8", fields={"zero": 2, "num_accumulation_steps": 2}),
    ),
)
