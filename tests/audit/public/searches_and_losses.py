"""What plain jit communicates for searches, losses and matmuls that people ask about.

Each sentence says what has to move, and what XLA does where that is more; see
`arrays.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.audit.programs import (
    all_gather,
    all_reduce,
    all_to_all,
    at,
    f32,
    i32,
    per_device,
    program,
    reduce_scatter,
)

# --- sorting, searching, scanning (jax-ml/jax#35650, #19271, #21403) --------------------------


@program(f32(64), out=P("x"), moves=[all_gather(256)], sends=224, needs=56)
def argsort_of_a_sharded_dim(x):
    """One dim is all there is: gathered and sorted by everybody. A sort would have to move 7/8
    of the 32 B of a shard and the same of indices."""
    return jnp.argsort(x)


@program(
    f32(8, 64, at=P(None, "x")),
    out=P(None, "x"),
    moves=[all_to_all(256)] * 2,
    sends=448,
    needs=448,
)
def sort_of_a_sharded_dim_beside_another(x):
    """Another dim can take the sharding meanwhile: two exchanges of 256 B, not 2,048 B gathered."""
    return jnp.sort(x, axis=1)


@program(f32(8, 64), out=P("x"))
def argsort_of_a_local_dim(x):
    """Rows are whole, and so are their sorts."""
    return jnp.argsort(x, axis=1)


@program(
    f32(8, 512, at=P(None, "x")),
    out=P(),
    moves=[all_gather(16384)],
    sends=14336,
    needs=896,
    instead="top_k_of_top_k",
)
def top_k_of_a_sharded_dim(x):
    """Of each shard only its own best 4 can win: 8 rows × 4 values from 8 devices are 1,024 B;
    XLA gathers x."""
    return lax.top_k(x, 4)[0]


@program(
    f32(8, 512, at=P(None, "x")),
    out=P(),
    moves=[all_gather(1024)],
    sends=896,
    needs=896,
    one_device=lambda x: lax.top_k(x, 4)[0],
)
def top_k_of_top_k(x):
    """The best 4 of each shard are gathered: 8 × 8 × 4 values (indices would double it)."""

    def local(shard):
        best = lax.top_k(shard, 4)[0]
        return lax.top_k(lax.all_gather(best, "x", axis=1, tiled=True, to="invarying"), 4)[0]

    return per_device(local, P(None, "x"), P())(x)


@program(
    f32(8, 64), out=P("x"), moves=[all_gather(2048)], sends=1792, instead="top_k_of_rows_by_shard"
)
def top_k_of_rows(x):
    """Rows are whole, so 0 B; but on CPU this is the custom call TopK, which XLA replicates."""
    return lax.top_k(x, 4)


@program(f32(8, 64), out=P("x"), one_device=lambda x: lax.top_k(x, 4))
def top_k_of_rows_by_shard(x):
    """shard_map makes the custom call local."""
    return per_device(lambda rows: tuple(lax.top_k(rows, 4)), P("x"), P("x"))(x)


@program(f32(8, 64, at=P(None, "x")), out=P(), moves=[all_gather(256)] * 2, sends=448, needs=112)
def argmax_of_a_sharded_dim(x):
    """The best value and its index of each shard, 8 × 8 × 4 B each, not the 2,048 B of x."""
    return jnp.argmax(x, axis=1)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_gather(4096)],
    sends=3584,
    needs=448,
    instead="cumsum_of_shards",
)
def cumsum_of_a_sharded_dim(x):
    """Before its own rows a device only needs the sum of each shard before: 64 B of each."""
    return jnp.cumsum(x, axis=0)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_gather(512)],
    sends=448,
    needs=448,
    one_device=lambda x: jnp.cumsum(x, axis=0),
)
def cumsum_of_shards(x):
    """Sums of the shards are gathered, those before are added to the local running sum."""

    def local(rows):
        sums = lax.all_gather(rows.sum(0), "x")
        before = jnp.arange(8)[:, None] < lax.axis_index("x")
        return jnp.cumsum(rows, axis=0) + jnp.where(before, sums, 0).sum(0)

    return per_device(local, P("x"), P("x"))(x)


@program(
    f32(64),
    f32(16),
    out=P("x"),
    moves=[all_gather(64, count=7), all_reduce(64, count=7)],
    sends=1176,
    needs=224,
    instead="search_in_a_whole_table",
)
def search_in_a_sharded_table(table, x):
    """Binary search asks the table log2(64) + 1 = 7 times, and each time gathers 64 B of indices
    and sums 64 B of answers; the whole table is 256 B."""
    return jnp.searchsorted(table, x)


@program(
    f32(64), f32(16), out=P("x"), moves=[all_gather(256)], sends=224, needs=224,
    one_device=jnp.searchsorted,
)  # fmt: skip
def search_in_a_whole_table(table, x):
    """Gathered once by a constraint, before the loop."""
    return jnp.searchsorted(at(table), x)


# --- embeddings and losses (the one_hot against gather question) -------------------------------


@program(
    f32(64, 16),
    i32(4, 6, at=P(), below=64),
    out=P(),
    moves=[all_reduce(1536)],
    sends=2688,
    needs=1344,
)
def embedding_of_a_sharded_vocabulary(table, tokens):
    """Owners look up, others give zeros, all are summed: twice a gather of the result, and less
    than the table (4,096 B) only while there are fewer tokens than rows."""
    return jnp.take(table, tokens, axis=0)


@program(
    f32(64, 16),
    i32(4, 6, at=P(), below=64),
    out=P(),
    moves=[all_reduce(1536)],
    sends=2688,
    needs=1344,
)
def embedding_by_one_hot(table, tokens):
    """A matmul over the sharded dim: the same sum, with 64 times the arithmetic of a lookup."""
    return jax.nn.one_hot(tokens, 64, dtype=jnp.float32) @ table


@program(
    f32(64, 16, at=P(None, "x")),
    i32(4, 6, at=P(), below=64),
    out=P(),
    moves=[all_gather(1536)],
    sends=1344,
    needs=1344,
)
def embedding_split_by_feature(table, tokens):
    """Every device looks up its 2 of 16 features: no sum, half the bytes."""
    return jnp.take(table, tokens, axis=0)


@program(
    f32(64, 16),
    i32(8, 6, below=64),
    out=P("x"),
    moves=[all_gather(192), all_reduce(3072)],
    sends=5544,
    needs=336,
    instead="embedding_summed_into_shards",
)
def embedding_with_the_batch_on_the_same_axis(table, tokens):
    """Every device sums rows for all tokens and keeps 1/8: more than gathering the table, 3,584 B.
    A reduce-scatter would halve it."""
    return jnp.take(table, tokens, axis=0)


@program(
    f32(64, 16),
    i32(8, 6, below=64),
    out=P("x"),
    moves=[all_gather(192), reduce_scatter(3072)],
    sends=2856,
    needs=336,
    one_device=embedding_with_the_batch_on_the_same_axis,
)
def embedding_summed_into_shards(table, tokens):
    """The reduce-scatter, by hand."""

    def local(rows, mine):
        index = lax.all_gather(mine, "x", tiled=True) - 8 * lax.axis_index("x")
        owned = ((index >= 0) & (index < 8))[..., None]
        found = jnp.where(owned, jnp.take(rows, index, axis=0, mode="clip"), 0)
        return lax.psum_scatter(found, "x", tiled=True)

    return per_device(local, P("x"), P("x"))(table, tokens)


@program(
    f32(8, 64, at=P(None, "x")),
    i32(8, at=P(), below=64),
    out=P(),
    moves=[all_reduce(32), all_reduce(64)],
    sends=168,
    needs=168,
)
def cross_entropy_over_a_sharded_vocabulary(logits, labels):
    """Maximum, sum and the label's logit of 8 rows, 32 B each (the last two merged); the 2,048 B
    of logits stay."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(64), all_reduce(128)],
    sends=336,
    needs=224,
    instead="batch_norm_by_moments",
)
def batch_norm(x):
    """`var` sums x once more for its own mean: three sums of 64 B where two do."""
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_reduce(128)],
    sends=224,
    needs=224,
    one_device=batch_norm,
)
def batch_norm_by_moments(x):
    """Both sums in one operation; mind the cancellation where the mean is large."""
    mean = x.mean(0)
    return (x - mean) * lax.rsqrt((x * x).mean(0) - mean * mean + 1e-5)


# --- matmuls (the "which collective will I get" questions; openxla/xla#4062) -------------------


@program(
    f32(8, 16, at=P(None, "x")), f32(16, 32), out=P(), moves=[all_reduce(1024)], sends=1792,
    needs=1792,
)  # fmt: skip
def matmul_over_a_sharded_dim(x, w):
    """Partial products of the whole result, summed: 8 × 32 × 4 B."""
    return x @ w


@program(
    f32(8, 16, at=P(None, "x")),
    f32(16, 32),
    out=P("x"),
    moves=[all_reduce(1024)],
    sends=1792,
    needs=896,
    instead="matmul_summed_into_shards",
)
def matmul_over_a_sharded_dim_into_shards(x, w):
    """Everybody gets the sum and keeps 1/8. A reduce-scatter sends half; the CPU backend, and TPUs
    at times, do not make one of it."""
    return x @ w


@program(
    f32(8, 16, at=P(None, "x")),
    f32(16, 32),
    out=P("x"),
    moves=[reduce_scatter(1024)],
    sends=896,
    needs=896,
    one_device=jnp.matmul,
)
def matmul_summed_into_shards(x, w):
    """The reduce-scatter, by hand."""
    local = lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True)  # noqa: E731
    return per_device(local, (P(None, "x"), P("x")), P("x"))(x, w)


@program(f32(64, 16), f32(16, 32), out=P("x"), moves=[all_gather(2048)], sends=1792, needs=1792)
def matmul_by_a_sharded_weight(x, w):
    """Data and weight on one axis is FSDP: the weight (2,048 B) is gathered, not the 4,096 B of
    activations."""
    return x @ w


@program(
    f32(64, 16), f32(16, 16, at=P()), out=P(), moves=[all_gather(4096)], sends=3584, needs=3584
)
def result_wanted_everywhere(x, w):
    """`out_shardings=P()` is an order, not a default: it costs a gather of the result."""
    return jnp.tanh(x @ w)


@program(f32(64, 16), f32(16, 16, at=P()))
def result_left_to_jit(x, w):
    """Without `out_shardings` it stays where it was made."""
    return jnp.tanh(x @ w)


@program(
    f32(64, 16),
    f32(16, 16, at=P()),
    out=P(None, "x"),
    moves=[all_gather(4096)],
    sends=3584,
    needs=448,
    instead="result_exchanged_afterwards",
)
def result_wanted_by_the_other_dim(x, w):
    """The wish travels back to x, which is gathered whole; exchanging the result is 512 B."""
    return jnp.tanh(x @ w)


@program(
    f32(64, 16),
    f32(16, 16, at=P()),
    out=P(None, "x"),
    moves=[all_to_all(512)],
    sends=448,
    needs=448,
    one_device=lambda x, w: jnp.tanh(x @ w),
)
def result_exchanged_afterwards(x, w):
    """A constraint keeps rows until the end: one exchange of a shard of 512 B."""
    return at(jnp.tanh(x @ w), "x", None)


@program(f32(64, 16), out=P("x"), moves=[all_gather(4096)], sends=3584, needs=3584)
def pairwise_distances(x):
    """Every row meets every other."""
    return ((x[:, None] - x[None]) ** 2).sum(-1)


_SEQUENCE = P(None, "x")


@program(
    *[f32(2, 64, 4, at=_SEQUENCE)] * 3,
    out=_SEQUENCE,
    moves=[all_gather(2048), all_gather(2048)],
    sends=3584,
    needs=3584,
)
def attention_over_a_sharded_sequence(q, k, v):
    """Keys and values are gathered whole; a ring sends as much, but holds one block at a time."""
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return jnp.einsum("bqk,bkd->bqd", scores, v)


_COLUMNS, _ROWS = P(None, "tensor"), P("tensor")


@program(
    f32(8, 16, at=P("data")),
    f32(16, 32, at=_COLUMNS),
    f32(32, 16, at=_ROWS),
    mesh="data=2,tensor=4",
    out=P("data"),
    moves=[all_reduce(256, axes=("tensor",), group_size=4)],
    sends=384,
    needs=384,
)
def mlp_columns_then_rows(x, a, b):
    """The hidden layer stays split; one sum of 4 × 16 × 4 B."""
    return jnp.tanh(x @ a) @ b


@program(
    f32(8, 16, at=P("data")),
    f32(16, 32, at=_ROWS),
    f32(32, 16, at=_COLUMNS),
    mesh="data=2,tensor=4",
    out=P("data"),
    moves=[
        all_reduce(512, axes=("tensor",), group_size=4),
        all_gather(256, axes=("tensor",), group_size=4),
    ],
    sends=960,
    needs=960,
)
def mlp_rows_then_columns(x, a, b):
    """Split the other way round, the wide hidden layer is summed and the result gathered: 960 B
    against 384."""
    return jnp.tanh(x @ a) @ b
