"""asked: branches that the place on the mesh and loop counters decide, counted on each device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import MeshSpec, asked, audit, compare
from jaxpar.strategies.strategy import Expected

NUM_STAGES, NUM_SLOTS = 4, 7


def programs(body, *inputs):
    """What `body` asks for on pipe=4, tensor=2, and its compiled program."""
    mesh = MeshSpec.parse("pipe=4,tensor=2").build()
    spec = P("pipe", "tensor")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    traced = run.trace(*inputs)
    compiled = audit(traced.lower().compile(), mesh={"pipe": 4, "tensor": 2})
    return asked(traced.jaxpr), compiled


def rows_of(body, *inputs):
    rows, compiled = programs(body, *inputs)
    return rows, compiled.collectives


def all_reduce(x):
    return lax.pcast(lax.psum(x, "tensor"), "tensor", to="varying")


def busy_slots(body_of_slot):
    def body(x):
        stage = lax.axis_index("pipe")

        def slot(x, t):
            return body_of_slot(x, t, stage), None

        return lax.scan(slot, x, jnp.arange(NUM_SLOTS))[0]

    return body


X = np.ones((4, 2), np.float32)


def test_a_stage_that_is_idle_in_some_slots_is_not_counted_there():
    def slot(x, t, stage):
        is_busy = (t >= stage) & (t < stage + 2 + stage)
        return lax.cond(is_busy, all_reduce, lambda x: x, x)

    (row,), (compiled,) = rows_of(busy_slots(slot), X)
    assert row.count is None
    assert row.device_counts == (2, 2, 3, 3, 4, 4, 4, 4)  # the last stage runs out of slots
    assert compiled.device_counts == row.device_counts


def test_a_table_by_slot_and_stage_decides():
    table = np.random.default_rng(0).integers(0, 3, (NUM_SLOTS, NUM_STAGES)).astype(np.int32)

    def slot(x, t, stage):
        twice = lambda x: all_reduce(all_reduce(x))  # noqa: E731
        return lax.switch(jnp.asarray(table)[t, stage], [lambda x: x, all_reduce, twice], x)

    rows, _ = rows_of(busy_slots(slot), X)
    total = np.sum([row.device_counts for row in rows], axis=0)
    assert (total == np.repeat(table.sum(axis=0), 2)).all()


def test_a_loop_inside_a_branch_multiplies():
    def three(x):
        return lax.scan(lambda x, _: (all_reduce(x), None), x, None, length=3)[0]

    def slot(x, t, stage):
        return lax.cond(t % NUM_STAGES == stage, three, lambda x: x, x)

    (row,), _ = rows_of(busy_slots(slot), X)
    assert row.device_counts == (6, 6, 6, 6, 6, 6, 3, 3)


def test_branches_within_branches():
    def slot(x, t, stage):
        inner = functools.partial(lax.cond, t < 2, all_reduce, lambda x: x)
        return lax.cond(stage > 0, inner, lambda x: x, x)

    (row,), _ = rows_of(busy_slots(slot), X)
    assert row.device_counts == (0, 0, 2, 2, 2, 2, 2, 2)


def test_a_counter_carried_by_the_loop_decides():
    def body(x):
        stage = lax.axis_index("pipe")

        def slot(carry, _):
            x, done = carry
            may = done < stage
            return (lax.cond(may, all_reduce, lambda x: x, x), done + may.astype(jnp.int32)), None

        start = lax.pcast(jnp.int32(0), "pipe", to="varying")
        return lax.scan(slot, (x, start), None, length=NUM_SLOTS)[0][0]

    (row,), _ = rows_of(body, X)
    assert row.device_counts == (0, 0, 1, 1, 2, 2, 3, 3)


def test_equal_counts_on_all_devices_are_one_count():
    def slot(x, t, stage):
        return lax.cond(t < 3, all_reduce, lambda x: x, x)

    (row,), _ = rows_of(busy_slots(slot), X)
    assert (row.count, row.device_counts) == (3, None)


@pytest.mark.parametrize("where", ["predicate", "length"])
def test_what_depends_on_data_has_no_count(where):
    def slot(x, t, stage):
        if where == "predicate":
            return lax.cond(x[0, 0] > t.astype(jnp.float32), all_reduce, lambda x: x, x)
        limit = lax.pcast(jnp.int32(1), ("pipe", "tensor"), to="varying")
        limit = limit + x[0, 0].astype(jnp.int32)
        step = lambda _, x: lax.cond(stage > 0, all_reduce, lambda x: x, x)  # noqa: E731
        return lax.fori_loop(0, limit, step, x)

    (row,), _ = rows_of(busy_slots(slot), X)
    assert (row.count, row.device_counts) == (None, None)


COUNTS = (2, 2, 3, 3, 4, 4, 4, 4)


@pytest.mark.parametrize(
    ("device_counts", "agrees"),
    [(COUNTS, True), ((2, 2, 3, 3, 4, 4, 3, 4), False), (None, False)],
    ids=["as it is", "one device less", "the same everywhere"],
)
def test_predicted_has_to_be_right_on_every_device(device_counts, agrees):
    def slot(x, t, stage):
        is_busy = (t >= stage) & (t < stage + 2 + stage)
        return lax.cond(is_busy, all_reduce, lambda x: x, x)

    rows, compiled = programs(busy_slots(slot), X)
    predicted = Expected(
        kind="all-reduce", axes=("tensor",), count=4, payload_bytes=4, dtype="f32",
        phase=rows[0].phase, why="", device_counts=device_counts,
    )  # fmt: skip
    (line,) = compare([predicted], rows, compiled)
    assert line.agrees == agrees, line
    assert (line.asked.count, line.compiled.count) == (4, 4), "the busiest device is shown"
    assert ("on device" in line.note) == (not agrees)
