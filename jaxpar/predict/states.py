"""Bytes of parameters, gradients and optimizer state on one device, before any activation.

With Ψ parameters in bfloat16, float32 Adam and N devices, after Rajbhandari et al. 2020 (ZeRO),
§3.1 and §5, K = 12 being the float32 copy and two moments:

| zero | weights | gradients | K         | per device   |
|------|---------|-----------|-----------|--------------|
| 0    | 2Ψ      | 2Ψ        | 12Ψ       | 16Ψ          |
| 1    | 2Ψ      | 2Ψ        | 12Ψ/N     | 4Ψ + 12Ψ/N   |
| 2    | 2Ψ      | 2Ψ/N      | 12Ψ/N     | 2Ψ + 14Ψ/N   |
| 3    | 2Ψ/N    | 2Ψ/N      | 12Ψ/N     | 16Ψ/N        |

A step here keeps no bfloat16 shard beside the float32 one that it is cast from, so with zero=3 the
gradient shard can be float32 for the same 16Ψ/N. `states` says what a plan holds, leaf by leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.errors import PlanError, require_choice, require_whole
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import compose, shards
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Placed

OPTIMIZER_BYTES = 12
"""Per parameter under mixed precision: float32 copy, momentum and variance (§3.1)."""

NUM_MOMENTS = 2

MAX_PARAMETERS = 10**15


def zero_bytes(num_parameters: int, num_devices: int, zero: int) -> float:
    """The paper's closed form, bytes per device: bfloat16 weights and gradients, float32 Adam.

    zero: 0 is plain data parallelism. Raises PlanError for numbers that are none.
    """
    require_whole(PlanError, "num_devices", num_devices)
    require_choice(PlanError, "zero", zero, (0, 1, 2, 3))
    if not 1 <= num_parameters <= MAX_PARAMETERS:
        raise PlanError(
            f"num_parameters={num_parameters} must be between 1 and {MAX_PARAMETERS:.0e}."
        )
    weights = 2 / (num_devices if zero >= 3 else 1)
    gradients = 2 / (num_devices if zero >= 2 else 1)
    optimizer = OPTIMIZER_BYTES / (num_devices if zero >= 1 else 1)
    return num_parameters * (weights + gradients + optimizer)


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one device of a plan's mesh.

    master, moments: float32, there between steps too.
    weights: copies in the compute dtype that last for the whole step.
    gradients: their sums at the end of the backward pass.
    gathered: weights that are whole for a while only, at most: of one group of layers (two, where
        the next ones are prefetched), or of all where they are kept; and the tables.
    """

    master: int
    moments: int
    weights: int
    gradients: int
    gathered: int

    @property
    def arguments(self) -> int:
        """What a step is given and returns, but for the optimizer's counters."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """The quantity that the table above is about; `gathered` comes and goes."""
        return self.arguments + self.weights + self.gradients


def states(config: ModelConfig, plan: Plan) -> States:
    """The closed form of a plan with an optimizer of two moments, such as Adam.

    Raises PlanError for a plan that this model does not allow.
    """
    compose.check(config, plan)
    layout = compose.layout(config, plan)
    trained = [p for p in layout if not plan.is_frozen(p.parameter.path)]
    copies = [p for p in layout if _is_held(p, plan) or (plan.zero == 2 and _is_split(p, plan))]
    return States(
        master=4 * sum(p.local_size for p in layout),
        moments=4 * NUM_MOMENTS * sum(p.local_size for p in trained),
        weights=plan.compute_bytes * sum(_whole_size(p, plan) for p in copies),
        gradients=sum(_gradient_bytes(p, plan) for p in trained),
        gathered=_gathered_bytes([p for p in layout if _is_split(p, plan)], plan),
    )


def _is_split(placed: Placed, plan: Plan) -> bool:
    return shards.split_dim(placed.parameter, plan) is not None


def _is_held(placed: Placed, plan: Plan) -> bool:
    return shards.weight(plan, placed).is_held


def _whole_size(placed: Placed, plan: Plan) -> int:
    """Elements once gathered over `fsdp`, all layers."""
    return placed.local_size * (plan.size(shards.AXIS) if _is_split(placed, plan) else 1)


def _gradient_bytes(placed: Placed, plan: Plan) -> int:
    has_slots = plan.size("pipe") > 1  # over which gradients add up in float32
    if _is_held(placed, plan):
        # Sums over micro-batches are kept in the wider of both dtypes.
        is_sum = plan.num_accumulation_steps > 1
        width = max(plan.compute_bytes, plan.reduce_bytes) if is_sum else plan.compute_bytes
        return (4 if has_slots else width) * _whole_size(placed, plan)
    if plan.zero == 2 and _is_split(placed, plan) and not has_slots:
        return plan.reduce_bytes * placed.local_size
    return 4 * placed.local_size


def _gathered_bytes(split: list[Placed], plan: Plan) -> int:
    if plan.zero != 3:
        return 0
    size = 0
    for placed in split:
        if _is_held(placed, plan):
            continue
        share = 1.0
        if placed.parameter.num_stacked and plan.reshard_after_forward:
            at_once = plan.num_layers_per_gather * (2 if plan.prefetch else 1)
            share = min(1.0, at_once / shards.num_layers(placed))
        size += round(_whole_size(placed, plan) * share)
    return size * plan.compute_bytes
