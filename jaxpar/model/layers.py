"""The layers of a decoder block, as Flax modules on local shards.

Dims: B batch, S sequence (S' where it may be split), D embed, N query heads, K key/value heads,
H head dim, F mlp hidden, V vocabulary. Inside a module, sizes are read off the arrays, never off
the configuration: the arrays are shards.

Sources: RMSNorm, Zhang & Sennrich 2019; RoPE, Su et al. 2021 §3.2; grouped-query attention,
Ainslie et al. 2023; SwiGLU, Shazeer 2020.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.model.config import VOCAB_EMBED, ModelConfig
from jaxpar.model.parallel import Parallel

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


def rotary_angles(seq_len: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of position x frequency, float32 [S, H/2] each."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSNH: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + H/2) of every head by their position's angles."""
    cos, sin = (t[None, :, None, :] for t in rotary)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSNH.dtype)


def causal_attention(q_BSNH: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
    """softmax(q·k / √H) v over the past, softmax in float32: [B, S, N, H] in q's dtype.

    N/K consecutive query heads share a key/value head. (`jax.nn.dot_product_attention` is not
    used: with bfloat16 on a CPU it cannot be compiled under strict dtype promotion.)
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    score_BKGST = jnp.einsum(
        "bskgh,btkh->bkgst", q_BSKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    is_past_ST = jnp.tril(jnp.ones((S, S), jnp.bool_))
    score_BKGST = jnp.where(is_past_ST, score_BKGST / H**0.5, -jnp.inf)
    weight_BKGST = jax.nn.softmax(score_BKGST, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weight_BKGST, v_BSKH).reshape(B, S, N, H)


class Attention(nnx.Module):
    """Causal grouped-query attention on this device's heads: [B, S', D] -> [B, S', D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        self.query = weight((D, N, H), ("embed", "heads", "head"), rngs)
        self.key = weight((D, K, H), ("embed", "kv_heads", "head"), rngs)
        self.value = weight((D, K, H), ("embed", "kv_heads", "head"), rngs)
        std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.output = weight((N, H, D), ("heads", "head", "embed"), rngs, std)

    def __call__(self, x_BSD: Array, rotary: tuple[Array, Array], parallel: Parallel) -> Array:
        h_BSD = parallel.enter(x_BSD)
        wq_DNH = self.query[...].astype(h_BSD.dtype)
        wk_DKH = parallel.kv_weight(self.key[...]).astype(h_BSD.dtype)
        wv_DKH = parallel.kv_weight(self.value[...]).astype(h_BSD.dtype)
        q_BSNH = rotate(jnp.einsum("bsd,dnh->bsnh", h_BSD, wq_DNH), rotary)
        k_BSKH = rotate(jnp.einsum("bsd,dkh->bskh", h_BSD, wk_DKH), rotary)
        v_BSKH = jnp.einsum("bsd,dkh->bskh", h_BSD, wv_DKH)
        o_BSNH = causal_attention(q_BSNH, k_BSKH, v_BSKH)
        wo_NHD = self.output[...].astype(h_BSD.dtype)
        return parallel.leave(jnp.einsum("bsnh,nhd->bsd", o_BSNH, wo_NHD))


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
        h_BSD = parallel.enter(x_BSD)
        up_BSF = jnp.einsum("bsd,df->bsf", h_BSD, self.up[...].astype(h_BSD.dtype))
        if self.is_gated:
            gate_BSF = jnp.einsum("bsd,df->bsf", h_BSD, self.gate[...].astype(h_BSD.dtype))
            hidden_BSF = jax.nn.silu(gate_BSF) * up_BSF
        else:
            hidden_BSF = jax.nn.gelu(up_BSF)
        down_FD = self.down[...].astype(h_BSD.dtype)
        return parallel.leave(jnp.einsum("bsf,fd->bsd", hidden_BSF, down_FD))


class Block(nnx.Module):
    """Pre-norm attention and MLP around the residual stream: [B, S', D] -> [B, S', D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BSD: Array, rotary: tuple[Array, Array], parallel: Parallel) -> Array:
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary, parallel)
        with jax.named_scope("mlp"):
            return x_BSD + self.mlp(self.mlp_norm(x_BSD), parallel)


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
