"""How long a step takes on a chip at the least, by its closed forms and hardware.toml.

    compute    FLOPs of a device / its peak
    memory     bytes that a device has to read / its bandwidth: weights, and the cache that its rows
               attend to; of a training step, its state once read and once written
    links      each collective on its own, at the links' bandwidth (audit/links.py)

    step       max(compute, memory) + the collectives that have nothing to run beside them

A lower bound: peaks are peaks, and links have no latency here, which in decode, where an all-reduce
is some kilobytes, is most of what they take. It says which resource a phase is bound by, and lets
simulated servers be compared; it does not say what a server will measure.

FLOPs are those of the programs: chunks count in full, rows that are idle too, and a row attends to
all places that its block table has columns for. Matrices only, two each multiply-add, as in
predict/flops.py; the unembedding is done for the last token of a row.

Sources: Pope et al. 2022, §2.1, §3; Williams et al. 2009 (roofline).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxpar.audit.links import Transfers
from jaxpar.audit.result import Collective
from jaxpar.collectives import wire_bytes
from jaxpar.hardware import Chip
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.predict.flops import active_matmul_parameters, step_flops
from jaxpar.predict.states import states
from jaxpar.predict.volume import expected as expected_of_training
from jaxpar.serve.closed_form import expected
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.strategies import compose
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.strategy import Expected

Phase = Literal["train", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one step on one device: what it has to do, and how long that takes at the least.

    flops, memory_bytes, wire_bytes: of the step. compute_s, memory_s, link_s: each alone.
    hidden_s: of link_s, what has something to run beside it.
    """

    phase: Phase
    flops: float
    memory_bytes: int
    wire_bytes: int
    compute_s: float
    memory_s: float
    link_s: float
    hidden_s: float

    @property
    def step_s(self) -> float:
        """With everything hidden that has something to run beside it, as far as that lasts."""
        work = max(self.compute_s, self.memory_s)
        return max(work, self.hidden_s) + self.link_s - self.hidden_s

    @property
    def bound(self) -> str:
        """What most of it waits for."""
        waits = self.link_s - self.hidden_s + max(0.0, self.hidden_s - self.compute_s)
        parts = {"compute": self.compute_s, "memory": self.memory_s, "links": waits}
        return max(parts, key=lambda name: parts[name])


def collective(row: Expected, mesh: MeshSpec) -> Collective:
    """The row of a closed form as an audit would tell it, for what reads audits."""
    sizes = mesh.all_axes
    ids = np.arange(mesh.num_devices).reshape(tuple(sizes.values()))
    axes = [list(sizes).index(axis) for axis in row.axes]
    groups = np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(
        -1, math.prod(sizes[axis] for axis in row.axes)
    )
    size = groups.shape[1]
    if row.kind == "collective-permute":
        groups = np.stack([groups, np.roll(groups, -1, axis=1)], axis=2).reshape(-1, 2)
    return Collective(
        kind=row.kind, axes=row.axes, axes_note=None, group_size=size,
        num_groups=mesh.num_devices // size, dtype=row.dtype, program_dtype=row.dtype,
        count=row.count, count_min=row.count, count_max=row.count,
        payload_bytes=row.payload_bytes,
        wire_bytes=wire_bytes(row.kind, row.payload_bytes, size), phase=row.phase, scope=row.why,
        source=None, is_async=False, exposed_fraction=None, buffers=(), groups=groups,
    )  # fmt: skip


def beside(row: Expected, *, num_parts: int = 1) -> str | None:
    """What can run while the collective does, by what depends on what; None for nothing.

    Whether a compiler makes use of it is another question (docs/12-overlap.md). Gradients that are
    reduced behind the backward's loop have nothing left beside them. num_parts: micro-batches that
    are in flight in a pipeline.
    """
    if row.axes == ("fsdp",) and row.kind in ("all-gather", "reduce-scatter"):
        return "other layers"
    if row.axes == ("context",) and row.kind == "collective-permute":
        return "attention to the block that is here"
    if row.axes == ("pipe",) and row.kind == "collective-permute" and num_parts > 1:
        return "other micro-batches"
    return None


def estimate_serving(
    config: ModelConfig, plan: ServePlan, kind: Kind, chip: Chip, width: int | None = None
) -> Estimate:
    """Of one prefill or decode step. Raises PlanError for a plan that this model does not allow.

    width: columns of its block tables, one of `plan.widths`; None for the most.
    """
    rows = expected(config, plan, kind, width)
    table_len = (width or plan.blocks_per_sequence) * plan.block_len
    n = plan.mesh.num_devices
    num_rows, num_tokens = plan.num_rows(kind), plan.num_rows(kind) * plan.row_len(kind)
    scored = config.vocab * config.embed
    a_token = 2 * (active_matmul_parameters(config) - scored)
    attention = config.num_layers * 4 * config.num_heads * config.head_dim * table_len
    flops = (num_tokens * (a_token + attention) + num_rows * 2 * scored) / n
    weights = sum(p.local_size for p in compose.layout(config, plan.training))
    weights -= 0 if config.tied_embedding else scored // plan.size("tensor")  # a lookup, in one
    split = math.prod(plan.size(axis) for axis in ("pipe", "tensor", "context"))
    places = num_rows // plan.num_batch_shards * table_len
    memory = weights * plan.compute_bytes + places * plan.bytes_per_token(config) // split
    return _estimate(kind, flops, memory, rows, plan.mesh, plan.compute_dtype, chip,
                     plan.num_parts(kind))  # fmt: skip


def estimate_training(config: ModelConfig, plan: Plan, chip: Chip) -> Estimate:
    """Of one training step. Raises PlanError for a plan that this model does not allow."""
    rows = expected_of_training(config, plan)
    n = plan.mesh.num_devices
    return _estimate("train", step_flops(config, plan, causal=False) / n,
                     2 * states(config, plan).arguments, rows, plan.mesh, plan.compute_dtype, chip,
                     plan.num_microbatches)  # fmt: skip


def _estimate(
    phase: Phase,
    flops: float,
    memory_bytes: int,
    rows: Iterable[Expected],
    mesh: MeshSpec,
    dtype: str,
    chip: Chip,
    num_parts: int,
) -> Estimate:
    transfers, link_s, hidden_s, sent = Transfers(chip), 0.0, 0.0, 0
    for row in rows:
        found = collective(row, mesh)
        seconds = row.count * transfers.seconds(found)
        link_s += seconds
        sent += row.count * found.wire_bytes
        if beside(row, num_parts=num_parts) is not None:
            hidden_s += seconds
    return Estimate(
        phase=phase,
        flops=flops,
        memory_bytes=memory_bytes,
        wire_bytes=sent,
        compute_s=flops / chip.flops_per_s(DTYPES[dtype]),
        memory_s=memory_bytes / chip.device_hbm_bytes_per_s,
        link_s=link_s,
        hidden_s=hidden_s,
    )
