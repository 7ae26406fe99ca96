"""Ulysses: for the length of an attention, split heads instead of the sequence.

Each device trades its part of the sequence with all heads for the whole sequence with a part of
the heads, attends as one device does, and trades back: four all-to-alls forward, four backward.
Their bytes per device shrink with n, unlike a ring's; but n cannot exceed the number of heads.

Fewer key/value heads than devices are sent once to each device whose queries use them, which is
what those need in any case.

Sources: Jacobs et al. 2023, "DeepSpeed Ulysses", §3; Fang and Zhao 2024, "USP: a unified sequence
parallelism approach", for a ring around it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_to_all, real_axes

Attention = Callable[[Array, Array, Array, Array | None], Array]


def exchanging_heads(axis: str, attention: Attention) -> Attention:
    """`attention` on n times the positions and an n-th of the heads.

    The result takes q [B, S/n, N, H], k and v [B, S/n, K, H] and returns [B, S/n, N, H]; document
    ids go through as they are. N is a multiple of n, and K of n or n of K.
    """

    def exchanged(q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None) -> Array:
        if not real_axes(axis):
            return attention(q_BSNH, k_BSKH, v_BSKH, segments_BS)
        q, k, v = (split_heads(x, axis) for x in (q_BSNH, k_BSKH, v_BSKH))
        return join_heads(attention(q, k, v, segments_BS), axis)

    return exchanged


def split_heads(x_BSNH: Array, axis: str) -> Array:
    """[B, S/n, N, H] -> [B, S, max(N/n, 1), H]; the backward goes the other way."""
    n, num_heads = lax.axis_size(axis), x_BSNH.shape[2]
    if num_heads < n:
        x_BSNH = jnp.repeat(x_BSNH, n // num_heads, axis=2)
    return all_to_all(x_BSNH, axis, split_dim=2, concat_dim=1, scope="split_heads")


def join_heads(x_BSNH: Array, axis: str) -> Array:
    """[B, S, N/n, H] -> [B, S/n, N, H]; the backward goes the other way."""
    return all_to_all(x_BSNH, axis, split_dim=1, concat_dim=2, scope="join_heads")
