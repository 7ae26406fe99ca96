"""The same answers on one device, one request at a time: what every engine has to equal.

It shares the model's modules and the random stream with serving and nothing else: no mesh, no
cache, no batch. For each token the whole sequence goes through the model again, with the attention
of training, and the whole vocabulary's scores are sorted on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params, Transformer, abstract_model
from jaxpar.serve.sampling import Sampling, noise
from jaxpar.serve.scheduler import Request
from jaxpar.text import Batch


class Answer(NamedTuple):
    """tokens: as chosen. margin: by how much, at the least, a chosen token was ahead of the next.

    With temperature 0 in the model's scores, otherwise in scores over temperature with noise. A
    margin near the rounding errors of the scores is a tie that another order of sums may decide.
    """

    tokens: tuple[int, ...]
    margin: float


class Reference:
    """Answers of `config` with whole parameters in float32, for sequences up to `max_seq_len`."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        max_seq_len: int,
        compute_dtype: str = "float32",
    ) -> None:
        self.params, self.max_seq_len = params, max_seq_len
        self._scores = jax.jit(partial(scores, config, jnp.dtype(compute_dtype)))
        self._noise: Callable[..., Array] = jax.jit(noise)

    def scores_after(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """float32 [V]: of what comes next."""
        padded = np.zeros((1, self.max_seq_len), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._scores(self.params, padded, len(tokens) - 1))

    def __call__(self, request: Request) -> Answer:
        tokens, margins = list(request.prompt), []
        answer: list[int] = []
        while len(answer) < request.max_new_tokens:
            score_V = self.scores_after(tokens)
            token, margin = self._choose(score_V, request.sampling, len(tokens))
            answer.append(token)
            tokens.append(token)
            margins.append(margin)
            if token in request.stop_tokens:
                break
        return Answer(tuple(answer), min(margins))

    def _choose(
        self, score_V: np.ndarray[Any, Any], how: Sampling, position: int
    ) -> tuple[int, float]:
        order_V = np.argsort(-score_V, kind="stable")
        if how.temperature > 0:
            scaled_V = score_V / np.float32(how.temperature)
            kept_C = order_V[: how.top_k or None]
            p_C = np.exp(scaled_V[kept_C] - scaled_V[kept_C].max())
            p_C /= p_C.sum()
            kept_C = kept_C[np.cumsum(p_C) - p_C < how.top_p]
            every_V = np.arange(len(score_V), dtype=np.int32)
            given = np.array([how.seed], np.uint32), np.array([position], np.int32), every_V[None]
            drawn_V = np.full_like(score_V, -np.inf)
            drawn_V[kept_C] = (scaled_V + np.asarray(self._noise(*given))[0])[kept_C]
            score_V, order_V = drawn_V, np.argsort(-drawn_V, kind="stable")
        best, second = order_V[:2]
        return int(best), float(score_V[best] - score_V[second])


def scores(
    config: ModelConfig, dtype: jnp.dtype, params: Params, tokens_BS: Array, index: Array
) -> Array:
    """The model's scores of what comes behind place `index` of one row: float32 [V]."""
    graphdef, _ = abstract_model(config)
    model: Transformer = nnx.merge(graphdef, params)
    parallel = Parallel()
    batch = Batch(tokens_BS, None, jnp.ones(tokens_BS.shape, jnp.float32))
    embedding = model.gathered_embedding(parallel)
    x_BSD = model.embed(embedding, tokens_BS, parallel, dtype)
    x_BSD = model.apply_dense_layers(x_BSD, batch, parallel)
    x_BSD, _ = model.apply_layers(x_BSD, batch, parallel)
    x_BD = jax.lax.dynamic_index_in_dim(x_BSD, index, axis=1)
    scorer = embedding if config.tied_embedding else model.unembedding
    return scorer.logits(model.norm(x_BD))[0, 0]
