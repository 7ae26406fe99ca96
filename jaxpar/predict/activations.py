"""Bytes of activations that a layer keeps for its backward: by formula, and in a traced program.

Two formulas, per layer and device. `gpt_layer_bytes` is the published one, for a GPT layer in 16
bits with dropout. `layer_bytes` is that of the layers in this project, exactly: what JAX keeps is
decided by its differentiation rules, so that each line can be read off a jaxpr (`kept`), and the
tests hold one against the other to the byte. Where they differ, per s·b·h bytes and with t = 1:

| kept                  | GPT   | here, bfloat16 | because                                     |
|-----------------------|-------|----------------|---------------------------------------------|
| norms                 | 4     | 16             | RMSNorm in float32 keeps two float32 copies |
| inputs of projections | 4     | 4              |                                             |
| queries, keys, values | 6     | 2 + 4K/N       | fewer key/value heads                       |
| scores, per a·s/h     | 2 + 1 | 4              | float32; no dropout here and so no mask     |
| weights, per a·s/h    | 2     | 2              |                                             |
| output of attention   | 2     | 2              |                                             |
| inside the MLP        | 16    | 12F/D          | SwiGLU, or GELU (10F/D), step by step       |
| other dropout masks   | 2     | 2              | none without dropout                        |

and JAX keeps what the paper does not count: the layer's weights, once they are cast.

Attention that computes scores block by block and keeps none (Dao et al. 2022: FlashAttention; here
every attention of context/) has 4 bytes per token and head in place of all terms with a·s/h: the
logarithm of the sum of its weights. For such a kernel 'selective' has nothing to drop.

Source: Korthikanti et al. 2022, "Reducing activation recomputation", §4.1, §4.2, §5 and table 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.strategies.plan import Plan

# --- formulas --------------------------------------------------------------------------------


def gpt_layer_bytes(config: ModelConfig, plan: Plan) -> float:
    """Korthikanti et al. 2022, table 2, from the plan's tensor axis, `sequence` and `remat`.

    'dots' is not among their choices and raises PlanError. Attention takes s as it is on a device.
    """
    s, b, h, a = plan.local_seq_len, plan.local_batch_size, config.embed, config.num_heads
    t = plan.size("tensor")
    if plan.remat == "dots":
        raise PlanError(
            "remat='dots' is not in Korthikanti et al. 2022, table 2, which knows 'none', "
            "'selective' and 'full'. `layer_bytes` has it for this project's layers."
        )
    if plan.remat == "full":
        return 2 * s * b * h
    attention = 0.0 if plan.remat == "selective" else 5 * a * s / h
    if plan.sequence:
        return s * b * h / t * (34 + attention)
    return s * b * h * (10 + 24 / t + attention / t)


def layer_bytes(config: ModelConfig, plan: Plan) -> dict[str, int]:
    """What one dense layer of `config` keeps for one micro-batch on one device, item by item.

    Raises PlanError where attention reaches over several devices or weights are gathered, since
    those strategies decide for themselves what they keep.
    """
    for axis in ("context", "ulysses", "fsdp", "pipe"):
        if plan.size(axis) > 1:
            raise PlanError(
                f"The mesh has {axis}={plan.size(axis)}, and that strategy decides itself what a "
                f"layer keeps: trace the step and read it with `kept`. `layer_bytes` is for axes "
                f"slice, data and tensor."
            )
    if config.num_experts:
        raise PlanError(
            f"{config.name} has num_experts={config.num_experts}: what their layers keep depends "
            f"on how tokens travel. Trace the step and read it with `kept`."
        )
    if plan.remat in ("dots", "full"):
        return {name: sum(sizes) for name, sizes in named_arrays(config, plan).items()}
    t, c = plan.size("tensor"), plan.compute_bytes
    D, H, F = config.embed, config.head_dim, config.mlp_hidden // t
    N, K = config.num_heads // t, max(config.num_kv_heads // t, 1)
    B, S = plan.local_batch_size, plan.local_seq_len
    tokens = B * S
    stream = tokens // t if plan.sequence else tokens  # of the residual stream
    # JAX 0.10 keeps a product of GELU's that JAX 0.12 does not.
    num_hidden = 6 if config.mlp == "swiglu" or jax.__version_info__ < (0, 11) else 5
    found = {
        "norms": 2 * 2 * 4 * stream * (D + 1),
        "inputs of projections": 2 * c * tokens * D,
        "queries, keys, values": c * tokens * H * (N + 2 * K),
        "output of attention": c * tokens * N * H,
        "inside the MLP": num_hidden * c * tokens * F,
        "weights": 2 * 4 * D + _weight_bytes(config, plan),
    }
    if config.dropout:
        found["dropout masks"] = 2 * stream * D
    if plan.remat == "none":
        found["scores of attention"] = B * N * (4 * S * S + 2 * 4 * S)
        found["weights of attention"] = c * B * N * S * S
    return found


def named_arrays(config: ModelConfig, plan: Plan) -> dict[str, list[int]]:
    """Bytes of each array that remat='full' or 'dots' keeps of a dense layer, on any mesh."""
    t, c = plan.size("tensor"), plan.compute_bytes
    tokens = plan.local_batch_size * plan.local_seq_len
    stream = c * (tokens // t if plan.sequence else tokens) * config.embed
    if plan.remat == "full":
        return {"input of the layer": [stream]}
    assert plan.remat == "dots"
    head = c * tokens * config.head_dim
    kv = head * max(config.num_kv_heads // t, 1)
    num_inputs = 2 if config.mlp == "swiglu" else 1
    return {
        "input of the layer": [stream],
        "queries, keys, values": [head * config.num_heads // t, kv, kv],
        "result of attention": [stream],
        "inside the MLP": num_inputs * [c * tokens * config.mlp_hidden // t],
    }


def _weight_bytes(config: ModelConfig, plan: Plan) -> int:
    """Of a layer's matrices as far as they are not the parameters themselves: cast, or cut out."""
    t, c = plan.size("tensor"), plan.compute_bytes
    D, H, F = config.embed, config.head_dim, config.mlp_hidden // t
    kv_weights = 2 * D * max(config.num_kv_heads // t, 1) * H
    if c == 4:
        return c * kv_weights if config.num_kv_heads % t else 0
    num_matrices = 3 if config.mlp == "swiglu" else 2
    return c * (2 * D * config.num_heads // t * H + kv_weights + num_matrices * D * F)


# --- in a program ----------------------------------------------------------------------------


class Kept(NamedTuple):
    """An array that the forward loop over layers leaves for each of them."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        bits = {"bool": 8, "bfloat16": 16}.get(self.dtype) or int(self.dtype.lstrip("uintfloa"))
        return math.prod(self.shape) * bits // 8


def kept(jaxpr: Any, num_layers: int) -> list[Kept]:
    """What a traced training step keeps of one layer: `step.jitted.trace(..).jaxpr`.

    That is what a forward loop of `num_layers` turns hands out per turn; statistics count as well.
    """
    return list(_stacked(getattr(jaxpr, "jaxpr", jaxpr), num_layers))


def _stacked(jaxpr: Jaxpr, num_layers: int) -> Iterator[Kept]:
    for eqn in jaxpr.eqns:
        bodies: list[Any] = [getattr(body, "jaxpr", body) for body in jaxprs_in_params(eqn.params)]
        is_loop = eqn.primitive.name == "scan" and eqn.params["length"] == num_layers
        if is_loop and not eqn.params["reverse"]:
            outer: list[Any] = [v.aval for v in eqn.outvars]
            inner: list[Any] = [v.aval for v in bodies[0].outvars]
            for stacked, one in zip(outer, inner, strict=True):
                if stacked.shape != one.shape:
                    yield Kept(one.shape, one.dtype.name)
            continue
        for body in bodies:
            yield from _stacked(body, num_layers)
