"""What a step refuses at the door, where JAX would compute something else or fail later."""

import jax
import numpy as np
import optax
import pytest

from jaxpar import TrainStep
from jaxpar.errors import PlanError
from tests.helpers import SMALL, batches, plan, start, step

BEYOND_ELEMENTS = {
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "noise": optax.noisy_sgd(1e-3, key=0),
}


def with_optimizer(mesh, optimizer):
    return TrainStep(config=SMALL, plan=plan(mesh), optimizer=optimizer)


@pytest.mark.parametrize("name", BEYOND_ELEMENTS)
@pytest.mark.parametrize("mesh", ["tensor=2", "fsdp=2"])
def test_an_optimizer_that_would_see_shards_is_refused(mesh, name):
    with pytest.raises(PlanError, match=r"beyond single elements \(.+optax.adamw"):
        with_optimizer(mesh, BEYOND_ELEMENTS[name])


@pytest.mark.parametrize("name", BEYOND_ELEMENTS)
def test_it_is_welcome_where_parameters_are_whole(name):
    with_optimizer("data=2", BEYOND_ELEMENTS[name])


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1, momentum=0.9), optax.lion(1e-3), optax.adam(optax.cosine_decay_schedule(1, 9)),
     optax.rprop(1e-3), optax.chain(optax.clip(1.0), optax.adamw(1e-3))],
)  # fmt: skip
def test_elementwise_optimizers_are_welcome(optimizer):
    with_optimizer("fsdp=2,tensor=2", optimizer)


def test_a_used_state_is_refused_and_the_new_one_goes_on():
    explicit = step("data=2")
    state, (batch,) = start(explicit), batches(1)
    new, _ = explicit(state, batch)
    with pytest.raises(PlanError, match="given to an earlier step"):
        explicit(state, batch)
    explicit(new, batch)


def test_a_batch_without_valid_tokens_is_refused():
    explicit, (batch,) = step("data=2"), batches(1)
    with pytest.raises(PlanError, match="no token to divide the loss by"):
        explicit(start(explicit), batch._replace(mask_BS=np.zeros_like(batch.mask_BS)))


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(PlanError, match="seed="):
        step("data=2").init(seed=seed)


def test_the_program_is_called_what_it_is():
    explicit = step("data=2")
    lowered = explicit.jitted.lower(*explicit.abstract_inputs)
    assert "train_step" in lowered.as_text()[:200]
    assert isinstance(explicit.abstract_inputs[1].tokens_BS, jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: None, "a NoneType"),
        (lambda state: tuple(state), "a tuple"),
        (lambda state: state.params, "a dict"),
        (lambda state: state._replace(opt_state=()), "not one of this model and optimizer"),
        (lambda state: state._replace(params=jax.tree.map(np.float64, state.params)),
         r"table'\] is float64\[256, 32\], and has to be float32\[256, 32\]"),
    ],
)  # fmt: skip
def test_a_state_of_something_else_is_refused(spoil, message):
    explicit, (batch,) = step("data=2"), batches(1)
    with pytest.raises(PlanError, match=message):
        explicit(spoil(start(explicit)), batch)
