"""How rows sorted by expert reach other devices and come back, where each device has its number.

The dropless half of `expert_dispatch.py`. Dims: n devices along the axis, E experts, e = E/n of
them on each; A = T·K assignments of one chunk's T tokens to experts; Q chunks; R = T·min(K, e) rows
at most from one device to another. Shapes are per shard.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_to_all, real_axes, vary

AXIS = "expert"


class Runs(NamedTuple):
    """Where rows lie: int32 [n] each, entry i about the rows this device exchanges with device i.

    Rows for device i start at `starts` of this device's sorted rows, `sizes` of them; those from
    device i started at `their_starts` of its rows, `their_sizes` of them, and arrive at i·R.
    """

    starts: Array
    sizes: Array
    their_starts: Array
    their_sizes: Array


def exchange_counts(count_Qne: Array) -> tuple[list[Runs], Array]:
    """Tell every device how many rows come for each of its experts, and where they lay here.

    The small all-to-all, one for all chunks: int32 [Q, n, e] -> `Runs` of each chunk, and the
    counts of arriving rows [Q, n, e].
    """
    sizes_Qn = count_Qne.sum(axis=2)
    starts_Qn = jnp.cumsum(sizes_Qn, axis=1) - sizes_Qn
    message = jnp.concatenate([count_Qne, starts_Qn[..., None]], axis=2)
    message = all_to_all(message, AXIS, split_dim=1, concat_dim=1, scope="counts")
    arriving_Qne, their_starts_Qn = message[..., :-1], message[..., -1]
    runs = zip(starts_Qn, sizes_Qn, their_starts_Qn, arriving_Qne.sum(axis=2), strict=True)
    return [Runs(*each) for each in runs], arriving_Qne


# --- padded ----------------------------------------------------------------------------------
# Every run is filled up to R rows, so that an ordinary all-to-all can carry it.


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


# --- ragged ----------------------------------------------------------------------------------
# The backend sends the runs as they are. Each way's transpose is the other way, with
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
