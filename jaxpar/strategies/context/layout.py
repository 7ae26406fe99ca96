"""Which positions of the sequence each device holds, on the host and inside a step.

Under a causal mask late positions have more to attend to than early ones. Consecutive parts give
the last of n devices almost twice the mean work, and the others wait for it. Zigzag cuts the
sequence into 2n chunks and gives device i the chunks i and 2n-1-i, one early and one late: then
all have the same. Both layouts keep a device's own tokens in the order of their positions.

Sources: Megatron-LM's context parallelism (Llama Team 2024, §3.3.2) for zigzag; Brandon et al.
2023, "Striped attention", for the imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from jaxpar.strategies.context.blocks import Places

LayoutName = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """A sequence spread over `num_ranks` parts, each spread over `num_slices` consecutive slices.

    A part is what one rank of a ring (or of a gather) attends with; the slices of a part lie on the
    devices that exchange heads for it. Either axis may have one device.
    """

    name: LayoutName
    rank_axis: str
    slice_axis: str
    num_ranks: int
    num_slices: int

    @property
    def num_chunks(self) -> int:
        """Consecutive pieces that the sequence is cut into, before parts are sliced."""
        return self.num_ranks * (2 if self.name == "zigzag" and self.num_ranks > 1 else 1)

    @property
    def divisor(self) -> int:
        """What `seq_len` has to be a multiple of."""
        return int(np.lcm(self.num_chunks, self.num_ranks * self.num_slices))

    def order(self, seq_len: int) -> npt.NDArray[np.int32]:
        """The position of the token at each place of a placed row, int32 [S], on the host.

        `tokens_BS[:, order]` laid out evenly, in order, over the ranks and their slices is what
        devices hold.
        """
        chunks = np.arange(seq_len, dtype=np.int32).reshape(self.num_chunks, -1)
        if self.num_chunks == self.num_ranks:
            return chunks.reshape(-1)
        pairs = [(rank, self.num_chunks - 1 - rank) for rank in range(self.num_ranks)]
        return chunks[np.array(pairs).reshape(-1)].reshape(-1)

    def part_positions(self, rank: Array | int, part_len: int) -> Array:
        """The positions of a rank's tokens, int32 [S/ranks]."""
        if self.num_chunks == self.num_ranks:
            return rank * part_len + jnp.arange(part_len)
        half = part_len // 2
        early, late = rank * half, (self.num_chunks - 1 - rank) * half
        return jnp.concatenate([early + jnp.arange(half), late + jnp.arange(half)])

    def part_places(
        self, rank: Array | int, shape_BS: tuple[int, ...], segments_BS: Array | None
    ) -> Places:
        """A rank's positions, and its documents out of those of all ranks; [B, S/ranks] each."""
        part_len = shape_BS[1]
        position_BS = jnp.broadcast_to(self.part_positions(rank, part_len), shape_BS)
        if segments_BS is None:
            return Places(position_BS, None)
        start = rank * part_len
        mine_BS = lax.dynamic_slice_in_dim(segments_BS, start, part_len, axis=1)
        return Places(position_BS, mine_BS)

    def positions(self, local_len: int) -> Array:
        """The positions of this device's tokens, int32 [S/(ranks·slices)], inside `shard_map`."""
        rank = lax.axis_index(self.rank_axis) if self.num_ranks > 1 else 0
        part = self.part_positions(rank, local_len * self.num_slices)
        if self.num_slices == 1:
            return part
        start = lax.axis_index(self.slice_axis) * local_len
        return lax.dynamic_slice_in_dim(part, start, local_len)

    def num_visible_pairs(self, seq_len: int) -> list[int]:
        """Pairs of a query and a key it sees under the causal mask, for each rank: its real work.

        Position p sees p + 1 keys, wherever they are.
        """
        per_rank = self.order(seq_len).astype(np.int64).reshape(self.num_ranks, -1)
        return [int(total) for total in (per_rank + 1).sum(axis=1)]
