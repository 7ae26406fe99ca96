"""Sequence parallelism: between the split matmuls, the sequence is split instead of copied.

What is split    what tensor parallelism leaves whole: the residual stream, the norms and the
                 residual additions, along the sequence, over the same axis `tensor`.
Why              activations between matmuls shrink by n, and the same work is not done n times.
What it costs    an all-gather before each split pair of matmuls and a reduce-scatter behind it,
                 together the bytes on the wire of the all-reduce they replace; and one all-reduce
                 of the norms' gradients per step, since each device saw a part of the sequence.

V = B·S·D·bytes of one micro-batch on one device, L layers, m micro-batches:

| collective     | phase     | count   | payload_bytes | why                                    |
|----------------|-----------|---------|---------------|----------------------------------------|
| all-gather     | forward   | m(2L+1) | V             | enter attention, MLP and the output    |
| reduce-scatter | forward   | m(2L+1) | V             | leave attention, MLP and the embedding |
| all-gather     | backward  | m(2L+1) | V             | the transpose of leaving               |
| reduce-scatter | backward  | m(2L+1) | V             | the transpose of entering              |
| all-gather     | recompute | 2mL     | V             | enter again, remat='full' or 'dots'    |
| reduce-scatter | recompute | mL      | V             | leave attention again, remat='full'    |

Source: Korthikanti et al. 2022, "Reducing activation recomputation", §4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_gather, reduce_scatter
from jaxpar.errors import PlanError, nearest_multiples
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import remat
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant
from jaxpar.strategies.tensor import AXIS, partial_lookup

CARD = Card(
    name="sequence",
    axis=AXIS,
    splits="the residual stream along the sequence, wherever tensor parallelism leaves it whole",
    why="activations between matmuls shrink by the size of the axis",
    costs="all-gather + reduce-scatter in place of each all-reduce: the same bytes on the wire",
    source="Korthikanti et al. 2022, §4.2.2",
)

# --- communication ---------------------------------------------------------------------------


def enter(x_BSD: Array) -> Array:
    """[B, S/n, D] -> [B, S, D]: gather the sequence; the backward reduce-scatters."""
    return all_gather(x_BSD, AXIS, dim=1, scope="enter")


def leave(y_BSD: Array) -> Array:
    """[B, S, D] -> [B, S/n, D]: sum and keep one's own part; the backward all-gathers."""
    return reduce_scatter(y_BSD, AXIS, dim=1, scope="leave")


def embed(table_VD: Array, tokens_BS: Array, dtype: jnp.dtype) -> Array:
    """Vocabulary-parallel lookup: [V/n, D], int [B, S] -> [B, S/n, D]."""
    return leave(partial_lookup(table_VD, tokens_BS, dtype))


def own_tokens(tokens_BS: Array) -> Array:
    """Of anything about a row's tokens, [B, S], that of the part which `leave` left: [B, S/n]."""
    size = tokens_BS.shape[1] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(tokens_BS, lax.axis_index(AXIS) * size, size, axis=1)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    runs = runs_of(plan, config)
    L = runs.num_layers
    payload = plan.local_batch_size * plan.local_seq_len * config.embed * plan.compute_bytes

    def row(kind: str, phase: Phase, count: int, why: str) -> Expected:
        return Expected(
            kind=kind,
            axes=(AXIS,),
            count=count,
            payload_bytes=payload,
            dtype=DTYPES[plan.compute_dtype],
            phase=phase,
            why=why,
        )

    entered, left = 2 * L, L
    if plan.overlap != "none":  # then they are permutes, but for layers with experts (overlap.py)
        entered, left = L - config.num_dense_layers if config.num_experts else 0, 0
    forward, backward, again = (
        layers * entered // L
        for layers in (runs.forward_layers, runs.backward_layers, runs.repeated_layers)
    )
    looked_up = 0 if plan.is_frozen("embedding/table") else runs.ends
    rows = [
        row("all-gather", "forward", forward + runs.ends, "enter each half of a layer, and output"),
        row("reduce-scatter", "forward", forward + runs.embeddings, "leave them, and embedding"),
        row("all-gather", "backward", backward + looked_up, "transpose of leaving"),
        row("reduce-scatter", "backward", backward + runs.ends, "transpose of entering"),
    ]
    if again:
        rows.append(row("all-gather", "recompute", again, "enter again, to compute a stage again"))
    if again_left := again + runs.repeated_embeddings:
        rows.append(row("reduce-scatter", "recompute", again_left, "leave again, likewise"))
    of_experts = runs_of(plan, config, only_experts=True).remat_layers
    entered_again = 2 * runs.remat_layers if plan.overlap == "none" else of_experts
    if entered_again and remat.repeats_enter(plan):
        rows.append(row("all-gather", "recompute", entered_again, "enter attention and MLP again"))
    if left and runs.remat_layers and remat.repeats_leave(plan):
        rows.append(row("reduce-scatter", "recompute", runs.remat_layers, "leave attention again"))
    return rows


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    n = plan.size(AXIS)
    if n == 1:
        raise PlanError(
            "sequence=True splits the residual stream over axis tensor, and this mesh has "
            f"tensor=1 ({plan.mesh}). Give the mesh a tensor axis, or set sequence=False."
        )
    if plan.seq_len % n:
        raise PlanError(
            f"seq_len={plan.seq_len} cannot be split over tensor={n} with sequence=True: it is "
            f"not a multiple. Nearest seq_len up to max_seq_len={config.max_seq_len}: "
            f"{nearest_multiples(plan.seq_len, n, config.max_seq_len) or 'none'}; "
            f"or set sequence=False."
        )


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    return {"enter": enter, "leave": leave, "embed": embed, "own_tokens": own_tokens}


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.sequence,
    # Every parameter: norms see a part of the sequence, split matmuls a part of their dims.
    is_partial=lambda parameter: True,
    check=check,
    hooks=hooks,
    refines="tensor",
    expected=expected,
    variants=(
        Variant(name="tensor+sequence", mesh="tensor=8", fields={"sequence": True}),
        Variant(name="data+tensor+sequence", mesh="data=2,tensor=4", fields={"sequence": True}),
    ),
)
