"""Ring attention: queries stay, keys and values go round once, at most two blocks are ever held.

In hop r device i has the block of device i-r, sends it on and attends to it meanwhile. The n-1st
block is the last one it needs, so nobody sends after that. The backward sends k and v round again
instead of keeping n blocks, and beside them the gradients of whatever block is visiting, to which
each host adds. These leave with the first visitor and are home after n-1 hops too; the part of a
block's gradient from its own device never travels.

The hops are a scan whose body sends the next block while it attends to this one, so a device holds
two blocks whatever n is. Sends are outside all conditions: every device sends in every hop.

Sources: Liu et al. 2023, "Ring attention with blockwise transformers", §3; for the zigzag blocks
Megatron-LM's context parallelism (Llama Team 2024, §3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import ring_shift
from jaxpar.strategies.context.blocks import (
    Piece,
    attend,
    attend_backward,
    merge,
    only_if,
    row_delta,
)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How a ring runs.

    reduce_dtype: in which gradients of keys and values travel and add up.
    keeps_first_visitor: from the forward to the backward, which then need not fetch it. It costs
        a second block of memory, or nothing where the forward is repeated just before.
    """

    axis: str
    is_zigzag: bool
    reduce_dtype: Any
    keeps_first_visitor: bool = False

    def send(self, x: Any, scope: str) -> Any:
        return jax.tree.map(lambda one: ring_shift(one, self.axis, scope=scope), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    ring: Ring, q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None
) -> Array:
    """Causal attention of this device's queries over all devices' keys: [B, S/n, N, H].

    q [B, S/n, N, H], k and v [B, S/n, K, H]; `segments_BS` has the documents of the whole sequence
    [B, S], as it is laid out over the devices. The axis has at least two devices.
    """
    return _forward(ring, q_BSNH, k_BSKH, v_BSKH, segments_BS)[0]


def _forward(
    ring: Ring, q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    n = lax.axis_size(ring.axis)

    def visit(piece: Piece, kv: tuple[Array, Array], hop: Array | int) -> Piece:
        meeting = _meeting(ring, hop, q_BSNH.shape[1], segments_BS)
        k, v = (meeting.keys(x) for x in kv)
        return meeting.add(piece, attend(meeting.queries(q_BSNH), k, v, meeting.visible_BST))

    def step(carry: tuple[Piece, Any], hop: Array) -> tuple[tuple[Piece, Any], None]:
        piece, kv = carry
        next_kv = ring.send(kv, "ring/kv")
        return (visit(piece, kv, hop), next_kv), None

    first = kv = ring.send((k_BSKH, v_BSKH), "ring/kv")
    piece = attend(q_BSNH, k_BSKH, v_BSKH, _own_visible(ring, q_BSNH.shape[1], segments_BS))
    if n > 2:
        (piece, kv), _ = lax.scan(step, (piece, kv), jnp.arange(1, n - 1))
    piece = visit(piece, kv, n - 1)
    o_BSNH = piece.o_BSNH.astype(q_BSNH.dtype)
    saved = q_BSNH, k_BSKH, v_BSKH, segments_BS, o_BSNH, piece.lse_BSN
    return o_BSNH, (*saved, first if ring.keeps_first_visitor else None)


def _backward(ring: Ring, saved: tuple[Any, ...], do_BSNH: Array) -> tuple[Any, ...]:
    q_BSNH, k_BSKH, v_BSKH, segments_BS, o_BSNH, lse_BSN, first = saved
    n = lax.axis_size(ring.axis)
    delta_BSN = row_delta(o_BSNH, do_BSNH)

    def visit(kv: tuple[Array, Array], hop: Array | int) -> tuple[Array, Array, Array]:
        meeting = _meeting(ring, hop, q_BSNH.shape[1], segments_BS)
        dq, dk, dv = attend_backward(
            meeting.queries(q_BSNH),
            meeting.keys(kv[0]),
            meeting.keys(kv[1]),
            meeting.visible_BST,
            meeting.queries(lse_BSN),
            meeting.queries(delta_BSN),
            meeting.queries(do_BSNH),
        )
        return meeting.sum_queries(dq), meeting.sum_keys(dk), meeting.sum_keys(dv)

    def step(carry: tuple[Any, ...], hop: Array | int, is_last: bool = False) -> tuple[Any, None]:
        dq, dkv, kv = carry
        next_kv = kv if is_last else ring.send(kv, "ring/kv")
        arrived = ring.send(dkv, "ring/dkv")
        more_dq, *more_dkv = visit(kv, hop)
        dkv = tuple(a + more.astype(a.dtype) for a, more in zip(arrived, more_dkv, strict=True))
        return (dq + more_dq, dkv, next_kv), None

    kv = first or ring.send((k_BSKH, v_BSKH), "ring/kv")
    own = _own_visible(ring, q_BSNH.shape[1], segments_BS)
    dq, *own_dkv = attend_backward(q_BSNH, k_BSKH, v_BSKH, own, lse_BSN, delta_BSN, do_BSNH)

    # The first visitor's gradients begin here, so they have not travelled yet.
    next_kv = ring.send(kv, "ring/kv") if n > 2 else kv
    more_dq, *visitor_dkv = visit(kv, 1)
    dkv = tuple(x.astype(ring.reduce_dtype) for x in visitor_dkv)
    carry = dq + more_dq, dkv, next_kv
    if n > 3:
        carry, _ = lax.scan(step, carry, jnp.arange(2, n - 1))
    if n > 2:
        carry, _ = step(carry, n - 1, is_last=True)
    dq, dkv, _ = carry
    dkv = ring.send(dkv, "ring/dkv")
    dk, dv = (own + x.astype(own.dtype) for own, x in zip(own_dkv, dkv, strict=True))
    return dq.astype(q_BSNH.dtype), dk.astype(k_BSKH.dtype), dv.astype(v_BSKH.dtype), None


ring_attention.defvjp(_forward, _backward)


class _Meeting(NamedTuple):
    """What this device's queries do with the visiting block of another device.

    contiguous: all or nothing, depending on who holds the earlier part.
    zigzag: the queries are an early and a late chunk, and so are the keys. Late queries see the
        visitor's early keys, always; early queries see them too if the visitor is the earlier rank,
        and otherwise late queries see the late keys as well. Two whole chunks out of four on every
        device in every hop. They are computed as one batch: queries late | early or late, keys
        early | early or late.
    """

    is_zigzag: bool
    is_earlier: Array
    visible_BST: Array | None

    def queries(self, x: Array) -> Array:
        """[B, S/n, ..] -> [2B, S/2n, ..] with zigzag."""
        if not self.is_zigzag:
            return x
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([late, jnp.where(self.is_earlier, early, late)])

    def keys(self, x: Array) -> Array:
        """[B, S/n, ..] -> [2B, S/2n, ..] with zigzag."""
        if not self.is_zigzag:
            return x
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([early, jnp.where(self.is_earlier, early, late)])

    def sum_queries(self, x: Array) -> Array:
        """The transpose of `queries`."""
        if not self.is_zigzag:
            return x
        one, two = jnp.split(x, 2)
        early, late = jnp.where(self.is_earlier, two, 0), jnp.where(self.is_earlier, 0, two)
        return jnp.concatenate([early, one + late], axis=1)

    def sum_keys(self, x: Array) -> Array:
        """The transpose of `keys`."""
        if not self.is_zigzag:
            return x
        one, two = jnp.split(x, 2)
        early, late = jnp.where(self.is_earlier, two, 0), jnp.where(self.is_earlier, 0, two)
        return jnp.concatenate([one + early, late], axis=1)

    def add(self, piece: Piece, new: Piece) -> Piece:
        """The piece of all local queries, with what this meeting adds to it."""
        if not self.is_zigzag:
            return merge(piece, new)
        one, two = (Piece(*halves) for halves in zip(*(jnp.split(x, 2) for x in new), strict=True))
        early, late = (
            Piece(*halves) for halves in zip(*(jnp.split(x, 2, 1) for x in piece), strict=True)
        )
        early = merge(early, only_if(self.is_earlier, two))
        late = merge(merge(late, one), only_if(~self.is_earlier, two))
        return Piece(*(jnp.concatenate(x, axis=1) for x in zip(early, late, strict=True)))


def _meeting(ring: Ring, hop: Array | int, part_len: int, segments_BS: Array | None) -> _Meeting:
    rank, n = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    source = (rank - hop) % n
    meeting = _Meeting(ring.is_zigzag, source < rank, None)
    visible = None if ring.is_zigzag else meeting.is_earlier[None, None, None]
    if segments_BS is not None:
        query_BS, key_BT = (_part(segments_BS, r, part_len) for r in (rank, source))
        same = meeting.queries(query_BS)[:, :, None] == meeting.keys(key_BT)[:, None, :]
        visible = same if visible is None else same & visible
    return meeting._replace(visible_BST=visible)


def _own_visible(ring: Ring, part_len: int, segments_BS: Array | None) -> Array:
    """Both layouts keep a device's tokens in order, so its own past is what it is on one device."""
    visible = jnp.tril(jnp.ones((1, part_len, part_len), jnp.bool_))
    if segments_BS is None:
        return visible
    mine = _part(segments_BS, lax.axis_index(ring.axis), part_len)
    return visible & (mine[:, :, None] == mine[:, None, :])


def _part(segments_BS: Array, rank: Array, part_len: int) -> Array:
    return lax.dynamic_slice_in_dim(segments_BS, rank * part_len, part_len, axis=1)
