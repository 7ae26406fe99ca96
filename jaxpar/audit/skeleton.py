"""Executes the control of a module, for all devices at once: exact counts where data has no say.

The branches of a pipeline depend on the device and on a loop counter, both of which are known
without running anything on data. So the few small values that decide loops and branches are
computed here with NumPy, and who runs what is counted on the way. A condition that data decides
stays undecided, and says what it depends on; everything else is counted all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import Count, Execution, Undecided, callers_first, calls_of
from jaxpar.audit.plan import Stop
from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.runner import Closed, Counts, Event, Runner
from jaxpar.audit.slicing import Slice
from jaxpar.audit.values import Machine, Undecidable
from jaxpar.errors import AuditError

COMMUNICATING = (" all-", " collective-", " ragged-", " reduce-scatter", " send(", " recv(")
"""What the text of a computation that communicates contains."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """What executing the control of a module told.

    `counts` are the executions of a computation on each device, [num_devices] (one entry for all
    where their number is not known), for every computation on the way to communication that was
    decided; `bounds` the least and most on any device, also of what was not. `events` are the runs
    of the communicating computations in program order, each before those it calls, up to the first
    that is not certain or to a maximum; `events_end` then says why they end, else it is None.
    All empty where there was nothing to decide.
    """

    counts: Mapping[str, Counts] = field(default_factory=dict)
    bounds: Mapping[str, Count] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    events_end: str | None = None
    undecided: tuple[Undecided, ...] = ()


def decided(
    module: Module, flow: Dataflow, runs: Execution, *, num_devices: int | None
) -> Execution:
    """`runs` with the counts that executing the control of the module makes exact."""
    if not runs.unknown_loops and not _branches(flow):
        return runs
    homes = [home.name for home in module.active if any(map(home.mentions, COMMUNICATING))]
    skeleton = decide(module, flow, runs, homes, num_devices=num_devices)
    if not skeleton.bounds:
        return replace(runs, undecided=skeleton.undecided)
    open_loops = {id(undecided.instruction) for undecided in skeleton.undecided}
    unknown = []
    for loop in runs.unknown_loops:
        count = skeleton.bounds.get(dict(loop.called).get("body", ""), None)
        if count is None or count.high is None or id(loop) in open_loops:
            unknown.append(loop)
    return replace(
        runs,
        counts={**runs.counts, **skeleton.bounds},
        unknown_loops=tuple(unknown),
        undecided=skeleton.undecided,
        device_counts={
            name: counts
            for name, counts in skeleton.counts.items()
            if len(counts) == num_devices and skeleton.bounds[name].exact is None
        },
    )


def decide(
    module: Module,
    flow: Dataflow,
    runs: Execution,
    homes: Collection[str],
    *,
    num_devices: int | None,
) -> Skeleton:
    """Executes what decides how often the computations `homes` run, on every device.

    Returns at once when loops and branches that `runs` could not decide do not lead to any of
    them. What cannot be decided, also because the text is damaged, is in `undecided`.
    """
    above = flow.above(homes) & runs.counts.keys()
    if module.entry is None or not _asks(flow, runs, above):
        return Skeleton()
    order = [found for found in callers_first(module, [module.entry.name]) if found.name in above]
    closed, open_, questions = _sorted_in(flow, order, above)
    if not questions:
        return Skeleton()
    machine = Machine(module=module, num_devices=num_devices or 1)
    try:
        plans = Slice(flow, machine, above, open_).plans()
        runner = Runner(plans, machine, homes=set(homes), above=above, closed=closed)
        runner.run(module.entry.name)
    except (Stop, Undecidable, AuditError) as why:
        undecided = tuple(Undecided(instruction=found, reason=str(why)) for found in questions)
        return Skeleton(undecided=undecided)
    return _outcome(runner)


def _outcome(runner: Runner) -> Skeleton:
    exact: dict[str, Counts] = {}
    bounds: dict[str, Count] = {}
    for name, low in runner.low.items():
        high = None if name in runner.unbounded else int(np.max(runner.high[name]))
        bounds[name] = Count(low=int(np.min(low)), high=high)
        if high is not None and np.array_equal(low, runner.high[name]):
            exact[name] = low
    return Skeleton(
        counts=exact,
        bounds=bounds,
        events=tuple(runner.events),
        events_end=runner.events_end,
        undecided=tuple(runner.undecided.values()),
    )


def _branches(flow: Dataflow) -> bool:
    return any(
        found.opcode == "conditional" for sites in flow.callers.values() for _, found in sites
    )


def _asks(flow: Dataflow, runs: Execution, above: set[str]) -> bool:
    """Whether a conditional or a loop with unknown trips leads to communication."""
    unknown = {id(loop) for loop in runs.unknown_loops}
    return any(
        found.opcode == "conditional" or id(found) in unknown
        for name in above
        for _, found in flow.callers.get(name, [])
    )


def _sorted_in(
    flow: Dataflow, order: Sequence[Computation], above: set[str]
) -> tuple[Closed, set[str], list[Instruction]]:
    """(what closed computations call and how often, callers first; open ones; what opens them).

    Open are those with a call that runs an unknown number of times, and what calls them.
    """
    open_: set[str] = set()
    questions: list[Instruction] = []
    closed: dict[str, Sequence[tuple[str, int]]] = {}
    for computation in reversed(order):
        num_questions = len(questions)
        calls: list[tuple[str, int]] = []
        for found in computation.calling:
            for name, times in calls_of(found, computation, flow, []):
                if name not in above:
                    continue
                if times.exact is None and (not questions or questions[-1] is not found):
                    questions.append(found)
                calls.append((name, times.low))
        if len(questions) > num_questions or any(name in open_ for name, _ in calls):
            open_.add(computation.name)
        else:
            closed[computation.name] = calls
    return dict(reversed(list(closed.items()))), open_, questions
