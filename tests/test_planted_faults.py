"""Faults planted in the strategies, one at a time: each is caught, and by the check that should.

A fault is a change that an honest programmer could make. Some give the right numbers at a higher
price, which only the audit sees; some cost the same and are wrong, which only the numbers see; some
cannot even be traced, because `check_vma` is on and collectives check what they are given.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxpar.train
from jaxpar.audit.compare import agree
from jaxpar.collectives import all_gather, all_reduce, vary
from jaxpar.compat import varying_axes
from jaxpar.strategies import fsdp, sequence, shards, tensor
from jaxpar.strategies.plan import BATCH_AXES
from jaxpar.strategies.prefetch import Loop
from jaxpar.tour import take_row
from tests.helpers import SMALL, batches, reference, step

NUM_STEPS = 3
SEQUENCE_LEAVE, ACCUMULATE = sequence.leave, jaxpar.train.accumulate


def reducing(reduce):
    """`reduce_gradients` replaced by one that treats each leaf like `reduce(gradient, axes)`."""

    def reduce_gradients(gradients, reduced_axes, dtype):
        with jax.named_scope("backward"):
            return jax.tree.map(lambda g, a: reduce(g, a) if a else g, gradients, reduced_axes)

    return [(jaxpar.train, "reduce_gradients", reduce_gradients)]


def summed(gradient, axes):
    return all_reduce(gradient, axes, scope="reduce_gradients")


def gather_and_cut_again(y):
    shard = SEQUENCE_LEAVE(y)
    whole, size = all_gather(shard, "tensor", dim=1, scope="extra"), shard.shape[1]
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("tensor") * size, size, axis=1)


def reduce_over_tensor_too(gradient, axes):
    total = summed(vary(gradient, "tensor"), ("data", "tensor"))
    return vary(total, "tensor") if "tensor" in varying_axes(gradient) else total


def all_reduce_then_slice(x, axis, *, dim, scope):
    """What a reduce-scatter is, at twice the price."""
    x = vary(all_reduce(x, axis, scope=scope), axis)
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, axis=dim)


def only_local_rows(tokens, local_vocab):
    is_here = tokens < local_vocab
    return jnp.where(is_here, tokens, 0), is_here


def largest_shards_norm(gradients, split_axes):
    local = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return all_reduce(vary(local, "fsdp"), "fsdp", scope="global_norm") / lax.axis_size("fsdp")


def count_padding_too(mask):
    with jax.named_scope("forward"):
        return all_reduce(vary(jnp.int32(mask.size), "data"), BATCH_AXES, scope="count_tokens")


def mean_of_micro_batches(loss, params, batch, num_steps, dtype):
    total, gradients = ACCUMULATE(loss, params, batch, num_steps, dtype)
    return total, jax.tree.map(lambda g: g / num_steps, gradients)


# name: (mesh, other fields of the plan, who sees it, what is replaced)
FAULTS = {
    "an extra all-gather": (
        "tensor=2", {"sequence": True}, {"audit"}, [(sequence, "leave", gather_and_cut_again)]),
    "a gradient reduced twice": (
        "data=4", {}, {"audit", "numbers"},
        reducing(lambda g, a: summed(vary(summed(g, a), a), a))),
    "a mean instead of a sum": (
        "data=4", {}, {"numbers"},
        reducing(lambda g, a: summed(g, a) / lax.axis_size(a))),
    "a maximum instead of a sum": (
        "data=4", {}, {"numbers"},
        reducing(lax.pmax)),
    "a missing reduction": (
        "data=4", {}, {"types"},
        reducing(lambda g, a: g)),
    "a reduction on one axis too many": (
        "data=2,tensor=2", {}, {"audit", "numbers"},
        reducing(reduce_over_tensor_too)),
    "a reduction on the wrong axis": (
        "data=2,tensor=2", {}, {"types"},
        reducing(lambda g, a: summed(vary(g, "tensor"), "tensor"))),
    "an all-reduce where a reduce-scatter belongs, activations": (
        "tensor=4", {"sequence": True}, {"audit"},
        [(sequence, "reduce_scatter", all_reduce_then_slice)]),
    "an all-reduce where a reduce-scatter belongs, gradients": (
        "fsdp=4", {}, {"audit"}, [(shards, "reduce_scatter", all_reduce_then_slice)]),
    "three operands reduced where one was meant": (
        "tensor=2", {}, {"audit"}, [(tensor, "enter", lambda x: x)]),
    "gradients reduced inside the micro-batch loop": (
        "data=4", {"num_accumulation_steps": 2}, {"audit"},
        [(jaxpar.train, "start_gradients", lambda params, axes: params),
         (jaxpar.train, "reduce_gradients", lambda gradients, axes, dtype: gradients)]),
    "norm gradients reduced layer by layer": (
        "tensor=4", {"sequence": True}, {"audit"},
        [(sequence, "STRATEGY",
          replace(sequence.STRATEGY, is_partial=tensor.STRATEGY.is_partial))]),
    "another device's key/value head": (
        "tensor=4", {}, {"numbers"},
        [(tensor, "kv_weight", lambda w, num: vary(w[:, :1], "tensor"))]),
    "tokens looked up in the wrong part of the vocabulary": (
        "tensor=2", {}, {"numbers"}, [(tensor, "_local_token", only_local_rows)]),
    "weights kept instead of gathered again": (
        "fsdp=4", {}, {"audit"},
        [(fsdp, "Loop", lambda **fields: Loop(**{**fields, "keep": True}))]),
    "clipping by the mean of local norms": (
        "fsdp=4", {}, {"numbers"}, [(jaxpar.train, "global_norm", largest_shards_norm)]),
    "padding counted as tokens": (
        "data=4", {}, {"numbers"}, [(jaxpar.train, "count_tokens", count_padding_too)]),
    "micro-batches averaged after their loss was": (
        "data=2", {"num_accumulation_steps": 2}, {"numbers"},
        [(jaxpar.train, "accumulate", mean_of_micro_batches)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    reference(SMALL, NUM_STEPS)  # before anything is wrong
    mesh, fields, seen_by, replaced = FAULTS[name]
    for home, attribute, wrong in replaced:
        assert hasattr(home, attribute)
        monkeypatch.setattr(home, attribute, wrong)
    if seen_by == {"types"}:
        with pytest.raises((ValueError, AssertionError), match="var(ying|ies)"):
            take_row(name, step(mesh, **fields), batches(1), reference(SMALL, 1))
        return
    row = take_row(name, step(mesh, **fields), batches(NUM_STEPS), reference(SMALL, NUM_STEPS))
    seen = {"audit": not agree(row.lines), "numbers": not row.numbers_agree}
    assert {check for check, saw in seen.items() if saw} == seen_by
    assert not row.agrees


def test_weights_gathered_in_a_wider_dtype_are_seen(monkeypatch):
    """On bfloat16, where the numbers cannot tell; and the honest step of the same plan agrees."""

    def lines():
        explicit = step("fsdp=4", compute_dtype="bfloat16")
        return take_row("fsdp", explicit, batches(1), reference(SMALL, 1)).lines

    honest = lines()
    assert agree(honest)
    assert any("bf16 goes as f32" in line.note for line in honest), "a CPU widens, and it is named"

    def wide(shard, axis, **how):
        gathered = all_gather(shard.astype(jnp.float32), axis, **how)
        return gathered.astype(shard.dtype)

    monkeypatch.setattr(shards, "all_gather", wide)
    assert not agree(lines())
