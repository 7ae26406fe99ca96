"""Pipeline schedules as tables: valid, refused when damaged, with the figures of their papers."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import ScheduleError
from jaxpar.strategies.pipeline.builders import BUILDERS, build
from jaxpar.strategies.pipeline.schedule import MAX_CELLS, Action, Kind, Schedule
from jaxpar.strategies.pipeline.stash import NOWHERE, gradient_stash, input_stash
from jaxpar.strategies.pipeline.tables import parse_action

F, B, I, W = Kind  # noqa: E741

FORMS = [
    ("gpipe", False),
    ("1f1b", False),
    ("1f1b", True),
    ("interleaved", False),
    ("interleaved", True),
    ("zb-h1", False),
]
"""Every schedule there is, in every form: (name, phased)."""


def schedule(form, p, m, v=1):
    name, phased = form
    return build(
        name, num_stages=p, num_microbatches=m,
        num_virtual_stages=v if name == "interleaved" else 1, phased=phased,
    )  # fmt: skip


@st.composite
def schedules(draw, max_stages=8, max_microbatches=16):
    form = draw(st.sampled_from(FORMS))
    p, m = draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches))
    return schedule(form, p, m, draw(st.integers(1, 3)))


def table(*rows):
    """Slots from rows of cells written as in CSV files."""
    return tuple(tuple(tuple(map(parse_action, cell.split())) for cell in row) for row in rows)


def test_these_are_all_forms():
    assert {name for name, _ in FORMS} == BUILDERS.keys()


# --- an executor that moves names instead of arrays ----------------------------------------------


def run(s, inputs, gradients, keeps_own=True):
    """Carry a table out as an executor does, slot by slot: arrival, reads, actions, writes.

    Returns what went wrong first, or the largest numbers of inputs and of gradients that wait on
    each stage from one slot to the next. A value is called by its (global chunk, micro-batch).
    """
    p, last = s.num_stages, s.num_chunks - 1
    x_stash, g_stash = [{} for _ in range(p)], [{} for _ in range(p)]
    unread = Counter()  # by (global chunk, micro-batch): actions after the forward still to come
    for _, stage, action in s.actions():
        unread[s.global_chunk(stage, action), action.microbatch] += action.kind is not F
    x_sent, g_sent = {}, {}
    peaks = [[0, 0] for _ in range(p)]
    for t, cells in enumerate(s.slots):
        x_arrived = {(g + 1) % p: (g + 1, m) for g, m in x_sent.values() if g < last}
        g_arrived = {(g - 1) % p: (g - 1, m) for g, m in g_sent.values() if g > 0}
        x_sent, g_sent = {}, {}
        for stage, cell in enumerate(cells):

            def read(stash, places, otherwise, t=t, stage=stage):
                place = places[t][stage]
                return otherwise if place == NOWHERE else stash[stage].get(place)

            x_now = read(x_stash, inputs.forward, x_arrived.get(stage))
            x_back = read(x_stash, inputs.backward, "this forward's")
            g_back = read(g_stash, gradients.backward, g_arrived.get(stage))
            for action in cell:
                mine = s.global_chunk(stage, action), action.microbatch
                x_now = mine if action.kind is F and mine[0] == 0 else x_now
                x = x_now if action.kind is F or x_back == "this forward's" else x_back
                x = x if keeps_own or mine[0] else mine
                if x != mine:
                    return f"slot {t}, stage {stage}: {action} gets {x}"
                if action.kind is F:
                    x_sent[stage] = mine
                    continue
                if mine[0] < last and g_back != mine:
                    return f"slot {t}, stage {stage}: {action} gets the gradient of {g_back}"
                unread[mine] -= 1
                if action.kind is not W:
                    g_sent[stage] = mine
            for stash, places, value in (
                (x_stash, inputs.arrival, x_arrived.get(stage)),
                (x_stash, inputs.own, x_now),
                (g_stash, gradients.arrival, g_arrived.get(stage)),
            ):
                place = places[t][stage]
                if place == NOWHERE:
                    continue
                if unread[stash[stage].get(place)]:
                    return f"slot {t}, stage {stage}: {value} over {stash[stage][place]}"
                stash[stage][place] = value
            waiting = [sum(unread[one] > 0 for one in stash[stage].values()) for stash in
                       (x_stash, g_stash)]  # fmt: skip
            peaks[stage] = list(map(max, peaks[stage], waiting))
    return peaks


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans())
def test_every_value_is_where_the_stash_says(s, keeps_own):
    inputs, gradients = input_stash(s, keeps_own=keeps_own), gradient_stash(s)
    peaks = run(s, inputs, gradients, keeps_own)
    assert not isinstance(peaks, str), peaks
    assert inputs.peaks == tuple(peak for peak, _ in peaks)
    assert gradients.peaks == tuple(peak for _, peak in peaks)
    assert inputs.num_places == max(inputs.peaks)
    assert gradients.num_places == max(gradients.peaks)


@pytest.mark.parametrize("field", ["arrival", "own", "forward", "backward"])
def test_a_place_beside_the_right_one_is_noticed(field):
    s = schedule(("1f1b", False), 3, 5)
    right = input_stash(s)
    for t, row in enumerate(getattr(right, field)):
        for stage, place in enumerate(row):
            if place == NOWHERE:
                continue
            wrong = [list(row) for row in getattr(right, field)]
            wrong[t][stage] = (place + 1) % right.num_places
            wrong = dataclasses.replace(right, **{field: wrong})
            assert isinstance(run(s, wrong, gradient_stash(s)), str)


# --- what is refused -----------------------------------------------------------------------------


def is_carried_out(s, slots):
    """Whether everything is done once, from results of earlier slots. The rule, not the code."""
    p, last = s.num_stages, s.num_chunks - 1
    there, done = set(), []
    for cells in slots:
        made = set()
        for stage, cell in enumerate(cells):
            kinds = "".join(action.kind for action in cell)
            if not re.fullmatch("F?[BIW]?", kinds):
                return False
            own = set()
            for action in cell:
                g, m = action.chunk * p + stage, action.microbatch
                if not (0 <= m < s.num_microbatches and 0 <= action.chunk < s.num_virtual_stages):
                    return False
                gradient = g == last or (B, g + 1, m) in there or (I, g + 1, m) in there
                needs = {
                    F: g == 0 or (F, g - 1, m) in there,
                    B: (F, g, m) in there | own and gradient,
                    I: (F, g, m) in there | own and gradient,
                    W: (I, g, m) in there,
                }
                if not needs[action.kind]:
                    return False
                own.add((action.kind, g, m))
            done += own
            made |= own
        there |= made
    halves = {(g, m) for kind, g, m in done if kind in (I, W)}
    wholes = {(g, m) for kind, g, m in done if kind is B}
    return (
        len(done) == len(set(done))
        and not halves & wholes
        and Counter(kind for kind, *_ in done)[F] == s.num_chunks * s.num_microbatches
        and Counter(kind for kind, *_ in done)[W] == Counter(kind for kind, *_ in done)[I]
        and len(halves | wholes) == s.num_chunks * s.num_microbatches
        and all({(I, *one), (W, *one)} <= set(done) for one in halves)
    )


@st.composite
def damaged(draw):
    """A schedule's table with one thing changed: swapped, deleted, doubled, moved or renamed."""
    s = draw(schedules(max_stages=4, max_microbatches=6))
    cells = [list(slot) for slot in s.slots]
    where = [(t, stage) for t, stage, _ in s.actions()]
    any_cell = st.tuples(st.integers(0, len(cells) - 1), st.integers(0, s.num_stages - 1))
    t, stage = draw(st.sampled_from(where))
    how = draw(st.sampled_from(["swap", "delete", "double", "move", "rename"]))
    if how == "swap":
        u, other = draw(any_cell)
        cells[t][stage], cells[u][other] = cells[u][other], cells[t][stage]
    elif how == "delete":
        cells[t][stage] = cells[t][stage][1:]
    elif how == "double":
        u, other = draw(any_cell)
        cells[u][other] = (*cells[u][other], cells[t][stage][0])
    elif how == "move":
        *rest, moved = cells[t][stage]
        cells[t][stage] = tuple(rest)
        u = (t + draw(st.sampled_from([-1, 1]))) % len(cells)
        both = [*cells[u][stage], moved]
        cells[u][stage] = tuple(sorted(both, key=lambda action: action.kind is not F))
    else:
        action = cells[t][stage][0]
        field = draw(st.sampled_from(["kind", "microbatch", "chunk"]))
        value = draw(st.sampled_from(list(Kind)) if field == "kind" else st.integers(0, 3))
        cells[t][stage] = (dataclasses.replace(action, **{field: value}), *cells[t][stage][1:])
    return s, tuple(map(tuple, cells))


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_a_damaged_table_is_refused_unless_it_works(change):
    s, slots = change
    if is_carried_out(s, slots):
        changed = dataclasses.replace(s, slots=slots)
        peaks = run(changed, input_stash(changed), gradient_stash(changed))
        assert not isinstance(peaks, str), peaks
        return
    with pytest.raises(ScheduleError, match=f"^Schedule '{s.name}', "):
        dataclasses.replace(s, slots=slots)


GOOD = [["F0", ""], ["F1", "F0 B0"], ["B0", "F1 B1"], ["B1", ""]]


def with_cell(t, stage, cell, rows=GOOD):
    return [
        [*row[:stage], cell, *row[stage + 1 :]] if u == t else row for u, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (GOOD[:-1], "stage 0: B1 is missing. Every stage does F, and B or else both I and W, of"),
        (with_cell(0, 0, ""), "stage 0: F0 is missing."),
        (with_cell(2, 1, "F1 I1"), "stage 1: W1 is missing."),
        (with_cell(2, 1, "F1 W1"), "stage 1: I1 is missing."),
        ([*GOOD, ["", "W1"]], "slot 4, stage 1: W1 is part of what B1 does. Leave out either."),
        ([*GOOD, ["F0", ""]], "slot 4, stage 0: F0 was done in slot 0 already. Each forward is "),
        (with_cell(2, 1, "F1 B2"), "micro-batch 2; with num_microbatches=2 they are 0 to 1."),
        (with_cell(2, 1, "F1 B1.1"), "B1.1 names chunk 1; with num_virtual_stages=1 they are 0."),
        (with_cell(2, 1, "B1 F1"), "slot 2, stage 1: B1 F1 cannot share a cell, which holds"),
        (with_cell(2, 1, "F1 F0"), "F1 F0 cannot share a cell, which holds at most one F, "),
        (with_cell(2, 1, "F1 I1 W1"), "F1 I1 W1 cannot share a cell"),
        ([["F0", "F0"], *GOOD[1:]], "slot 1, stage 1: F0 was done in slot 0 already."),
        (
            [["F0", "F0 B0"], ["F1", ""], *GOOD[2:]],
            "slot 0, stage 1: F0 needs F0 of stage 0, which is done in slot 0 and can be used from "
            "the next on. Slot 1 or later is right for F0.",
        ),
        (
            [["F0", ""], ["F1 B0", "F0 B0"], ["", "F1 B1"], ["B1", ""]],
            "slot 1, stage 0: B0 needs B0 of stage 1, which is done in slot 1 and can be used from "
            "the next on. Slot 2 or later is right for B0.",
        ),
        (
            [["F0", ""], ["F1", "B0"], ["", "F0"], ["B0", "F1 B1"], ["B1", ""]],
            "slot 1, stage 1: B0 needs F0 of the same stage, which is done in slot 2. Slot 2 or "
            "later is right for B0.",
        ),
        (
            [["F0", ""], ["F1", "F0 W0"], ["", "I0"], ["B0", "F1 B1"], ["B1", ""]],
            "slot 1, stage 1: W0 needs I0 of stage 1, which is done in slot 2 and",
        ),
        (with_cell(1, 0, "F1", [*GOOD[:3], ["B1", "", ""]]), "slot 3: has 3 cells; 2 are right"),
    ],
)  # fmt: skip
def test_refusals_name_slot_stage_action_and_what_is_right(rows, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule(name="mine", num_stages=2, num_microbatches=2, slots=table(*rows))
    Schedule(name="mine", num_stages=2, num_microbatches=2, slots=table(*GOOD))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "slots must be a tuple of slots."),
        (([((),)],), "slot 0: must be a tuple of cells, a cell one of actions."),
        ((([],),), "slot 0: must be a tuple of cells, a cell one of actions."),
        (((("F0",),),), "slot 0, stage 0: 'F0' is no Action of a Kind."),
        ((((Action("F", 0),),),), "chunk=0) is no Action of a Kind."),
        ((((Action(F, True),),),), "FTrue names micro-batch True; with num_microbatches=1"),
        ((((Action(F, 0, -1),),),), "F0.-1 names chunk -1; with num_virtual_stages=1 they are 0."),
        ((((),),) * (MAX_CELLS + 1), "more than 262144 cells. Leave out idle slots."),
        ((), "stage 0: F0 is missing."),
    ],
)
def test_what_is_no_table(slots, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule(name="mine", num_stages=1, num_microbatches=1, slots=slots)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("1f1", {}, "There is no schedule '1f1'. Did you mean '1f1b'?"),
        ("1f1b", {"num_stages": 0}, "num_stages=0 (int) must be a whole number from 1 to"),
        ("1f1b", {"num_microbatches": 2.0}, "num_microbatches=2.0 (float) must be a whole number"),
        ("interleaved", {"num_virtual_stages": True}, "num_virtual_stages=True (bool) must be"),
        ("gpipe", {"num_virtual_stages": 2}, "Use 'interleaved', or num_virtual_stages=1."),
        ("1f1b", {"num_virtual_stages": 2}, "Schedule '1f1b' has one chunk of layers per stage"),
        ("zb-h1", {"num_virtual_stages": 2}, "num_virtual_stages=2 asks for more."),
        ("zb-h1", {"phased": True}, "'zb-h1' has no phased form: its slots hold one action each."),
        ("1f1b", {"phased": 1}, "phased=1 (int) must be one of: False, True."),
        ("1f1b", {"num_microbatches": 10**6}, "Nearest num_microbatches: 21840."),
        ("1f1b", {"num_stages": 10**6}, "more than 262144 cells. Use fewer stages."),
        ("gpipe", {"num_stages": 255, "num_microbatches": 99}, "Nearest num_microbatches: 2."),
    ],
)  # fmt: skip
def test_schedules_that_there_are_not(name, options, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build(name, **{"num_stages": 4, "num_microbatches": 8} | options)
