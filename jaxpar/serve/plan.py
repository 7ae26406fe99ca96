"""The ServePlan: one frozen dataclass that says how a model is served on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxpar.errors import (
    PlanError,
    nearest_multiples,
    require_choice,
    require_whole,
)
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import compose
from jaxpar.strategies.plan import BATCH_AXES, DTYPES, OnMesh, Plan

Kind = Literal["prefill", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "decode")

SERVING_AXES = ("pipe", "slice", "data", "expert", "context", "tensor")
"""Roles that a mesh for serving may have."""


@dataclass(frozen=True, kw_only=True)
class ServePlan(OnMesh):
    """How to serve on `mesh`. Raises PlanError for what no model could satisfy.

    Counts are of the whole mesh; what is spread over the batch axes (slice, data, expert) has an
    equal part on each of their devices: slots, prefill rows and blocks of its own.

    mesh: which axes there are, and so which strategies run (each lives on the axis of its name).
    num_slots: sequences that a decode step extends by one token each.
    max_seq_len: most tokens of one sequence, prompt and answer together.
    block_len: tokens of one block of the cache; a sequence takes whole blocks.
    num_blocks: blocks of the cache; None for as many as all slots can ever fill.
    chunk_len: tokens of one row of a prefill step; a longer prompt goes in several chunks.
    num_prefill_rows: rows of a prefill step; None for one on each part of the batch, with a
        pipeline as many as it has stages. In a pipeline each row is a micro-batch.
    num_microbatches: parts of the slots that are in flight in a pipeline's decode step.
    num_widths: of block tables that programs are made for, each half of the one before: a step
        whose sequences are all shorter reads, and over `context` sends, no more blocks than that.
    max_top_k: candidates that sampling among the best tokens may choose from.
    expert_exchange: how tokens travel to experts, as in Plan; none is ever dropped.
    compute_dtype: of activations, of weights in matmuls, and of the cache.
    """

    mesh: MeshSpec
    num_slots: int
    max_seq_len: int
    block_len: int = 16
    num_blocks: int | None = None
    chunk_len: int = 64
    num_prefill_rows: int | None = None
    num_microbatches: int = 1
    num_widths: int = 1
    max_top_k: int = 32
    expert_exchange: Literal["padded", "ragged"] = "padded"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        self.check_mesh()
        for axis, size in self.mesh.named_axes.items():
            if size > 1 and axis not in SERVING_AXES:
                raise PlanError(
                    f"The mesh has {axis}={size}, and nothing is served over axis {axis!r}: "
                    f"weights and caches lie where they are used. Axes that serve: "
                    f"{', '.join(SERVING_AXES)}."
                )
        for field in ("num_slots", "max_seq_len", "block_len", "chunk_len", "num_microbatches",
                      "num_widths", "max_top_k"):  # fmt: skip
            require_whole(PlanError, field, getattr(self, field))
        require_choice(PlanError, "compute_dtype", self.compute_dtype, DTYPES)
        require_choice(PlanError, "expert_exchange", self.expert_exchange, ("padded", "ragged"))
        self._multiple("max_seq_len", self.block_len, f"block_len={self.block_len}")

        shards, p = self.num_batch_shards, self.size("pipe")
        over = " × ".join(f"{a}={self.size(a)}" for a in self.in_mesh_order(BATCH_AXES))
        if self.num_blocks is None:
            most = self.num_slots * self.max_seq_len // self.block_len
            object.__setattr__(self, "num_blocks", most)
        if self.num_prefill_rows is None:
            object.__setattr__(self, "num_prefill_rows", shards * p)
        for field in ("num_blocks", "num_prefill_rows"):
            require_whole(PlanError, field, getattr(self, field))
        if p == 1 and self.num_microbatches > 1:
            raise PlanError(
                f"num_microbatches={self.num_microbatches} is about axis pipe, and this mesh has "
                f"pipe=1 ({self.mesh}). Nearest num_microbatches: 1."
            )
        step = shards * self.num_microbatches
        parts = f", in {self.num_microbatches} micro-batches" if self.num_microbatches > 1 else ""
        self._multiple("num_slots", step, f"{over or 'one device'}{parts}")
        for field in ("num_blocks", "num_prefill_rows"):
            self._multiple(field, shards, over)
        if (n := self.size("context")) > 1:
            self._multiple("block_len", n, f"context={n}, each device with a part of every block")
            self._multiple("chunk_len", self.block_len, f"context={n}, in whole blocks")
        if self.blocks_per_sequence > self.blocks_per_shard:
            raise PlanError(
                f"num_blocks={self.num_blocks} leaves {self.blocks_per_shard} for each part of the "
                f"batch ({over or 'one device'}), and one sequence of max_seq_len="
                f"{self.max_seq_len} takes {self.blocks_per_sequence} of block_len="
                f"{self.block_len}. Nearest num_blocks: {self.blocks_per_sequence * shards}."
            )

    def _multiple(self, field: str, of: int, over: str) -> None:
        value = getattr(self, field)
        if value % of:
            raise PlanError(
                f"{field}={value} does not divide into equal parts of {over}: it is no multiple of "
                f"{of}. Nearest {field}: {nearest_multiples(value, of)}."
            )

    # --- sizes -------------------------------------------------------------------------------

    @property
    def blocks_per_sequence(self) -> int:
        """Columns of a block table: blocks of a sequence of `max_seq_len`."""
        return self.max_seq_len // self.block_len

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the block tables that programs are made for, fewest first."""
        halves = {-(-self.blocks_per_sequence >> i) for i in range(min(self.num_widths, 32))}
        return tuple(sorted(halves))

    @property
    def blocks_per_shard(self) -> int:
        assert self.num_blocks is not None
        return self.num_blocks // self.num_batch_shards

    def num_rows(self, kind: Kind) -> int:
        """Rows of a step, over all devices."""
        assert self.num_prefill_rows is not None
        return self.num_slots if kind == "decode" else self.num_prefill_rows

    def row_len(self, kind: Kind) -> int:
        """Tokens of each row of a step."""
        return 1 if kind == "decode" else self.chunk_len

    def num_parts(self, kind: Kind) -> int:
        """Micro-batches of a step: of one stage, all rows at once."""
        if self.size("pipe") == 1:
            return 1
        if kind == "decode":
            return self.num_microbatches
        return self.num_rows(kind) // self.num_batch_shards

    # --- what training says of the same mesh -------------------------------------------------

    @cached_property
    def training(self) -> Plan:
        """The plan whose layout of parameters, and whose hooks, serving uses."""
        has_context = self.size("context") > 1
        return Plan(
            mesh=self.mesh,
            batch_size=self.num_slots,
            seq_len=self.chunk_len,
            compute_dtype=self.compute_dtype,
            experts="dropless",
            expert_exchange=self.expert_exchange,
            context_layout="contiguous" if has_context else "zigzag",
        )

    def check(self, config: ModelConfig) -> None:
        """Raise PlanError for what this model does not allow; then tracing succeeds."""
        for field in ("max_seq_len", "chunk_len"):
            if getattr(self, field) > config.max_seq_len:
                raise PlanError(
                    f"{field}={getattr(self, field)} is more than {config.name} allows with "
                    f"max_seq_len={config.max_seq_len}. Nearest {field}: {config.max_seq_len}."
                )
        if self.max_top_k > config.vocab:
            raise PlanError(
                f"max_top_k={self.max_top_k} is more than the {config.vocab} tokens of "
                f"{config.name}. Nearest max_top_k: {config.vocab}."
            )
        compose.check(config, self.training)

    def num_kv_heads(self, config: ModelConfig) -> int:
        """Key/value heads in the cache, over all devices: of few, each device has its own copy."""
        return max(config.num_kv_heads, self.size("tensor"))

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Of the cache, over all layers, keys and values, wherever they lie: 2·L·K·H·bytes.

        With more devices on `tensor` than key/value heads, K is the number of devices; a
        pipeline's padding counts, and what every stage has of dense layers once for each.
        """
        p = self.size("pipe")
        num_layers = self.training.num_local_layers(config.num_layers - config.num_dense_layers)
        return (
            2 * (num_layers + config.num_dense_layers) * p
            * self.num_kv_heads(config) * config.head_dim * self.compute_bytes
        )  # fmt: skip

    def cache_bytes(self, config: ModelConfig) -> int:
        """Of the whole cache on one device."""
        split = self.size("pipe") * self.size("tensor") * self.size("context")
        tokens = self.blocks_per_shard * self.block_len
        return self.bytes_per_token(config) * tokens // split
