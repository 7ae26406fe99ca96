"""Pipelines executed: every schedule against one device, what is sent, what waits, and faults."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

import jaxpar.train
from jaxpar import asked, audit, compare, expected
from jaxpar.audit.compare import agree
from jaxpar.collectives import all_reduce, vary
from jaxpar.errors import PlanError, ScheduleError
from jaxpar.model.transformer import init_params
from jaxpar.numerics import first_difference, relative_error
from jaxpar.predict.states import states
from jaxpar.strategies import fsdp, pipeline
from jaxpar.strategies.pipeline import choice, executor
from jaxpar.strategies.pipeline.builders import build
from jaxpar.strategies.pipeline.choice import PADDING, layer_order
from jaxpar.strategies.pipeline.executor import Executor
from jaxpar.strategies.pipeline.program import Program
from jaxpar.strategies.pipeline.simulate import useful_messages
from jaxpar.strategies.pipeline.stage import without_padding
from jaxpar.strategies.pipeline.tables import to_csv
from jaxpar.tour import LOSS_TOLERANCE, PARAMETER_TOLERANCE, train
from tests.helpers import SMALL, TIED, batches, plan, reference, step
from tests.test_closed_forms import asked_of, executions

DEEP = dataclasses.replace(SMALL, name="deep", num_layers=4)
UNEVEN = dataclasses.replace(SMALL, name="uneven", num_layers=5)
TIED_DEEP = dataclasses.replace(TIED, name="tied-deep", num_layers=4)
MOE = dataclasses.replace(
    SMALL, name="moe", num_layers=4, num_dense_layers=1, num_experts=4, num_experts_per_token=2,
    expert_hidden=16, router="sigmoid", balance_weight=0.01, router_z_weight=0.001, bias_rate=1e-3,
)  # fmt: skip
"""Of its 3 layers with experts, 2 stages make 4, one of them padding."""
MOE_BY_BATCH = dataclasses.replace(MOE, name="moe-by-batch", balance="batch")

# --- the executor, on stages that are as small as can be -----------------------------------------

WIDTH, ROWS = 4, 3


def stage(shared, layers, x, tokens, chunk):
    """Tokens [R, W] through one tanh per layer; a statistic per layer is part of the loss."""
    table, head = shared
    if chunk.is_first is not False:
        embedded = tokens @ table
        x = embedded if chunk.is_first is True else jnp.where(chunk.is_first, embedded, x)

    def layer(x, w):
        x = x + jnp.tanh(x @ w)
        return x, jnp.sum(x)

    x, count_L = lax.scan(layer, x, layers)
    loss = 0.01 * jnp.sum(count_L * count_L)
    if chunk.is_last is not False:
        loss += jnp.where(chunk.is_last, jnp.sum(jnp.sin(x @ head)), 0.0)
    return x, loss, {"count": count_L}


def inputs(num_chunks, num_microbatches):
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape, scale=0.5).astype(np.float32)

    shared = normal(WIDTH, WIDTH), normal(WIDTH)
    return shared, normal(num_chunks, 2, WIDTH, WIDTH), normal(num_microbatches, ROWS, WIDTH)


@functools.cache
def one_device(num_chunks, num_microbatches):
    """Loss, gradients of what is shared and of the layers, and statistics, without a pipeline."""
    shared, layers, tokens = inputs(num_chunks, num_microbatches)

    def loss(shared, layers):
        total, counts = 0.0, 0.0
        for micro_batch in tokens:
            x, found = None, []
            for g in range(num_chunks):
                chunk = executor.Chunk(None, None, g == 0, g == num_chunks - 1, True)
                x, more, stats = stage(shared, layers[g], x, micro_batch, chunk)
                total += more
                found.append(stats["count"])
            counts += jnp.stack(found)
        return total, counts

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (total, counts), (d_shared, d_layers) = run(shared, layers)
    return jax.device_get((total, d_shared, d_layers, counts))


def pipelined(schedule, **options):
    """A jitted function of `inputs`, chunks in the order of stages; results as of `one_device`."""
    p, v = schedule.num_stages, schedule.num_virtual_stages
    run = Executor(program=Program(schedule=schedule), stage=stage, **options)

    def local(shared, layers, tokens):
        shared = jax.tree.map(lambda leaf: vary(leaf, "pipe"), shared)
        (loss, stats), d_shared, d_layers = run(shared, layers, tokens)
        summed = [all_reduce(x, "pipe", scope="sum") for x in (loss, *d_shared)]
        return summed[0], tuple(summed[1:]), d_layers, stats["count"]

    whole, split = PartitionSpec(), PartitionSpec("pipe")
    mesh = jax.make_mesh((p,), ("pipe",), axis_types=(AxisType.Auto,))
    order = [chunk * p + stage for stage in range(p) for chunk in range(v)]
    mapped = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(whole, split, whole),
            out_specs=(whole, whole, split, split), check_vma=True,
        ),
        compiler_options={"xla_backend_optimization_level": 0},
    )  # fmt: skip
    return mapped, order


def error_of(schedule, **options):
    p, v, m = schedule.num_stages, schedule.num_virtual_stages, schedule.num_microbatches
    run, order = pipelined(schedule, **options)
    shared, layers, tokens = inputs(p * v, m)
    loss, d_shared, d_layers, counts = jax.device_get(run(shared, layers[order], tokens))
    back = np.argsort(order)
    return relative_error((loss, d_shared, d_layers[back], counts[back]), one_device(p * v, m))


def table(name, p, m, v=1, *, phased=False):
    return build(name, num_stages=p, num_microbatches=m, num_virtual_stages=v, phased=phased)


CASES = {
    "gpipe": (table("gpipe", 4, 6), {}),
    "gpipe, fewer than stages": (table("gpipe", 8, 3), {}),
    "1f1b": (table("1f1b", 4, 8, phased=True), {}),
    "1f1b, fewer than stages": (table("1f1b", 8, 3, phased=True), {}),
    "1f1b, always": (table("1f1b", 4, 5, phased=True), {"always_computes": True}),
    "interleaved, no multiple": (table("interleaved", 4, 6, 2, phased=True), {}),
    "zb-h1": (table("zb-h1", 4, 6), {}),
    "zb-h1, always": (table("zb-h1", 2, 3), {"always_computes": True}),
    "exact sends": (table("1f1b", 2, 3, phased=True), {"exact_sends": True}),
}


@pytest.mark.parametrize(("schedule", "options"), CASES.values(), ids=CASES)
def test_loss_gradients_and_statistics_are_one_devices(schedule, options):
    assert error_of(schedule, **options) < 1e-5


# --- what is sent --------------------------------------------------------------------------------


def permutes(schedule, **options):
    """(executions, pairs) of every permute, by whether it goes to the stage behind."""
    p, v = schedule.num_stages, schedule.num_virtual_stages
    run, _ = pipelined(schedule, **options)
    found = {True: [], False: []}

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "ppermute":
                is_forward = "send_activation" in str(eqn.source_info.name_stack)
                found[is_forward].append((times, len(eqn.params["perm"])))
            inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            for body in jaxprs_in_params(eqn.params):
                walk(getattr(body, "jaxpr", body), inner)

    walk(run.trace(*inputs(p * v, schedule.num_microbatches)).jaxpr.jaxpr, 1)
    return found


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("gpipe", 4, 6, 1), ("1f1b", 4, 8, 1), ("1f1b", 8, 3, 1), ("interleaved", 4, 8, 2)],
)
def test_phases_send_in_mv_plus_p_minus_1_slots_and_exact_sends_mv_per_boundary(name, p, m, v):
    schedule = table(name, p, m, v, phased=name != "gpipe")
    for sends in permutes(schedule).values():
        assert sum(times for times, _ in sends) == m * v + p - 1
    for sends in permutes(schedule, exact_sends=True).values():
        assert {times for times, _ in sends} == {1}
        assert sum(pairs for _, pairs in sends) == sum(useful_messages(schedule))


def test_nothing_is_sent_inside_a_branch():
    run, _ = pipelined(table("zb-h1", 2, 3))

    def walk(jaxpr, inside):
        for eqn in jaxpr.eqns:
            assert not (inside and eqn.primitive.name == "ppermute")
            for body in jaxprs_in_params(eqn.params):
                walk(getattr(body, "jaxpr", body), inside or eqn.primitive.name == "cond")

    walk(run.trace(*inputs(2, 3)).jaxpr.jaxpr, False)


def test_memory_of_gpipe_grows_by_an_activation_per_micro_batch_and_that_of_1f1b_does_not():
    """By the compiler's own count, and no slot copies a stash."""
    activation = 4 * ROWS * WIDTH

    def temp_bytes(name, m):
        schedule = table(name, 2, m, phased=name == "1f1b")
        run, _ = pipelined(schedule)
        compiled = run.lower(*inputs(2, m)).compile()
        places = Program(schedule=schedule).stashes[0].num_places
        assert not re.search(rf"= f32\[{places + 1},{ROWS},{WIDTH}\]\S* copy\(", compiled.as_text())
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temp_bytes("gpipe", 32) - temp_bytes("gpipe", 4)
    assert 28 * activation <= grown < 28 * 2 * activation + 2048
    assert abs(temp_bytes("1f1b", 32) - temp_bytes("1f1b", 4)) < 4 * activation


# --- a model through a pipeline ------------------------------------------------------------------

GPIPE, ZB = {"schedule": "gpipe"}, {"schedule": "zb-h1"}
INTERLEAVED = {"schedule": "interleaved", "num_virtual_stages": 2}


@pytest.mark.parametrize(
    ("mesh", "config", "fields"),
    [
        ("pipe=2", SMALL, {}),
        ("pipe=2,context=2", SMALL, {"remat": "full"}),  # of lone layers, which keep all
        ("pipe=2,data=2", DEEP, {"num_microbatches": 4, "remat": "full"}),
        ("pipe=2,data=2,tensor=2", UNEVEN, GPIPE | {"compute_dtype": "bfloat16"}),
        ("pipe=4,tensor=2", TIED_DEEP, {"num_microbatches": 2, "sequence": True}),
        ("pipe=2,tensor=2", UNEVEN, INTERLEAVED | {"sequence": True, "remat": "full"}),
        ("pipe=2,tensor=4", DEEP, ZB | {"sequence": True, "overlap": "unidirectional"}),
        ("pipe=2,context=2", UNEVEN, {"remat": "dots"}),
        ("pipe=4,context=2", DEEP, GPIPE | {"context": "ulysses", "reduce_dtype": "bfloat16"}),
        ("pipe=2,data=2,fsdp=2", UNEVEN, INTERLEAVED | {"zero": 1, "compute_dtype": "bfloat16"}),
        ("pipe=2,fsdp=2,tensor=2", UNEVEN, {"zero": 2, "frozen": ("layers/mlp/*", "embedding/*")}),
        ("pipe=2,fsdp=4", TIED_DEEP, {"reshard_after_forward": False}),
        ("pipe=2,fsdp=2,context=2", UNEVEN, {"remat": "full"}),
        ("pipe=2,expert=2,context=2", MOE, {"remat": "full"}),
        ("pipe=2,data=2", MOE_BY_BATCH, {"num_microbatches": 1}),
    ],
)
def test_predicted_is_what_the_program_asks_for(mesh, config, fields):
    explicit = step(mesh, config, **{"num_microbatches": 4, **fields})
    assert executions(expected(config, explicit.plan)) == executions(asked_of(explicit))


ROWS_OF_MODELS = {
    "fsdp": ("pipe=4,fsdp=2", UNEVEN, {"num_microbatches": 4}),
    "zero1": (
        "pipe=2,fsdp=2,tensor=2",
        TIED_DEEP,
        {"num_microbatches": 4, "zero": 1} | INTERLEAVED,
    ),
    "zero2": ("pipe=2,data=2,fsdp=2", UNEVEN, {"num_microbatches": 2, "zero": 2} | INTERLEAVED),
    "zb-h1": ("pipe=2", SMALL, {"num_microbatches": 8, **ZB}),
    "experts": ("pipe=2,expert=2", MOE, {"num_microbatches": 2}),
    "one micro-batch": ("pipe=2,tensor=2", SMALL, {"num_microbatches": 1}),
}


@pytest.mark.parametrize(("mesh", "config", "fields"), ROWS_OF_MODELS.values(), ids=ROWS_OF_MODELS)
def test_ten_steps_are_one_devices_and_compiled_is_what_was_asked(mesh, config, fields):
    explicit = step(mesh, config, **fields)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    compiled = traced.lower().compile()
    found = audit(compiled, mesh=explicit.plan.mesh.all_axes)
    lines = compare(expected(config, explicit.plan), asked(traced.jaxpr), found)
    assert agree(lines), [line for line in lines if not line.agrees]

    last = []

    def run(state, batch):
        last[:] = compiled(state, explicit.place(batch))
        return last

    have, want = train(explicit.init(), run, batches(10)), reference(config, 10)
    assert relative_error(have.losses, want.losses) <= LOSS_TOLERANCE
    assert relative_error(have.gradient_norms, want.gradient_norms) <= LOSS_TOLERANCE
    params = explicit.in_layer_order(have.params)
    assert relative_error(params, want.params) <= PARAMETER_TOLERANCE

    # What several devices hold, such as a tied table in parts of fsdp, is still the same on all.
    for leaf in jax.tree.leaves(last[0].params):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(first_difference(one, found[0]) is None
                   for found in copies.values() for one in found)  # fmt: skip

    # After ten steps with weight decay, the layers of zeros that even stages out are zeros.
    order = layer_order(choice.num_staged(config), explicit.plan.size("pipe"),
                        explicit.plan.num_virtual_stages)  # fmt: skip
    for leaf in jax.tree.leaves(have.params["layers"]):
        assert leaf.shape[0] == len(order)
        assert not leaf[order == PADDING].any() and leaf[order != PADDING].any()


@pytest.mark.parametrize(("p", "v", "num_layers"), [(4, 1, 30), (2, 2, 9), (4, 2, 8), (8, 1, 8)])
def test_stages_hold_the_layers_in_turn(p, v, num_layers):
    order = layer_order(num_layers, p, v).reshape(p, v, -1)
    in_turn = [layer for c in range(v) for r in range(p) for layer in order[r, c] if layer >= 0]
    assert in_turn == list(range(num_layers))  # each of them once
    sizes = (order >= 0).sum(axis=-1)
    assert sizes.max() - sizes.min() <= 1 and sizes.max() == order.shape[-1]


@pytest.mark.parametrize(
    ("config", "fields"), [(DEEP, {}), (DEEP, INTERLEAVED), (UNEVEN, INTERLEAVED), (SMALL, {})]
)
def test_initial_parameters_are_the_models_own(config, fields):
    have = plan("pipe=2", num_microbatches=2, **fields)
    want = jax.device_get(init_params(config, 3))
    staged = jax.device_get(pipeline.in_stage_order(want, config, have))
    assert first_difference(pipeline.in_layer_order(staged, config, have), want) is None


@pytest.mark.parametrize(("p", "v", "num_layers"), [(2, 2, 5), (4, 1, 6), (2, 1, 2)])
def test_statistics_are_put_at_their_layers_places_and_taken_from_there(p, v, num_layers):
    have = plan(f"pipe={p}", schedule="interleaved", num_virtual_stages=v, num_microbatches=p)
    config = dataclasses.replace(SMALL, num_layers=num_layers)
    order = layer_order(num_layers, p, v)
    own = np.where(order == PADDING, np.nan, 10.0 + order).astype(np.float32)  # nobody reads NaN

    def local(stats):
        whole = pipeline.from_stage(stats, config, have)
        whole = {k: all_reduce(t, "pipe", scope="sum") for k, t in whole.items()}
        return whole, pipeline.to_stage(whole, config, have)

    split = PartitionSpec("pipe")
    run = jax.shard_map(local, mesh=have.mesh.build(), in_specs=split,
                        out_specs=(PartitionSpec(), split))  # fmt: skip
    whole, back = jax.device_get(jax.jit(run)({"count": own}))
    assert whole["count"].tolist() == [10.0 + layer for layer in range(num_layers)]
    assert back["count"].tolist() == np.nan_to_num(own).tolist()


def test_padding_counts_nothing():
    for chunk, want in enumerate([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]):
        stats = {"a": jnp.ones(3), "b": jnp.ones((3, 2))}
        left = without_padding(stats, jnp.int32(chunk), num_layers=10, num_chunks=4)
        assert left["a"].tolist() == want and left["b"].tolist() == [[n, n] for n in want]
    assert without_padding({"a": 1}, jnp.int32(0), num_layers=8, num_chunks=4) == {"a": 1}


def test_weights_kept_for_all_slots_take_the_memory_of_zero1():
    kept = states(TIED_DEEP, plan("pipe=2,fsdp=4", reshard_after_forward=False))
    assert kept == states(TIED_DEEP, plan("pipe=2,fsdp=4", zero=1))
    passing = states(TIED_DEEP, plan("pipe=2,fsdp=4"))
    assert kept.weights > passing.weights + passing.gathered > passing.weights > 0  # the table
    assert kept.gradients > passing.gradients


def test_a_table_from_a_file(tmp_path):
    (tmp_path / "mine.csv").write_text(to_csv(table("zb-h1", 2, 4)))
    mine = plan("pipe=2", schedule=str(tmp_path / "mine.csv"), num_microbatches=4)
    built = plan("pipe=2", num_microbatches=4, **ZB)
    assert expected(SMALL, mine) == expected(SMALL, built)
    with pytest.raises(PlanError, match=r"num_microbatches=2 .*Nearest num_microbatches: 4\."):
        expected(SMALL, dataclasses.replace(mine, num_microbatches=2))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "fields", "words"),
    [
        ("pipe=4", {}, "num_layers=2 pipe=4 num_virtual_stages=1 Nearest sizes of axis pipe: 2"),
        ("pipe=2", INTERLEAVED, "num_layers=2 pipe=2 num_virtual_stages=2 num_virtual_stages: 1"),
        ("pipe=1", INTERLEAVED, "'interleaved' num_virtual_stages=2 pipe=1"),
        ("data=2", GPIPE, "schedule='gpipe' num_microbatches=1 pipe=1"),
        ("data=2", {"num_microbatches": 2}, "num_microbatches=2 pipe=1"),
        ("pipe=2", {"num_virtual_stages": 2}, "='1f1b' 'interleaved' num_virtual_stages: 1"),
        ("pipe=2", {"num_accumulation_steps": 2}, "num_accumulation_steps=2 num_microbatches=1"),
        ("pipe=2", {"num_microbatches": 3}, "batch_size=16 num_microbatches=3 15 or 18"),
        ("pipe=2,data=2", {"num_microbatches": 16}, "batch_size=16 num_microbatches=16 32"),
        ("pipe=2", {"overlap_gradients": True}, "overlap_gradients=True pipe=2 once per step"),
        ("pipe=2,fsdp=2", {}, "reshard_after_forward=True pipe=2 1 layers one group zero=1"),
        ("pipe=2,fsdp=2", {"prefetch": True}, "prefetch=True at least 3 groups 1 layers"),
        ("pipe=2,fsdp=2", {"num_layers_per_gather": 2}, "=2 divide 1 num_layers_per_gather: 1"),
        (
            "pipe=2,fsdp=2",
            {"num_layers_per_gather": 2, "reshard_after_forward": False},
            "num_layers_per_gather=2 pipe=2 reshard_after_forward=False",
        ),
        ("pipe=2", {"schedule": "zb1"}, "schedule='zb1' 'zb-h1'"),
        ("pipe=2", {"schedule": 3}, "schedule=3 (int) 'gpipe'"),
        ("pipe=2", {"schedule": table("1f1b", 2, 4)}, "num_microbatches: 4"),
        ("pipe=2", {"schedule": table("1f1b", 4, 1)}, "'1f1b' pipe=4 pipe=2 axis pipe: 4"),
        ("pipe=2", {"num_microbatches": 0}, "num_microbatches=0 whole number"),
        ("pipe=2", {"num_virtual_stages": 1.0}, "num_virtual_stages=1.0 (float)"),
    ],
)
def test_refusals_name_the_field_and_what_is_right(mesh, fields, words):
    with pytest.raises(PlanError) as caught:
        step(mesh, **fields)
    for word in words.split():
        assert word in str(caught.value)


def test_refusals_of_models_and_tables():
    with pytest.raises(PlanError, match=r"balance='batch' .*num_microbatches=2 "):
        step("pipe=2", MOE_BY_BATCH, num_microbatches=2)
    with pytest.raises(PlanError, match=r"num_layers=4 without num_dense_layers=1.*axis pipe: 3\."):
        step("pipe=4", MOE)
    with pytest.raises(ScheduleError, match=r"nowhere\.csv cannot be read"):
        plan("pipe=2", schedule="nowhere.csv")


# --- faults, planted -----------------------------------------------------------------------------

RUN, PHASED = executor._Run, table("1f1b", 4, 5, phased=True)
BACKWARD, SEND, WRITE = RUN.backward, RUN.send, executor.arrays.write


def wrong_direction(self, x, t, *, is_forward):
    return SEND(self, x, t, is_forward=not is_forward)


def only_the_last(self, row, x, gradient, total):
    is_last = row.backward_microbatch == self.schedule.num_microbatches - 1
    only = row._replace(backward=jnp.where(is_last, row.backward, 0))
    return BACKWARD(self, only, x, gradient, total)


def neighbours_micro_batch(self, row, x, gradient, total):
    wrong = jnp.maximum(row.backward_microbatch - 1, 0)
    return BACKWARD(self, row._replace(backward_microbatch=wrong), x, gradient, total)


def loss_of_idle_slots_too(self, row, x, gradient, total):
    return BACKWARD(self, row._replace(backward=jnp.maximum(row.backward, 1)), x, gradient, total)


def over_what_waits(stash, place, value, instead):
    return WRITE(stash, place if place is None else jnp.where(place > 0, place - 1, place),
                 value, instead)  # fmt: skip


def gradients_of_the_last_slot(self, row, x, gradient, total):
    new, dx = BACKWARD(self, row, x, gradient, total)
    return new._replace(shared=jax.tree.map(jnp.subtract, new.shared, total.shared)), dx


NUMBERS = {
    "the wrong direction": [(RUN, "send", wrong_direction)],
    "the last micro-batch only": [(RUN, "backward", only_the_last)],
    "another micro-batch's tokens in the backward": [(RUN, "backward", neighbours_micro_batch)],
    "idle slots counted": [(RUN, "backward", loss_of_idle_slots_too)],
    "a stash's place written over": [(executor.arrays, "write", over_what_waits)],
    "gradients not added up": [(RUN, "backward", gradients_of_the_last_slot)],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_fault_in_the_executor_is_seen_by_the_numbers(name, monkeypatch):
    for home, attribute, wrong in NUMBERS[name]:
        assert hasattr(home, attribute)
        monkeypatch.setattr(home, attribute, wrong)
    assert error_of(PHASED) > 1e-3


def send_twice(self, x, t, *, is_forward):
    return SEND(self, SEND(self, x, t, is_forward=is_forward), t, is_forward=not is_forward)


AUDITED = {
    "one permute too many": [(RUN, "send", send_twice)],
    "gradients reduced in every slot": [
        (jaxpar.train, "start_gradients", lambda params, axes: params),
        (jaxpar.train, "reduce_gradients", lambda gradients, axes, dtype: gradients),
    ],
    "everybody scores in the forward, too": [
        (RUN, "forward", lambda self, row, x: BACKWARD(
            self, row, x, x, self.start().total)[1])],
}  # fmt: skip


@pytest.mark.parametrize("name", AUDITED)
def test_fault_is_seen_by_the_audit(name, monkeypatch):
    for home, attribute, wrong in AUDITED[name]:
        assert hasattr(home, attribute)
        monkeypatch.setattr(home, attribute, wrong)
    explicit = step("pipe=2,tensor=2", num_microbatches=2)
    assert executions(expected(SMALL, explicit.plan)) != executions(asked_of(explicit))


def test_weights_gathered_in_every_slot_instead_of_once_are_seen_by_the_audit(monkeypatch):
    explicit = step("pipe=2,fsdp=2", num_microbatches=2, reshard_after_forward=False)
    want = executions(expected(SMALL, explicit.plan))
    for home in (choice, fsdp):
        monkeypatch.setattr(home, "holds_weights", lambda plan: False)
    assert executions(asked_of(explicit)) != want


def test_an_embedding_gradient_that_stays_on_its_stage_is_seen_by_its_type(monkeypatch):
    reduce = jaxpar.train.reduce_gradients

    def not_over_pipe(gradients, reduced_axes, dtype):
        axes = jax.tree.map(
            lambda axes: tuple(a for a in axes if a != "pipe"),
            reduced_axes, is_leaf=lambda axes: isinstance(axes, tuple),
        )  # fmt: skip
        return reduce(gradients, axes, dtype)

    monkeypatch.setattr(jaxpar.train, "reduce_gradients", not_over_pipe)
    with pytest.raises((ValueError, AssertionError), match="var(ying|ies)"):
        asked_of(step("pipe=2", num_microbatches=2))
