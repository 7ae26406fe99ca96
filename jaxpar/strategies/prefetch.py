"""The loop over layers whose weights are gathered where they are used, with a backward of its own.

Forward, for each group of layers: gather, compute, drop the weights, keep what else the backward
needs. Backward: gather again, compute gradients, scatter the weights' to their owners. With
`prefetch`, the next group's weights are gathered while this one computes: the loop carries them, so
that no matmul of a turn waits for that turn's gather. The bytes are the same.

`jax.checkpoint` with a policy could drop weights too; it could not gather them a group ahead, since
what a loop carries is kept for the backward. So this says what happens, in both directions.

Source: Zhao et al. 2023 (PyTorch FSDP), §3.3.2 (backward prefetch), §3.3.3 (forward prefetch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import vary
from jaxpar.compat import varying_axes
from jaxpar.strategies.shards import Weight

MIN_GROUPS = 3
"""Of fewer no loop over layers remains, and a compiler that sees gathers of both directions side by
side makes one of them."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Groups of layers one after the other, each on weights that are whole only for its turn.

    body: one group, (x, its whole weights) -> (x, what it counted).
    weights: how each weight of a group is gathered, and its gradient scattered.
    keep: keep gathered weights for the backward instead of gathering them again.
    prefetch: gather one group ahead, in both directions; needs `MIN_GROUPS`.
    in_slots: there is a loop around this one, in whose every turn weights are to be gathered anew.
    """

    body: Callable[[Array, list[Array]], tuple[Array, Any]]
    weights: Sequence[Weight]
    keep: bool
    prefetch: bool
    in_slots: bool = False

    def __call__(self, x: Array, shards: list[Array]) -> tuple[Array, Any]:
        """What `lax.scan(body, x, shards)` returns where shards [G, ..] are whole."""

        @jax.custom_vjp
        def run(x: Array, trained: list[Array], frozen: list[Array]) -> tuple[Array, Any]:
            return self._forward(x, self._merged(trained, frozen))[0]

        def forward(x: Array, trained: list[Array], frozen: list[Array]) -> tuple[Any, Any]:
            shards = self._merged(trained, frozen)
            result, *saved = self._forward(x, shards)
            return result, (*saved, shards)

        def backward(kept: Any, gradient: Any) -> tuple[Array, list[Array], None]:
            gradient_x, gradients = self._backward(*kept, *gradient)
            return gradient_x, gradients, None

        run.defvjp(forward, backward)
        return run(x, *self._parted(shards))

    # --- forward -----------------------------------------------------------------------------

    def _forward(self, x: Array, shards: list[Array]) -> tuple[tuple[Array, Any], Any, Any]:
        """The result; what the backward needs of each group; and of the last, where it is apart."""
        num_groups = len(shards[0])
        if self.in_slots:  # or a compiler may gather before all slots, and keep it
            axes = tuple(varying_axes(x))
            shards = [
                shard if weight.dim is None else _behind(vary(shard, axes), x)
                for weight, shard in zip(self.weights, shards, strict=True)
            ]

        def turn(x: Array, i: Array) -> tuple[Array, Any]:
            x, counted, saved = self._group(x, self._gather(_at(shards, i)))
            return x, (counted, saved)

        def turn_ahead(carry: Any, i: Array) -> tuple[Any, Any]:
            x, whole = carry
            following = self._gather(_at(shards, i + 1))
            x, counted, saved = self._group(x, whole)
            return (x, following), (counted, saved)

        with jax.named_scope("forward"):
            if not self.prefetch:
                x, (counted, saved) = lax.scan(turn, x, jnp.arange(num_groups))
                return (x, counted), saved, None
            carry = x, self._gather(_at(shards, 0))
            (x, whole), (counted, saved) = lax.scan(turn_ahead, carry, jnp.arange(num_groups - 1))
            x, of_last, last_saved = self._group(x, whole)
            counted = jax.tree.map(lambda t, last: jnp.append(t, last[None], 0), counted, of_last)
            return (x, counted), saved, last_saved

    def _group(self, x: Array, whole: list[Array]) -> tuple[Array, Any, Any]:
        """One group forward: what it returns, and its backward without the weights."""
        trained, frozen = self._parted(whole)
        (x, counted), pull = jax.vjp(
            lambda x, trained: self.body(x, self._merged(trained, frozen)), x, trained
        )
        leaves, structure = jax.tree.flatten(pull)
        # Which of the arrays that the backward needs are the weights themselves.
        places = [next((i for i, w in enumerate(whole) if leaf is w), None) for leaf in leaves]
        if self.keep:
            places = [None] * len(leaves)

        def rebuild(saved: list[Array], whole: list[Array]) -> Any:
            values = iter(saved)
            filled = [next(values) if i is None else whole[i] for i in places]
            return jax.tree.unflatten(structure, filled)

        saved = [leaf for leaf, i in zip(leaves, places, strict=True) if i is None]
        return x, counted, jax.tree_util.Partial(rebuild, saved)

    # --- backward ----------------------------------------------------------------------------

    def _backward(
        self, saved: Any, last_saved: Any, shards: list[Array], gradient_x: Array, counted: Any
    ) -> tuple[Array, list[Array]]:
        """Gradients of x and of the trained shards, from those of x and of what was counted."""
        gradients = [_nothing(s) for s in self._parted(shards)[0]]
        # Or a compiler may keep what the forward gathered, which is what must not happen.
        shards = [_behind(shard, gradient_x) for shard in shards]

        def again(i: Array | int) -> list[Array]:
            if self.keep:
                return []
            with jax.named_scope("rematted_computation"):
                return self._gather(_at(shards, i), again=len(shards[0]) == 1)

        def turn(carry: Any, i: Array | int, saved: Any, whole: list[Array]) -> Any:
            gradient_x, gradients = carry
            gradient_x, new = saved(whole)((gradient_x, _at(counted, i)))
            new = [w.scatter(g).astype(jnp.float32) for w, g in zip(trained, new, strict=True)]
            update = lax.dynamic_update_index_in_dim
            return gradient_x, [update(g, n, i, 0) for g, n in zip(gradients, new, strict=True)]

        def turn_here(carry: Any, i: Array) -> tuple[Any, None]:
            return turn(carry, i, _at(saved, i), again(i)), None

        def turn_ahead(carry: Any, i: Array) -> tuple[Any, None]:
            carry, whole = carry
            preceding = again(i - 1)
            return (turn(carry, i, _at(saved, i), whole), preceding), None

        trained = [w for w in self.weights if w.is_trained]
        last = len(shards[0]) - 1
        carry: Any = gradient_x, gradients
        if not self.prefetch:
            return lax.scan(turn_here, carry, jnp.arange(last + 1), reverse=True)[0]
        whole = again(last)
        preceding = again(last - 1)
        carry = turn(carry, last, last_saved, whole), preceding
        (carry, whole), _ = lax.scan(turn_ahead, carry, jnp.arange(1, last), reverse=True)
        return turn(carry, 0, _at(saved, 0), whole)

    # --- weights -----------------------------------------------------------------------------

    def _gather(self, shards: list[Array], *, again: bool = False) -> list[Array]:
        """Of one group; `again` where no loop keeps the backward's gathers from the forward's."""
        return [w.gather(s, again=again) for w, s in zip(self.weights, shards, strict=True)]

    def _parted(self, arrays: list[Array]) -> tuple[list[Array], list[Array]]:
        """Of the weights that are trained, and of the frozen ones."""
        pairs = list(zip(self.weights, arrays, strict=True))
        return [a for w, a in pairs if w.is_trained], [a for w, a in pairs if not w.is_trained]

    def _merged(self, trained: list[Array], frozen: list[Array]) -> list[Array]:
        values = iter(trained), iter(frozen)
        return [next(values[0] if w.is_trained else values[1]) for w in self.weights]


def _at(stacked: Any, i: Array | int) -> Any:
    """One group of arrays [G, ..]; a slice of all of them would be a copy."""
    return jax.tree.map(lambda t: lax.dynamic_index_in_dim(t, i, keepdims=False), stacked)


def _behind(shard: Array, other: Array) -> Array:
    """The shard, which nobody can read before `other` is there."""
    tied, _ = lax.optimization_barrier((shard, other))
    # JAX 0.10 lets each result of a barrier vary over the axes of all of them.
    return tied if varying_axes(tied) == varying_axes(shard) else shard


def _nothing(shard: Array) -> Array:
    return vary(jnp.zeros(shard.shape, jnp.float32), tuple(varying_axes(shard)))
