"""What `jaxpar schedule` does between its options and its output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxpar.errors import ScheduleError, did_you_mean, require_positive
from jaxpar.report.text import literal, plain_table
from jaxpar.strategies.pipeline import drawing
from jaxpar.strategies.pipeline.builders import BUILDERS, build
from jaxpar.strategies.pipeline.schedule import Schedule
from jaxpar.strategies.pipeline.simulate import (
    Simulation,
    Times,
    forward_slots,
    gradient_slots,
    peak_in_flight,
    simulate,
    useful_messages,
)
from jaxpar.strategies.pipeline.stash import gradient_stash, input_stash
from jaxpar.strategies.pipeline.tables import read_csv, to_csv

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULTS = {"num_stages": 4, "num_microbatches": 8, "num_virtual_stages": 1}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one `jaxpar schedule`; None where they were not given."""

    what: str
    num_stages: int | None = None
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None
    phased: bool = False
    forward: float = 1.0
    backward: float | None = None
    input_gradient: float | None = None
    weight_gradient: float | None = None
    send: float = 0.0
    width: int = 160


@dataclass(kw_only=True)
class Answer:
    """What is printed, in order, and what goes to each file that is asked for."""

    shown: list[RenderableType]
    data: dict[str, Any]
    csv: str
    simulations: tuple[Simulation, Simulation]

    @property
    def svg(self) -> str:
        """Raises ScheduleError for a table too large to be drawn."""
        return drawing.svg(self.simulations)


def answer(request: Request) -> Answer:
    """The table, drawn, and what it costs. ScheduleError for bad input of any kind."""
    times = _times(request)
    schedule = _schedule(request)
    simulations = (simulate(schedule, times), simulate(schedule, times, lock_step=True))
    data = _data(schedule, times, simulations)
    return Answer(
        shown=list(_told(schedule, data, request.width)),
        data=data,
        csv=to_csv(schedule),
        simulations=simulations,
    )


def _times(request: Request) -> Times:
    halves = (request.input_gradient, request.weight_gradient)
    if request.backward is not None:
        if halves != (None, None):
            raise ScheduleError(
                "--backward is the sum of --input-gradient and --weight-gradient. Give either "
                "--backward, half of which each of them then is, or these two."
            )
        require_positive(ScheduleError, "--backward", request.backward, 2.0)
        halves = (request.backward / 2, request.backward / 2)
    input_gradient, weight_gradient = (1.0 if half is None else half for half in halves)
    return Times(
        forward=request.forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        send=request.send,
    )


def _schedule(request: Request) -> Schedule:
    sizes = {field: getattr(request, field) for field in DEFAULTS}
    if request.what in BUILDERS:
        return build(
            request.what,
            phased=request.phased,
            **{
                field: DEFAULTS[field] if given is None else given for field, given in sizes.items()
            },
        )
    path = Path(request.what)
    if path.suffix.lower() != ".csv":
        raise ScheduleError(
            f"There is no schedule {request.what!r}. {did_you_mean(request.what, BUILDERS)} "
            "A table of your own is a file that ends in .csv."
        )
    if request.phased:
        raise ScheduleError(
            f"--phased chooses a form of a published schedule, and {path} is a table already. Put "
            "a forward and a backward into its cells instead: F3 B0."
        )
    return read_csv(path, **sizes)


def _data(
    schedule: Schedule, times: Times, simulations: tuple[Simulation, Simulation]
) -> dict[str, Any]:
    machines = (
        {"makespan": one.makespan, "bubble": one.bubble, "bubble_time": one.bubble_time}
        for one in simulations
    )
    asynchronous, lock_step = machines
    return {
        "schema": "jaxpar.schedule/1",
        "schedule": {
            "name": schedule.name,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "num_virtual_stages": schedule.num_virtual_stages,
            "phased": schedule.is_phased,
            "slots": [[" ".join(map(str, cell)) for cell in slot] for slot in schedule.slots],
        },
        "times": asdict(times),
        "work": simulations[0].work,
        "asynchronous": asynchronous,
        "lock_step": lock_step,
        "peak_in_flight": list(peak_in_flight(schedule)),
        "stash": {
            "inputs": input_stash(schedule).num_places,
            "gradients": gradient_stash(schedule).num_places,
        },
        "messages": {
            "useful": list(useful_messages(schedule)),
            "forward_slots": len(forward_slots(schedule)),
            "gradient_slots": len(gradient_slots(schedule)),
        },
    }


def _told(schedule: Schedule, data: dict[str, Any], width: int) -> list[RenderableType]:
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_virtual_stages
    head = (
        f"{schedule.name}: {_counted(p, 'stage')}, {_counted(m, 'micro-batch')}, "
        f"{_counted(v, 'chunk')} per stage, {_counted(schedule.num_slots, 'slot')}\n"
    )
    try:
        picture = drawing.text(schedule, width)
    except ScheduleError as error:
        picture = f"{error}\n"
    stash, messages = data["stash"], data["messages"]
    in_flight = ", ".join(f"{peak:.4g}" for peak in data["peak_in_flight"])
    useful = ", ".join(map(str, messages["useful"]))
    figures = (
        f"in flight at most    {in_flight} micro-batches, by stage\n"
        f"stash per device     {stash['inputs']} inputs, {stash['gradients']} gradients, each of "
        "one chunk\n"
        f"messages needed      {useful} by stage and direction\n"
        f"slots with messages  {messages['forward_slots']} forward, "
        f"{messages['gradient_slots']} backward"
    )
    return [literal(head), literal(picture), _machines(data), literal(figures)]


def _counted(number: int, noun: str) -> str:
    many = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{many if number != 1 else ''}"


def _machines(data: dict[str, Any]) -> Table:
    times = data["times"]
    title = (
        f"forward {times['forward']:.4g}, backward {times['input_gradient']:.4g} + "
        f"{times['weight_gradient']:.4g}, send {times['send']:.4g}"
    )
    table = plain_table(title, ["machine"], ["makespan", "work", "idle", "bubble"], [])
    for name in ("asynchronous", "lock_step"):
        one = data[name]
        table.add_row(
            name.replace("_", "-"),
            f"{one['makespan']:.6g}",
            f"{data['work']:.6g}",
            f"{one['bubble_time']:.6g}",
            f"{one['bubble']:.1%}",
        )
    return table
