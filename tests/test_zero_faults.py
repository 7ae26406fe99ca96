"""Faults planted in what shards states, one at a time, and the check that sees each."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxpar.train
from jaxpar import expected
from jaxpar.collectives import all_gather, all_reduce, reduce_scatter, vary
from jaxpar.strategies import fsdp, prefetch, shards, zero1, zero2
from jaxpar.strategies.shards import Weight
from tests.helpers import step
from tests.test_closed_forms import asked_of, executions
from tests.test_zero import (
    ACCUMULATE,
    DEEP,
    PAIRS,
    PREFETCH,
    compiled,
    errors,
    frozen_run,
    is_right,
    moved,
    reference,
    temporary_bytes,
)

SCATTER, SCAN = Weight.scatter, fsdp.scan


def own_part_only(x, axis, *, dim, scope):
    """A reduce-scatter without the sum."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, axis=dim)


def mean_over_shards(x, axis, *, dim, scope):
    return reduce_scatter(x, axis, dim=dim, scope=scope) / lax.axis_size(axis)


def summed_over_data_too(x, axis, *, dim, scope):
    shard = reduce_scatter(x, axis, dim=dim, scope=scope)
    return vary(all_reduce(shard, "data", scope=scope), "data")


def in_the_gradients_dtype(self, gradient):
    """What the transpose of a cast and a gather would do."""
    return SCATTER(replace(self, reduce_dtype=gradient.dtype), gradient)


def in_float32(x, axis, **how):
    return all_gather(x.astype(jnp.float32), axis, **how).astype(x.dtype)


def of_the_wrong_layer(stacked, i):
    """Off by one: what was gathered last turn, and once more at the end."""
    i = jnp.maximum(i - 1, 0)
    return jax.tree.map(lambda t: lax.dynamic_index_in_dim(t, i, keepdims=False), stacked)


def every_other_layer(body, x, stacked, plan, weights):
    """Groups of layers that are k apart, not next to each other."""
    order = jnp.arange(DEEP.num_layers).reshape(plan.num_layers_per_gather, -1).T.ravel()
    return SCAN(body, x, jax.tree.map(lambda t: t[order], stacked), plan, weights)


def as_if(zero, function):
    """`function`, told of a plan with another `zero`."""
    return lambda plan, *rest: function(replace(plan, zero=zero), *rest)


SCATTERED_EACH_TIME = replace(
    zero1.STRATEGY, start=as_if(2, zero2.start), finish=as_if(2, zero1.finish)
)
ONLY_MATRICES = replace(fsdp.STRATEGY, is_partial=lambda parameter: len(parameter.dims) > 1)

# name: (mesh, other fields of the plan, who sees it, home, attribute, what stands there instead)
FAULTS = {
    "gradients scattered for every micro-batch instead of once": (
        "fsdp=4", {"zero": 1} | ACCUMULATE, "audit", zero1, "STRATEGY", SCATTERED_EACH_TIME),
    "an own part of a gradient that nobody summed": (
        "fsdp=4", {"zero": 1}, "both", shards, "reduce_scatter", own_part_only),
    "a mean over shards": (
        "fsdp=4", {"zero": 2}, "numbers", shards, "reduce_scatter", mean_over_shards),
    "shards summed over data twice": (
        "data=2,fsdp=2", {"zero": 2}, "both", shards, "reduce_scatter", summed_over_data_too),
    "norm gradients without a sum": (
        "fsdp=4", {}, "types", jaxpar.train, "reduce_gradients", lambda g, axes, dtype: g),
    "norm gradients summed layer by layer": (
        "fsdp=4", {}, "audit", fsdp, "STRATEGY", ONLY_MATRICES),
    "gradients reduced in the dtype they come in": (
        "fsdp=4", {"compute_dtype": "bfloat16"}, "audit", Weight, "scatter",
        in_the_gradients_dtype),
    "weights gathered once per step in the wrong dtype": (
        "fsdp=4", {"zero": 2, "compute_dtype": "bfloat16"}, "audit", shards, "all_gather",
        in_float32),
    "the wrong layer's weights prefetched": (
        "fsdp=4", PREFETCH, "numbers", prefetch, "_at", of_the_wrong_layer),
    "groups of layers that are no neighbours": (
        "fsdp=4", PAIRS, "numbers", fsdp, "scan", every_other_layer),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    mesh, fields, seen_by, home, attribute, wrong = FAULTS[name]
    reference(DEEP, 2)  # before anything is wrong
    monkeypatch.setattr(home, attribute, wrong)
    explicit = step(mesh, DEEP, **fields)
    if seen_by == "types":
        with pytest.raises((ValueError, AssertionError), match="var(ying|ies)"):
            asked_of(explicit)
        return
    same = executions(expected(DEEP, explicit.plan)) == executions(asked_of(explicit))
    assert same == (seen_by == "numbers")
    if seen_by != "audit":
        assert not is_right(errors(explicit, compiled(explicit)[1], 2))


def test_weight_decay_on_frozen_parameters_is_seen(monkeypatch):
    """Gradients of zero do not keep a parameter where it is."""
    apply = jaxpar.train.apply_gradients
    honest = frozen_run.__wrapped__("fsdp=2", 3)
    assert not moved(*honest)

    def with_zeros(state, gradients, optimizer):
        gradients = jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g is None else g,
            gradients,
            state.params,
            is_leaf=lambda g: g is None,
        )
        return apply(state, gradients, optimizer)

    monkeypatch.setattr(jaxpar.train, "apply_gradients", with_zeros)
    monkeypatch.setattr(jaxpar.train.TrainStep, "_trained", lambda self, params: params)
    monkeypatch.setattr(
        jaxpar.train.TrainStep, "_reduced_axes", lambda self, placed: placed.reduced_axes
    )
    assert moved(*frozen_run.__wrapped__("fsdp=2", 3)) == ["embedding/table", "layers/mlp/up"]


def test_a_whole_gradient_in_zero2_is_seen(monkeypatch):
    """Scattered in the end, and right; the memory tells."""
    _, honest, closed = temporary_bytes(2)
    whole = replace(zero2.STRATEGY, start=as_if(1, zero1.start), finish=as_if(1, zero1.finish))
    monkeypatch.setattr(zero2, "STRATEGY", whole)
    _, whole, _ = temporary_bytes.__wrapped__(2)
    assert whole - honest > 2 * closed.gradients
