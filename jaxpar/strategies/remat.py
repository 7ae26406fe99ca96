"""Activation checkpointing: what the forward pass keeps for the backward, and what runs twice.

What is split    nothing; this trades arithmetic, and some communication, for memory.
Why              the activations of L layers outgrow the weights as soon as sequences are long.
What it costs    the operations below once more, in phase `recompute`, layer by layer before each
                 layer's backward; collectives among them are sent again.

| Plan.remat  | kept per layer                          | computed again                       |
|-------------|-----------------------------------------|--------------------------------------|
| 'none'      | whatever the backward uses              | nothing                              |
| 'selective' | all but scores and weights of attention | attention between projections        |
| 'dots'      | its input, results of split matmuls     | norms, attention, activation, gather |
| 'full'      | its input                               | everything but the last matmul       |

Collectives in phase recompute, per layer and micro-batch; the strategies' own closed forms have
them, with the rules of this file:

| strategy | 'selective' | 'dots'                | 'full'                          |
|----------|-------------|-----------------------|---------------------------------|
| tensor   | none        | none                  | 1 all-reduce                    |
| sequence | none        | 2 all-gather          | 2 all-gather, 1 reduce-scatter  |
| overlap  | none        | 2(n-1) permutes       | 3(n-1) permutes                 |
| context  | none        | its forward attention | its forward attention           |
| experts  | none        | all they do forward   | all they do forward             |

Weights that are gathered layer by layer are so again, or not, as fsdp.py says, whatever the choice
here. 'selective' repeats no collective: where keys and values travel, the strategy that makes them
travel has a backward of its own that keeps no scores to begin with. 'dots' keeps what
`jax.checkpoint_policies.dots_with_no_batch_dims_saveable` does on one device; it goes by names
(`Parallel.column`, `Parallel.row`), so that a product is kept after its reduction.

Sources: Chen et al. 2016, "Training deep nets with sublinear memory cost"; Korthikanti et al. 2022,
§5 (selective). Bytes per layer: predict/activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.model.attention import causal_attention
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import COLUMN, ROW
from jaxpar.strategies import offload
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="remat",
    axis="none: it holds on every mesh",
    splits="nothing; activations are dropped after the forward pass and computed again",
    why="activations that do not fit, against up to a third more arithmetic",
    costs="the forward pass, or a part of it, once more; and its collectives",
    source="Chen et al. 2016; Korthikanti et al. 2022, §5",
)

INPUT = "layer_input"
"""Name of what every layer begins with, for the policy that offloads it."""

# --- what is sent again ----------------------------------------------------------------------


def repeats_enter(plan: Plan) -> bool:
    """Whether the inputs of column-parallel matmuls are brought together once more."""
    return plan.remat in ("dots", "full")


def repeats_leave(plan: Plan) -> bool:
    """Whether results of row-parallel matmuls are summed once more, where others need them.

    The MLP's only goes into the residual stream, which the next layer keeps as its input.
    """
    return plan.remat == "full"


def repeats_attention(plan: Plan) -> bool:
    """Whether attention runs again with whatever it communicates."""
    return plan.remat in ("dots", "full")


# --- computation on shards -------------------------------------------------------------------


def attention_core(plan: Plan) -> Callable[..., Any]:
    """One device's attention, without its scores among what is kept if the plan says so."""
    if plan.remat == "selective":
        return jax.checkpoint(causal_attention, prevent_cse=False)
    return causal_attention


def checkpoint(plan: Plan) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps the scanned layer; its weights are inputs, so that they are not kept on its account."""
    names = (COLUMN, ROW) if plan.remat == "dots" else ()

    def wrap(layer: Callable[..., Any]) -> Callable[..., Any]:
        # In a scan nothing can be merged with the forward pass, and barriers would be in the way.
        remat = partial(jax.checkpoint, prevent_cse=False)
        if offload.offloads_activations(plan):
            policy = offload.policy((INPUT, *names))
            return remat(lambda x, *rest: layer(checkpoint_name(x, INPUT), *rest), policy=policy)
        return remat(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))

    return wrap


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    """Nothing of its own: see the table above."""
    return []


# --- rules -----------------------------------------------------------------------------------


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    if plan.remat == "selective":
        # Attention over a split sequence keeps no scores as it is.
        is_split = plan.size("context") > 1 or plan.size("ulysses") > 1
        return {} if is_split else {"attention": attention_core(plan)}
    return {"checkpoint": checkpoint(plan)}


STRATEGY = Strategy(
    card=CARD,
    axes=(),
    is_active=lambda plan: plan.remat != "none",
    is_partial=lambda parameter: False,
    hooks=hooks,
    expected=expected,
    variants=(
        Variant(name="remat-selective", mesh="data=2,tensor=4",
                fields={"sequence": True, "remat": "selective"}),
        Variant(name="remat-dots", mesh="data=2,tensor=4",
                fields={"sequence": True, "remat": "dots"}),
        Variant(name="remat-full", mesh="data=2,tensor=4",
                fields={"sequence": True, "remat": "full"}),
    ),
)  # fmt: skip
