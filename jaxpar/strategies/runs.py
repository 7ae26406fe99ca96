"""How often one device runs the parts of a model in one step: what closed forms multiply with."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.strategies.pipeline.choice import AXIS, layers_per_chunk, schedule_of
from jaxpar.strategies.pipeline.program import phases
from jaxpar.strategies.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Executions on each device per step, over all micro-batches.

    forward_layers, backward_layers: forwards and backwards of single layers. What the plan's
        `remat` repeats of a layer is repeated before each of its backwards.
    repeated_layers: forwards that a pipeline's backward opens with, in phase recompute.
    embeddings, repeated_embeddings: lookups of tokens, likewise.
    ends: forwards of the output, its backwards, and backwards of the lookup: as many of each.
    """

    forward_layers: int
    repeated_layers: int
    backward_layers: int
    embeddings: int
    repeated_embeddings: int
    ends: int


def runs_of(plan: Plan, num_layers: int) -> Runs:
    """Of a model with `num_layers` layers.

    Without a pipeline every device runs every layer once for each micro-batch. In a pipeline it
    runs those of one chunk, as long as the longest, in every slot that has a forward, and twice in
    every slot that has a backward; that is so where layers communicate, the only place to count
    them (see pipeline/executor.py).
    """
    if plan.size(AXIS) == 1:
        m = plan.num_accumulation_steps
        return Runs(
            forward_layers=m * num_layers,
            repeated_layers=0,
            backward_layers=m * num_layers,
            embeddings=m,
            repeated_embeddings=0,
            ends=m,
        )
    schedule = schedule_of(plan)
    forwards, backwards = (len(slots) for slots in phases(schedule))
    num_local = layers_per_chunk(num_layers, schedule.num_chunks)
    return Runs(
        forward_layers=forwards * num_local,
        repeated_layers=backwards * num_local,
        backward_layers=backwards * num_local,
        embeddings=forwards,
        repeated_embeddings=backwards,
        ends=backwards,
    )
