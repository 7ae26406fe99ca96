"""Attention of some queries over some keys, and how such pieces make up the whole.

softmax over all keys is not known before all keys were seen. So a piece returns its own normalised
output together with the logarithm of its softmax's denominator, which is all that is needed to
weigh it against other pieces: the online softmax. The backward of a piece needs no other piece,
only the whole's denominator.

Dims: B batch, S queries, T keys, N query heads, K key/value heads, G = N/K, H head dim.
Sources: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention", algorithms 1 and 4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Piece(NamedTuple):
    """Attention over some of the keys. A row that saw none has output 0 and lse -infinity."""

    o_BSNH: Array
    """float32, normalised over these keys alone."""
    lse_BSN: Array
    """float32: log of the sum of exp(score) over these keys."""


def attend(q_BSNH: Array, k_BTKH: Array, v_BTKH: Array, visible_BST: Array | None) -> Piece:
    """Queries over keys; bool `visible_BST` (or [1, S, T]) tells who sees whom, None: all do."""
    score_BKGST = _scores(q_BSNH, k_BTKH, visible_BST)
    max_BKGS = _finite(score_BKGST.max(axis=-1))
    p_BKGST = jnp.exp(score_BKGST - max_BKGS[..., None])
    sum_BKGS = p_BKGST.sum(axis=-1)
    o_BKGSH = jnp.einsum(
        "bkgst,btkh->bkgsh", p_BKGST.astype(v_BTKH.dtype), v_BTKH,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    o_BKGSH = o_BKGSH / jnp.where(sum_BKGS > 0, sum_BKGS, 1)[..., None]
    o_BSNH = jnp.moveaxis(o_BKGSH, 3, 1).reshape(q_BSNH.shape)
    return Piece(o_BSNH, _to_rows(max_BKGS + jnp.log(sum_BKGS)))


def merge(one: Piece, other: Piece) -> Piece:
    """Both pieces' keys together, for the same queries."""
    max_BSN = _finite(jnp.maximum(one.lse_BSN, other.lse_BSN))
    weights = jnp.exp(one.lse_BSN - max_BSN), jnp.exp(other.lse_BSN - max_BSN)
    sum_BSN = weights[0] + weights[1]
    total = weights[0][..., None] * one.o_BSNH + weights[1][..., None] * other.o_BSNH
    o_BSNH = total / jnp.where(sum_BSN > 0, sum_BSN, 1)[..., None]
    return Piece(o_BSNH, max_BSN + jnp.log(sum_BSN))


def only_if(condition: Array, piece: Piece) -> Piece:
    """The piece, or one that saw no key."""
    return piece._replace(lse_BSN=jnp.where(condition, piece.lse_BSN, -jnp.inf))


def attend_backward(
    q_BSNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    visible_BST: Array | None,
    lse_BSN: Array,
    delta_BSN: Array,
    do_BSNH: Array,
) -> tuple[Array, Array, Array]:
    """This piece's summands of the gradients of q, k and v, float32 in their shapes.

    `lse_BSN` is of all keys, `delta_BSN` the row sums of gradient x output, `do_BSNH` the gradient.
    """
    B, S, N, H = q_BSNH.shape
    K, dtype = k_BTKH.shape[2], q_BSNH.dtype

    def by_head(x_BSN: Array) -> Array:
        return jnp.moveaxis(x_BSN.reshape(B, S, K, N // K), 1, 3)[..., None]

    q_BSKGH, do_BSKGH = (x.reshape(B, S, K, N // K, H) for x in (q_BSNH, do_BSNH))
    score_BKGST = _scores(q_BSNH, k_BTKH, visible_BST)
    p_BKGST = jnp.exp(score_BKGST - by_head(_finite(lse_BSN)))
    dv_BTKH = _matmul("bkgst,bskgh->btkh", p_BKGST.astype(dtype), do_BSKGH)
    dp_BKGST = _matmul("bskgh,btkh->bkgst", do_BSKGH, v_BTKH)
    dscore_BKGST = (p_BKGST * (dp_BKGST - by_head(delta_BSN)) / H**0.5).astype(dtype)
    dq_BSKGH = _matmul("bkgst,btkh->bskgh", dscore_BKGST, k_BTKH)
    dk_BTKH = _matmul("bkgst,bskgh->btkh", dscore_BKGST, q_BSKGH)
    return dq_BSKGH.reshape(q_BSNH.shape), dk_BTKH, dv_BTKH


def row_delta(o_BSNH: Array, do_BSNH: Array) -> Array:
    """Sum over the head dim of output x gradient, float32 [B, S, N]."""
    return jnp.sum(o_BSNH.astype(jnp.float32) * do_BSNH.astype(jnp.float32), axis=-1)


def _scores(q_BSNH: Array, k_BTKH: Array, visible_BST: Array | None) -> Array:
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    score_BKGST = _matmul("bskgh,btkh->bkgst", q_BSKGH, k_BTKH) / H**0.5
    if visible_BST is None:
        return score_BKGST
    return jnp.where(visible_BST[:, None, None], score_BKGST, -jnp.inf)


def _matmul(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def _finite(x: Array) -> Array:
    """Rows that saw no key have -infinity here, which minus itself would be NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _to_rows(x_BKGS: Array) -> Array:
    B, K, G, S = x_BKGS.shape
    return jnp.moveaxis(x_BKGS, 3, 1).reshape(B, S, K * G)
