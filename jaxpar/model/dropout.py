"""Dropout whose noise belongs to the data: the same on every mesh, and whenever it is computed.

Noise drawn from a key that devices, micro-batches or calls advance depends on all of these. Here it
is a function of which token in the training's data, which layer, which of its two places and which
element of the embedding, through a counter-based generator. So devices that hold a copy of a token
drop the same elements of it without telling each other, those that hold different ones drop
different ones, and a backward that computes a layer again, or a run that is resumed, sees the noise
that was there before.

Sources: Srivastava et al. 2014; where it is, Vaswani et al. 2017 §5.4; the generator, Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry-2x32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from jaxpar.collectives import vary
from jaxpar.compat import varying_axes

AFTER_ATTENTION, AFTER_MLP = 0, 1
"""The places of a layer: what attention, and what the MLP or the experts, add to the stream."""

DropoutFunction = Callable[[Array, int], Array]
"""An addition to the residual stream [B, S', D], and its place -> the same with dropout."""


def no_dropout(y_BSD: Array, place: int) -> Array:
    return y_BSD


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout of one layer: each element is 0 with probability `rate`, or divided by 1 - `rate`.

    numbers_BS: of each token of this device's part of the residual stream, uint32 [B, S'].
    layer: the layer's number in the model, int32 scalar.
    """

    rate: float
    numbers_BS: Array
    layer: Array

    def __call__(self, y_BSD: Array, place: int) -> Array:
        with jax.named_scope("dropout"):
            bits_BSD = noise(self.numbers_BS, self.layer, place, y_BSD.shape[-1])
            is_kept_BSD = bits_BSD >= jnp.uint32(round(self.rate * 2**32))
            return jnp.where(is_kept_BSD, y_BSD / (1 - self.rate), 0.0)


def noise(numbers_BS: Array, layer: Array, place: int, embed: int) -> Array:
    """32 random bits for each element: uint32 [B, S'] -> uint32 [B, S', D].

    A key (layer, place) and a counter (token, i) make two words, which elements i and i + D/2 get.
    """
    half = -(-embed // 2)
    shape = *numbers_BS.shape, half
    counter = jnp.stack(
        [
            jnp.broadcast_to(numbers_BS[..., None], shape),
            jnp.broadcast_to(jnp.arange(half, dtype=jnp.uint32), shape),
        ]
    )
    axes = tuple(varying_axes(counter) | varying_axes(layer))
    key = layer.astype(jnp.uint32), jnp.uint32(place)
    words = threefry_2x32(tuple(vary(word, axes) for word in key), vary(counter, axes))
    return jnp.concatenate([words[0], words[1]], axis=-1)[..., :embed]
