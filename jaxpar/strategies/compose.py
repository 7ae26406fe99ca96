"""How strategies become one plan: which run, where parameters live, what the model calls.

This is the only place that knows more than one strategy, and it knows none of them by name: every
module in this package that defines a `STRATEGY` takes part.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar import strategies as package
from jaxpar.errors import PlanError, did_you_mean
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Layout, Placed, Strategy, Variant


def all_strategies() -> dict[str, Strategy]:
    """Every strategy there is, by name, each after the one it refines.

    There is no list to add to: whatever file in this folder defines a `STRATEGY` is one.
    """
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        strategy = getattr(module, "STRATEGY", None)
        if isinstance(strategy, Strategy):
            found[strategy.card.name] = strategy
    return dict(sorted(found.items(), key=lambda item: item[1].refines is not None))


def strategy(name: str, *, also: Iterable[str] = ()) -> tuple[Strategy, Variant]:
    """The strategy called `name`, or whose row of the tour is, and a row to show it on.

    Raises PlanError, naming the closest one, or of `also`, when there is neither.
    """
    known: dict[str, tuple[Strategy, Variant]] = {}
    for own_name, found in all_strategies().items():
        rows = found.variants or (Variant(name=own_name, mesh="data=2,tensor=4"),)
        known |= {row.name: (found, row) for row in rows}
        known[own_name] = found, rows[0]
    if name not in known:
        raise PlanError(f"There is no strategy {name!r}. {did_you_mean(name, [*known, *also])}")
    return known[name]


def active_strategies(plan: Plan) -> list[Strategy]:
    """The strategies this plan uses, each after the one it refines."""
    return [s for s in all_strategies().values() if s.is_active(plan)]


def check(config: ModelConfig, plan: Plan) -> None:
    """Raise PlanError for what this model and this mesh do not allow; then tracing succeeds."""
    strategies = active_strategies(plan)
    served = {axis for s in all_strategies().values() for axis in s.axes}
    for axis, size in plan.mesh.named_axes.items():
        if size > 1 and axis not in served:
            raise PlanError(
                f"The mesh has {axis}={size}, and no strategy trains on axis {axis!r} here. "
                f"Axes that train: {', '.join(sorted(served))}."
            )
    if plan.seq_len > config.max_seq_len:
        raise PlanError(
            f"seq_len={plan.seq_len} is more than {config.name} allows with "
            f"max_seq_len={config.max_seq_len}. Nearest seq_len: {config.max_seq_len}."
        )
    for active in strategies:
        active.check(config, plan)


def layout(config: ModelConfig, plan: Plan) -> Layout:
    """Where each parameter lives and over which axes its gradient is reduced."""
    strategies = active_strategies(plan)
    return tuple(_place(parameter, plan, strategies) for parameter in config.parameters)


def _place(parameter: Parameter, plan: Plan, strategies: list[Strategy]) -> Placed:
    is_trained = parameter.is_trained and not plan.is_frozen(parameter.path)
    splits: dict[str, str] = {}
    partial: set[str] = set()
    for s in strategies:
        for dim, axis in s.splits(parameter, plan).items():
            assert dim not in splits, f"two strategies split {dim} of {parameter.path}"
            splits[dim] = axis
        if is_trained and s.is_partial(parameter):
            partial.update(s.axes)
    entries = [splits.get(dim) for dim in parameter.stacked_dims]
    local = [
        plan.num_local_layers(size) if axis == "pipe" else size // (plan.size(axis) if axis else 1)
        for size, axis in zip(parameter.stacked_shape, entries, strict=True)
    ]
    summed = plan.in_mesh_order(partial - set(splits.values()))
    is_inner = plan.overlap_gradients and parameter.num_stacked is not None
    return Placed(
        parameter=parameter,
        spec=PartitionSpec(*entries),
        split_axes=plan.in_mesh_order(splits.values()),
        reduced_axes=() if is_inner else summed,
        local_shape=tuple(local),
        inner_axes=summed if is_inner else (),
        is_trained=is_trained,
    )


def parallel(config: ModelConfig, plan: Plan, layout: Layout) -> Parallel:
    """What the model calls on this plan's mesh."""
    hooks: dict[str, Callable[..., Any]] = {}
    for s in active_strategies(plan):
        mine = s.hooks(config, plan, layout)
        assert s.refines or not hooks.keys() & mine.keys(), f"{s.card.name} replaces others' hooks"
        hooks |= mine
    return Parallel(**hooks)


def start(
    plan: Plan, layout: Layout, params: Params, parallel: Parallel
) -> tuple[Params, Parallel]:
    """What the step is differentiated with respect to, and what its model then calls."""
    for s in active_strategies(plan):
        params, parallel = s.start(plan, layout, params, parallel)
    return params, parallel


def finish(plan: Plan, layout: Layout, gradients: Params) -> Params:
    """Gradients of the parameters, from those of what `start` returned."""
    for s in reversed(active_strategies(plan)):
        gradients = s.finish(plan, layout, gradients)
    return gradients


def tree(placed: Layout, pick: Callable[[Placed], Any]) -> Params:
    """A nested dict shaped like the parameters, holding `pick` of each one's placement."""
    result: Params = {}
    for one in placed:
        *folders, leaf = one.parameter.path.split("/")
        node = result
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = pick(one)
    return result
