"""Rules about redundant communication: what each finds in real programs, and what it lets pass."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax import lax
from tiny import AXES, HLO, compiled, dump, vary

from jaxpar.audit.dataflow import Place
from jaxpar.audit.findings import MAX_PER_RULE, findings, loops, redundant
from jaxpar.audit.findings.offsets import on_each_device
from jaxpar.audit.findings.values import Producers
from jaxpar.audit.reader import Operand
from jaxpar.audit.source import read

INVARIANT = [("loop-invariant-collective", "warning")]
RULES = (*redundant.RULES, *loops.RULES)


def found(text, rules=RULES, mesh=tiny.AXES):
    return tiny.found(text, rules, mesh)


def names(text, rules=RULES):
    return [(finding.rule, finding.severity) for finding in found(text, rules)]


def part(x, axis, size):
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, 0)


# --- all-reduce, then a slice ----------------------------------------------------------------

MISSED = [("all-reduce-then-slice", "warning")]


def sum_then_own_part(x):
    return part(lax.psum(x, "tensor"), "tensor", 2)


def mean_then_work_then_own_part(x):
    return jnp.cos(part(jnp.tanh(lax.pmean(x, "tensor")), "tensor", 2))


@pytest.mark.parametrize("function", [sum_then_own_part, mean_then_work_then_own_part])
def test_a_sum_of_which_each_device_keeps_its_part(function):
    text = compiled(function)
    (finding,) = found(text)
    assert names(text) == MISSED
    assert finding.wire_bytes == 8 * 8 * 4 * 3 // 4  # of 2 · 3/4 · 256
    assert finding.source.split(":")[0].endswith("test_findings_redundant.py")
    assert "psum_scatter" in finding.remedy and "keeps 1/4" in finding.message
    name, line = finding.evidence[0].removesuffix(")").split(" (line ")
    assert f"{name} = " in text.splitlines()[int(line) - 1]
    assert "dynamic-slice(" in text.splitlines()[int(finding.evidence[1][:-1].split()[-1]) - 1]


def whole_too(x):
    y = lax.psum(x, "tensor")
    return part(y, "tensor", 2) * jnp.sum(y)


def same_part_in_the_whole_group(x):
    return part(vary(lax.psum(x, "tensor")), "data", 2)


def fixed_part(x):
    return vary(lax.psum(x, "tensor")[2:4])


def half(x):
    return lax.dynamic_slice_in_dim(lax.psum(x, "tensor"), lax.axis_index("tensor"), 4, 0)


def maximum(x):
    return part(lax.pmax(x, "tensor"), "tensor", 2)


def scattered(x):
    return lax.psum_scatter(x, "tensor", tiled=True)


@pytest.mark.parametrize(
    "function",
    [whole_too, same_part_in_the_whole_group, fixed_part, half, maximum, scattered],
)
def test_sums_that_no_reduce_scatter_replaces(function):
    assert "all-reduce-then-slice" not in dict(names(compiled(function)))


def test_a_reduce_scatter_that_a_tpu_did_as_all_reduce_and_slice():
    (finding,) = found(dump("micro_rs_v5p_ar"), mesh={"x": 8})
    assert (finding.rule, finding.severity) == MISSED[0]
    assert finding.wire_bytes == 4096 * 4096 * 2 * 7 // 8
    assert "asks for lax.psum_scatter" in finding.remedy


@pytest.mark.parametrize("name", ["micro_rs_v5p_fused", "micro_rs_v5e_major", "micro_rs_v5e_minor"])
def test_what_a_tpu_really_scatters(name):
    assert not names(dump(name), redundant.RULES)


OFFSETS = """HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main.0_spmd (param.0: s32[]) -> s32[] {
  %param.0 = s32[] parameter(0)
  %constant.2 = s32[] constant(2)
  %constant.3 = s32[] constant(-3)
  %constant.4 = s32[] constant(4)
  %table = u32[8]{0} constant({7, 6, 5, 4, 3, 2, 1, 0})
  %partition-id.0 = u32[] partition-id()
  %id = s32[] convert(%partition-id.0)
  %less = pred[] compare(%id, %constant.4), direction=LT
  %chosen = s32[] select(%less, %constant.2, %id)
  %looked_up.1 = u32[1]{0} dynamic-slice(%table, %partition-id.0), dynamic_slice_sizes={1}
  %looked_up = u32[] bitcast(%looked_up.1)
  %shifted = s32[] add(%id, %constant.3)
  %halved = s32[] divide(%shifted, %constant.2)
  %rest = s32[] remainder(%shifted, %constant.2)
  %clamped = s32[] clamp(%constant.2, %id, %constant.4)
  ROOT %given = s32[] add(%id, %param.0)
}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chosen", [2, 2, 2, 2, 4, 5, 6, 7]),
        ("looked_up", [7, 6, 5, 4, 3, 2, 1, 0]),
        ("halved", [-1, -1, 0, 0, 0, 1, 1, 2]),
        ("rest", [-1, 0, -1, 0, 1, 0, 1, 0]),
        ("clamped", [2, 2, 2, 3, 4, 4, 4, 4]),
        ("given", None),
    ],
)
def test_what_an_offset_is_on_each_device(name, expected):
    reading, _ = read(OFFSETS, None)
    place = Place(computation=reading.module.entry, operand=Operand(name=name))
    values = on_each_device(Producers(reading), place)
    assert (values if values is None else values.tolist()) == expected


# --- the same value twice --------------------------------------------------------------------

TWICE = [("repeated-collective", "warning")]


def gathered_along_both_dims(x):
    rows = lax.all_gather(x, "tensor", tiled=True)
    return rows @ lax.all_gather(x, "tensor", tiled=True, axis=1)


def test_a_value_gathered_twice():
    (finding,) = found(compiled(gathered_along_both_dims))
    assert [(finding.rule, finding.severity)] == TWICE
    assert finding.wire_bytes == 32 * 8 * 4 * 3 // 4  # one of the two
    assert len(finding.evidence) == 2 and "lax.all_gather" in finding.remedy


def test_a_value_summed_in_a_loop_and_outside():
    def function(x, w):
        y, _ = lax.scan(lambda y, _: (y * vary(lax.psum(w, "tensor")), None), x, length=5)
        return y + lax.psum(w, "tensor")

    unhoisted = compiled(function, (32, 8), (32, 8), without="while-loop-invariant-code-motion")
    assert names(unhoisted) == [*TWICE, *INVARIANT]
    once = 8 * 8 * 4 * 2 * 3 // 4
    assert [finding.wire_bytes for finding in found(unhoisted)] == [once, 4 * once]
    assert not names(compiled(function, (32, 8), (32, 8)))  # XLA moves it, and merges both


def test_a_value_gathered_twice_in_one_branch():
    def function(x):
        twice = lambda x: gathered_along_both_dims(x)[:8, :8]  # noqa: E731
        return lax.cond(lax.psum(jnp.sum(x), "tensor") > 0, twice, lambda x: x, x)

    (finding,) = found(compiled(function))
    assert finding.rule == "repeated-collective" and finding.wire_bytes is None


def sum_and_maximum(x):
    return lax.psum(x, "tensor") - lax.pmax(x, "tensor")


def over_either_axis(x):
    return vary(lax.psum(x, "tensor")) + lax.psum(vary(x, "data"), "data")


def scattered_along_both_dims(x):
    y = x @ x
    rows = lax.psum_scatter(y, "tensor", tiled=True)
    return rows @ lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)


def in_either_branch(x):
    rows = lambda x: lax.all_gather(x, "tensor", tiled=True)  # noqa: E731
    columns = lambda x: lax.all_gather(x, "tensor", tiled=True, axis=1).T.reshape(32, 8)  # noqa: E731
    return lax.cond(jnp.sum(lax.psum(x, "tensor")) > 0, rows, columns, x)


@pytest.mark.parametrize(
    "function", [sum_and_maximum, over_either_axis, scattered_along_both_dims, in_either_branch]
)
def test_what_only_looks_communicated_twice(function):
    assert "repeated-collective" not in dict(names(compiled(function)))


def test_a_parameter_that_the_backward_pass_gathers_again():
    @jax.checkpoint
    def layer(w, x):
        return jnp.tanh(x @ lax.all_gather(w, "tensor", tiled=True))

    text = compiled(
        lambda w, x: sum(jax.value_and_grad(lambda w: jnp.sum(layer(w, x)))(w)),
        (32, 32), (32, 32),
        without="cse",  # which merges both on some versions, and so saves no memory
    )  # fmt: skip
    reading, _ = read(text, AXES)
    gathers = [site.collective.phase for site in reading.sites if "gather" in site.collective.kind]
    assert sorted(gathers) == ["forward", "recompute"]
    assert not names(text)


# --- reducing what is the same already -------------------------------------------------------

REPLICATED = [("reduction-of-replicated", "warning")]


def sum_of_sum(x):
    return lax.psum(vary(lax.psum(x, "tensor")), "tensor")


def mean_of_sine_of_mean(x):
    return lax.pmean(vary(jnp.sin(lax.pmean(x, "tensor"))), "tensor")


def sum_of_sum_over_more(x):
    return lax.psum(vary(lax.psum(vary(x, "data"), ("data", "tensor"))), "tensor")


def maximum_of_gathered(x):
    return lax.pmax(lax.all_gather(x, "tensor"), "tensor")[0]


@pytest.mark.parametrize(
    "function", [sum_of_sum, mean_of_sine_of_mean, sum_of_sum_over_more, maximum_of_gathered]
)
def test_a_reduction_of_what_is_replicated(function):
    (finding,) = found(compiled(function))
    assert [(finding.rule, finding.severity)] == REPLICATED
    size = 32 if function is maximum_of_gathered else 8
    assert finding.wire_bytes == size * 8 * 4 * 2 * 3 // 4
    assert ("times 4" in finding.message) == (function is not maximum_of_gathered)


def test_a_sum_of_ones():
    ones = lambda x: x + lax.psum(vary(lax.optimization_barrier(jnp.ones(8))), "tensor")  # noqa: E731
    (finding,) = found(compiled(ones))
    assert finding.rule == "reduction-of-replicated" and "a constant" in finding.message


def sum_over_the_other_axis(x):
    return lax.psum(vary(lax.psum(x, "tensor"), "data"), "data")


def sum_over_more(x):
    y = lax.pcast(lax.psum(x, "tensor"), ("data", "tensor"), to="varying")
    return lax.psum(y, ("data", "tensor"))


def sum_of_sum_and_own(x):
    return lax.psum(vary(lax.psum(x, "tensor")) * x, "tensor")


def sum_by_device(x):
    return lax.psum(
        vary(lax.psum(x, "tensor")) * lax.axis_index("tensor").astype(x.dtype), "tensor"
    )


@pytest.mark.parametrize(
    "function", [sum_over_the_other_axis, sum_over_more, sum_of_sum_and_own, sum_by_device]
)
def test_a_reduction_of_what_differs(function):
    assert not names(compiled(function))


def test_a_gather_of_what_was_just_scattered():
    def function(x, work):
        y = lax.psum_scatter(x, "tensor", tiled=True)
        return lax.all_gather(work(y), "tensor", tiled=True)

    direct = [("gather-of-scatter", "info")]
    assert names(compiled(lambda x: function(x, lambda y: y))) == direct
    assert not names(compiled(lambda x: function(x, jnp.sin)))


def test_a_scattered_value_that_is_used_otherwise_too():
    def function(x):
        y = lax.psum_scatter(x, "tensor", tiled=True)
        return lax.all_gather(y, "tensor", tiled=True) * jnp.sum(y)

    assert not names(compiled(function))


# --- together --------------------------------------------------------------------------------

# The program asked for reduce-scatters, and the TPU compiler did these as all-reduce and slice.
REALLY_SLICED = {"fsdp.tpu_v5e_2x4": "all-reduce-then-slice"}


@pytest.mark.parametrize("name", json.loads((HLO / "expected.json").read_text()))
def test_no_warning_on_clean_programs_of_any_backend(name):
    reading, _ = read(dump(name), None)
    warnings = {found.rule for rule in RULES for found in rule(reading) if found.severity != "info"}
    assert warnings == ({REALLY_SLICED[name]} if name in REALLY_SLICED else set())


def unrolled(num_layers):
    """HLO of a step whose layers gather the same value, and sum what is a sum already."""
    groups = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
    lines = [
        "HloModule jit_step, is_scheduled=true, num_partitions=8",
        "",
        "%region_0.0 (a: f32[], b: f32[]) -> f32[] {",
        "  %a = f32[] parameter(0)",
        "  %b = f32[] parameter(1)",
        "  ROOT %add.0 = f32[] add(%a, %b)",
        "}",
        "",
        "ENTRY %main.0_spmd (param.0: f32[8,8], param.1: f32[64,8]) -> f32[64,8] {",
        "  %param.0 = f32[8,8]{1,0} parameter(0)",
        "  %all-reduce.0 = f32[64,8]{1,0} parameter(1)",
    ]
    for i in range(1, num_layers + 1):
        lines += [
            f"  %copy.{i} = f32[8,8]{{1,0}} copy(%param.0)",
            f"  %all-gather.{i} = f32[64,8]{{1,0}} all-gather(%copy.{i}), {groups}, "
            "dimensions={0}",
            f"  %add.{i} = f32[64,8]{{1,0}} add(%all-reduce.{i - 1}, %all-gather.{i})",
            f"  %all-reduce.{i} = f32[64,8]{{1,0}} all-reduce(%add.{i}), {groups}, "
            "to_apply=%region_0.0",
        ]
    last = f"all-reduce.{num_layers}"
    return "\n".join([*lines, f"  ROOT %copy.0 = f32[64,8]{{1,0}} copy(%{last})", "}", ""])


def test_findings_are_bounded_per_rule():
    reading, _ = read(unrolled(100), None)
    listed = [found for found in findings(reading) if found.rule == "reduction-of-replicated"]
    assert len(listed) == MAX_PER_RULE + 1
    assert listed[-1].message == f"and {99 - MAX_PER_RULE} more like the {MAX_PER_RULE} above"
    (repeated,) = (found for found in findings(reading) if found.rule == "repeated-collective")
    assert len(repeated.evidence) == 13 and repeated.evidence[-1] == "and 88 more"


def test_time_is_linear_in_the_number_of_collectives():
    def seconds(num_layers):
        reading, _ = read(unrolled(num_layers), None)
        start = time.process_time()
        assert found_by_all(reading)
        return time.process_time() - start

    def found_by_all(reading):
        return [finding for rule in RULES for finding in rule(reading)]

    few, many = (min(seconds(number) for _ in range(2)) for number in (250, 1000))
    assert many < 2 and many < 10 * few  # 2,000 collectives
