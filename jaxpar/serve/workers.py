"""Workers: parts of the devices that serve on their own, and fleets of them.

Every worker has a mesh of its own over devices of its own, programs compiled for these, a cache and
a scheduler. So nothing waits for anything of another worker: one runs a long prefill while another
decodes, and one that is lost takes nothing with it but its own cache.

A request has a number in its fleet. Which tokens it gets is a function of the parameters and of the
request alone, so it can go on anywhere from what has been answered so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpar.audit.source import audit
from jaxpar.errors import (
    LostError,
    PlanError,
    RequestError,
    did_you_mean,
    require_choice,
)
from jaxpar.mesh import MeshSpec, use_cpu_devices
from jaxpar.model.config import ModelConfig
from jaxpar.model.transformer import Params
from jaxpar.serve import scheduler as scheduling
from jaxpar.serve.independence import Compiled
from jaxpar.serve.plan import KINDS, Kind, ServePlan
from jaxpar.serve.scheduler import Admission, NewToken, Request, Scheduler, Work
from jaxpar.serve.step import ServeStep


@dataclass(frozen=True, kw_only=True)
class StepOn(ServeStep):
    """A ServeStep on devices of its choice, as many as its mesh has, in the mesh's order."""

    devices: tuple[Any, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.devices)) != self.plan.mesh.num_devices:
            raise PlanError(
                f"devices names {len(set(self.devices))} different devices, and mesh "
                f"{self.plan.mesh} has {self.plan.mesh.num_devices}."
            )

    @cached_property
    def mesh(self) -> Mesh:
        return self.plan.mesh.over(self.devices)


def cut(meshes: Sequence[MeshSpec], devices: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    """Consecutive devices for each mesh: of `devices`, or of those that JAX finds (CPU: makes).

    Raises PlanError where there are too few, or where meshes are of several platforms.
    """
    need = sum(mesh.num_devices for mesh in meshes)
    if devices is None:
        platforms = sorted({mesh.platform for mesh in meshes})
        if len(platforms) != 1:
            raise PlanError(f"Workers are on one platform, and these are on {platforms}.")
        if platforms == ["cpu"]:
            use_cpu_devices(need)
        devices = jax.devices(platforms[0])
    if len(set(devices)) < need:
        told = " + ".join(str(mesh.num_devices) for mesh in meshes)
        raise PlanError(
            f"Workers need {told} = {need} devices, each its own, and {len(set(devices))} are "
            f"there. Take fewer workers, or smaller meshes."
        )
    parts, first = [], 0
    for mesh in meshes:
        parts.append(tuple(devices[first : first + mesh.num_devices]))
        first += mesh.num_devices
    return parts


class StaticScheduler(Scheduler):
    """Whole batches: those who wait are let in when the last of those before them has ended.

    What continuous batching is measured against.
    """

    def admit(self) -> None:
        if not self.running:
            super().admit()


Batching = Literal["continuous", "static"]

BATCHINGS: Mapping[str, type[Scheduler]] = MappingProxyType(
    {"continuous": Scheduler, "static": StaticScheduler}
)


class Begun(NamedTuple):
    """A program that was started: what it works on, and the tokens that it will have chosen."""

    work: Work
    token_B: Array


class Worker:
    """One mesh that serves: runs one program at a time, prefill and decode in turn.

    name: what people read. kinds: the programs that it runs. `take` what it shall do, then `begin`
    and `finish` by turns; between the two, the devices compute and others can be begun.
    """

    def __init__(
        self,
        name: str,
        step: ServeStep,
        params: Params,
        kinds: tuple[Kind, ...] = KINDS,
    ) -> None:
        self.name, self.step, self.params, self.kinds = name, step, params, kinds
        self.cache = step.init_cache()
        self.start()

    def start(self, *, admission: Admission = "preempt", batching: Batching = "continuous") -> None:
        """As new: nothing to do, every block free. Compiled programs stay."""
        require_choice(RequestError, "batching", batching, BATCHINGS)
        self.scheduler = BATCHINGS[batching](self.step.config, self.step.plan, admission=admission)
        self._last = self.kinds[-1]
        self.is_lost = False

    @property
    def devices(self) -> tuple[Any, ...]:
        """In the order of the mesh, and so of the program's groups."""
        return tuple(self.step.mesh.devices.flat)

    @property
    def sequences(self) -> list[scheduling.Sequence]:
        """All that are here, waiting or running."""
        return [*self.scheduler.waiting, *self.scheduler.running]

    @property
    def load(self) -> int:
        """Tokens that its programs still have to compute, at most."""
        total = 0
        for sequence in self.sequences:
            if "prefill" in self.kinds:
                total += max(0, sequence.num_left - 1)
            if "decode" in self.kinds:
                total += sequence.request.max_new_tokens - len(sequence.answer)
        return total

    @property
    def used_part(self) -> float:
        """Of its blocks, those that somebody has."""
        num_blocks = sum(pool.num_blocks for pool in self.scheduler.pools)
        return self.scheduler.used_blocks / num_blocks

    def take(self, sequence: scheduling.Sequence, *, first: bool = False) -> None:
        """Put a sequence in line, or first in line."""
        waiting = self.scheduler.waiting
        (waiting.appendleft if first else waiting.append)(sequence)

    def begin(self) -> Begun | None:
        """Start the next program, without waiting for it; None where there is nothing to do."""
        order = sorted(self.kinds, key=lambda kind: kind == self._last)
        for kind in order:
            work = self.scheduler.prefill() if kind == "prefill" else self.scheduler.decode()
            if work is not None:
                self._last = kind
                run = self.step.prefill if kind == "prefill" else self.step.decode
                self.cache, token_B = run(self.params, self.cache, work.rows)
                return Begun(work, token_B)
        return None

    def finish(self, begun: Begun) -> list[NewToken]:
        """The tokens that it chose, of whom it is the turn."""
        return self.scheduler.finish(begun.work, np.asarray(begun.token_B))

    def compiled(self) -> list[Compiled]:
        """Its programs' audits, and the devices that the programs themselves say they use."""
        found = []
        for kind, width in product(self.kinds, self.step.plan.widths):
            program = self.step.compiled(kind, width)
            shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
            used = set().union(*(sharding.device_set for sharding in shardings))
            # Groups count devices by their place in the mesh; any other one stands behind.
            others = sorted(used - set(self.devices), key=lambda device: device.id)
            found.append(
                Compiled(
                    name=f"{self.name}, {kind} with {width} blocks",
                    audit=audit(program, mesh=self.step.plan.mesh.all_axes),
                    devices=(*self.devices, *others),
                )
            )
        return found


class Fleet(ABC):
    """Workers with one front: requests by number, their answers, and what becomes of lost ones.

    Subclasses say where a sequence goes (`_send`).
    """

    def __init__(self, config: ModelConfig, workers: Sequence[Worker]) -> None:
        self.config, self.workers = config, list(workers)

    def start(self, *, admission: Admission = "preempt", batching: Batching = "continuous") -> None:
        """As new: no request, nobody lost, every block free. Compiled programs stay."""
        for worker in self.workers:
            worker.start(admission=admission, batching=batching)
        self.is_stuck = False  # whether the last step had nothing to do
        self.requests: list[Request] = []
        self.failed: dict[int, str] = {}
        self._answers: list[list[int]] = []
        self._unfinished: set[int] = set()

    # --- to be said by subclasses --------------------------------------------------------------

    @abstractmethod
    def _send(self, sequence: scheduling.Sequence, *, first: bool) -> None:
        """Give a sequence to a worker. Raises LostError where there is none."""

    def _abandon(self, worker: Worker) -> list[scheduling.Sequence]:
        """The sequences of a lost worker, that others have to compute again."""
        return worker.sequences

    # --- using it ------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._unfinished

    @property
    def num_preempted(self) -> int:
        """How often a sequence lost its blocks, and was computed again."""
        return sum(worker.scheduler.num_preempted for worker in self.workers)

    @property
    def handover_bytes(self) -> int:
        """That were sent from worker to worker."""
        return 0

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_lost]

    def submit(self, request: Request) -> int:
        """Take a request; its number. Raises RequestError for one that could never be served, and
        LostError where no worker is left that could."""
        for worker in self.workers:
            request.check(self.config, worker.step.plan)
        number = len(self.requests)
        sequence = scheduling.Sequence(id=number, request=request, tokens=list(request.prompt))
        self._send(sequence, first=False)
        self.requests.append(request)
        self._answers.append([])
        self._unfinished.add(number)
        return number

    def answer(self, number: int) -> tuple[int, ...]:
        """The tokens chosen so far. Raises LostError for a request that cannot go on."""
        if not 0 <= number < len(self.requests):
            raise RequestError(
                f"There is no request {number}; {len(self.requests)} were submitted, from 0 on."
            )
        if number in self.failed:
            raise LostError(
                f"Request {number} cannot go on after {len(self._answers[number])} of at most "
                f"{self.requests[number].max_new_tokens} tokens: {self.failed[number]}"
            )
        return tuple(self._answers[number])

    def begin(self, worker: Worker) -> Begun | None:
        """Start the worker's next program, if it has anything to do."""
        return None if worker.is_lost else worker.begin()

    def finish(self, worker: Worker, begun: Begun) -> list[NewToken]:
        """What the program chose; nothing where the worker was lost meanwhile."""
        if worker.is_lost:
            return []
        found = [token for token in worker.finish(begun) if token.id in self._unfinished]
        for token in found:
            self._answers[token.id].append(token.token)
            if token.is_last:
                self._unfinished.discard(token.id)
        return found

    def step(self) -> list[NewToken]:
        """One program of each worker that has something to do, all at the same time."""
        begun = [(worker, self.begin(worker)) for worker in self.workers]
        self.is_stuck = not any(one for _, one in begun)
        found: list[NewToken] = []
        for worker, one in begun:
            if one is not None:
                found += self.finish(worker, one)
        return found

    def run(self, arrivals: Iterable[tuple[int, Request]]) -> list[tuple[int, ...]]:
        """Serve requests until all are done: their answers, in the order given.

        arrivals: (number of the step before which it comes, request), in any order. Raises
        LostError for one that cannot go on.
        """
        coming = scheduling.Arrivals(arrivals)
        numbers: dict[int, int] = {}
        num_steps = 0
        while coming or not self.is_idle:
            numbers |= {i: self.submit(request) for i, request in coming.due(num_steps)}
            self.step()
            assert coming or not self.is_stuck or self.is_idle, "nobody can go on"
            num_steps += 1
        return [self.answer(number) for _, number in sorted(numbers.items())]

    def lose(self, name: str) -> None:
        """Go on without this worker: its sequences are computed again elsewhere, from their prompts
        and what was answered; where nobody is left for one, it has failed."""
        known = {worker.name: worker for worker in self.living}
        if name not in known:
            raise RequestError(f"There is no worker {name!r}. {did_you_mean(name, known)}")
        worker = known[name]
        worker.is_lost = True
        for sequence in sorted(self._abandon(worker), key=lambda s: s.id, reverse=True):
            self._again(sequence)

    def _again(self, sequence: scheduling.Sequence) -> None:
        """Let it be computed from its tokens, first in line; or tell that it has failed."""
        try:
            self._send(sequence.without_place(), first=True)
        except LostError as error:
            self._fail(sequence.id, str(error))

    def _fail(self, number: int, why: str) -> None:
        self.failed[number] = why
        self._unfinished.discard(number)


def make_workers(
    config: ModelConfig,
    params: Params,
    named: Sequence[tuple[str, ServePlan, tuple[Kind, ...]]],
    devices: Sequence[Any] | None,
) -> list[Worker]:
    """Workers of these names, plans and kinds, on consecutive devices. params: whole ones."""
    parts = cut([plan.mesh for _, plan, _ in named], devices)
    workers = []
    for (name, plan, kinds), part in zip(named, parts, strict=True):
        step = StepOn(config=config, plan=plan, devices=part)
        workers.append(Worker(name, step, step.place(params), kinds))
    return workers
