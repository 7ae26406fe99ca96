"""Recipes: plans that build, send what is predicted, and refuse by name what they cannot spread."""

import json
import sys

import pytest

from jaxpar import cli, recipes
from jaxpar.errors import PlanError
from jaxpar.model.config import preset
from jaxpar.predict.volume import expected
from jaxpar.tour import default_optimizer
from jaxpar.train import TrainStep
from tests.test_closed_forms import asked_of, executions

SIZE = {"batch_size": 512, "seq_len": 4096}

MADE = {
    "small": ("small", "llama-3-8b", {"num_devices": 8}, "data=8"),
    "medium": ("medium", "llama-3-8b", {"num_devices": 64}, "data=8 × fsdp=8"),
    "medium, one node": ("medium", "llama-3-8b", {"num_devices": 4}, "fsdp=4"),
    "large": ("large-dense", "llama-3-70b", {"num_devices": 512}, "fsdp=64 × tensor=8"),
    "large, pipeline": (
        "large-dense", "llama-3-70b", {"num_devices": 512, "pipe": 4},
        "pipe=4 × fsdp=16 × tensor=8",
    ),
    "moe": ("moe", "mixtral-8x7b", {"num_devices": 64}, "fsdp=8 × expert=8"),
    "moe, tensor": (
        "moe", "mixtral-8x7b", {"num_devices": 64, "tensor": 2}, "fsdp=8 × expert=4 × tensor=2",
    ),
    "long": (
        "long-context", "llama-3-8b", {"num_devices": 128, "context": 4},
        "fsdp=4 × context=4 × tensor=8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_mesh_of_a_recipe(case):
    name, model, sizes, mesh = MADE[case]
    plan = recipes.recipe(name)(preset(model), **sizes, **SIZE)
    assert str(plan.mesh) == mesh
    assert plan.sequence == (plan.size("tensor") > 1 and name != "moe")


def test_fields_given_beside_win():
    make = recipes.recipe("large-dense")
    usual = make(preset("llama-3-70b"), num_devices=64, pipe=4, **SIZE)
    assert (usual.schedule, usual.num_virtual_stages, usual.zero) == ("interleaved", 2, 1)
    own = make(preset("llama-3-70b"), num_devices=64, pipe=4, zero=2, schedule="1f1b",
               num_virtual_stages=1, sequence=False, **SIZE)  # fmt: skip
    assert (own.schedule, own.num_virtual_stages, own.zero, own.sequence) == ("1f1b", 1, 2, False)


@pytest.mark.parametrize(
    ("name", "model", "sizes", "words"),
    [
        ("large-dens", "llama-3-8b", {"num_devices": 8}, "no recipe 'large-dens'.*large-dense"),
        ("moe", "llama-3-8b", {"num_devices": 8}, "llama-3-8b has num_experts=0.*large_dense"),
        ("large-dense", "llama-3-8b", {"num_devices": 24, "tensor": 8, "pipe": 2},
         "num_devices=24 .* pipe=2 × fsdp=1 × tensor=8, which is 16"),
        ("medium", "llama-3-8b", {"num_devices": 12}, "num_devices=12 .* data=1 × fsdp=8"),
        ("small", "llama-3-8b", {"num_devices": 0}, "num_devices=0"),
        ("small", "llama-3-8b", {"num_devices": 5}, "batch_size=512 does not divide into 5"),
        ("moe", "mixtral-8x7b", {"num_devices": 64, "expert": 16}, "num_experts=8.* expert=16"),
    ],
)  # fmt: skip
def test_what_cannot_be_spread_is_refused(name, model, sizes, words):
    with pytest.raises(PlanError, match=words):
        recipes.recipe(name)(preset(model), **sizes, **SIZE)


@pytest.mark.parametrize("variant", recipes.VARIANTS, ids=lambda variant: variant.name)
def test_a_recipe_asks_for_what_is_predicted(variant):
    """Trained and compiled they are by the tour."""
    config = preset(variant.model or "tiny")
    plan = variant.plan(batch_size=16, seq_len=16)
    step = TrainStep(config=config, plan=plan, optimizer=default_optimizer())
    assert executions(expected(config, plan)) == executions(asked_of(step))


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxpar", "recipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


def test_the_verb(run, tmp_path):
    code, out, _ = run("moe", "--model", "mixtral-8x7b", "--devices", "16", "--json", "out.json")
    assert code == 0 and "all-to-all" in out
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["plan"]["mesh"] == {"fsdp": 2, "expert": 8}
    assert set(told["wire_bytes"]) >= {"expert", "fsdp"}
    code, _, err = run("small", "--context", "2")
    assert code == 2 and "small has no axis whose size is --context" in err
    assert all(name in run()[1] for name in recipes.RECIPES)


def test_explain_points_to_recipes(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxpar", "explain", "large-dense"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and "jaxpar recipe large-dense" in capsys.readouterr().err
    code, _, err = run("large-dense", "--devices", "64", "--tensor", "128")
    assert code == 2 and "--devices=64 are too few for tensor=128: these axes take 128" in err
