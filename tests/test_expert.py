"""Models with experts: predicted = asked = compiled, executed = one device, and faults between."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import jaxpar.train
from jaxpar import asked, audit, compare, expected
from jaxpar.audit.compare import agree
from jaxpar.collectives import all_reduce, vary
from jaxpar.errors import ConfigError, PlanError
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import PRESETS, ModelConfig, preset
from jaxpar.model.transformer import abstract_model
from jaxpar.numerics import relative_error
from jaxpar.reference import one_device, plain_step, reference_init
from jaxpar.strategies import expert, expert_dispatch, tensor
from jaxpar.strategies.plan import Plan
from jaxpar.tour import LOSS_TOLERANCE, PARAMETER_TOLERANCE, default_optimizer
from jaxpar.train import Metrics, TrainStep
from tests.helpers import batches, plan, step
from tests.test_closed_forms import executions

NUM_STEPS = 10

SOFTMAX = ModelConfig(
    name="softmax", num_layers=2, embed=16, num_heads=4, num_kv_heads=2, head_dim=4,
    mlp_hidden=32, vocab=256, max_seq_len=64, num_experts=8, num_experts_per_token=2,
    num_shared_experts=1, expert_hidden=24, balance_weight=0.1, router_z_weight=0.01,
)  # fmt: skip
SIGMOID = ModelConfig(
    name="sigmoid", num_layers=3, embed=16, num_heads=4, num_kv_heads=4, head_dim=4,
    mlp_hidden=32, vocab=256, max_seq_len=64, mlp="gelu", tied_embedding=True, num_experts=8,
    num_experts_per_token=3, expert_hidden=8, num_dense_layers=1, router="sigmoid",
    router_scale=2.5, balance="batch", balance_weight=0.1, bias_rate=0.01,
)  # fmt: skip
"""A dense layer first, nothing shared, and all the ways of balancing that SOFTMAX has not."""

CAPACITY = {"experts": "capacity"}
WEIGHT = {"drop_policy": "weight", "capacity_factor": 0.75}
SEQUENCE = {"sequence": True}
ACCUMULATE = {"num_accumulation_steps": 2}

CHUNKS, FIVE = {"num_expert_chunks": 4}, {"num_expert_chunks": 5}

CASES = [
    (SOFTMAX, "data=2,expert=4", CAPACITY | ACCUMULATE | FIVE | {"remat": "full"}),
    (SOFTMAX, "expert=2,tensor=2", CAPACITY | SEQUENCE),
    (SOFTMAX, "fsdp=2,expert=2", ACCUMULATE | CHUNKS),
    (SOFTMAX, "expert=2,context=2", CHUNKS),
    (SIGMOID, "expert=8", {}),
]
"""Each form whole and in chunks, with every axis that expert goes with; it is alone in the tour."""

OPTIMIZER, SGD = default_optimizer(), optax.sgd(0.1)


class Run(NamedTuple):
    losses: np.ndarray
    norms: np.ndarray
    stats: dict[str, np.ndarray]
    params: dict


def run(state, one_step, num_steps):
    losses, norms, stats = [], [], []
    for batch in batches(num_steps):
        state, metrics = one_step(state, batch)
        losses.append(metrics.loss)
        norms.append(metrics.gradient_norm)
        stats.append(jax.device_get(metrics.stats))
    together = jax.tree.map(lambda *each: np.stack(each), *stats)
    return Run(np.array(losses), np.array(norms), together, jax.device_get(state.params))


def drops(plan: Plan):
    return plan.experts, plan.capacity_factor, plan.drop_policy


@functools.cache
def first_state(config, optimizer):
    """What `init` makes on every mesh, in NumPy, which no step can donate."""
    return jax.device_get(reference_init(config, optimizer))


@functools.cache
def at_home(config, dropping, num_steps, optimizer):
    experts, factor, policy = dropping
    one = plan("data=1", experts=experts, capacity_factor=factor, drop_policy=policy)
    one_step = plain_step(config, optimizer, parallel=one_device(one))
    return run(first_state(config, optimizer), jax.jit(one_step), num_steps)


class Seen(NamedTuple):
    """One step held against closed form, compiled program and one device; nothing runs twice."""

    lines: list
    got: Run
    want: Run

    @property
    def numbers_agree(self):
        got, want = self.got, self.want
        return (
            relative_error(got.losses, want.losses) <= LOSS_TOLERANCE
            and relative_error(got.norms, want.norms) <= LOSS_TOLERANCE
            and relative_error(got.stats, want.stats) <= LOSS_TOLERANCE
            and relative_error(got.params, want.params) <= PARAMETER_TOLERANCE
        )


def see(explicit: TrainStep, num_steps: int) -> Seen:
    want = at_home(explicit.config, drops(explicit.plan), num_steps, explicit.optimizer)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    compiled = traced.lower().compile()
    lines = compare(
        expected(explicit.config, explicit.plan),
        asked(traced.jaxpr),
        audit(compiled, mesh=explicit.plan.mesh.all_axes),
    )
    state = jax.device_put(first_state(explicit.config, explicit.optimizer), explicit.shardings)
    got = run(state, lambda s, b: compiled(s, explicit.place(b)), num_steps)
    return Seen(lines, got, want)


@pytest.mark.parametrize(
    ("config", "mesh", "fields"), CASES, ids=[f"{case[0].name}:{case[1]}" for case in CASES]
)
def test_equals_one_device(config, mesh, fields):
    explicit = TrainStep(config=config, plan=plan(mesh, **fields), optimizer=OPTIMIZER)
    seen = see(explicit, NUM_STEPS)
    assert agree(seen.lines), [line for line in seen.lines if not line.agrees]
    assert relative_error(seen.got.losses, seen.want.losses) <= LOSS_TOLERANCE
    assert relative_error(seen.got.norms, seen.want.norms) <= LOSS_TOLERANCE
    assert relative_error(seen.got.params, seen.want.params) <= PARAMETER_TOLERANCE
    for name in ("tokens_per_expert", "num_dropped"):  # whole numbers
        assert (seen.got.stats[name] == seen.want.stats[name]).all(), name
    assert relative_error(seen.got.stats, seen.want.stats) <= LOSS_TOLERANCE
    is_dropping = fields.get("experts") == "capacity"
    assert (seen.got.stats["num_dropped"] > 0).any() == is_dropping
    assert seen.got.losses[-1] < seen.got.losses[0] - 0.05


def test_metrics_tell_how_uneven_experts_are():
    stats = jax.tree.map(
        lambda x: x[0],
        at_home(SOFTMAX, drops(plan("data=1", **CAPACITY)), NUM_STEPS, OPTIMIZER).stats,
    )
    metrics = Metrics(jnp.float32(0), jnp.float32(0), jnp.int32(0), stats)
    num_valid = int((batches(1)[0].mask_BS != 0).sum())
    tokens = stats["tokens_per_expert"]
    assert tokens.shape == (2, 8) and (tokens.sum(-1) == 2 * num_valid).all()
    assert np.allclose(metrics.imbalance, tokens.max(-1) / (2 * num_valid / 8))
    assert np.allclose(metrics.dropped_fraction, stats["num_dropped"] / (2 * num_valid))
    assert (metrics.imbalance > 1).all() and (metrics.dropped_fraction > 0).all()


def test_bias_moves_by_its_rule_alone():
    """Not by the optimizer, whose weight decay would pull it to zero; nor is it reduced."""
    got = at_home(SIGMOID, drops(plan("data=1")), NUM_STEPS, OPTIMIZER)
    tokens = got.stats["tokens_per_expert"]
    want = 0.01 * np.sign(tokens.mean(-1, keepdims=True) - tokens).sum(axis=0)
    np.testing.assert_allclose(got.params["layers"]["moe"]["bias"], want, atol=1e-6)
    (placed,) = (
        p for p in step("data=2,expert=4", SIGMOID).layout if p.parameter.path == "layers/moe/bias"
    )
    assert placed.reduced_axes == placed.split_axes == ()


# --- closed forms ------------------------------------------------------------------------------

OPTIONS = [
    ("expert=8", SOFTMAX,
     CAPACITY | {"compute_dtype": "bfloat16", "num_expert_chunks": 3} | ACCUMULATE | WEIGHT),
    ("data=2,expert=4", SIGMOID, {"remat": "full", "compute_dtype": "bfloat16"}),
    ("data=2,expert=2,tensor=2", SIGMOID, {"remat": "dots"} | SEQUENCE | CHUNKS),
    ("expert=2,tensor=4", SOFTMAX, {"remat": "selective"} | CAPACITY | ACCUMULATE),
    ("expert=2,context=2,tensor=2", SOFTMAX, {"remat": "full"}),
    ("expert=2,context=2", SIGMOID, {"context": "allgather"}),
    ("fsdp=2,expert=2,tensor=2", SOFTMAX, {"remat": "full"} | SEQUENCE),
    ("data=8", SOFTMAX, CAPACITY),
    ("tensor=4", SIGMOID, SEQUENCE),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "config", "fields"), OPTIONS)
def test_predicted_is_what_the_program_asks_for(mesh, config, fields):
    explicit = step(mesh, config, **fields)
    rows = asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
    assert executions(expected(config, explicit.plan)) == executions(rows)


def test_two_all_to_alls_of_what_tokens_choose_each_way():
    """B·S·K·D per MoE layer at capacity factor 1; and experts' gradients stay off the axis."""
    explicit = step("data=2,expert=4", SOFTMAX, capacity_factor=1.0, **CAPACITY)
    rows = asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
    L, B, S, K, D = 2, 2, 16, 2, 16
    exchanges = [r for r in rows if r.kind == "all-to-all"]
    assert executions(exchanges) == {
        ("all-to-all", ("expert",), phase, "f32", B * S * K * D * 4): 2 * L
        for phase in ("forward", "backward")
    }
    E, F = 8, 24
    stacks = [r for r in rows if r.payload_bytes == L * E // 4 * D * F * 4]
    assert [r.axes for r in stacks] == 3 * [("data",)] and {r.count for r in stacks} == {1}


def test_dropless_has_one_small_all_to_all_told_apart():
    explicit = step("expert=4", SOFTMAX)
    rows = asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
    small = [r for r in rows if r.kind == "all-to-all" and r.dtype == "s32"]
    assert [(r.phase, r.scope.split("/")[-1], r.count, r.payload_bytes) for r in small] == [
        ("forward", "counts", 2, 4 * (8 + 4))
    ]


def test_ragged_sends_no_padding():
    """On chips that can; where it is asked for on a CPU, the error says so."""
    fields = {"batch_size": 16, "seq_len": 16, "compute_dtype": "float32"}
    tpu = MeshSpec(axes={"expert": 8}, platform="tpu", target="v5e:2x4")
    B, S, K, D = 2, 16, 2, 16
    for Q in (1, 4):
        ragged = expected(
            SOFTMAX, Plan(mesh=tpu, expert_exchange="ragged", num_expert_chunks=Q, **fields)
        )
        sent = {r.payload_bytes * Q for r in ragged if r.kind == "ragged-all-to-all"}
        assert sent == {B * S * K * D * 4, 8 * B * S * D * 4}
        assert not any(r.kind == "all-to-all" and r.dtype == "f32" for r in ragged)
    with pytest.raises(PlanError, match=r"'ragged'.*expert=2.*platform='cpu'.*Set .*'padded'"):
        step("expert=2", SOFTMAX, expert_exchange="ragged")


@pytest.mark.parametrize(
    "config",
    [SOFTMAX, SIGMOID, *(c for c in PRESETS.values() if c.num_experts)],
    ids=lambda config: config.name,
)
def test_parameter_list_is_the_models_own_tree(config):
    _, state = abstract_model(config)
    tree = {
        "/".join(path): (param.get_raw_value().shape, param.dims)
        for path, param in nnx.to_flat_state(state)
    }
    assert tree == {p.path: (p.stacked_shape, p.dims) for p in config.parameters}


# --- what is refused ---------------------------------------------------------------------------

MANY = dataclasses.replace(SOFTMAX, num_experts=64)


@pytest.mark.parametrize(
    ("mesh", "config", "fields", "words", "remedy"),
    [
        ("expert=6", MANY, {"batch_size": 24}, "num_experts=64 expert=6", ("expert=4", {})),
        ("expert=6", MANY, {"batch_size": 24}, "num_experts=64 expert=6", ("expert=8", {})),
        ("expert=2", None, {}, "expert=2 num_experts=0 data fsdp", ("data=2", {})),
        ("expert=2,context=2", SOFTMAX, CAPACITY, "experts='capacity' context=2 'dropless'",
         ("expert=2,context=2", {})),
        ("expert=2", SIGMOID, ACCUMULATE, "balance='batch' num_accumulation_steps=2 'sequence'",
         ("expert=2", {})),
        ("expert=2,tensor=2", dataclasses.replace(SOFTMAX, expert_hidden=9), {},
         "expert_hidden=9 tensor=2 1", ("expert=2,tensor=1", {})),
        ("data=2", None, CHUNKS, "num_expert_chunks=4 num_experts=0 1", ("data=2", {})),
        ("data=2", SOFTMAX, CHUNKS, "num_expert_chunks=4 expert=1 1", ("data=2", {})),
        ("expert=4", SOFTMAX, {"num_expert_chunks": 3}, "num_expert_chunks=3 4×16 64 2 or 4",
         ("expert=4", CHUNKS)),
        ("expert=4", SOFTMAX, CAPACITY | {"num_expert_chunks": 8}, "=8 4×5 'capacity' 20 5 or 10",
         ("expert=4", CAPACITY | {"num_expert_chunks": 10})),
    ],
)  # fmt: skip
def test_refused_before_tracing(mesh, config, fields, words, remedy):
    configs = {"config": config} if config else {}
    with pytest.raises(PlanError) as caught:
        step(mesh, **configs, **fields)
    message = str(caught.value).replace(" × ", "×")
    assert all(word in message for word in words.split()), message
    mesh, others = remedy
    kept = {k: v for k, v in fields.items() if k == "batch_size"}
    step(mesh, **configs, **kept, **others)


@pytest.mark.parametrize("value", [0, -1.0, True, "1", float("nan")])
def test_capacity_factor_is_a_positive_number(value):
    with pytest.raises(PlanError, match="capacity_factor=.* above 0 .* such as 1.25"):
        plan("data=1", capacity_factor=value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_experts_per_token", 9, "between 1 and 8"),  # top-k of fewer
        ("router", "tanh", "'softmax', 'sigmoid'"),
        ("balance", "device", "'sequence', 'batch'"),
        ("router_normalized", 1, "True, False"),
        ("router_scale", 0.0, "above 0"),
        ("balance_weight", -0.1, "0 leaves it out"),
        ("router_z_weight", float("inf"), "0 leaves it out"),
        ("bias_rate", "fast", "0 leaves it out"),
    ],
)
def test_routing_that_cannot_be(field, value, words):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(SOFTMAX, **{field: value})
    assert f"{field}=" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("router", "sigmoid"), ("balance_weight", 0.1), ("bias_rate", 0.1)]
)
def test_routing_without_experts(field, value):
    with pytest.raises(ConfigError, match=rf"{field}=.* num_experts=0.* Leave {field} at"):
        dataclasses.replace(preset("tiny"), **{field: value})


# --- faults ------------------------------------------------------------------------------------

ONE = dataclasses.replace(SOFTMAX, name="one", num_layers=1, num_shared_experts=0)
REDUCE = jaxpar.train.reduce_gradients


def of_stacks(change):
    """`reduce_gradients` and then `change` to the gradient of each stack of experts."""

    def reduce_gradients(gradients, *arguments):
        reduced = REDUCE(gradients, *arguments)
        moe = reduced["layers"]["moe"]
        moe = {k: change(v) if v.ndim == 4 else v for k, v in moe.items()}
        return {**reduced, "layers": {**reduced["layers"], "moe": moe}}

    return [(jaxpar.train, "reduce_gradients", reduce_gradients)]


def over_expert_too(gradient):
    with jax.named_scope("backward"):
        return vary(all_reduce(gradient, "expert", scope="reduce_gradients"), "expert")


def every_devices(stats):
    """All tensor devices' statistics: as many bytes, and losses count as often as there are."""
    flat, unravel = ravel_pytree(stats)
    return unravel(all_reduce(flat, "tensor", scope="count_once"))


def in_float32(table):
    return expert_dispatch.all_to_all(
        table.astype(jnp.float32), "expert", split_dim=0, concat_dim=1, scope="dispatch"
    ).astype(table.dtype)


# name: (model, mesh, other fields of the plan, who sees it, what is replaced)
FAULTS = {
    "experts' gradients doubled": (
        ONE, "expert=2", {}, "numbers", of_stacks(lambda g: 2 * g)),
    "auxiliary losses counted on every tensor device": (
        ONE, "tensor=2", {}, "numbers", [(tensor, "count_once", every_devices)]),
    "experts' gradients reduced over expert": (
        SOFTMAX, "expert=2", {}, "audit", of_stacks(over_expert_too)),
    "a balance loss from local counts": (
        dataclasses.replace(SOFTMAX, balance="batch"), "expert=2", {}, "audit",
        [(expert, "sum_counts", lambda count, axes: count)]),
    "token vectors in a wider dtype": (
        SOFTMAX, "expert=2", CAPACITY | {"compute_dtype": "bfloat16"}, "audit",
        [(expert_dispatch, "dispatch", in_float32)]),
    "a bias moved by a device's own tokens": (
        SIGMOID, "expert=2", {}, "types", [(jaxpar.train, "sum_stats", lambda stats: stats)]),
    "a router's gradient reduced in the backward, layer by layer": (
        SOFTMAX, "tensor=2", {}, "audit",
        [(tensor, "STRATEGY", dataclasses.replace(
            tensor.STRATEGY,
            is_partial=lambda p: any(d in tensor.SPLIT_DIMS for d in p.dims)))]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    config, mesh, fields, seen_by, replaced = FAULTS[name]
    if seen_by == "numbers":
        at_home(config, drops(plan(mesh, **fields)), 1, SGD)  # before anything is wrong
    for home, attribute, wrong in replaced:
        assert hasattr(home, attribute)
        monkeypatch.setattr(home, attribute, wrong)
    explicit = TrainStep(config=config, plan=plan(mesh, **fields), optimizer=SGD)
    if seen_by == "numbers":
        seen = see(explicit, 1)
        assert agree(seen.lines) and not seen.numbers_agree
    elif seen_by == "audit":
        rows = asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
        assert executions(expected(config, explicit.plan)) != executions(rows)
    else:
        with pytest.raises((ValueError, AssertionError), match="var(ying|ies)"):
            explicit.jitted.trace(*explicit.abstract_inputs)
