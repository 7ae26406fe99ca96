"""The shape of a strategy: what one file under `strategies/` has to say.

A strategy is a value, not a class hierarchy: a card for people, rules for the PartitionSpecs, the
functions it puts in the model's hands, its closed form, and the rows it adds to the tour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import PartitionSpec

from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params
from jaxpar.strategies.plan import Plan

Phase = Literal["forward", "backward", "recompute", "update"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The three questions every strategy answers, shown by the CLI and the report."""

    name: str
    axis: str
    splits: str
    why: str
    costs: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One line of a closed form: `count` executions per step and device of one collective.

    payload_bytes is per execution (see jaxpar.collectives), dtype the program's by its HLO name.
    device_counts are the executions on each device of the mesh, in its order, where devices differ
    (stages of a pipeline); `count` is then the most of them.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: int
    dtype: str
    phase: Phase
    why: str
    device_counts: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of `jaxpar tour`: a mesh as `MeshSpec.parse` reads it, and other fields of a plan.

    model: a preset, for strategies that the tour's own model has no use for.
    """

    name: str
    mesh: str
    fields: dict[str, Any] = field(default_factory=dict)
    model: str | None = None

    def plan(self, *, batch_size: int, seq_len: int) -> Plan:
        """The plan of this row, in float32 unless it says otherwise."""
        return Plan(
            mesh=MeshSpec.parse(self.mesh),
            batch_size=batch_size,
            seq_len=seq_len,
            **{"compute_dtype": "float32", **self.fields},
        )


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where the whole plan puts one parameter.

    spec: its PartitionSpec, stacked dim included.
    split_axes: the mesh axes that `spec` names.
    reduced_axes: the mesh axes over which its gradients are summed after the backward: each
        device's gradient is one summand there, and the spec does not say it is split.
    local_shape: one device's part, stacked dim included.
    inner_axes: the mesh axes over which they are summed within the backward instead.
    is_trained: whether it has gradients at all.
    """

    parameter: Parameter
    spec: PartitionSpec
    split_axes: tuple[str, ...]
    reduced_axes: tuple[str, ...]
    local_shape: tuple[int, ...]
    inner_axes: tuple[str, ...] = ()
    is_trained: bool = True

    @property
    def local_size(self) -> int:
        return math.prod(self.local_shape)


Layout = tuple[Placed, ...]


def _no_hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    return {}


def _no_splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    return {}


def _nothing_to_check(config: ModelConfig, plan: Plan) -> None:
    return None


def _same_start(
    plan: Plan, layout: Layout, params: Params, parallel: Parallel
) -> tuple[Params, Parallel]:
    return params, parallel


def _same_finish(plan: Plan, layout: Layout, gradients: Params) -> Params:
    return gradients


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything the composition needs to know of one strategy.

    axes: the mesh axes it serves.
    is_active: whether this plan uses it.
    is_partial: whether each device's gradient of a parameter is one summand over `axes`. Where
        the parameter's PartitionSpec does not name the axis, the gradient is then reduced over it.
    expected: the closed form of one training step.
    check: raises PlanError when the model's shapes do not allow it.
    splits: dim name -> mesh axis, for the dims of a parameter that this strategy splits.
    hooks: the fields of `model.parallel.Parallel` it fills in.
    start: once per step, before its micro-batches: parameters and hooks -> what the step is
        differentiated with respect to, and hooks.
    finish: once per step, behind them: gradients of that -> of the parameters.
    refines: the name of a strategy on the same axis whose hooks it may replace.
    variants: the rows it adds to the tour.
    """

    card: Card
    axes: tuple[str, ...]
    is_active: Callable[[Plan], bool]
    is_partial: Callable[[Parameter], bool]
    expected: Callable[[ModelConfig, Plan, Layout], list[Expected]]
    check: Callable[[ModelConfig, Plan], None] = _nothing_to_check
    splits: Callable[[Parameter, Plan], dict[str, str]] = _no_splits
    hooks: Callable[[ModelConfig, Plan, Layout], dict[str, Callable[..., Any]]] = _no_hooks
    start: Callable[[Plan, Layout, Params, Parallel], tuple[Params, Parallel]] = _same_start
    finish: Callable[[Plan, Layout, Params], Params] = _same_finish
    refines: str | None = None
    variants: tuple[Variant, ...] = ()
