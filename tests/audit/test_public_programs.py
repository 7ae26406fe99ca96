"""Programs as people write them: what each moves was derived by hand, and is what the audit finds.

The programs are in `public/`, with what to write instead where XLA moves more than it has to.
"""

import pytest

from tests.audit.programs import check, check_instead, registered, run

PROGRAMS = registered()


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_moves_what_was_derived_and_computes_what_one_device_does(name):
    check(name)


@pytest.mark.parametrize("name", [name for name, one in PROGRAMS.items() if one.instead])
def test_what_to_write_instead_computes_the_same_and_sends_less(name):
    check_instead(name)


def test_counts_that_data_decides_have_bounds():
    (until,) = run("until_converged").audit.collectives
    assert (until.count_min, until.count_max) == (1, None)
    assert "unknown-trip-count" in {it.rule for it in run("until_converged").audit.findings}
    bounds = [
        (found.count_min, found.count_max) for found in run("in_one_branch").audit.collectives
    ]
    assert sorted(bounds) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("sum_in_halves", "groups of 4 are part of axis 'x' (8), devices 1 apart"),
        ("sum_in_scattered_groups", "groups of 4 are part of axis 'x' (8), not evenly spaced"),
        ("sum_in_unequal_groups", "irregular groups of 2 and 6 devices"),
    ],
)
def test_devices_that_are_no_axis_are_described(name, note):
    (found,) = run(name).audit.collectives
    assert found.axes_note == note


def test_a_cpu_gathers_bfloat16_as_float32_and_the_audit_tells():
    (found,) = run("cast_then_gathered").audit.collectives
    assert (found.dtype, found.program_dtype) == ("f32", "bf16")
    assert found.payload_bytes == 64 * 16 * 4


def test_a_gather_that_the_program_casts_afterwards_is_not_the_backends_doing():
    result = run("gathered_then_cast").audit
    assert result.collectives[0].program_dtype == "f32"
    assert "promoted-dtype" not in {finding.rule for finding in result.findings}
