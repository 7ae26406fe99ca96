"""What training steps, loops and reshardings communicate, of the kind that people ask about.

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
    per_device,
    permute,
    program,
    reduce_scatter,
)

# --- training steps (openxla/xla#13306, #19166) -----------------------------------------------


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@program(
    f32(16, 16, at=P()),
    f32(64, 16),
    f32(16, 16),
    out=(P(), P("x")),
    moves=[all_reduce(1024), all_gather(1024)],
    sends=2688,
    needs=1792,
    instead="optimizer_state_scattered",
)
def optimizer_state_sharded(w, x, m):
    """ZeRO-1 as plain jit: each device sums the whole gradient to update 1/8 of the state."""
    m = 0.9 * m + jax.grad(loss)(w, x)
    return w - 0.1 * m, m


@program(
    f32(16, 16, at=P()),
    f32(64, 16),
    f32(16, 16),
    out=(P(), P("x")),
    moves=[reduce_scatter(1024), all_gather(1024)],
    sends=1792,
    needs=1792,
    one_device=optimizer_state_sharded,
)
def optimizer_state_scattered(w, x, m):
    """Reduce-scatter and all-gather: what one all-reduce sends."""

    def local(w, x, m):
        gradient = jax.grad(loss)(lax.pcast(w, "x", to="varying"), x)
        m = 0.9 * m + lax.psum_scatter(gradient, "x", tiled=True)
        mine = lax.dynamic_slice_in_dim(w, 2 * lax.axis_index("x"), 2) - 0.1 * m
        return lax.all_gather(mine, "x", tiled=True, to="invarying"), m

    specs = (P(), P("x"))
    return per_device(local, (P(), P("x"), P("x")), specs)(w, x, m)


@program(
    *[f32(16, at=P())] * 10, f32(64, 16), out=P(), moves=[all_reduce(640)], sends=1120, needs=1120
)
def gradients_of_many_parameters(*args):
    """Ten gradients of 64 B travel in one operation."""
    *parameters, x = args

    def total(parameters):
        h = x
        for one in parameters:
            h = jnp.tanh(h * one)
        return jnp.sum(h)

    return jax.grad(total)(parameters)


@program(*[f32(64, 16)] * 10, out=P(), moves=[all_reduce(40)], sends=70, needs=7)
def global_norm(*parameters):
    """One number each of ten, merged; adding before summing over devices would send one."""
    return jnp.sqrt(sum(jnp.sum(w * w) for w in parameters))


@program(
    f32(16, 4, at=P()),
    f32(64, 16),
    out=P(),
    moves=[
        all_reduce(256, count=4, axes=None, group_size=2),
        all_gather(2048, axes=None, group_size=4),
    ],
    sends=2560,
    needs=448,
    instead="accumulation_within_shards",
)
def accumulation_by_reshape(w, x):
    """The first dim of [4, 16, 16] takes half the axis, so half of x is gathered, four devices do
    the same work, and every micro-batch sums its gradient."""

    def add(total, batch):
        return total + jax.grad(loss)(w, batch), None

    return lax.scan(add, jnp.zeros_like(w), x.reshape(4, 16, 16))[0]


@program(
    f32(16, 4, at=P()),
    f32(64, 16),
    out=P(),
    moves=[all_reduce(256)],
    sends=448,
    needs=448,
    one_device=accumulation_by_reshape,
)
def accumulation_within_shards(w, x):
    """Each device cuts its own rows, adds up, and sums once."""

    def local(w, x):
        w = lax.pcast(w, "x", to="varying")

        def add(total, batch):
            return total + jax.grad(loss)(w, batch), None

        return lax.psum(lax.scan(add, jnp.zeros_like(w), x.reshape(4, 2, 16))[0], "x")

    return per_device(local, (P(), P("x")), P())(w, x)


# --- from one sharding to another (jax-ml/jax#21562, openxla/xla#15207) ------------------------

_GRID = "x=4,y=2"


@program(
    f32(16, 16, 16, at=P("y", None, "x")),
    mesh=_GRID,
    out=P(None, ("x", "y")),
    moves=[
        all_gather(8192, group_size=4),
        all_gather(16384, axes=("y",), group_size=2),
    ],
    sends=14336,
    needs=1792,
    instead="resharded_in_steps",
)
def resharded_at_once(x):
    """ "Involuntary full rematerialization": all 16,384 B are gathered, of which each device keeps
    2,048."""
    return x + 1


@program(
    f32(16, 16, 16, at=P("y", None, "x")),
    mesh=_GRID,
    out=P(None, ("x", "y")),
    moves=[
        all_to_all(2048, axes=("y",), group_size=2),
        all_to_all(2048, group_size=4),
        permute(2048, axes=("x", "y")),
    ],
    sends=4608,
    needs=1792,
    one_device=lambda x: x + 1,
)
def resharded_in_steps(x):
    """One axis after the other, then the devices in the other order: shards only."""
    x = at(x + 1, None, "y", "x", mesh=_GRID)
    return at(x, None, ("y", "x"), mesh=_GRID)


@program(
    f32(16, 16, at=P(("x", "y"))),
    mesh=_GRID,
    out=P("x", "y"),
    moves=[all_to_all(128, axes=("y",), group_size=2)],
    sends=64,
    needs=64,
)
def an_axis_moved_to_another_dim(x):
    """Pairs of devices exchange halves of their 128 B."""
    return x + 1


@program(
    f32(16, 16, at=P(("x", "y"))),
    mesh=_GRID,
    out=P(("y", "x")),
    moves=[permute(128, axes=("x", "y"))],
    sends=128,
    needs=128,
)
def axes_in_the_other_order(x):
    """Equal shards on other devices: all but the first and the last pass theirs on."""
    return x + 1


@program(f32(16, 16, at=P("x", "y")), mesh=_GRID, out=P("y", "x"))
def transposed_with_its_sharding(x):
    """Each device transposes its own block."""
    return x.T


@program(f32(64, 64), out=P("x"), moves=[all_to_all(2048)], sends=1792, needs=1792)
def transposed_to_the_same_sharding(x):
    """Each device keeps an eighth of its 2,048 B."""
    return x.T


@program(f32(8, 6, 4), out=P("x"))
def merged_with_the_sharded_dim_first(x):
    """Rows of a shard stay together."""
    return x.reshape(48, 4)


@program(f32(8, 8, 4, at=P(None, "x")), out=P("x"), moves=[all_to_all(128)], sends=112, needs=112)
def merged_with_the_sharded_dim_second(x):
    """What one device has is spread over all: an exchange of its 128 B."""
    return x.reshape(64, 4)


@program(f32(6, 8, 4, at=P(None, "x")), out=P("x"), moves=[all_gather(768)], sends=672, needs=84)
def merged_where_eight_does_not_divide(x):
    """6 rows cannot be cut into 8 pieces, so XLA gathers; 7/8 of the 96 B shard have to move."""
    return x.reshape(48, 4)


# --- loops and branches (jax-ml/jax#25010; openxla/xla#44796) ----------------------------------


@program(
    f32(8, 16, 16), f32(4, 16, at=P()), out=P(), moves=[all_gather(8192)], sends=7168, needs=7168
)
def scan_over_a_layer_sharded_stack(w, h):
    """Every device needs every layer; the stack is gathered whole before the loop, 8,192 B of
    memory where 1,024 would do. Shard layers by another dim."""
    return lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, w)[0]


@program(
    f32(8, 16, 16),
    f32(4, 16, at=P()),
    out=P(),
    moves=[*[permute(1024)] * 7, all_reduce(8192)],
    sends=21504,
    needs=7168,
    instead="scan_over_a_layer_sharded_stack",
)
def loop_over_a_layer_sharded_stack(w, h):
    """Each static `w[i]` goes to device 0 and is summed from there with zeros: 3 gathers' worth."""
    for i in range(8):
        h = jnp.tanh(h @ w[i])
    return h


@program(
    f32(8, 16, 16, at=P(None, "x")),
    f32(4, 16, at=P()),
    out=P(),
    moves=[all_reduce(256, count=8), all_gather(256)],
    sends=3808,
    needs=224,
)
def scan_over_layers_sharded_inside(w, h):
    """8 sums of the activations, 256 B, are less than 8 layers of 1,024 B; and each device keeps
    an eighth of each sum."""
    return lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, w)[0]


@program(f32(64, 16), out=P("x"), moves=[all_reduce(4, count=6)], sends=42, needs=7)
def power_iteration(x):
    """A norm per trip, 6 trips."""
    return lax.fori_loop(0, 6, lambda _, y: y / jnp.linalg.norm(y), x)


@program(f32(64, 16), out=P("x"), moves=[all_reduce(4, count=None)], sends=None)
def until_converged(x):
    """The maximum is asked for before every trip, once at least: how often, data decides."""
    return lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 1e-3, lambda y: y * 0.5, x)


@program(f32(64, 16), out=P("x"), moves=[all_reduce(64, count=None), all_reduce(4)], sends=None)
def in_one_branch(x):
    """The predicate is summed for all; the mean in the branch, at most once."""
    return lax.cond(jnp.sum(x) > 0, lambda y: y - y.mean(0), lambda y: y, x)


@program(
    f32(64, 16),
    out=P("x"),
    moves=[all_gather(4096)],
    sends=3584,
    needs=3584,
    one_device=lambda w: lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ w.T @ w), w),
)
def gather_of_the_same_in_a_loop(w):
    """Written five times a step; no trip changes w, and XLA moves the gather out."""

    def local(w):
        def trip(y, _):
            whole = lax.all_gather(w, "x", tiled=True)
            return jnp.tanh(y @ whole.T @ whole), None

        return lax.scan(trip, w, length=5)[0]

    return per_device(local, P("x"), P("x"))(w)


# --- batched linear algebra (jax-ml/jax#20683) ------------------------------------------------


@program(f32(8, 16, 16), out=P("x"))
def cholesky_of_each(x):
    """Batch dims of these custom calls are partitioned today; they were gathered once."""
    return jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + jnp.eye(16))


@program(f32(8, 16, 16), out=P("x"))
def eigenvalues_of_each(x):
    """Likewise."""
    return jnp.linalg.eigvalsh(x + x.swapaxes(1, 2))
