"""What schedules cost: the figures of their papers, and of one lock-step program."""

from __future__ import annotations

import re

import pytest

from jaxpar.errors import ScheduleError
from jaxpar.strategies.pipeline.builders import build
from jaxpar.strategies.pipeline.schedule import Kind, Schedule
from jaxpar.strategies.pipeline.simulate import (
    Times,
    forward_slots,
    gradient_slots,
    peak_in_flight,
    simulate,
    useful_messages,
)
from jaxpar.strategies.pipeline.stash import gradient_stash, input_stash
from tests.test_pipeline_schedules import FORMS, schedule, table

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 2), (4, 4), (4, 8), (4, 9), (8, 3), (8, 16)]
"""(p, m): also m < p, and m that is no multiple of p."""

EVEN = [(p, m) for p, m in SIZES if m % p == 0]
MANY = [(p, m) for p, m in SIZES if m >= p]

UNIT = Times()
TIMES = [UNIT, Times(forward=2, input_gradient=3, weight_gradient=1)]

ONE_CHUNK = [(name, phased) for name, phased in FORMS if name in ("gpipe", "1f1b")]
PHASED = [True, False]


# --- asynchronous --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ONE_CHUNK)
@pytest.mark.parametrize("times", TIMES)
def test_bubble_of_gpipe_and_1f1b(form, times):
    """Huang et al. 2019 §2.3; Narayanan et al. 2021 §2.2.1: (p−1)/m of the work, so this of all."""
    for p, m in SIZES:
        simulated = simulate(schedule(form, p, m), times)
        assert simulated.work == m * (times.forward + times.backward)
        assert simulated.bubble_time == (p - 1) * (times.forward + times.backward)
        assert simulated.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("phased", PHASED)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_bubble_of_interleaved(phased, times, v):
    """Narayanan et al. 2021 §2.2.2: a v-th of 1F1B's, when m is a multiple of p."""
    for p, m in EVEN:
        simulated = simulate(schedule(("interleaved", phased), p, m, v), times)
        assert simulated.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("phased", PHASED)
def test_interleaved_with_a_smaller_last_group(phased):
    """Neither faster than the figure for m, nor slower than the next multiple of p."""
    for p, m, v in ((4, 9, 2), (4, 3, 2), (3, 4, 3), (8, 3, 2)):
        time, next_multiple = (
            simulate(schedule(("interleaved", phased), p, one, v), UNIT).makespan
            for one in (m, -(-m // p) * p)
        )
        assert (m + (p - 1) / v) * (UNIT.forward + UNIT.backward) < time <= next_multiple


def test_bubble_of_zb_h1():
    """Qi et al. 2023 §2.3: (p−1)(F+I−W), a third of 1F1B's with equal times; while W ≤ F, I."""
    for times in (UNIT, Times(forward=2, input_gradient=3, weight_gradient=1)):
        for p, m in MANY:
            simulated = simulate(schedule(("zb-h1", False), p, m), times)
            assert simulated.bubble_time == (p - 1) * (
                times.forward + times.input_gradient - times.weight_gradient
            )
    for p, m in MANY:
        plain, split = (simulate(schedule((name, False), p, m), UNIT) for name in ("1f1b", "zb-h1"))
        assert plain.bubble_time == 3 * split.bubble_time
    for p, m in ((3, 2), (8, 3)):  # too few to fill it
        split = simulate(schedule(("zb-h1", False), p, m), UNIT)
        assert split.bubble_time == (p - 1) + (p - m)


def test_sending_takes_time():
    """The first micro-batch waits for a message at every boundary, there and back."""
    for p in (1, 2, 4):
        s = schedule(("gpipe", False), p, 3)
        there, back = (p - 1) * 0.5, (p - 1) * 0.5
        plain = simulate(s, UNIT).makespan
        assert simulate(s, Times(send=0.5)).makespan == plain + there + back
        slots = len(forward_slots(s) | gradient_slots(s))
        lock_step = simulate(s, Times(send=0.5), lock_step=True)
        assert lock_step.makespan == plain + 0.5 * (slots - 1) * (p > 1)


def test_a_slot_of_weight_gradients_sends_nothing():
    rows = ["F0", ""], ["", "F0"], ["", "I0"], ["", "W0"], ["I0", ""], ["W0", ""]
    s = Schedule(name="mine", num_stages=2, num_microbatches=1, slots=table(*rows))
    assert simulate(s, Times(send=0.5), lock_step=True).makespan == 6 + 4 * 0.5


def test_an_action_starts_when_stage_and_needs_allow_and_not_later():
    for form in FORMS:
        s = schedule(form, 3, 4, 2)
        times = Times(forward=2, input_gradient=3, weight_gradient=1, send=0.5)
        v = s.num_virtual_stages
        length = {Kind.FORWARD: 2 / v, Kind.BACKWARD: 4 / v, Kind.INPUT_GRADIENT: 3 / v,
                  Kind.WEIGHT_GRADIENT: 1 / v}  # fmt: skip
        ends, free = {}, [0.0] * 3
        for _, stage, action, start in simulate(s, times).starts:
            g, m = s.global_chunk(stage, action), action.microbatch
            if action.kind is Kind.FORWARD:
                arrival = ends[Kind.FORWARD, g - 1, m] + 0.5 if g else 0.0
            elif action.kind is Kind.WEIGHT_GRADIENT or g + 1 == s.num_chunks:
                arrival = 0.0
            else:
                arrival = ends[action.kind, g + 1, m] + 0.5
            assert start == max(free[stage], arrival)
            free[stage] = ends[action.kind, g, m] = start + length[action.kind]


# --- lock-step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [UNIT, Times(forward=1, input_gradient=2, weight_gradient=2)])
def test_time_in_lock_step(times):
    """A slot takes as long as its slowest stage, so neighbours should do the same in it."""
    forward, backward = times.forward, times.backward

    def makespan(form, p, m, v=1):
        return simulate(schedule(form, p, m, v), times, lock_step=True).makespan

    for p, m in SIZES:
        assert makespan(("gpipe", False), p, m) == (m + p - 1) * (forward + backward)
        assert makespan(("1f1b", True), p, m) == (m + p - 1) * (forward + backward)
        if p > 1:
            alternating = p * forward + (2 * m + p - 2) * backward
            assert makespan(("1f1b", False), p, m) == alternating
    for p, m in EVEN:
        for v in (1, 2, 3):
            ideal = (m + (p - 1) / v) * (forward + backward)
            assert makespan(("interleaved", True), p, m, v) == pytest.approx(ideal)


def test_zb_h1_in_lock_step():
    for p, m in MANY:
        split = simulate(schedule(("zb-h1", False), p, m), UNIT, lock_step=True)
        assert split.makespan == split.schedule.num_slots == 3 * m + p - 1


def test_stages_in_lock_step_start_together():
    simulated = simulate(schedule(("1f1b", True), 3, 4), TIMES[1], lock_step=True)
    starts = {}
    for t, _, action, start in simulated.starts:
        starts.setdefault((t, action.kind), set()).add(start)
    # Two stages of one slot begin together; a backward after a forward begins when that is over.
    assert all(len(some) <= 2 for some in starts.values())
    assert starts[2, Kind.FORWARD] == {4.0} and starts[2, Kind.BACKWARD] == {6.0}
    assert starts[3, Kind.FORWARD] == {10.0} and starts[3, Kind.BACKWARD] == {10.0 + 2}


# --- memory and messages -------------------------------------------------------------------------


def test_micro_batches_in_flight():
    """Narayanan et al. 2021 §2.2.1: m, p; §2.2.2: p(1 + (p−1)/(pv)). Qi et al. 2023 §2.1: p."""
    for p, m in SIZES:
        assert peak_in_flight(schedule(("gpipe", False), p, m)) == (m,) * p
        one_by_one = tuple(min(p - r, m) for r in range(p))
        assert peak_in_flight(schedule(("1f1b", False), p, m)) == one_by_one
        phased = tuple(min(2 * (p - 1 - r) + 1, m) for r in range(p))
        assert peak_in_flight(schedule(("1f1b", True), p, m)) == phased
        assert peak_in_flight(schedule(("zb-h1", False), p, m)) == (min(p, m),) * p
    for p, m in EVEN:
        for v in (1, 2, 3):
            for phased in PHASED:
                peaks = peak_in_flight(schedule(("interleaved", phased), p, m, v))
                assert peaks[0] == pytest.approx(min(m, p * (1 + (p - 1) / (p * v))))
                assert list(peaks) == sorted(peaks, reverse=True)


def test_places_in_the_stash():
    """As many as are in flight; one fewer where the last is read in the slot it is needed in."""
    for p, m in SIZES:
        for form, places in (
            (("gpipe", False), m),
            (("1f1b", False), min(p, m)),
            (("1f1b", True), min(2 * (p - 1), m)),
            (("zb-h1", False), min(p, m)),
        ):
            assert input_stash(schedule(form, p, m)).num_places == places, (form, p, m)
        # Gradients are used on arrival, unless a weight gradient waits.
        assert gradient_stash(schedule(("1f1b", False), p, m)).num_places == 0
        assert gradient_stash(schedule(("1f1b", True), p, m)).num_places == 0
    for p, m in EVEN:
        for v in (2, 3):
            places = input_stash(schedule(("interleaved", True), p, m, v)).num_places
            assert places == min((v - 1) * p + 2 * (p - 1), m * v)


def test_memory_does_not_grow_with_micro_batches_unless_it_is_gpipe():
    for form in FORMS:
        few, many = (input_stash(schedule(form, 4, m, 2)).num_places for m in (8, 32))
        assert many == (32 if form[0] == "gpipe" else few)


def test_messages():
    """Each program sends in every slot that has something to send, of all stages or of one."""
    for p, m in EVEN:
        for v in (1, 2, 3):
            s = schedule(("interleaved", True), p, m, v)
            assert len(forward_slots(s)) == len(gradient_slots(s)) == m * v + p - 1
            sent = [0] * p
            for _, stage, action in s.actions():
                if action.kind is Kind.FORWARD and s.global_chunk(stage, action) < p * v - 1:
                    sent[stage] += p > 1
            assert useful_messages(s) == tuple(sent)


def test_a_backward_may_be_split_for_some_micro_batches_only():
    s = Schedule(
        name="mixed", num_stages=2, num_microbatches=2,
        slots=table(["F0", ""], ["F1", "F0 B0"], ["I0", "F1 I1"], ["W0", "W1"], ["B1", ""]),
    )  # fmt: skip
    assert s.splits_backward and s.is_phased
    assert simulate(s, UNIT).work == 6
    assert peak_in_flight(s) == (2, 1)


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("forward", 0), ("input_gradient", float("nan")), ("weight_gradient", float("inf")),
     ("send", -1.0), ("send", float("nan")), ("forward", True), ("send", True), ("send", "1")],
)  # fmt: skip
def test_times_are_positive_numbers(field, value):
    with pytest.raises(ScheduleError, match=re.escape(f"{field}={value!r} (")):
        Times(**{field: value})


def test_a_unit_is_as_good_as_another():
    s = build("1f1b", num_stages=4, num_microbatches=8)
    for unit in (1e-30, 1e30):
        times = Times(forward=unit, input_gradient=unit, weight_gradient=unit)
        assert simulate(s, times).bubble == pytest.approx(3 / 11)
