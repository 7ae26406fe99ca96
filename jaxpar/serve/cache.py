"""The paged cache of keys and values on devices: where tokens lie, and attention to them.

What is split    layers over `pipe`, blocks over the batch axes (each part of the batch has blocks
                 of its own), the tokens of every block over `context`, heads over `tensor`.
Why              a sequence takes blocks as it grows, wherever they are free, so that memory is
                 held by tokens that are there and not by those that might come.

A block has `block_len` tokens. With n devices on `context`, device r holds the r-th n-th of every
block, so that each holds as much of every sequence, however long, and block tables are the same
for all. A row of a step brings T new tokens; their keys and values are written to their places
first, then queries attend to everything up to their own position.

over `context`   decode: every device has the query and attends to its part of the sequence; the
                 pieces are put together by the logarithms of their sums (a maximum and a sum).
                 prefill: a device has the queries of those tokens that it holds the keys of, and
                 the keys of the row's blocks go round, as in ring attention.

Dims: B rows, T new tokens of a row, M columns of a block table, Q tokens of a block on a device,
N query heads, K key/value heads, H head dim. Shapes are per shard.

Sources: Kwon et al. 2023 (PagedAttention) §4; Dao et al. 2023 (Flash-Decoding) for the pieces;
Liu et al. 2023 (ring attention); Yang et al. 2024, "Context parallelism for scalable million-token
inference", §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxpar.collectives import all_reduce, all_reduce_max, ring_shift, vary
from jaxpar.compat import varying_axes
from jaxpar.model.config import ModelConfig
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.strategies.context.blocks import Piece, Places, attend, merge
from jaxpar.strategies.plan import BATCH_AXES

AXIS = "context"


class KV(NamedTuple):
    """Keys (rotated) and values of a stack of layers: [layers, blocks, Q, K, H] each.

    In `stored_dtype`: bfloat16 numbers are kept as their bits.
    """

    k: Array
    v: Array


Cache = dict[str, KV]
"""By the names of the model's stacks: "layers", and "dense_layers" where there are any."""


class Rows(NamedTuple):
    """What one step works on: global [rows, ..], NumPy arrays or whatever JAX takes.

    tokens: int32 [rows, T], of each row the next T tokens of its sequence, any number beyond.
    start: int32 [rows], the position of the first of them.
    num_tokens: int32 [rows], how many there are, from 0 (an idle row) to T.
    table: int32 [rows, M], the row's blocks in order, numbered within its part of the batch.
    seed, temperature, top_k, top_p: uint32, float32, int32, float32 [rows]; see sampling.py.

    Each part of the batch has an equal share of the rows, consecutive ones. Rows of one step may
    belong to one sequence, in the order of their positions.
    """

    tokens: Array
    start: Array
    num_tokens: Array
    table: Array
    seed: Array
    temperature: Array
    top_k: Array
    top_p: Array


def idle_rows(plan: ServePlan, kind: Kind, width: int | None = None) -> Rows:
    """Rows of a step of which none has a token, NumPy arrays to be filled in.

    width: columns of the block tables, one of `plan.widths`; None for those of any sequence.
    """
    num = plan.num_rows(kind)

    def zeros(*shape: int, dtype: Any = np.int32) -> Any:
        return np.zeros((num, *shape), dtype)

    return Rows(
        tokens=zeros(plan.row_len(kind)),
        start=zeros(),
        num_tokens=zeros(),
        table=zeros(width or plan.blocks_per_sequence),
        seed=zeros(dtype=np.uint32),
        temperature=zeros(dtype=np.float32),
        top_k=zeros(),
        top_p=zeros(dtype=np.float32) + np.float32(1),
    )


def narrowed(rows: Rows, plan: ServePlan) -> Rows:
    """The same with block tables of the fewest columns that the plan has for their sequences."""
    length = int(np.max(np.asarray(rows.start) + np.asarray(rows.num_tokens)))
    width = next(w for w in plan.widths if w * plan.block_len >= length)
    return rows._replace(table=rows.table[:, :width])


# --- sizes and specs -------------------------------------------------------------------------


def stored_dtype(plan: ServePlan) -> jnp.dtype:
    """Of a cache's arrays. bfloat16 as uint16, which a CPU can write in place; of bfloat16 it would
    turn the whole cache into float32 and back, in every layer of every step."""
    return jnp.dtype("uint16" if plan.compute_dtype == "bfloat16" else plan.compute_dtype)


def cache_shapes(config: ModelConfig, plan: ServePlan) -> dict[str, tuple[int, ...]]:
    """The global shape of keys, and of values, of each stack."""
    assert plan.num_blocks is not None
    rest = plan.num_blocks, plan.block_len, plan.num_kv_heads(config), config.head_dim
    num_staged = config.num_layers - config.num_dense_layers
    layers = {"layers": plan.training.num_local_layers(num_staged) * plan.size("pipe")}
    if config.num_dense_layers:
        layers["dense_layers"] = config.num_dense_layers
    return {name: (num, *rest) for name, num in layers.items()}


def cache_spec(plan: ServePlan, stack: str) -> PartitionSpec:
    """Of keys and of values: dense layers are whole on every stage, as their weights are."""

    def split(axis: str) -> str | None:
        return axis if plan.size(axis) > 1 else None

    pipe = split("pipe") if stack == "layers" else None
    return PartitionSpec(
        pipe, plan.in_mesh_order(BATCH_AXES) or None, split(AXIS), split("tensor"), None
    )


# --- where a step's tokens are ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the rows' tokens lie in the cache of this device; made inside `shard_map`.

    position_BT: of this device's new tokens, int32.
    is_valid_BT: whether there is a token at all.
    block_BT, offset_BT: where its key and value go; the block is past the last one where they are
        no business of this device, or of nobody.
    table_BM: the rows' blocks. length_B: tokens of the sequence once these are written.
    """

    kind: Kind
    block_len: int
    position_BT: Array
    is_valid_BT: Array
    block_BT: Array
    offset_BT: Array
    table_BM: Array
    length_B: Array

    @classmethod
    def of(cls, rows: Rows, kind: Kind, plan: ServePlan) -> Placement:
        """Of these rows: all their tokens or, in a prefill over `context`, this device's."""
        n, P, Q = plan.size(AXIS), plan.blocks_per_shard, plan.block_len // plan.size(AXIS)
        index_T = own_tokens(jnp.arange(plan.row_len(kind), dtype=jnp.int32), kind, plan)
        position_BT = rows.start[:, None] + index_T
        is_valid_BT = index_T < rows.num_tokens[:, None]
        column_BT = position_BT // plan.block_len
        block_BT = jnp.take_along_axis(rows.table, column_BT, axis=1, mode="clip")
        offset_BT = position_BT % plan.block_len
        is_mine_BT = is_valid_BT
        if n > 1:
            is_mine_BT = is_mine_BT & (offset_BT // Q == lax.axis_index(AXIS))
            offset_BT = offset_BT % Q
        return cls(
            kind=kind,
            block_len=plan.block_len,
            position_BT=position_BT,
            is_valid_BT=is_valid_BT,
            block_BT=jnp.where(is_mine_BT, block_BT, P),
            offset_BT=offset_BT,
            table_BM=rows.table,
            length_B=rows.start + rows.num_tokens,
        )

    def places(self, rank: Array | int, part_len: int) -> Places:
        """The positions of what device `rank` of `context` holds of the rows' blocks, [1, M·Q]."""
        M = self.table_BM.shape[1]
        column_MQ = jnp.arange(M, dtype=jnp.int32)[:, None] * self.block_len
        position_MQ = column_MQ + rank * part_len + jnp.arange(part_len, dtype=jnp.int32)
        return Places(position_MQ.reshape(1, -1), None)


def own_tokens(x_T: Array, kind: Kind, plan: ServePlan, dim: int = 0) -> Array:
    """Of all tokens of a row, along `dim`, those that this device computes.

    In a prefill over `context` these are the ones whose keys it holds, if the row starts at a
    multiple of `block_len`: its part of each block.
    """
    n = plan.size(AXIS)
    if n == 1 or kind == "decode":
        return x_T
    before, T, after = x_T.shape[:dim], x_T.shape[dim], x_T.shape[dim + 1 :]
    parts = x_T.reshape(*before, T // plan.block_len, n, plan.block_len // n, *after)
    mine = lax.dynamic_index_in_dim(parts, lax.axis_index(AXIS), axis=dim + 1, keepdims=False)
    return mine.reshape(*before, T // n, *after)


# --- attention -------------------------------------------------------------------------------


class CachedAttention:
    """What a layer calls in place of causal attention: writes, then attends. Used for one call.

    `kv` is the cache of the whole stack before the call and, updated, after it: a model's layer
    returns its residual stream alone, and the loop around takes the cache from here.
    """

    def __init__(self, kv: KV, layer: Array, where: Placement) -> None:
        self.kv, self.layer, self.where = kv, layer, where

    def __call__(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segments_BS: Array | None
    ) -> Array:
        """q [B, T, N, H], k and v [B, T, K, H] of the new tokens -> [B, T, N, H] in q's dtype."""
        assert segments_BS is None
        self.kv = write(self.kv, self.layer, k_BTKH, v_BTKH, self.where)
        piece = attend_cached(self.kv, self.layer, q_BTNH, self.where)
        return piece.o_BSNH.astype(q_BTNH.dtype)


def write(kv: KV, layer: Array, k_BTKH: Array, v_BTKH: Array, where: Placement) -> KV:
    """The cache with new keys and values at their places."""

    def put(cache: Array, x_BTKH: Array) -> Array:
        axes = tuple(varying_axes(cache))
        place = tuple(vary(i, axes) for i in (layer, where.block_BT, where.offset_BT))
        if cache.dtype != x_BTKH.dtype:
            x_BTKH = lax.bitcast_convert_type(x_BTKH, cache.dtype)
        return cache.at[place].set(vary(x_BTKH, axes), mode="drop")

    return KV(put(kv.k, k_BTKH), put(kv.v, v_BTKH))


def read(kv: KV, layer: Array, where: Placement, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Keys and values of the rows' blocks on this device: [B, M·Q, K, H] each.

    Places that nobody has written yet hold what others left there. A key there is masked; a value
    has to go, since 0 times infinity would not be 0.
    """
    axes = tuple(varying_axes(kv.k))
    layer, table_BM = vary(layer, axes), vary(where.table_BM, axes)
    k, v = (x.at[layer, table_BM].get(mode="clip") for x in kv)
    if k.dtype != dtype:
        k, v = (lax.bitcast_convert_type(x, dtype) for x in (k, v))
    B, M, Q, K, H = k.shape
    rank = lax.axis_index(AXIS) if where.block_len > Q else 0
    is_written_BS = where.places(rank, Q).position_BS < where.length_B[:, None]
    v_BSKH = jnp.where(is_written_BS[..., None, None], v.reshape(B, M * Q, K, H), 0)
    return k.reshape(B, M * Q, K, H), v_BSKH


def attend_cached(kv: KV, layer: Array, q_BTNH: Array, where: Placement) -> Piece:
    """Attention of the new tokens over all of their sequences' tokens up to themselves."""
    k_BSKH, v_BSKH = read(kv, layer, where, q_BTNH.dtype)
    Q = kv.k.shape[2]
    queries = Places(where.position_BT, None)
    if where.block_len == Q:
        return attend(q_BTNH, k_BSKH, v_BSKH, queries, where.places(0, Q))
    if where.kind == "decode":
        mine = where.places(lax.axis_index(AXIS), Q)
        return put_together(attend(q_BTNH, k_BSKH, v_BSKH, queries, mine))
    return ring(q_BTNH, k_BSKH, v_BSKH, queries, where, Q)


def put_together(piece: Piece) -> Piece:
    """The pieces of all devices of `context`: attention over the whole sequence, on each of them.

    Against the largest of all logarithms, so that no exponential overflows: one maximum of
    [B, T, N] and one sum of [B, T, N, H + 1], both float32.
    """
    max_BTN = all_reduce_max(piece.lse_BSN, AXIS, scope="put_together/max")
    max_BTN = jnp.where(jnp.isfinite(max_BTN), max_BTN, 0)  # an idle row has seen nothing
    weight_BTN1 = jnp.exp(piece.lse_BSN - max_BTN)[..., None]
    summand = jnp.concatenate([piece.o_BSNH * weight_BTN1, weight_BTN1], axis=-1)
    total = all_reduce(summand, AXIS, scope="put_together/sum")
    o_BTNH, sum_BTN1 = total[..., :-1], total[..., -1:]
    o_BTNH = o_BTNH / jnp.where(sum_BTN1 > 0, sum_BTN1, 1)
    return Piece(o_BTNH, max_BTN + jnp.log(sum_BTN1[..., 0]))


def ring(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, queries: Places, where: Placement, part_len: int
) -> Piece:
    """This device's queries over the keys of all devices of `context`, which go round once.

    As strategies/context/ring.py does it: a block is sent on while it is attended to.
    """
    n, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)

    def send(kv: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = kv
        return ring_shift(k, AXIS, scope="ring/kv"), ring_shift(v, AXIS, scope="ring/kv")

    def visit(piece: Piece, kv: tuple[Array, Array], hop: Array | int) -> Piece:
        return merge(piece, attend(q_BTNH, *kv, queries, where.places((rank - hop) % n, part_len)))

    def step(
        carry: tuple[Piece, tuple[Array, Array]], hop: Array
    ) -> tuple[tuple[Piece, tuple[Array, Array]], None]:
        piece, kv = carry
        next_kv = send(kv)
        return (visit(piece, kv, hop), next_kv), None

    kv = send((k_BSKH, v_BSKH))
    piece = attend(q_BTNH, k_BSKH, v_BSKH, queries, where.places(rank, part_len))
    if n > 2:
        (piece, kv), _ = lax.scan(step, (piece, kv), jnp.arange(1, n - 1))
    return visit(piece, kv, n - 1)
