"""Control that depends on the device is executed: exact counts, or what they depend on."""

import contextlib
import gzip
import random
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.audit.execution import Count
from jaxpar.errors import AuditError
from tests.audit.mutations import OPERATORS, mutate
from tests.audit.skeletons import (
    NUM_DATA,
    NUM_MICRO,
    NUM_SLOTS,
    NUM_STAGES,
    PROGRAMS,
    decided_of,
    fill_and_drain,
    nested,
    runs_per_device,
    scaled,
    steps,
    text_of,
    told_by_others,
    work,
)

HLO = Path(__file__).parent / "hlo"
EVERYONE = [True] * (NUM_STAGES * NUM_DATA)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_device_is_counted_as_by_hand(program):
    expected = np.repeat(PROGRAMS[program](), NUM_DATA).tolist()
    assert len(set(expected)) > 1
    text = text_of(program)
    _, runs, skeleton = decided_of(text)
    assert (runs.undecided, runs.unknown_loops, skeleton.events_end) == ((), (), None)
    found = runs_per_device(text, "all-reduce")
    if program.__name__ == "told_by_others":  # and one that tells them
        expected = [count + 1 for count in expected]
    assert found == expected


def dump(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        return file.read()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cond_cond.cpu", {"region_1.3_spmd": [1, 1, 1, 1, 0, 0, 0, 0]}),
        ("cond_cond.tpu_v5e_2x4", {"region_1.3_spmd": [1, 1, 1, 1, 0, 0, 0, 0]}),
        (
            "cond_switch.gpu_1x1x8",
            {"region_0.2_spmd": [1, 1, 1, 1, 0, 0, 0, 0],
             "region_2.4_spmd": [0, 0, 0, 0, 1, 1, 1, 1]},
        ),
    ],
)  # fmt: skip
def test_branches_of_every_backend_are_decided(name, expected):
    _, runs, _ = decided_of(dump(name))
    assert {name: counts.tolist() for name, counts in runs.device_counts.items()} == expected
    assert all(runs.counts[name] == Count(low=0, high=1) for name in expected)


@pytest.mark.parametrize("name", ["pp.cpu", "pp.gpu_1x1x8", "pp.tpu_v5e_2x4", "fsdp.cpu"])
def test_what_is_known_costs_nothing(name):
    module, runs, skeleton = decided_of(dump(name))
    assert runs.device_counts == {}
    assert skeleton.bounds == {}
    assert all(found._parameters is None for found in module.computations.values())


def test_events_are_in_program_order():
    module, _, skeleton = decided_of(text_of(fill_and_drain))
    stages = np.repeat(np.arange(NUM_STAGES), NUM_DATA)
    expected = []
    for slot in range(NUM_SLOTS):
        micro = slot - stages
        expected.append(EVERYONE)  # the permute at the end of each slot
        busy = (micro >= 0) & (micro < NUM_MICRO - 1 + stages % 2)
        expected += [busy.tolist()] if busy.any() else []
    assert [event.devices.tolist() for event in skeleton.events] == expected
    assert {event.times for event in skeleton.events} == {1}
    permutes = skeleton.events[0].computation
    assert module.computations[permutes].mentions("collective-permute(")


def test_data_leaves_bounds_and_a_reason_and_the_rest_is_exact():
    def mixed(x):
        stage = lax.axis_index("pipe")
        x = lax.cond(stage < 3, work, scaled, x)
        x = lax.cond(lax.pmax(x[0, 0], ("pipe", "data")) > 0, lambda x: work(x * x), scaled, x)
        return lax.cond(stage < 1, lambda x: work(x + 1), scaled, x)

    module, runs, skeleton = decided_of(text_of(mixed))
    (undecided,) = runs.undecided
    assert undecided.instruction.opcode == "conditional"
    assert undecided.reason.startswith(f"the branch of {undecided.instruction.name} (line ")
    assert undecided.reason.endswith("depends on parameter 0 of the entry, which is data")
    assert skeleton.events_end == undecided.reason
    found = sorted(counts.tolist() for counts in runs.device_counts.values())
    assert found == [[1, 1] + [0] * 6, [1] * 6 + [0, 0]]
    (unsure,) = {name for _, name in undecided.instruction.called} & runs.counts.keys() - {
        name for name in runs.counts if not module.computations[name].mentions("all-reduce(")
    }
    assert runs.counts[unsure] == Count(low=0, high=1)
    assert unsure not in runs.device_counts


def test_a_loop_that_data_ends_has_no_bound_and_what_it_calls_neither():
    def until_small(x):
        stage = lax.axis_index("pipe")

        def body(state):
            i, c = state
            return i + 1, lax.cond(
                i % 2 == stage, work, lambda x: steps(lambda c, _: work(c), x, 3), c
            )

        return lax.while_loop(lambda state: jnp.max(state[1]) > 1, body, (0 * stage, x))[1]

    _, runs, skeleton = decided_of(text_of(until_small))
    assert len(runs.unknown_loops) == 1
    assert "goes on depends on" in runs.undecided[0].reason
    body = dict(runs.unknown_loops[0].called)["body"]
    unbounded = [name for name in skeleton.bounds if skeleton.bounds[name].high is None]
    assert body in unbounded
    assert len(unbounded) >= 4  # body, condition, both branches


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
SUM = (
    "f32[8]{0} all-reduce(%v), channel_id=1, replica_groups={{0,1},{2,3}}, "
    "use_global_device_ids=true, to_apply=%add"
)


def branching(index, branches, kind="s32[]", lines="", called=None):
    """An ENTRY that runs one of `branches` computations, each with a sum over two devices."""
    bodies = "".join(
        f"\n%b{n} (v: f32[8]) -> f32[8] {{\n  %v = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %r = {SUM}\n}}\n"
        for n in range(branches)
    )
    names = ", ".join(f"%b{n}" for n in range(branches))
    called = called or f"branch_computations={{{names}}}"
    values = ", ".join(["%v"] * branches)
    return f"""HloModule jit_f, is_scheduled=true, num_partitions=4
{ADD}{bodies}
ENTRY %main (v: f32[8]) -> f32[8] {{
  %v = f32[8]{{0}} parameter(0)
  %id = u32[] partition-id()
  %device = s32[] convert(%id)
{lines}  %index = {kind} {index}
  ROOT %c = f32[8]{{0}} conditional(%index, {values}), {called}
}}
"""


def per_branch(text, branches):
    _, runs, _ = decided_of(text, num_devices=4)
    assert runs.undecided == ()
    return [
        runs.device_counts.get(f"b{n}", np.full(4, runs.counts[f"b{n}"].exact)).tolist()
        for n in range(branches)
    ]


def test_an_index_out_of_range_takes_the_last_branch():
    two = "  %two = s32[] constant(2)\n"
    text = branching("subtract(%device, %two)", 2, lines=two)  # -2, -1, 0, 1
    assert per_branch(text, 2) == [[0, 0, 1, 0], [1, 1, 0, 1]]


@pytest.mark.parametrize(
    "called",
    ["true_computation=%b0, false_computation=%b1", "branch_computations={%b0, %b1}"],
)
def test_true_takes_the_first_branch(called):
    one = "  %one = s32[] constant(1)\n"
    text = branching("compare(%device, %one), direction=GT", 2, "pred[]", one, called)
    assert per_branch(text, 2) == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_the_same_branch_twice_is_no_question():
    text = branching("add(%device, %device)", 2, called="branch_computations={%b0, %b0}")
    _, runs, _ = decided_of(text, num_devices=4)
    assert runs.counts["b0"].exact == 1


def test_replicas_and_partitions_number_the_devices():
    text = branching("convert(%replica)", 2, lines="  %replica = u32[] replica-id()\n")
    text = text.replace("num_partitions=4", "replica_count=2, num_partitions=2")
    assert per_branch(text, 2) == [[1, 1, 0, 0], [0, 0, 1, 1]]
    text = branching("convert(%id)", 2)
    text = text.replace("num_partitions=4", "replica_count=2, num_partitions=2")
    assert per_branch(text, 2) == [[1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("index", "lines", "reason"),
    [
        ("custom-call(%device), custom_call_target=\"x\"", "", "opcode custom-call is not evalu"),
        ("convert(%rate)", "  %rate = bf16[] constant(1)\n", "type bf16, which is not evaluated"),
        ("convert(%third)",
         "  %one = f32[] constant(1)\n  %three = f32[] constant(3)\n"
         "  %third = f32[] divide(%one, %three)\n", "whose result is rounded"),
        ("convert(%half)", "  %half = f32[] constant(3e9)\n", "which is out of range"),
        ("bitcast(%row)", "  %row = s32[1]{0} constant({...})\n", "elements were not printed"),
        ("reshape(%gone)", "", "gone, which no line of main makes"),
        ("add(%device, %late)", "  %x = s32[] add(%index, %device)\n  %late = s32[] copy(%x)\n",
         "which is read before it is made"),
        ("add(%device, %v)", "", "does not fit together with its operands"),
        ("constant(99999999999)", "", "does not fit together with its operands"),
        ("constant(x)", "", "does not fit together with its operands"),
        ("reduce(%many, %device), dimensions={0}, to_apply=%add",
         "  %many = s32[70000]{0} iota(), iota_dimension=0\n", "an array of 70000 elements"),
        ("get-tuple-element(%pair), index=7",
         "  %pair = (s32[], s32[]) tuple(%device, %device)\n", "does not fit what reads it"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_says_why(index, lines, reason):
    _, runs, _ = decided_of(branching(index, 2, lines=lines), num_devices=4)
    assert [reason in undecided.reason for undecided in runs.undecided] == [True], runs.undecided
    assert runs.counts["b0"] == Count(low=0, high=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  %and.9 =", "  %constant.25 = u32[] constant(0)\n  %and.9 ="),  # made a second time
        ("  %and.9 =", "  %and.8 = u32[] junk\n  %and.9 ="),
        ("  ROOT %convert_element_type.4", "  %convert_element_type.4"),
        (", num_partitions=8", ""),
        ("direction=EQ", "direction=XX"),
        ("%fused_computation.1 (", "%fused_computation.9 ("),
        ("parameter(0)\n  %constant.25", "parameter(1)\n  %constant.25"),
        ("u32[] partition-id()", "u32[2]{0} partition-id()"),
    ],
)
def test_nothing_is_decided_by_damaged_text(before, after):
    """Inside a fusion, which nobody else reads: a wrong branch would be a smaller count."""
    text = dump("cond_cond.cpu")
    assert before in text
    _, runs, _ = decided_of(text.replace(before, after))
    assert len(runs.undecided) == 1
    assert runs.counts["region_1.3_spmd"] == Count(low=0, high=1)


def test_what_is_told_to_nobody_in_particular_is_not_known():
    text = text_of(told_by_others)
    for word in ("source_target_pairs", "replica_groups"):
        start = text.index(word + "=", text.index("\nENTRY"))
        end = text.index(", ", text.index("}", start))
        _, runs, _ = decided_of(text[:start] + "x=1" + text[end:])
        assert [one.instruction.opcode for one in runs.undecided] == ["while"], word


def test_floats_count_while_they_are_exact():
    lines = (
        "  %f = f32[] convert(%device)\n  %half = f32[] constant(0.5)\n"
        "  %p = f32[] multiply(%f, %half)\n  %q = f32[] floor(%p)\n"
    )
    assert per_branch(branching("convert(%q)", 2, lines=lines), 2) == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_what_a_condition_ignores_need_not_be_known():
    lines = (
        "  %unknown = pred[] custom-call(), custom_call_target=\"x\"\n"
        "  %one = s32[] constant(1)\n  %no = pred[] constant(false)\n"
        "  %both = pred[] and(%unknown, %no)\n"
    )  # fmt: skip
    text = branching("or(%both, %no)", 2, "pred[]", lines)
    assert per_branch(text, 2) == [[0] * 4, [1] * 4]
    lines += "  %data = s32[] custom-call(), custom_call_target=\"x\"\n"  # fmt: skip
    text = branching("select(%no, %data, %device)", 2, lines=lines)
    assert per_branch(text, 2) == [[1, 0, 0, 0], [0, 1, 1, 1]]


def test_without_the_number_of_devices_only_what_they_share_is_decided():
    text = branching("convert(%id)", 2)
    _, runs, _ = decided_of(text, num_devices=None)
    assert "how many devices" in runs.undecided[0].reason
    text = branching("constant(1)", 2)
    _, runs, _ = decided_of(text, num_devices=None)
    assert (runs.counts["b0"].exact, runs.counts["b1"].exact) == (0, 1)


def test_a_loop_without_end_is_given_up():
    text = text_of(nested)
    first, rest = text.split(" direction=LT", 1)
    endless = first + " direction=NE" + rest
    assert endless != text
    started = time.process_time()
    _, runs, _ = decided_of(endless.replace("constant(1)", "constant(0)"))
    assert time.process_time() - started < 15
    assert all(counts is not None for counts in runs.counts.values())
    assert any("to evaluate" in undecided.reason for undecided in runs.undecided)


def test_calls_within_calls_end():
    depth = 200
    calls = ""
    for n in reversed(range(depth + 1)):
        call = f"call(%v, %i), to_apply=%f{n + 1}"
        if n == depth:
            call = "conditional(%i, %v, %v), branch_computations={%b0, %b1}"
        calls += (
            f"\n%f{n} (v: f32[8], i: s32[]) -> f32[8] {{\n  %v = f32[8]{{0}} parameter(0)\n"
            f"  %i = s32[] parameter(1)\n  ROOT %c = f32[8]{{0}} {call}\n}}\n"
        )
    before, after = branching("copy(%device)", 2).split("\nENTRY")
    after = after[: after.index("conditional(")] + "call(%v, %index), to_apply=%f0\n}\n"
    _, runs, _ = decided_of(f"{before}{calls}\nENTRY{after}", num_devices=4)
    assert "more than 64 computations" in runs.undecided[0].reason
    assert runs.counts["b0"] == Count(low=0, high=1)


@pytest.mark.parametrize("name", ["cond_cond.cpu", "cond_switch.gpu_1x1x8", "nested"])
def test_damaged_text_gives_reasons_or_an_audit_error(name):
    text = (text_of(nested) if name == "nested" else dump(name)).encode()
    chance = random.Random(name)
    for seed in range(60):
        damaged = mutate(text, chance.choice([*OPERATORS]), seed, [text])[: 1 << 20]
        started = time.process_time()
        with contextlib.suppress(AuditError):
            decided_of(damaged.decode(errors="replace"))
        assert time.process_time() - started < 5
