"""Attention over a split sequence, run by itself, and the same on one device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar import asked
from jaxpar.model.attention import causal_attention
from jaxpar.model.config import ModelConfig
from jaxpar.numerics import relative_error
from jaxpar.strategies import context
from jaxpar.strategies.plan import Plan
from tests.helpers import plan

B, S, N, K, H = 2, 48, 8, 2, 4

TWO_LAYERS = ModelConfig(
    name="two-layers", num_layers=2, embed=8, num_heads=N, num_kv_heads=K, head_dim=H,
    mlp_hidden=8, vocab=256, max_seq_len=4096,
)  # fmt: skip
"""Whose closed form is that of two attentions; one that is alone runs nothing again."""


QUICK = {"xla_backend_optimization_level": 0}
"""Compiling takes longer here than running."""


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray


class Outputs(NamedTuple):
    o: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@functools.cache
def inputs() -> Inputs:
    random = np.random.default_rng(0)
    shapes = (B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H)
    return Inputs(*(random.normal(size=shape).astype(np.float32) for shape in shapes))


def documents(length: int) -> np.ndarray:
    """Documents of `length` tokens, the second row shifted by one, int32 [B, S]."""
    return np.stack([(np.arange(S) + row) // length for row in range(B)]).astype(np.int32)


def one_device(segments: np.ndarray | None = None) -> Outputs:
    q, k, v, do = inputs()

    def run(q, k, v, do):
        o, pull = jax.vjp(lambda *qkv: causal_attention(*qkv, segments), q, k, v)
        return Outputs(o, *pull(do))

    return jax.device_get(jax.jit(run)(q, k, v, do))


def context_plan(mesh: str, **fields: Any) -> Plan:
    return plan(mesh, **{"seq_len": S, "batch_size": B, **fields})


def program(plan: Plan, placed_segments: np.ndarray | None = None) -> Any:
    """A function of (q, k, v, do) in placed order: one attention with its backward."""
    context.STRATEGY.check(TWO_LAYERS, plan)
    attention = context.attention(plan)
    mesh = plan.mesh.build()
    spec = PartitionSpec(None, tuple(axis for axis in context.AXES if plan.size(axis) > 1))
    placed = None if placed_segments is None else jnp.asarray(placed_segments)

    def attend(q, k, v):
        sharded = jax.shard_map(
            attention, mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec()), out_specs=spec,
            check_vma=True,
        )  # fmt: skip
        return sharded(q, k, v, placed)

    def scaled(q, k, v, scale):
        return attend(q, k, v) * scale  # in a layer too, the backward of what follows needs it

    if plan.remat == "full":
        scaled = jax.checkpoint(scaled)

    def run(q, k, v, do):
        o, pull = jax.vjp(scaled, q, k, v, jnp.ones_like(do))
        return Outputs(o, *pull(do)[:3])

    return run


def on_devices(
    plan: Plan, segments: np.ndarray | None = None, order: np.ndarray | None = None
) -> Outputs:
    """Attention and its gradients on the plan's mesh, back in the order of positions."""
    order = context.sequence_layout(plan).order(plan.seq_len) if order is None else order
    run = program(plan, None if segments is None else segments[:, order])
    dtype = jnp.dtype(plan.compute_dtype)
    placed = (jnp.asarray(x[:, order], dtype) for x in inputs())
    got = jax.device_get(jax.jit(run, compiler_options=QUICK)(*placed))
    assert {x.dtype for x in got} == {dtype}
    back = np.argsort(order)
    return Outputs(*(np.asarray(x[:, back], np.float32) for x in got))


def asked_of(plan: Plan) -> list[Any]:
    """The collectives of one attention and its backward."""
    run = program(plan)
    dtype = jnp.dtype(plan.compute_dtype)
    q, kv = (jax.ShapeDtypeStruct((B, plan.seq_len, heads, H), dtype) for heads in (N, K))
    return asked(jax.jit(run).trace(q, kv, kv, q).jaxpr)


def error(got: Outputs, want: Outputs) -> float:
    return relative_error(got, want)
