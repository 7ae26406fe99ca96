"""Attention over a split sequence equals attention, gradients included; and what it costs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxpar.strategies import context
from jaxpar.strategies.context import blocks, layout, ring
from tests import context_helpers as one
from tests.context_helpers import K, N, S, asked_of, context_plan, on_devices, one_device
from tests.test_closed_forms import executions

DOCUMENTS = one.documents(7)

CASES = [
    ("context=2", {"packed": True}),
    ("context=4", {"packed": True}),
    ("context=8", {"remat": "full"}),
    ("context=3", {"packed": True, "context_layout": "contiguous"}),
    ("context=4", {"packed": True, "context": "allgather"}),
    ("context=2", {"context": "allgather", "context_layout": "contiguous", "remat": "full"}),
    ("context=8", {"context": "ulysses", "packed": True}),
    ("ulysses=2", {}),
    ("context=2,ulysses=4", {"packed": True}),
    ("ulysses=2,context=3", {"context": "allgather"}),
]


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_equals_one_device(mesh, fields):
    segments = DOCUMENTS if fields.get("packed") else None
    got, want = on_devices(context_plan(mesh, **fields), segments), one_device(segments)
    assert one.error(got, want) < 2e-6


@pytest.mark.parametrize(
    "fields", [{}, {"context": "allgather", "reduce_dtype": "bfloat16"}, {"context": "ulysses"}]
)
def test_bfloat16_stays_close(fields):
    """As close as bfloat16 on one device: each element is rounded to 2⁻⁹ of itself."""
    got = on_devices(context_plan("context=2", compute_dtype="bfloat16", **fields))
    assert 1e-4 < one.error(got, one_device()) < 2e-2


@pytest.mark.parametrize("mesh", ["context=2", "ulysses=2"])
def test_keys_taken_in_tiles(mesh, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_LEN", 5)  # tiles of 4 where 12 or 24 keys are attended to
    got = on_devices(context_plan(mesh), DOCUMENTS)
    assert one.error(got, one_device(DOCUMENTS)) < 2e-6


# --- rows and blocks that see nothing -----------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"context_layout": "contiguous"}])
def test_no_block_of_another_device_may_be_seen(fields):
    """Documents as long as a device's part: whatever visits is masked altogether."""
    num_chunks = 2 if fields else 4
    segments = (np.arange(S) // (S // num_chunks))[None].repeat(one.B, axis=0).astype(np.int32)
    got = on_devices(context_plan("context=2", **fields), segments)
    assert all(np.isfinite(x).all() for x in got)
    assert one.error(got, one_device(segments)) < 2e-6


def test_rows_that_see_no_key_weigh_nothing():
    q, k, v, do = one.inputs()
    early, late = (blocks.Places(jnp.arange(S)[None] + start, None) for start in (0, S))
    nothing = blocks.attend(q, k, v, early, late)
    assert not nothing.o_BSNH.any() and (nothing.lse_BSN == -jnp.inf).all()
    everything = blocks.attend(q, k, v, late, early)
    for pair in ((nothing, everything), (everything, nothing)):
        both = blocks.merge(*pair)
        np.testing.assert_allclose(both.o_BSNH, everything.o_BSNH, rtol=1e-6)
        np.testing.assert_allclose(both.lse_BSN, everything.lse_BSN, rtol=1e-6)
    neither = blocks.merge(nothing, nothing)
    assert not neither.o_BSNH.any() and (neither.lse_BSN == -jnp.inf).all()
    rows = blocks.Rows.of(nothing.o_BSNH, nothing.lse_BSN, do)
    gradients = blocks.attend_backward(q, k, v, early, late, rows)
    assert not any(gradient.any() for gradient in gradients)


# --- layouts ------------------------------------------------------------------------------------


def sequence_layout(name, num_ranks, num_slices=1):
    return layout.SequenceLayout(
        name=name, rank_axis="context", slice_axis="ulysses", num_ranks=num_ranks,
        num_slices=num_slices,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_work(num_ranks):
    seq_len = num_ranks * 32
    zigzag, contiguous = (sequence_layout(name, num_ranks) for name in ("zigzag", "contiguous"))
    for one_layout in (zigzag, contiguous):
        rank_positions = one_layout.order(seq_len).reshape(num_ranks, -1)
        counted = [
            sum(int((mine[:, None] >= theirs).sum()) for theirs in rank_positions)
            for mine in rank_positions
        ]
        assert counted == one_layout.num_visible_pairs(seq_len)
        assert sum(counted) == seq_len * (seq_len + 1) // 2
    even, uneven = zigzag.num_visible_pairs(seq_len), contiguous.num_visible_pairs(seq_len)
    assert max(even) <= 1.01 * min(even)
    assert max(uneven) / np.mean(uneven) > 2 - 1.5 / num_ranks


def scores(fields):
    """Pairs of a query and a key that a device computes with, per sequence and head.

    Each takes 2·H multiplications forward and 5·H backward.
    """
    plan = context_plan("context=8", **fields)
    run = one.program(plan)
    shapes = [jax.ShapeDtypeStruct((one.B, S, n, one.H), jnp.float32) for n in (N, K, K, N)]
    return multiplications(jax.make_jaxpr(run)(*shapes).jaxpr) / (one.B * N * 7 * one.H)


def multiplications(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += eqn.outvars[0].aval.size * math.prod(shape[d] for d in contracted)
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jaxprs_in_params(eqn.params):
            total += repeats * multiplications(getattr(body, "jaxpr", body))
    return total


def test_zigzag_computes_no_block_that_is_masked_altogether():
    """Its own block, and half a block for each other device's: (n+1)/2 instead of n."""
    block = (S // 8) ** 2
    assert scores({"context_layout": "contiguous"}) == 8 * block
    assert scores({}) == 4.5 * block


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("num_ranks", "num_slices"), [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3)])
def test_positions_on_devices_are_the_order_on_the_host(name, num_ranks, num_slices):
    spread = sequence_layout(name, num_ranks, num_slices)
    seq_len = 2 * spread.divisor
    plan = context_plan(f"context={num_ranks},ulysses={num_slices}", seq_len=seq_len)
    local_len = seq_len // (num_ranks * num_slices)
    spec = jax.P(context.AXES)
    positions = jax.shard_map(
        lambda x: x + spread.positions(local_len), mesh=plan.mesh.build(), in_specs=spec,
        out_specs=spec,
    )(jnp.zeros(seq_len, jnp.int32))  # fmt: skip
    order = spread.order(seq_len)
    assert positions.tolist() == order.tolist()
    assert sorted(order) == list(range(seq_len))
    parts = order.reshape(num_ranks, -1)
    assert (np.diff(parts, axis=1) > 0).all(), "a device's own tokens are in order"


# --- communication ------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["context=2", "context=3", "context=8", "ulysses=8",
                                  "context=2,ulysses=4", "context=3,ulysses=2"])  # fmt: skip
@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_predicted_is_what_an_attention_asks_for(mesh, way, remat):
    if way == "ulysses" and ("ulysses" in mesh or "3" in mesh):
        return  # heads are exchanged over one axis only, and there are 8
    dtypes = ("float32", "bfloat16") if remat == "none" else ("bfloat16", "float32")
    plan = context_plan(
        mesh, context=way, remat=remat, compute_dtype=dtypes[0], reduce_dtype=dtypes[1]
    )
    predicted = executions(context.STRATEGY.expected(one.TWO_LAYERS, plan, ()))
    assert predicted == {key: 2 * count for key, count in executions(asked_of(plan)).items()}


def test_ring_sends_n_minus_one_blocks_in_the_dtype_and_heads_of_keys():
    rows = asked_of(context_plan("context=8", compute_dtype="bfloat16"))
    block = one.B * (S // 8) * K * one.H
    assert executions(rows) == {
        ("collective-permute", ("context",), "forward", "bf16", 2 * block): 2 * 7,
        ("collective-permute", ("context",), "backward", "bf16", 2 * block): 2 * 7,
        ("collective-permute", ("context",), "backward", "f32", 4 * block): 2 * 7,
    }


def test_ulysses_is_four_exchanges_each_way():
    rows = asked_of(context_plan("context=4", context="ulysses"))
    mine = 4 * one.B * (S // 4) * one.H
    assert executions(rows) == {
        ("all-to-all", ("context",), phase, "f32", heads * mine): 2
        for phase in ("forward", "backward")
        for heads in (N, 4)  # two key/value heads go to four devices
    }


# --- memory -------------------------------------------------------------------------------------


def temp_bytes(num_ranks, block_len, attention):
    """Of attention and its backward, compiled."""
    plan = context_plan(f"context={num_ranks}", seq_len=num_ranks * block_len)
    spec = jax.P(None, "context")
    shape = jax.ShapeDtypeStruct((1, plan.seq_len, 1, 8), jnp.float32)
    sharded = jax.shard_map(
        attention, mesh=plan.mesh.build(), in_specs=(spec, spec, spec), out_specs=spec
    )
    run = jax.jit(jax.grad(lambda *qkv: jnp.sum(sharded(*qkv) ** 2), argnums=(0, 1, 2)))
    compiled = run.lower(shape, shape, shape).compile(compiler_options=one.QUICK)
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_a_devices_part_alone(monkeypatch):
    """Of scratch: a part of the sequence times a tile of keys, and no more with more devices."""
    monkeypatch.setattr(blocks, "TILE_LEN", 32)

    def ring_of(num_ranks):
        return ring.Ring(
            axis="context", layout=sequence_layout("zigzag", num_ranks), reduce_dtype=jnp.float32
        )

    short = temp_bytes(4, 64, lambda *qkv: ring.ring_attention(ring_of(4), *qkv, None))
    long = temp_bytes(8, 128, lambda *qkv: ring.ring_attention(ring_of(8), *qkv, None))
    assert long < 2 * short, "four times the length, on twice the devices"
    assert temp_bytes(8, 128, lambda *qkv: ring._forward(ring_of(8), *qkv, None)[0]) > 6 * long
