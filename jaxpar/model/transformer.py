"""A decoder-only transformer whose code runs on local shards and does not know its mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxpar.errors import ConfigError
from jaxpar.model.config import PRESETS, ModelConfig
from jaxpar.model.layers import Block, Embedding, RMSNorm, rotary_angles
from jaxpar.model.parallel import Parallel

Params = dict[str, Any]
"""Nested dict of arrays: the parameters, a gradient or an optimizer moment of the whole model."""


class Transformer(nnx.Module):
    """Embedding, L identical blocks stacked on a leading dim and scanned, norm, unembedding."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layers(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.embedding = Embedding(config, rngs=rngs)
        self.layers = make_layers(rngs)
        self.norm = RMSNorm(config)
        if not config.tied_embedding:
            self.unembedding = Embedding(config, rngs=rngs)
        self.config = config

    def token_losses(
        self, tokens_BS: Array, labels_BS: Array, parallel: Parallel, compute_dtype: jnp.dtype
    ) -> Array:
        """Cross-entropy of every token: int [B, S], int [B, S] -> float32 [B, S], per shard."""
        with jax.named_scope("embedding"):
            embedding = _gathered(self.embedding, parallel)
            x_BSD = embedding.embed(tokens_BS, parallel, compute_dtype)
        rotary = rotary_angles(tokens_BS.shape[1], self.config.head_dim, self.config.rope_theta)

        graphdef, stacked = nnx.split(self.layers)

        def layer(x_BSD: Array, state: nnx.State) -> tuple[Array, None]:
            block = nnx.merge(graphdef, parallel.gather(state))
            return block(x_BSD, rotary, parallel), None

        with jax.named_scope("layers"):
            x_BSD, _ = lax.scan(parallel.checkpoint(layer), x_BSD, stacked)

        with jax.named_scope("head"):
            h_BSD = parallel.enter(self.norm(x_BSD))
            tied = self.config.tied_embedding
            scorer = embedding if tied else _gathered(self.unembedding, parallel)
            return parallel.cross_entropy(scorer.logits(h_BSD), labels_BS)


def _gathered(module: Any, parallel: Parallel) -> Any:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, parallel.gather(state))


def check_is_dense(config: ModelConfig) -> None:
    """Raise ConfigError for a model with expert layers, which no strategy here runs yet."""
    if config.num_experts:
        dense = ", ".join(name for name, preset in PRESETS.items() if not preset.num_experts)
        raise ConfigError(
            f"{config.name} has num_experts={config.num_experts} per layer, and no strategy here "
            f"runs expert layers yet: its shapes serve for parameter counts. Presets without "
            f"experts: {dense}."
        )


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """The model's structure and its parameters as shapes; costs no memory at any size.

    Raises ConfigError for a model with expert layers, which no strategy here runs yet.
    """
    check_is_dense(config)
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def init_params(config: ModelConfig, seed: int | Array) -> Params:
    """Float32 parameters as a nested dict. Jit it with out_shardings to have them born sharded:
    the values depend on the seed alone, never on the mesh."""
    _, state = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
    return nnx.to_pure_dict(state)
