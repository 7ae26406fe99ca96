"""A checkpoint of one plan is one of any other, and never of another model."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import TrainStep
from jaxpar.checkpoint import Checkpoints, _checksum
from jaxpar.checkpoint_folder import SCHEMA
from jaxpar.errors import CheckpointError
from jaxpar.numerics import first_difference, relative_error
from jaxpar.strategies import pipeline
from jaxpar.strategies.plan import plan_in_words
from tests.checkpoint_helpers import ODD, PLANS, batches, experiment, losses, step
from tests.helpers import plan


def saved(mesh, folder, state=None):
    """A plan's state after two steps, saved; losses of two more, and the state after those.

    It is trained on while it is being written: its buffers are donated at once.
    """
    of = step(mesh)
    if state is None:
        state, _ = losses(of, of.init(), batches(0, 2))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(of, state, 2, {"seed": 7})
        state, later = losses(of, state, batches(2, 4))
    return later, jax.device_get(state)


def resumed(mesh, folder):
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(step(mesh))
    assert (restored.num_steps, restored.data) == (2, {"seed": 7})
    state, found = losses(step(mesh), restored.state, batches(2, 4))
    return found, jax.device_get(state)


def assert_goes_on(mesh, folder, later, end):
    """Within rounding, parameters included, on a plan that did not save this."""
    found, state = resumed(mesh, folder)
    assert relative_error(np.array(found), np.array(later)) <= 1e-5
    assert relative_error(step(mesh).in_layer_order(state.params), end) <= 1e-4


def assert_goes_on_to_the_bit(mesh, folder, later, end):
    found, state = resumed(mesh, folder)
    assert found == later
    assert first_difference(state, end) is None


# Few tests with many plans, since each of these is compiled once in a process.


def test_tensor_parallel_goes_on_fully_sharded_and_offloaded(tmp_path):
    later, end = saved("tensor=4", tmp_path / "a")
    assert_goes_on_to_the_bit("tensor=4", tmp_path / "a", later, end)
    assert_goes_on("fsdp=8", tmp_path / "a", later, end.params)
    # ZeRO-1 with its moments in host memory, and back again.
    assert_goes_on("data=2,fsdp=2", tmp_path / "a", later, end.params)
    with Checkpoints(tmp_path / "a") as checkpoints:
        state = checkpoints.restore(step("data=2,fsdp=2")).state
    later, end = saved("data=2,fsdp=2", tmp_path / "b", state)
    assert_goes_on_to_the_bit("data=2,fsdp=2", tmp_path / "b", later, end)
    assert_goes_on("tensor=4", tmp_path / "b", later, end.params)


def test_a_pipeline_goes_on_as_data_parallel_and_back(tmp_path, monkeypatch):
    mesh = "pipe=2,tensor=2"
    later, end = saved(mesh, tmp_path / "a")
    whole = step(mesh).in_layer_order(end.params)
    assert_goes_on_to_the_bit(mesh, tmp_path / "a", later, end)
    assert_goes_on("data=4", tmp_path / "a", later, whole)
    assert_is_the_model_without_padding(about_of(tmp_path / "a"))
    with Checkpoints(tmp_path / "a") as checkpoints:
        state = checkpoints.restore(step("data=4")).state
    later, end = saved("data=4", tmp_path / "b", state)
    assert_goes_on(mesh, tmp_path / "b", later, end.params)

    # Layers in another's place are told, not trained on.
    def reversed_stages(params, config, plan):
        params = in_stage_order(params, config, plan)
        return {**params, "layers": jax.tree.map(lambda x: x[::-1], params["layers"])}

    in_stage_order = pipeline.in_stage_order
    monkeypatch.setattr(pipeline, "in_stage_order", reversed_stages)
    with Checkpoints(tmp_path / "b") as checkpoints, pytest.raises(CheckpointError, match="checks"):
        checkpoints.restore(step(mesh))


def assert_is_the_model_without_padding(about):
    shapes = {name: tuple(leaf["shape"]) for name, leaf in about["leaves"].items()}
    wanted = {p.path.replace("/", "."): p.stacked_shape for p in ODD.parameters}
    for prefix in ("params", "opt_state.0.mu", "opt_state.0.nu"):
        assert {name: shapes[f"{prefix}.{name}"] for name in wanted} == wanted
    assert about["plan"]["mesh"] == {"pipe": 2, "tensor": 2}
    assert about["model"]["name"] == "odd"


def test_a_plan_in_words_is_what_is_not_as_usual():
    words = plan_in_words(step("data=2,fsdp=2").plan)
    assert words == "data=2 × fsdp=2, zero=1, compute_dtype=float32, offload=optimizer"
    assert set(PLANS) >= {"data=2,fsdp=2"}


# --- checksums -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_checksum_knows_values_and_places_and_no_sharding(dtype):
    x = jnp.asarray(np.arange(48).reshape(6, 8) % 7, dtype)
    assert _checksum(x) != _checksum(x[::-1]) != _checksum(x[:, ::-1])
    assert _checksum(x) != _checksum(x.at[3, 4].set(x[3, 5]))
    words = np.asarray(x).reshape(-1)
    words = words.astype(np.uint8) if dtype == "bool" else words
    words = words.view(f"uint{8 * words.itemsize}").astype(np.uint64)
    by_hand = (words * (2 * np.arange(48, dtype=np.uint64) + 1)).sum() % 2**32
    assert int(_checksum(x)) == int(by_hand)


# --- what is refused -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@functools.cache
def untrained(root):
    """A folder with a state that no step has seen: nothing to compile but its making."""
    of = step("data=4")
    with Checkpoints(root) as checkpoints:
        checkpoints.save(of, of.init(), 2)
    return root


def about_file(folder):
    return folder / "step_00000002" / "about" / "metadata"


def about_of(folder):
    return json.loads(about_file(folder).read_text())


def with_config(config):
    return experiment("data=4", config).step()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: with_config(dataclasses.replace(ODD, name="wide", mlp_hidden=32)),
            r"step_00000002 was saved of model 'odd', and this is 'wide': "
            r"mlp_hidden=16 there and 32 here\. Give the model",
        ),
        (
            lambda: with_config(dataclasses.replace(ODD, rope_theta=5e5)),
            "rope_theta=10000.0 there and 500000.0 here",
        ),
        (
            lambda: experiment("data=4", optimizer=optax.sgd(0.1)).step(),
            r"has an array that this training has not: opt_state\.0\.count and \d+ more",
        ),
        (
            lambda: TrainStep(
                config=ODD,
                plan=plan("data=4", batch_size=8, seq_len=8, frozen=("embedding/*",)),
                optimizer=step("data=4").optimizer,
            ),
            r"has not: opt_state\.0\.mu\.embedding\.table and 1 more.+other parameters frozen",
        ),
        (
            lambda: experiment("data=4", optimizer=optax.adamw(1e-3, mu_dtype="bfloat16")).step(),
            r"opt_state\.0\.mu\.embedding\.table is 'float32' .+ has to be bfloat16\[256, 16\]",
        ),
    ],
)  # fmt: skip
def test_another_training_is_refused_by_name(other, message, root):
    folder = untrained(root)
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.restore(other())


def test_what_is_not_in_the_weights_may_change(root):
    folder = untrained(root)
    renamed = with_config(dataclasses.replace(ODD, name="renamed", max_seq_len=32, dropout=0.1))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(renamed).num_steps == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda about: about | {"schema": "jaxpar.checkpoint/2"},
         r"has schema 'jaxpar.checkpoint/2', and this version of jaxpar reads 'jaxpar.checkpoint/1'"
         r"\. Use the jaxpar that wrote it"),
        (lambda about: about | {"schema": "other/1"}, "no checkpoint, or is damaged"),
        (lambda about: [about], "no checkpoint, or is damaged"),
        (lambda about: about | {"model": 1}, "does not say of which model"),
        (lambda about: about | {"step": 3}, "was saved after step 3: its folder has another name"),
        (lambda about: about | {"leaves": []}, "does not say what arrays"),
        (lambda about: about | {"leaves": dict.fromkeys(about["leaves"], 1)}, "is None None"),
        (lambda about: about | {"leaves": {k: v | {"checksum": v["checksum"] ^ 1}
                                           for k, v in about["leaves"].items()}}, "has checksum"),
        (lambda about: {"schema": SCHEMA}, "does not say of which model"),
    ],
)  # fmt: skip
def test_what_stands_beside_the_arrays_is_not_trusted(spoil, message, root, tmp_path):
    folder = untrained(root)
    before = about_file(folder).read_text()
    about_file(folder).write_text(json.dumps(spoil(json.loads(before))))
    try:
        with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=message):
            checkpoints.restore(step("data=4"))
    finally:
        about_file(folder).write_text(before)


def test_a_flipped_bit_is_told_or_does_not_matter(root):
    """In each file of arrays; what can be restored all the same is what was saved, to the bit."""
    folder = untrained(root)
    files = [f for f in (folder / "step_00000002" / "state").rglob("*") if f.parent.name == "d"]
    assert files
    refused = []
    with Checkpoints(folder) as checkpoints:
        whole = jax.device_get(checkpoints.restore(step("data=4")).state)
        for file in sorted(files):
            content = file.read_bytes()
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            file.write_bytes(flipped)
            try:
                state = checkpoints.restore(step("data=4")).state
                assert first_difference(jax.device_get(state), whole) is None, file
            except CheckpointError as error:
                assert "step_00000002" in str(error)
                refused.append(file.name)
            file.write_bytes(content)
    assert refused
