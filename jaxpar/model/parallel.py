"""What a model asks of the mesh, by name.

A model is written once, on whatever shard of the weights and tokens a device holds. Where the
split matters, it calls one of these functions. Strategies replace them; the defaults are one
device's answers, and they are also the reference every strategy is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.model.attention import causal_attention
from jaxpar.model.routing import ExpertWeights, Routing, every_expert

Stats = dict[str, Array]
"""What layers count besides their output: sums over this device's tokens, so that they add up over
micro-batches and devices. "objective" is part of the loss; dense layers count nothing."""

COLUMN, ROW = "column", "row"
"""Names of what `Parallel.column` and `row` return, for policies of what the backward keeps."""


def _same(x: Any) -> Any:
    return x


def lookup(table_VD: Array, tokens_BS: Array, dtype: jnp.dtype) -> Array:
    """Rows of the embedding table: [V, D], int [B, S] -> [B, S, D].

    The cast comes after the lookup, so that frequent tokens add up their gradients in the table's
    own dtype.
    """
    return jnp.take(table_VD, tokens_BS, axis=0).astype(dtype)


def cross_entropy(logits_BSV: Array, labels_BS: Array) -> Array:
    """Negative log-likelihood of each label: float32 [B, S, V], int [B, S] -> float32 [B, S]."""
    log_probs_BSV = jax.nn.log_softmax(logits_BSV)
    return -jnp.take_along_axis(log_probs_BSV, labels_BS[..., None], axis=-1)[..., 0]


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The places where a model meets its mesh. All shapes are per shard.

    enter: residual stream [B, S', D] -> the input [B, S, D] of column-parallel matmuls.
    leave: this device's part of a row-parallel product [B, S, D] -> residual stream [B, S', D].
    gather_matmul: `column` in one piece, where a strategy overlaps entering with the matmuls.
    matmul_scatter: `row` in one piece, where a strategy overlaps the matmul with leaving.
    kv_weight: key or value projection [D, K, H] -> the heads that this device's queries use.
    attention: q [B, S, N, H], k and v [B, S, K, H], and None or the documents of all of a row's
        tokens, on other devices too, [B, all S] -> [B, S, N, H].
    own_tokens: of all tokens [B, S] -> those of this device's residual stream [B, S'].
    layer_numbers: number of layers of the stack that run here -> their places in it, int32 [L].
    positions: number of local tokens S -> their positions in the whole sequence, int32 [S].
    drop: where tokens go -> the same without those that find no place.
    experts: tokens [B, S, D], where they go, and experts' weights -> their outputs [B, S, D].
    sum_counts: tokens per expert on this device -> of all tokens that are balanced as one.
    count_once: statistics that several devices took of the same tokens -> such that add up.
    embed: table [V', D], tokens [B, S] and a dtype -> residual stream [B, S', D].
    cross_entropy: logits [B, S, V'] and labels [B, S] -> loss per token [B, S].
    gather: a module's state -> the same state with the weights its matmuls need.
    checkpoint: wraps the body that is scanned over layers; decides what the backward recomputes.
    scan: runs that body over the stacked layers, as `lax.scan` does.
    of_chunk: which of a pipeline stage's chunks of layers -> these functions for it; None where
        they are the same for all.

    S' is S unless the sequence is split between layers, V' is V unless the vocabulary is split.
    """

    enter: Callable[[Array], Array] = _same
    leave: Callable[[Array], Array] = _same
    gather_matmul: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]] | None = None
    matmul_scatter: Callable[[Array, Array], Array] | None = None
    kv_weight: Callable[[Array], Array] = _same
    attention: Callable[[Array, Array, Array, Array | None], Array] = causal_attention
    own_tokens: Callable[[Array], Array] = _same
    layer_numbers: Callable[[int], Array] = jnp.arange
    positions: Callable[[int], Array] = jnp.arange
    drop: Callable[[Routing], Routing] = _same
    experts: Callable[[Array, Routing, ExpertWeights], Array] = every_expert
    sum_counts: Callable[[Array], Array] = _same
    count_once: Callable[[Stats], Stats] = _same
    embed: Callable[[Array, Array, jnp.dtype], Array] = lookup
    cross_entropy: Callable[[Array, Array], Array] = cross_entropy
    gather: Callable[[nnx.State], nnx.State] = _same
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]] = _same
    scan: Callable[[Callable[..., Any], Array, Any], tuple[Array, Any]] = lax.scan
    of_chunk: Callable[[Array], Parallel] | None = None

    def column(self, x_BSD: Array, *weights: Array) -> tuple[Array, ...]:
        """Column-parallel matmuls of one input: [B, S', D], [D, *X] each -> [B, S, *X] each."""
        weights = tuple(w.astype(x_BSD.dtype) for w in weights)
        if self.gather_matmul:
            products = self.gather_matmul(x_BSD, weights)
        else:
            h_BSD = self.enter(x_BSD)
            products = tuple(jnp.tensordot(h_BSD, w, 1) for w in weights)
        return tuple(checkpoint_name(y, COLUMN) for y in products)

    def row(self, h: Array, w: Array) -> Array:
        """A row-parallel matmul: [B, S, *X], [*X, D] -> residual stream [B, S', D]."""
        w = w.astype(h.dtype)
        if self.matmul_scatter:
            y_BSD = self.matmul_scatter(h, w)
        else:
            y_BSD = self.leave(jnp.tensordot(h, w, w.ndim - 1))
        return checkpoint_name(y_BSD, ROW)
