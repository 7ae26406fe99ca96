"""Bringing tokens to experts on other devices and their outputs back, with and without a limit.

What `strategies/expert.py` puts in the model's hands. Dims: B, S, D as in the model; K experts per
token, E experts, e = E/n of them on each of n devices; A = B·S·K assignments of a token to an
expert, C places per sequence and expert. Shapes are per shard.

Two forms with the same two exchanges of token vectors, there (dispatch) and back (combine):

* capacity: a table of E x B x C places, filled where a token is kept, zero elsewhere. Every device
  sends the same amount, and no expert can hold up the others.
* dropless: assignments sorted by expert, so that each device's part is one run of rows, and a
  grouped matmul on what arrives. How much arrives is decided by the router, and XLA's shapes are
  not: buffers hold the most that can come, R = B·S·min(K, e) rows from each device.

Source: Lepikhin et al. 2020 (GShard) §2.2; Gale et al. 2022 (MegaBlocks) §3-5.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_to_all, real_axes, vary
from jaxpar.model.routing import (
    ExpertWeights,
    Routing,
    batched_matmul,
    capacity,
    combine,
    expert_mlp,
    slots,
)

AXIS = "expert"

# --- capacity --------------------------------------------------------------------------------


def with_capacity(x_BSD: Array, routing: Routing, weights: ExpertWeights, factor: float) -> Array:
    """Experts on what `drop_over_capacity` has kept: [B, S, D] -> [B, S, D]."""
    B, S, D = x_BSD.shape
    E, K = routing.num_experts, routing.expert_BSK.shape[-1]
    C = capacity(S, E, K, factor)

    sequence_B = jnp.arange(B)[:, None, None]
    place_BSK = (routing.expert_BSK * B + sequence_B) * C + slots(routing)
    place_A = jnp.where(routing.is_kept_BSK, place_BSK, E * B * C).reshape(-1)

    x_AD = jnp.broadcast_to(x_BSD[:, :, None], (B, S, K, D)).reshape(-1, D)
    table_PD = jnp.zeros_like(x_AD, shape=(E * B * C, D)).at[place_A].set(x_AD, mode="drop")
    x_eXD = dispatch(table_PD.reshape(E, B * C, D))
    y_eXD = expert_mlp(x_eXD, weights, batched_matmul)
    y_PD = collect(y_eXD).reshape(E * B * C, D)
    y_AD = y_PD.at[place_A].get(mode="fill", fill_value=0)
    return combine(y_AD.reshape(B, S, K, D), routing)


def dispatch(table_EXD: Array) -> Array:
    """Each expert's rows to the device that has it: [E, X, D] -> [E/n, n·X, D]."""
    return all_to_all(table_EXD, AXIS, split_dim=0, concat_dim=1, scope="dispatch")


def collect(y_eXD: Array) -> Array:
    """Outputs back to their tokens' devices: [E/n, n·X, D] -> [E, X, D]."""
    return all_to_all(y_eXD, AXIS, split_dim=1, concat_dim=0, scope="combine")


# --- dropless --------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Where rows lie: int32 [n] each, entry i about the rows this device exchanges with device i.

    Rows for device i start at `starts` of this device's sorted rows, `sizes` of them; those from
    device i started at `their_starts` of its rows, `their_sizes` of them, and arrive at i·R.
    """

    starts: Array
    sizes: Array
    their_starts: Array
    their_sizes: Array


def without_limit(
    x_BSD: Array,
    routing: Routing,
    weights: ExpertWeights,
    exchange: Literal["padded", "ragged"],
) -> Array:
    """Experts on every valid token: [B, S, D] -> [B, S, D]."""
    B, S, D = x_BSD.shape
    E, K = routing.num_experts, routing.expert_BSK.shape[-1]
    n = lax.axis_size(AXIS)

    # Masked tokens sort behind all experts, where nothing counts them.
    expert_A = jnp.where(routing.is_kept_BSK, routing.expert_BSK, E).reshape(-1)
    order_A = jnp.argsort(expert_A, stable=True)
    x_AD = x_BSD.reshape(B * S, D)[order_A // K]
    count_E = jnp.zeros_like(expert_A, shape=(E,)).at[expert_A].add(1, mode="drop")

    if n == 1:
        y_AD = grouped(x_AD, count_E, weights)
    else:
        R = B * S * min(K, E // n)
        runs, count_ne = exchange_counts(count_E.reshape(n, E // n))
        there, back = (
            (send_padded, return_padded) if exchange == "padded" else (send_ragged, return_ragged)
        )
        x_RD = there(x_AD, runs, R)
        y_RD = received(x_RD, count_ne, weights)
        y_AD = back(y_RD, runs, B * S * K)

    y_AD = y_AD[jnp.argsort(order_A)]
    return combine(y_AD.reshape(B, S, K, D), routing)


def grouped(x_XD: Array, count_E: Array, weights: ExpertWeights) -> Array:
    """Rows sorted by expert, `count_E` of each -> their outputs; rows beyond belong to nobody."""
    is_owned_X1 = jnp.arange(x_XD.shape[0])[:, None] < count_E.sum()
    x_XD = jnp.where(is_owned_X1, x_XD, 0)

    def matmul(x_XD: Array, w_EDF: Array) -> Array:
        y_XF = lax.ragged_dot(x_XD, w_EDF, count_E)
        return jnp.where(is_owned_X1, y_XF, 0)  # a backend may leave there what it likes

    return expert_mlp(x_XD, weights, matmul)


def received(x_RD: Array, count_ne: Array, weights: ExpertWeights) -> Array:
    """Experts on n runs of rows, each sorted by expert: [n·R, D] -> [n·R, D] in the same places.

    count_ne: rows of each run for each of this device's experts, int32 [n, e].
    """
    n, _ = count_ne.shape
    end_ne = jnp.cumsum(count_ne, axis=1)
    row_R = jnp.arange(x_RD.shape[0] // n)
    expert_nR = (row_R[:, None] >= end_ne[:, None, :]).sum(axis=-1, dtype=jnp.int32)
    order = jnp.argsort(expert_nR.reshape(-1), stable=True)  # padding has none, and comes last
    y_XD = grouped(x_RD[order], count_ne.sum(axis=0), weights)
    return y_XD[jnp.argsort(order)]


def exchange_counts(count_ne: Array) -> tuple[Runs, Array]:
    """Tell every device how many rows come for each of its experts, and where they lay here.

    The small all-to-all: int32 [n, e] -> `Runs`, and the counts of arriving rows [n, e].
    """
    sizes_n = count_ne.sum(axis=1)
    starts_n = jnp.cumsum(sizes_n) - sizes_n
    message = jnp.concatenate([count_ne, starts_n[:, None]], axis=1)
    message = all_to_all(message, AXIS, split_dim=0, concat_dim=0, scope="counts")
    arriving_ne, their_starts_n = message[:, :-1], message[:, -1]
    return Runs(starts_n, sizes_n, their_starts_n, arriving_ne.sum(axis=1)), arriving_ne


# Padded: every run is filled up to R rows, so that an ordinary all-to-all can carry it.


def send_padded(x_AD: Array, runs: Runs, num_rows: int) -> Array:
    """Rows to the devices of their experts: [A, D] -> [n·R, D], run i from device i, then zeros."""
    row_R = jnp.arange(num_rows)
    is_mine_nR = row_R < runs.sizes[:, None]
    index_nR = jnp.where(is_mine_nR, runs.starts[:, None] + row_R, x_AD.shape[0]).reshape(-1)
    x_RD = x_AD.at[index_nR].get(mode="fill", fill_value=0)
    return all_to_all(x_RD, AXIS, split_dim=0, concat_dim=0, scope="dispatch")


def return_padded(y_RD: Array, runs: Runs, num_rows: int) -> Array:
    """The way back: [n·R, D] -> [A, D], each row where `send_padded` took it."""
    y_RD = all_to_all(y_RD, AXIS, split_dim=0, concat_dim=0, scope="combine")
    R = y_RD.shape[0] // runs.sizes.shape[0]
    row_A = jnp.arange(num_rows)
    owner_A = (row_A[:, None] >= jnp.cumsum(runs.sizes)).sum(axis=-1)  # n behind the last run
    start_A = runs.starts.at[owner_A].get(mode="fill", fill_value=0)
    index_A = jnp.where(owner_A < runs.sizes.shape[0], owner_A * R + row_A - start_A, y_RD.shape[0])
    return y_RD.at[index_A].get(mode="fill", fill_value=0)


# Ragged: the backend sends the runs as they are. Each way's transpose is the other way, with
# offsets that both sides know by then; JAX's own rule would ask the other side for them again.


def send_ragged(x_AD: Array, runs: Runs, num_rows: int) -> Array:
    """What `send_padded` does, sending no padding."""
    num_slots = num_rows * runs.sizes.shape[0]
    return _there(x_AD, runs, x_AD.shape[0], num_slots)


def return_ragged(y_RD: Array, runs: Runs, num_rows: int) -> Array:
    """What `return_padded` does, sending no padding."""
    return _back(y_RD, runs, num_rows, y_RD.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _there(x_AD: Array, runs: Runs, num_rows: int, num_slots: int) -> Array:
    n = lax.axis_size(AXIS)
    mine_n = jnp.broadcast_to(lax.axis_index(AXIS) * (num_slots // n), (n,))
    return _ragged(
        x_AD, num_slots, runs.starts, runs.sizes, mine_n, runs.their_sizes, scope="dispatch"
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _back(y_RD: Array, runs: Runs, num_rows: int, num_slots: int) -> Array:
    n = lax.axis_size(AXIS)
    arrived_n = vary(jnp.arange(n, dtype=jnp.int32) * (num_slots // n), AXIS)
    return _ragged(
        y_RD,
        num_rows,
        arrived_n,
        runs.their_sizes,
        runs.their_starts,
        runs.sizes,
        scope="combine",
    )


def _there_forward(x_AD: Array, runs: Runs, num_rows: int, num_slots: int) -> tuple[Array, Runs]:
    return _there(x_AD, runs, num_rows, num_slots), runs


def _there_backward(
    num_rows: int, num_slots: int, runs: Runs, gradient: Array
) -> tuple[Array, None]:
    return _back(gradient, runs, num_rows, num_slots), None


def _back_forward(y_RD: Array, runs: Runs, num_rows: int, num_slots: int) -> tuple[Array, Runs]:
    return _back(y_RD, runs, num_rows, num_slots), runs


def _back_backward(
    num_rows: int, num_slots: int, runs: Runs, gradient: Array
) -> tuple[Array, None]:
    return _there(gradient, runs, num_rows, num_slots), None


_there.defvjp(_there_forward, _there_backward)
_back.defvjp(_back_forward, _back_backward)


def _ragged(
    x: Array,
    num_rows: int,
    starts: Array,
    sizes: Array,
    their_starts: Array,
    their_sizes: Array,
    *,
    scope: str,
) -> Array:
    """Rows [starts_i, +sizes_i) of x to device i, where they begin at its `their_starts_me`."""
    assert real_axes(AXIS)
    nothing = jnp.zeros_like(x, shape=(num_rows, x.shape[1]))
    with jax.named_scope(scope):
        return lax.ragged_all_to_all(
            x, nothing, starts, sizes, their_starts, their_sizes, axis_name=AXIS
        )
