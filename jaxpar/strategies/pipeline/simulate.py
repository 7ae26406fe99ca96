"""What a schedule costs: makespan, bubble, activations in flight and messages.

Two machines run it. *Asynchronous*: each stage does its actions in its order, each as soon as the
stage is free and what it needs has arrived; this is what papers count. *Lock-step*: all stages go
from slot to slot together, so a slot takes as long as its slowest stage; this is one program for
all stages, whose slots end in a permute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxpar.errors import ScheduleError, require_positive
from jaxpar.strategies.pipeline.schedule import Action, Kind, Schedule


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long one micro-batch takes on one stage, in any one unit.

    That is all of the stage's chunks together, so that schedules with different v do the same work:
    an action takes 1/v of it. A backward is the sum of both gradients. `send` is per message,
    whatever v is, and is nobody's work: the receiver waits for it.

    Raises ScheduleError for times that are not above 0 (`send`: not below).
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        for field in ("forward", "input_gradient", "weight_gradient"):
            require_positive(ScheduleError, field, getattr(self, field), 1.0)
        if isinstance(self.send, bool) or self.send != 0:
            require_positive(ScheduleError, "send", self.send, 0.1, ", or 0")

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    def per_chunk(self, num_virtual_stages: int) -> dict[Kind, float]:
        """The time of one action of each kind."""
        return {kind: getattr(self, kind.name.lower()) / num_virtual_stages for kind in Kind}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """(slot, stage, action, start) of every action, in the unit of `times`, and the end of all."""

    schedule: Schedule
    times: Times
    lock_step: bool
    starts: tuple[tuple[int, int, Action, float], ...]
    makespan: float

    @cached_property
    def work(self) -> float:
        """Time that each stage computes; all have the same to do."""
        times = self.times.per_chunk(self.schedule.num_virtual_stages)
        total = math.fsum(times[action.kind] for *_, action, _ in self.starts)
        return total / self.schedule.num_stages

    @property
    def bubble_time(self) -> float:
        """Time that a stage is idle, on average over stages."""
        return max(0.0, self.makespan - self.work)

    @property
    def bubble(self) -> float:
        """The part of the makespan that is idle, 0 to 1."""
        return self.bubble_time / self.makespan


def simulate(schedule: Schedule, times: Times, *, lock_step: bool = False) -> Simulation:
    """Run a schedule on a clock."""
    starts = tuple((_lock_step if lock_step else _asynchronous)(schedule, times))
    chunk = times.per_chunk(schedule.num_virtual_stages)
    makespan = max(start + chunk[action.kind] for *_, action, start in starts)
    return Simulation(
        schedule=schedule, times=times, lock_step=lock_step, starts=starts, makespan=makespan
    )


def _asynchronous(schedule: Schedule, times: Times) -> Iterator[tuple[int, int, Action, float]]:
    free = [0.0] * schedule.num_stages
    ends: dict[tuple[Kind, int, int], float] = {}
    send = times.send if schedule.num_stages > 1 else 0.0
    chunk = times.per_chunk(schedule.num_virtual_stages)
    for t, stage, action in schedule.actions():
        g = schedule.global_chunk(stage, action)
        start = free[stage]
        for kind, other in _senders(schedule, action, g):
            start = max(start, ends[kind, action.microbatch, other] + send)
        free[stage] = start + chunk[action.kind]
        ends[action.kind, action.microbatch, g] = free[stage]
        yield t, stage, action, start


def _senders(schedule: Schedule, action: Action, g: int) -> list[tuple[Kind, int]]:
    """Whom an action waits for besides its own stage, which keeps the order."""
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, g - 1)] if g else []
    if action.kind is Kind.WEIGHT_GRADIENT or g + 1 == schedule.num_chunks:
        return []
    return [(schedule.gradient_kind(action.microbatch, g + 1), g + 1)]


def _lock_step(schedule: Schedule, times: Times) -> Iterator[tuple[int, int, Action, float]]:
    start = 0.0
    chunk = times.per_chunk(schedule.num_virtual_stages)
    sending = forward_slots(schedule) | gradient_slots(schedule)
    for t, slot in enumerate(schedule.slots):
        longest = 0.0
        for stage, cell in enumerate(slot):
            now = start
            for action in cell:
                yield t, stage, action, now
                now += chunk[action.kind]
            longest = max(longest, now - start)
        start += longest + (times.send if t in sending and schedule.num_stages > 1 else 0.0)


# --- memory and messages -----------------------------------------------------------------------


def peak_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """The most micro-batches that each stage holds activations of, a chunk counting as 1/v.

    From their forward until their backward, or weight gradient where that is split.
    """
    peaks, now = [0] * schedule.num_stages, [0] * schedule.num_stages
    for _, stage, action in schedule.actions():
        if action.kind is Kind.FORWARD:
            now[stage] += 1
            peaks[stage] = max(peaks[stage], now[stage])
        elif action.kind is not Kind.INPUT_GRADIENT:
            now[stage] -= 1
    return tuple(peak / schedule.num_virtual_stages for peak in peaks)


def forward_slots(schedule: Schedule) -> set[int]:
    """The slots in which some stage does a forward: one program sends activations after each."""
    return {t for t, _, action in schedule.actions() if action.kind is Kind.FORWARD}


def gradient_slots(schedule: Schedule) -> set[int]:
    """The slots in which some stage makes a gradient that the stage before waits for."""
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
    return {t for t, _, action in schedule.actions() if action.kind in kinds}


def useful_messages(schedule: Schedule) -> tuple[int, ...]:
    """Micro-batches that each stage has to send to the next one (the last to the first), forward.

    As many gradients go back. Without chunks to come back to, the last stage sends nothing.
    """
    m, v = schedule.num_microbatches, schedule.num_virtual_stages
    if schedule.num_stages == 1:
        return (0,)
    return (*(m * v for _ in range(schedule.num_stages - 1)), m * (v - 1))
