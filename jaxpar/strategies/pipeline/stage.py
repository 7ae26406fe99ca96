"""A model as the stages of a pipeline: which layers a stage holds, and what it does with them.

Layers are stacked, and the stack is cut along axis `pipe`. Before, it is put in the order of stages
and padded with layers of zeros, so that all chunks are as long. A layer of zeros changes nothing:
what it adds to its input is a product with zeros, and so is each of its gradients, since every
gradient of a weight is a product with another weight of the same layer. So it stays zero under any
optimizer that leaves a zero with gradient zero where it is, weight decay included. What it counts,
and so its part of the loss, is left out.

Dense layers before a model's layers with experts are whole on every stage, like the embedding, and
the first stage runs them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.model.transformer import Params, abstract_model
from jaxpar.strategies.pipeline.arrays import pick
from jaxpar.strategies.pipeline.choice import (
    AXIS,
    PADDING,
    always_computes,
    layer_order,
    layers_per_chunk,
    num_staged,
    schedule_of,
)
from jaxpar.strategies.pipeline.executor import Chunk, Executor, Stage
from jaxpar.strategies.pipeline.program import Program
from jaxpar.strategies.plan import Plan
from jaxpar.text import Batch
from jaxpar.update import fill

STACK = "layers"
"""The part of the parameters that stages divide among them."""


def in_stage_order(params: Params, config: ModelConfig, plan: Plan) -> Params:
    """A model's parameters, as they are held on this plan's mesh: [L, ..] -> [p·v·l, ..] each."""
    order = _order(config, plan)
    if order is None:
        return params

    def arrange(leaf: Array) -> Array:
        padded = jnp.concatenate([leaf, jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)])
        return jnp.take(padded, jnp.where(order == PADDING, leaf.shape[0], order), axis=0)

    return {**params, STACK: jax.tree.map(arrange, params[STACK])}


def in_layer_order(params: Params, config: ModelConfig, plan: Plan) -> Params:
    """The inverse, on the host or anywhere: [p·v·l, ..] -> [L, ..] each."""
    order = _order(config, plan)
    if order is None:
        return params
    place = np.argsort(np.where(order == PADDING, len(order), order))[: num_staged(config)]
    return {**params, STACK: jax.tree.map(lambda leaf: leaf[place], params[STACK])}


def _order(config: ModelConfig, plan: Plan) -> np.ndarray | None:
    if plan.size(AXIS) == 1:
        return None
    order = layer_order(num_staged(config), plan.size(AXIS), plan.num_virtual_stages)
    return None if np.array_equal(order, np.arange(num_staged(config))) else order


# --- statistics: inside `shard_map`, of all the layers that a stage holds ------------------------


def from_stage(stats: Stats, config: ModelConfig, plan: Plan) -> Stats:
    """A stage's statistics at their layers' places, 0 elsewhere: [v·l, ..] -> [L, ..] each."""
    places, num_layers = _own_layers(config, plan), num_staged(config)

    def put(leaf: Array) -> Array:
        nothing = jnp.zeros_like(leaf, shape=(num_layers, *leaf.shape[1:]))
        return nothing.at[places].set(leaf, mode="drop")

    return jax.tree.map(put, stats)


def to_stage(stats: Stats, config: ModelConfig, plan: Plan) -> Stats:
    """Of all layers' statistics those of this stage's, 0 for padding: [L, ..] -> [v·l, ..] each."""
    if plan.size(AXIS) == 1:
        return stats
    places = _own_layers(config, plan)
    return {k: leaf.at[places].get(mode="fill", fill_value=0) for k, leaf in stats.items()}


def _own_layers(config: ModelConfig, plan: Plan) -> Array:
    """Numbers of the layers this stage holds, int32 [v·l]; that of no layer for padding."""
    order = layer_order(num_staged(config), plan.size(AXIS), plan.num_virtual_stages)
    layers = np.where(order == PADDING, num_staged(config), order).reshape(plan.size(AXIS), -1)
    return jnp.asarray(layers)[lax.axis_index(AXIS)]


def without_padding(stats: Stats, chunk: Array, num_layers: int, num_chunks: int) -> Stats:
    """A chunk's statistics, [l, ..] each, but 0 of a last layer that is padding.

    `chunk` is its number among all, of which the first ones have a layer more than the others.
    """
    num_longer, most = num_layers % num_chunks, layers_per_chunk(num_layers, num_chunks)
    if not num_longer:
        return stats
    is_real_L = (chunk < num_longer) | (jnp.arange(most) < most - 1)
    return {
        name: jnp.where(is_real_L.reshape(-1, *[1] * (t.ndim - 1)), t, 0)
        for name, t in stats.items()
    }


# --- what a stage does -----------------------------------------------------------------------


def model_stage(
    config: ModelConfig,
    plan: Plan,
    parallel: Parallel,
    frozen: Params,
    num_tokens: Array,
) -> Stage:
    """The first chunk embeds, all run their layers, the last one scores.

    `frozen` has the parameters that are None in what the stage is called with; layers' [v, l, ..].
    """
    graphdef, _ = abstract_model(config)
    dtype = jnp.dtype(plan.compute_dtype)
    frozen_layers = frozen[STACK]
    frozen_shared = {name: part for name, part in frozen.items() if name != STACK}
    num_chunks = plan.size(AXIS) * plan.num_virtual_stages
    order = layer_order(num_staged(config), plan.size(AXIS), plan.num_virtual_stages)
    order = order.reshape(plan.size(AXIS), plan.num_virtual_stages, -1).swapaxes(0, 1)
    layers_of_chunk = order.reshape(num_chunks, -1)

    def stage(
        shared: Params, layers: Params, x: Array | None, batch: Batch, chunk: Chunk
    ) -> tuple[Array, Array, Stats]:
        mine = parallel.of_chunk(chunk.place) if parallel.of_chunk else parallel

        def count_once(stats: Stats) -> Stats:
            own = without_padding(stats, chunk.number, num_staged(config), num_chunks)
            return parallel.count_once(own)

        def layer_numbers(num_layers: int) -> Array:
            return jnp.asarray(layers_of_chunk)[chunk.number]

        mine = replace(mine, count_once=count_once, layer_numbers=layer_numbers)
        if not chunk.is_repeated:  # then nobody asks for counts
            mine = replace(mine, sum_counts=lambda count: count, count_once=lambda stats: {})
        layers = fill(layers, pick(frozen_layers, chunk.place))
        model = nnx.merge(graphdef, {**fill(shared, frozen_shared), STACK: layers})
        embedding = model.gathered_embedding(mine)
        # Says the phase of what runs a second time; what scores runs once.
        with jax.named_scope("recompute" if chunk.is_repeated else "forward"):
            if chunk.is_first is not False:
                embedded = model.embed(embedding, batch.tokens_BS, mine, dtype)
                embedded = model.apply_dense_layers(embedded, batch, mine)
                x = embedded if x is None else _choose(chunk.is_first, embedded, x)
            assert x is not None, "only the first chunk has tokens for an input"
            y, stats = model.apply_layers(x, batch, mine)
        loss = jnp.sum(stats["objective"]) if "objective" in stats else jnp.float32(0)
        if chunk.is_last is not False:
            loss_BS = model.score(embedding, y, batch.labels_BS, mine)
            scored = jnp.sum(jnp.where(batch.mask_BS != 0, loss_BS, 0.0))
            loss += _choose(chunk.is_last, scored, jnp.zeros_like(scored))
        return y, loss / num_tokens.astype(jnp.float32), stats

    return stage


def _choose(condition: bool | Array, then: Array, otherwise: Array) -> Array:
    if condition is True:
        return then
    return jnp.where(condition, then, otherwise)


def loss_and_gradients(
    config: ModelConfig,
    plan: Plan,
    params: Params,
    batch: Batch,
    *,
    others: Params,
    num_tokens: Array,
    parallel: Parallel,
    exact_sends: bool = False,
) -> tuple[tuple[Array, Stats], Params]:
    """This device's summands of the mean loss per token and of its gradients; the pipeline runs.

    All shapes are per shard: leaves of `params` are a stage's, `batch` all micro-batches'. `params`
    have to vary over the axes that their gradients will be reduced over; where one is None, it is
    in `others`. Statistics are of all layers, [L, ..] each.
    """
    schedule = schedule_of(plan)
    v, m = schedule.num_virtual_stages, schedule.num_microbatches

    def cut(tree: Any, num_parts: int) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(num_parts, -1, *leaf.shape[1:]), tree)

    def joined(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)

    is_none = lambda p: p is None  # noqa: E731
    frozen = jax.tree.map(
        lambda p, other: other if p is None else None, params, others, is_leaf=is_none
    )
    frozen = {**frozen, STACK: cut(frozen[STACK], v)}
    executor = Executor(
        program=Program(schedule=schedule),
        stage=model_stage(config, plan, parallel, frozen, num_tokens),
        always_computes=always_computes(config, plan),
        exact_sends=exact_sends,
    )
    shared = {name: part for name, part in params.items() if name != STACK}
    (loss, stats), of_shared, of_layers = executor(shared, cut(params[STACK], v), cut(batch, m))
    stats = from_stage(joined(stats), config, plan)
    return (loss, stats), {**of_shared, STACK: joined(of_layers)}
