"""Model FLOPs are the matmuls of the plain model, counted on its jaxpr; MFU names its peak."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxpar import preset
from jaxpar.hardware import chip
from jaxpar.model.transformer import init_params
from jaxpar.predict.flops import active_matmul_parameters, peak_flops_per_s, step_flops
from jaxpar.reference import plain_step
from jaxpar.text import Batch
from jaxpar.tour import default_optimizer
from jaxpar.update import TrainState
from tests.helpers import SMALL, TIED, plan


def matmul_flops(jaxpr) -> int:
    """Two per multiply-add of every dot_general, times the turns of the loops it is in."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (lhs, _), _ = eqn.params["dimension_numbers"]
            contracted = math.prod(eqn.invars[0].aval.shape[d] for d in lhs)
            total += 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jaxprs_in_params(eqn.params):
            total += turns * matmul_flops(getattr(body, "jaxpr", body))
    return total


@pytest.mark.parametrize("config", [SMALL, TIED, preset("tiny")], ids=lambda config: config.name)
def test_it_is_what_the_plain_step_multiplies(config):
    """Which computes all scores and masks half of them: full attention FLOPs."""
    of = plan("data=1", batch_size=2, seq_len=16)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = Batch(tokens, tokens, jax.ShapeDtypeStruct((2, 16), jnp.float32))
    optimizer = default_optimizer()
    params = jax.eval_shape(lambda: init_params(config, 0))
    state = TrainState(params, jax.eval_shape(optimizer.init, params))
    traced = jax.jit(plain_step(config, optimizer)).trace(state, batch)
    assert matmul_flops(traced.jaxpr.jaxpr) == step_flops(config, of, causal=False)


def test_causal_attention_is_half_and_the_diagonal():
    of = plan("data=1", batch_size=1, seq_len=16)
    full, causal = (step_flops(SMALL, of, causal=causal) for causal in (False, True))
    layers = SMALL.num_layers * SMALL.num_heads * SMALL.head_dim
    assert full - causal == 3 * 16 * 4 * layers * (16 - 8.5)


def test_known_models():
    """6 per parameter and token, but for lookups; Mixtral's own figure of active ones is 12.9 B."""
    llama = preset("llama-3-8b")
    assert active_matmul_parameters(llama) / (llama.num_parameters - 128256 * 4096) == (
        pytest.approx(1, abs=1e-4)
    )
    mixtral = preset("mixtral-8x7b")
    assert active_matmul_parameters(mixtral) + 32000 * 4096 == pytest.approx(12.9e9, rel=0.005)
    one = dataclasses.replace(mixtral, num_experts_per_token=8)
    assert active_matmul_parameters(one) + 32000 * 4096 == pytest.approx(
        mixtral.num_parameters, rel=1e-4
    )


def test_a_peak_is_known_or_it_is_none():
    def devices(kind, platform="tpu", num=2):
        return [SimpleNamespace(device_kind=kind, platform=platform)] * num

    v5e = chip("v5e").peak_flops["bf16"]
    assert peak_flops_per_s(devices("TPU v5 lite"), "bfloat16") == 2 * v5e
    h100 = peak_flops_per_s(devices("NVIDIA H100 80GB HBM3", "gpu"), "float32")
    assert h100 == 2 * chip("h100").peak_flops["f32"]
    assert peak_flops_per_s(jax.devices()[:1], "bfloat16") is None
    assert peak_flops_per_s(devices("GeForce", "gpu"), "bfloat16") is None
