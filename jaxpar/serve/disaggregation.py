"""Prefill and decode on meshes of their own, of different shape, and what goes between them.

A request goes to the prefill worker with the least to do. Once all tokens of its prompt but the
last chosen one are in the cache there, it is ready: its blocks are handed over (handover.py) to the
decode worker with the least to do, which chooses all further tokens. So a long prompt holds up no
answer, not even for a chunk, and each side has the mesh that suits it: prefill splits matmuls over
many devices, decode fewer, so that each step's small reductions join fewer.

A pool that is full pushes back: without a slot and blocks on the other side a ready sequence waits
where it is, and keeps its blocks; then no new prompt is let in there, and requests wait in line.
A sequence that a decode worker preempts has lost its blocks and goes first in line for prefill,
with what was answered so far as a part of its prompt.

A worker that is lost loses its cache alone: sequences there are computed again from their tokens.
Without any prefill worker those that have to be computed fail by name, and those that were handed
over go on; without any decode worker all fail.

Sources: Zhong et al. 2024 (DistServe); Patel et al. 2024 (Splitwise).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import LostError, PlanError, require_positive, require_whole
from jaxpar.model.config import ModelConfig
from jaxpar.model.transformer import Params
from jaxpar.serve import scheduler as scheduling
from jaxpar.serve.handover import Handover, Moved, check, handover_bytes
from jaxpar.serve.plan import KINDS, Kind, ServePlan
from jaxpar.serve.pool import blocks_of
from jaxpar.serve.router import Router, Routing
from jaxpar.serve.scheduler import Admission, NewToken, Request
from jaxpar.serve.step import ServeStep
from jaxpar.serve.workers import Begun, Fleet, Worker, make_workers


@dataclass(kw_only=True)
class Transit:
    """A hand-over under way: both sides hold blocks for it, and neither works on it.

    here: the sequence as the prefill worker has it, there: as the decode worker will.
    num_bytes: what will arrive, by the closed form.
    """

    source: Worker
    target: Worker
    here: scheduling.Sequence
    there: scheduling.Sequence
    num_bytes: int


class Disaggregated(Fleet):
    """Workers "prefill 0", ... under `prefill` and "decode 0", ... under `decode`.

    params: whole float32 ones. devices: consecutive ones, prefill first; None for those that JAX
    finds. Raises PlanError for plans between which nothing can be handed over.

    moved: bytes and pieces that were sent so far. num_held_back: how often a ready sequence found
    no room on the decode side. num_again: sequences that decode workers sent back.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        prefill: ServePlan,
        decode: ServePlan,
        num_prefill: int = 1,
        num_decode: int = 1,
        devices: Sequence[Any] | None = None,
        admission: Admission = "preempt",
        routing: Routing = "load",
    ) -> None:
        named: list[tuple[str, ServePlan, tuple[Kind, ...]]] = []
        kinds: tuple[tuple[Kind, ServePlan, int], ...] = (
            ("prefill", prefill, num_prefill),
            ("decode", decode, num_decode),
        )
        for kind, plan, num in kinds:
            require_whole(PlanError, f"num_{kind}", num)
            named += [(f"{kind} {i}", plan, (kind,)) for i in range(num)]
        check(config, prefill, decode)
        self.routing: Routing = routing
        self._handovers: dict[tuple[ServeStep, ServeStep], Handover] = {}
        super().__init__(config, make_workers(config, params, named, devices))
        self.start(admission=admission)

    def start(self, **options: Any) -> None:
        super().start(**options)
        self.routers = {kind: Router(self.routing) for kind in KINDS}
        self.transits: dict[int, Transit] = {}
        self.moved = Moved()
        self.num_held_back = self.num_again = 0

    @property
    def num_preempted(self) -> int:
        return self.num_again

    @property
    def handover_bytes(self) -> int:
        return self.moved.num_bytes

    def of(self, kind: Kind) -> list[Worker]:
        """The living workers of a pool."""
        return [worker for worker in self.living if worker.kinds == (kind,)]

    # --- where sequences go ------------------------------------------------------------------

    def _send(self, sequence: scheduling.Sequence, *, first: bool) -> None:
        for kind in self.routers:
            if not self.of(kind):
                raise LostError(f"all {kind} workers are lost.")
        loads = {worker.name: worker.load for worker in self.of("prefill")}
        name = self.routers["prefill"].choose(loads)
        next(w for w in self.living if w.name == name).take(sequence, first=first)

    def ready(self) -> list[tuple[Worker, scheduling.Sequence]]:
        """Sequences on prefill workers that have nothing left to do there, oldest request first."""
        found = [
            (worker, sequence)
            for worker in self.of("prefill")
            for sequence in worker.scheduler.running
            if sequence.num_left == 1 and sequence.id not in self.transits
        ]
        return sorted(found, key=lambda one: one[1].id)

    def begin_handovers(self) -> list[Transit]:
        """Reserve slots and blocks on decode workers for all that are ready, as far as there are
        any. Nobody overtakes: the oldest one that finds no room keeps the others waiting."""
        begun = []
        for source, here in self.ready():
            there = here.without_place()
            target = self._room_for(there)
            if target is None:
                self.num_held_back += 1
                break
            num_bytes = handover_bytes(self.config, target.step.plan, here.num_cached)
            transit = Transit(
                source=source, target=target, here=here, there=there, num_bytes=num_bytes
            )
            self.transits[here.id] = transit
            begun.append(transit)
        return begun

    def _room_for(self, sequence: scheduling.Sequence) -> Worker | None:
        """The decode worker with the least to do that has let it in; None where all are full."""
        left = {worker.name: worker for worker in self.of("decode")}
        router = self.routers["decode"]
        while left:
            name = router.choose({name: worker.load for name, worker in left.items()})
            scheduler = left[name].scheduler
            scheduler.waiting.append(sequence)
            scheduler.admit()
            if sequence.shard >= 0:
                return left[name]
            scheduler.waiting.remove(sequence)
            router.num_given[name] -= 1
            del left[name]
        return None

    def land(self, transit: Transit) -> bool:
        """Carry the hand-over out. False where it was called off meanwhile."""
        if self.transits.get(transit.here.id) is not transit:
            return False
        del self.transits[transit.here.id]
        source, target = transit.source, transit.target
        num = blocks_of(transit.here.num_cached, source.step.plan.block_len)
        if num:
            steps = source.step, target.step
            if steps not in self._handovers:
                self._handovers[steps] = Handover(*steps)
            target.cache, moved = self._handovers[steps](
                source.cache, transit.here.blocks[:num], target.cache, transit.there.blocks[:num]
            )
            assert moved.num_bytes == transit.num_bytes, (moved, transit.num_bytes)
            self.moved += moved
        transit.there.num_cached = transit.here.num_cached
        _remove(source, transit.here)
        return True

    # --- between programs --------------------------------------------------------------------

    def begin(self, worker: Worker) -> Begun | None:
        begun = super().begin(worker)
        self._take_back(worker)
        return begun

    def step(self) -> list[NewToken]:
        found = super().step()
        for transit in self.begin_handovers():
            self.is_stuck = not self.land(transit) and self.is_stuck
        return found

    def _take_back(self, worker: Worker) -> None:
        """What a decode worker has preempted is computed again, oldest request first in line."""
        if worker.kinds != ("decode",):
            return
        waiting = worker.scheduler.waiting
        again = sorted(waiting, key=lambda sequence: sequence.id, reverse=True)
        waiting.clear()
        for sequence in again:
            if self.transits.pop(sequence.id, None) is None:  # else: it still is where it came from
                self.num_again += 1
                self._again(sequence)

    def _abandon(self, worker: Worker) -> list[scheduling.Sequence]:
        for number, transit in list(self.transits.items()):
            if worker is transit.source:
                del self.transits[number]
                _remove(transit.target, transit.there)
            elif worker is transit.target:
                del self.transits[number]
                _remove(worker, transit.there)
        return worker.sequences

    def lose(self, name: str) -> None:
        super().lose(name)
        if not self.of("decode"):
            for number in sorted(self._unfinished):
                self._fail(number, "all decode workers are lost.")


def _remove(worker: Worker, sequence: scheduling.Sequence) -> None:
    """Give back what a running sequence has there."""
    worker.scheduler.preempt(sequence)
    worker.scheduler.waiting.remove(sequence)


# --- how large the pools should be -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Workers of each pool, and what part of its time each is busy with the load: above 1 it
    cannot keep up, and requests wait ever longer."""

    num_prefill: int
    num_decode: int
    prefill_busy: float
    decode_busy: float

    @property
    def requests_per_s(self) -> float:
        """That the two pools together can serve, as a multiple of the load."""
        return 1 / max(self.prefill_busy, self.decode_busy)


def size_pools(
    requests: Sequence[Request],
    requests_per_s: float,
    *,
    prefill: ServePlan,
    decode: ServePlan,
    prefill_s: float,
    decode_s: float,
    num_devices: int,
) -> Sizes:
    """How many workers of each plan to make out of `num_devices`, for a load like `requests`.

    prefill_s, decode_s: seconds of one step. A prefill worker takes a request's prompt in rows of
    `chunk_len`, `num_prefill_rows` of them in a step; a decode worker extends `num_slots` sequences
    in a step, or as many as its blocks hold. The pools are chosen so that the busier one is as
    little busy as can be; of equals, with the fewest devices. Raises PlanError where not even one
    worker of each fits.
    """
    for name, value in (("prefill_s", prefill_s), ("decode_s", decode_s),
                        ("requests_per_s", requests_per_s)):  # fmt: skip
        require_positive(PlanError, name, value, 0.01)
    if not requests:
        raise PlanError("requests=[] says nothing about the load. Give those of a trace.")
    here, there = prefill.mesh.num_devices, decode.mesh.num_devices
    if here + there > num_devices:
        raise PlanError(
            f"num_devices={num_devices}: one prefill worker takes {here} and one decode worker "
            f"{there}. Nearest num_devices: {here + there}."
        )
    num = len(requests)
    rows = sum(math.ceil(len(r.prompt) / prefill.chunk_len) for r in requests) / num
    answered = sum(r.max_new_tokens for r in requests) / num
    places = sum(blocks_of(r.max_len, decode.block_len) for r in requests) / num
    together = min(decode.num_slots, decode.blocks_per_shard * decode.num_batch_shards / places)
    prefill_work = requests_per_s * rows / prefill.num_rows("prefill") * prefill_s
    decode_work = requests_per_s * answered / together * decode_s
    choices = []
    for num_prefill in range(1, (num_devices - there) // here + 1):
        for num_decode in range(1, (num_devices - num_prefill * here) // there + 1):
            found = Sizes(
                num_prefill=num_prefill,
                num_decode=num_decode,
                prefill_busy=prefill_work / num_prefill,
                decode_busy=decode_work / num_decode,
            )
            devices = num_prefill * here + num_decode * there
            choices.append(
                (max(found.prefill_busy, found.decode_busy), devices, num_prefill, found)
            )
    return min(choices, key=lambda choice: choice[:3])[-1]
