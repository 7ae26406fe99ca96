"""Carries out a schedule: any table, in one program that is the same on all stages.

A table has up to three parts, and each is one scan over its slots: *fill*, forwards only; *steady*,
a forward and then a backward in every slot; *drain*, backwards only. In a slot:

1. the gradients of the slot before go out to the stage before (their permute runs beside 3);
2. what waits in the stashes is read, all of it before anything is written;
3. the forward of the slot; its output goes out to the stage behind (beside 4);
4. the backward of the slot, which computes the chunk again from its input (so that only inputs
   wait) and adds to the gradients in the loop's state;
5. what arrived is written where the table's liveness says (stash.py).

What a stage does in a slot depends on its place on the axis. Where a stage communicates by itself
no device may leave its code out, so every stage computes in every slot, and idle ones send what
nobody reads and add zeros. Elsewhere a branch is taken, and idle stages wait. A slot takes as long
as its slowest stage either way. Permutes stand outside of branches: in one of them they would hang.

Sources: Huang et al. 2019 (GPipe) §2.3, recomputing from a stage's input; Narayanan et al. 2021
§2.2; Qi et al. 2023 §2, input and weight gradients as actions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.collectives import permute, vary
from jaxpar.compat import varying_axes
from jaxpar.strategies.pipeline import arrays
from jaxpar.strategies.pipeline.program import IDLE, Branch, Part, Program, Row
from jaxpar.strategies.pipeline.schedule import Kind
from jaxpar.strategies.pipeline.stash import Stash

AXIS = "pipe"


class Chunk(NamedTuple):
    """The chunk of the model a stage is asked to run, with Python's bools where they are known.

    number: counted from the embedding over all stages, int32 scalar.
    place: among the stage's own chunks, int32 scalar.
    is_first, is_last: whether it embeds tokens, and whether it scores.
    is_repeated: whether a forward has run before, for the other stages; that one needed only the
        output.
    """

    number: Array
    place: Array
    is_first: bool | Array
    is_last: bool | Array
    is_repeated: bool


Stage = Callable[[Any, Any, Array | None, Any, Chunk], tuple[Array, Array, Any]]
"""(what all stages share, layers of one chunk, input, micro-batch, chunk) -> (output, summand of
the loss, statistics). Input and output have one shape; without input the chunk is the first."""


class Total(NamedTuple):
    """What adds up over slots, on one device: loss, and per chunk of it [v, ..], the rest."""

    loss: Array
    stats: Any
    shared: Any
    layers: Any


class Carry(NamedTuple):
    """A device's state between slots.

    A stash [places + 1, ..] has one place more, to write to what nobody waits for; None is none.
    """

    input_arrived: Array
    gradient_sent: Array
    inputs: Array | None
    gradients: Array | None
    total: Total


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs a schedule inside `shard_map` over axis `pipe`, of as many devices as it has stages.

    always_computes: for stages that communicate by themselves (see the module).
    exact_sends: unroll all slots and send what is needed, to whom it is, and nothing else; for
        counting, since the program grows with the table.
    """

    program: Program
    stage: Stage
    always_computes: bool = False
    exact_sends: bool = False

    def __call__(self, shared: Any, layers: Any, batch: Any) -> tuple[tuple[Array, Any], Any, Any]:
        """(loss, statistics), gradients of `shared`, gradients of `layers`: this device's summands.

        Leaves of `layers` are [v, ..], of `batch` [m, ..], of the statistics [v, ..]. Parameters
        have to vary over the axes that their gradients will be reduced over, or they would be
        reduced in every slot.
        """
        run = _Run(self, shared, layers, batch)
        carry = run.start()
        for part in self.program.parts:
            if self.exact_sends:
                for t in part.slots:
                    carry = run.slot(carry, self.rows(t), part, t)
            elif part.slots:
                rows = self.rows(slice(part.slots.start, part.slots.stop))
                carry, _ = lax.scan(partial(run.step, part=part), carry, rows)
        total = carry.total
        return (total.loss, total.stats), total.shared, total.layers

    def rows(self, slots: int | slice) -> Row:
        return Row(*(jnp.asarray(column[slots]) for column in self.program.table))


class _Run:
    """One execution: the executor, and the arrays it was called with."""

    def __init__(self, executor: Executor, shared: Any, layers: Any, batch: Any) -> None:
        self.executor, self.program = executor, executor.program
        self.schedule = executor.program.schedule
        self.shared, self.layers = shared, layers
        self.batch = jax.tree.map(lambda leaf: vary(leaf, AXIS), batch)

    def start(self) -> Carry:
        """Zeros of every kind, varying over the axes that what replaces them varies over."""

        def run(x: Array | None, *, is_first: bool, is_last: bool) -> Any:
            place = jnp.int32(0)
            chunk = Chunk(self.index(place), place, is_first, is_last, is_last)
            layers, micro_batch = arrays.pick(self.layers, 0), arrays.pick(self.batch, 0)
            return self.executor.stage(self.shared, layers, x, micro_batch, chunk)

        y, _, _ = jax.eval_shape(partial(run, None, is_first=True, is_last=False))
        self.x_axes = sorted(varying_axes(y) | {AXIS})
        x = arrays.zeros(y, self.x_axes)
        _, loss, stats = jax.eval_shape(partial(run, is_first=False, is_last=True), x)
        self.loss_axes = sorted(varying_axes(loss) | {AXIS})

        def stash(where: Stash) -> Array | None:
            if not where.num_places:
                return None
            return arrays.zeros(jax.ShapeDtypeStruct((where.num_places + 1, *x.shape), x.dtype),
                          self.x_axes)  # fmt: skip

        def per_chunk(leaf: Any) -> Array:
            shape = (self.schedule.num_virtual_stages, *leaf.shape)
            return arrays.zeros(
                jax.ShapeDtypeStruct(shape, leaf.dtype), varying_axes(leaf) | {AXIS}
            )

        inputs, gradients = map(stash, self.program.stashes)
        total = Total(
            loss=arrays.zeros(loss, self.loss_axes),
            stats=jax.tree.map(per_chunk, stats),
            shared=jax.tree.map(arrays.zeros_for_sum, self.shared),
            layers=jax.tree.map(arrays.zeros_for_sum, self.layers),
        )
        return Carry(x, x, inputs, gradients, total)

    def index(self, chunk: Array) -> Array:
        """Of a stage's own chunk among all of the model's."""
        return chunk * self.schedule.num_stages + lax.axis_index(AXIS)

    def step(self, carry: Carry, rows: Row, *, part: Part) -> tuple[Carry, None]:
        return self.slot(carry, rows, part, None), None

    def slot(self, carry: Carry, rows: Row, part: Part, t: int | None) -> Carry:
        """One slot, as the module tells it; `t` is its number where this code runs no other."""
        row = Row(*(column[lax.axis_index(AXIS)] for column in rows))
        x_arrived, g_sent, total = carry.input_arrived, carry.gradient_sent, carry.total
        x_next = g_arrived = x_arrived
        if part.has_backward:
            before = None if t is None else t - 1
            g_arrived = self.send(g_sent, before, is_forward=False)

        def place(name: str) -> Array | None:
            return getattr(row, name) if name in part.places else None

        # Without the barrier XLA may read after the writes below, from a copy of the whole stash.
        x_waiting, x_repeated, g_waiting = lax.optimization_barrier(
            (
                arrays.read(carry.inputs, place("input_forward")),
                arrays.read(carry.inputs, place("input_backward")),
                arrays.read(carry.gradients, place("gradient_backward")),
            )
        )
        x_forward = arrays.either(x_waiting, place("input_forward"), x_arrived)
        if part.has_forward:
            x_next = self.send(self.forward(row, x_forward), t, is_forward=True)
        if part.has_backward:
            x_backward = arrays.either(x_repeated, place("input_backward"), x_forward)
            gradient = arrays.either(g_waiting, place("gradient_backward"), g_arrived)
            total, g_sent = self.backward(row, x_backward, gradient, total)
        # What nobody reads is written from a result of the reads, which so come first.
        after = g_sent if part.has_backward else x_next
        inputs = arrays.write(carry.inputs, place("input_arrival"), x_arrived, after)
        gradients = arrays.write(carry.gradients, place("gradient_arrival"), g_arrived, after)
        return Carry(x_next, g_sent, inputs, gradients, total)

    def send(self, x: Array, t: int | None, *, is_forward: bool) -> Array:
        """To the stage behind, or before; zeros arrive where nobody sends."""
        pairs = self.program.pairs(t, is_forward=is_forward)
        if not pairs:
            return x
        with jax.named_scope("forward" if is_forward else "backward"):
            scope = "send_activation" if is_forward else "send_gradient"
            return permute(x, AXIS, pairs, scope=scope)

    def micro_batch(self, number: Array, branch: Array) -> Any:
        """What a stage of this branch reads. Idle ones read zeros if there is one micro-batch: else
        all slots would do the same with it, and compilers do that once for all of them."""
        picked = arrays.pick(self.batch, number)
        if self.schedule.num_microbatches > 1:
            return picked
        return arrays.where(branch > IDLE, picked)

    def forward(self, row: Row, x: Array) -> Array:
        """The output of the slot's forward; anything at all where there is none."""
        layers = arrays.pick(self.layers, row.forward_chunk)
        micro_batch = self.micro_batch(row.forward_microbatch, row.forward)
        index = self.index(row.forward_chunk)

        def run(is_first: bool | Array) -> Array:
            chunk = Chunk(index, row.forward_chunk, is_first, False, False)
            y, _, _ = self.executor.stage(self.shared, layers, x, micro_batch, chunk)
            return vary(y, self.x_axes)

        if self.executor.always_computes:
            return run(index == 0)
        choices = [partial(run, branch.is_first) for branch in self.program.branches[0]]
        return lax.switch(row.forward, [lambda: x, *choices])

    def backward(self, row: Row, x: Array, gradient: Array, total: Total) -> tuple[Total, Array]:
        """The total after the slot's backward, and the gradient of its input."""
        layers = arrays.pick(self.layers, row.backward_chunk)
        micro_batch = self.micro_batch(row.backward_microbatch, row.backward)
        index = self.index(row.backward_chunk)

        def run(
            is_first: bool | Array, is_last: bool | Array, one: Array, dy: Array
        ) -> tuple[Total, Array]:
            """What to add to the total, and dx, if the loss counts `one` times and y gets `dy`."""
            chunk = Chunk(index, row.backward_chunk, is_first, is_last, True)

            def stage(shared: Any, layers: Any, x: Array) -> tuple[tuple[Array, Array], Any]:
                y, loss, stats = self.executor.stage(shared, layers, x, micro_batch, chunk)
                return (vary(y, self.x_axes), vary(loss, self.loss_axes)), stats

            (_, loss), transpose, stats = jax.vjp(stage, self.shared, layers, x, has_aux=True)
            d_shared, d_layers, dx = transpose((dy, one))
            return Total(loss, stats, d_shared, d_layers), dx

        def add(more: Total) -> Total:
            return Total(
                loss=total.loss + more.loss,
                stats=arrays.add(total.stats, row.backward_chunk, more.stats),
                shared=jax.tree.map(arrays.plus, total.shared, more.shared),
                layers=arrays.add(total.layers, row.backward_chunk, more.layers),
            )

        one, nothing = arrays.zeros(total.loss) + 1, jnp.zeros_like(gradient)
        if self.executor.always_computes:
            is_active, is_last = row.backward > IDLE, index + 1 == self.schedule.num_chunks
            dy = jnp.where(is_active & ~is_last, gradient, nothing)
            more, dx = run(index == 0, is_last, jnp.where(is_active, one, 0.0), dy)
            # Gradients are 0 already where nothing is active, unless inputs' are made alone.
            adds = row.makes_weights == 1
            loss, stats = arrays.where(adds, (more.loss, more.stats))
            weights = more.shared, more.layers
            if self.schedule.splits_backward:
                weights = arrays.where(adds, weights)
            return add(Total(loss, stats, *weights)), dx

        def choice(branch: Branch) -> tuple[Total, Array]:
            dy = nothing if branch.is_last else gradient
            more, dx = run(branch.is_first, branch.is_last, one, dy)
            if branch.kind is Kind.INPUT_GRADIENT:
                return total, dx
            return add(more), nothing if branch.kind is Kind.WEIGHT_GRADIENT else dx

        choices = [partial(choice, branch) for branch in self.program.branches[1]]
        return lax.switch(row.backward, [lambda: (total, nothing), *choices])
