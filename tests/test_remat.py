"""Rematerialisation: what is kept to the byte, what runs twice, and the same numbers."""

import dataclasses
import itertools

import jax
import pytest

from jaxpar import Plan, expected, preset
from jaxpar.audit.compare import agree
from jaxpar.errors import PlanError
from jaxpar.mesh import MeshSpec
from jaxpar.model.attention import causal_attention
from jaxpar.predict.activations import gpt_layer_bytes, kept, layer_bytes
from jaxpar.strategies import remat
from jaxpar.tour import take_row
from tests.helpers import SMALL, batches, plan, reference, step
from tests.test_closed_forms import asked_of, executions

CHOICES = ("none", "selective", "dots", "full")
MOE = dataclasses.replace(preset("tiny-moe"), num_layers=3, num_dense_layers=1)

# Sizes that cannot be taken for one another, and a number of layers that no other loop has.
UNLIKE = dataclasses.replace(SMALL, num_layers=3, embed=40, mlp_hidden=48)
GELU = dataclasses.replace(UNLIKE, mlp="gelu", num_kv_heads=8)


# --- bytes that are kept -----------------------------------------------------------------------


def kept_bytes(mesh, config, **fields):
    explicit = step(mesh, config, **fields)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    return sum(array.num_bytes for array in kept(traced.jaxpr, config.num_layers))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("mesh", "config", "fields"),
    [
        ("data=1", UNLIKE, {"compute_dtype": "bfloat16"}),
        ("data=2", GELU, {"num_accumulation_steps": 2}),
        ("tensor=4", UNLIKE, {}),
        ("tensor=2", GELU, {"compute_dtype": "bfloat16", "sequence": True}),
        ("tensor=2", UNLIKE, {"sequence": True, "overlap": "bidirectional"}),
    ],
)
def test_formula_is_what_the_program_keeps(mesh, config, fields, choice):
    want = layer_bytes(config, plan(mesh, remat=choice, **fields))
    assert kept_bytes(mesh, config, remat=choice, **fields) == sum(want.values()), want


def test_published_formulas():
    """Korthikanti et al. 2022: table 2, and the factor 5 that its abstract promises."""
    gpt = preset("gpt3-175b")
    s, h, a, t = 2048, 12288, 96, 8

    def per_sbh(**fields):
        mesh = MeshSpec.parse("tensor=8")
        wanted = Plan(mesh=mesh, batch_size=1, seq_len=s, **fields)
        return gpt_layer_bytes(gpt, wanted) / (s * h)

    assert per_sbh() == 10 + 24 / t + 5 * a * s / (h * t)
    assert per_sbh(sequence=True) == (34 + 5 * a * s / h) / t
    assert per_sbh(sequence=True, remat="selective") == 34 / t
    assert per_sbh(remat="selective") == 10 + 24 / t
    assert per_sbh(remat="full") == 2
    assert 5 * a * s / h == 80  # §5: what selective drops, of 34 + 80
    assert per_sbh() / per_sbh(sequence=True, remat="selective") == pytest.approx(5.4, abs=0.05)
    with pytest.raises(PlanError, match="remat='dots' is not in Korthikanti"):
        per_sbh(remat="dots")


def test_what_differs_from_gpt_is_what_the_table_says():
    """With 16 bits, as many key/value heads and F = 4D, per s·b·h and per a·s/h."""
    config = dataclasses.replace(SMALL, embed=32, num_heads=8, num_kv_heads=8, mlp_hidden=128)
    wanted = plan("data=1", compute_dtype="bfloat16")
    here, sbh = layer_bytes(config, wanted), 16 * 16 * 32
    assert here["norms"] - 4 * 4 * 16 * 16 == 16 * sbh
    assert here["inputs of projections"] == 4 * sbh
    assert here["queries, keys, values"] == 6 * sbh
    assert here["output of attention"] == 2 * sbh
    assert here["inside the MLP"] == 48 * sbh  # 12 F/D
    per_score = 16 * 8 * 16 * 16
    assert here["scores of attention"] - 8 * 16 * 8 * 16 == 4 * per_score
    assert here["weights of attention"] == 2 * per_score


@pytest.mark.parametrize("mesh", ["fsdp=2", "context=2"])
def test_formula_is_refused_where_a_strategy_decides(mesh):
    with pytest.raises(PlanError, match=f"The mesh has {mesh}.*`kept`"):
        layer_bytes(SMALL, plan(mesh))
    with pytest.raises(PlanError, match=r"tiny-moe has num_experts=8.*`kept`"):
        layer_bytes(MOE, plan("data=2"))


def test_attention_in_blocks_keeps_no_scores_to_begin_with():
    fields = {"context": "ring", "compute_dtype": "float32"}
    none, selective = (
        kept_bytes("context=2", UNLIKE, remat=choice, **fields) for choice in ("none", "selective")
    )
    assert none == selective
    whole = plan("data=1", batch_size=16, seq_len=8)  # as many tokens as each device has
    but_scores = dict(layer_bytes(UNLIKE, whole))
    del but_scores["scores of attention"], but_scores["weights of attention"]
    assert none <= sum(but_scores.values()) + 2 * 4 * 16 * 8 * UNLIKE.num_heads


def test_weights_that_are_gathered_are_not_kept():
    (want,) = layer_bytes(UNLIKE, plan("data=4", remat="full")).values()
    rotary = 4 * 16 * UNLIKE.head_dim  # a loop with a backward of its own keeps what it looks at
    assert want <= kept_bytes("fsdp=4", UNLIKE, remat="full") <= want + rotary


# --- predicted = asked = compiled = executed ---------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "config", "fields"),
    [
        ("tensor=2", SMALL, {}),
        ("data=2,tensor=2", SMALL, {"sequence": True, "num_accumulation_steps": 2}),
        ("fsdp=2,tensor=2", SMALL, {"sequence": True}),
        ("context=2", SMALL, {}),
        ("context=2", SMALL, {"context": "ulysses"}),
        ("expert=2,tensor=2", MOE, {"sequence": True, "overlap": "unidirectional"}),
    ],
)
def test_predicted_is_what_the_program_asks_for(mesh, config, fields):
    for choice in ("selective", "dots"):
        explicit = step(mesh, config, remat=choice, compute_dtype="bfloat16", **fields)
        assert executions(expected(config, explicit.plan)) == executions(asked_of(explicit)), choice


CASES = [
    ("data=2,tensor=2", {"remat": "selective"}),
    ("context=2,tensor=2", {"remat": "dots"}),
]


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_whole_step(mesh, fields):
    row = take_row("remat", step(mesh, **fields), batches(10), reference(SMALL, 10))
    assert agree(row.lines), [line for line in row.lines if not line.agrees]
    assert row.numbers_agree, row


def test_what_repeats_is_told_by_its_phase():
    for choice, sequence in itertools.product(CHOICES, (False, True)):
        rows = asked_of(step("tensor=2", remat=choice, sequence=sequence))
        again = [(row.kind, row.count) for row in rows if row.phase == "recompute"]
        L = SMALL.num_layers
        want = {
            ("dots", True): 2 * [("all-gather", L)],
            ("full", True): [("all-gather", L), ("reduce-scatter", L), ("all-gather", L)],
            ("full", False): [("all-reduce", L)],
        }
        assert again == want.get((choice, sequence), []), choice


# --- refusals and faults -----------------------------------------------------------------------


def test_choices_are_named():
    with pytest.raises(PlanError, match=r"remat='some'.*'none', 'selective', 'dots', 'full'"):
        plan("data=1", remat="some")


def no_checkpoint(plan):
    return lambda layer: layer


def everything_again(plan):
    return lambda layer: jax.checkpoint(layer, prevent_cse=False)


def nothing_named(plan):
    policy = jax.checkpoint_policies.save_only_these_names("colunm")
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)


# name: (remat, what is replaced, by what); memory or the audit sees each, the numbers none.
FAULTS = {
    "nothing is dropped": ("full", "checkpoint", no_checkpoint),
    "everything is dropped where something was to be kept": (
        "dots", "checkpoint", everything_again),
    "a name that nothing has": ("dots", "checkpoint", nothing_named),
    "scores are kept": ("selective", "attention_core", lambda plan: causal_attention),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    choice, attribute, wrong = FAULTS[name]
    want = sum(layer_bytes(UNLIKE, plan("tensor=2", remat=choice)).values())
    assert kept_bytes("tensor=2", UNLIKE, remat=choice) == want
    monkeypatch.setattr(remat, attribute, wrong)
    assert kept_bytes("tensor=2", UNLIKE, remat=choice) != want


def test_recompute_that_is_not_predicted_is_seen(monkeypatch):
    monkeypatch.setattr(remat, "repeats_leave", lambda plan: False)
    explicit = step("tensor=2", remat="full")
    assert executions(expected(SMALL, explicit.plan)) != executions(asked_of(explicit))


def test_recompute_that_has_lost_its_mark_is_seen(monkeypatch):
    """A layer differentiated by hand, whose second forward says it is the first."""

    def unmarked(plan):
        def wrap(layer):
            @jax.custom_vjp
            def run(x, state):
                return layer(x, state)

            def backward(saved, gradient):
                with jax.named_scope("forward"):
                    _, pull = jax.vjp(layer, *saved)
                return pull(gradient)

            run.defvjp(lambda x, state: (layer(x, state), (x, state)), backward)
            return run

        return wrap

    monkeypatch.setattr(remat, "checkpoint", unmarked)
    explicit = step("tensor=2", remat="full", sequence=True)
    assert executions(expected(SMALL, explicit.plan)) != executions(asked_of(explicit))
