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
    Places,
    Rows,
    attend,
    attend_backward,
    merge,
    only_if,
)
from jaxpar.strategies.context.layout import SequenceLayout


class Meeting(NamedTuple):
    """This device's queries and the visiting block: who is where, and what attends to what.

    Here all queries to all keys, of which the causal mask leaves all or nothing.
    """

    mine: Places
    theirs: Places

    def queries(self, x: Any) -> Any:
        return x

    def keys(self, x: Any) -> Any:
        return x

    def sum_queries(self, x: Array) -> Array:
        return x

    def sum_keys(self, x: Array) -> Array:
        return x

    def add(self, piece: Piece, new: Piece) -> Piece:
        return merge(piece, new)


class ZigzagMeeting(NamedTuple):
    """The same where both have an early and a late chunk, for devices other than this one.

    Late queries see the visitor's early keys, always. Early queries see them too if the visitor is
    the earlier rank, and otherwise late queries see the late keys as well: two whole chunks out of
    four, on every device in every hop. They are computed as one batch of twice the size: queries
    late | early or late, keys early | early or late.
    """

    mine: Places
    theirs: Places
    is_earlier: Array

    def queries(self, x: Any) -> Any:
        """[B, S/n, ..] -> [2B, S/2n, ..], leaf by leaf."""
        return jax.tree.map(lambda leaf: self._two(leaf, first=1), x)

    def keys(self, x: Any) -> Any:
        """[B, S/n, ..] -> [2B, S/2n, ..], leaf by leaf."""
        return jax.tree.map(lambda leaf: self._two(leaf, first=0), x)

    def sum_queries(self, x: Array) -> Array:
        """The transpose of `queries`: [2B, S/2n, ..] -> [B, S/n, ..]."""
        one, early, late = self._parts(x)
        return jnp.concatenate([early, one + late], axis=1)

    def sum_keys(self, x: Array) -> Array:
        """The transpose of `keys`."""
        one, early, late = self._parts(x)
        return jnp.concatenate([one + early, late], axis=1)

    def add(self, piece: Piece, new: Piece) -> Piece:
        """The piece of all local queries, with what this meeting adds to it."""
        one, two = (Piece(*halves) for halves in zip(*(jnp.split(x, 2) for x in new), strict=True))
        early, late = (
            Piece(*halves) for halves in zip(*(jnp.split(x, 2, 1) for x in piece), strict=True)
        )
        early = merge(early, only_if(self.is_earlier, two))
        late = merge(merge(late, one), only_if(~self.is_earlier, two))
        return Piece(*(jnp.concatenate(x, axis=1) for x in zip(early, late, strict=True)))

    def _two(self, x: Array, first: int) -> Array:
        chunks = jnp.split(x, 2, axis=1)
        chosen = jnp.where(self.is_earlier, chunks[0], chunks[1])
        return jnp.concatenate([chunks[first], chosen])

    def _parts(self, x: Array) -> tuple[Array, Array, Array]:
        one, two = jnp.split(x, 2)
        return one, jnp.where(self.is_earlier, two, 0), jnp.where(self.is_earlier, 0, two)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How a ring runs.

    reduce_dtype: in which gradients of keys and values travel and add up.
    keeps_first_visitor: from the forward to the backward, which then need not fetch it. It costs
        a second block of memory, or nothing where the forward is repeated just before.
    """

    axis: str
    layout: SequenceLayout
    reduce_dtype: Any
    keeps_first_visitor: bool = False

    def send(self, x: Any, scope: str, again: bool = False) -> Any:
        return jax.tree.map(lambda one: ring_shift(one, self.axis, scope=scope, again=again), x)

    def meet(
        self, hop: Array | int, q_BSNH: Array, segments_BS: Array | None
    ) -> Meeting | ZigzagMeeting:
        """What happens in this hop: see `Meeting`. Hop 0 is a device with itself."""
        rank, n = lax.axis_index(self.axis), lax.axis_size(self.axis)
        source = (rank - hop) % n
        mine, theirs = (
            self.layout.part_places(r, q_BSNH.shape[:2], segments_BS) for r in (rank, source)
        )
        if self.layout.name == "zigzag":
            return ZigzagMeeting(mine, theirs, source < rank)
        return Meeting(mine, theirs)


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
        meeting = ring.meet(hop, q_BSNH, segments_BS)
        queries, keys = meeting.queries(meeting.mine), meeting.keys(meeting.theirs)
        k, v = meeting.keys(kv)
        new = attend(meeting.queries(q_BSNH), k, v, queries, keys)
        return meeting.add(piece, new)

    def step(carry: tuple[Piece, Any], hop: Array) -> tuple[tuple[Piece, Any], None]:
        piece, kv = carry
        next_kv = ring.send(kv, "ring/kv")
        return (visit(piece, kv, hop), next_kv), None

    first = kv = ring.send((k_BSKH, v_BSKH), "ring/kv")
    own = ring.meet(0, q_BSNH, segments_BS)
    piece = attend(q_BSNH, k_BSKH, v_BSKH, own.mine, own.theirs)
    if n > 2:
        (piece, kv), _ = lax.scan(step, (piece, kv), jnp.arange(1, n - 1))
    piece = visit(piece, kv, n - 1)
    o_BSNH = piece.o_BSNH.astype(q_BSNH.dtype)
    saved = q_BSNH, k_BSKH, v_BSKH, segments_BS, o_BSNH, piece.lse_BSN
    return o_BSNH, (*saved, first if ring.keeps_first_visitor else None)


def _backward(ring: Ring, saved: tuple[Any, ...], do_BSNH: Array) -> tuple[Any, ...]:
    q_BSNH, k_BSKH, v_BSKH, segments_BS, o_BSNH, lse_BSN, first = saved
    n = lax.axis_size(ring.axis)
    rows = Rows.of(o_BSNH, lse_BSN, do_BSNH)

    def visit(kv: tuple[Array, Array], hop: Array | int) -> tuple[Array, Array, Array]:
        meeting = ring.meet(hop, q_BSNH, segments_BS)
        queries, keys = meeting.queries(meeting.mine), meeting.keys(meeting.theirs)
        k, v = meeting.keys(kv)
        dq, dk, dv = attend_backward(
            meeting.queries(q_BSNH), k, v, queries, keys, meeting.queries(rows)
        )
        return meeting.sum_queries(dq), meeting.sum_keys(dk), meeting.sum_keys(dv)

    def step(carry: tuple[Any, ...], hop: Array | int, is_last: bool = False) -> tuple[Any, None]:
        dq, dkv, kv = carry
        next_kv = kv if is_last else ring.send(kv, "ring/kv", again=True)
        arrived = ring.send(dkv, "ring/dkv")
        more_dq, *more_dkv = visit(kv, hop)
        dkv = tuple(a + more.astype(a.dtype) for a, more in zip(arrived, more_dkv, strict=True))
        return (dq + more_dq, dkv, next_kv), None

    kv = first or ring.send((k_BSKH, v_BSKH), "ring/kv", again=True)
    own = ring.meet(0, q_BSNH, segments_BS)
    dq, *own_dkv = attend_backward(q_BSNH, k_BSKH, v_BSKH, own.mine, own.theirs, rows)

    # The first visitor's gradients begin here, so they have not travelled yet.
    next_kv = ring.send(kv, "ring/kv", again=True) if n > 2 else kv
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
