"""What the findings say of the public programs, with nothing too small to be worth a word."""

import functools
from collections import Counter

import pytest

from jaxpar.audit.findings import findings, gathered, gathers, placement, reshards
from jaxpar.audit.source import read
from tests.audit.programs import registered, run

PROGRAMS = registered()

EXPECTED = {
    "pick_by_arange": [("all-reduce-then-slice", "warning", 224)],
    "search_in_a_sharded_table": [("all-reduce-then-slice", "warning", 392)],
    "embedding_with_the_batch_on_the_same_axis": [("all-reduce-then-slice", "warning", 2688)],
    "matmul_over_a_sharded_dim_into_shards": [("all-reduce-then-slice", "warning", 896)],
    "optimizer_state_sharded": [("all-reduce-then-slice", "warning", 896)],
    "scan_over_layers_sharded_inside": [("all-reduce-then-slice", "warning", 1792)],
    "batch_norm": [("repeated-collective", "warning", 112)],
    "sum_of_a_sum": [("reduction-of-replicated", "warning", 56)],
    "scan_over_a_layer_sharded_stack": [("whole-stack-gathered", "warning", None)],
    "accumulation_by_reshape": [
        ("reduction-in-accumulation-loop", "warning", 768),
        ("whole-stack-gathered", "warning", None),
        ("irregular-groups", "info", None),
        ("irregular-groups", "info", None),
    ],
    "top_k_of_rows": [("before-opaque-call", "warning", 1792)],
    "top_k_of_a_sharded_dim": [("gathered-to-reduce", "warning", 14336 - 896)],
    "mean_of_a_gather": [("gathered-to-reduce", "warning", 3472)],
    "the_same_gathered_twice": [
        ("repeated-collective", "warning", 3584),
        ("gathered-to-reduce", "warning", 3472),
        ("gathered-to-reduce", "warning", 3580),
    ],
    "resharded_at_once": [("resharding-chain", "warning", 11776)],
    "merged_where_eight_does_not_divide": [("resharding-chain", "warning", 588)],
    "resharded_in_steps": [("resharding-chain", "info", 1600)],
    "gathered_then_cast": [("gather-before-narrowing", "warning", 1792)],
    "cast_then_gathered": [("promoted-dtype", "info", 1792)],
    "sum_over_an_axis_of_one": [("size-one-groups", "info", 0)],
    "sum_in_halves": [("irregular-groups", "info", None)],
    "sum_in_scattered_groups": [("irregular-groups", "info", None)],
    "sum_in_unequal_groups": [("irregular-groups", "warning", None)],
}
"""Rule, severity and bytes that each device could spare in a step; in any order."""

CLEAN = [
    "cross_entropy_over_a_sharded_vocabulary",
    "roll_by_one",
    "convolution",
    "sort_of_a_sharded_dim_beside_another",
    "top_k_of_top_k",
    "cumsum_of_shards",
]


@functools.cache
def reading_of(name):
    """A program as the audit reads it."""
    mesh = dict(part.split("=") for part in PROGRAMS[name].mesh.split(","))
    reading, problems = read(run(name).text, {axis: int(size) for axis, size in mesh.items()})
    assert not problems
    return reading


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    for module in (gathered, gathers, reshards):
        monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(gathers, "MIN_STACK_BYTES", 0)
    monkeypatch.setattr(placement, "MIN_EXPOSED_BYTES", 0)


def found_in(name):
    return [(it.rule, it.severity, it.wire_bytes) for it in findings(reading_of(name))]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_findings_are_those_with_these_bytes(name):
    assert Counter(found_in(name)) == Counter(EXPECTED[name])


@pytest.mark.parametrize("name", CLEAN)
def test_a_program_that_could_not_be_better_has_no_warning(name):
    assert [it for it in found_in(name) if it[1] == "warning"] == []
