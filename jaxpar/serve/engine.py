"""Serving requests that come and go: the scheduler's steps, run on the devices of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxpar.errors import RequestError, shown
from jaxpar.model.transformer import Params
from jaxpar.serve.plan import Kind
from jaxpar.serve.scheduler import Admission, Arrivals, NewToken, Request, Scheduler, Sequence
from jaxpar.serve.step import ServeStep


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one step of an engine did.

    tokens: of answers, as they were chosen. num_prefilled, num_decoded: tokens that went through
    the model. num_running, num_waiting, used_blocks: after it. num_preempted: in it.
    """

    tokens: tuple[NewToken, ...]
    num_prefilled: int
    num_decoded: int
    num_running: int
    num_waiting: int
    used_blocks: int
    num_preempted: int


class Engine:
    """Continuous batching on one mesh. `params` are those of `step.place` or `step.init_params`.

    Requests may be submitted at any time; each `step()` runs at most one prefill and one decode
    program, and returns the tokens that they chose.
    """

    def __init__(
        self, step: ServeStep, params: Params, *, admission: Admission = "preempt"
    ) -> None:
        self.program, self.params = step, params
        self.scheduler = Scheduler(step.config, step.plan, admission=admission)
        self.cache = step.init_cache()
        self.sequences: dict[int, Sequence] = {}

    def submit(self, request: Request) -> int:
        """Take a request; its number. Raises RequestError for one that could never be served."""
        sequence = self.scheduler.submit(request)
        self.sequences[sequence.id] = sequence
        return sequence.id

    def answer(self, number: int) -> tuple[int, ...]:
        """The tokens chosen so far. Raises RequestError for a number that `submit` never gave."""
        if number not in self.sequences:
            raise RequestError(
                f"There is no request {shown(number)}; {len(self.sequences)} were submitted."
            )
        return self.sequences[number].answer

    def step(self) -> Report:
        """A chunk of those with prompts left, then a token of everybody who is as far."""
        scheduler = self.scheduler
        num_preempted = scheduler.num_preempted
        tokens: list[NewToken] = []
        num_tokens: dict[Kind, int] = {"prefill": 0, "decode": 0}
        for find_work in (scheduler.prefill, scheduler.decode):
            work = find_work()
            if work is None:
                continue
            run = self.program.prefill if work.kind == "prefill" else self.program.decode
            self.cache, chosen = run(self.params, self.cache, work.rows)
            tokens += scheduler.finish(work, np.asarray(chosen))
            num_tokens[work.kind] = sum(part.num_tokens for part in work.parts)
        return Report(
            tokens=tuple(tokens),
            num_prefilled=num_tokens["prefill"],
            num_decoded=num_tokens["decode"],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            used_blocks=scheduler.used_blocks,
            num_preempted=scheduler.num_preempted - num_preempted,
        )

    def run(
        self, arrivals: Iterable[tuple[int, Request]]
    ) -> tuple[list[tuple[int, ...]], list[Report]]:
        """Serve requests until all are done: answers in the order given, and all steps' reports.

        arrivals: (number of the step before which it comes, request), in any order.
        """
        coming = Arrivals(arrivals)
        for _, request in coming.given:
            request.check(self.program.config, self.program.plan)
        numbers: dict[int, int] = {}
        reports: list[Report] = []
        while coming or not self.scheduler.is_idle:
            numbers |= {i: self.submit(request) for i, request in coming.due(len(reports))}
            reports.append(self.step())
        return [self.answer(number) for _, number in sorted(numbers.items())], reports
