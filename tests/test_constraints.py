"""What cannot be trained is refused by name before tracing, with a choice that works."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxpar.errors import MAX_SIZE, ConfigError, JaxparError, MeshError, PlanError, shown
from jaxpar.mesh import ROLES, MeshSpec
from jaxpar.model.config import PRESETS, ModelConfig, preset
from jaxpar.strategies import compose
from jaxpar.strategies.plan import Plan
from jaxpar.train import TrainStep
from tests.helpers import SMALL, batches, plan, step

CONFIG_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


class Request(NamedTuple):
    """What somebody asks for: changes to SMALL, mesh axes, changes to a plan."""

    config: dict[str, Any]
    axes: dict[str, int]
    plan: dict[str, Any]

    def build(self) -> TrainStep:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        return step(mesh, dataclasses.replace(SMALL, **self.config), **self.plan)

    def but(self, part: str, name: str, value: Any) -> Request:
        return self._replace(**{part: {**getattr(self, part), name: value}})


def advice(message: str) -> tuple[str, str, list[int]]:
    """The part of the request and the name that a message says to change, and to what."""
    match = re.search(r"Nearest (sizes of axis )?(\w+)[^:]*: (\d+)(?: or (\d+))?", message)
    if match is None:
        return "", "", []
    is_axis, name, *values = match.groups()
    part = "axes" if is_axis else "config" if name in CONFIG_FIELDS else "plan"
    return part, name, [int(value) for value in values if value]


# --- shapes that do not go with each other -----------------------------------------------------

BATCH, SEQUENCE, KV = {"batch_size": 12}, {"sequence": True}, {"num_heads": 12, "num_kv_heads": 3}
# id: request, error, words of the message, the choices it names
SHAPES = {
    "batch, data": (({}, {"data": 8}, BATCH), PlanError, "batch_size=12 data=8", [8, 16]),
    "batch, fsdp": (({}, {"fsdp": 8}, BATCH), PlanError, "batch_size=12 fsdp=8", [8, 16]),
    "batch, slice": (({}, {"slice": 8}, BATCH), PlanError, "batch_size=12 slice=8", [8, 16]),
    "batch, expert": (({}, {"expert": 8}, BATCH), PlanError, "batch_size=12 expert=8", None),
    "batch, two axes": (
        ({}, {"slice": 2, "fsdp": 4}, BATCH), PlanError, "batch_size=12 slice=2 fsdp=4 8", [8, 16],
    ),
    "batch, accumulation": (
        ({}, {"data": 2}, {**BATCH, "num_accumulation_steps": 4}),
        PlanError, "batch_size=12 data=2 num_accumulation_steps=4 8", [8, 16],
    ),
    "batch, accumulation alone": (
        ({}, {"data": 1}, {"batch_size": 3, "num_accumulation_steps": 4}),
        PlanError, "batch_size=3 num_accumulation_steps=4", [4],
    ),
    "sequence": (
        ({}, {"tensor": 4}, {"seq_len": 18, **SEQUENCE}),
        PlanError, "seq_len=18 tensor=4", [16, 20],
    ),
    "sequence, at the end": (
        ({"max_seq_len": 19}, {"tensor": 4}, {"seq_len": 18, **SEQUENCE}),
        PlanError, "seq_len=18 tensor=4 max_seq_len=19", [16],
    ),
    "too long": (({}, {"data": 1}, {"seq_len": 65}), PlanError, "seq_len=65 max_seq_len=64", [64]),
    "heads": (({}, {"tensor": 3}, {}), PlanError, "num_heads=8 tensor=3", [2, 4]),
    "heads, with sequence": (
        ({}, {"tensor": 3}, {"seq_len": 18, **SEQUENCE}), PlanError, "num_heads=8 tensor=3", [2],
    ),
    "kv heads": (
        ({**KV, "mlp_hidden": 24, "vocab": 252}, {"tensor": 2}, {}),
        PlanError, "num_kv_heads=3 tensor=2", [1, 3],
    ),
    "mlp": (({"mlp_hidden": 36}, {"tensor": 8}, {}), PlanError, "mlp_hidden=36 tensor=8", [4]),
    "vocabulary": (({"vocab": 252}, {"tensor": 8}, {}), PlanError, "vocab=252 tensor=8", [4]),
    "embed": (
        ({"embed": 36}, {"fsdp": 5}, {"batch_size": 60}), PlanError, "embed=36 fsdp=5", [4, 6],
    ),
    "embed, with a batch": (
        ({"embed": 36, "num_heads": 4, "mlp_hidden": 36, "vocab": 252}, {"fsdp": 8}, {}),
        PlanError, "embed=36 fsdp=8", [4],
    ),
    "kv heads of a model": (
        ({"num_kv_heads": 3}, {"data": 1}, {}), ConfigError, "num_heads=8 num_kv_heads=3", [2, 4],
    ),
    "more kv heads than heads": (
        ({"num_kv_heads": 16}, {"data": 1}, {}), ConfigError, "num_heads=8 num_kv_heads=16", [8],
    ),
    "odd heads": (({"head_dim": 5}, {"data": 1}, {}), ConfigError, "head_dim=5", [4, 6]),
    "heads of one": (({"head_dim": 1}, {"data": 1}, {}), ConfigError, "head_dim=1", [2]),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "error", "words", "choices"), SHAPES.values(), ids=SHAPES)
def test_shapes(request_, error, words, choices):
    wanted = Request(*request_)
    with pytest.raises(JaxparError) as caught:
        wanted.build()
    message = str(caught.value)
    assert caught.type is error
    assert all(re.search(rf"\b{word}\b", message) for word in words.split()), message
    part, name, values = advice(message)
    if choices is None:  # nothing trains on this axis whatever the batch
        return
    assert values == choices
    for value in values:
        wanted.but(part, name, value).build()


def test_sequence_without_a_tensor_axis():
    with pytest.raises(PlanError, match=r"sequence=True.*tensor=1 \(data=2\).*sequence=False"):
        step("data=2", sequence=True)
    step("data=2,tensor=2", sequence=True)
    step("data=2", sequence=False)


def test_no_length_of_sequence_fits():
    config = dataclasses.replace(SMALL, max_seq_len=7)
    with pytest.raises(PlanError, match=r"seq_len=6 .*tensor=8.*max_seq_len=7: none; or set"):
        step("tensor=8", config, seq_len=6, sequence=True)
    step("tensor=8", config, seq_len=6, sequence=False)


def test_more_micro_batches_than_any_batch_has():
    with pytest.raises(PlanError, match=r"data=8 .*=2147483647\. Nearest batch_size: none; acc"):
        plan("data=8", num_accumulation_steps=MAX_SIZE)


def test_fewer_kv_heads_than_devices_are_allowed():
    assert SMALL.num_kv_heads == 2
    explicit = step("tensor=8")
    explicit.jitted.trace(*explicit.abstract_inputs)


def test_more_devices_than_there_are():
    with pytest.raises(MeshError, match=r"with 8 CPU devices, and 16 are needed.*devices\(16\)"):
        step("data=4,tensor=4")


SERVED = {axis for s in compose.all_strategies().values() for axis in s.axes}


@pytest.mark.parametrize("axis", sorted(ROLES.keys() - SERVED))
def test_axes_that_nothing_trains_on(axis):
    with pytest.raises(PlanError) as caught:
        step(f"{axis}=2,data=2")
    assert str(caught.value).startswith(f"The mesh has {axis}=2, and no strategy trains on axis")
    named = str(caught.value).split("Axes that train: ")[1].removesuffix(".").split(", ")
    assert named == sorted(SERVED) and {"data", "fsdp", "slice", "tensor"} <= SERVED
    for name in named:
        step(f"{name}=2", preset("tiny-moe") if name == "expert" else SMALL)
    step(f"{axis}=1,data=2")


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_every_preset_has_a_mesh(config):
    compose.check(config, plan("expert=4,tensor=2" if config.num_experts else "data=4,tensor=2"))


# --- values that are none ----------------------------------------------------------------------

NOT_WHOLE = [
    (True, 1), (2.0, 2), (1.5, 2), ("8", 8), ("x", 1), (None, 1), ([8], 1), (-1, 1),
    (math.nan, 1), (math.inf, MAX_SIZE), (np.int64(8), 8), (MAX_SIZE + 1, MAX_SIZE),
    (10**5000, MAX_SIZE),
]  # fmt: skip
SIZES = ("num_layers", "embed", "num_heads", "num_kv_heads", "head_dim", "mlp_hidden", "vocab",
         "max_seq_len")  # fmt: skip
EXPERT_SIZES = ("num_experts", "num_experts_per_token", "num_shared_experts", "expert_hidden",
                "num_dense_layers")  # fmt: skip


def refusal(error: type[JaxparError], make: Any, **fields: Any) -> str:
    with pytest.raises(error) as caught:
        make(**fields)
    assert caught.type is error
    (field,) = fields
    assert re.search(rf"\b{field}=", str(caught.value)), caught.value
    return str(caught.value)


def config(**fields: Any) -> ModelConfig:
    return dataclasses.replace(SMALL, **fields)


def one_device(**fields: Any) -> Plan:
    return plan("data=1", **fields)


@pytest.mark.parametrize(("value", "nearest"), [*NOT_WHOLE, (0, 1)], ids=shown)
@pytest.mark.parametrize(
    ("error", "make", "field"),
    [
        *((PlanError, one_device, f) for f in ("batch_size", "seq_len", "num_accumulation_steps")),
        *((ConfigError, config, field) for field in SIZES),
    ],
)
def test_whole_numbers(error, make, field, value, nearest):
    message = refusal(error, make, **{field: value})
    assert f"({type(value).__name__}) must be a whole number from 1 to {MAX_SIZE}" in message
    assert message.endswith(f"Nearest: {nearest}.")


@pytest.mark.parametrize("field", EXPERT_SIZES)
@pytest.mark.parametrize("value", [value for value, _ in NOT_WHOLE], ids=shown)
def test_whole_numbers_of_experts(field, value):
    message = refusal(ConfigError, config, **{field: value})
    assert f"must be a whole number from 0 to {MAX_SIZE}" in message


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("num_experts_per_token", 0, 1),
        ("num_experts_per_token", 5, 4),
        ("expert_hidden", 0, 1),
        ("num_dense_layers", 2, 1),
    ],
)
def test_experts_in_range(field, value, nearest):
    good = {"num_experts": 4, "num_experts_per_token": 2, "expert_hidden": 8}
    with pytest.raises(ConfigError) as caught:
        config(**{**good, field: value})
    message = str(caught.value)
    assert f"{field}={value} " in message
    assert "num_experts=4 and num_layers=2" in message
    assert advice(message) == ("config", field, [nearest])
    config(**{**good, field: nearest})


@pytest.mark.parametrize("field", EXPERT_SIZES[1:])
def test_experts_without_experts(field):
    message = refusal(ConfigError, config, **{field: 1})
    assert advice(message) == ("config", field, [0])


@pytest.mark.parametrize(
    ("error", "make", "field", "values"),
    [
        (PlanError, one_device, "compute_dtype", ["float16", "Float32", "", 32, None, jnp.float32]),
        (PlanError, one_device, "reduce_dtype", ["f32", ["float32"], True, {}]),
        (PlanError, one_device, "remat", ["ful", True, None, ("full",), np.ones(2)]),
        (PlanError, one_device, "sequence", [1, 0, 1.0, "True", None, np.bool_(True)]),
        (ConfigError, config, "mlp", ["swish", "GELU", None, 1]),
        (ConfigError, config, "tied_embedding", [1, 0, "no", None]),
    ],
)
def test_choices(error, make, field, values):
    for value in values:
        message = refusal(error, make, **{field: value})
        named = ast.literal_eval(message.split("must be one of: ")[1].removesuffix("."))
        assert len(named) >= 2
        for choice in named:
            make(**{field: choice})


NOT_POSITIVE = [0, 0.0, -1.0, math.nan, -math.inf, True, "1", None, 1e-60, 10**400, np.ones(2)]


@pytest.mark.parametrize("value", [*NOT_POSITIVE, math.inf], ids=shown)
@pytest.mark.parametrize("field", ["rope_theta", "norm_epsilon"])
def test_positive_numbers(field, value):
    message = refusal(ConfigError, config, **{field: value})
    config(**{field: float(re.search(r"such as ([0-9.e-]+)\.$", message)[1])})


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=shown)
def test_clip_norm(value):
    def make(clip_norm):
        TrainStep(config=SMALL, plan=plan("data=1"), optimizer=optax.sgd(1.0), clip_norm=clip_norm)

    assert refusal(PlanError, make, clip_norm=value).endswith("such as 1.0; inf never clips.")
    for good in (1.0, 2, math.inf):
        make(good)


def test_a_base_beyond_int32_is_a_float():
    assert type(config(rope_theta=10**12).rope_theta) is float
    explicit = step("data=1", config(rope_theta=10**12))
    explicit.jitted.trace(*explicit.abstract_inputs)


def test_the_largest_sizes_can_be_traced():
    huge = config(vocab=MAX_SIZE, embed=MAX_SIZE, mlp_hidden=MAX_SIZE, max_seq_len=MAX_SIZE)
    explicit = step("data=1", huge, batch_size=MAX_SIZE, seq_len=MAX_SIZE)
    explicit.jitted.trace(*explicit.abstract_inputs)


@pytest.mark.parametrize("value", ["data=2", {"data": 2}, None, 8])
def test_plan_mesh_is_a_mesh(value):
    def make(mesh):
        return Plan(mesh=mesh, batch_size=8, seq_len=8)

    message = refusal(PlanError, make, mesh=value)
    make(MeshSpec.parse(re.search(r"parse\('(.*)'\)", message)[1]))


@pytest.mark.parametrize("value", ["", None, 3])
def test_model_name_is_a_word(value):
    with pytest.raises(ConfigError, match="name=.* must be a word or two, such as 'tiny'"):
        config(name=value)


@pytest.mark.parametrize(
    ("field", "value", "example"),
    [
        ("config", "tiny", r"a ModelConfig, such as preset\('tiny'\)"),
        ("plan", None, r"a Plan, such as Plan\(mesh="),
        ("optimizer", "adam", r"a GradientTransformation, such as optax\.adamw\(1e-3\)"),
        ("optimizer", optax.adamw, r"a GradientTransformation, such as optax\.adamw\(1e-3\)"),
    ],
)
def test_parts_of_a_step(field, value, example):
    good = {"config": SMALL, "plan": plan("data=1"), "optimizer": optax.adamw(1e-3)}
    with pytest.raises(PlanError, match=rf"^{field}=.*must be {example}"):
        TrainStep(**{**good, field: value})
    TrainStep(**good)


# --- batches -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explicit() -> TrainStep:
    return step("data=2")


def bad_batches():
    good = batches(1)[0]
    for field, array in good._asdict().items():
        if array is None or field == "numbers_BS":  # rows of one document each; no dropout
            continue
        dtype = array.dtype
        for name, bad, words in (
            ("shape", array[:8], f"is {dtype}[8, 16] has {dtype}[16, 16] batch_size=16 seq_len=16"),
            ("transposed", array[:, :8].T, f"is {dtype}[8, 16] has {dtype}[16, 16]"),
            ("rank", array[0], f"is {dtype}[16] has {dtype}[16, 16]"),
            ("dtype", array.astype("int64"), f"is int64[16, 16] has {dtype}[16, 16]"),
            ("missing", None, "is NoneType array"),
            ("list", array.tolist(), "is list array"),
        ):
            yield pytest.param(
                good._replace(**{field: bad}), f"{field} {words}", id=f"{field}:{name}"
            )
    for field in ("tokens_BS", "labels_BS"):
        for value in (-1, SMALL.vocab):
            bad = getattr(good, field).copy()
            bad[3, 4] = value
            words = f"{field} holds {value} vocab=256 0 to 255"
            yield pytest.param(good._replace(**{field: bad}), words, id=f"{field}:{value}")
    for bad in (tuple(good), good._asdict(), None, good.tokens_BS):
        name = type(bad).__name__
        yield pytest.param(
            bad, f"{name} Batch(tokens_BS, labels_BS, mask_BS, segments_BS, numbers_BS)", id=name
        )


@pytest.mark.parametrize(("batch", "words"), list(bad_batches()))
@pytest.mark.parametrize("call", ["place", "__call__"])
def test_batches(explicit, batch, words, call):
    arguments = (batch,) if call == "place" else (None, batch)
    with pytest.raises(PlanError) as caught:
        getattr(explicit, call)(*arguments)
    for word in words.split():
        assert word in str(caught.value)


def test_good_batches(explicit):
    good = batches(1)[0]
    placed = explicit.place(good)
    assert {array.sharding.spec for array in placed[:3]} == {explicit.batch_spec}
    explicit.place(placed)
    explicit.place(good._replace(tokens_BS=np.full_like(good.tokens_BS, SMALL.vocab - 1)))


# --- anything at all ---------------------------------------------------------------------------

SMALL_NUMBERS = st.integers(1, 12)
MESHES = (
    st.dictionaries(
        st.sampled_from(["tensor", "tensor", "fsdp", "fsdp", "data", "slice", "expert", "pipe"]),
        st.integers(1, 8),
        min_size=1,
        max_size=3,
    )
    .filter(lambda axes: math.prod(axes.values()) <= 8)
    .map(lambda axes: dict(sorted(axes.items())))
)
CONFIGS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "embed": SMALL_NUMBERS,
        "num_heads": st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
        "num_kv_heads": st.sampled_from([1, 2, 3, 4]),
        "head_dim": st.integers(1, 4),
        "mlp_hidden": st.sampled_from([1, 6, 8, 12, 24]),
        "vocab": st.sampled_from([1, 6, 8, 12, 24]),
        "max_seq_len": st.integers(1, 24),
        "mlp": st.sampled_from(["swiglu", "gelu"]),
        "tied_embedding": st.booleans(),
    }
)
PLANS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 24),
        "seq_len": st.integers(1, 24),
        "num_accumulation_steps": st.integers(1, 3),
        "sequence": st.booleans(),
        "compute_dtype": st.sampled_from(["float32", "bfloat16"]),
        "reduce_dtype": st.sampled_from(["float32", "bfloat16"]),
        "remat": st.sampled_from(["none", "full"]),
    }
)


def follow(wanted: Request, message: str) -> Request:
    """The request as a message says to change it."""
    part, name, values = advice(message)
    if values:
        return wanted.but(part, name, values[0])
    if "set sequence=False" in message:
        return wanted.but("plan", "sequence", False)
    axis, size, other = re.fullmatch(
        r"The mesh has (\w+)=(\d+), and .*Axes that train: (\w+).*", message
    ).groups()
    wanted = wanted.but("axes", other, wanted.axes.get(other, 1) * int(size))
    return wanted.but("axes", axis, 1)


# A failure is small enough as it is; shrinking one takes minutes of tracing.
@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(wanted=st.builds(Request, config=CONFIGS, axes=MESHES, plan=PLANS))
def test_anything_is_traced_or_refused_and_the_advice_leads_to_a_plan_that_is(wanted):
    for _ in range(10):
        try:
            explicit = wanted.build()
        except JaxparError as error:
            assert "\n" not in str(error)
            wanted = follow(wanted, str(error))
        else:
            explicit.jitted.trace(*explicit.abstract_inputs)
            return
    pytest.fail("the advice goes round in circles")
