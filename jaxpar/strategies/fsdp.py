"""Fully sharded data parallelism (ZeRO-3): no device keeps the whole model.

What is split    the batch, and with it every matrix, its gradient and its optimizer state, over
                 `fsdp` (along which dim: shards.py).
Why              16 bytes per parameter (float32 weight, gradient, two moments) become 16/n.
What it costs    each matrix is gathered where it is used and its gradient reduce-scattered there:
                 (2c+g)(n-1)/n bytes on the wire per parameter and micro-batch, c and g being the
                 bytes of the gather and the reduce dtype. Data parallelism sends 2g(n-1)/n per
                 step: as much with bf16 weights and float32 gradients, 2/3 of it in one dtype.

W = bytes of the matrices of k layers in the gather dtype, G = in the reduce dtype; per matrix:

| collective     | phase     | count | payload_bytes | why                                        |
|----------------|-----------|-------|---------------|--------------------------------------------|
| all-gather     | forward   | mL/k  | W             | before the k layers                        |
| all-gather     | recompute | mL/k  | W             | again before their backward, if resharded  |
| reduce-scatter | backward  | mL/k  | G             | their gradient, straight to the owners     |

with embedding and output instead gathered once per micro-batch (m) and kept until their backward.
`reshard_after_forward=False` keeps every layer's weights and leaves out the second line; `prefetch`
changes when a weight is gathered, and not how often (prefetch.py).

In a pipeline a device runs chunks of l layers, forward in F slots, and forward and backward in G
slots (pipeline/__init__.py): gathers are Fl/k forward and 2·Gl/k recompute, scatters Gl/k, which is
several times as much as without a pipeline. Or, with `reshard_after_forward=False`, a stage gathers
all of its layers' weights once per step, for all slots, and scatters their gradients once: then one
operation on all layers in each of the first and the last line, as with zero=1. Tables, which only
two stages use, are gathered and scattered once per step in either case.

Source: Rajbhandari et al. 2020 (ZeRO) §5.3, §7.2.2; Zhao et al. 2023 (PyTorch FSDP) §3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array, lax

from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import shards, zero1
from jaxpar.strategies.pipeline.choice import holds_weights, layers_per_chunk, num_staged
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.prefetch import MIN_GROUPS, Loop
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.shards import AXIS, Weight, is_param, path_of, row, use, used
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="fsdp",
    axis=AXIS,
    splits="the batch, and every matrix with its gradient and optimizer state",
    why="weights and optimizer state of n devices hold one model instead of n copies",
    costs="gather each matrix forward and again backward, reduce-scatter its gradient",
    source="Rajbhandari et al. 2020, §5.3",
)

# --- communication ---------------------------------------------------------------------------


def gather(state: nnx.State, weights: dict[str, Weight]) -> nnx.State:
    """A module's state, whole. Layers' weights are so already: `scan` has gathered them."""
    params = jax.tree.leaves(state, is_leaf=is_param)
    if all(weights[path_of(param)].is_stacked for param in params):
        return state
    return used(state, weights)


def scan(
    body: Callable[..., Any], x_BSD: Array, stacked: nnx.State, plan: Plan, all_: dict[str, Weight]
) -> tuple[Array, Any]:
    """`lax.scan(body, x, stacked)` over layers of which each device holds a part."""
    k = plan.num_layers_per_gather
    params = jax.tree.leaves(stacked, is_leaf=is_param)
    leaves, structure = jax.tree.flatten(stacked)
    weights = [all_[path_of(param)] for param in params]
    if any(weight.is_held for weight in weights):  # a pipeline's dense layers before its stages
        return lax.scan(body, x_BSD, stacked)
    if k > 1:
        leaves = [leaf.reshape(-1, k, *leaf.shape[1:]) for leaf in leaves]
        weights = [weight.stacked() for weight in weights]

    def group(x_BSD: Array, whole: list[Array]) -> tuple[Array, Any]:
        state = jax.tree.unflatten(structure, whole)
        return body(x_BSD, state) if k == 1 else lax.scan(body, x_BSD, state)

    if plan.reshard_after_forward or plan.prefetch:
        keep = not plan.reshard_after_forward
        in_slots = plan.size("pipe") > 1
        loop = Loop(
            body=group, weights=weights, keep=keep, prefetch=plan.prefetch, in_slots=in_slots
        )
        x_BSD, counted = loop(x_BSD, leaves)
    else:

        def turn(x_BSD: Array, shards: list[Array]) -> tuple[Array, Any]:
            return group(x_BSD, [use(s, w) for s, w in zip(shards, weights, strict=True)])

        x_BSD, counted = lax.scan(turn, x_BSD, leaves)
    if k > 1:
        counted = jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), counted)
    return x_BSD, counted


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    runs, rows = runs_of(plan, config), shards.held(plan, layout)
    for placed in shards.passing(plan, layout):
        is_stacked = placed.parameter.num_stacked is not None
        k = shards.layers_at_once(plan) if is_stacked else 1
        num_groups = shards.layers_per_run(placed, plan) // k
        again = runs.repeats + (runs.backwards if is_stacked and plan.reshard_after_forward else 0)
        rows.append(
            row("all-gather", "forward", placed, plan, count=runs.forwards * num_groups, of=k,
                why="use")
        )  # fmt: skip
        if again:
            why = "use again, backward,"
            rows.append(
                row("all-gather", "recompute", placed, plan, count=again * num_groups, of=k,
                    why=why)
            )  # fmt: skip
        if placed.is_trained:
            why = "gradient of"
            rows.append(
                row("reduce-scatter", "backward", placed, plan, count=runs.backwards * num_groups,
                    of=k, why=why)
            )  # fmt: skip
    return rows


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    shards.check(config, plan)
    k = plan.num_layers_per_gather
    if plan.size("pipe") > 1 and holds_weights(plan) and (plan.prefetch or k > 1):
        raise PlanError(
            f"prefetch={plan.prefetch} and num_layers_per_gather={k} say how a stage gathers its "
            f"layers in a slot, and with pipe={plan.size('pipe')} and reshard_after_forward=False "
            f"it gathers all of them once per step. Leave out one or the other."
        )
    in_a_row = {num_staged(config), config.num_dense_layers} - {0}
    if plan.size("pipe") > 1:
        num_chunks = plan.size("pipe") * plan.num_virtual_stages
        in_a_row = {layers_per_chunk(num_staged(config), num_chunks)}
    for num_layers in sorted(in_a_row):
        if num_layers % k:
            raise PlanError(
                f"{config.name}: num_layers_per_gather={k} does not divide its {num_layers} "
                f"layers in a row. Nearest num_layers_per_gather: "
                f"{nearest_divisors(num_layers, k)}."
            )
        if plan.prefetch and num_layers // k < MIN_GROUPS:
            raise PlanError(
                f"{config.name}: prefetch=True gathers ahead in a loop over at least {MIN_GROUPS} "
                f"groups of layers, and {num_layers} layers with num_layers_per_gather={k} make "
                f"{num_layers // k}. Nearest num_layers: {MIN_GROUPS * k}; or set prefetch=False."
            )
        if plan.size("pipe") > 1 and not holds_weights(plan) and num_layers == k:
            raise PlanError(
                f"{config.name}: reshard_after_forward=True with pipe={plan.size('pipe')} gathers "
                f"group after group of a chunk's layers in each slot, and {num_layers} layers with "
                f"num_layers_per_gather={k} are one group, whose gathers forward and backward "
                f"compilers make one of. Set reshard_after_forward=False or zero=1, which gather "
                f"once per step."
            )


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    weights = shards.weights(plan, layout)
    if plan.size("pipe") > 1 and holds_weights(plan):
        return {}
    return {
        "gather": lambda state: gather(state, weights),
        "scan": lambda body, x_BSD, stacked: scan(body, x_BSD, stacked, plan, weights),
    }


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.size(AXIS) > 1 and plan.zero == 3,
    is_partial=lambda parameter: True,
    check=check,
    splits=shards.splits,
    hooks=hooks,
    start=zero1.start,
    finish=zero1.finish,
    expected=expected,
    variants=(
        Variant(name="fsdp", mesh="fsdp=8"),
        Variant(name="fsdp-prefetch", mesh="fsdp=8", fields={"prefetch": True}, model="tiny-deep"),
        Variant(name="fsdp+tensor", mesh="fsdp=4,tensor=2"),
        Variant(name="hsdp", mesh="data=2,fsdp=4"),
    ),
)
