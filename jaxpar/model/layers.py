"""The layers of a decoder block, as Flax modules on local shards.

Dims: B batch, S sequence (S' where it may be split), D embed, N query heads, K key/value heads,
H head dim, F mlp hidden, V vocabulary. Inside a module, sizes are read off the arrays, never off
the configuration: the arrays are shards.

Sources: RMSNorm, Zhang & Sennrich 2019; SwiGLU, Shazeer 2020.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.model.attention import rotate
from jaxpar.model.config import VOCAB_EMBED, ModelConfig
from jaxpar.model.dropout import AFTER_ATTENTION, AFTER_MLP, DropoutFunction, no_dropout
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.text import Batch

INIT_STD = 0.02  # Radford et al. 2019; outputs are scaled down by the residual depth


def weight(
    shape: tuple[int, ...], dims: tuple[str, ...], rngs: nnx.Rngs, std: float = INIT_STD
) -> nnx.Param[Array]:
    """A float32 master weight whose `dims` tell strategies what may be split."""
    init = nnx.initializers.normal(std)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), dims=dims)


class RMSNorm(nnx.Module):
    """x / rms(x) x scale over D, computed in float32: [.., D] -> [.., D] in x's dtype."""

    def __init__(self, config: ModelConfig) -> None:
        self.scale = nnx.Param(jnp.ones((config.embed,), jnp.float32), dims=("norm",))
        self.epsilon = config.norm_epsilon

    def __call__(self, x_BSD: Array) -> Array:
        x = x_BSD.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (x * inverse_rms * self.scale[...]).astype(x_BSD.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention on this device's heads: [B, S', D] -> [B, S', D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        self.query = weight((D, N, H), ("embed", "heads", "head"), rngs)
        self.key = weight((D, K, H), ("embed", "kv_heads", "head"), rngs)
        self.value = weight((D, K, H), ("embed", "kv_heads", "head"), rngs)
        std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.output = weight((N, H, D), ("heads", "head", "embed"), rngs, std)

    def __call__(
        self,
        x_BSD: Array,
        rotary: tuple[Array, Array],
        segments_BS: Array | None,
        parallel: Parallel,
    ) -> Array:
        wk_DKH = parallel.kv_weight(self.key[...])
        wv_DKH = parallel.kv_weight(self.value[...])
        q_BSNH, k_BSKH, v_BSKH = parallel.column(x_BSD, self.query[...], wk_DKH, wv_DKH)
        q_BSNH, k_BSKH = rotate(q_BSNH, rotary), rotate(k_BSKH, rotary)
        o_BSNH = parallel.attention(q_BSNH, k_BSKH, v_BSKH, segments_BS)
        return parallel.row(o_BSNH, self.output[...])


class MLP(nnx.Module):
    """SwiGLU or GELU on this device's part of F: [B, S', D] -> [B, S', D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.embed, config.mlp_hidden
        if config.mlp == "swiglu":
            self.gate = weight((D, F), ("embed", "mlp"), rngs)
        self.up = weight((D, F), ("embed", "mlp"), rngs)
        self.down = weight(
            (F, D), ("mlp", "embed"), rngs, INIT_STD / (2 * config.num_layers) ** 0.5
        )
        self.is_gated = config.mlp == "swiglu"

    def __call__(self, x_BSD: Array, parallel: Parallel) -> Array:
        if self.is_gated:
            gate_BSF, up_BSF = parallel.column(x_BSD, self.gate[...], self.up[...])
            hidden_BSF = jax.nn.silu(gate_BSF) * up_BSF
        else:
            (up_BSF,) = parallel.column(x_BSD, self.up[...])
            hidden_BSF = jax.nn.gelu(up_BSF)
        return parallel.row(hidden_BSF, self.down[...])


class AttentionBlock(nnx.Module):
    """Pre-norm attention around the residual stream, and the norm of what a block has next."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)

    def attend(
        self,
        x_BSD: Array,
        rotary: tuple[Array, Array],
        batch: Batch,
        parallel: Parallel,
        dropout: DropoutFunction,
    ) -> Array:
        """[B, S', D] -> [B, S', D]."""
        with jax.named_scope("attention"):
            h_BSD = self.attention_norm(x_BSD)
            y_BSD = self.attention(h_BSD, rotary, batch.segments_BS, parallel)
            return x_BSD + dropout(y_BSD, AFTER_ATTENTION)


class Block(AttentionBlock):
    """Pre-norm attention and MLP around the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x_BSD: Array,
        rotary: tuple[Array, Array],
        batch: Batch,
        parallel: Parallel,
        dropout: DropoutFunction = no_dropout,
    ) -> tuple[Array, Stats]:
        """[B, S', D] -> [B, S', D], and what the layer counted."""
        x_BSD = self.attend(x_BSD, rotary, batch, parallel, dropout)
        with jax.named_scope("mlp"):
            y_BSD = self.mlp(self.mlp_norm(x_BSD), parallel)
            return x_BSD + dropout(y_BSD, AFTER_MLP), {}


class Embedding(nnx.Module):
    """A [V, D] table, used to embed tokens, to score them, or both (tied)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.table = weight((config.vocab, config.embed), VOCAB_EMBED, rngs)

    def embed(self, tokens_BS: Array, parallel: Parallel, dtype: jnp.dtype) -> Array:
        """The residual stream in the compute dtype: int [B, S] -> [B, S', D]."""
        return parallel.embed(self.table[...], tokens_BS, dtype)

    def logits(self, h_BSD: Array) -> Array:
        """Scores of this device's part of the vocabulary, float32 [B, S, V']."""
        return jnp.einsum(
            "bsd,vd->bsv",
            h_BSD,
            self.table[...].astype(h_BSD.dtype),
            preferred_element_type=jnp.float32,
        )
