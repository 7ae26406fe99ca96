"""The published schedules, as tables.

Each of them orders the actions of every stage. With *one action per slot*, as papers draw them, an
action takes the first slot in which what it needs has arrived. *Phased*, a slot holds a forward and
then a backward: forward k of stage r is in slot r + k, and backward k in slot p·v − 1 + p − 1 − r +
k, which on the last stage is the slot of that micro-batch's last forward. So all stages do their
forwards side by side and their backwards side by side, and one lock-step program costs no more
than the ideal; for it, stages other than the last hold about twice the micro-batches.

| schedule | order of actions on stage r of p | source |
|---|---|---|
| gpipe | all forwards, all backwards | Huang et al. 2019, §2.2 |
| 1f1b | p−1−r forwards, then one forward, one backward | Narayanan et al. 2021, §2.2.1 |
| interleaved | the same on v chunks, in groups of p micro-batches | Narayanan et al. 2021, §2.2.2 |
| zb-h1 | 1f1b, its weight gradients later by r micro-batches | Qi et al. 2023, §2.1 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpar.errors import ScheduleError, did_you_mean, require_choice
from jaxpar.strategies.pipeline.schedule import Action, Cell, Kind, Schedule, Slot, require_sizes

F, B, I, W = Kind  # noqa: E741  # the letters of the tables


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards; both forms are this one."""
    require_sizes(num_stages, num_microbatches, 1)
    order = [Action(kind, m) for kind in (F, B) for m in range(num_microbatches)]
    return _one_action("gpipe", [order] * num_stages, num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int, *, phased: bool = False) -> Schedule:
    """Backward as early as possible, so that a stage holds p − r micro-batches however many."""
    require_sizes(num_stages, num_microbatches, 1)
    if phased:
        return _phased("1f1b", num_stages, num_microbatches, 1)
    orders = [
        _alternating(
            [Action(F, m) for m in range(num_microbatches)],
            [Action(B, m) for m in range(num_microbatches)],
            num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    ]
    return _one_action("1f1b", orders, num_microbatches)


def interleaved(
    num_stages: int, num_microbatches: int, num_virtual_stages: int, *, phased: bool = False
) -> Schedule:
    """1F1B over v chunks per stage, 1/v as large: the bubble is 1/v, and v times as much is sent.

    Micro-batches go through the chunks in groups of p. Where m is not a multiple of p, the last
    group is smaller and its missing micro-batches leave idle slots, as if m were the next multiple.
    """
    require_sizes(num_stages, num_microbatches, num_virtual_stages)
    p, v = num_stages, num_virtual_stages
    if phased:
        return _phased("interleaved", p, num_microbatches, v)
    orders = []
    for stage in range(p):
        forwards, backwards = (_grouped(kind, p, num_microbatches, v) for kind in (F, B))
        warmup = 2 * (p - 1 - stage) + (v - 1) * p
        order = _alternating(forwards, backwards, warmup)
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return _one_action("interleaved", orders, num_microbatches, v)


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with split backwards: weight gradients fill the bubble, and no stage holds more than p.

    Stage r does the input gradients of r micro-batches before its first weight gradient, and so
    keeps r + 1 of them for the end, where 1F1B waits.
    """
    require_sizes(num_stages, num_microbatches, 1)
    orders = []
    for stage in range(num_stages):
        kinds = [F] * (num_stages - stage) + [I, F] * stage + [I, W, F] * num_microbatches
        done = dict.fromkeys(Kind, 0)
        order = []
        for kind in kinds:
            if done[kind] < num_microbatches:
                order.append(Action(kind, done[kind]))
                done[kind] += 1
        orders.append(order)
    return _one_action("zb-h1", orders, num_microbatches)


def _only_one_chunk(name: str, num_virtual_stages: int) -> None:
    if num_virtual_stages != 1:
        raise ScheduleError(
            f"Schedule {name!r} has one chunk of layers per stage, and num_virtual_stages="
            f"{num_virtual_stages} asks for more. Use 'interleaved', or num_virtual_stages=1."
        )


def _build_gpipe(p: int, m: int, v: int, phased: bool) -> Schedule:
    _only_one_chunk("gpipe", v)
    return gpipe(p, m)


def _build_one_f_one_b(p: int, m: int, v: int, phased: bool) -> Schedule:
    _only_one_chunk("1f1b", v)
    return one_f_one_b(p, m, phased=phased)


def _build_zb_h1(p: int, m: int, v: int, phased: bool) -> Schedule:
    _only_one_chunk("zb-h1", v)
    if phased:
        raise ScheduleError(
            "Schedule 'zb-h1' has no phased form: its slots hold one action each. Use phased=False."
        )
    return zb_h1(p, m)


BUILDERS: dict[str, Callable[[int, int, int, bool], Schedule]] = {
    "gpipe": _build_gpipe,
    "1f1b": _build_one_f_one_b,
    "interleaved": lambda p, m, v, phased: interleaved(p, m, v, phased=phased),
    "zb-h1": _build_zb_h1,
}


def build(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_virtual_stages: int = 1,
    phased: bool = False,
) -> Schedule:
    """The schedule called `name`. Raises ScheduleError for one that there is not, in this form."""
    if name not in BUILDERS:
        raise ScheduleError(f"There is no schedule {name!r}. {did_you_mean(name, BUILDERS)}")
    require_sizes(num_stages, num_microbatches, num_virtual_stages)
    require_choice(ScheduleError, "phased", phased, (False, True))
    return BUILDERS[name](num_stages, num_microbatches, num_virtual_stages, phased)


# --- from orders to slots ----------------------------------------------------------------------


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> list[Action]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(num_warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + list(backwards[len(forwards) - warmup :])


def _grouped(kind: Kind, p: int, num_microbatches: int, v: int) -> list[Action]:
    """A stage's actions of one kind: p micro-batches through chunk 0, the same through chunk 1, ...

    Backwards take the chunks in reverse. The last group is full, whatever `num_microbatches` is.
    """
    chunks = range(v) if kind is F else range(v)[::-1]
    return [
        Action(kind, first + m, chunk)
        for first in range(0, num_microbatches, p)
        for chunk in chunks
        for m in range(p)
    ]


def _phased(name: str, p: int, num_microbatches: int, v: int) -> Schedule:
    forwards, backwards = (_grouped(kind, p, num_microbatches, v) for kind in (F, B))
    num_slots = len(forwards) + p * v + p - 2
    slots: list[list[list[Action]]] = [[[] for _ in range(p)] for _ in range(num_slots)]
    for stage in range(p):
        for first, actions in ((stage, forwards), (p * v + p - 2 - stage, backwards)):
            for k, action in enumerate(actions, first):
                if action.microbatch < num_microbatches:
                    slots[k][stage].append(action)
    table = (tuple(tuple(cell) for cell in slot) for slot in slots)
    return Schedule(
        name=name,
        num_stages=p,
        num_microbatches=num_microbatches,
        num_virtual_stages=v,
        slots=tuple(slot for slot in table if any(slot)),
    )


def _one_action(
    name: str, orders: Sequence[Sequence[Action]], num_microbatches: int, v: int = 1
) -> Schedule:
    """Each stage's actions in its order, each in the first slot in which its needs have arrived."""
    p = len(orders)
    done: set[tuple[Kind, int, int]] = set()
    next_action = [0] * p
    slots: list[Slot] = []
    while any(next_action[stage] < len(orders[stage]) for stage in range(p)):
        slot: list[Cell] = []
        for stage, order in enumerate(orders):
            waiting = order[next_action[stage] : next_action[stage] + 1]
            ready = all(need in done for a in waiting for need in _needs(a, stage, p, v))
            slot.append(tuple(waiting) if ready else ())
        assert any(slot), f"{name}: the orders wait for each other"
        for stage, cell in enumerate(slot):
            for action in cell:
                done.add((action.kind, action.microbatch, action.chunk * p + stage))
                next_action[stage] += 1
        slots.append(tuple(slot))
    return Schedule(
        name=name,
        num_stages=p,
        num_microbatches=num_microbatches,
        num_virtual_stages=v,
        slots=tuple(slots),
    )


def _needs(action: Action, stage: int, p: int, v: int) -> list[tuple[Kind, int, int]]:
    """What other stages have to have done; a stage's own order takes care of the rest."""
    g = action.chunk * p + stage
    if action.kind is W:
        return []
    other = g - 1 if action.kind is F else g + 1
    return [(action.kind, action.microbatch, other)] if 0 <= other < p * v else []
