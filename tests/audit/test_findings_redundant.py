"""Rules about redundant communication: what each finds in real programs, and what it lets pass."""

import gzip
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import step
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit.findings import MAX_PER_RULE, findings, loops, redundant
from jaxpar.audit.source import read

AXES = {"data": 2, "tensor": 4}
ROWS = P("tensor")
BOTH = P(("data", "tensor"))
HLO = Path(__file__).parent / "hlo"
RULES = (*redundant.RULES, *loops.RULES)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def compiled(mesh):
    """The HLO of a function of arrays; `without` names passes of XLA that do not run."""

    def text(function, *shapes, into=ROWS, out=BOTH, without=""):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes or [(32, 8)]]
        options = {"xla_disable_hlo_passes": without} if without else None
        return jax.jit(mapped).lower(*args).compile(compiler_options=options).as_text()

    return text


def found(text, *rules, mesh=AXES):
    """All that `rules` find, in a text that is intact."""
    reading, problems = read(text, mesh)
    assert not [problem for problem in problems if problem.severity == "error"]
    return [finding for rule in rules or RULES for finding in rule(reading)]


def names(text, *rules):
    return [(finding.rule, finding.severity) for finding in found(text, *rules)]


def dump(name):
    return gzip.open(HLO / f"{name}.txt.gz", "rt").read()


def vary(x, axis="tensor"):
    return lax.pcast(x, axis, to="varying")


def part(x, axis, size):
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, 0)


# --- all-reduce, then a slice ----------------------------------------------------------------

MISSED = [("all-reduce-then-slice", "warning")]


def sum_then_own_part(x):
    return part(lax.psum(x, "tensor"), "tensor", 2)


def mean_then_work_then_own_part(x):
    return jnp.cos(part(jnp.tanh(lax.pmean(x, "tensor")), "tensor", 2))


@pytest.mark.parametrize("function", [sum_then_own_part, mean_then_work_then_own_part])
def test_a_sum_of_which_each_device_keeps_its_part(compiled, function):
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
def test_sums_that_no_reduce_scatter_replaces(compiled, function):
    assert "all-reduce-then-slice" not in dict(names(compiled(function)))


def test_a_reduce_scatter_that_a_tpu_did_as_all_reduce_and_slice():
    (finding,) = found(dump("micro_rs_v5p_ar"), mesh={"x": 8})
    assert (finding.rule, finding.severity) == MISSED[0]
    assert finding.wire_bytes == 4096 * 4096 * 2 * 7 // 8
    assert "asks for lax.psum_scatter" in finding.remedy


@pytest.mark.parametrize("name", ["micro_rs_v5p_fused", "micro_rs_v5e_major", "micro_rs_v5e_minor"])
def test_what_a_tpu_really_scatters(name):
    assert not names(dump(name), *redundant.RULES)


# --- the same value twice --------------------------------------------------------------------

TWICE = [("repeated-collective", "warning")]


def gathered_along_both_dims(x):
    rows = lax.all_gather(x, "tensor", tiled=True)
    return rows @ lax.all_gather(x, "tensor", tiled=True, axis=1)


def test_a_value_gathered_twice(compiled):
    (finding,) = found(compiled(gathered_along_both_dims))
    assert [(finding.rule, finding.severity)] == TWICE
    assert finding.wire_bytes == 32 * 8 * 4 * 3 // 4  # one of the two
    assert len(finding.evidence) == 2 and "lax.all_gather" in finding.remedy


def test_a_value_summed_in_a_loop_and_outside(compiled):
    def function(x, w):
        y, _ = lax.scan(lambda y, _: (y * vary(lax.psum(w, "tensor")), None), x, length=5)
        return y + lax.psum(w, "tensor")

    unhoisted = compiled(
        function, (32, 8), (32, 8), without="while-loop-invariant-code-motion", out=BOTH
    )
    assert names(unhoisted) == [*TWICE, *INVARIANT]
    once = 8 * 8 * 4 * 2 * 3 // 4
    assert [finding.wire_bytes for finding in found(unhoisted)] == [once, 4 * once]
    assert not names(compiled(function, (32, 8), (32, 8)))  # XLA moves it, and merges both


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
def test_what_only_looks_communicated_twice(compiled, function):
    assert "repeated-collective" not in dict(names(compiled(function)))


def test_a_parameter_that_the_backward_pass_gathers_again(compiled):
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
def test_a_reduction_of_what_is_replicated(compiled, function):
    (finding,) = found(compiled(function))
    assert [(finding.rule, finding.severity)] == REPLICATED
    size = 32 if function is maximum_of_gathered else 8
    assert finding.wire_bytes == size * 8 * 4 * 2 * 3 // 4
    assert ("times 4" in finding.message) == (function is not maximum_of_gathered)


def test_a_sum_of_ones(compiled):
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
def test_a_reduction_of_what_differs(compiled, function):
    assert not names(compiled(function))


def test_a_gather_of_what_was_just_scattered(compiled):
    def function(x, work):
        y = lax.psum_scatter(x, "tensor", tiled=True)
        return lax.all_gather(work(y), "tensor", tiled=True)

    direct = [("gather-of-scatter", "info")]
    assert names(compiled(lambda x: function(x, lambda y: y))) == direct
    assert not names(compiled(lambda x: function(x, jnp.sin)))


def test_a_scattered_value_that_is_used_otherwise_too(compiled):
    def function(x):
        y = lax.psum_scatter(x, "tensor", tiled=True)
        return lax.all_gather(y, "tensor", tiled=True) * jnp.sum(y)

    assert not names(compiled(function))


# --- loops -----------------------------------------------------------------------------------

INVARIANT = [("loop-invariant-collective", "warning")]
UNMOVED = "while-loop-invariant-code-motion"


def loop(body, length=5):
    """`length` trips of `y = body(y, w, i)`."""

    def function(x, w):
        trip = lambda y, i: (body(y, w, i), None)  # noqa: E731
        return lax.scan(trip, x, jnp.arange(length))[0]

    return function


def sums_parameter(y, w, i):
    return jnp.sin(y) * vary(lax.psum(jnp.tanh(w), "tensor"))


def gathers_parameter(y, w, i):
    return jnp.sin(y) * jnp.sum(lax.all_gather(w, "tensor"))


@pytest.mark.parametrize("body", [sums_parameter, gathers_parameter])
def test_a_value_that_no_trip_changes(compiled, body):
    (finding,) = found(compiled(loop(body), (32, 8), (32, 8), without=UNMOVED))
    assert [(finding.rule, finding.severity)] == INVARIANT
    size, factor = (8, 2) if body is sums_parameter else (32, 1)
    assert finding.wire_bytes == 4 * size * 8 * 4 * factor * 3 // 4  # four trips of five
    assert not names(compiled(loop(body), (32, 8), (32, 8)))  # by itself, XLA moves it out


def test_a_value_that_only_the_outer_loop_changes(compiled):
    def outer(y, w, i):
        scaled = w * jnp.sum(y)
        return loop(gathers_parameter, 3)(y, scaled)

    (finding,) = found(compiled(loop(outer), (32, 8), (32, 8), without=UNMOVED))
    assert [(finding.rule, finding.severity)] == INVARIANT
    assert finding.wire_bytes == 5 * 2 * 32 * 8 * 4 * 3 // 4  # two trips of three, five times


def gathers_its_layer(y, w, i):
    layer = lax.dynamic_index_in_dim(w, i, 0)
    return jnp.sin(y) * jnp.sum(lax.all_gather(layer, "tensor"))


def sums_state(y, w, i):
    return vary(lax.psum(jnp.sin(y), "tensor"))


def gathers_on_some_trips(y, w, i):
    gather = lambda w: lax.all_gather(w, "tensor", tiled=True)[:8]  # noqa: E731
    return y + lax.cond(i > 2, gather, lambda w: w, w)


@pytest.mark.parametrize("body", [gathers_its_layer, sums_state, gathers_on_some_trips])
def test_what_a_loop_has_to_communicate_on_each_trip(compiled, body):
    assert not names(compiled(loop(body), (32, 8), (32, 8), without=UNMOVED))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def accumulated(add, start=jnp.zeros_like):
    return lambda w, x: lax.scan(lambda g, xb: (add(g, w, xb), None), start(w), x)[0]


ACCUMULATION = "reduction-in-accumulation-loop"
WEIGHTS = ((16, 16), (3, 8, 16))  # parameters, and three micro-batches
ON_DATA = {"into": (P(), P(None, "data")), "out": P()}
SCATTERED = {"into": (P("data"), P(None, "data")), "out": P("data")}


def test_a_gradient_that_each_micro_batch_sums(compiled):
    function = accumulated(lambda g, w, x: g + jax.grad(loss)(w, x))
    (finding,) = found(compiled(function, *WEIGHTS, **ON_DATA))
    assert (finding.rule, finding.severity) == (ACCUMULATION, "warning")
    assert finding.wire_bytes == 2 * 16 * 16 * 4  # two trips of three; an all-reduce by two
    assert "pcast" in finding.remedy


def test_a_mean_of_gradients_in_two_parts(compiled):
    def add(g, w, x):
        a, b = g
        return a + jax.grad(loss)(w, x) / 3, b - jax.grad(loss)(2 * w, x) * 0.5

    function = accumulated(add, lambda w: (jnp.zeros_like(w), jnp.zeros_like(w)))
    text = compiled(function, *WEIGHTS, **ON_DATA)
    assert {finding.rule for finding in found(text)} <= {ACCUMULATION}
    added = sum(finding.wire_bytes for finding in found(text))
    assert added in (2 * 1024, 2 * 2 * 1024)  # the second is subtracted, or added once negated


def test_scattered_gradients_are_told_as_a_choice(compiled):
    def gathered_loss(w, x):
        return loss(lax.all_gather(w, "data", tiled=True), x)

    function = accumulated(lambda g, w, x: g + jax.grad(gathered_loss)(w, x))
    (finding,) = found(compiled(function, *WEIGHTS, **SCATTERED))
    assert (finding.rule, finding.severity) == (ACCUMULATION, "info")
    assert "memory" in finding.remedy


def descends(w, x):
    return lax.scan(lambda w, xb: (w - 0.1 * jax.grad(loss)(w, xb), None), w, x)[0]


def looks_at_the_sum(w, x):
    def add(g, xb):
        return g + jax.grad(loss)(w + 0.1 * g, xb), None

    return lax.scan(add, jnp.zeros_like(w), x)[0]


def hands_out_every_sum(w, x):
    def add(g, xb):
        g = g + jax.grad(loss)(w, xb)
        return g, jnp.sum(g)

    g, sums = lax.scan(add, jnp.zeros_like(w), x)
    return g * jnp.sum(sums)


def sums_once(w, x):
    local = lax.pcast(w, "data", to="varying")
    add = accumulated(lambda g, w, x: g + jax.grad(loss)(w, x))
    return lax.psum(add(local, x), "data")


@pytest.mark.parametrize("function", [descends, looks_at_the_sum, hands_out_every_sum, sums_once])
def test_gradients_that_a_loop_needs_or_sums_once(compiled, function):
    assert ACCUMULATION not in dict(names(compiled(function, *WEIGHTS, **ON_DATA)))


def test_gradients_of_layers_are_stacked_not_added(compiled):
    def model(w, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    text = compiled(
        jax.grad(model), (3, 16, 16), (8, 16), into=(P(), P("data")), out=P(),
        without="all-reduce-code-motion",
    )  # fmt: skip
    reading, _ = read(text, AXES)
    assert {site.collective.count for site in reading.sites} & {1, 3}
    assert ACCUMULATION not in dict(names(text))


# --- many small ones -------------------------------------------------------------------------

SMALL = [("many-small-collectives", "info")]


def gathers(number):
    """As many gathers, each of another value."""

    def function(x):
        parts = [lax.all_gather(jnp.sin(x * i), "tensor") for i in range(1, number + 1)]
        return sum(jnp.sum(part, axis=0) for part in parts)

    return function


def chained(x):
    for _ in range(10):
        x = jnp.sin(lax.all_gather(x, "tensor")[0]) + x
    return x


def test_many_small_gathers(compiled):
    (finding,) = found(compiled(gathers(10)))
    assert [(finding.rule, finding.severity)] == SMALL
    assert finding.wire_bytes is None
    assert (
        finding.message.startswith("10 all-gather operations") and "and 2 more" in finding.message
    )


def test_gathers_that_are_few_or_large_or_wait_for_each_other(compiled):
    assert not names(compiled(gathers(7)))
    assert not names(compiled(chained))
    assert not names(compiled(gathers(10), (512, 32)))  # 64 KiB each


# --- together --------------------------------------------------------------------------------

# The program asked for reduce-scatters, and the TPU compiler did these as all-reduce and slice.
REALLY_SLICED = {"fsdp.tpu_v5e_2x4": "all-reduce-then-slice"}


@pytest.mark.parametrize("name", json.loads((HLO / "expected.json").read_text()))
def test_no_warning_on_clean_programs_of_any_backend(name):
    reading, _ = read(dump(name), None)
    warnings = {found.rule for rule in RULES for found in rule(reading) if found.severity != "info"}
    assert warnings == ({REALLY_SLICED[name]} if name in REALLY_SLICED else set())


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("data=2,fsdp=4", {"num_accumulation_steps": 2, "remat": "full"}),
        ("data=2,tensor=4", {"num_accumulation_steps": 2, "sequence": True}),
    ],
)
def test_no_warning_on_our_own_steps(mesh, fields):
    ours = step(mesh, **fields)
    text = ours.jitted.lower(*ours.abstract_inputs).compile().as_text()
    assert "warning" not in dict(map(reversed, names(text)))


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
        start = time.perf_counter()
        assert found_by_all(reading)
        return time.perf_counter() - start

    def found_by_all(reading):
        return [finding for rule in RULES for finding in rule(reading)]

    few, many = (min(seconds(number) for _ in range(2)) for number in (250, 1000))
    assert many < 2 and many < 10 * few  # 2,000 collectives
