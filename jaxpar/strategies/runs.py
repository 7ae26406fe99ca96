"""How often one device runs the parts of a model in one step: what closed forms multiply with."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.model.config import ModelConfig
from jaxpar.strategies.pipeline.choice import AXIS, layers_per_chunk, num_staged, schedule_of
from jaxpar.strategies.pipeline.program import phases
from jaxpar.strategies.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Executions on each device per step, over all micro-batches.

    forwards, backwards: of all that a device holds of the model or, in a pipeline, of one chunk.
    repeats: forwards that a pipeline's backward opens with, in phase recompute.
    num_layers: layers in each of them.
    num_remat_layers: those that keep what the plan's `remat` says, and repeat the rest before each
        of their backwards. A layer that is alone in its stack keeps all: its backward is next.
    """

    forwards: int
    repeats: int
    backwards: int
    num_layers: int
    num_remat_layers: int

    @property
    def forward_layers(self) -> int:
        return self.forwards * self.num_layers

    @property
    def repeated_layers(self) -> int:
        return self.repeats * self.num_layers

    @property
    def backward_layers(self) -> int:
        return self.backwards * self.num_layers

    @property
    def remat_layers(self) -> int:
        return self.backwards * self.num_remat_layers

    # Tokens are looked up wherever a first chunk may run.
    @property
    def embeddings(self) -> int:
        return self.forwards

    @property
    def repeated_embeddings(self) -> int:
        return self.repeats

    @property
    def ends(self) -> int:
        """Forwards of the output, its backwards, and backwards of the lookup: as many of each."""
        return self.backwards


def runs_of(plan: Plan, config: ModelConfig, *, only_experts: bool = False) -> Runs:
    """Of all layers of a model, or of its layers with experts only.

    Without a pipeline every device runs every layer once for each micro-batch. In a pipeline it
    runs those of one chunk, as long as the longest, in every slot that has a forward, and twice in
    every slot that has a backward; that is so where layers communicate, the only place to count
    them (see pipeline/executor.py).
    """
    m = plan.num_accumulation_steps
    forwards, repeats, backwards = m, 0, m
    num_layers = num_staged(config)
    if plan.size(AXIS) > 1:
        schedule = schedule_of(plan)
        forwards, backwards = (len(slots) for slots in phases(schedule))
        repeats = backwards
        num_layers = layers_per_chunk(num_layers, schedule.num_chunks)
    if only_experts:
        stacks = [num_layers if config.num_experts else 0]
    else:
        stacks = [num_layers, config.num_dense_layers]
    return Runs(
        forwards=forwards,
        repeats=repeats,
        backwards=backwards,
        num_layers=sum(stacks),
        num_remat_layers=sum(stack for stack in stacks if stack > 1),
    )
