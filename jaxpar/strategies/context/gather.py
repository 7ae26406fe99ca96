"""All-gather of keys and values: every device attends to the whole sequence at once.

One exchange instead of n-1 hops, so nothing hides it; in return the attention is a single call,
which any mask fits. The backward gathers again instead of keeping n blocks, and reduce-scatters
the gradients of keys and values: the bytes of a ring, in bursts. Over one rank, as inside Ulysses,
it moves nothing and is attention that keeps no scores.

Source: Llama Team 2024, "The Llama 3 herd of models", §3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_gather, reduce_scatter
from jaxpar.strategies.context.blocks import Places, Rows, attend, attend_backward
from jaxpar.strategies.context.layout import SequenceLayout


@dataclass(frozen=True, kw_only=True)
class Gather:
    """How keys and values are gathered.

    reduce_dtype: in which their gradients are summed.
    keeps_gathered: from the forward to the backward. It costs n blocks of memory, for no longer
        than one layer where the forward is repeated just before.
    """

    layout: SequenceLayout
    reduce_dtype: Any
    keeps_gathered: bool = False

    def whole(self, x_BSKH: Array, *, again: bool = False) -> Array:
        axis = self.layout.rank_axis
        return all_gather(x_BSKH, axis, dim=1, again=again, scope="gather_kv")

    def to_owners(self, dx_BSKH: Array) -> Array:
        if self.layout.num_ranks == 1:
            return dx_BSKH
        dx_BSKH = dx_BSKH.astype(self.reduce_dtype)
        return reduce_scatter(dx_BSKH, self.layout.rank_axis, dim=1, scope="scatter_dkv")

    def places(self, q_BSNH: Array, segments_BS: Array | None) -> tuple[Places, Places]:
        """Of this device's queries, and of all keys."""
        rank = lax.axis_index(self.layout.rank_axis) if self.layout.num_ranks > 1 else 0
        mine = self.layout.part_places(rank, q_BSNH.shape[:2], segments_BS)
        order = jnp.asarray(self.layout.order(q_BSNH.shape[1] * self.layout.num_ranks))
        return mine, Places(order[None], segments_BS)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_attention(
    gather: Gather, q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None
) -> Array:
    """Causal attention of this device's queries over all devices' keys: [B, S/n, N, H].

    Arguments as for `ring_attention`.
    """
    return _forward(gather, q_BSNH, k_BSKH, v_BSKH, segments_BS)[0]


def _forward(
    gather: Gather, q_BSNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BS: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    kv = gather.whole(k_BSKH), gather.whole(v_BSKH)
    piece = attend(q_BSNH, *kv, *gather.places(q_BSNH, segments_BS))
    o_BSNH = piece.o_BSNH.astype(q_BSNH.dtype)
    kept = kv if gather.keeps_gathered else (k_BSKH, v_BSKH)
    return o_BSNH, (q_BSNH, *kept, segments_BS, o_BSNH, piece.lse_BSN)


def _backward(gather: Gather, saved: tuple[Any, ...], do_BSNH: Array) -> tuple[Any, ...]:
    q_BSNH, k, v, segments_BS, o_BSNH, lse_BSN = saved
    dtype = k.dtype
    if not gather.keeps_gathered:
        k, v = (gather.whole(x, again=True) for x in (k, v))
    places = gather.places(q_BSNH, segments_BS)
    rows = Rows.of(o_BSNH, lse_BSN, do_BSNH)
    dq, dk, dv = attend_backward(q_BSNH, k, v, *places, rows)
    dk, dv = gather.to_owners(dk), gather.to_owners(dv)
    return dq.astype(q_BSNH.dtype), dk.astype(dtype), dv.astype(dtype), None


gathered_attention.defvjp(_forward, _backward)
