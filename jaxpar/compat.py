"""The one place that knows how JAX versions differ and what only private modules tell."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, inside `shard_map`."""
    aval = jax.typeof(x)
    if hasattr(aval, "mat"):  # JAX ≥ 0.12
        return frozenset(aval.mat.varying)
    return frozenset(aval.vma)


def backends_are_up() -> bool:
    """Whether JAX has started a backend, after which the number of CPU devices is fixed."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
