"""Context parallelism: the sequence is split, in every layer and inside attention.

What is split    the tokens of each sequence, over `context`: residual stream, MLP and loss see a
                 part of it and need no exchange. Only attention looks at other positions.
Why              sequences whose activations do not fit on one device.
What it costs    in every layer, keys and values (or heads) travel. Three ways, by `Plan.context`:

ring       keys and values go round (ring.py). Hops hide behind blocks of attention.
allgather  they are gathered at once (gather.py). Nothing hides it; any mask fits.
ulysses    heads are exchanged for positions (ulysses.py). Bytes shrink with n; at most N devices.

A second axis `ulysses` exchanges heads inside each rank of a ring or gather over `context`: the
ring over slow links, the heads over fast ones. n = `context`, u = `ulysses` (1 without it).
Per layer and micro-batch, K and V = B·(S/n)·(K/u)·H elements, c and g the bytes of the compute and
the reduce dtype:

| Plan.context | collective         | axes    | phase    | count  | payload_bytes | why              |
|--------------|--------------------|---------|----------|--------|---------------|------------------|
| ring         | collective-permute | context | forward  | 2(n-1) | c·K           | k, v to the next |
|              | collective-permute | context | backward | 2(n-1) | c·K           | k, v again       |
|              | collective-permute | context | backward | 2(n-1) | g·K           | their gradients  |
| allgather    | all-gather         | context | forward  | 2      | c·nK          | k, v             |
|              | all-gather         | context | backward | 2      | c·nK          | k, v again       |
|              | reduce-scatter     | context | backward | 2      | g·nK          | their gradients  |
| any, u > 1   | all-to-all         | ulysses | forward  | 2      | c·Q           | q, output        |
|              | all-to-all         | ulysses | forward  | 2      | c·max(K,u)..  | k, v             |
|              | all-to-all         | ulysses | backward | 4      | the same      | transposes       |

and everything forward once more in phase recompute with remat='full'. `ulysses` alone is the last
three rows over `context`. Gradients of all parameters are summed over both axes (data.py).

Sources: Liu et al. 2023 (ring attention) §3; Jacobs et al. 2023 (DeepSpeed Ulysses) §3; Llama Team
2024 §3.3.2 (all-gather, zigzag); Fang and Zhao 2024 (ring × Ulysses).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxpar.errors import PlanError, nearest_divisors, nearest_multiples
from jaxpar.model.attention import causal_attention
from jaxpar.model.config import ModelConfig
from jaxpar.strategies.context.gather import Gather, gathered_attention
from jaxpar.strategies.context.layout import SequenceLayout
from jaxpar.strategies.context.ring import Ring, ring_attention
from jaxpar.strategies.context.ulysses import Attention, exchanging_heads
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant

AXIS = "context"
HEADS_AXIS = "ulysses"

CARD = Card(
    name="context",
    axis=f"{AXIS}, {HEADS_AXIS}",
    splits="the tokens of each sequence, attention included; parameters are whole",
    why="sequences whose activations do not fit on one device",
    costs="per layer n-1 hops of keys and values, or one gather of them, or 4 all-to-alls",
    source="Liu et al. 2023, §3; Jacobs et al. 2023, §3; Llama Team 2024, §3.3.2",
)

# --- communication ---------------------------------------------------------------------------


def attention(plan: Plan) -> Attention:
    """What the model calls in place of one device's causal attention (see ring.py for shapes)."""
    layout, reduce_dtype = sequence_layout(plan), jnp.dtype(plan.reduce_dtype)
    inner: Attention
    if layout.num_ranks == 1:
        inner = causal_attention
    elif plan.context == "ring":
        is_zigzag = layout.name == "zigzag"
        ring = Ring(axis=AXIS, is_zigzag=is_zigzag, reduce_dtype=reduce_dtype)
        inner = partial(ring_attention, ring)
    else:
        gather = Gather(axis=AXIS, layout=layout, reduce_dtype=reduce_dtype)
        inner = partial(gathered_attention, gather)
    return exchanging_heads(layout.slice_axis, inner)


# --- where tokens are ------------------------------------------------------------------------


def sequence_layout(plan: Plan) -> SequenceLayout:
    """Where the plan puts the tokens of a sequence; one part on one rank without these axes."""
    exchanges_over_context = plan.context == "ulysses"
    return SequenceLayout(
        name=plan.context_layout,
        rank_axis=HEADS_AXIS if exchanges_over_context else AXIS,
        slice_axis=AXIS if exchanges_over_context else HEADS_AXIS,
        num_ranks=1 if exchanges_over_context else plan.size(AXIS),
        num_slices=plan.size(AXIS if exchanges_over_context else HEADS_AXIS),
    )


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    where = sequence_layout(plan)
    m, L, n = plan.num_accumulation_steps, config.num_layers, where.num_ranks
    local_tokens = plan.local_batch_size * plan.seq_len // (n * where.num_slices)
    compute = plan.compute_bytes, DTYPES[plan.compute_dtype]
    reduce = plan.reduce_bytes, DTYPES[plan.reduce_dtype]
    q_heads, kv_heads = _local_heads(config, plan)
    sent_kv_heads = max(kv_heads, where.num_slices)  # by each device that exchanges heads
    rows: list[Expected] = []

    def add(
        kind: str, axis: str, count: int, phases: tuple[Phase, ...], elements: int,
        dtype: tuple[int, str], why: str,
    ) -> None:  # fmt: skip
        for phase in phases:
            rows.append(
                Expected(
                    kind=kind,
                    axes=(axis,),
                    count=m * L * count,
                    payload_bytes=elements * dtype[0],
                    dtype=dtype[1],
                    phase=phase,
                    why=why,
                )
            )

    forward: tuple[Phase, ...] = ("forward", "recompute") if plan.remat == "full" else ("forward",)
    if where.num_slices > 1:
        for heads, why in ((q_heads, "queries, output"), (sent_kv_heads, "keys, values")):
            elements = local_tokens * heads * config.head_dim
            each = (*forward, "backward")
            add("all-to-all", where.slice_axis, 2, each, elements, compute, f"heads of {why}")
    if n == 1:
        return rows

    # What one rank attends with: all slices of its part, a slice of the heads.
    block = local_tokens * sent_kv_heads * config.head_dim
    if plan.context == "ring":
        both = (*forward, "backward")
        add("collective-permute", AXIS, 2 * (n - 1), both, block, compute, "keys, values go round")
        add("collective-permute", AXIS, 2 * (n - 1), ("backward",), block, reduce, "gradients")
    else:
        both = (*forward, "backward")
        add("all-gather", AXIS, 2, both, n * block, compute, "keys, values")
        add("reduce-scatter", AXIS, 2, ("backward",), n * block, reduce, "gradients of k, v")
    return rows


# --- rules -----------------------------------------------------------------------------------


def _local_heads(config: ModelConfig, plan: Plan) -> tuple[int, int]:
    """Query and key/value heads on a device before any exchange (tensor.py splits them)."""
    t = plan.size("tensor")
    return config.num_heads // t, max(config.num_kv_heads // t, 1)


def check(config: ModelConfig, plan: Plan) -> None:
    axes = {axis: plan.size(axis) for axis in (AXIS, HEADS_AXIS)}
    if max(axes.values()) == 1:
        raise PlanError(
            f"context={plan.context!r} with context_layout={plan.context_layout!r} says how "
            f"attention runs over axis context, and this mesh has context=1 ({plan.mesh}). Give "
            f"the mesh a context axis, or leave both fields out."
        )
    if plan.context == "ulysses" and axes[HEADS_AXIS] > 1:
        raise PlanError(
            f"context='ulysses' exchanges heads over axis context={axes[AXIS]}, and this mesh has "
            f"ulysses={axes[HEADS_AXIS]} too. Use context='ring' or 'allgather' around axis "
            f"ulysses, or one axis ulysses={axes[AXIS] * axes[HEADS_AXIS]} alone."
        )
    where = sequence_layout(plan)
    _check_heads(config, plan, where)
    divisor = where.divisor
    if plan.sequence:
        divisor = math.lcm(divisor, where.num_ranks * where.num_slices * plan.size("tensor"))
    if plan.seq_len % divisor:
        over = " × ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1)
        chunks = f", each device with two of {where.num_chunks} chunks"
        raise PlanError(
            f"seq_len={plan.seq_len} cannot be laid out over {over}"
            f"{chunks if where.num_chunks > where.num_ranks else ''}"
            f"{' and over tensor=' + str(plan.size('tensor')) if plan.sequence else ''}: it is not "
            f"a multiple of {divisor}. Nearest seq_len up to max_seq_len={config.max_seq_len}: "
            f"{nearest_multiples(plan.seq_len, divisor, config.max_seq_len) or 'none'}."
        )


def _check_heads(config: ModelConfig, plan: Plan, where: SequenceLayout) -> None:
    n, axis = where.num_slices, where.slice_axis
    q_heads, kv_heads = _local_heads(config, plan)

    def fits(n: int) -> bool:
        divides = kv_heads % n == 0 or n % kv_heads == 0
        return divides and plan.seq_len % (where.num_ranks * n) == 0

    sizes = nearest_divisors(q_heads, n, fits)
    per = f" / tensor={plan.size('tensor')}" if plan.size("tensor") > 1 else ""
    if q_heads % n:
        raise PlanError(
            f"{config.name}: num_heads={config.num_heads}{per} cannot be exchanged over {axis}={n}: "
            f"it is not a multiple. Nearest sizes of axis {axis}: {sizes}."
        )
    if kv_heads % n and n % kv_heads:
        raise PlanError(
            f"{config.name}: num_kv_heads={config.num_kv_heads}{per} and {axis}={n}: neither is a "
            f"multiple of the other, so heads can be neither split nor repeated evenly. Nearest "
            f"sizes of axis {axis}: {sizes}."
        )


def hooks(config: ModelConfig, plan: Plan) -> dict[str, Callable[..., Any]]:
    return {"attention": attention(plan), "positions": sequence_layout(plan).positions}


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS, HEADS_AXIS),
    is_active=lambda plan: (
        max(plan.size(AXIS), plan.size(HEADS_AXIS)) > 1
        or (plan.context, plan.context_layout) != ("ring", "zigzag")
    ),
    # Every device sees a part of each sequence: all its gradients are summands.
    is_partial=lambda parameter: True,
    check=check,
    hooks=hooks,
    expected=expected,
    variants=(
        Variant(name="context-ring", mesh="context=8"),
        Variant(name="context-ulysses", mesh="context=8", fields={"context": "ulysses"}),
        Variant(name="context-allgather", mesh="context=8", fields={"context": "allgather"}),
        Variant(name="context-ring+ulysses", mesh="context=2,ulysses=4"),
        Variant(name="data+context-ring", mesh="data=2,context=4"),
        Variant(name="context-ring+tensor", mesh="context=4,tensor=2"),
    ),
)
