"""ZeRO-1, ZeRO-2, FSDP and HSDP: predicted = asked = compiled, and ten steps equal one device."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import optax
import pytest

from jaxpar import ModelConfig, TrainStep, asked, audit, compare, expected
from jaxpar.audit.compare import agree
from jaxpar.audit.reader import read_hlo
from jaxpar.errors import PlanError
from jaxpar.numerics import relative_error
from jaxpar.predict.states import states
from jaxpar.reference import plain_step, reference_init
from jaxpar.strategies import compose, shards
from jaxpar.tour import LOSS_TOLERANCE, PARAMETER_TOLERANCE, default_optimizer, train
from jaxpar.train import TrainState
from tests.helpers import SMALL, batches, plan, step
from tests.test_closed_forms import asked_of, executions

NUM_STEPS = 10

DEEP = ModelConfig(
    name="deep", num_layers=4, embed=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_hidden=16,
    vocab=256, max_seq_len=64,
)  # fmt: skip
TIED = dataclasses.replace(DEEP, name="deep-tied", tied_embedding=True, mlp="gelu")
ODD = dataclasses.replace(DEEP, name="odd", embed=18, head_dim=6, mlp_hidden=24)
"""On fsdp=4 its queries are split by heads, its tables by vocabulary, its keys not at all."""

ACCUMULATE = {"num_accumulation_steps": 2}
SEQUENCE = {"sequence": True}
PREFETCH = {"prefetch": True}
KEEP = {"reshard_after_forward": False}
PAIRS = {"num_layers_per_gather": 2}
LAYERWISE = {"overlap_gradients": True}
FROZEN = {"frozen": ("embedding/*", "layers/mlp/up")}

CASES = [
    ("fsdp=4", DEEP, {"zero": 1}),
    ("data=2,fsdp=2", TIED, {"zero": 1} | ACCUMULATE),
    ("data=2,fsdp=2,tensor=2", DEEP, {"zero": 1} | SEQUENCE),
    ("fsdp=4", TIED, {"zero": 2}),
    ("data=2,fsdp=2", DEEP, {"zero": 2} | ACCUMULATE | LAYERWISE),
    ("data=2,fsdp=2,tensor=2", DEEP, {"zero": 2} | SEQUENCE | {"remat": "full"}),
    ("fsdp=4", ODD, PREFETCH | ACCUMULATE),
    ("data=2,fsdp=2", DEEP, PREFETCH | KEEP | {"remat": "dots"}),
    ("fsdp=2,tensor=2", DEEP, PAIRS | SEQUENCE),
    ("data=4", DEEP, LAYERWISE | ACCUMULATE),
]


@functools.cache
def beginning(config):
    """The state every run starts from, on the host."""
    return jax.device_get(reference_init(config, default_optimizer()))


@functools.cache
def reference(config, num_steps):
    run = jax.jit(plain_step(config, default_optimizer()))
    return train(jax.device_put(beginning(config)), run, batches(num_steps))


def compiled(explicit):
    """The traced and the compiled program."""
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    return traced, traced.lower().compile()


def trained(explicit, program, state, num_steps):
    shardings = jax.tree.map(lambda x: x.sharding, explicit.abstract_inputs[0])
    state = jax.device_put(state, shardings)
    return train(state, lambda s, batch: program(s, explicit.place(batch)), batches(num_steps))


def errors(explicit, program, num_steps):
    """Relative errors of losses, gradient norms and parameters against one device."""
    config = explicit.config
    have = trained(explicit, program, beginning(config), num_steps)[:3]
    want = reference(config, num_steps)[:3]
    return [relative_error(h, w) for h, w in zip(have, want, strict=True)]


def is_right(found):
    loss, norm, params = found
    return max(loss, norm) <= LOSS_TOLERANCE and params <= PARAMETER_TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "config", "fields"), CASES, ids=lambda value: getattr(value, "name", str(value))
)
def test_predicted_is_compiled_and_ten_steps_equal_one_device(mesh, config, fields):
    explicit = step(mesh, config, **fields)
    traced, program = compiled(explicit)
    lines = compare(
        expected(config, explicit.plan),
        asked(traced.jaxpr),
        audit(program, mesh=explicit.plan.mesh.axes),
    )
    assert agree(lines), [line for line in lines if not line.agrees]
    assert is_right(errors(explicit, program, NUM_STEPS))
    losses = reference(config, NUM_STEPS).losses
    assert losses[-1] < losses[0] - 0.03, "it has to learn, or equality says little"


def test_one_layer_gathers_again_too():
    """Where no loop keeps them apart, two equal gathers would be done once, and the result held."""
    lone = dataclasses.replace(SMALL, name="one layer", num_layers=1)
    explicit = step("fsdp=4", lone)
    traced, program = compiled(explicit)
    audited = audit(program, mesh=explicit.plan.mesh.axes)
    lines = compare(expected(lone, explicit.plan), asked(traced.jaxpr), audited)
    assert agree(lines), [line for line in lines if not line.agrees]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_that_devices_share_are_gathered_again_too(num_kv_heads):
    """A device uses one of them. If its slice were kept, nobody would read what is gathered again,
    and JAX would leave that out of the program."""
    config = dataclasses.replace(SMALL, name="shared", num_kv_heads=num_kv_heads)
    explicit = step("fsdp=2,tensor=4", config)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    wanted = [row for row in asked(traced.jaxpr) if row.kind == "all-gather"]
    assert traced.lower().as_text().count('"stablehlo.all_gather"') == len(wanted) > 14


# --- closed forms ----------------------------------------------------------------------------

CHOICES = {
    "stage": ({"zero": 1}, {"zero": 2}, {}, PREFETCH, KEEP, PAIRS),
    "num_accumulation_steps": (1, 2),
    "gather_dtype": (None, "float32"),
    "reduce_dtype": ("float32", "bfloat16"),
    "frozen": ((), FROZEN["frozen"]),
}
OPTIONS = list(itertools.product(*CHOICES.values()))


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("fsdp=4", {}),
        ("data=2,fsdp=2", LAYERWISE),
        ("fsdp=2,tensor=2", SEQUENCE | {"remat": "full"}),
    ],
)
def test_predicted_is_asked(mesh, more):
    offset = len(mesh) % 5
    for stage, *values in OPTIONS[offset::12]:
        fields = {**dict(zip(list(CHOICES)[1:], values, strict=True)), **stage, **more}
        if fields.get("zero") == 1:
            fields.pop("overlap_gradients", None)
        explicit = step(mesh, DEEP, compute_dtype="bfloat16", **fields)
        assert executions(expected(DEEP, explicit.plan)) == executions(asked_of(explicit)), fields


def count(rows, kind, scope):
    """Executions, and bytes of all of them together, of what stands in a scope."""
    mine = [row for row in rows if row.kind == kind and scope in row.scope]
    return sum(r.count for r in mine), sum(r.count * r.payload_bytes for r in mine)


SPLIT = [p for p in DEEP.parameters if len(p.shape) > 1]
SPLIT_BYTES = 4 * sum(p.size for p in SPLIT)
TABLE_BYTES = 4 * sum(p.size for p in SPLIT if not p.num_stacked)


@pytest.mark.parametrize("m", [1, 4])
def test_zero1_sends_what_one_all_reduce_sends_whatever_is_accumulated(m):
    rows = asked_of(step("fsdp=4", DEEP, zero=1, num_accumulation_steps=m))
    assert count(rows, "all-gather", "gather_weight") == (len(SPLIT), SPLIT_BYTES)
    assert count(rows, "reduce-scatter", "scatter_gradient") == (len(SPLIT), SPLIT_BYTES)


def test_zero2_scatters_each_layer_and_micro_batch():
    rows = asked_of(step("fsdp=4", DEEP, zero=2, **ACCUMULATE))
    num_executions = 2 * sum(p.num_stacked or 1 for p in SPLIT)
    assert count(rows, "all-gather", "gather_weight") == (len(SPLIT), SPLIT_BYTES)
    assert count(rows, "reduce-scatter", "scatter_gradient") == (num_executions, 2 * SPLIT_BYTES)


@pytest.mark.parametrize(
    ("fields", "gathers"), [({}, 2), (KEEP, 1), (PREFETCH, 2), (PREFETCH | KEEP, 1), (PAIRS, 2)]
)
def test_fsdp_gathers_a_layer_twice_unless_it_is_kept(fields, gathers):
    rows = asked_of(step("fsdp=4", DEEP, **fields))
    _, gathered = count(rows, "all-gather", "gather_weight")
    assert gathered == gathers * (SPLIT_BYTES - TABLE_BYTES) + TABLE_BYTES
    assert count(rows, "reduce-scatter", "scatter_gradient")[1] == SPLIT_BYTES
    at_once = fields.get("num_layers_per_gather", 1)
    layers = [row for row in rows if row.kind == "all-gather" and row.scope.startswith("layers")]
    assert sum(row.count for row in layers) == gathers * DEEP.num_layers // at_once * (
        len(SPLIT) - 2
    )


def test_layerwise_reduction_sends_as_much_per_micro_batch_as_one_at_the_end():
    whole = 4 * sum(p.size for p in DEEP.parameters if p.num_stacked)
    for m in (1, 2):
        rows = asked_of(step("data=4", DEEP, num_accumulation_steps=m, **LAYERWISE))
        assert count(rows, "all-reduce", "reduce_layer")[1] == m * whole


# --- where things are ------------------------------------------------------------------------


def test_all_stages_keep_the_same_state():
    kept = [step("data=2,fsdp=2,tensor=2", DEEP, zero=zero).specs for zero in (1, 2, 3)]
    assert kept[0] == kept[1] == kept[2]


def test_what_does_not_divide_is_split_elsewhere_or_whole():
    explicit = plan("fsdp=4")
    dims = {p.path: shards.split_dim(p, explicit) for p in ODD.parameters}
    assert dims["layers/attention/query"] == dims["layers/attention/output"] == "heads"
    assert dims["layers/mlp/down"] == "mlp" and dims["embedding/table"] == "vocab"
    assert dims["layers/attention/key"] is None and dims["norm/scale"] is None
    placed = {p.parameter.path: p for p in compose.layout(ODD, explicit)}
    assert placed["layers/attention/key"].reduced_axes == ("fsdp",)
    assert placed["layers/attention/query"].reduced_axes == ()
    rows = {row.why: row for row in expected(ODD, explicit)}
    assert rows["gradient of layers/attention/key"].kind == "all-reduce"
    assert rows["gradient of layers/attention/query"].kind == "reduce-scatter"
    beside_tensor = plan("fsdp=4,tensor=2")
    assert {shards.split_dim(p, beside_tensor) for p in ODD.parameters} == {None}


@functools.cache
def frozen_run(mesh, zero):
    optimizer = default_optimizer()
    explicit = TrainStep(
        config=DEEP, plan=plan(mesh, zero=zero, **FROZEN), optimizer=optimizer, clip_norm=math.inf
    )
    before = beginning(DEEP).params
    state = TrainState(before, jax.device_get(optimizer.init(explicit._trained(before))))
    _, program = compiled(explicit)
    return explicit, before, trained(explicit, program, state, 3)


def test_frozen_parameters_stay_and_the_others_train_as_without_them():
    labels = shards.map_paths(
        lambda path, _: "stays" if plan("data=1", **FROZEN).is_frozen(path) else "moves",
        beginning(DEEP).params,
    )
    optimizer = optax.multi_transform(
        {"moves": default_optimizer(), "stays": optax.set_to_zero()}, labels
    )
    run = jax.jit(plain_step(DEEP, optimizer, clip_norm=math.inf))
    state = reference_init(DEEP, optimizer)
    want = train(state, run, batches(3))
    explicit, before, have = frozen_run("data=2,fsdp=2", 3)
    assert relative_error(have.losses, want.losses) <= LOSS_TOLERANCE
    assert relative_error(have.params, want.params) <= PARAMETER_TOLERANCE
    assert not moved(explicit, before, have)


def moved(explicit, before, have):
    """Frozen parameters of which a bit has changed."""
    old, new = shards.by_path(before), shards.by_path(have.params)
    return [p for p in old if explicit.plan.is_frozen(p) and not np.array_equal(old[p], new[p])]


def test_frozen_parameters_have_no_optimizer_state():
    explicit = step("fsdp=4", DEEP, **FROZEN)
    moments = [x for x in jax.tree.leaves(explicit.abstract_inputs[0].opt_state) if x.shape]
    num_trained = sum(p.size for p in DEEP.parameters if not explicit.plan.is_frozen(p.path))
    assert sum(math.prod(x.shape) for x in moments) == 2 * num_trained


# --- memory ----------------------------------------------------------------------------------

WIDE = ModelConfig(
    name="wide", num_layers=16, embed=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_hidden=256,
    vocab=256, max_seq_len=8,
)  # fmt: skip


@functools.cache
def temporary_bytes(zero, m=1):
    """What XLA allocates beside the arguments, and the closed form, for few tokens."""
    explicit = step(
        "fsdp=4", WIDE, zero=zero, batch_size=4 * m, seq_len=4, num_accumulation_steps=m
    )
    _, program = compiled(explicit)
    stats = program.memory_analysis()
    return stats.argument_size_in_bytes, stats.temp_size_in_bytes, states(WIDE, explicit.plan)


def test_states_are_the_bytes_of_the_arrays():
    for mesh, config, fields in CASES:
        explicit = step(mesh, config, **fields, **FROZEN)
        local = jax.tree.map(
            lambda x: 4 * math.prod(x.sharding.shard_shape(x.shape)) if x.shape else 0,
            explicit.abstract_inputs[0],
        )
        found = states(config, explicit.plan)
        assert sum(jax.tree.leaves(local.params)) == found.master
        assert sum(jax.tree.leaves(local.opt_state)) == found.moments


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_compiled_memory_is_the_closed_form(zero):
    arguments, temporary, closed = temporary_bytes(zero)
    assert closed.arguments <= arguments <= closed.arguments + 1024  # counters, batch
    # On top: a layer's gradient and activations, and the transposed copy that a CPU makes of a
    # gathered array, of the largest one where all layers are gathered at once.
    largest = max(4 * p.size for p in WIDE.parameters)
    layer = sum(4 * p.size // p.num_stacked for p in WIDE.parameters if p.num_stacked)
    at_least = closed.weights + closed.gradients + closed.gathered
    assert 0.98 * at_least <= temporary <= at_least + 4 * layer + (zero < 3) * 1.5 * largest


def test_zero2_never_holds_a_whole_gradient():
    _, whole, closed = temporary_bytes(1)
    _, scattered, _ = temporary_bytes(2)
    gradients = closed.gradients * 3 / 4
    assert whole - scattered == pytest.approx(gradients, rel=0.15)


# --- prefetch --------------------------------------------------------------------------------


def gathers_by_dependence(program):
    """Of the gathers inside loops: how many the turn's matmuls wait for, and how many not."""
    module = read_hlo(program.as_text())
    waiting = free = 0
    for computation in module.active:
        found = computation.instructions
        multiplies = {n for n, i in found.items() if _multiplies(module, i)}
        gathers = {n for n, i in found.items() if i.opcode == "all-gather"}
        if not multiplies or not gathers or computation is module.entry:
            continue
        for gather in gathers:
            below = {gather}
            for name, instruction in found.items():  # in the order of the schedule
                if below & {operand.name for operand in instruction.operands}:
                    below.add(name)
            if below & multiplies:
                waiting += 1
            else:
                free += 1
    return waiting, free


def _multiplies(module, instruction):
    bodies = [module.computations[name] for _, name in instruction.called]
    return instruction.opcode == "dot" or any(body.mentions(" dot(") for body in bodies)


def test_no_matmul_waits_for_a_prefetched_gather():
    num_matrices = len(SPLIT) - 2
    plain = gathers_by_dependence(compiled(step("fsdp=4", DEEP))[1])
    ahead = gathers_by_dependence(compiled(step("fsdp=4", DEEP, **PREFETCH))[1])
    assert plain == (2 * num_matrices, 0)
    assert ahead == (0, 2 * num_matrices)


# --- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "fields", "words"),
    [
        ("fsdp=4", {"num_layers_per_gather": 3}, "num_layers_per_gather=3 .*4 layers.* 2 or 4"),
        ("fsdp=4", PREFETCH | PAIRS, "prefetch=True .*4 layers .*=2 make 2.*num_layers: 6"),
        ("fsdp=2", {"zero": 1} | LAYERWISE, "overlap_gradients=True .*zero=1.*zero=2"),
        ("data=2", {"frozen": ("layer/*",)}, "frozen='layer/\\*' matches no parameter of deep"),
        ("data=2", {"frozen": ("layers/*",)}, "frozen=.* leaves no parameter .*layers to train"),
        ("data=2", {"frozen": "layers/mlp/up"}, "frozen='layers/mlp/up' must be a tuple"),
        ("fsdp=2", {"zero": 4}, "zero=4 .*must be one of: 1, 2, 3"),
        ("fsdp=2", {"zero": True}, "zero=True .*must be one of: 1, 2, 3"),
        ("fsdp=2", {"prefetch": 1}, "prefetch=1 .*must be one of: True, False"),
        ("fsdp=2", {"gather_dtype": "float16"}, "gather_dtype='float16' .*'bfloat16', None"),
        ("fsdp=2", {"zero": 2} | PREFETCH, "prefetch=True .*zero=2.*Set zero=3, or .* at False"),
        ("data=2", {"zero": 1}, r"zero=1 .*fsdp=1 \(data=2\).*fsdp axis, or leave zero at 3"),
        ("data=2", PAIRS, "num_layers_per_gather=2 .*fsdp=1 .*at 1"),
        ("fsdp=2", {"num_layers_per_gather": 0}, "num_layers_per_gather=0 .*Nearest: 1"),
    ],
)  # fmt: skip
def test_refused_by_name(mesh, fields, words):
    with pytest.raises(PlanError, match=words):
        step(mesh, DEEP, **fields)
