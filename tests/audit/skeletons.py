"""Programs whose control depends on the device, and how often each device runs what, by hand.

All run on 8 CPU devices as 4 stages of 2; what communicates in a branch sums over the two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import execution
from jaxpar.audit.reader import read_hlo
from jaxpar.audit.runner import Runner
from jaxpar.audit.shape import Array
from jaxpar.audit.skeleton import COMMUNICATING, decide, decided
from jaxpar.audit.slicing import Slice
from jaxpar.audit.values import Machine
from jaxpar.compat import compiled_text

NUM_STAGES, NUM_DATA, NUM_MICRO = 4, 2, 3
NUM_SLOTS = NUM_MICRO + NUM_STAGES - 1
AXES = ("pipe", "data")
RING = [(i, (i + 1) % NUM_STAGES) for i in range(NUM_STAGES)]


def compiled(function, spec=None):
    """`function` of a local [2, 2] array, compiled for all devices."""
    spec = PartitionSpec(*AXES) if spec is None else spec
    mesh = jax.make_mesh((NUM_STAGES, NUM_DATA), AXES, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    shape = jax.ShapeDtypeStruct((2 * NUM_STAGES, 2 * NUM_DATA), jnp.float32)
    return jax.jit(mapped).lower(shape).compile()


def text_of(function):
    return compiled_text(compiled(function))


def work(x):
    """What communicates: one sum over `data`."""
    return lax.pcast(lax.psum(x, "data"), "data", to="varying") * 0.5


def scaled(x):
    return x * 0.25


def steps(slot, x, num_slots):
    return lax.scan(lambda c, t: (slot(c, t), None), x, jnp.arange(num_slots, dtype=jnp.int32))[0]


def fill_and_drain(x):
    """The idle slots are those before the first and after the last micro-batch of a stage."""
    stage = lax.axis_index("pipe")

    def slot(c, t):
        micro = t - stage
        c = lax.cond((micro >= 0) & (micro < NUM_MICRO - 1 + stage % 2), work, scaled, c)
        return lax.ppermute(c, "pipe", RING)

    return steps(slot, x, NUM_SLOTS)


def fill_and_drain_by_hand():
    return [
        sum(0 <= t - stage < NUM_MICRO - 1 + stage % 2 for t in range(NUM_SLOTS))
        for stage in range(NUM_STAGES)
    ]


TABLE = np.array([[(7 * t + 3 * s * s) % 4 for s in range(NUM_STAGES)] for t in range(NUM_SLOTS)])


def by_table(x):
    """What to do stands in a table of slots and stages: nothing, once, twice, or three times."""
    table, stage = jnp.asarray(TABLE, jnp.int32), lax.axis_index("pipe")
    branches = [scaled, work, lambda x: work(work(x)), lambda x: steps(lambda c, _: work(c), x, 3)]

    def slot(c, t):
        return lax.ppermute(lax.switch(table[t, stage], branches, c), "pipe", RING)

    return steps(slot, x, NUM_SLOTS)


def by_table_by_hand():
    return TABLE.sum(axis=0).tolist()


def as_long_as_stages_say(x):
    """Each stage loops another number of times."""
    stage = lax.axis_index("pipe")
    first = 0 * stage
    return lax.while_loop(
        lambda state: state[0] < stage * 2 + 1, lambda state: (state[0] + 1, work(state[1])),
        (first, x),
    )[1]  # fmt: skip


def as_long_as_stages_say_by_hand():
    return [2 * stage + 1 for stage in range(NUM_STAGES)]


def nested(x):
    """Loops of other lengths inside loops, and a branch that depends on both counters."""
    stage = lax.axis_index("pipe")

    def inner(state):
        i, j, c = state
        return i, j + 1, lax.cond((i + j + stage) % 3 == 0, work, scaled, c)

    def outer(c, i):
        return lax.while_loop(
            lambda state: state[1] < (state[0] ^ stage), inner, (i, 0 * stage, c)
        )[2]

    return steps(lambda c, i: outer(c, i + 0 * stage), x, 5)


def nested_by_hand():
    return [
        sum((i + j + stage) % 3 == 0 for i in range(5) for j in range(i ^ stage))
        for stage in range(NUM_STAGES)
    ]


def told_by_others(x):
    """Whoever has the largest number says how often: devices tell each other, not the data."""
    stage = lax.axis_index("pipe")
    trips = lax.ppermute(stage * stage, "pipe", RING) + lax.pmax(stage, "pipe")
    return lax.while_loop(
        lambda state: state[0] < trips, lambda state: (state[0] + 1, work(state[1])), (0 * trips, x)
    )[1]


def told_by_others_by_hand():
    return [((stage - 1) % NUM_STAGES) ** 2 + NUM_STAGES - 1 for stage in range(NUM_STAGES)]


PROGRAMS = {
    fill_and_drain: fill_and_drain_by_hand,
    by_table: by_table_by_hand,
    as_long_as_stages_say: as_long_as_stages_say_by_hand,
    nested: nested_by_hand,
    told_by_others: told_by_others_by_hand,
}


def decided_of(text, num_devices=2 * NUM_STAGES):
    """(module, its Execution with what the skeleton decides, the Skeleton)."""
    module = read_hlo(text)
    flow = Dataflow(module)
    runs = execution(module, flow)
    homes = [home.name for home in module.active if any(map(home.mentions, COMMUNICATING))]
    skeleton = decide(module, flow, runs, homes, num_devices=num_devices)
    return module, decided(module, flow, runs, num_devices=num_devices), skeleton


def runs_per_device(text, opcode):
    """How often each device runs instructions with this opcode."""
    module, runs, _ = decided_of(text)
    total = np.zeros(2 * NUM_STAGES, np.int64)
    for computation, found in module.find(f" {opcode}("):
        if found.opcode == opcode:
            count = runs.counts[computation.name].exact
            total += runs.device_counts.get(computation.name, count)
    return total.tolist()


def returned(text, num_devices=2 * NUM_STAGES):
    """The arrays that the entry returns, evaluated: a list of [devices or 1, *dims] or reasons."""
    module = read_hlo(text)
    flow = Dataflow(module)
    machine = Machine(module=module, num_devices=num_devices)
    cut = Slice(flow, machine, set(), set())
    root = module.entry.root
    paths = [()] if isinstance(root.shape, Array) else [(i,) for i in range(len(root.shape))]
    for path in paths:
        cut.want_root(module.entry, path)
    plans = cut.plans()
    runner = Runner(plans, machine, homes=(), above=(), closed={})
    values = runner.everywhere(module.entry.name)
    return [values[plans[module.entry.name].slots[root.name, path]] for path in paths]
