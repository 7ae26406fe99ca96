"""A trace served by real engines on a simulated clock: every token computed, every time repeatable.

Programs run and choose tokens as they would anywhere; how long each took is not looked at. Instead
the clock goes on by a given time for each prefill step, decode step and byte handed over. So the
order of events, and with it who is in which batch, is a function of the trace and of these times,
and the same on a busy laptop as on an idle one.

Where the times come from is said beside every result:

given       by the caller, in seconds.
estimated   the closed form of a model on a chip (estimate.py): a lower bound. The model may be
            another, larger one than the one that chooses the tokens.
measured    the median of some steps on this machine, before the simulation: real here, and then not
            the same twice.

A worker runs one program at a time; prefill and decode by turns where it has both. What arrives
while it is busy is seen when it is through. A hand-over occupies neither side, as with a DMA
engine, only the blocks.
"""

from __future__ import annotations

import copy
import heapq
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, product

import jax
import jax.numpy as jnp

from jaxpar.errors import RequestError, require_positive
from jaxpar.hardware import Chip
from jaxpar.model.config import ModelConfig
from jaxpar.serve.cache import idle_rows
from jaxpar.serve.disaggregation import Disaggregated
from jaxpar.serve.estimate import estimate_serving
from jaxpar.serve.handover import handover_bytes
from jaxpar.serve.measures import Level, Measures, Times, WorkerUse
from jaxpar.serve.plan import KINDS, Kind, ServePlan
from jaxpar.serve.trace import Arrival
from jaxpar.serve.workers import Begun, Fleet, Worker

NUM_MEASURED = 9


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How long everything takes. source: where that is from, for people.

    step_s: seconds of one step of a plan with block tables of so many columns. handover_s: seconds
    until so many cached tokens have gone over.
    """

    source: str
    step_s: Callable[[ServePlan, Kind, int], float]
    handover_s: Callable[[ServePlan, int], float]


def given(*, prefill_s: float, decode_s: float, handover_s: float = 0.0) -> Clock:
    """The same for every plan. Raises RequestError for times that are none."""
    for name, value in (("prefill_s", prefill_s), ("decode_s", decode_s)):
        require_positive(RequestError, name, value, 0.01)
    if handover_s:
        require_positive(RequestError, "handover_s", handover_s, 0.001, "; 0 for none")
    times: dict[Kind, float] = {"prefill": prefill_s, "decode": decode_s}
    return Clock(
        source=f"given: prefill {prefill_s:g} s, decode {decode_s:g} s, hand-over {handover_s:g} s",
        step_s=lambda plan, kind, width: times[kind],
        handover_s=lambda plan, num_tokens: handover_s,
    )


def estimated(config: ModelConfig, chip: Chip) -> Clock:
    """Lower bounds of `config` in bfloat16 under each plan on `chip`. A hand-over goes over the
    scale-out network, from which all devices of the target receive at once."""

    def in_bfloat16(plan: ServePlan) -> ServePlan:
        return replace(plan, compute_dtype="bfloat16")

    @cache
    def step_s(plan: ServePlan, kind: Kind, width: int) -> float:
        return estimate_serving(config, in_bfloat16(plan), kind, chip, width).step_s

    def handover_s(plan: ServePlan, num_tokens: int) -> float:
        bandwidth = chip.scale_out_bytes_per_s * plan.mesh.num_devices
        return handover_bytes(config, in_bfloat16(plan), num_tokens) / bandwidth

    return Clock(
        source=f"estimated: at least, of {config.name} in bfloat16 on {chip.name}",
        step_s=step_s,
        handover_s=handover_s,
    )


def measured(fleet: Fleet) -> Clock:
    """Medians of this fleet's own programs on this machine, hand-overs at no time."""
    times: dict[tuple[ServePlan, Kind, int], float] = {}
    for worker in fleet.workers:
        plan = worker.step.plan
        for kind, width in product(worker.kinds, plan.widths):
            if (plan, kind, width) not in times:
                times[plan, kind, width] = _median_s(worker, kind, width)
    told = ", ".join(
        f"{kind} {1e3 * seconds:.1f} ms ({plan.mesh}, {width} blocks)"
        for (plan, kind, width), seconds in times.items()
    )
    return Clock(
        source=f"measured: on this machine, {told}",
        step_s=lambda plan, kind, width: times[plan, kind, width],
        handover_s=lambda plan, num_tokens: 0.0,
    )


def _median_s(worker: Worker, kind: Kind, width: int) -> float:
    """Of steps of idle rows, which take as long as any, the first one left out."""
    run = worker.step.prefill if kind == "prefill" else worker.step.decode
    rows, times = idle_rows(worker.step.plan, kind, width), []
    for _ in range(NUM_MEASURED + 1):
        start = time.perf_counter()
        worker.cache, token_B = run(worker.params, worker.cache, rows)
        jax.block_until_ready(token_B)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of a trace: answers in its order, each request's times, and the sums."""

    answers: tuple[tuple[int, ...], ...]
    requests: tuple[Times, ...]
    measures: Measures


def alike(worker: Worker, num: int) -> list[Worker]:
    """This worker, and others that differ in number and cache: as many as `num`, on its devices.

    On a simulated clock nobody waits for another's devices, and a token is the same on any: so one
    compilation is enough for all of them.
    """
    kind, _ = worker.name.rsplit(" ", 1)

    def another(number: int) -> Worker:
        other = copy.copy(worker)
        other.name, other.cache = f"{kind} {number}", jax.tree.map(jnp.copy, worker.cache)
        other.start()
        return other

    return [worker, *map(another, range(1, num))]


class _Simulation:
    def __init__(self, fleet: Fleet, clock: Clock, progress: Callable[[int], None]) -> None:
        self.fleet, self.clock, self.progress = fleet, clock, progress
        self.num_done = 0
        self.now, self.order = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.is_busy: set[str] = set()
        self.times: list[Times] = []
        self.cache = {worker.name: Level() for worker in fleet.workers}
        self.busy_s = {worker.name: 0.0 for worker in fleet.workers}
        self.num_steps = {(w.name, kind): 0 for w in fleet.workers for kind in KINDS}

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), event))

    def run(self) -> None:
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            if not self.events or self.events[0][0] > self.now:  # all that happens now has
                self.wake()
            for worker in self.fleet.workers:
                self.cache[worker.name].set(self.now, worker.used_part)

    def arrive(self, arrival: Arrival) -> None:
        number = self.fleet.submit(arrival.request)
        assert number == len(self.times)
        self.times.append(Times(arrival_s=self.now))

    def wake(self) -> None:
        """Start whatever can start now."""
        if isinstance(self.fleet, Disaggregated):
            for transit in self.fleet.begin_handovers():
                seconds = self.clock.handover_s(transit.target.step.plan, transit.here.num_cached)
                self.at(self.now + seconds, partial(self.fleet.land, transit))
        # Twice, since what one worker preempts may be another's to do.
        for worker in (*self.fleet.living, *self.fleet.living):
            if worker.name in self.is_busy or worker.scheduler.is_idle:
                continue
            if begun := self.fleet.begin(worker):
                kind, rows, _ = begun.work
                seconds = self.clock.step_s(worker.step.plan, kind, rows.table.shape[1])
                self.is_busy.add(worker.name)
                self.busy_s[worker.name] += seconds
                self.num_steps[worker.name, kind] += 1
                self.at(self.now + seconds, partial(self.end, worker, begun))

    def end(self, worker: Worker, begun: Begun) -> None:
        self.is_busy.discard(worker.name)
        for token in self.fleet.finish(worker, begun):
            self.times[token.id].token_s.append(self.now)
            self.num_done += token.is_last
        self.progress(self.num_done)


def simulate(
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    clock: Clock,
    progress: Callable[[int], None] = lambda num_done: None,
) -> Served:
    """Serve a trace until all its requests are done. `fleet` is one that nobody has used since it
    was made or started. `progress` is called after each step with how many requests are done.
    Raises RequestError for a request that it could never serve."""
    if not fleet.is_idle or fleet.requests:
        raise RequestError(
            f"The fleet has taken {len(fleet.requests)} requests already; start() makes it new."
        )
    plans = dict.fromkeys(worker.step.plan for worker in fleet.workers)
    for arrival, plan in product(arrivals, plans):
        arrival.request.check(fleet.config, plan)
    simulation = _Simulation(fleet, clock, progress)
    for arrival in sorted(arrivals, key=lambda arrival: arrival.time_s):
        simulation.at(arrival.time_s, partial(simulation.arrive, arrival))
    simulation.run()
    assert fleet.is_idle, "somebody was never served"
    until = simulation.now
    uses = [
        WorkerUse(
            name=worker.name,
            busy=simulation.busy_s[worker.name] / until if until else 0.0,
            cache_mean=simulation.cache[worker.name].mean(until),
            cache_peak=simulation.cache[worker.name].peak,
            num_prefills=simulation.num_steps[worker.name, "prefill"],
            num_decodes=simulation.num_steps[worker.name, "decode"],
        )
        for worker in fleet.workers
    ]
    return Served(
        answers=tuple(fleet.answer(number) for number in range(len(fleet.requests))),
        requests=tuple(simulation.times),
        measures=Measures.of(
            simulation.times,
            uses,
            num_preempted=fleet.num_preempted,
            handover_bytes=fleet.handover_bytes,
        ),
    )
