"""Choosing the next token from scores that are split over devices, without gathering them.

Every device picks its best candidates of its part of the vocabulary; only these are gathered, and
all devices choose the same of them. What is drawn is a function of the request's seed, the new
token's position and the vocabulary's entry: not of the batch a request is in, nor of the mesh.

    temperature = 0   the token with the largest score; of equals the first.
    top_k = 0         of the whole vocabulary: the largest of score/temperature + Gumbel noise,
                      which draws from its softmax (so candidates of a device are those with noise).
    top_k = k         the same among the k tokens with the largest scores; with top_p below 1 among
                      the fewest of these that have a part of at least top_p of their probability.

Dims: B rows, V' this device's part of the vocabulary, C candidates.

Sources: Gumbel 1954; Yellott 1977 (the maximum is a sample); Fan et al. 2018 (top-k); Holtzman et
al. 2020 (top-p).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import all_gather_same, vary
from jaxpar.compat import varying_axes
from jaxpar.errors import RequestError, is_whole, require_positive, require_whole, shown
from jaxpar.serve.cache import Rows

AXIS = "tensor"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen; greedily unless told otherwise.

    temperature: what scores are divided by; 0 for the best token always.
    top_k: choose among as many best tokens; 0 for all of them.
    top_p: choose among the fewest of these that have this part of their probability.
    seed: of the request's own random stream, which nothing else enters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 or isinstance(self.temperature, bool):
            require_positive(RequestError, "temperature", self.temperature, 1.0, "; 0 is greedy")
        require_positive(RequestError, "top_p", self.top_p, 0.9, "; 1 leaves nothing out")
        for field in ("top_k", "seed"):
            require_whole(RequestError, field, getattr(self, field), at_least=0)
        if self.top_p > 1:
            raise RequestError(f"top_p={self.top_p} is more than all there is. Nearest top_p: 1.")
        if self.top_p < 1 and not self.top_k:
            raise RequestError(
                f"top_p={self.top_p} with top_k=0 would need the scores of the whole vocabulary in "
                f"order, on every device. Give it candidates to choose among, such as top_k=32."
            )
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise RequestError(
                f"top_k={self.top_k} and top_p={self.top_p} with temperature=0, which takes the "
                f"best token whatever they say. Give a temperature, such as 1.0, or leave both out."
            )

    def check(self, max_top_k: int) -> None:
        """Raise RequestError where a plan has too few candidates."""
        if not is_whole(self.top_k) or self.top_k > max_top_k:
            raise RequestError(
                f"top_k={shown(self.top_k)} is more than the plan's max_top_k={max_top_k}. "
                f"Nearest top_k: {max_top_k}."
            )


def noise(seed_B: Array, position_B: Array, token_BC: Array) -> Array:
    """Gumbel noise of tokens at a position of a request: float32 [B, C]."""

    def one(seed: Array, position: Array, token: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.bits(jax.random.fold_in(key, token), dtype=jnp.uint32)

    bits = jax.vmap(jax.vmap(one, (None, None, 0)))(seed_B, position_B, token_BC)
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) / (1 << 24)  # never 0 or 1
    return -jnp.log(-jnp.log(uniform))


def choose(logits_BV: Array, rows: Rows, max_top_k: int) -> Array:
    """The next token of each row, the same on all devices of `tensor`: int32 [B].

    logits_BV: float32 [B, V'], this device's scores of the last token of each row.
    """
    position_B = rows.start + rows.num_tokens
    score_BC, token_BC = candidates(perturbed(logits_BV, rows, position_B), max_top_k)
    best_B = token_BC[:, 0]
    if max_top_k == 1:  # then the best of what is drawn, or of all, is all there is
        return best_B

    # Of top_k = 0 the noise is in the scores already, and the best one is drawn.
    def draw() -> Array:
        scaled_BC = score_BC / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
        rank_C = jnp.arange(score_BC.shape[1])
        scaled_BC = jnp.where(rank_C < rows.top_k[:, None], scaled_BC, -jnp.inf)
        p_BC = jax.nn.softmax(scaled_BC, axis=-1)
        is_kept_BC = jnp.cumsum(p_BC, axis=-1) - p_BC < rows.top_p[:, None]
        drawn_BC = scaled_BC + noise(rows.seed, position_B, token_BC)
        drawn_BC = jnp.where(is_kept_BC, drawn_BC, -jnp.inf)
        choice_B = jnp.argmax(drawn_BC, axis=-1)
        drawn_B = jnp.take_along_axis(token_BC, choice_B[:, None], axis=1)[:, 0]
        return jnp.where((rows.temperature > 0) & (rows.top_k > 0), drawn_B, best_B)

    is_wanted = jnp.any((rows.temperature > 0) & (rows.top_k > 0))
    axes = tuple(varying_axes(token_BC) | varying_axes(rows.seed))
    return lax.cond(is_wanted, lambda: vary(draw(), axes), lambda: vary(best_B, axes))


def perturbed(logits_BV: Array, rows: Rows, position_B: Array) -> Array:
    """Scores by which candidates are picked: with noise for rows that draw of all tokens.

    Noise takes a hash per entry, so it is left out where no row of this device wants it.
    """
    is_free_B = (rows.temperature > 0) & (rows.top_k == 0)

    def disturb() -> Array:
        token_BV = jnp.broadcast_to(first_token(logits_BV), logits_BV.shape)
        token_BV = token_BV + jnp.arange(logits_BV.shape[1], dtype=jnp.int32)
        temperature_B1 = jnp.where(is_free_B, rows.temperature, 1)[:, None]
        noisy_BV = logits_BV / temperature_B1 + noise(rows.seed, position_B, token_BV)
        return jnp.where(is_free_B[:, None], noisy_BV, logits_BV)

    axes = tuple(varying_axes(logits_BV) | varying_axes(rows.seed))
    return lax.cond(
        jnp.any(is_free_B), lambda: vary(disturb(), axes), lambda: vary(logits_BV, axes)
    )


def candidates(score_BV: Array, max_top_k: int) -> tuple[Array, Array]:
    """The best tokens of the whole vocabulary, best first, of equals the first: [B, C] each.

    C = max_top_k of all devices' own C each: a gather of scores and one of tokens. (Of a device
    whose part of the vocabulary is smaller, all of it.)
    """
    local_BC, index_BC = lax.top_k(score_BV, min(max_top_k, score_BV.shape[1]))
    token_BC = index_BC.astype(jnp.int32) + first_token(score_BV)
    score_BC = all_gather_same(local_BC, AXIS, dim=1, scope="candidates/score")
    token_BC = all_gather_same(token_BC, AXIS, dim=1, scope="candidates/token")
    # Equals stay in the order of devices, and so of the vocabulary.
    score_BC, order_BC = lax.top_k(score_BC, min(max_top_k, score_BC.shape[1]))
    return score_BC, jnp.take_along_axis(token_BC, order_BC, axis=1)


def first_token(score_BV: Array) -> Array:
    """The first entry of the vocabulary in this device's part, int32 scalar."""
    if lax.axis_size(AXIS) == 1:
        return jnp.int32(0)
    return lax.axis_index(AXIS).astype(jnp.int32) * score_BV.shape[1]
