"""The collectives as strategies call them: explicit, named, and absent on an axis of size 1.

All of these run inside `shard_map` with `check_vma=True`, on a mesh that has every role axis.
Shapes are per shard. Each call opens a named scope, so HLO metadata tells who asked.

What a collective costs is said here once, for closed forms and audits alike:

| kind               | payload_bytes          | wire_bytes per device, ring of n |
|--------------------|------------------------|----------------------------------|
| all-reduce         | the local buffer       | 2(n-1)/n x payload               |
| all-gather         | its output             | (n-1)/n x payload                |
| reduce-scatter     | its input              | (n-1)/n x payload                |
| all-to-all         | the local buffer       | (n-1)/n x payload                |
| collective-permute | the local buffer       | payload                          |

Source: Chan et al. 2007, "Collective communication: theory, practice, and experience", §4.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array, lax

from jaxpar.compat import varying_axes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The five primitives by their HLO names; audits also read rarer ones, which nothing here uses."""


def wire_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes each device must send in the best ring algorithm, rounded up.

    Kinds beyond the five (broadcasts, ragged all-to-all) are charged like the nearest of them.
    """
    n = group_size
    if n <= 1:
        return 0
    match kind:
        case "all-reduce":
            return -(-2 * (n - 1) * payload_bytes // n)
        case "collective-permute" | "send" | "collective-broadcast":
            return payload_bytes
        case _:
            return -(-(n - 1) * payload_bytes // n)


def real_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` that have more than one device; the others communicate nothing."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return tuple(axis for axis in names if lax.axis_size(axis) > 1)


def vary(x: Array, axes: str | Sequence[str]) -> Array:
    """Declare that `x` is used differently along `axes`. Moves nothing; its transpose is one psum.

    JAX inserts this by itself at *every* use; saying it once before several uses is what keeps
    the backward pass at one all-reduce instead of one per use.
    """
    missing = tuple(axis for axis in real_axes(axes) if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def all_reduce(x: Array, axes: str | Sequence[str], *, scope: str) -> Array:
    """Sum of `x` over `axes`; any shape, the same out. Transposes to a (free) `vary`.

    `x` has to vary over `axes`: JAX would silently multiply an invariant value by their size.
    """
    axes = real_axes(axes)
    if not axes:
        return x
    assert varying_axes(x) >= set(axes), f"{scope}: x varies over {varying_axes(x)}, not {axes}"
    with jax.named_scope(scope):
        return lax.psum(x, axes)


def all_reduce_max(x: Array, axes: str | Sequence[str], *, scope: str) -> Array:
    """Maximum of `x` over `axes`; not differentiable."""
    axes = real_axes(axes)
    if not axes:
        return x
    with jax.named_scope(scope):
        return lax.pmax(lax.stop_gradient(x), axes)


def all_gather(x: Array, axis: str, *, dim: int, again: bool = False, scope: str) -> Array:
    """Concatenate shards along `dim`: [.., n/N, ..] -> [.., n, ..]; transpose: reduce_scatter.

    again: it was gathered before, to be dropped and gathered a second time. Compilers keep the
        first result instead where they find the same gather twice; one more dim makes it another.
    """
    if not real_axes(axis):
        return x
    with jax.named_scope(scope):
        if again:
            whole = lax.all_gather(x[None], axis, axis=dim + 1, tiled=True)
            return whole.reshape(whole.shape[1:])
        return lax.all_gather(x, axis, axis=dim, tiled=True)


def all_gather_same(x: Array, axis: str, *, dim: int, scope: str) -> Array:
    """`all_gather` of what is then known to be the same on all devices of `axis`; for results."""
    if not real_axes(axis):
        return x
    with jax.named_scope(scope):
        return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")


def reduce_scatter(x: Array, axis: str, *, dim: int, scope: str) -> Array:
    """Sum over `axis` and keep this device's part of `dim`: [.., n, ..] -> [.., n/N, ..]."""
    if not real_axes(axis):
        return x
    with jax.named_scope(scope):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: Array, axis: str, *, split_dim: int, concat_dim: int, scope: str) -> Array:
    """Give each device its part of `split_dim`, and lay what arrives along `concat_dim`.

    [.., n, .., m/N, ..] -> [.., n/N, .., m, ..]; the transpose is the same with dims exchanged.
    """
    if not real_axes(axis):
        return x
    with jax.named_scope(scope):
        return lax.all_to_all(x, axis, split_axis=split_dim, concat_axis=concat_dim, tiled=True)


def ring_shift(x: Array, axis: str, *, by: int = 1, again: bool = False, scope: str) -> Array:
    """Send `x` to the device `by` places further along `axis`, from the last ones to the first.

    again: as in `all_gather`; the pairs are told in another order here.
    """
    if not real_axes(axis):
        return x
    n = lax.axis_size(axis)
    senders = [(i + again) % n for i in range(n)]
    with jax.named_scope(scope):
        return lax.ppermute(x, axis, [(i, (i + by) % n) for i in senders])


def permute(x: Array, axis: str, pairs: Sequence[tuple[int, int]], *, scope: str) -> Array:
    """Send `x` along `axis` by pairs (from, to); zeros arrive where nobody sends to."""
    if not real_axes(axis):
        return x
    with jax.named_scope(scope):
        return lax.ppermute(x, axis, pairs)
