"""Arrays by place: stashes, and whatever is stacked by chunk or by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import vary
from jaxpar.compat import varying_axes
from jaxpar.strategies.pipeline.stash import NOWHERE


def zeros(like: Any, axes: Iterable[str] | None = None) -> Array:
    """Of the shape and dtype of `like`, varying over `axes`, or over its own."""
    axes = tuple(varying_axes(like) if axes is None else axes)
    return vary(jnp.zeros(like.shape, like.dtype), axes)


def zeros_for_sum(parameter: Array) -> Array:
    """To add gradients of a parameter to, in float32 if it is narrower itself."""
    nothing = zeros(parameter)
    return nothing.astype(jnp.float32) if parameter.dtype.itemsize < 4 else nothing


def plus(total: Array, summand: Array) -> Array:
    return total + summand.astype(total.dtype)


def pick(tree: Any, place: Array | int) -> Any:
    """Entry `place` of every leaf; where there is one only, no arithmetic with it."""
    return jax.tree.map(
        lambda leaf: (
            leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, place, keepdims=False)
        ),
        tree,
    )


def add(tree: Any, place: Array, more: Any) -> Any:
    """`tree` with `more` added to entry `place` of every leaf."""

    def added(leaf: Array, summand: Array) -> Array:
        if leaf.shape[0] == 1:
            return plus(leaf, summand[None])
        summed = plus(pick(leaf, place), summand)
        return lax.dynamic_update_index_in_dim(leaf, summed, place, 0)

    return jax.tree.map(added, tree, more)


def where(condition: Array, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)


def read(stash: Array | None, place: Array | None) -> Array | None:
    if stash is None or place is None:
        return None
    return pick(stash, jnp.maximum(place, 0))


def either(waiting: Array | None, place: Array | None, otherwise: Array) -> Array:
    if waiting is None or place is None:
        return otherwise
    return jnp.where(place == NOWHERE, otherwise, waiting)


def write(stash: Array | None, place: Array | None, value: Array, instead: Array) -> Array | None:
    """`stash` with `value` at `place`; where that is NOWHERE, with `instead` where nobody reads."""
    if stash is None or place is None:
        return stash
    is_nowhere = place == NOWHERE
    place = jnp.where(is_nowhere, stash.shape[0] - 1, place)
    value = jnp.where(is_nowhere, instead, value)
    return lax.dynamic_update_index_in_dim(stash, value, place, 0)
