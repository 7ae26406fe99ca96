"""Handing a sequence's keys and values from one mesh to another that splits them differently.

Both meshes split a cache over layers (`pipe`), tokens of a block (`context`) and key/value heads
(`tensor`); with more devices on `tensor` than heads, several devices hold the same head. What a
target device needs is cut into the pieces that single source devices have, by shapes alone; each
piece then goes from one device to one other, and nowhere else. (`jax.device_put` between such
shardings would take the whole array through the host whenever their pieces differ.)

take      on the source: the sequence's blocks out of the cache. No communication.
send      device to device: the pieces. Copies of a head take turns in sending.
put       on the target: the pieces into the blocks there, in place. No communication.

Bytes that arrive for b blocks of Q tokens, c bytes each element, over all target devices:

    2 · b·Q · (L + p·L_dense) · max(K, tensor) · H · c      p, tensor: of the target

Blocks go in powers of two, 5 = 4 + 1, so that programs are few and no byte is sent for padding.

Sources: Zhong et al. 2024 (DistServe) §3.3, §4; Patel et al. 2024 (Splitwise) §4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.serve.cache import AXIS, KV, Cache
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.step import ServeStep
from jaxpar.strategies.pipeline.choice import PADDING, layer_order

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""From and to (exclusive): layers of a stack, tokens of a block, key/value heads of the model."""


class Piece(NamedTuple):
    """What one device sends another: of the sender's and the receiver's own arrays, which part.

    source, target: places in the meshes. box: in the model's terms. source_start, target_start:
    (layer, token of a block, head) where it begins in each one's own array.
    """

    source: int
    target: int
    box: Box
    source_start: tuple[int, int, int]
    target_start: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        layers, places, heads = (last - first for first, last in self.box)
        return layers, places, heads


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A hand-over as it was carried out: bytes and arrays that went from device to device."""

    num_bytes: int = 0
    num_pieces: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            num_bytes=self.num_bytes + other.num_bytes,
            num_pieces=self.num_pieces + other.num_pieces,
        )


def stacks(config: ModelConfig) -> dict[str, int]:
    """Layers of each of the model's stacks that have a cache."""
    dense = config.num_dense_layers
    return {"layers": config.num_layers - dense} | ({"dense_layers": dense} if dense else {})


def held(config: ModelConfig, plan: ServePlan, stack: str) -> list[Box]:
    """What each device of the plan's mesh holds of every block: in the mesh's order."""
    sizes = plan.mesh.all_axes
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    p, n, t = (plan.size(axis) for axis in ("pipe", AXIS, "tensor"))
    num_layers, K = stacks(config)[stack], config.num_kv_heads
    part_len, copies = plan.block_len // n, max(1, t // K)
    heads = plan.num_kv_heads(config) // t
    order = layer_order(num_layers, p, 1).reshape(p, -1)
    boxes: list[Box] = []
    for place in grid.T:
        at = dict(zip(sizes, (int(x) for x in place), strict=True))
        layers = (0, num_layers)
        if stack == "layers" and p > 1:
            own = [int(layer) for layer in order[at["pipe"]] if layer != PADDING]
            assert own == list(range(own[0], own[0] + len(own)))
            layers = own[0], own[0] + len(own)
        first = at["tensor"] * heads // copies
        places = at[AXIS] * part_len, (at[AXIS] + 1) * part_len
        boxes.append((layers, places, (first, first + heads)))
    return boxes


def pieces(config: ModelConfig, source: ServePlan, target: ServePlan, stack: str) -> list[Piece]:
    """All pieces of one stack's keys (or values), by shapes alone."""
    senders: dict[Box, list[int]] = defaultdict(list)
    for i, box in enumerate(held(config, source, stack)):
        senders[box].append(i)
    found, turn = [], dict.fromkeys(senders, 0)
    for j, wanted in enumerate(held(config, target, stack)):
        for box, devices in senders.items():
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True)
            )
            if any(first >= last for first, last in common):
                continue
            i = devices[turn[box] % len(devices)]
            turn[box] += 1
            source_start, target_start = (
                tuple(c[0] - own[0] for c, own in zip(common, whole, strict=True))
                for whole in (box, wanted)
            )
            found.append(Piece(i, j, common, source_start, target_start))  # type: ignore[arg-type]
    return found


def handover_bytes(config: ModelConfig, target: ServePlan, num_tokens: int) -> int:
    """Closed form: bytes that arrive at all target devices together for a sequence with as many
    tokens in the cache, in whole blocks."""
    num_places = -(-num_tokens // target.block_len) * target.block_len
    num_layers = stacks(config)["layers"] + target.size("pipe") * config.num_dense_layers
    heads = target.num_kv_heads(config)
    return 2 * num_places * num_layers * heads * config.head_dim * target.compute_bytes


def check(config: ModelConfig, source: ServePlan, target: ServePlan) -> None:
    """Raise PlanError for plans between which nothing can be handed over."""
    for name, plan in (("prefill", source), ("decode", target)):
        plan.check(config)
        if plan.num_batch_shards > 1:
            raise PlanError(
                f"The {name} plan's mesh {plan.mesh} splits the cache's blocks over the batch; a "
                f"sequence is handed over between meshes that do not. Take more workers in place "
                f"of a larger data axis, and tensor in place of expert."
            )
    for field in ("block_len", "compute_dtype", "max_seq_len"):
        here, there = getattr(source, field), getattr(target, field)
        if here != there:
            raise PlanError(
                f"{field} is {here!r} in the prefill plan and {there!r} in the decode plan; blocks "
                f"go over as they are. Nearest: {here!r} in both."
            )


def powers(num: int) -> list[int]:
    """Powers of two whose sum is `num`, largest first."""
    return [1 << bit for bit in reversed(range(num.bit_length())) if num >> bit & 1]


class Handover:
    """From the cache of one step to that of another, on devices of its own. Compiles on first use.

    Raises PlanError for plans that do not fit each other.
    """

    def __init__(self, source: ServeStep, target: ServeStep) -> None:
        check(source.config, source.plan, target.plan)
        self.source, self.target = source, target
        self._devices = [list(step.mesh.devices.flat) for step in (source, target)]
        shared = set(self._devices[0]) & set(self._devices[1])
        if shared:
            raise PlanError(
                f"Both meshes have {sorted(map(str, shared))}; each is on devices of its own."
            )
        self._pieces = {
            stack: pieces(source.config, source.plan, target.plan, stack)
            for stack in stacks(source.config)
        }
        self.take = jax.jit(self._mapped(source, _take, donates=False))
        self.put = jax.jit(self._mapped(target, _put, donates=True), donate_argnums=0)

    def __call__(
        self, cache: Cache, blocks: Sequence[int], target_cache: Cache, target_blocks: Sequence[int]
    ) -> tuple[Cache, Moved]:
        """The target's cache with the source's `blocks` in `target_blocks`, and what was sent.

        The target's cache is donated: keep the returned one.
        """
        assert len(blocks) == len(target_blocks)
        moved, first = Moved(), 0
        for num in powers(len(blocks)):
            here, there = (
                np.asarray(some[first : first + num], np.int32) for some in (blocks, target_blocks)
            )
            taken = self.take(cache, here)
            arrived = {}
            for stack, kv in taken.items():
                found = [self._send(x, stack) for x in kv]
                arrived[stack] = KV(*(array for array, _ in found))
                for _, one in found:
                    moved += one
            target_cache = self.put(target_cache, arrived, there)
            first += num
        return target_cache, moved

    def _send(self, x: Array, stack: str) -> tuple[Array, Moved]:
        """Blocks as the source's devices hold them -> as the target's do: [layers, b, Q, K, H]."""
        sources, targets = self._devices
        local = {shard.device: shard.data for shard in x.addressable_shards}
        num, head_dim = x.shape[1], x.shape[4]
        cut, where = [], []
        for piece in self._pieces[stack]:
            layers, places, heads = piece.shape
            start = piece.source_start[0], 0, *piece.source_start[1:], 0
            shape = layers, num, places, heads, head_dim
            shard = local[sources[piece.source]]
            cut.append(shard if shard.shape == shape else _slice(shard, start, shape))
            where.append(targets[piece.target])
        sent = jax.device_put(cut, where)

        plan, config = self.target.plan, self.target.config
        like = self.target.abstract_inputs("decode")[1][stack].k
        whole = like.shape[0], num, plan.block_len, plan.num_kv_heads(config), head_dim
        sharding = NamedSharding(self.target.mesh, _spec(self.target, stack))
        local_shape = sharding.shard_shape(whole)
        of: dict[int, list[tuple[Piece, Array]]] = defaultdict(list)
        for piece, array in zip(self._pieces[stack], sent, strict=True):
            of[piece.target].append((piece, array))
        arrays = [_together(of[j], local_shape, x.dtype) for j in range(len(targets))]
        moved = Moved(num_bytes=sum(array.nbytes for array in sent), num_pieces=len(sent))
        return jax.make_array_from_single_device_arrays(whole, sharding, arrays), moved

    @staticmethod
    def _mapped(step: ServeStep, body: Any, *, donates: bool) -> Any:
        spec = {stack: KV(_spec(step, stack), _spec(step, stack)) for stack in step.cache_specs}  # type: ignore[arg-type]
        caches = step.cache_specs
        return jax.shard_map(
            body,
            mesh=step.mesh,
            in_specs=(caches, spec, PartitionSpec()) if donates else (caches, PartitionSpec()),
            out_specs=caches if donates else spec,
            check_vma=True,
        )


def _spec(step: ServeStep, stack: str) -> PartitionSpec:
    """Of some blocks of a cache, without parts of a batch."""
    layers, _, places, heads, _ = step.cache_specs[stack].k
    return PartitionSpec(layers, None, places, heads, None)


def _take(cache: Cache, blocks: Array) -> Cache:
    """The named blocks of every stack: [layers, b, Q, K, H] each, per shard."""
    return {stack: KV(*(x[:, blocks] for x in kv)) for stack, kv in cache.items()}


def _put(cache: Cache, arrived: Cache, blocks: Array) -> Cache:
    """The cache with these blocks replaced, per shard."""
    return {
        stack: KV(*(x.at[:, blocks].set(y) for x, y in zip(kv, arrived[stack], strict=True)))
        for stack, kv in cache.items()
    }


@partial(jax.jit, static_argnums=(1, 2))
def _slice(x: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    return lax.slice(x, start, tuple(a + b for a, b in zip(start, shape, strict=True)))


@partial(jax.jit, static_argnums=(1, 2))
def _assemble(parts: list[Array], starts: tuple[Any, ...], shape: tuple[int, ...]) -> Array:
    whole = jnp.zeros(shape, parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        whole = lax.dynamic_update_slice(whole, part, start)
    return whole


def _together(
    arrived: list[tuple[Piece, Array]], shape: tuple[int, ...], dtype: jnp.dtype
) -> Array:
    """One device's pieces at their places; zeros where there is only padding."""
    if len(arrived) == 1 and arrived[0][1].shape == shape:
        return arrived[0][1]
    starts = tuple((piece.target_start[0], 0, *piece.target_start[1:], 0) for piece, _ in arrived)
    return _assemble([array for _, array in arrived], starts, shape)
