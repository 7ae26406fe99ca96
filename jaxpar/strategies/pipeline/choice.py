"""Which schedule a plan asks for, and what follows from it for a model's layers."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from jaxpar.model.config import ModelConfig
from jaxpar.strategies.pipeline.builders import build
from jaxpar.strategies.pipeline.schedule import Schedule
from jaxpar.strategies.plan import Plan

AXIS = "pipe"

PHASED = ("1f1b", "interleaved")
"""Schedules that run with a forward and a backward in each slot, which costs a lock-step program
no more than the ideal; the others hold one action in each."""

PADDING = -1
"""In place of a layer's number, where a chunk has one layer fewer than others."""


def schedule_of(plan: Plan) -> Schedule:
    """The table that a plan runs. Raises ScheduleError where there is none of these sizes."""
    if isinstance(plan.schedule, Schedule):
        return plan.schedule
    return _built(plan.schedule, plan.size(AXIS), plan.num_microbatches, plan.num_virtual_stages)


@functools.lru_cache(maxsize=16)  # the same few, many times each
def _built(name: str, num_stages: int, num_microbatches: int, num_virtual_stages: int) -> Schedule:
    return build(
        name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
        phased=name in PHASED,
    )


def always_computes(config: ModelConfig, plan: Plan) -> bool:
    """Whether stages communicate by themselves, so that none may leave out what others do."""
    silent = {AXIS}
    if not (config.balance_weight and config.balance == "batch"):  # which counts over all of them
        silent |= {"slice", "data"} | ({"fsdp"} if holds_weights(plan) else set())
    return any(size > 1 for axis, size in plan.mesh.named_axes.items() if axis not in silent)


def holds_weights(plan: Plan) -> bool:
    """Whether a stage keeps its layers' weights, once gathered over fsdp, for all of its slots."""
    return plan.zero == 1 or (plan.zero == 3 and not plan.reshard_after_forward)


# --- layers ------------------------------------------------------------------------------------


def num_staged(config: ModelConfig) -> int:
    """Layers that stages divide among them; dense ones before experts stay with the embedding."""
    return config.num_layers - config.num_dense_layers


def layers_per_chunk(num_layers: int, num_chunks: int) -> int:
    """Of the fullest chunks, which is how many all of them have, some of them padding."""
    return -(-num_layers // num_chunks)


def layer_order(num_layers: int, num_stages: int, num_virtual_stages: int) -> npt.NDArray[np.int32]:
    """The layer at each place of the stacked parameters, PADDING for none: int32 [p·v·l].

    The parameters are cut along axis `pipe`, so all chunks of a stage stand together: those of
    stage r are the model's chunks r, r + p, r + 2p ... Chunks differ by at most one layer, and the
    later ones, the last of which also scores, are the shorter ones.
    """
    p, v = num_stages, num_virtual_stages
    most, longer = layers_per_chunk(num_layers, p * v), num_layers % (p * v)
    order = np.full((p, v, most), PADDING, np.int32)
    first = 0
    for g in range(p * v):
        size = num_layers // (p * v) + (g < longer)
        order[g % p, g // p, :size] = np.arange(first, first + size)
        first += size
    return order.reshape(-1)
