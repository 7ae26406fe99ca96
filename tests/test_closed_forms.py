"""predicted = asked, exactly; and the numbers the literature states, written out by hand."""

import itertools
import math
from collections import Counter

import pytest
from flax import nnx

from jaxpar import asked, audit, compare, expected
from jaxpar.collectives import wire_bytes
from jaxpar.model.config import PRESETS, preset
from jaxpar.model.transformer import abstract_model
from tests.helpers import SMALL, TIED, plan, step

CHOICES = {
    "num_accumulation_steps": (1, 2),
    "remat": ("none", "full"),
    "sequence": (False, True),
    "compute_dtype": ("float32", "bfloat16"),
    "reduce_dtype": ("float32", "bfloat16"),
}
OPTIONS = [
    dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
]
MESHES = ["data=1", "data=8", "slice=2,data=4", "tensor=2", "tensor=8", "fsdp=8", "data=2,tensor=4",
          "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"]  # fmt: skip


def executions(rows):
    total = Counter()
    for row in rows:
        total[row.kind, row.axes, row.phase, row.dtype, row.payload_bytes] += row.count
    return total


def asked_of(explicit):
    return asked(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config", [SMALL, TIED], ids=lambda config: config.name)
def test_predicted_is_what_the_program_asks_for(mesh, config):
    # Every option pairs with every other over the meshes; all 32 on each would take minutes.
    offset = MESHES.index(mesh)
    for options in OPTIONS[offset % 4 :: 4]:
        if options["sequence"] and "tensor" not in mesh:
            continue
        explicit = step(mesh, config, **options)
        assert executions(expected(config, explicit.plan)) == executions(asked_of(explicit)), (
            options
        )


@pytest.mark.parametrize(
    ("mesh", "options", "notes"),
    [
        ("fsdp=4", {"num_accumulation_steps": 2}, {"hoisted", "merged"}),
        ("fsdp=2,tensor=2", {"num_accumulation_steps": 4, "compute_dtype": "bfloat16"},
         {"hoisted", "merged", "bf16 goes as f32"}),
        ("data=2,fsdp=2", {"remat": "full", "reduce_dtype": "bfloat16"},
         {"merged", "bf16 goes as f32"}),
        ("data=2,tensor=2", {"sequence": True, "num_accumulation_steps": 2, "remat": "full"},
         {"merged"}),
    ],
)  # fmt: skip
def test_compiled_agrees_under_every_option(mesh, options, notes):
    explicit = step(mesh, **options)
    program = explicit.jitted.trace(*explicit.abstract_inputs)
    lines = compare(
        expected(SMALL, explicit.plan),
        asked(program.jaxpr),
        audit(program.lower().compile(), mesh=explicit.plan.mesh.axes),
    )
    assert all(line.agrees for line in lines), [line for line in lines if not line.agrees]
    said = "; ".join(line.note for line in lines)
    assert {note for note in ("hoisted", "merged", "bf16 goes as f32") if note in said} == notes


def test_tensor_parallel_is_megatrons_count_and_not_one_operand_more():
    """Two all-reduces of B·S·D per layer each way, one more for each end of the model."""
    rows = asked_of(step("tensor=2", compute_dtype="bfloat16"))
    B, S, D, L = 16, 16, SMALL.embed, SMALL.num_layers
    on_tensor = "all-reduce", ("tensor",)
    assert executions(row for row in rows if row.phase != "update") == {
        (*on_tensor, "forward", "bf16", B * S * D * 2): 2 * L + 1,
        (*on_tensor, "forward", "f32", B * S * 4): 3,
        (*on_tensor, "backward", "bf16", B * S * D * 2): 2 * L + 1,
    }


def test_few_key_value_heads_cost_one_reduction_of_their_gradients():
    rows = asked_of(step("tensor=8"))
    L, D, K, H = SMALL.num_layers, SMALL.embed, SMALL.num_kv_heads, SMALL.head_dim
    gradients = [row for row in rows if row.scope == "reduce_gradients"]
    assert [(row.count, row.payload_bytes) for row in gradients] == 2 * [(1, L * D * K * H * 4)]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_data_parallel_reduces_every_gradient_once_per_step(num_steps):
    rows = asked_of(step("data=8", num_accumulation_steps=num_steps))
    gradients = [row for row in rows if row.scope == "reduce_gradients"]
    assert {row.count for row in gradients} == {1}
    assert len(gradients) == len(SMALL.parameters)
    assert sum(row.payload_bytes for row in gradients) == 4 * SMALL.num_parameters


def test_fsdp_gathers_each_layer_twice_and_scatters_its_gradient_once():
    rows = [row for row in asked_of(step("fsdp=8")) if row.scope.startswith("layers")]
    L = SMALL.num_layers
    layer_bytes = sum(
        4 * math.prod(p.shape) for p in SMALL.parameters if p.num_stacked and len(p.shape) > 1
    )
    for kind, phase in (("all-gather", "forward"), ("all-gather", "recompute"),
                        ("reduce-scatter", "backward")):  # fmt: skip
        mine = [row for row in rows if (row.kind, row.phase) == (kind, phase)]
        assert {row.count for row in mine} == {L}
        assert sum(row.payload_bytes for row in mine) == layer_bytes


def test_sequence_parallel_sends_the_bytes_of_the_all_reduces_it_replaces():
    def activations(sequence):
        rows = expected(SMALL, plan("tensor=8", sequence=sequence))
        return sum(
            row.count * wire_bytes(row.kind, row.payload_bytes, 8)
            for row in rows
            if row.payload_bytes == 16 * 16 * SMALL.embed * 4 and row.phase != "update"
        )

    assert activations(True) == activations(False) > 0


@pytest.mark.parametrize("name", [name for name, c in PRESETS.items() if not c.num_experts])
def test_parameter_list_is_the_models_own_tree(name):
    config = preset(name)
    _, state = abstract_model(config)
    tree = {
        "/".join(path): (param.get_raw_value().shape, param.dims)
        for path, param in nnx.to_flat_state(state)
    }
    listed = {p.path: (p.stacked_shape, p.dims) for p in config.parameters}
    assert listed == tree


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 174.6),  # Brown et al. 2020 table 2.1: 175 B
        ("llama-3-8b", 8.03),  # Llama Team 2024 table 3
        ("llama-3-70b", 70.6),
        ("llama-3-405b", 405.9),
        ("mixtral-8x7b", 46.7),  # Jiang et al. 2024 §2: 47 B
        ("deepseek-v3-like", 671),  # DeepSeek-AI 2024 §4.2: 671 B, here with other attention
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    assert preset(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
