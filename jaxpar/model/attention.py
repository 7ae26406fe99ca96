"""Causal attention and rotary positions, as one device computes them.

Dims: B batch, S query positions, T key positions, N query heads, K key/value heads, G = N/K, H head
dim. Sources: RoPE, Su et al. 2021 §3.2; grouped-query attention, Ainslie et al. 2023.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def rotary_angles(position_S: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of position x frequency: int32 [S] -> float32 [S, H/2] each.

    Positions may be [B, S], where rows are at different places of their sequences.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position_S.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSNH: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + H/2) of every head by their position's angles."""
    cos, sin = (t[..., None, :] for t in rotary)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSNH.dtype)


def causal_attention(
    q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None = None
) -> Array:
    """softmax(q·k / √H) v over the past, softmax in float32: [B, S, N, H] in q's dtype.

    With `segments_BS` a token sees the past tokens of its own document only. N/K consecutive
    query heads share a key/value head. (`jax.nn.dot_product_attention` is not
    used: with bfloat16 on a CPU it cannot be compiled under strict dtype promotion.)
    """
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    score_BKGST = jnp.einsum(
        "bskgh,btkh->bkgst", q_BSKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    is_past_ST = jnp.tril(jnp.ones((S, S), jnp.bool_))
    visible = is_past_ST
    if segments_BS is not None:
        same_BST = segments_BS[:, :, None] == segments_BS[:, None, :]
        visible = (is_past_ST & same_BST)[:, None, None]
    score_BKGST = jnp.where(visible, score_BKGST / H**0.5, -jnp.inf)
    weight_BKGST = jax.nn.softmax(score_BKGST, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weight_BKGST, v_BSKH).reshape(B, S, N, H)
