"""Which experts a token goes to, who is dropped, how balance is measured, what experts compute.

Dims: B batch, S sequence, D embed, E experts, K experts per token, F expert hidden, L layers.
Everything here is one device's code on the tokens it holds; how tokens reach experts elsewhere is
a strategy's business (`Parallel.experts`). `every_expert`, each token through each expert and a
weighted sum, is the reference that strategies are compared with.

A token whose mask is 0 goes nowhere: it takes no place, is in no statistic, and its experts' output
is 0. Routing is computed in float32 whatever the compute dtype.

Sources: Shazeer et al. 2017; capacity, Lepikhin et al. 2020 (GShard) §2.2 and Fedus et al. 2021
(Switch) §2.2; router z-loss, Zoph et al. 2022 (ST-MoE) §2.2, eq. 5; sigmoid router, bias and the
sequence's balance loss, DeepSeek-AI 2024 (V3) §2.1.2, eq. 13-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DropPolicy = Literal["position", "weight"]


class Routing(NamedTuple):
    """Where each token of this device goes.

    probability_BSE: float32 [B, S, E], each token's scores scaled to sum to 1 (s' of V3's eq. 19).
    expert_BSK: int32 [B, S, K], the K experts it chose, all different.
    weight_BSK: float32 [B, S, K], what their outputs are multiplied with.
    is_kept_BSK: bool [B, S, K], False for masked tokens and for what is dropped.
    """

    probability_BSE: Array
    expert_BSK: Array
    weight_BSK: Array
    is_kept_BSK: Array

    @property
    def num_experts(self) -> int:
        return self.probability_BSE.shape[-1]


class ExpertWeights(NamedTuple):
    """One layer's experts: gate and up [E, D, F], down [E, F, D]; gate is None for GELU."""

    gate: Array | None
    up: Array
    down: Array


# --- routing ---------------------------------------------------------------------------------


def route(
    logits_BSE: Array,
    bias_E: Array | None,
    mask_BS: Array,
    *,
    kind: Literal["softmax", "sigmoid"],
    num_chosen: int,
    is_normalized: bool,
    scale: float,
) -> Routing:
    """The `num_chosen` experts with the largest scores, before any is dropped.

    `bias_E` is added to choose, not to weigh. With `is_normalized`, a token's weights sum to
    `scale`; a single weight is left as it is, since as a constant 1 it would teach nothing.
    """
    if kind == "softmax":
        score_BSE = probability_BSE = jax.nn.softmax(logits_BSE)
    else:
        score_BSE = jax.nn.sigmoid(logits_BSE)
        probability_BSE = score_BSE / score_BSE.sum(axis=-1, keepdims=True)
    wanted_BSE = jax.lax.stop_gradient(score_BSE)
    if bias_E is not None:
        wanted_BSE = wanted_BSE + jax.lax.stop_gradient(bias_E)
    _, expert_BSK = jax.lax.top_k(wanted_BSE, num_chosen)
    weight_BSK = jnp.take_along_axis(score_BSE, expert_BSK, axis=-1)
    if is_normalized and num_chosen > 1:
        weight_BSK = weight_BSK / weight_BSK.sum(axis=-1, keepdims=True)
    is_valid_BSK = jnp.broadcast_to((mask_BS != 0)[..., None], expert_BSK.shape)
    return Routing(probability_BSE, expert_BSK, weight_BSK * scale, is_valid_BSK)


def spread(routing: Routing, value_BSK: Array) -> Array:
    """A number per choice as a number per expert: [B, S, K] -> [B, S, E], 0 where not kept."""
    is_expert_BSKE = routing.expert_BSK[..., None] == jnp.arange(routing.num_experts)
    is_kept_BSKE = is_expert_BSKE & routing.is_kept_BSK[..., None]
    return jnp.where(is_kept_BSKE, value_BSK[..., None], 0).sum(axis=-2, dtype=value_BSK.dtype)


def chosen(routing: Routing) -> Array:
    """1 where a token goes to an expert, int32 [B, S, E]."""
    return spread(routing, jnp.ones_like(routing.expert_BSK))


def slots(routing: Routing) -> Array:
    """How many earlier tokens of the sequence go to the same expert, int32 [B, S, K]."""
    chosen_BSE = chosen(routing)
    before_BSE = jnp.cumsum(chosen_BSE, axis=1) - chosen_BSE
    return jnp.take_along_axis(before_BSE, routing.expert_BSK, axis=-1)


# --- capacity --------------------------------------------------------------------------------


def capacity(seq_len: int, num_experts: int, num_chosen: int, factor: float) -> int:
    """Tokens of one sequence that one expert takes: `factor` times the even share, rounded up."""
    return min(seq_len, math.ceil(round(factor * num_chosen * seq_len / num_experts, 6)))


def drop_over_capacity(routing: Routing, *, factor: float, policy: DropPolicy) -> Routing:
    """Keep at most `capacity` tokens per expert *and sequence*; the others skip that expert.

    Which ones are dropped is then decided within a sequence, so it does not depend on how
    sequences are spread over devices and micro-batches. 'position' keeps the first, so that no
    token depends on later ones; 'weight' keeps those with the largest weight, and of equals the
    first.
    """
    _, S, K = routing.expert_BSK.shape
    limit = capacity(S, routing.num_experts, K, factor)
    if policy == "position":
        rank_BSK = slots(routing)
    else:
        # To 8 bits: tokens that differ by rounding errors, as in a run of spaces, have to be equal,
        # or a mesh decides between them.
        weight_BSK = jax.lax.reduce_precision(jax.lax.stop_gradient(routing.weight_BSK), 8, 7)
        weight_BSE = spread(routing, weight_BSK)
        order_BSE = jnp.argsort(-weight_BSE, axis=1, stable=True)
        rank_BSE = jnp.argsort(order_BSE, axis=1)
        rank_BSK = jnp.take_along_axis(rank_BSE, routing.expert_BSK, axis=-1)
    return routing._replace(is_kept_BSK=routing.is_kept_BSK & (rank_BSK < limit))


# --- balance ---------------------------------------------------------------------------------


def tokens_per_expert(routing: Routing) -> Array:
    """Tokens that go to each expert, float32 [E]: exact up to 2^24 of them."""
    return chosen(routing).sum(axis=(0, 1)).astype(jnp.float32)


def balance_by_sequence(routing: Routing, sum_counts: Callable[[Array], Array]) -> Array:
    """Σ_i f_i P_i of each sequence times its tokens, summed over sequences: float32 scalar.

    f_i = E/(K·T) x tokens of the sequence that chose expert i, P_i = their mean probability, T its
    valid tokens (DeepSeek-V3, eq. 17-20). A sum over sequences is the same however they are spread;
    where a sequence is itself spread, `sum_counts` adds up the counts, which have no gradient.
    """
    K, E = routing.expert_BSK.shape[-1], routing.num_experts
    count_BE = sum_counts(chosen(routing).sum(axis=1).astype(jnp.float32))
    num_tokens_B = jnp.maximum(count_BE.sum(axis=-1) / K, 1.0)
    total_BE = _sum_probability(routing)
    return ((count_BE * total_BE).sum(axis=-1) / num_tokens_B).sum() * (E / K)


def balance_by_batch(routing: Routing, sum_counts: Callable[[Array], Array]) -> Array:
    """The same of all tokens of the step as if they were one sequence (Fedus et al. 2021, §2.2).

    `sum_counts` adds up over all devices. The product of global counts and *this device's*
    probabilities is its summand: a product of local means would be another, wrong, loss.
    """
    K, E = routing.expert_BSK.shape[-1], routing.num_experts
    count_E = sum_counts(tokens_per_expert(routing))
    num_tokens = jnp.maximum(count_E.sum() / K, 1.0)
    total_E = _sum_probability(routing).sum(axis=0)
    return (count_E * total_E).sum() / num_tokens * (E / K)


def _sum_probability(routing: Routing) -> Array:
    """Probability of each expert, summed over valid tokens, before any is dropped: [B, E]."""
    is_valid_BS1 = routing.is_kept_BSK[..., :1]
    return jnp.where(is_valid_BS1, routing.probability_BSE, 0.0).sum(axis=1)


def router_z(logits_BSE: Array, mask_BS: Array) -> Array:
    """Σ over valid tokens of (log Σ_e exp logit)², which keeps logits small; float32 scalar."""
    z_BS = jax.nn.logsumexp(logits_BSE, axis=-1)
    return jnp.where(mask_BS != 0, z_BS * z_BS, 0.0).sum()


def balanced_bias(bias_LE: Array, tokens_LE: Array, rate: float) -> Array:
    """One step of loss-free balancing: overloaded experts' bias falls by `rate`, others' rises.

    `tokens_LE` are the tokens of the whole step. Source: DeepSeek-V3 §2.1.2; Wang et al. 2024.
    """
    mean_L1 = tokens_LE.mean(axis=-1, keepdims=True)
    return bias_LE + rate * jnp.sign(mean_L1 - tokens_LE)


# --- experts ---------------------------------------------------------------------------------


def expert_mlp(x: Array, weights: ExpertWeights, matmul: Callable[[Array, Array], Array]) -> Array:
    """Each expert's MLP on its own tokens; `matmul` tells which rows of x are whose."""
    up = matmul(x, weights.up)
    if weights.gate is None:
        return matmul(jax.nn.gelu(up), weights.down)
    return matmul(jax.nn.silu(matmul(x, weights.gate)) * up, weights.down)


def batched_matmul(x_EXD: Array, w_EDF: Array) -> Array:
    """[E, .., D] x [E, D, F] -> [E, .., F]."""
    return jnp.einsum("e...d,edf->e...f", x_EXD, w_EDF)


def every_expert(x_BSD: Array, routing: Routing, weights: ExpertWeights) -> Array:
    """The reference: every token through every expert, then a sum with weight 0 for most of them.

    [B, S, D] -> [B, S, D]; E/K times the work that is needed.
    """
    x_EBSD = jnp.broadcast_to(x_BSD, (routing.num_experts, *x_BSD.shape))
    y_EBSD = expert_mlp(x_EBSD, weights, batched_matmul)
    weight_BSE = spread(routing, routing.weight_BSK)
    return jnp.einsum(
        "ebsd,bse->bsd",
        y_EBSD,
        weight_BSE.astype(y_EBSD.dtype),
        preferred_element_type=jnp.float32,
    ).astype(x_BSD.dtype)


def combine(y_BSKD: Array, routing: Routing) -> Array:
    """Weighted sum of each token's K outputs: [B, S, K, D] -> [B, S, D]; dropped ones count 0."""
    y_BSKD = jnp.where(routing.is_kept_BSK[..., None], y_BSKD, 0)
    weight_BSK = routing.weight_BSK.astype(y_BSKD.dtype)
    return jnp.einsum(
        "bskd,bsk->bsd", y_BSKD, weight_BSK, preferred_element_type=jnp.float32
    ).astype(y_BSKD.dtype)
