"""Gradients of parameters that devices hold copies of: one summand per device, summed once.

Norm scales, key/value projections with fewer heads than devices, and everything under data
parallelism. One plain SGD step at rate 1 without clipping gives the gradient itself.
"""

import math

import jax
import numpy as np
import optax
import pytest

from jaxpar import TrainStep
from jaxpar.numerics import relative_error
from jaxpar.reference import plain_step
from jaxpar.train import TrainState
from tests.helpers import SMALL, batches, plan

CASES = [
    ("tensor=8", {}),
    ("tensor=8", {"sequence": True}),
    ("data=2,tensor=4", {"sequence": True, "num_accumulation_steps": 2}),
    ("fsdp=2,tensor=4", {"remat": "full"}),
]


def host(tree):
    """A copy: the step donates its state, and on a CPU a view would go with it."""
    return jax.tree.map(np.array, jax.device_get(tree))


def uneven(params):
    """Parameters as in the middle of training: no scale is exactly one any more."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: p + rng.normal(0, 0.05, p.shape).astype(p.dtype), params)


def leaves(tree):
    return {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_gradient_of_each_parameter(mesh, fields):
    optimizer = optax.sgd(1.0)
    step = TrainStep(
        config=SMALL, plan=plan(mesh, **fields), optimizer=optimizer, clip_norm=math.inf
    )
    batch = batches(1)[0]
    before = uneven(host(step.init().params))

    def loss_at(params):
        state = TrainState(jax.device_put(params, shardings), optimizer.init(params))
        after, metrics = step(state, batch)
        return float(metrics.loss), host(after.params)

    shardings = jax.tree.map(lambda x: x.sharding, step.init().params)
    _, after = loss_at(before)
    plain = jax.jit(plain_step(SMALL, optimizer, clip_norm=math.inf))
    want_after = host(plain(TrainState(before, optimizer.init(before)), batch)[0].params)
    subtract = lambda a, b: jax.tree.map(np.subtract, a, b)  # noqa: E731
    got, want = leaves(subtract(before, after)), leaves(subtract(before, want_after))

    replicated = [p.parameter.path for p in step.layout if p.reduced_axes]
    if fields.get("sequence"):
        assert "layers/attention_norm/scale" in replicated
    assert "layers/attention/key" in replicated, "2 heads on 4 or 8 devices"
    for path in got:
        assert relative_error(got[path], want[path]) < 1e-4, path

    # The loss really moves as the gradient of each copied parameter says.
    rng = np.random.default_rng(1)
    for path in ("norm/scale", "layers/mlp_norm/scale", "layers/attention/key"):
        direction = rng.normal(size=got[path].shape).astype(np.float32)
        direction *= 0.05 / np.linalg.norm(direction)

        def moved(sign, path=path, direction=direction):
            return jax.tree_util.tree_map_with_path(
                lambda keys, p: (
                    p + sign * direction if "/".join(k.key for k in keys) == path else p
                ),
                before,
            )

        difference = loss_at(moved(+1))[0] - loss_at(moved(-1))[0]
        slope = 2 * float(np.vdot(got[path], direction))
        # A loss of about 5.5 in float32 is known to 5e-7 on either side.
        assert difference == pytest.approx(slope, rel=0.02, abs=4e-6), path
