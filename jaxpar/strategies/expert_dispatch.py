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

Both can go in Q chunks of their rows (`in_chunks`): what is said above is then a Q-th, Q times.

Source: Lepikhin et al. 2020 (GShard) §2.2; Gale et al. 2022 (MegaBlocks) §3-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_to_all
from jaxpar.model.routing import (
    ExpertWeights,
    Routing,
    batched_matmul,
    capacity,
    combine,
    expert_mlp,
    slots,
)
from jaxpar.strategies.expert_exchange import (
    AXIS,
    exchange_counts,
    return_padded,
    return_ragged,
    send_padded,
    send_ragged,
)

# --- chunks ----------------------------------------------------------------------------------


def in_chunks(
    chunks: Iterable[Array],
    there: Callable[[int, Array], Array],
    compute: Callable[[int, Array], Array],
    back: Callable[[int, Array], Array],
) -> list[Array]:
    """`back(i, compute(i, there(i, chunk)))` of each chunk i, with exchanges beside `compute`.

    While chunk i is computed, chunk i + 1 comes and the outputs of chunk i - 1 go. Barriers keep
    XLA from running exchanges before all computation: `there` of chunk i + 2 waits for `compute` of
    chunk i, and that of chunk 1 for that of chunk 0. Transposed, they do so for the backward.
    """
    waiting = list(chunks)
    arrived, outputs = [there(0, waiting[0])], list[Array]()
    if len(waiting) > 1:
        arrived[0], waiting[1] = lax.optimization_barrier((arrived[0], waiting[1]))
    for i in range(len(waiting)):
        arrived += [there(i + 1, chunk) for chunk in waiting[i + 1 : i + 2]]
        y = compute(i, arrived[i])
        if len(waiting) > 1:
            y, arrived[i + 1 :], waiting[i + 2 : i + 3], outputs[-1:] = lax.optimization_barrier(
                (y, arrived[i + 1 :], waiting[i + 2 : i + 3], outputs[-1:])
            )
        outputs.append(back(i, y))
    return outputs


# --- capacity --------------------------------------------------------------------------------


def with_capacity(
    x_BSD: Array, routing: Routing, weights: ExpertWeights, factor: float, num_chunks: int = 1
) -> Array:
    """Experts on what `drop_over_capacity` has kept: [B, S, D] -> [B, S, D].

    A chunk is a part of every expert's B·C places: who has one was settled before.
    """
    B, S, D = x_BSD.shape
    E, K = routing.num_experts, routing.expert_BSK.shape[-1]
    C = capacity(S, E, K, factor)
    X = B * C // num_chunks  # rows of an expert in a chunk

    row_BSK = jnp.arange(B)[:, None, None] * C + slots(routing)
    place_BSK = (row_BSK // X * E + routing.expert_BSK) * X + row_BSK % X
    place_A = jnp.where(routing.is_kept_BSK, place_BSK, E * B * C).reshape(-1)

    x_AD = jnp.broadcast_to(x_BSD[:, :, None], (B, S, K, D)).reshape(-1, D)
    table_PD = jnp.zeros_like(x_AD, shape=(E * B * C, D)).at[place_A].set(x_AD, mode="drop")
    y_QEXD = in_chunks(
        table_PD.reshape(num_chunks, E, X, D),
        lambda _, table_EXD: dispatch(table_EXD),
        lambda _, x_eXD: expert_mlp(x_eXD, weights, batched_matmul),
        lambda _, y_eXD: collect(y_eXD),
    )
    y_PD = jnp.concatenate(y_QEXD).reshape(E * B * C, D)
    y_AD = y_PD.at[place_A].get(mode="fill", fill_value=0)
    return combine(y_AD.reshape(B, S, K, D), routing)


def dispatch(table_EXD: Array) -> Array:
    """Each expert's rows to the device that has it: [E, X, D] -> [E/n, n·X, D]."""
    return all_to_all(table_EXD, AXIS, split_dim=0, concat_dim=1, scope="dispatch")


def collect(y_eXD: Array) -> Array:
    """Outputs back to their tokens' devices: [E/n, n·X, D] -> [E, X, D]."""
    return all_to_all(y_eXD, AXIS, split_dim=1, concat_dim=0, scope="combine")


# --- dropless --------------------------------------------------------------------------------


def without_limit(
    x_BSD: Array,
    routing: Routing,
    weights: ExpertWeights,
    exchange: Literal["padded", "ragged"],
    num_chunks: int = 1,
) -> Array:
    """Experts on every valid token: [B, S, D] -> [B, S, D]. A chunk is a part of the tokens."""
    B, S, D = x_BSD.shape
    E, K = routing.num_experts, routing.expert_BSK.shape[-1]
    n, Q = lax.axis_size(AXIS), num_chunks
    T = B * S // Q

    # Masked tokens sort behind all experts, where nothing counts them.
    expert_QA = jnp.where(routing.is_kept_BSK, routing.expert_BSK, E).reshape(Q, T * K)
    order_QA = jnp.argsort(expert_QA, axis=1, stable=True)
    chunks = [
        x_TD[order_A // K] for x_TD, order_A in zip(x_BSD.reshape(Q, T, D), order_QA, strict=True)
    ]
    count_QE = jnp.zeros_like(expert_QA, shape=(Q, E))
    count_QE = count_QE.at[jnp.arange(Q)[:, None], expert_QA].add(1, mode="drop")

    if n == 1:
        outputs = [
            grouped(x_AD, count_E, weights) for x_AD, count_E in zip(chunks, count_QE, strict=True)
        ]
    else:
        R = T * min(K, E // n)
        runs_Q, count_Qne = exchange_counts(count_QE.reshape(Q, n, E // n))
        send, give_back = (
            (send_padded, return_padded) if exchange == "padded" else (send_ragged, return_ragged)
        )
        outputs = in_chunks(
            chunks,
            lambda i, x_AD: send(x_AD, runs_Q[i], R),
            lambda i, x_RD: received(x_RD, count_Qne[i], weights),
            lambda i, y_RD: give_back(y_RD, runs_Q[i], T * K),
        )

    y_QAD = [y_AD[jnp.argsort(order_A)] for y_AD, order_A in zip(outputs, order_QA, strict=True)]
    return combine(jnp.concatenate(y_QAD).reshape(B, S, K, D), routing)


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
