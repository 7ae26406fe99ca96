"""A pipeline schedule is data: a table of slots × stages, each cell saying what a stage does then.

A model of p·v equal chunks of layers runs on p stages (devices along axis `pipe`), v chunks on
each: global chunk g = chunk·p + stage. What a slot means is the same for every table:

1. what stages sent in the slot before arrives: activations from the stage before, gradients from
   the stage behind;
2. the forward of the cell runs, if it has one, then its backward, if it has one;
3. their results are sent. So a result is used in a later slot than it was made in, except that the
   last chunk's backward may follow its own forward in the same slot.

A cell holds nothing, one action, or a forward and then one of backward, input gradient and weight
gradient. Tables with such pairs are called *phased*: in one lock-step program, where a slot costs
as much as its slowest stage, neighbours that alternate would wait for each other; with a forward
phase and a backward phase in each slot they do not. Splitting the backward into input gradient
(which the stage before waits for) and weight gradient (which nobody waits for) is the idea of Qi
et al. 2023, "Zero bubble pipeline parallelism".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from jaxpar.errors import ScheduleError, is_whole, require_whole, shown

MAX_CELLS = 1 << 18
"""Slots × stages of a table: a larger one takes longer to check than to use."""


class Kind(StrEnum):
    """What an action does; the value is its letter in tables."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def noun(self) -> str:
        return self.name.lower().replace("_", " ")


_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True, order=True)
class Action:
    """One kind of work on one micro-batch, in one of the chunks that its stage holds (0..v-1)."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """'F3', or 'F3.1' for chunk 1: what a cell of a CSV table holds."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Cell = tuple[Action, ...]
Slot = tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A valid table: `slots[t][stage]` is the cell. Raises ScheduleError for one that is not valid.

    Valid: every stage does a forward, and either a backward or both gradients, of every micro-batch
    in each of its chunks once, and nothing is used before it has arrived (see the module).
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_virtual_stages: int = 1
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        require_sizes(self.num_stages, self.num_microbatches, self.num_virtual_stages)
        _Validator(self).check()

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def num_chunks(self) -> int:
        """Of the whole model: p·v."""
        return self.num_stages * self.num_virtual_stages

    @property
    def is_phased(self) -> bool:
        """Whether a slot may hold a forward and a backward of one stage."""
        return any(len(cell) > 1 for slot in self.slots for cell in slot)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into input and weight gradient."""
        return any(action.kind is Kind.INPUT_GRADIENT for _, _, action in self.actions())

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(slot, stage, action), in an order in which they can be carried out one by one."""
        for t, slot in enumerate(self.slots):
            for stage, cell in enumerate(slot):
                for action in cell:
                    yield t, stage, action

    def global_chunk(self, stage: int, action: Action) -> int:
        """Which of the model's chunks this is, counted from the embedding."""
        return action.chunk * self.num_stages + stage

    def stage_and_chunk(self, global_chunk: int) -> tuple[int, int]:
        """Where a global chunk lives: its stage, and its number among that stage's chunks."""
        return global_chunk % self.num_stages, global_chunk // self.num_stages

    @cached_property
    def slot_of(self) -> dict[tuple[Kind, int, int], int]:
        """The slot of (kind, microbatch, global chunk)."""
        return {
            (action.kind, action.microbatch, self.global_chunk(stage, action)): t
            for t, stage, action in self.actions()
        }

    def gradient_kind(self, microbatch: int, global_chunk: int) -> Kind:
        """By which action the gradient for a chunk's input is made: B, or I."""
        whole = (Kind.BACKWARD, microbatch, global_chunk) in self.slot_of
        return Kind.BACKWARD if whole else Kind.INPUT_GRADIENT

    def gradient_slot(self, microbatch: int, global_chunk: int) -> int:
        """The slot in which the gradient for a chunk's input is made."""
        kind = self.gradient_kind(microbatch, global_chunk)
        return self.slot_of[kind, microbatch, global_chunk]


def forward_of(cell: Cell) -> Action | None:
    """The forward that a cell holds."""
    return cell[0] if cell and cell[0].kind is Kind.FORWARD else None


def backward_of(cell: Cell) -> Action | None:
    """The backward, input gradient or weight gradient that a cell holds."""
    return cell[-1] if cell and cell[-1].kind is not Kind.FORWARD else None


def require_sizes(num_stages: int, num_microbatches: int, num_virtual_stages: int) -> None:
    """Raise ScheduleError unless there can be a table of this size."""
    require_whole(ScheduleError, "num_stages", num_stages)
    require_whole(ScheduleError, "num_microbatches", num_microbatches)
    require_whole(ScheduleError, "num_virtual_stages", num_virtual_stages)
    # As many slots as any published schedule needs: all of one stage's actions, and the way through
    # all chunks and back.
    for_chunks = 4 * num_stages * num_virtual_stages
    if num_stages * (3 * num_microbatches * num_virtual_stages + for_chunks) > MAX_CELLS:
        most = (MAX_CELLS // num_stages - for_chunks) // (3 * num_virtual_stages)
        raise ScheduleError(
            f"A table for num_stages={num_stages}, num_microbatches={num_microbatches} and "
            f"num_virtual_stages={num_virtual_stages} has more than {MAX_CELLS} cells. "
            + (f"Nearest num_microbatches: {most}." if most > 0 else "Use fewer stages.")
        )


class _Validator:
    """The rules of a table, each with the sentence that tells how it was broken."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.seen: dict[tuple[Kind, int, int], int] = {}

    def check(self) -> None:
        self._check_shape()
        for t, slot in enumerate(self.schedule.slots):
            for stage, cell in enumerate(slot):
                self._check_cell(t, stage, cell)
        self._check_complete()
        for t, stage, action in self.schedule.actions():
            self._check_needs(t, stage, action)

    def error(self, where: str, rule: str) -> ScheduleError:
        return ScheduleError(f"Schedule {shown(self.schedule.name)}{where}: {rule}")

    def _check_shape(self) -> None:
        schedule = self.schedule
        if not isinstance(schedule.slots, tuple):
            raise self.error("", "slots must be a tuple of slots.")
        if len(schedule.slots) * schedule.num_stages > MAX_CELLS:
            raise self.error(
                "", f"{len(schedule.slots)} slots of {schedule.num_stages} stages are more than "
                f"{MAX_CELLS} cells. Leave out idle slots."
            )  # fmt: skip
        for t, slot in enumerate(schedule.slots):
            if not isinstance(slot, tuple) or not all(isinstance(cell, tuple) for cell in slot):
                raise self.error(f", slot {t}", "must be a tuple of cells, a cell one of actions.")
            if len(slot) != schedule.num_stages:
                raise self.error(
                    f", slot {t}",
                    f"has {len(slot)} cells; {schedule.num_stages} are right, one for each stage.",
                )

    def _check_cell(self, t: int, stage: int, cell: Cell) -> None:
        where = f", slot {t}, stage {stage}"
        for action in cell:
            if not isinstance(action, Action) or not isinstance(action.kind, Kind):
                raise self.error(where, f"{shown(action)} is no Action of a Kind.")
        kinds = [action.kind is Kind.FORWARD for action in cell]
        if len(cell) > 2 or (len(cell) == 2 and kinds != [True, False]):
            raise self.error(
                where,
                f"{' '.join(map(str, cell[:3]))} cannot share a cell, which holds at most one F, "
                "and after it at most one of B, I and W. Give each a slot of its own.",
            )
        for action in cell:
            self._check_range(where, action)
            key = action.kind, action.microbatch, self.schedule.global_chunk(stage, action)
            if key in self.seen:
                raise self.error(
                    where,
                    f"{action} was done in slot {self.seen[key]} already. Each {action.kind.noun} "
                    "is done once; leave one of them out.",
                )
            self.seen[key] = t

    def _check_range(self, where: str, action: Action) -> None:
        for word, value, size, field in (
            ("micro-batch", action.microbatch, self.schedule.num_microbatches, "num_microbatches"),
            ("chunk", action.chunk, self.schedule.num_virtual_stages, "num_virtual_stages"),
        ):
            if not is_whole(value) or not 0 <= value < size:
                raise self.error(
                    where,
                    f"{action} names {word} {shown(value)}; with {field}={size} they are "
                    f"{'0' if size == 1 else f'0 to {size - 1}'}.",
                )

    def _check_complete(self) -> None:
        for microbatch in range(self.schedule.num_microbatches):
            for g in range(self.schedule.num_chunks):
                done = [kind for kind in Kind if (kind, microbatch, g) in self.seen]
                halves = [kind for kind in _HALVES if kind in done]
                wanted = _HALVES if halves and Kind.BACKWARD not in done else (Kind.BACKWARD,)
                stage, chunk = self.schedule.stage_and_chunk(g)
                for kind in (Kind.FORWARD, *wanted):
                    if kind not in done:
                        raise self.error(
                            f", stage {stage}",
                            f"{Action(kind, microbatch, chunk)} is missing. Every stage does F, "
                            "and B or else both I and W, of all micro-batches in all its chunks.",
                        )
                if halves and Kind.BACKWARD in done:
                    raise self.error(
                        f", slot {self.seen[halves[0], microbatch, g]}, stage {stage}",
                        f"{Action(halves[0], microbatch, chunk)} is part of what "
                        f"{Action(Kind.BACKWARD, microbatch, chunk)} does. Leave out either.",
                    )

    def _check_needs(self, t: int, stage: int, action: Action) -> None:
        m, g = action.microbatch, self.schedule.global_chunk(stage, action)
        own = Action(Kind.FORWARD, m, action.chunk)
        if action.kind is Kind.FORWARD:
            if g > 0:
                made = self.seen[Kind.FORWARD, m, g - 1]
                self._check_later(t, stage, action, Kind.FORWARD, g - 1, made)
            return
        if action.kind is Kind.WEIGHT_GRADIENT:
            own = Action(Kind.INPUT_GRADIENT, m, action.chunk)
            self._check_later(t, stage, action, own.kind, g, self.seen[own.kind, m, g])
            return
        made = self.seen[Kind.FORWARD, m, g]
        if t < made:
            raise self.error(
                f", slot {t}, stage {stage}",
                f"{action} needs {own} of the same stage, which is done in slot {made}. "
                f"Slot {made} or later is right for {action}.",
            )
        if g + 1 < self.schedule.num_chunks:
            kind = Kind.BACKWARD
            if (kind, m, g + 1) not in self.seen:
                kind = Kind.INPUT_GRADIENT
            self._check_later(t, stage, action, kind, g + 1, self.seen[kind, m, g + 1])

    def _check_later(
        self, t: int, stage: int, action: Action, kind: Kind, g: int, made: int
    ) -> None:
        """Of a result that has to be made in an earlier slot than t."""
        if made < t:
            return
        other, chunk = self.schedule.stage_and_chunk(g)
        raise self.error(
            f", slot {t}, stage {stage}",
            f"{action} needs {Action(kind, action.microbatch, chunk)} of stage {other}, which "
            f"is done in slot {made} and can be used from the next on. Slot {made + 1} or later is "
            f"right for {action}.",
        )
