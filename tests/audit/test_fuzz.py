"""Seeded damage to real dumps: experiments/fuzz_audit.py runs ten times as many cases."""

import gzip
import os
import random
from collections import Counter

import pytest

from jaxpar.audit import audit
from jaxpar.errors import AuditError
from tests.audit.fuzzing import BAD_OUTCOMES, DUMPS, Case, cases, explained, run, text_of, totals_of
from tests.audit.mutations import OPERATORS, smaller
from tests.audit.test_hostile import ADD, MAIN, NESTED, OUTCOMES, TEXT, outcome

NUM_CASES = 2000
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_dumps_are_refused_or_told(part, tmp_path):
    bad = []
    for case in cases(NUM_CASES, 0, preference=1)[part::PARTS]:
        found = run(case, tmp_path)
        if found.name in BAD_OUTCOMES:
            bad.append(f"{found.name} {case}: {found.why}")
    assert bad == []


def test_cases_are_many_and_the_same_for_the_same_seed():
    many = cases(NUM_CASES, 0)
    assert many == cases(NUM_CASES, 0) != cases(NUM_CASES, 1)
    assert {case.dump for case in many} == set(DUMPS)
    assert min(Counter(case.operator for case in many).values()) >= NUM_CASES // len(OPERATORS)
    assert all(Case.parse(str(case)) == case for case in many)
    changed = [case for case in many[-150:] if case.damaged() != text_of(case.dump)]
    assert len(changed) > 100
    assert all(case.damaged() == case.damaged() for case in changed[:30])


def test_smaller_is_noticed_in_every_number():
    whole = totals_of("tp.cpu")
    for key, value in whole.items():
        assert smaller(whole, {**whole, key: value - 1}) == [
            f"{key[0]} {key[1]}: {value - 1:.0f} < {value:.0f}"
        ]
    assert smaller(whole, whole) == []
    assert smaller(totals_of("trip_while_cond.cpu"), {})


def test_only_a_changed_bound_or_another_program_explains_a_smaller_number():
    tpu = text_of("trip_while_step3.tpu_v5e_2x4")
    assert explained(
        tpu, tpu.replace(b"s32[]{:T(128)} constant(10)", b"s32[]{:T(128)} constant(1)", 1)
    )
    assert not explained(tpu, tpu.replace(b"collective-permute(", b"copy(", 1))
    assert not explained(tpu, tpu[: len(tpu) // 2])
    other = text_of("trip_nested.cpu")
    assert explained(tpu, tpu[:100] + b"\n" + other[other.index(b"ENTRY") :])
    assert not explained(other, other[:100] + b"\n" + other[other.index(b"ENTRY") :])


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("f32[256]{0} all-reduce", "f32[no]{0} all-reduce", 11),
        ("[1,8]<=[8]", "{{0,", 11),
        ("[1,8]<=[8]", "[1,8]<=[7]", 11),
        ("f32[256]{0} all-reduce", "f7e1m5[256]{0} all-reduce", 11),
    ],
)
def test_errors_say_file_and_line(tmp_path, before, after, line):
    path = tmp_path / "step.txt"
    path.write_text(TEXT.replace(before, after))
    with pytest.raises(AuditError) as caught:
        audit(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    with pytest.raises(AuditError) as caught:
        audit(TEXT.replace(before, after))
    assert f"line {line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  ROOT %psum.1 = ", "  %psum.1 = "),
        (
            "HloModule jit_f, ",
            "HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, ",
        ),
        (", replica_groups=[1,8]<=[8]", ""),
        ("replica_groups=[1,8]<=[8]", "replica_groups={{0,1,2,3}}"),
        ("replica_groups=[1,8]<=[8]", "replica_groups={{0,1,2,3,4,5,6,6}}"),
        ("replica_groups=[1,8]<=[8]", "replica_groups={{0},{1},{2},{3},{4},{5},{6},{99}}"),
        (" all-reduce(", " ll-reduce("),
        (
            "  %x = f32[256]{0} parameter(0)",
            "  %x = f32[256]{0} parameter(0)\n  %y = s8[] parameter(0)",
        ),
    ],
    ids=["root", "layout", "no groups", "few", "twice", "beyond", "opcode", "parameter"],
)
def test_text_that_contradicts_itself_is_not_complete(before, after):
    assert before in TEXT
    assert outcome(TEXT.replace(before, after)) in ("refused", "incomplete")


def test_printed_and_deduced_trips_have_to_agree():
    text = text_of("trip_scan1.cpu").decode()
    assert '"known_trip_count":{"n":"5"}' in text
    assert outcome(text.replace('{"n":"5"}', '{"n":"1"}')) == "incomplete"
    assert outcome(text.replace(" constant(5)", " constant(3)")) == "incomplete"


def test_many_percent_signs_take_linear_time():
    text = text_of("meta.gpu_1x1x8").decode()
    body = text.index(" parameter(0)")
    assert outcome(text[:body] + "%" * 100_000 + text[body:]) in (
        "refused",
        "incomplete",
        "complete",
    )


def test_a_header_without_a_name_and_an_operation_without_operands():
    assert outcome("HloModule\n" + ADD + MAIN) in ("refused", "incomplete", "complete")
    text = text_of("tp.cpu").decode()
    chance = random.Random(0)
    for line in chance.sample([it for it in text.split("\n") if " convert(%" in it], 20):
        start = line.index(" convert(")
        damaged = text.replace(
            line, line[:start] + " convert()" + line[line.index(")", start) + 1 :]
        )
        assert outcome(damaged) in ("refused", "incomplete", "complete")


def test_a_bomb_is_refused_before_it_fills_memory(tmp_path):
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", 9) as file:
        file.write(TEXT.encode())
        for _ in range(64):
            file.write(b" " * (1 << 20))
    with pytest.raises(AuditError, match="bomb.txt.gz has more than"):
        audit(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(AuditError, match="pipe.txt"):
        audit(tmp_path / "pipe.txt")


def test_a_collective_of_a_million_operands():
    assert outcome(TEXT.replace("%x)", "%x" + ", %x" * 1_000_000 + ")")) == "refused"


def test_control_characters_hide_nothing():
    for junk in ("\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\ufeff", "\x1b[2J"):
        for place in ("jit(f)", "  %x = ", "ENTRY", "channel_id"):
            damaged = TEXT.replace(place, junk + place)
            assert outcome(damaged) in OUTCOMES, (junk, place)


def test_dims_whose_product_no_number_holds():
    text = TEXT.replace("f32[256]", "f32[" + ",".join(["999999999999999999"] * 5000) + "]")
    assert outcome(text) in ("refused", "incomplete")


@pytest.mark.parametrize("opening", ["(", "{", "[", '"', "a={"])
def test_brackets_do_not_hide_who_takes_part(opening):
    for text in (opening * NESTED, opening * NESTED + ")" * NESTED, opening):
        assert outcome(TEXT.replace("channel_id=1", text + "channel_id=1")) in OUTCOMES
