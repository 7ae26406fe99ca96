"""Collective matmul: the gathers and scatters of sequence parallelism hidden behind their matmuls.

What is split    what tensor and sequence parallelism split already; here it is the *time* that is:
                 a matmul runs in n pieces, and while one piece is computed the next one travels.
Why              gather-then-matmul costs the sum of both times, in pieces it costs the larger one.
What it costs    the same bytes, as n-1 hops to the next device instead of one collective; and n
                 matmuls of 1/n of the rows, which have to be large enough to keep a device busy.

V = B·S·D·bytes of one micro-batch on one device, L layers, m micro-batches, n = `tensor`:

| collective         | phase     | count     | payload_bytes | in place of                         |
|--------------------|-----------|-----------|---------------|-------------------------------------|
| collective-permute | forward   | 2mL(n-1)  | V/n           | the gather that enters each half    |
| collective-permute | forward   | 2mL(n-1)  | V/n           | the scatter that leaves it          |
| collective-permute | backward  | 4mL(n-1)  | V/n           | their transposes                    |
| collective-permute | recompute | see remat | V/n           | whatever of them is done again      |

On the wire that is the (n-1)/n of V that a gather or a scatter sends. The embedding, the output and
MoE layers' experts keep their plain collectives (sequence.py).

`unidirectional` sends everything to the next device: n-1 hops one after the other. `bidirectional`
sends to both neighbours at once, n/2 hops after one another, where links carry both ways.

The backward is written by hand, for three reasons: the transpose of a hop must be tied to a matmul
as well, the gathered input is kept as one buffer instead of n pieces, and the gradient of the
weights is one matmul instead of n and their sum.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition",
ASPLOS, §5.1 (decomposition) and §5.4 (both directions).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import ring_shift, vary
from jaxpar.compat import varying_axes
from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import remat
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant
from jaxpar.strategies.tensor import AXIS

CARD = Card(
    name="overlap",
    axis=AXIS,
    splits="the matmuls around each gather and scatter of the sequence, in n pieces of rows",
    why="a piece travels while another one is computed: the longer of both times, not their sum",
    costs="the same bytes, as n-1 permutes of 1/n in place of each gather or scatter",
    source="Wang et al. 2023, §5",
)

Hops = dict[int, int]
"""How many hops pieces take in each direction: +1 to the next device, -1 to the one before."""

# --- communication ---------------------------------------------------------------------------


def hops(num_devices: int, direction: str) -> Hops:
    """Directions and hops by which every piece meets every one of `num_devices` devices."""
    both = direction == "bidirectional" and num_devices > 2
    there, back = (num_devices // 2, (num_devices - 1) // 2) if both else (num_devices - 1, 0)
    return {+1: there, -1: back} if back else {+1: there}


def ring_gather(x: Array, weights: tuple[Array, ...], route: Hops) -> tuple[Array, ...]:
    """x of all devices and its products: [B, S/n, D], [D, X] each -> [B, S, D], [B, S, X] each.

    After r hops in direction `by` a device holds the piece of the device r places against it.
    Each hop is tied to the matmuls of the piece it sends on; XLA would otherwise run all hops
    first, and hide none.
    """
    rank, n, size = lax.axis_index(AXIS), lax.axis_size(AXIS), x.shape[1]
    whole = [_empty(x, n * size, d) for d in (x.shape[2], *(w.shape[1] for w in weights))]
    held = dict.fromkeys(route, x)
    for r in range(max(route.values()) + 1):
        arrived = {by: held[by] for by, num in route.items() if r <= num} if r else {0: x}
        sent = {
            by: ring_shift(held[by], AXIS, by=by, scope="gather_matmul")
            for by, num in route.items()
            if r < num
        }
        products = {
            by: tuple(jnp.matmul(piece, w) for w in weights) for by, piece in arrived.items()
        }
        held, products = lax.optimization_barrier((sent, products))
        for by, piece in arrived.items():
            start = (rank - by * r) % n * size
            for i, rows in enumerate((piece, *products[by])):
                whole[i] = _write(whole[i], rows, start)
    return tuple(whole)


def matmul_ring_scatter(
    inputs: tuple[Array, ...], weights: tuple[Array, ...], route: Hops
) -> Array:
    """Sum of products over devices, cut: [B, S, X] each, [X, D] each -> [B, S/n, D].

    A sum that ends on this device began `num` places before it, in the direction it travels, and
    got a summand on every device on its way; the last hop meets this device's own rows.
    """
    rank, n = lax.axis_index(AXIS), lax.axis_size(AXIS)
    size = inputs[0].shape[1] // n

    def summand(distance: int) -> Array:
        """This device's part of the rows that belong `distance` places further."""
        start = (rank + distance) % n * size
        rows = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in inputs)
        products = [jnp.matmul(x, w) for x, w in zip(rows, weights, strict=True)]
        return sum(products[1:], products[0])

    rounds = max(route.values())
    sums: dict[int, Array] = {}
    for left in range(rounds, -1, -1):  # hops that the sums still have before them
        sent = {by: ring_shift(sums[by], AXIS, by=by, scope="matmul_scatter") for by in sums}
        going = {by: summand(by * left) for by, num in route.items() if left <= num and left}
        products = going or {0: summand(0)}
        arrived, products = lax.optimization_barrier((sent, products))
        if left:
            sums = {by: p + arrived[by] if by in arrived else p for by, p in products.items()}
    return sum(arrived.values(), products[0])


def _write(whole: Array, rows: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, rows, start, axis=1)


def _empty(like: Array, num_rows: int, width: int) -> Array:
    zeros = jnp.zeros((like.shape[0], num_rows, width), like.dtype)
    return vary(zeros, tuple(varying_axes(like)))


# --- computation on shards -------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_matmul(x: Array, weights: tuple[Array, ...], route: Hops) -> tuple[Array, ...]:
    return ring_gather(x, tuple(map(_by_columns, weights)), route)[1:]


def _gather_matmul_forward(x: Array, weights: tuple[Array, ...], route: Hops) -> tuple[Any, Any]:
    whole, *products = ring_gather(x, tuple(map(_by_columns, weights)), route)
    return tuple(products), (whole, weights)


def _gather_matmul_backward(route: Hops, saved: Any, gradients: tuple[Array, ...]) -> Any:
    whole, weights = saved
    dx = matmul_ring_scatter(gradients, tuple(_by_columns(w).T for w in weights), route)
    dw = (_weight_gradient(whole, dy) for dy in gradients)
    return dx, tuple(d.reshape(w.shape) for d, w in zip(dw, weights, strict=True))


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul_scatter(h: Array, w: Array, route: Hops) -> Array:
    return matmul_ring_scatter((h,), (_by_rows(w),), route)


def _matmul_scatter_forward(h: Array, w: Array, route: Hops) -> tuple[Array, Any]:
    return _matmul_scatter(h, w, route), (h, w)


def _matmul_scatter_backward(route: Hops, saved: Any, dy: Array) -> Any:
    h, w = saved
    whole_dy, dh = ring_gather(dy, (_by_rows(w).T,), route)
    return dh, _weight_gradient(h, whole_dy).reshape(w.shape)


_matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def _by_columns(w: Array) -> Array:
    return w.reshape(w.shape[0], -1)


def _by_rows(w: Array) -> Array:
    return w.reshape(-1, w.shape[-1])


def _weight_gradient(x: Array, dy: Array) -> Array:
    """[B, S, X], [B, S, Y] -> [X, Y]."""
    return jnp.einsum("bsx,bsy->xy", x, dy)


# What the model calls.


def gather_matmul(x_BSD: Array, weights: tuple[Array, ...], direction: str) -> tuple[Array, ...]:
    """`Parallel.column` with its gather in pieces: [B, S/n, D], [D, *X] each -> [B, S, *X] each."""
    x_BSD, *weights_ = _same_axes(x_BSD, *weights)
    products = _gather_matmul(x_BSD, tuple(weights_), hops(lax.axis_size(AXIS), direction))
    return tuple(
        y.reshape(*y.shape[:2], *w.shape[1:]) for y, w in zip(products, weights, strict=True)
    )


def matmul_scatter(h: Array, w: Array, direction: str) -> Array:
    """`Parallel.row` with its scatter in pieces: [B, S, *X], [*X, D] -> [B, S/n, D]."""
    h, w = _same_axes(h.reshape(*h.shape[:2], -1), w)
    return _matmul_scatter(h, w, hops(lax.axis_size(AXIS), direction))


def _same_axes(*arrays: Array) -> list[Array]:
    """All of them varying over the axes of any: a rule by hand has to say how gradients vary."""
    axes = frozenset.union(*map(varying_axes, arrays))
    return [vary(x, sorted(axes)) for x in arrays]


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    n, runs = plan.size(AXIS), runs_of(plan, config)
    L = runs.num_layers
    num_tokens = plan.local_batch_size * plan.local_seq_len
    # Attention of each layer, and each MLP: experts enter and leave as one, and plainly.
    halves = L + (config.num_dense_layers if config.num_experts else L)

    def row(phase: Phase, layers: int, count: int, why: str) -> Expected:
        """`layers` executions of a layer, and `count` rounds of hops in all of L layers."""
        return Expected(
            kind="collective-permute",
            axes=(AXIS,),
            count=layers * count // L * (n - 1),
            payload_bytes=num_tokens // n * config.embed * plan.compute_bytes,
            dtype=DTYPES[plan.compute_dtype],
            phase=phase,
            why=why,
        )

    forward, backward, repeated = runs.forward_layers, runs.backward_layers, runs.repeated_layers
    why = "enter and leave attention and MLP of each layer, in pieces"
    rows = [
        row("forward", forward, 2 * halves, why),
        row("backward", backward, 2 * halves, "their transposes"),
    ]
    if repeated:
        rows.append(row("recompute", repeated, 2 * halves, "again, to compute a stage again"))
    attentions, experts = runs.remat_layers, runs_of(plan, config, only_experts=True).remat_layers
    again = (2 * attentions - experts) * remat.repeats_enter(plan)
    again += attentions * remat.repeats_leave(plan)
    if again:
        rows.append(row("recompute", again, L, "whatever of them is done again"))
    return rows


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    if not plan.sequence:
        raise PlanError(
            f"overlap={plan.overlap!r} takes the gathers and scatters of sequence parallelism "
            f"apart, and sequence=False has none. Set sequence=True (on a mesh with a tensor "
            f"axis), or overlap='none'."
        )


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    return {
        "gather_matmul": partial(gather_matmul, direction=plan.overlap),
        "matmul_scatter": partial(matmul_scatter, direction=plan.overlap),
    }


def _variant(direction: str, short: str) -> Variant:
    return Variant(
        name=f"tensor+sequence+overlap-{short}",
        mesh="data=2,tensor=4",
        fields={"sequence": True, "overlap": direction},
    )


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.overlap != "none",
    is_partial=lambda parameter: True,
    check=check,
    hooks=hooks,
    refines="sequence",
    expected=expected,
    variants=(_variant("unidirectional", "ring"), _variant("bidirectional", "both-ways")),
)
