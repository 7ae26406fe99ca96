"""Attention of some queries over some keys, and how such pieces make up the whole.

softmax over all keys is not known before all keys were seen. So a piece returns its own normalised
output together with the logarithm of its softmax's denominator, which is all that is needed to
weigh it against other pieces: the online softmax. The backward of a piece needs no other piece,
only the whole's denominator. Keys are taken a tile at a time, so that scores take memory in
proportion to the queries, never to their square.

Dims: B batch, S queries, T key positions, N query heads, K key/value heads, G = N/K, H head dim.
Sources: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention", algorithms 1 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import vary
from jaxpar.compat import varying_axes

TILE_LEN = 512
"""Most keys whose scores are held at a time; a smaller divisor of T where this is none."""


class Places(NamedTuple):
    """Where tokens are: what decides which of them a query sees."""

    position_BS: Array
    """int32, in the whole sequence; the leading dim may be 1 where it is not batched."""
    document_BS: Array | None
    """int32, None where a row is one document."""


class Piece(NamedTuple):
    """Attention over some of the keys. A row that saw none has output 0 and lse -infinity."""

    o_BSNH: Array
    """float32, normalised over these keys alone."""
    lse_BSN: Array
    """float32: log of the sum of exp(score) over these keys."""


def attend(q_BSNH: Array, k_BTKH: Array, v_BTKH: Array, queries: Places, keys: Places) -> Piece:
    """Each query over those keys that are not after it and of its document."""

    def one_tile(piece: Piece, tile: tuple[Array, Array, Places]) -> tuple[Piece, None]:
        k, v, places = tile
        score_BKGST = _scores(q_BSNH, k, queries, places)
        max_BKGS = _finite(score_BKGST.max(axis=-1))
        p_BKGST = jnp.exp(score_BKGST - max_BKGS[..., None])
        sum_BKGS = p_BKGST.sum(axis=-1)
        o_BKGSH = _matmul("bkgst,btkh->bkgsh", p_BKGST.astype(v.dtype), v)
        o_BKGSH = o_BKGSH / jnp.where(sum_BKGS > 0, sum_BKGS, 1)[..., None]
        o_BSNH = jnp.moveaxis(o_BKGSH, 3, 1).reshape(q_BSNH.shape)
        new = Piece(o_BSNH, _to_rows(max_BKGS + jnp.log(sum_BKGS)))
        return merge(piece, new), None

    zero = jnp.zeros(q_BSNH.shape, jnp.float32)
    nothing = Piece(zero, jnp.full(zero.shape[:3], -jnp.inf, jnp.float32))
    piece, _ = _over_tiles(one_tile, nothing, (k_BTKH, v_BTKH, keys), like=(q_BSNH, k_BTKH))
    return piece


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


class Rows(NamedTuple):
    """What the backward of any piece needs of the whole attention, for each query."""

    lse_BSN: Array
    """float32, over all keys."""
    delta_BSN: Array
    """float32: sum over the head dim of output x gradient."""
    do_BSNH: Array
    """The output's gradient."""

    @classmethod
    def of(cls, o_BSNH: Array, lse_BSN: Array, do_BSNH: Array) -> Rows:
        product_BSNH = o_BSNH.astype(jnp.float32) * do_BSNH.astype(jnp.float32)
        return cls(lse_BSN, product_BSNH.sum(axis=-1), do_BSNH)


def attend_backward(
    q_BSNH: Array, k_BTKH: Array, v_BTKH: Array, queries: Places, keys: Places, rows: Rows
) -> tuple[Array, Array, Array]:
    """This piece's summands of the gradients of q, k and v, float32 in their shapes."""
    B, S, N, H = q_BSNH.shape
    K, dtype = k_BTKH.shape[2], q_BSNH.dtype

    def by_head(x_BSN: Array) -> Array:
        return jnp.moveaxis(x_BSN.reshape(B, S, K, N // K), 1, 3)[..., None]

    q_BSKGH, do_BSKGH = (x.reshape(B, S, K, N // K, H) for x in (q_BSNH, rows.do_BSNH))

    def one_tile(
        dq_BSKGH: Array, tile: tuple[Array, Array, Places]
    ) -> tuple[Array, tuple[Array, Array]]:
        k, v, places = tile
        score_BKGST = _scores(q_BSNH, k, queries, places)
        p_BKGST = jnp.exp(score_BKGST - by_head(_finite(rows.lse_BSN)))
        dv = _matmul("bkgst,bskgh->btkh", p_BKGST.astype(dtype), do_BSKGH)
        dp_BKGST = _matmul("bskgh,btkh->bkgst", do_BSKGH, v)
        dscore_BKGST = p_BKGST * (dp_BKGST - by_head(rows.delta_BSN)) / H**0.5
        dscore_BKGST = dscore_BKGST.astype(dtype)
        dk = _matmul("bkgst,bskgh->btkh", dscore_BKGST, q_BSKGH)
        return dq_BSKGH + _matmul("bkgst,btkh->bskgh", dscore_BKGST, k), (dk, dv)

    zero = jnp.zeros(q_BSKGH.shape, jnp.float32)
    dq, (dk, dv) = _over_tiles(one_tile, zero, (k_BTKH, v_BTKH, keys), like=(q_BSNH, k_BTKH))
    return dq.reshape(q_BSNH.shape), dk, dv


def _over_tiles(
    body: Callable[[Any, Any], tuple[Any, Any]], start: Any, by_key: Any, like: tuple[Array, ...]
) -> tuple[Any, Any]:
    """`body` scanned over tiles of dim 1 of all arrays in `by_key`; what it returns for each key is
    put together along dim 1 again. `start` is made to vary like the arrays of `like`."""
    axes = tuple(frozenset.union(*(varying_axes(x) for x in like)))
    start = jax.tree.map(lambda x: vary(x, axes), start)
    num_keys = jax.tree.leaves(by_key)[0].shape[1]
    tile_len = next(n for n in range(min(TILE_LEN, num_keys), 0, -1) if num_keys % n == 0)
    if tile_len == num_keys:
        return body(start, by_key)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, tile_len, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], num_keys, *x.shape[3:])

    end, for_keys = lax.scan(body, start, jax.tree.map(cut, by_key))
    return end, jax.tree.map(join, for_keys)


def _scores(q_BSNH: Array, k_BTKH: Array, queries: Places, keys: Places) -> Array:
    """float32 [B, K, G, S, T], -infinity where a query does not see a key."""
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    q_BSKGH = q_BSNH.reshape(B, S, K, N // K, H)
    score_BKGST = _matmul("bskgh,btkh->bkgst", q_BSKGH, k_BTKH) / H**0.5
    visible_BST = queries.position_BS[:, :, None] >= keys.position_BS[:, None, :]
    if queries.document_BS is not None and keys.document_BS is not None:
        visible_BST &= queries.document_BS[:, :, None] == keys.document_BS[:, None, :]
    return jnp.where(visible_BST[:, None, None], score_BKGST, -jnp.inf)


def _matmul(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def _finite(x: Array) -> Array:
    """Rows that saw no key have -infinity here, which minus itself would be NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _to_rows(x_BKGS: Array) -> Array:
    B, K, G, S = x_BKGS.shape
    return jnp.moveaxis(x_BKGS, 3, 1).reshape(B, S, K * G)
