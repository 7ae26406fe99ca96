"""Training with the sequence split: equal to one device, placed right, refused by name."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar.train
from jaxpar import asked, audit, expected
from jaxpar.audit.compare import agree, compare
from jaxpar.errors import PlanError
from jaxpar.reference import plain_step, reference_init
from jaxpar.strategies import context
from jaxpar.strategies.context import blocks, gather, ring, ulysses
from jaxpar.strategies.context.layout import SequenceLayout
from jaxpar.text import Batch
from jaxpar.tour import default_optimizer, take_row, train
from tests import context_helpers as one
from tests.helpers import BATCH_SIZE, SEQ_LEN, SMALL, batches, corpus, plan, reference, start, step
from tests.test_closed_forms import executions

NUM_STEPS = 10
PACKED, ACCUMULATE, REMAT = {"packed": True}, {"num_accumulation_steps": 2}, {"remat": "full"}
ULYSSES = {"context": "ulysses"}

CASES = {
    "ring": [
        ("context=2", {"context_layout": "contiguous"} | PACKED),
        ("data=2,context=4", ACCUMULATE),
        ("context=2,tensor=2", {"sequence": True} | REMAT),
    ],
    "allgather": [("context=4", PACKED | REMAT), ("fsdp=2,context=2,ulysses=2", ACCUMULATE)],
    "ulysses": [("data=2,context=2", PACKED), ("fsdp=2,context=4", REMAT)],
}
"""Beside the rows of the tour, which have 8 devices."""


def packed_batches(num_steps):
    return [
        corpus().batch(i, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, packed=True)
        for i in range(num_steps)
    ]


@functools.cache
def plain():
    return jax.jit(plain_step(SMALL, default_optimizer()))


@functools.cache
def packed_reference(num_steps):
    state = reference_init(SMALL, default_optimizer())
    return train(state, plain(), packed_batches(num_steps))


def attentive(state):
    """The same state, with weights so large that it matters who attends to what."""
    layers = state.params["layers"]
    attention = {name: 20 * weight for name, weight in layers["attention"].items()}
    return state._replace(params=state.params | {"layers": layers | {"attention": attention}})


def first_loss(state, batch, explicit=None):
    """Of such a state, on one device or by a step."""
    if explicit is None:
        return float(plain()(attentive(state), batch)[1].loss)
    lowered = explicit.jitted.lower(*explicit.abstract_inputs)
    run = lowered.compile(compiler_options=one.QUICK)
    return float(run(attentive(state), explicit.place(batch))[1].loss)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param(mesh, {"context": name} | fields, id=f"{name}:{mesh}")
        for name, cases in CASES.items()
        for mesh, fields in cases
    ],
)
def test_equals_one_device_and_its_closed_form(mesh, fields):
    is_packed = fields.get("packed", False)
    data = packed_batches(NUM_STEPS) if is_packed else batches(NUM_STEPS)
    want = packed_reference(NUM_STEPS) if is_packed else reference(SMALL, NUM_STEPS)
    row = take_row("context", step(mesh, **fields), data, want)
    assert row.numbers_agree, (row.loss_error, row.gradient_norm_error, row.parameter_error)
    assert agree(row.lines), [line for line in row.lines if not line.agrees]


@pytest.mark.parametrize("way", ["ring", "allgather"])
def test_what_one_layer_fetches_again_is_not_kept_instead(way):
    """Forward and backward of a single layer are one stretch of code: two equal collectives in it
    would be done once, and what arrived held in between."""
    lone = dataclasses.replace(SMALL, name="one layer", num_layers=1)
    explicit = step("context=4", lone, context=way)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    audited = audit(traced.lower().compile(), mesh=explicit.plan.mesh.all_axes)
    lines = compare(expected(lone, explicit.plan), asked(traced.jaxpr), audited)
    assert agree(lines), [line for line in lines if not line.agrees]


def test_positions_and_documents_matter():
    """Attention of an untrained model is nearly even, so a step has to be told apart otherwise."""
    (batch,) = packed_batches(1)
    explicit = step("context=2", **PACKED)
    init = functools.partial(reference_init, SMALL, default_optimizer())
    want = first_loss(init(), batch)
    assert first_loss(start(explicit), batch, explicit) == pytest.approx(want, rel=1e-5)
    blind = batch._replace(segments_BS=None)
    assert first_loss(init(), blind) != pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("mesh", ["data=2,context=2,tensor=2", "fsdp=2,context=4", "context=4",
                                  "ulysses=2,context=2,tensor=2"])  # fmt: skip
@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
def test_predicted_is_what_a_step_asks_for(mesh, way):
    if way == "ulysses" and "ulysses" in mesh:
        return
    fields = {"num_accumulation_steps": 2, "reduce_dtype": "bfloat16", **PACKED}
    if way == "ring" or "tensor" in mesh:
        fields = {"compute_dtype": "bfloat16", "sequence": "tensor" in mesh, **REMAT}
    explicit = step(mesh, context=way, **fields)
    rows = asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
    assert executions(expected(SMALL, explicit.plan)) == executions(rows)


# --- placing a batch ----------------------------------------------------------------------------


def test_a_batch_is_placed_in_the_order_of_the_layout_and_only_once():
    explicit = step("data=2,context=4", **PACKED)
    batch = packed_batches(1)[0]
    order = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    placed = explicit.place(batch)
    again = explicit.place(placed)
    assert placed.numbers_BS is None
    for name, array in batch._replace(numbers_BS=None)._asdict().items():
        for one_of in (placed, again) if array is not None else ():
            np.testing.assert_array_equal(getattr(one_of, name), array[:, order])
    rank_1 = [s for s in placed.tokens_BS.addressable_shards if s.index[1].start == 4]
    assert rank_1 and all(s.data.shape == (BATCH_SIZE // 2, 4) for s in rank_1)
    whole_rows = {s.data.shape for s in placed.segments_BS.addressable_shards}
    assert whole_rows == {(BATCH_SIZE // 2, SEQ_LEN)}, "attention masks need all documents"
    on_one_device = jax.device_put(batch)
    np.testing.assert_array_equal(explicit.place(on_one_device).tokens_BS, placed.tokens_BS)


@pytest.mark.parametrize(("mesh", "fields"), [("context=4", ULYSSES), ("ulysses=4", {}),
                                              ("context=4", {"context_layout": "contiguous"}),
                                              ("data=4", {})])  # fmt: skip
def test_layouts_that_leave_tokens_in_their_order(mesh, fields):
    assert context.token_order(plan(mesh, **fields)) is None


def test_a_device_without_any_valid_token_gives_no_nan():
    """And the rest is what one device makes of it."""
    explicit = step("context=2", context_layout="contiguous", **PACKED)
    batch = packed_batches(1)[0]
    late = np.arange(SEQ_LEN) >= SEQ_LEN // 2
    batch = Batch(*(np.where(late, 0, x).astype(x.dtype) for x in batch))
    want = train(reference_init(SMALL, default_optimizer()), plain(), [batch])
    got = train(start(explicit), explicit, [batch])
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.gradient_norms, want.gradient_norms, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got.params))


# --- refused by name ----------------------------------------------------------------------------

ERRORS = {
    "odd zigzag": ("context=4", {"seq_len": 20}, "seq_len=20 context=4 8: 16 or 24"),
    "odd contiguous": (
        "context=4", {"seq_len": 18, "context_layout": "contiguous"}, "seq_len=18 4: 16 or 20"),
    "odd slices": ("context=2,ulysses=4", {"seq_len": 12}, "context=2 ulysses=4 8: 8 or 16"),
    "odd, with tensor": (
        "context=2,tensor=4", {"seq_len": 12, "sequence": True}, "tensor=4 8: 8 or 16"),
    "heads": ("context=3", {"seq_len": 18, **ULYSSES}, "num_heads=8 context=3: 2"),
    "heads of an inner axis": ("context=2,ulysses=3", {"seq_len": 24}, "num_heads=8 ulysses=3: 2"),
    "heads left by tensor": (
        "context=4,tensor=4", ULYSSES, "num_heads=8 tensor=4 context=4: 2"),
    "two exchanges": ("context=2,ulysses=2", ULYSSES, "context=2 ulysses=2 ulysses=4"),
    "no such axis": ("data=2", ULYSSES, "context='ulysses' context=1"),
    "no such axis, layout": ("data=2", {"context_layout": "contiguous"}, "context=1"),
    "unknown way": ("context=2", {"context": "rings"}, "context='rings' 'ring', 'allgather'"),
    "unknown layout": ("context=2", {"context_layout": "zig"}, "'zigzag', 'contiguous'"),
    "not a switch": ("context=2", {"packed": 1}, "packed=1 True, False"),
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "fields", "words"), ERRORS.values(), ids=ERRORS)
def test_refused_by_name(mesh, fields, words):
    with pytest.raises(PlanError) as caught:
        context.STRATEGY.check(SMALL, plan(mesh, **fields))
    message = str(caught.value)
    named, _, choice = words.partition(": ")
    assert all(word in message for word in named.split()), message
    assert choice in message.rpartition(": ")[2]


def test_key_value_heads_that_go_into_no_ranks():
    odd = one.ModelConfig(
        name="odd", num_layers=1, embed=8, num_heads=12, num_kv_heads=3, head_dim=4, mlp_hidden=8,
        vocab=256, max_seq_len=64,
    )  # fmt: skip
    with pytest.raises(PlanError, match="num_kv_heads=3 and context=2.* Nearest.*context: 1 or 3"):
        context.STRATEGY.check(odd, plan("context=2", seq_len=48, **ULYSSES))
    context.STRATEGY.check(odd, plan("context=3", seq_len=48, **ULYSSES))


@pytest.mark.parametrize("packed", [False, True])
def test_documents_without_packed_or_the_reverse(packed):
    batch = (batches if packed else packed_batches)(1)[0]
    with pytest.raises(PlanError, match=f"packed={packed}, and segments_BS is"):
        step("context=2", packed=packed).place(batch)


# --- planted faults -----------------------------------------------------------------------------

SEND, RING_SHIFT, SPLIT_HEADS = ring.Ring.send, ring.ring_shift, ulysses.split_heads
PART_PLACES, PLACE = SequenceLayout.part_places, jaxpar.train.TrainStep.place


def mean_of_pieces(piece, other):
    both = blocks.merge(piece, other)
    return both._replace(o_BSNH=(piece.o_BSNH + other.o_BSNH) / 2)


def three_hops_for_one(x, axis, **scope):
    return RING_SHIFT(RING_SHIFT(x, axis, by=2, **scope), axis, by=-1, **scope)


def own_documents_everywhere(layout, rank, shape, segments):
    mine = PART_PLACES(layout, jax.lax.axis_index("context"), shape, segments)
    return PART_PLACES(layout, rank, shape, segments)._replace(document_BS=mine.document_BS)


def never_home(self, x, scope, again=False):
    return x if scope == "ring/dkv" else SEND(self, x, scope, again)


def all_heads_travel(attention):
    def wide(settings, q, k, v, segments):
        k, v = (x.repeat(q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return attention(settings, q, k, v, segments)

    return wide


# name: (mesh, other fields of the plan, who sees it, what is replaced)
FAULTS = {
    "a ring that turns the wrong way": (
        "context=3", {}, {"numbers"},
        [(ring, "ring_shift", lambda x, axis, **scope: RING_SHIFT(x, axis, by=-1, **scope))]),
    "pieces added up without their weights": (
        "context=2", {}, {"numbers"}, [(ring, "merge", mean_of_pieces)]),
    "one permute too many": (
        "context=4", {}, {"audit"}, [(ring, "ring_shift", three_hops_for_one)]),
    "gradients of keys that never come home": (
        "context=3", {}, {"audit", "numbers"}, [(ring.Ring, "send", never_home)]),
    "a ring differentiated hop by hop": (
        "context=4", {}, {"audit"},
        [(context, "ring_attention", lambda *args: ring._forward(*args)[0])]),
    "key/value heads repeated before they travel": (
        "context=4", {}, {"audit"},
        [(context, "ring_attention", all_heads_travel(ring.ring_attention))]),
    "documents of other ranks ignored": (
        "context=2", {"packed": True}, {"numbers"},
        [(SequenceLayout, "part_places", own_documents_everywhere)]),
    "rows without a key turned into NaN": (
        "context=2", {"packed": True}, {"numbers"}, [(blocks, "_finite", lambda x: x)]),
    "keys gathered in another order than their positions": (
        "context=2", {"context": "allgather"}, {"numbers"},
        [(SequenceLayout, "order", lambda layout, seq_len: np.arange(seq_len, dtype=np.int32))]),
    "gathered keys kept in float32": (
        "context=2", {"context": "allgather", "compute_dtype": "bfloat16"}, {"audit"},
        [(gather.Gather, "whole", lambda self, x, **again: gather.all_gather(
            x.astype("float32"), "context", dim=1, scope="gather_kv", **again).astype(x.dtype))]),
    "key/value heads sent to the wrong queries": (
        "context=4", {"context": "ulysses"}, {"numbers"},
        [(ulysses.jnp, "repeat", lambda x, times, axis: jax.numpy.concatenate(times * [x], axis))]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_attention_is_seen(name, monkeypatch):
    mesh, fields, seen_by, replaced = FAULTS[name]
    # As many documents as chunks, so that some blocks are masked altogether.
    segments = one.documents(12) if fields.get("packed") else None
    plan = one.context_plan(mesh, **fields)
    want = one.one_device(segments)
    predicted = executions(context.STRATEGY.expected(one.TWO_LAYERS, plan, ()))
    order = context.sequence_layout(plan).order(plan.seq_len)
    for home, attribute, wrong in replaced:
        assert hasattr(home, attribute)
        monkeypatch.setattr(home, attribute, wrong)
    seen = set()
    if predicted != {key: 2 * count for key, count in executions(one.asked_of(plan)).items()}:
        seen.add("audit")
    if "numbers" in seen_by and not one.error(one.on_devices(plan, segments, order), want) < 1e-5:
        seen.add("numbers")
    assert seen == seen_by


def labels_left_where_they_were(explicit, batch):
    placed = PLACE(explicit, batch)
    return placed._replace(labels_BS=jax.device_put(batch.labels_BS, placed.labels_BS.sharding))


# name: (what is replaced and by what); all seen by the numbers of a step on context=2
STEP_FAULTS = {
    "every part begins at position 0": (
        SequenceLayout, "positions", lambda layout, local_len: jax.numpy.arange(local_len)),
    "labels not permuted with their tokens": (
        jaxpar.train.TrainStep, "place", labels_left_where_they_were),
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_fault_in_a_step_is_seen(name, monkeypatch):
    (batch,) = packed_batches(1)
    want = first_loss(reference_init(SMALL, default_optimizer()), batch)
    home, attribute, wrong = STEP_FAULTS[name]
    assert hasattr(home, attribute)
    monkeypatch.setattr(home, attribute, wrong)
    explicit = step("context=2", **PACKED)
    assert first_loss(start(explicit), batch, explicit) != pytest.approx(want, rel=1e-4)


def test_a_gradient_not_reduced_over_the_context_does_not_trace(monkeypatch):
    monkeypatch.setattr(jaxpar.train, "reduce_gradients", lambda gradients, axes, dtype: gradients)
    explicit = step("context=2")
    with pytest.raises((ValueError, AssertionError), match="var(ying|ies)"):
        explicit.jitted.trace(*explicit.abstract_inputs)


def test_every_fault_is_told_with_who_sees_it():
    page = (Path(__file__).parent.parent / "docs" / "10-context.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([a-z, ]+) \|$", page, re.MULTILINE)
    told = dict(rows[1:])  # without the heads of the columns
    assert told == {name: ", ".join(sorted(seen_by)) for name, (_, _, seen_by, _) in FAULTS.items()
                    } | dict.fromkeys(STEP_FAULTS, "numbers")  # fmt: skip
