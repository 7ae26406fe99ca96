"""Where values wait on a device, from the slot they arrive in to the slot they are last read in.

Two kinds of values wait: the input of each chunk, from its arrival until its backward, which
computes the chunk again from it (until the weight gradient, where the backward is split), and the
gradient of each chunk's output, from its arrival until the same action. A `Stash` says at which
place of an array each of them is written and read, slot by slot and stage by stage, with as few
places as the fullest stage needs: intervals in the order of their start, each given a place that is
free by then.

In a slot all reads come before all writes, so that XLA can update the array in place. So a value
that arrives in this slot is not in the array yet (`NOWHERE`: use what has arrived), and its place
may be one that is read for the last time in this very slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.strategies.pipeline.schedule import Kind, Schedule

NOWHERE = -1
"""Instead of a place: nothing to read or write, or the value is at hand in this slot anyway."""

Table = tuple[tuple[int, ...], ...]
"""Places by slot and stage."""


@dataclass(frozen=True, kw_only=True)
class Stash:
    """Places of one array per device; tables are [num_slots][num_stages], all have `NOWHERE`.

    num_places: rows of the array, the same on all devices: the largest of `peaks`.
    peaks: the most values that wait at the same time, for each stage.
    arrival: where to write what was sent in the slot before and arrives in this one.
    own: where to write the input that the first chunk's forward makes from tokens in this slot.
    forward: where the forward of this slot reads its input; NOWHERE is what has just arrived, or
        the tokens. (Of gradients: NOWHERE always.)
    backward: where the B, I or W of this slot reads; NOWHERE is, for inputs, the input of this
        slot's forward and, for gradients, what has just arrived, or the loss of the last chunk.
    """

    num_places: int
    peaks: tuple[int, ...]
    arrival: Table
    own: Table
    forward: Table
    backward: Table


@dataclass(frozen=True)
class _Value:
    """A value on one stage: the slot it is there from, by whom, and those that read it."""

    stage: int
    start: int
    is_own: bool
    forward: int | None
    backward: tuple[int, ...]

    @property
    def end(self) -> int:
        """The slot of its last use."""
        return max(self.backward)


def input_stash(schedule: Schedule, *, keeps_own: bool = True) -> Stash:
    """Where the inputs of chunks wait for the actions that compute the chunk again.

    Without `keeps_own` the first chunk's do not wait: they are made again from the tokens.
    """
    values = (value for value in _inputs(schedule) if keeps_own or not value.is_own)
    return _allocate(schedule, list(values))


def gradient_stash(schedule: Schedule) -> Stash:
    """Where the gradients of chunks' outputs wait. The last chunk makes its own from its loss."""
    return _allocate(schedule, list(_gradients(schedule)))


def _inputs(schedule: Schedule) -> Iterator[_Value]:
    for (kind, microbatch, g), t in schedule.slot_of.items():
        if kind is Kind.FORWARD:
            start = schedule.slot_of[kind, microbatch, g - 1] + 1 if g else t
            stage, _ = schedule.stage_and_chunk(g)
            yield _Value(stage, start, g == 0, t, _backward_slots(schedule, microbatch, g))


def _gradients(schedule: Schedule) -> Iterator[_Value]:
    for microbatch in range(schedule.num_microbatches):
        for g in range(schedule.num_chunks - 1):
            start = schedule.gradient_slot(microbatch, g + 1) + 1
            stage, _ = schedule.stage_and_chunk(g)
            yield _Value(stage, start, False, None, _backward_slots(schedule, microbatch, g))


def _backward_slots(schedule: Schedule, microbatch: int, g: int) -> tuple[int, ...]:
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    found = (schedule.slot_of.get((kind, microbatch, g)) for kind in kinds)
    return tuple(t for t in found if t is not None)


def _allocate(schedule: Schedule, values: list[_Value]) -> Stash:
    arrival, own, forward, backward = (
        [[NOWHERE] * schedule.num_stages for _ in schedule.slots] for _ in range(4)
    )
    waits: list[list[_Value]] = [[] for _ in range(schedule.num_stages)]
    for value in values:
        if value.end > value.start:
            waits[value.stage].append(value)
    peaks = []
    for stage, mine in enumerate(waits):
        waiting: list[tuple[int, int]] = []  # a heap of (slot of the last use, place)
        free: list[int] = []
        num_places = 0
        for value in sorted(mine, key=lambda value: value.start):
            while waiting and waiting[0][0] <= value.start:
                free.append(heapq.heappop(waiting)[1])
            if not free:
                free.append(num_places)
                num_places += 1
            place = free.pop()
            heapq.heappush(waiting, (value.end, place))
            (own if value.is_own else arrival)[value.start][stage] = place
            if value.forward is not None and value.forward > value.start:
                forward[value.forward][stage] = place
            for t in value.backward:
                if t > value.start:
                    backward[t][stage] = place
        peaks.append(num_places)
    tables = (tuple(map(tuple, table)) for table in (arrival, own, forward, backward))
    return Stash(
        num_places=max(peaks),
        peaks=tuple(peaks),
        **dict(zip(("arrival", "own", "forward", "backward"), tables, strict=True)),
    )
