"""A schedule as the executor reads it: parts, branches, and integers for every slot and stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpar.strategies.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    backward_of,
    forward_of,
)
from jaxpar.strategies.pipeline.stash import NOWHERE, Stash, gradient_stash, input_stash

IDLE = 0
"""The branch in which nothing is done."""


class Row(NamedTuple):
    """One slot: of all stages, int32 [stages] each, or of one.

    forward, backward: which branch, IDLE for none.
    *_microbatch, *_chunk: on which data, by which of the stage's own chunks.
    makes_weights: whether the backward adds to gradients of parameters, and so to the loss.
    The others are places in the stashes (stash.py).
    """

    forward: Any
    forward_microbatch: Any
    forward_chunk: Any
    backward: Any
    backward_microbatch: Any
    backward_chunk: Any
    makes_weights: Any
    input_arrival: Any
    input_forward: Any
    input_backward: Any
    gradient_arrival: Any
    gradient_backward: Any


PLACES = Row._fields[-5:]


class Branch(NamedTuple):
    """What tells the code of one cell from another's."""

    kind: Kind
    is_first: bool
    is_last: bool


class Part(NamedTuple):
    """Successive slots run by one piece of code.

    places: the fields of `Row` by which anything is read from a stash, or written, in these slots.
    """

    slots: range
    has_forward: bool
    has_backward: bool
    places: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What follows from a schedule alone."""

    schedule: Schedule

    @cached_property
    def parts(self) -> tuple[Part, Part, Part]:
        """Fill, steady and drain."""
        forwards, backwards = phases(self.schedule)

        def part(start: int, stop: int, *, has_forward: bool, has_backward: bool) -> Part:
            slots = slice(start, max(start, stop))
            columns = self.table._asdict()
            used = (name for name in PLACES if (columns[name][slots] != NOWHERE).any())
            return Part(range(start, stop), has_forward, has_backward, frozenset(used))

        return (
            part(forwards.start, min(forwards.stop, backwards.start),
                 has_forward=True, has_backward=False),
            part(backwards.start, forwards.stop, has_forward=True, has_backward=True),
            part(max(forwards.stop, backwards.start), backwards.stop,
                 has_forward=False, has_backward=True),
        )  # fmt: skip

    def branch(self, stage: int, action: Action) -> Branch | None:
        """None where nobody waits for the result."""
        g = self.schedule.global_chunk(stage, action)
        is_first, is_last = g == 0, g + 1 == self.schedule.num_chunks
        if (action.kind is Kind.FORWARD and is_last) or (
            action.kind is Kind.INPUT_GRADIENT and is_first
        ):
            return None
        return Branch(action.kind, is_first, is_last)

    @cached_property
    def branches(self) -> tuple[tuple[Branch, ...], tuple[Branch, ...]]:
        """The different forwards, and the different backwards, of the table."""
        found = dict.fromkeys(
            branch
            for _, stage, action in self.schedule.actions()
            if (branch := self.branch(stage, action))
        )
        is_forward = [branch.kind is Kind.FORWARD for branch in found]
        forwards = (branch for branch, is_it in zip(found, is_forward, strict=True) if is_it)
        backwards = (branch for branch, is_it in zip(found, is_forward, strict=True) if not is_it)
        return tuple(forwards), tuple(backwards)

    @cached_property
    def stashes(self) -> tuple[Stash, Stash]:
        """Of inputs and of gradients; the first chunk's input is looked up again."""
        return input_stash(self.schedule, keeps_own=False), gradient_stash(self.schedule)

    @cached_property
    def table(self) -> Row:
        """The schedule and its stashes, int32 [slots, stages] each."""
        schedule, (inputs, gradients) = self.schedule, self.stashes
        shape = schedule.num_slots, schedule.num_stages
        columns = {name: np.zeros(shape, np.int32) for name in Row._fields}
        for t, stage, action in schedule.actions():
            is_backward = action.kind is not Kind.FORWARD
            name = "backward" if is_backward else "forward"
            if branch := self.branch(stage, action):
                columns[name][t, stage] = 1 + self.branches[is_backward].index(branch)
            columns[f"{name}_microbatch"][t, stage] = action.microbatch
            columns[f"{name}_chunk"][t, stage] = action.chunk
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                columns["makes_weights"][t, stage] = 1
        columns["input_arrival"][:] = inputs.arrival
        columns["input_forward"][:] = inputs.forward
        columns["input_backward"][:] = inputs.backward
        columns["gradient_arrival"][:] = gradients.arrival
        columns["gradient_backward"][:] = gradients.backward
        return Row(**columns)

    def pairs(self, t: int | None, *, is_forward: bool) -> list[tuple[int, int]]:
        """(from, to) of a permute: all stages that ever send, or those that have to in slot t."""
        schedule, step = self.schedule, 1 if is_forward else -1
        p, last = schedule.num_stages, schedule.num_chunks - 1
        stages = list(range(p))
        if t is not None:
            cells = map(forward_of if is_forward else backward_of, schedule.slots[t])
            stages = [
                stage
                for stage, action in enumerate(cells)
                if action
                and action.kind is not Kind.WEIGHT_GRADIENT
                and schedule.global_chunk(stage, action) != (last if is_forward else 0)
            ]
        elif schedule.num_virtual_stages == 1:
            stages = stages[:-1] if is_forward else stages[1:]
        return [(stage, (stage + step) % p) for stage in stages]


def phases(schedule: Schedule) -> tuple[range, range]:
    """The slots from the first to the last forward, and from the first to the last backward."""
    forwards = [t for t, _, action in schedule.actions() if action.kind is Kind.FORWARD]
    backwards = [t for t, _, action in schedule.actions() if action.kind is not Kind.FORWARD]
    return range(forwards[0], forwards[-1] + 1), range(backwards[0], backwards[-1] + 1)
