"""What plain jit communicates for array programs that people ask about, against what it must.

Every program names the kind of public question that it stands for. All moves were derived by hand
and then read in the HLO; where XLA moves more than it has to, the sentence says what it should be,
and `instead` is a program that does so.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.audit.programs import (
    all_gather,
    all_reduce,
    all_to_all,
    c64,
    f32,
    i32,
    per_device,
    permute,
    program,
)

# --- FFT (jax-ml/jax#13081, #15680, #20683; openxla/xla#24) ----------------------------------

_FFT_OF_ROWS = {
    r"c64\[1,16\]\S* fft\(": ([], 0),  # partitioned along the rows, since XLA of 2026
    r"c64\[8,16\]\S* fft\(": ([all_gather(1024)], 896),
}


@program(c64(8, 16), out=P("x"), either=_FFT_OF_ROWS, instead="fft_of_rows_by_shard")
def fft_of_rows(x):
    """Each row is whole on one device: 0 B. Older XLA gathers all 1,024 B, whatever the dim."""
    return jnp.fft.fft(x, axis=1)


@program(c64(8, 16), out=P("x"), either=_FFT_OF_ROWS, instead="fft_of_rows_by_shard")
def fft_vmapped(x):
    """The same operation as `fft_of_rows`: vmap says nothing to the partitioner."""
    return jax.vmap(jnp.fft.fft)(x)


@program(c64(8, 16), out=P("x"), one_device=lambda x: jnp.fft.fft(x, axis=1))
def fft_of_rows_by_shard(x):
    """shard_map hands XLA a local FFT, which no version of it can gather."""
    return per_device(lambda rows: jnp.fft.fft(rows, axis=1), P("x"), P("x"))(x)


@program(
    c64(64, 16),
    out=P("x"),
    moves=[all_gather(8192)],
    sends=7168,
    needs=1792,
    instead="fft_between_all_to_alls",
)
def fft_of_the_sharded_dim(x):
    """XLA gathers all of it; columns to devices and back are two exchanges of 1,024 B."""
    return jnp.fft.fft(x, axis=0)


@program(
    c64(64, 16),
    out=P("x"),
    moves=[all_to_all(1024), all_to_all(1024)],
    sends=1792,
    needs=1792,
    one_device=lambda x: jnp.fft.fft(x, axis=0),
)
def fft_between_all_to_alls(x):
    """Each device sends 7/8 of its 1,024 B shard, twice."""

    def local(rows):
        columns = jnp.fft.fft(lax.all_to_all(rows, "x", 1, 0, tiled=True), axis=0)
        return lax.all_to_all(columns, "x", 0, 1, tiled=True)

    return per_device(local, P("x"), P("x"))(x)


# --- shuffling and random numbers (jax-ml/jax#20381, discussion 18480) ------------------------


@program(i32(at=P(), below=9), f32(8, 32, 4), out=P("x"))
def shuffle_in_each_row(seed, x):
    """Batched sort and batched take stay on the device; older versions gathered here."""
    keys = jax.random.split(jax.random.key(seed), 8)
    return jax.vmap(jax.random.permutation)(keys, x)


@program(
    i32(at=P(), below=9),
    f32(64, 4),
    out=P("x"),
    moves=[all_gather(1024)],
    sends=896,
    needs=112,
)
def shuffle_rows(seed, x):
    """7 of 8 rows move on average, 112 of the 128 B of a shard; jit gathers all 1,024 B, since
    where each row goes is data. Shuffle indices on the host, or within shards."""
    return jax.random.permutation(jax.random.key(seed), x)


@program(i32(at=P(), below=9), f32(64, 16), out=P("x"))
def dropout(seed, x):
    """A random bit depends on the key and on its own index alone: every device draws its own."""
    return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, x.shape), x, 0 * x)


@program(
    i32(at=P(), below=9),
    f32(64, 16),
    out=P("x"),
    moves=[permute(512), *[permute(256)] * 3, *[all_gather(2048)] * 2],
    sends=4864,
)
def dropout_with_the_older_generator(seed, x):
    """Before `jax_threefry_partitionable`, one block of the generator made the numbers of two
    halves of the array, so bits were gathered: 4,864 B for what needs none."""
    with jax.threefry_partitionable(False):
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, x.shape), x, 0 * x)


# --- indexing and updates (jax-ml/jax#23052, #28542; openxla/xla#44796) -----------------------


@program(
    f32(64, 4),
    f32(3, 4, at=P()),
    out=P("x"),
    moves=[all_gather(1024)],
    sends=896,
    instead="set_rows_by_mask",
)
def set_static_rows(x, u):
    """Only the device that holds rows 0 to 2 has to write them: 0 B. XLA gathers x."""
    return x.at[0:3].set(u)


@program(
    f32(64, 4),
    f32(3, 4, at=P()),
    out=P("x"),
    one_device=lambda x, u: x.at[0:3].set(u),
)
def set_rows_by_mask(x, u):
    """A pad of what every device has and a select: nothing refers to another shard."""
    row = jnp.arange(64)[:, None]
    return jnp.where(row < 3, jnp.pad(u, ((0, 61), (0, 0))), x)


@program(f32(64, 4), i32(3, at=P(), below=64), f32(3, 4, at=P()), out=P("x"))
def set_rows_by_index(x, i, u):
    """The indices are data, so each device writes those it owns: 0 B, unlike a static slice."""
    return x.at[i].set(u)


@program(
    f32(64, 8),
    i32(64, below=8),
    f32(64),
    out=P("x"),
    moves=[all_gather(256), all_gather(512)],
    sends=672,
    instead="cache_update_vmapped",
)
def cache_update_by_arange(x, i, u):
    """Each row's write is local, but `arange` hides that from the partitioner, which gathers
    index pairs (64 × 2 × 4 B) and values (256 B)."""
    return x.at[jnp.arange(64), i].set(u)


@program(
    f32(64, 8),
    i32(64, below=8),
    f32(64),
    out=P("x"),
    one_device=lambda x, i, u: x.at[jnp.arange(64), i].set(u),
)
def cache_update_vmapped(x, i, u):
    """vmap makes the row a batch dim of the scatter, and batch dims are partitioned."""
    return jax.vmap(lambda row, j, new: row.at[j].set(new))(x, i, u)


@program(
    f32(64, 8),
    i32(64, below=8),
    out=P("x"),
    moves=[all_gather(512), all_reduce(256)],
    sends=896,
    instead="pick_along_axis",
)
def pick_by_arange(x, i):
    """The same for reading: index pairs are gathered, then everybody's picks are summed."""
    return x[jnp.arange(64), i]


@program(f32(64, 8), i32(64, below=8), out=P("x"))
def pick_along_axis(x, i):
    """`take_along_axis` keeps the row as a batch dim: 0 B."""
    return jnp.take_along_axis(x, i[:, None], axis=1)[:, 0]


@program(
    f32(64, 4),
    i32(at=P(), below=64),
    out=P(),
    moves=[all_gather(1024)],
    sends=896,
    needs=16,
    instead="read_one_row_by_take",
)
def read_one_row(x, i):
    """One row of 16 B is asked for, and jit gathers 1,024 B to slice it."""
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


@program(
    f32(64, 4),
    i32(at=P(), below=64),
    out=P(),
    moves=[all_reduce(16)],
    sends=28,
    needs=16,
    one_device=lambda x, i: x[i],
)
def read_one_row_by_take(x, i):
    """A gather with indices is partitioned: the owner contributes the row, others zeros."""
    return jnp.take(x, i[None], axis=0)[0]


@program(f32(64, 4), out=P(), moves=[all_reduce(16)], sends=28, needs=16)
def read_first_row(x):
    """A static index costs a sum of 16 B, of which one term is not zero."""
    return x[0]


@program(f32(64, 4), i32(64, below=64), out=P("x"), moves=[all_gather(1024)], sends=896, needs=112)
def take_rows(x, i):
    """Like `shuffle_rows`: which device has a row is data, so all rows go to all devices."""
    return x[i]


# --- moving along the sharded dim (jax-ml/jax#15773, #24576) ----------------------------------


@program(f32(64, 4), out=P("x"), moves=[permute(16)], sends=16, needs=16)
def roll_by_one(x):
    """One row of 16 B crosses each boundary; XLA sees the rotation behind slice and concat."""
    return jnp.roll(x, 1, axis=0)


@program(f32(64, 4), out=P("x"), moves=[permute(128)], sends=128, needs=128)
def flip(x):
    """Device d wants the shard of device 7 − d: 128 B, once."""
    return x[::-1]


@program(f32(64, 4), out=P("x"), moves=[permute(128), permute(64)], sends=192, needs=128)
def first_half(x):
    """Shards halve, so the 4 devices that held this half hand rows on; device 1 keeps none."""
    return x[:32]


@program(f32(64, 4), out=P("x"))
def every_second_row(x):
    """8 divides by 2: each device keeps its own."""
    return x[::2]


@program(f32(64, 4), f32(64, 4), out=P("x"), moves=[all_gather(1024)] * 2, sends=1792, needs=256)
def concatenate_sharded_dims(x, y):
    """Two shards become one, so each device sends both of its shards once, 256 B; XLA gathers x
    and y. Stack along a new dim instead: nothing moves."""
    return jnp.concatenate([x, y])


@program(f32(64, 4), f32(64, 4), out=P(None, "x"))
def stack_along_a_new_dim(x, y):
    """The sharded dim stays what it was."""
    return jnp.stack([x, y])


@program(
    f32(64, 4),
    out=P("x"),
    moves=[permute(96), permute(112), permute(80), permute(16)],
    sends=304,
    needs=32,
    instead="stencil_by_roll",
)
def stencil_by_pad(x):
    """The padded array has 66 rows, 9 on a device instead of 8, so all boundaries shift and shift
    back: 304 B for two halos of 16 B."""
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    return padded[:-2] + padded[2:] - 2 * x


@program(
    f32(64, 4),
    out=P("x"),
    moves=[permute(16), permute(16)],
    sends=32,
    needs=32,
    one_device=lambda x: (
        jnp.pad(x, ((1, 0), (0, 0)))[:-1] + jnp.pad(x, ((0, 1), (0, 0)))[1:] - 2 * x
    ),
)
def stencil_by_roll(x):
    """No array of another length: one row each way, the ends masked."""
    row = jnp.arange(64)[:, None]
    above = jnp.where(row == 0, 0, jnp.roll(x, 1, axis=0))
    return above + jnp.where(row == 63, 0, jnp.roll(x, -1, axis=0)) - 2 * x


@program(
    f32(1, 64, 4, at=P(None, "x")),
    f32(3, 4, 4, at=P()),
    out=P(None, "x"),
    moves=[permute(16), permute(16)],
    sends=32,
    needs=32,
)
def convolution(x, k):
    """Halos of one position (16 B) each way: the partitioner knows windows."""
    return lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
