"""Context parallelism: the sequence is split, in every layer and inside attention.

What is split    the tokens of each sequence, over `context`: residual stream, MLP and loss see a
                 part of it and need no exchange. Only attention looks at other positions.
Why              sequences whose activations do not fit on one device.
What it costs    in every layer, keys and values (or heads) travel. Three ways, by `Plan.context`:

ring       keys and values go round (ring.py); a hop hides behind the attention to a block.
allgather  they are gathered at once (gather.py); nothing hides it, and any mask fits.
ulysses    heads are exchanged for positions (ulysses.py); bytes shrink with n, at most N devices.

A second axis `ulysses` exchanges heads within each rank of `context`: the ring over slow links,
heads over fast ones. n = `context`, u = `ulysses`; with context='ulysses' n = 1, u = `context`.
P = B·(S/n)·max(K/u, 1)·H, Q = B·S/(nu)·N·H and R = B·S/(nu)·max(K, u)·H elements of one micro-batch
on one device, of c bytes in the compute and g in the reduce dtype; per layer and micro-batch:

| Plan.context | collective         | axis    | phase    | count  | payload_bytes | why            |
|--------------|--------------------|---------|----------|--------|---------------|----------------|
| ring         | collective-permute | context | forward  | 2(n-1) | c·P           | k, v go round  |
|              | collective-permute | context | backward | 2(n-1) | c·P           | k, v, again    |
|              | collective-permute | context | backward | 2(n-1) | g·P           | their gradient |
| allgather    | all-gather         | context | forward  | 2      | c·nP          | k, v           |
|              | all-gather         | context | backward | 2      | c·nP          | k, v, again    |
|              | reduce-scatter     | context | backward | 2      | g·nP          | their gradient |
| any, u > 1   | all-to-all         | ulysses | forward  | 2      | c·Q           | q, output      |
|              | all-to-all         | ulysses | forward  | 2      | c·R           | k, v           |
|              | all-to-all         | ulysses | backward | 2 + 2  | c·Q, c·R      | the transposes |

With remat='full' or 'dots' the forward ones appear once more in phase recompute, just before the
backward, which then fetches less: 2(n-2) for 2(n-1) permutes of k, v; no gather. All parameters'
gradients are summed over both axes at the end of the step (data.py).

Sources: Liu et al. 2023 (ring attention) §3; Jacobs et al. 2023 (DeepSpeed Ulysses) §3; Llama Team
2024 §3.3.2 (all-gather, zigzag); Fang and Zhao 2024 (ring × Ulysses).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpar.errors import PlanError, nearest_divisors, nearest_multiples
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import remat
from jaxpar.strategies.context.gather import Gather, gathered_attention
from jaxpar.strategies.context.layout import SequenceLayout
from jaxpar.strategies.context.ring import Ring, ring_attention
from jaxpar.strategies.context.ulysses import Attention, exchanging_heads
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant

AXIS = "context"
HEADS_AXIS = "ulysses"
AXES = (AXIS, HEADS_AXIS)
"""Over which the sequence is spread, in this order whatever the mesh's is."""

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
    if plan.context == "ring" and layout.num_ranks > 1:
        ring = Ring(
            axis=AXIS,
            layout=layout,
            reduce_dtype=reduce_dtype,
            keeps_first_visitor=fetches_less(plan),
        )
        inner = partial(ring_attention, ring)
    else:
        gather = Gather(  # of a single rank's keys: nothing is gathered
            layout=layout,
            reduce_dtype=reduce_dtype,
            keeps_gathered=fetches_less(plan),
        )
        inner = partial(gathered_attention, gather)
    return exchanging_heads(layout.slice_axis, inner)


def fetches_less(plan: Plan) -> bool:
    """Whether attention runs again, with its communication, shortly before its backward.

    What it brought a second time is then still there, and the backward need not fetch it a third:
    so with some choices of `remat`, and in a pipeline, whose stages begin a backward that way.
    """
    return remat.repeats_attention(plan) or plan.size("pipe") > 1


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


def token_order(plan: Plan) -> npt.NDArray[np.int32] | None:
    """What a row's tokens are permuted by before they are spread; None for no change."""
    order = sequence_layout(plan).order(plan.seq_len)
    return None if (order[:-1] < order[1:]).all() else order


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    where = sequence_layout(plan)
    runs, n = runs_of(plan, config), where.num_ranks
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
        layers: dict[Phase, int] = {
            "forward": runs.forward_layers,
            "backward": runs.backward_layers,
            "recompute": runs.remat_layers,
        }
        each = [(phase, layers[phase]) for phase in phases]
        if runs.repeated_layers and "forward" in phases:
            each.append(("recompute", runs.repeated_layers))
        for phase, num_layers in each if count else ():
            rows.append(
                Expected(
                    kind=kind,
                    axes=(axis,),
                    count=num_layers * count,
                    payload_bytes=elements * dtype[0],
                    dtype=dtype[1],
                    phase=phase,
                    why=why,
                )
            )

    is_again = runs.remat_layers and remat.repeats_attention(plan)
    again: tuple[Phase, ...] = ("recompute",) if is_again else ()
    if where.num_slices > 1:
        for heads, why in ((q_heads, "queries, output"), (sent_kv_heads, "keys, values")):
            elements = local_tokens * heads * config.head_dim
            each: tuple[Phase, ...] = ("forward", *again, "backward")
            add("all-to-all", where.slice_axis, 2, each, elements, compute, f"heads of {why}")
    if n == 1:
        return rows

    # What one rank attends with: all slices of its part, a slice of the heads.
    block = local_tokens * sent_kv_heads * config.head_dim
    forward: tuple[Phase, ...] = ("forward", *again)
    if plan.context == "ring":
        kind, hops, fewer = "collective-permute", 2 * (n - 1), 2 if fetches_less(plan) else 0
        add(kind, AXIS, hops, forward, block, compute, "keys, values go round")
        add(kind, AXIS, hops - fewer, ("backward",), block, compute, "keys, values go round")
        add(kind, AXIS, hops, ("backward",), block, reduce, "their gradients go round")
    else:
        phases = forward if fetches_less(plan) else ("forward", "backward")
        add("all-gather", AXIS, 2, phases, n * block, compute, "keys, values")
        add("reduce-scatter", AXIS, 2, ("backward",), n * block, reduce, "their gradients")
    return rows


# --- rules -----------------------------------------------------------------------------------


def _local_heads(config: ModelConfig, plan: Plan) -> tuple[int, int]:
    """Query and key/value heads on a device before any exchange (tensor.py splits them)."""
    t = plan.size("tensor")
    return config.num_heads // t, max(config.num_kv_heads // t, 1)


def check(config: ModelConfig, plan: Plan) -> None:
    axes = {axis: plan.size(axis) for axis in AXES}
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
            f"{config.name}: num_heads={config.num_heads}{per} cannot be exchanged over "
            f"{axis}={n}: it is not a multiple. Nearest sizes of axis {axis}: {sizes}."
        )
    if kv_heads % n and n % kv_heads:
        raise PlanError(
            f"{config.name}: num_kv_heads={config.num_kv_heads}{per} and {axis}={n}: neither is a "
            f"multiple of the other, so heads can be neither split nor repeated evenly. Nearest "
            f"sizes of axis {axis}: {sizes}."
        )


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    return {"attention": attention(plan), "positions": sequence_layout(plan).positions}


STRATEGY = Strategy(
    card=CARD,
    axes=AXES,
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
    ),
)
