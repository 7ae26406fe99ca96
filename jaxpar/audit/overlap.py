"""How much of each collective's time the device computes: what the schedule puts beside it.

A synchronous collective is exposed: nothing else runs. Of an asynchronous one, the schedule says
what stands between the start of its transfer and the instruction that waits for it, also where the
two are one trip of a loop apart. Whether that is enough is a question of time, and needs a chip.
Then each computation that holds asynchronous collectives is walked as the device would: it
computes, starts put a transfer on the links, transfers queue for them, a done waits. On a torus a
permute sends one way only, so that one each way are under way at once. A transfer is exposed while
it is on the links and the device computes nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxpar.audit.cost import Cost, estimated_cycles
from jaxpar.audit.links import Transfers
from jaxpar.audit.reader import Computation, Instruction
from jaxpar.audit.reading import Reading
from jaxpar.audit.result import AxesExposure, Collective
from jaxpar.audit.shape import nbytes
from jaxpar.audit.waits import INSIDE, NEXT, Wait, Waits, place_of
from jaxpar.errors import AuditError
from jaxpar.hardware import Chip

MAX_NAMES = 8
"""Overlapped instructions that are named."""

_UP, _DOWN = 0, 1  # the two ways along a ring of neighbours
_BOTH = (_UP, _DOWN)
_STEADY_TRIP = 1  # of a pipelined loop: the first starts with an empty link, the last has no next
_LOOKS_PER_STEP = 50  # for those names: a bound for texts in which everything overlaps everything
_UNSCHEDULED = "the program is not scheduled, so its order says nothing"
_NO_CHIP = "how long anything takes depends on the chip"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What runs beside one collective, per execution.

    exposed_fraction: the part of transfer_s during which the device computes nothing, 0 to 1; None
    when it is not known, and `unknown` says why. num_overlapped: computing instructions that the
    schedule puts beside it; `overlapped` names the longest, if thousands of transfers do not
    overlap each other. transfer_s: its time on the link, None without a chip. pipelined: what
    waits for it is in the next trip of its loop.
    """

    exposed_fraction: float | None
    num_overlapped: int = 0
    overlapped: tuple[str, ...] = ()
    transfer_s: float | None = None
    pipelined: bool = False
    unknown: str | None = None

    @property
    def exposed_s(self) -> float | None:
        """Seconds during which the device waits for it."""
        if self.exposed_fraction is None or self.transfer_s is None:
            return None
        return self.exposed_fraction * self.transfer_s


def overlaps(reading: Reading, chip: Chip | None) -> tuple[Overlap, ...]:
    """For each of reading.sites, what runs beside it; with times where a chip is given.

    Without one, exposed_fraction is 1.0 where nothing computes beside a collective, else None.
    How long transfers take is told by `jaxpar.audit.links`, how long the rest by
    `jaxpar.audit.cost`. All transfers share one queue (on a torus there is one each way, and only
    permutes do with one of them), and the collectives inside a loop do not
    slow down one that goes on around it. What cannot be read leaves exposed_fraction None.
    """
    transfers = None if chip is None else Transfers(chip)
    times = [
        None if transfers is None else transfers.seconds(it.collective) for it in reading.sites
    ]
    answers = [
        Overlap(
            exposed_fraction=None if site.collective.is_async else 1.0,
            transfer_s=time,
            unknown=_UNSCHEDULED if site.collective.is_async else None,
        )
        for site, time in zip(reading.sites, times, strict=True)
    ]
    if not reading.module.scheduled:
        return tuple(answers)
    cost, waits = Cost(reading.flow, chip), Waits(reading)
    for home, slots in _slots(reading, times, chip):
        for slot, answer in _answers(home, slots, cost, waits):
            for site in slot.sites:
                answers[site] = replace(answer, transfer_s=times[site])
    return tuple(answers)


def exposed_by_axes(
    collectives: Iterable[Collective], found: Iterable[Overlap]
) -> tuple[AxesExposure, ...]:
    """The exposed part of all transfers along the same axes, in order of first appearance.

    Weighted by count × transfer_s, without a chip by count × wire bytes; None as soon as one part
    is not known (a count may be unknown where all are exposed alike).
    """
    sorted_in: dict[tuple[str, ...] | None, list[tuple[Collective, Overlap]]] = {}
    for collective, overlap in zip(collectives, found, strict=True):
        sorted_in.setdefault(collective.axes, []).append((collective, overlap))
    return tuple(_exposure(axes, rows) for axes, rows in sorted_in.items())


def _exposure(
    axes: tuple[str, ...] | None, rows: Sequence[tuple[Collective, Overlap]]
) -> AxesExposure:
    fractions = [overlap.exposed_fraction for _, overlap in rows]
    known = [fraction for fraction in fractions if fraction is not None]
    counts = [collective.count for collective, _ in rows if collective.count is not None]
    times = [overlap.transfer_s for _, overlap in rows if overlap.transfer_s is not None]
    timed = len(times) == len(counts) == len(rows)
    fraction = None
    if len(known) == len(rows):
        if len(set(known)) == 1:
            fraction = known[0]
        elif len(counts) == len(rows):
            sizes = times if timed else [float(collective.wire_bytes) for collective, _ in rows]
            weights = [count * size for count, size in zip(counts, sizes, strict=True)]
            exposed = sum(part * weight for part, weight in zip(known, weights, strict=True))
            fraction = exposed / sum(weights) if sum(weights) else None
    total = sum(n * time for n, time in zip(counts, times, strict=True)) if timed else None
    return AxesExposure(axes=axes, exposed_fraction=fraction, transfer_s=total)


@dataclass(kw_only=True)
class _Slot:
    """What one instruction of a schedule transfers: usually one collective."""

    found: Instruction
    is_async: bool
    sites: list[int] = field(default_factory=list)
    seconds: float = 0.0
    ways: tuple[int, ...] = ()


def _slots(
    reading: Reading, times: Sequence[float | None], chip: Chip | None
) -> Iterable[tuple[Computation, dict[str, _Slot]]]:
    """By computation with asynchronous collectives, what each of its instructions transfers."""
    homes: dict[str, tuple[Computation, dict[str, _Slot]]] = {}
    for index, (site, time) in enumerate(zip(reading.sites, times, strict=True)):
        home, found = place_of(reading, site)
        slots = homes.setdefault(home.name, (home, {}))[1]
        slot = slots.setdefault(found.name, _Slot(found=found, is_async=False))
        slot.is_async = slot.is_async or site.collective.is_async
        slot.sites.append(index)
        slot.seconds += time or 0.0
        slot.ways = tuple({*slot.ways, *_ways(site.collective, chip)})
    return [row for row in homes.values() if any(slot.is_async for slot in row[1].values())]


def _ways(collective: Collective, chip: Chip | None) -> tuple[int, ...]:
    """Which ways a collective sends along its ring; behind a switch none are told apart."""
    on_torus = chip is not None and chip.topology == "torus"
    if not on_torus or collective.kind != "collective-permute":
        return _BOTH
    pairs = collective.groups if isinstance(collective.groups, tuple) else (collective.groups,)
    steps = [(block[:, 1] - block[:, 0]) for block in pairs if block.size]
    if not steps:
        return _BOTH
    return (_UP,) if np.median(np.concatenate(steps)) >= 0 else (_DOWN,)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Something the device does: compute for `seconds`, or start, await, or do a transfer."""

    kind: str  # compute, start, done, sync
    name: str
    seconds: float = 0.0
    rank: tuple[float, int] = (0.0, 0)  # to name the longest, in cycles and bytes without a chip


def _answers(
    home: Computation, slots: dict[str, _Slot], cost: Cost, waits: Waits
) -> list[tuple[_Slot, Overlap]]:
    try:
        return list(_Schedule(home, slots, cost, waits).answers())
    except AuditError as error:
        answer = Overlap(exposed_fraction=None, unknown=str(error))
        return [(slot, answer) for slot in slots.values() if slot.is_async]


class _Schedule:
    """One computation, as far as transfers are under way in it."""

    def __init__(
        self,
        home: Computation,
        slots: dict[str, _Slot],
        cost: Cost,
        waits: Waits,
    ) -> None:
        self.home = home
        self.slots = slots
        self.cost = cost
        self.waits: dict[str, Wait] = {}
        self.unknown: dict[str, str] = {}
        order = {name: at for at, name in enumerate(home.instructions)}
        for name, slot in slots.items():
            if slot.is_async:
                wait = waits.of(home, slot.found)
                if isinstance(wait, str):
                    self.unknown[name] = wait
                elif wait.where not in (NEXT, INSIDE) and (
                    order[wait.done.name] < order[wait.start.name]
                ):
                    self.unknown[name] = "what waits for it comes before it"
                else:
                    self.waits[name] = wait

    def answers(self) -> Iterable[tuple[_Slot, Overlap]]:
        """For each asynchronous slot, what it overlaps with; transfer_s is left to the caller."""
        steps = self._steps()
        computing = [step for step in steps if step.kind == "compute"]
        ranges = _ranges(steps)
        exposed = self._simulated(steps) if self.cost.chip is not None else {}
        looks = _LOOKS_PER_STEP * (len(steps) + 1)
        for name, reason in self.unknown.items():
            yield self.slots[name], Overlap(exposed_fraction=None, unknown=reason)
        for name, wait in self.waits.items():
            start, done = ranges[name]
            beside = [(start, done)]
            if wait.where == NEXT:
                beside = [(start, len(computing)), (0, done)]
            num = sum(end - first for first, end in beside)
            looks -= num
            fraction = exposed.get(name, None if num else 1.0)
            yield (
                self.slots[name],
                Overlap(
                    exposed_fraction=fraction,
                    num_overlapped=num,
                    overlapped=_longest(computing, beside) if looks > 0 else (),
                    pipelined=wait.where == NEXT,
                    unknown=_NO_CHIP if fraction is None else None,
                ),
            )

    def _steps(self) -> list[_Step]:
        """What the device does in order, without what it does while no transfer is under way."""
        begins = {wait.start.name: name for name, wait in self.waits.items()}
        dones: dict[str, list[str]] = {}  # in this computation
        inside: dict[str, dict[str, list[str]]] = {}  # in the body of one of its loops
        for name, wait in self.waits.items():
            ends = dones if wait.loop is None else inside.setdefault(wait.loop.name, {})
            ends.setdefault(wait.done.name, []).append(name)
        steps: list[_Step] = []
        num_open = sum(wait.where == NEXT for wait in self.waits.values())
        for name, found in self.home.instructions.items():
            ended = dones.get(name, ())
            steps += (_Step(kind="done", name=slot) for slot in ended)
            num_open -= len(ended)
            if name in begins:
                steps.append(_Step(kind="start", name=begins[name]))
                num_open += 1
            elif name in inside:
                steps += self._loop_steps(found, inside[name])
                num_open -= sum(map(len, inside[name].values()))
            elif ended or not num_open:
                continue
            elif name in self.slots:
                if not self.slots[name].is_async:
                    seconds = self.slots[name].seconds
                    steps.append(_Step(kind="sync", name=name, seconds=seconds))
            elif self.cost.computes(found):
                steps.append(self._compute(found, self.cost.seconds(self.home, found)))
        return steps

    def _loop_steps(self, loop: Instruction, ends: dict[str, list[str]]) -> Iterable[_Step]:
        """A loop whose first trip waits for what was started before it."""
        body = self.cost.flow.module.computations[dict(loop.called)["body"]]
        left = self.cost.seconds(self.home, loop)
        seconds, computes = 0.0, False
        for name, found in body.instructions.items():
            for slot in ends.get(name, ()):
                if computes:
                    yield self._compute(loop, seconds)
                yield _Step(kind="done", name=slot)
                left, seconds, computes = left - seconds, 0.0, False
            if self.cost.computes(found):
                seconds += self.cost.seconds(body, found)
                computes = True
        yield self._compute(loop, max(0.0, left))

    def _compute(self, found: Instruction, seconds: float) -> _Step:
        rank = (seconds, 0)
        if self.cost.chip is None:
            rank = (float(estimated_cycles(found)), nbytes(found.shape))
        return _Step(kind="compute", name=found.name, seconds=seconds, rank=rank)

    def _simulated(self, steps: Sequence[_Step]) -> dict[str, float]:
        """The exposed part of each transfer; of a pipelined loop, in the middle of its trips."""
        pipelined = any(wait.where == NEXT for wait in self.waits.values())
        device = _Device()
        measured: dict[str, _Transfer] = {}
        running: dict[tuple[str, int], _Transfer] = {}
        for trip in range(3 if pipelined else 1):
            for step in steps:
                if step.kind == "compute":
                    device.now += step.seconds
                elif step.kind == "sync":
                    device.wait(device.start(step.seconds, self.slots[step.name].ways))
                elif step.kind == "start":
                    slot = self.slots[step.name]
                    transfer = device.start(slot.seconds, slot.ways)
                    running[(step.name, trip)] = transfer
                    if trip == (_STEADY_TRIP if pipelined else 0):
                        measured[step.name] = transfer
                else:
                    started = trip - (self.waits[step.name].where == NEXT)
                    if (step.name, started) in running:
                        device.wait(running.pop((step.name, started)))
        return {name: transfer.exposed_fraction for name, transfer in measured.items()}


class _Transfer:
    """One transfer with its time on the links, in seconds."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.end = end
        self.exposed_s = 0.0

    @property
    def exposed_fraction(self) -> float:
        seconds = self.end - self.begin
        return min(1.0, self.exposed_s / seconds) if seconds else 0.0


class _Device:
    """A device that computes or waits, and links that serve the transfers of each way in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._free = dict.fromkeys(_BOTH, 0.0)
        self._queues: dict[int, deque[_Transfer]] = {way: deque() for way in _BOTH}

    def start(self, seconds: float, ways: Sequence[int] = _BOTH) -> _Transfer:
        begin = max(self.now, *(self._free[way] for way in ways))
        transfer = _Transfer(begin, begin + seconds)
        self._queues[ways[0]].append(transfer)
        for way in ways:
            self._free[way] = transfer.end
        return transfer

    def wait(self, transfer: _Transfer) -> None:
        """Nothing is computed until `transfer` has ended: whatever is on the links is exposed."""
        for queue in self._queues.values():
            while queue and queue[0].begin < transfer.end:
                first = queue[0]
                waited = min(first.end, transfer.end) - max(first.begin, self.now)
                first.exposed_s += max(0.0, waited)
                if first.end > transfer.end:
                    break
                queue.popleft()
        self.now = max(self.now, transfer.end)


def _ranges(steps: Sequence[_Step]) -> dict[str, tuple[int, int]]:
    """By transfer, how many steps compute before it starts, and before it is waited for."""
    starts: dict[str, int] = {}
    dones: dict[str, int] = {}
    num_computing = 0
    for step in steps:
        if step.kind == "compute":
            num_computing += 1
        elif step.kind != "sync":
            (starts if step.kind == "start" else dones)[step.name] = num_computing
    return {name: (start, dones[name]) for name, start in starts.items()}


def _longest(computing: Sequence[_Step], beside: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """The names of the longest of those steps, longest first, each once."""
    steps = [step for first, end in beside for step in computing[first:end]]
    named = heapq.nlargest(MAX_NAMES, steps, key=lambda step: step.rank)
    return tuple(dict.fromkeys(step.name for step in named))
