"""A decoder-only transformer whose code runs on local shards and does not know its mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.model.attention import rotary_angles
from jaxpar.model.config import LAYER_NUMBER, ModelConfig
from jaxpar.model.dropout import Dropout
from jaxpar.model.layers import Block, Embedding, RMSNorm
from jaxpar.model.moe import ExpertBlock
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.text import Batch

Params = dict[str, Any]
"""Nested dict of arrays: the parameters, a gradient or an optimizer moment of the whole model."""


class Transformer(nnx.Module):
    """Embedding, L identical blocks stacked on a leading dim and scanned, norm, unembedding.

    A model with experts has them in all blocks but the first few, which are a stack of their own.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        def stack(block: type[Block] | type[ExpertBlock], num_layers: int) -> Any:
            @nnx.split_rngs(splits=num_layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make_layers(rngs: nnx.Rngs) -> Block | ExpertBlock:
                return block(config, rngs=rngs)

            return make_layers(rngs)

        self.embedding = Embedding(config, rngs=rngs)
        if config.num_dense_layers:
            self.dense_layers = stack(Block, config.num_dense_layers)
        self.layers = stack(
            ExpertBlock if config.num_experts else Block,
            config.num_layers - config.num_dense_layers,
        )
        self.norm = RMSNorm(config)
        if not config.tied_embedding:
            self.unembedding = Embedding(config, rngs=rngs)
        self.config = config

    def token_losses(
        self, batch: Batch, parallel: Parallel, compute_dtype: jnp.dtype
    ) -> tuple[Array, Stats]:
        """Cross-entropy of every token, float32 [B, S], and what the layers counted; per shard."""
        embedding = self.gathered_embedding(parallel)
        x_BSD = self.embed(embedding, batch.tokens_BS, parallel, compute_dtype)
        x_BSD = self.apply_dense_layers(x_BSD, batch, parallel)
        x_BSD, stats = self.apply_layers(x_BSD, batch, parallel)
        return self.score(embedding, x_BSD, batch.labels_BS, parallel), stats

    def gathered_embedding(self, parallel: Parallel) -> Embedding:
        """The embedding, whole as far as this device looks tokens up (and scores, if tied)."""
        with jax.named_scope("embedding"):
            return _gathered(self.embedding, parallel)

    def embed(
        self, embedding: Embedding, tokens_BS: Array, parallel: Parallel, dtype: jnp.dtype
    ) -> Array:
        """int [B, S] -> residual stream [B, S', D]."""
        with jax.named_scope("embedding"):
            return embedding.embed(tokens_BS, parallel, dtype)

    def apply_dense_layers(self, x_BSD: Array, batch: Batch, parallel: Parallel) -> Array:
        """Those before the layers with experts, if there are any: [B, S', D] -> [B, S', D]."""
        if self.config.num_dense_layers:
            with jax.named_scope("dense_layers"):
                x_BSD, _ = self._apply(self.dense_layers, jnp.arange, x_BSD, batch, parallel)
        return x_BSD

    def apply_layers(self, x_BSD: Array, batch: Batch, parallel: Parallel) -> tuple[Array, Stats]:
        """This device's layers: [B, S', D] -> [B, S', D], and what each counted, [L, ..]."""

        def numbers(num_layers: int) -> Array:
            return self.config.num_dense_layers + parallel.layer_numbers(num_layers)

        with jax.named_scope("layers"):
            x_BSD, stats = self._apply(self.layers, numbers, x_BSD, batch, parallel)
            return x_BSD, parallel.count_once(stats)

    def _apply(
        self,
        layers: Any,
        layer_numbers: Callable[[int], Array],
        x_BSD: Array,
        batch: Batch,
        parallel: Parallel,
    ) -> tuple[Array, Stats]:
        position_S = parallel.positions(batch.tokens_BS.shape[1])
        rotary = rotary_angles(position_S, self.config.head_dim, self.config.rope_theta)
        graphdef, stacked = nnx.split(layers)

        num_layers = jax.tree.leaves(stacked)[0].shape[0]
        rate, numbers_BS, numbers = self.config.dropout, None, None
        if rate and batch.numbers_BS is not None:  # what has no numbers is not trained on
            numbers_BS = parallel.own_tokens(batch.numbers_BS)
            numbers = nnx.Variable(layer_numbers(num_layers), path=LAYER_NUMBER)

        def layer(x_BSD: Array, each: tuple[nnx.State, Any]) -> tuple[Array, Stats]:
            state, number = each
            block = nnx.merge(graphdef, parallel.gather(state))
            if numbers_BS is None:
                return block(x_BSD, rotary, batch, parallel)
            dropout = Dropout(rate=rate, numbers_BS=numbers_BS, layer=number[...])
            return block(x_BSD, rotary, batch, parallel, dropout)

        # The backward of a lone layer is next: there is nothing to keep for long, or to run again.
        body = parallel.checkpoint(layer) if num_layers > 1 else layer
        return parallel.scan(body, x_BSD, (stacked, numbers))

    def score(
        self, embedding: Embedding, x_BSD: Array, labels_BS: Array, parallel: Parallel
    ) -> Array:
        """Cross-entropy of every token: [B, S', D], int [B, S] -> float32 [B, S]."""
        with jax.named_scope("head"):
            h_BSD = parallel.enter(self.norm(x_BSD))
            tied = self.config.tied_embedding
            scorer = embedding if tied else _gathered(self.unembedding, parallel)
            return parallel.cross_entropy(scorer.logits(h_BSD), labels_BS)


def _gathered(module: Any, parallel: Parallel) -> Any:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, parallel.gather(state))


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """The model's structure and its parameters as shapes; costs no memory at any size.

    Each parameter knows its `path` in the model, for strategies that are given a part of it.
    """
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    for path, param in nnx.to_flat_state(nnx.state(model)):
        param.set_metadata(path="/".join(map(str, path)))
    return nnx.split(model)


def init_params(config: ModelConfig, seed: int | Array) -> Params:
    """Float32 parameters as a nested dict. Jit it with out_shardings to have them born sharded:
    the values depend on the seed alone, never on the mesh."""
    _, state = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
    return nnx.to_pure_dict(state)
