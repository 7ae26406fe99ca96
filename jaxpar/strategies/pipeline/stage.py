"""A model as the stages of a pipeline: which layers a stage holds, and what it does with them.

Layers are stacked, and the stack is cut along axis `pipe`. Before, it is put in the order of stages
and padded with layers of zeros, so that all chunks are as long. A layer of zeros changes nothing:
what it adds to its input is a product with zeros, and so is each of its gradients, since every
gradient of a weight is a product with another weight of the same layer. So it stays zero under any
optimizer that leaves a zero with gradient zero where it is, weight decay included.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.model.transformer import Params, abstract_model
from jaxpar.strategies.pipeline.choice import (
    AXIS,
    PADDING,
    always_computes,
    layer_order,
    schedule_of,
)
from jaxpar.strategies.pipeline.executor import Chunk, Executor, Stage
from jaxpar.strategies.pipeline.program import Program
from jaxpar.strategies.plan import Plan
from jaxpar.text import Batch

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
    place = np.argsort(np.where(order == PADDING, len(order), order))[: config.num_layers]
    return {**params, STACK: jax.tree.map(lambda leaf: leaf[place], params[STACK])}


def _order(config: ModelConfig, plan: Plan) -> np.ndarray | None:
    if plan.size(AXIS) == 1:
        return None
    order = layer_order(config.num_layers, plan.size(AXIS), plan.num_virtual_stages)
    return None if np.array_equal(order, np.arange(config.num_layers)) else order


def model_stage(
    config: ModelConfig, parallel: Parallel, dtype: jnp.dtype, num_tokens: Array
) -> Stage:
    """What a stage does: the first chunk embeds, all run their layers, the last one scores."""
    graphdef, _ = abstract_model(config)

    def stage(
        shared: Params, layers: Params, x: Array | None, batch: Batch, chunk: Chunk
    ) -> tuple[Array, Array, Stats]:
        model = nnx.merge(graphdef, {**shared, STACK: layers})
        embedding = model.gathered_embedding(parallel)
        # Says the phase of what runs a second time; what scores runs once.
        with jax.named_scope("recompute" if chunk.is_repeated else "forward"):
            if chunk.is_first is not False:
                embedded = model.embed(embedding, batch.tokens_BS, parallel, dtype)
                x = embedded if x is None else _choose(chunk.is_first, embedded, x)
            assert x is not None, "only the first chunk has tokens for an input"
            y, stats = model.apply_layers(x, batch, parallel)
        loss = jnp.sum(stats["objective"]) if "objective" in stats else jnp.float32(0)
        if chunk.is_last is not False:
            loss_BS = model.score(embedding, y, batch.labels_BS, parallel)
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
    num_tokens: Array,
    parallel: Parallel,
    exact_sends: bool = False,
) -> tuple[tuple[Array, Stats], Params]:
    """This device's summands of the mean loss per token and of its gradients; the pipeline runs.

    All shapes are per shard: leaves of `params` are a stage's, `batch` all micro-batches'. `params`
    have to vary over the axes that their gradients will be reduced over.
    """
    schedule = schedule_of(plan)
    v, m = schedule.num_virtual_stages, schedule.num_microbatches
    executor = Executor(
        program=Program(schedule=schedule),
        stage=model_stage(config, parallel, jnp.dtype(plan.compute_dtype), num_tokens),
        always_computes=always_computes(plan),
        exact_sends=exact_sends,
    )

    def cut(tree: Any, num_parts: int) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(num_parts, -1, *leaf.shape[1:]), tree)

    shared = {name: part for name, part in params.items() if name != STACK}
    value, shared_gradients, gradients = executor(shared, cut(params[STACK], v), cut(batch, m))
    whole = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), gradients)
    return value, {**shared_gradients, STACK: whole}
