"""What collectives written by hand communicate, of the kind that people ask about.

Each sentence says what has to move, and what XLA does where that is more; see
`arrays.py`.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.audit.programs import (
    all_gather,
    all_reduce,
    f32,
    per_device,
    program,
)

# --- collectives by hand (jax-ml/jax#19709) ----------------------------------------------------


@program(
    f32(64),
    out=P(),
    moves=[all_reduce(32)] * 2,
    sends=112,
    needs=56,
    instead="sum_times_eight",
    one_device=lambda x: 8 * x.reshape(8, 8).sum(0),
)
def sum_of_a_sum(x):
    """The second adds eight equal numbers: 8 times the sum, and nothing in XLA simplifies it."""
    local = lambda x: lax.psum(lax.psum(x, "x"), "x")  # noqa: E731
    return per_device(local, P("x"), P())(x)


@program(
    f32(64),
    out=P(),
    moves=[all_reduce(32)],
    sends=56,
    needs=56,
    one_device=lambda x: 8 * x.reshape(8, 8).sum(0),
)
def sum_times_eight(x):
    """If that was meant."""
    return per_device(lambda x: 8 * lax.psum(x, "x"), P("x"), P())(x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_gather(4096)],
    sends=3584,
    needs=112,
    instead="mean_by_sum",
    one_device=lambda x: x - x.mean(0),
)
def mean_of_a_gather(x):
    """4,096 B gathered to learn a mean of 64 B."""
    local = lambda x: x - lax.all_gather(x, "x", tiled=True).mean(0)  # noqa: E731
    return per_device(local, P("x"), P("x"))(x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(64)],
    sends=112,
    needs=112,
    one_device=lambda x: x - x.mean(0),
)
def mean_by_sum(x):
    """Sums are small."""
    return per_device(lambda x: x - lax.pmean(x.mean(0), "x"), P("x"), P("x"))(x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_gather(4096)] * 2,
    sends=7168,
    needs=119,
    one_device=lambda x: x * x.sum(0) + x.max(),
)
def the_same_gathered_twice(x):
    """As [64, 16] and as [8, 8, 16]: to XLA two different operations."""

    def local(x):
        return x * lax.all_gather(x, "x", tiled=True).sum(0) + lax.all_gather(x, "x").max()

    return per_device(local, P("x"), P("x"))(x)


@program(
    f32(64, 16),
    f32(64, 4, at=P()),
    out=P(),
    moves=[all_gather(4096)],
    sends=3584,
    needs=1792,
    one_device=lambda w, x: x.astype(jnp.bfloat16).T @ w.astype(jnp.bfloat16),
)
def gathered_then_cast(w, x):
    """bfloat16 is all that is used, and float32 travels: twice the bytes, on every backend."""

    def local(w, x):
        whole = lax.all_gather(w, "x", tiled=True, to="invarying")
        return x.astype(jnp.bfloat16).T @ whole.astype(jnp.bfloat16)

    return per_device(local, (P("x"), P()), P())(w, x)


@program(
    f32(64, 16),
    f32(64, 4, at=P()),
    out=P(),
    moves=[all_gather(4096)],
    sends=3584,
    needs=1792,
    one_device=gathered_then_cast,
)
def cast_then_gathered(w, x):
    """The right order; only a CPU, which gathers bfloat16 as float32, sends no less for it."""

    def local(w, x):
        whole = lax.all_gather(w.astype(jnp.bfloat16), "x", tiled=True, to="invarying")
        return x.astype(jnp.bfloat16).T @ whole

    return per_device(local, (P("x"), P()), P())(w, x)


def grouped(collective, groups):
    def local(x):
        return collective(x, "x", axis_index_groups=groups)

    # JAX has no types for groups within an axis; nothing is differentiated here.
    return per_device(local, P("x"), P("x"), check_vma=False)


def summed_in(groups):
    """What a sum within groups of shards gives, in NumPy's terms."""

    def whole(x):
        shards = x.reshape(8, 8, 16)
        group_of = [next(group for group in groups if i in group) for i in range(8)]
        return jnp.stack([sum(shards[i] for i in group) for group in group_of]).reshape(64, 16)

    return whole


_HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
_SCATTERED = [[0, 2, 5, 7], [1, 3, 4, 6]]
_UNEQUAL = [[0, 1, 2, 3, 4, 5], [6, 7]]


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(512, axes=None, group_size=4)],
    sends=768,
    needs=768,
    one_device=summed_in(_HALVES),
)
def sum_in_halves(x):
    """Half an axis is no axis."""
    return grouped(lax.psum, _HALVES)(x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(512, axes=None, group_size=4)],
    sends=768,
    needs=768,
    one_device=summed_in(_SCATTERED),
)
def sum_in_scattered_groups(x):
    """The same bytes; whether these devices are near each other is another question."""
    return grouped(lax.psum, _SCATTERED)(x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(512, axes=None, group_size=6)],
    sends=854,
    needs=512,
    one_device=summed_in(_UNEQUAL),
)
def sum_in_unequal_groups(x):
    """A device in the group of 6 sends 2 · 5/6 of 512 B, one in the pair 512."""
    return grouped(lax.psum, _UNEQUAL)(x)


@program(f32(64), mesh="x=8,one=1", out=P("x"), one_device=lambda x: x)
def sum_over_an_axis_of_one(x):
    """An operation in the HLO, and no byte."""
    return per_device(lambda x: lax.psum(x, "one"), P("x"), P("x"), mesh="x=8,one=1")(x)
