"""Executed = one device: losses over 10 steps and the parameters after them, in float32."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar.errors import PlanError
from jaxpar.numerics import first_difference, relative_error
from jaxpar.tour import LOSS_TOLERANCE, PARAMETER_TOLERANCE, train
from tests.helpers import SMALL, TIED, batches, reference, start, step

NUM_STEPS = 10

SEQUENCE = {"sequence": True}
ACCUMULATE = {"num_accumulation_steps": 2}
REMAT = {"remat": "full"}

CASES = {
    "data": [("data=2", {}), ("data=8", {}), ("slice=2,data=2", {}), ("data=4", ACCUMULATE)],
    "tensor": [("tensor=2", {}), ("tensor=4", REMAT), ("tensor=8", {})],
    "sequence": [("tensor=2", SEQUENCE), ("tensor=4", SEQUENCE), ("tensor=8", SEQUENCE)],
    "fsdp": [("fsdp=2", {}), ("fsdp=4", ACCUMULATE), ("fsdp=8", REMAT)],
    "data+tensor+sequence": [("data=2,tensor=4", SEQUENCE | ACCUMULATE)],
    "hsdp+tensor+sequence": [("data=2,fsdp=2,tensor=2", SEQUENCE | REMAT)],
}
"""Products are drawn at random in test_random_plans."""


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param(mesh, fields, id=f"{name}:{mesh}")
        for name, cases in CASES.items()
        for mesh, fields in cases
    ],
)
def test_equals_one_device(mesh, fields):
    explicit = step(mesh, **fields)
    losses, norms, params, _ = train(start(explicit), explicit, batches(NUM_STEPS))
    want = reference(SMALL, NUM_STEPS)
    assert relative_error(losses, want.losses) <= LOSS_TOLERANCE
    assert relative_error(norms, want.gradient_norms) <= LOSS_TOLERANCE
    assert relative_error(params, want.params) <= PARAMETER_TOLERANCE
    assert losses[-1] < losses[0] - 0.05, "it has to learn, or equality says little"


@pytest.mark.parametrize("mesh", ["data=2,tensor=4", "fsdp=4,tensor=2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tied_embedding_and_gelu(mesh, sequence):
    explicit = step(mesh, TIED, sequence=sequence)
    trained, want = train(start(explicit), explicit, batches(3)), reference(TIED, 3)
    assert relative_error(trained.losses, want.losses) <= LOSS_TOLERANCE
    assert relative_error(trained.params, want.params) <= PARAMETER_TOLERANCE


def test_the_same_run_twice_is_bit_identical():
    explicit = step("fsdp=2,tensor=2", sequence=True)
    runs = [train(start(explicit), explicit, batches(3)) for _ in range(2)]
    assert first_difference(*runs) is None


def test_initial_parameters_do_not_depend_on_the_mesh():
    one, many = (
        jax.device_get(step(mesh).init(seed=3).params) for mesh in ("data=1", "fsdp=4,tensor=2")
    )
    assert first_difference(one, many) is None
    other = jax.device_get(step("data=1").init(seed=4).params)
    assert first_difference(one, other) is not None


def test_a_state_of_given_parameters():
    given = reference(SMALL, 0).start
    on_mesh = step("fsdp=4,tensor=2").init_from(given)
    assert first_difference(jax.device_get(on_mesh), jax.device_get(step("data=1").init())) is None
    with pytest.raises(
        PlanError, match=r"params.* is \(2, 32, 2, 4\), and tied has \(2, 32, 8, 4\)"
    ):
        step("data=2", TIED).init_from(given)


def test_copies_of_whole_parameters_stay_bit_equal():
    explicit = step("data=2,tensor=4")
    state = start(explicit)
    for batch in batches(NUM_STEPS):
        state, _ = explicit(state, batch)
    for placed in explicit.layout:
        leaf = state.params
        for key in placed.parameter.path.split("/"):
            leaf = leaf[key]
        copies = {}
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)
            first = copies.setdefault(str(shard.index), value)
            assert first_difference(value, first) is None, placed.parameter.path


def test_bfloat16_compute_stays_close():
    explicit = step("data=2,tensor=4", compute_dtype="bfloat16", sequence=True)
    losses = train(start(explicit), explicit, batches(3)).losses
    assert relative_error(losses, reference(SMALL, 3).losses) < 2e-2


def test_metrics_count_valid_tokens_once():
    explicit = step("data=2,fsdp=2,tensor=2", num_accumulation_steps=2)
    batch = batches(1)[0]
    _, metrics = explicit(start(explicit), batch)
    assert int(metrics.num_tokens) == int((batch.mask_BS != 0).sum())
    per_device = (batch.mask_BS != 0).reshape(4, -1).sum(axis=1)
    assert len(set(per_device.tolist())) > 1, "devices have to hold unequal numbers of tokens"


def test_two_steps_in_one_process_do_not_disturb_each_other():
    first, second = step("data=2"), step("tensor=4", dataclasses.replace(SMALL, name="other"))
    alone = train(start(first), first, batches(3))
    states = [start(first), start(second)]
    for batch in batches(3):
        states = [run(state, batch)[0] for run, state in zip((first, second), states, strict=True)]
    assert first_difference(jax.device_get(states[0].params), alone.params) is None
