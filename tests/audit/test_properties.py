"""What holds for every program: it does what it asked for, however its operations are printed."""

import dataclasses
import gzip
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxpar.audit import audit
from jaxpar.audit.asked import asked
from tests.audit.asynchronous import started, wrapped
from tests.audit.random_programs import (
    MESH,
    Loop,
    Op,
    disagreements,
    jitted,
    of_audit,
    of_jaxpr,
    random_program,
    tried_out,
)

HLO = Path(__file__).parent / "hlo"
CPU_DUMPS = sorted(path.name for path in HLO.glob("*.cpu*.gz") if "postspmd" not in path.name)
FEW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # compiling is too slow to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = st.integers(0, 1 << 32)  # not st.randoms, which favours tiny programs
EVERY_LOOP = (
    Loop(
        name="scan",
        length=3,
        body=(
            Op(name="psum", axes=("a", "c"), dtype="bf16"),
            Loop(name="fori", length=4, body=(Op(name="ppermute", axes=("b",), dtype="s32"),)),
            Op(name="all_gather", axes=("a", "b", "c"), dtype="f32"),
        ),
    ),
    Op(name="all_to_all", axes=("c",), dtype="f32"),
)


@FEW
@given(SEEDS)
def test_programs_do_what_they_ask_for(seed):
    """Exactly so right after partitioning, where no trip count is printed; with bf16 as f32 at
    the end, in whatever form the operations are printed."""
    tried = tried_out(random_program(random.Random(seed)))
    assert list(disagreements(tried)) == []
    assert of_audit(tried.final)
    assert_same(audit(started(tried.text), mesh=MESH), tried.final)
    assert_same(audit(wrapped(tried.text), mesh=MESH), tried.final)


def test_loops_multiply():
    """The same with the numbers written out, so that both columns cannot be wrong together."""
    function, argument = jitted(EVERY_LOOP)
    assert of_jaxpr(asked(function.trace(argument).jaxpr)) == {
        ("all-reduce", ("a", "c")): (3, 3 * 64 * 2),
        ("collective-permute", ("b",)): (12, 12 * 64 * 4),
        ("all-gather", ("a", "b", "c")): (3, 3 * 8 * 64 * 4),
        ("all-to-all", ("c",)): (1, 64 * 4),
    }
    assert list(disagreements(tried_out(EVERY_LOOP))) == []


def test_a_random_program_is_the_same_for_the_same_seed():
    programs = [random_program(random.Random(seed)) for seed in range(50)]
    assert programs == [random_program(random.Random(seed)) for seed in range(50)]
    names = Counter(op.name for program in programs for op in every_op(program))
    assert min(names.values()) >= 5
    assert len(names) == 6


@pytest.mark.parametrize("name", CPU_DUMPS)
def test_forms_of_real_programs_give_the_same_totals(name):
    with gzip.open(HLO / name, "rt") as file:
        text = file.read()
    plain = audit(text)
    assert plain.collectives
    assert started(text).count("-start(") == started(text).count("-done(") > 0
    assert_same(audit(started(text)), plain)
    assert_same(audit(wrapped(text)), plain)


def assert_same(asynchronous, plain):
    """All that is said of each operation, but for what asynchronous ones do beside it."""
    assert asynchronous.program.complete
    assert asynchronous.totals == plain.totals
    assert not any(found.is_async for found in plain.collectives)
    assert all(found.is_async for found in asynchronous.collectives)
    assert signature(asynchronous) == signature(plain)


def signature(result):
    fields = ("kind", "axes", "axes_note", "group_size", "num_groups", "dtype", "count")
    fields += ("payload_bytes", "wire_bytes", "phase", "scope", "source")
    return Counter(
        (*(getattr(found, field) for field in fields), bytes_by_phase(found))
        for found in result.collectives
    )


def bytes_by_phase(found):
    return tuple(dataclasses.astuple(buffer) for buffer in found.buffers)


def every_op(block):
    for part in block:
        if isinstance(part, Loop):
            yield from every_op(part.body)
        else:
            yield part
