"""A schedule as a picture: its table as text, and its simulation on a clock as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from jaxpar.errors import ScheduleError
from jaxpar.strategies.pipeline.schedule import Action, Kind, Schedule, backward_of, forward_of
from jaxpar.strategies.pipeline.simulate import Simulation

IDLE = "·"

MAX_DRAWN = 1 << 14
"""Actions of a picture: with more of them nobody sees one."""

COLORS = {
    Kind.FORWARD: "#9ecae9",
    Kind.BACKWARD: "#a3d39c",
    Kind.INPUT_GRADIENT: "#cfe8b5",
    Kind.WEIGHT_GRADIENT: "#fbc98e",
}

_LEFT, _WIDTH, _LANE, _HEAD = 64, 1120, 26, 34
_FONT_WIDTH = 6.6
"""Pixels per letter of the size used in boxes, with some room."""


# --- text --------------------------------------------------------------------------------------


def text(schedule: Schedule, width: int = 160) -> str:
    """Stages down, slots across, an idle one a dot; wrapped at `width` columns, whole slots each.

    A phased table has two lines per stage: forwards above, what comes after them in their slots
    below. Raises ScheduleError for a table too large to be looked at.
    """
    _require_drawable(schedule)
    lines = [["slot", *map(str, range(schedule.num_slots))]]
    for stage in range(schedule.num_stages):
        cells = [slot[stage] for slot in schedule.slots]
        name = f"stage {stage}"
        if schedule.is_phased:
            lines.append([name, *(str(forward_of(cell) or IDLE) for cell in cells)])
            lines.append(["", *(str(backward_of(cell) or IDLE) for cell in cells)])
        else:
            lines.append([name, *(str(cell[0]) if cell else IDLE for cell in cells)])
    left = max(len(line[0]) for line in lines) + 2
    column = max(len(cell) for line in lines for cell in line[1:]) + 1
    per_block = max(1, (width - left) // column)
    blocks = []
    for first in range(1, schedule.num_slots + 1, per_block):
        rows = (
            line[0].ljust(left) + "".join(c.ljust(column) for c in line[first : first + per_block])
            for line in lines
        )
        blocks.append("\n".join(row.rstrip() for row in rows))
    return "\n\n".join(blocks) + "\n"


def _require_drawable(schedule: Schedule) -> None:
    num_cells = schedule.num_slots * schedule.num_stages
    if num_cells > MAX_DRAWN:
        raise ScheduleError(
            f"A drawing of {schedule.num_slots} slots × {schedule.num_stages} stages shows nobody "
            f"anything; the most are {MAX_DRAWN} cells. Draw fewer micro-batches."
        )


# --- SVG ---------------------------------------------------------------------------------------


def svg(simulations: Sequence[Simulation]) -> str:
    """Timelines below each other on one scale of time, as a page of its own or part of one.

    Every action is a box as wide as it takes, paler in later chunks, with its micro-batch where
    there is room; pointing at it tells the rest. Names are escaped, and nothing is loaded. Raises
    ScheduleError for a table too large to be looked at.
    """
    for simulation in simulations:
        _require_drawable(simulation.schedule)
    scale = _WIDTH / max(simulation.makespan for simulation in simulations)
    parts: list[str] = []
    y = 0
    for simulation in simulations:
        parts += _timeline(simulation, scale, y)
        y += _HEAD + _LANE * simulation.schedule.num_stages + 14
    parts += _legend({action.kind for one in simulations for *_, action, _ in one.starts}, y)
    names = ", ".join(dict.fromkeys(one.schedule.name for one in simulations))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_LEFT + _WIDTH + 16}" '
        f'height="{y + 34}" viewBox="0 0 {_LEFT + _WIDTH + 16} {y + 34}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{_safe(f'Pipeline schedule {names}')}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    )
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _timeline(simulation: Simulation, scale: float, top: int) -> Iterator[str]:
    schedule = simulation.schedule
    machine = "lock-step" if simulation.lock_step else "asynchronous"
    title = (
        f"{schedule.name}, {machine}: {simulation.makespan:.6g} long, of which idle "
        f"{simulation.bubble:.1%}"
    )
    yield f'<text x="8" y="{top + 22}" font-weight="bold">{_safe(title)}</text>'
    lanes = top + _HEAD
    for stage in range(schedule.num_stages):
        y = lanes + stage * _LANE
        yield (
            f'<rect x="{_LEFT}" y="{y + 1}" width="{simulation.makespan * scale:.2f}" '
            f'height="{_LANE - 2}" fill="#eeeeee"/>'
        )
        yield f'<text x="8" y="{y + 17}">stage {stage}</text>'
    chunk = simulation.times.per_chunk(schedule.num_virtual_stages)
    for _, stage, action, start in simulation.starts:
        time = chunk[action.kind]
        # Later chunks are paler, so that passes over the same stage can be told apart.
        opacity = 1 - 0.6 * action.chunk / schedule.num_virtual_stages
        x, y, width = _LEFT + start * scale, lanes + stage * _LANE + 1, time * scale
        yield (
            f'<g><title>{_safe(_told(action, stage, start, time))}</title><rect x="{x:.2f}" '
            f'y="{y}" width="{width:.2f}" height="{_LANE - 2}" fill="{COLORS[action.kind]}" '
            f'fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5"/>'
        )
        label = str(action.microbatch)
        if len(label) * _FONT_WIDTH <= width:
            yield (
                f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" '
                f'font-size="11">{label}</text>'
            )
        yield "</g>"


def _told(action: Action, stage: int, start: float, time: float) -> str:
    return (
        f"{action.kind.noun} of micro-batch {action.microbatch}, stage {stage}, chunk "
        f"{action.chunk}: {start:.6g} to {start + time:.6g}"
    )


def _legend(kinds: set[Kind], top: int) -> Iterator[str]:
    x = _LEFT
    for kind in (kind for kind in Kind if kind in kinds):
        yield f'<rect x="{x}" y="{top + 8}" width="14" height="14" fill="{COLORS[kind]}"/>'
        yield f'<text x="{x + 20}" y="{top + 20}">{kind.noun}</text>'
        x += 40 + 7 * len(kind.noun)


def _safe(words: str) -> str:
    """Escaped, and without characters that XML does not have."""
    return escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in words))
