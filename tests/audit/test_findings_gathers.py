"""What is gathered whole, too wide or only to be cut; and layouts reached by a detour."""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit.findings import gathers, reshards
from jaxpar.audit.source import read

AXES = {"data": 2, "tensor": 4}
HLO = Path(__file__).parent / "hlo"
RULES = (*gathers.RULES, *reshards.RULES)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def placed(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P(*spec)))


def of_text(text, axes=AXES):
    reading, problems = read(text, axes)
    assert not [problem for problem in problems if problem.severity == "error"]
    return [found for rule in RULES for found in rule(reading)]


def of(function, *args):
    return of_text(jax.jit(function).lower(*args).compile().as_text())


def mapped(mesh, function, into, out):
    return jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out)


def constrained(mesh, x, *spec):
    return lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P(*spec)))


# --- the whole stack of layers at once -------------------------------------------------------


def layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def gathered_by_hand(w, x):
    w = lax.all_gather(w, "tensor", axis=1, tiled=True)
    return layers(w, lax.pcast(x, "tensor", to="varying"))


def test_a_stack_gathered_before_the_loop_over_its_layers(mesh):
    function = mapped(mesh, gathered_by_hand, (P(None, "tensor"), P("data")), P(("data", "tensor")))
    args = placed(mesh, (6, 256, 256), None, "tensor"), placed(mesh, (8, 256), "data")
    (found,) = of(function, *args)
    assert (found.rule, found.severity, found.wire_bytes) == (
        "whole-stack-gathered", "warning", None,
    )  # fmt: skip
    assert "1/6" in found.message and "262,144 bytes would do" in found.message
    assert "Gather inside the loop" in found.remedy
    assert found.source.split(":")[0].endswith("test_findings_gathers.py")
    assert all("(line " in name for name in found.evidence) and len(found.evidence) >= 2


def test_a_stack_that_is_sharded_along_its_layers_is_gathered_by_the_partitioner(mesh):
    (found,) = of(layers, placed(mesh, (8, 256, 256), "tensor"), placed(mesh, (8, 256), "data"))
    assert found.rule == "whole-stack-gathered"
    assert "Shard the stack along another dim" in found.remedy


def test_a_gather_of_each_layer_in_the_loop_is_fine(mesh):
    def step(w, x):
        def body(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "tensor", axis=0, tiled=True)), None

        return lax.scan(body, lax.pcast(x, "tensor", to="varying"), w)[0]

    function = mapped(mesh, step, (P(None, "tensor"), P("data")), P(("data", "tensor")))
    args = placed(mesh, (6, 512, 512), None, "tensor"), placed(mesh, (8, 512), "data")
    assert of(function, *args) == []


def test_what_every_trip_reads_whole_may_be_gathered_before_the_loop(mesh):
    def step(w, x):
        w = lax.all_gather(w, "tensor", axis=0, tiled=True)
        x = lax.pcast(x, "tensor", to="varying")
        return lax.fori_loop(0, 6, lambda i, x: jnp.tanh(x @ w), x)

    function = mapped(mesh, step, (P("tensor"), P("data")), P(("data", "tensor")))
    args = placed(mesh, (1024, 1024), "tensor"), placed(mesh, (8, 1024), "data")
    assert of(function, *args) == []


def test_a_table_that_a_loop_looks_up_whole_rows_of_outside_is_fine(mesh):
    def step(table, ids, x):
        table = lax.all_gather(table, "tensor", axis=0, tiled=True)
        start = lax.pcast(x, "tensor", to="varying") + table[ids]
        return lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), start)

    into = (P("tensor"), P("data"), P("data"))
    function = mapped(mesh, step, into, P(("data", "tensor")))
    args = (
        placed(mesh, (2048, 256), "tensor"),
        placed(mesh, (8,), "data", dtype=jnp.int32),
        placed(mesh, (8, 256), "data"),
    )
    assert of(function, *args) == []


LOOP = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%body (state: (s32[], f32[512,512], f32[6,512,512])) -> (s32[], f32[512,512], f32[6,512,512]) {
  %state = (s32[], f32[512,512]{1,0}, f32[6,512,512]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%state), index=1
  %stack = f32[6,512,512]{2,1,0} get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %fresh = f32[6,512,512]{2,1,0} broadcast(%x), dimensions={1,2}
  %slice = f32[1,512,512]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), \
dynamic_slice_sizes={1,512,512}
  %layer = f32[512,512]{1,0} bitcast(%slice)
  %y = f32[512,512]{1,0} dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[512,512]{1,0}, f32[6,512,512]{2,1,0}) tuple(%next, %y, %stack)
}

%condition (state.1: (s32[], f32[512,512], f32[6,512,512])) -> pred[] {
  %state.1 = (s32[], f32[512,512]{1,0}, f32[6,512,512]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %six), direction=LT
}

ENTRY %main (p0: f32[6,128,512], p1: f32[512,512]) -> f32[512,512] {
  %p0 = f32[6,128,512]{2,1,0} parameter(0)
  %p1 = f32[512,512]{1,0} parameter(1)
  %start = s32[] constant(0)
  %all-gather = f32[6,512,512]{2,1,0} all-gather(%p0), channel_id=1, replica_groups=[2,4]<=[8], \
dimensions={1}, use_global_device_ids=true
  %tuple = (s32[], f32[512,512]{1,0}, f32[6,512,512]{2,1,0}) tuple(%start, %p1, %all-gather)
  %while = (s32[], f32[512,512]{1,0}, f32[6,512,512]{2,1,0}) while(%tuple), \
condition=%condition, body=%body
  ROOT %result = f32[512,512]{1,0} get-tuple-element(%while), index=1
}
"""


def test_a_loop_written_out():
    assert [found.rule for found in of_text(LOOP)] == ["whole-stack-gathered"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%stack, %i, %zero, %zero)", "%stack, %zero, %zero, %zero)"),  # one slice on all trips
        ("tuple(%next, %y, %stack)", "tuple(%next, %y, %fresh)"),  # another stack afterwards
        ("dynamic_slice_sizes={1,512,512}", "dynamic_slice_sizes={1,128,512}"),  # a part of each
        ("512,512", "64,64"),  # too small to matter
    ],
)
def test_loops_that_do_not_go_through_a_stack_slice_by_slice(old, new):
    text = LOOP.replace(old, new)
    if "{1,128,512}" in new:
        text = text.replace("%slice = f32[1,512,512]", "%slice = f32[1,128,512]")
    if new == "64,64":
        text = text.replace("6,128,512", "6,16,64")
    assert of_text(text) == []


# --- types ------------------------------------------------------------------------------------


def gather(mesh, after, dtype=jnp.float32, dot=False):
    def step(x, y):
        whole = after(lax.all_gather(x, "tensor", axis=0, tiled=True))
        return (whole, y @ whole) if dot else whole

    out = P("tensor") if not dot else (P("tensor"), P("tensor"))
    function = mapped(mesh, step, (P("tensor"), P("tensor")), out)
    return function, placed(mesh, (256, 256), "tensor", dtype=dtype), placed(
        mesh, (256, 256), "tensor", dtype=dtype
    )  # fmt: skip


def test_a_gather_that_everybody_narrows_after(mesh):
    (found,) = of(*gather(mesh, lambda x: x.astype(jnp.int8)))
    assert (found.rule, found.severity) == ("gather-before-narrowing", "warning")
    assert found.wire_bytes == 256 * 256 * 4 * 3 // 4 * 3 // 4  # 3 of 4 bytes, from 3 of 4 shards
    assert "s8" in found.message and "Convert the shard" in found.remedy


def test_a_gather_of_which_somebody_needs_the_wide_type_is_fine(mesh):
    assert of(*gather(mesh, lambda x: x.astype(jnp.int8).astype(jnp.float32) + x)) == []


def test_a_gather_that_is_widened_after_is_as_it_should_be(mesh):
    assert of(*gather(mesh, lambda x: x.astype(jnp.float32), dtype=jnp.int8)) == []


NARROWED_ON_GPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%fused_convert (param_0: f32[1024,512]) -> bf16[1024,512] {
  %param_0 = f32[1024,512]{1,0} parameter(0)
  ROOT %convert.1 = bf16[1024,512]{1,0} convert(%param_0)
}

ENTRY %main (p0: f32[256,512], p1: bf16[512,1024]) -> bf16[512,512] {
  %p0 = f32[256,512]{1,0} parameter(0)
  %p1 = bf16[512,1024]{1,0} parameter(1)
  %all-gather-start = (f32[256,512]{1,0}, f32[1024,512]{1,0}) all-gather-start(%p0), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, \
backend_config={"operation_queue_id":"0"}
  %all-gather-done = f32[1024,512]{1,0} all-gather-done(%all-gather-start)
  %fusion = bf16[1024,512]{1,0} fusion(%all-gather-done), kind=kLoop, calls=%fused_convert
  ROOT %dot = bf16[512,512]{1,0} dot(%p1, %fusion), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""


def test_a_float32_gather_for_bfloat16_matmuls_on_a_gpu():
    (found,) = of_text(NARROWED_ON_GPU)
    assert found.rule == "gather-before-narrowing"
    assert found.wire_bytes == 1024 * 512 * 4 * 3 // 4 // 2
    wide = NARROWED_ON_GPU.replace("bf16", "f32").replace("convert(", "negate(")
    assert of_text(wide) == []


def test_a_bfloat16_gather_that_the_cpu_widens_is_information_once_per_kind(mesh):
    def step(x, y):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
        other = lax.all_gather(jnp.sin(y), "tensor", axis=0, tiled=True)
        return whole @ other

    function = mapped(mesh, step, (P("tensor"), P("tensor")), P("tensor"))
    args = [placed(mesh, (256, 256), "tensor", dtype=jnp.bfloat16)] * 2
    (found,) = of(function, *args)
    assert (found.rule, found.severity) == ("promoted-dtype", "info")
    assert "2 all-gather operations" in found.message and "bf16 as f32" in found.message
    assert found.wire_bytes == 2 * 256 * 256 * 2 * 3 // 4


def test_float32_is_not_promoted(mesh):
    assert of(*gather(mesh, jnp.sin, dot=True)) == []


# --- reshardings ------------------------------------------------------------------------------


def own_columns(x, axis="tensor"):
    whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
    return lax.dynamic_slice_in_dim(jnp.sin(whole), lax.axis_index(axis) * 64, 64, 1)


def test_a_gather_of_which_each_device_keeps_its_columns(mesh):
    function = mapped(mesh, own_columns, P("tensor"), P(None, "tensor"))
    (found,) = of(function, placed(mesh, (256, 256), "tensor"))
    assert (found.rule, found.severity) == ("resharding-chain", "warning")
    assert found.wire_bytes == 256 * 256 * 4 * 3 // 4 * 3 // 4
    assert "lax.all_to_all" in found.remedy and "rematerialization" not in found.message


def test_the_way_over_the_whole_array_is_called_what_xla_calls_it(mesh):
    def step(x):
        x = lax.all_gather(x, "tensor", axis=0, tiled=True)
        x = lax.all_gather(x, "data", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(("data", "tensor")) * 64, 64, 1)

    both = ("data", "tensor")
    function = mapped(mesh, step, P(both), P(None, both))
    (found,) = of(function, placed(mesh, (512, 512), both))
    assert "all_gather" in found.message and " and " in found.message
    assert "involuntary full rematerialization" in found.message
    gathered = 512 * 512 * 4
    assert found.wire_bytes == gathered // 2 * 3 // 4 * 3 // 4 + gathered // 2 * 7 // 8


def test_a_slice_that_no_device_number_decides_is_no_resharding(mesh):
    def step(x, start):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(whole, start[0], 64, 1)

    function = mapped(mesh, step, (P("tensor"), P()), P("tensor"))
    args = placed(mesh, (256, 256), "tensor"), placed(mesh, (1,), dtype=jnp.int32)
    assert of(function, *args) == []


def test_a_gather_that_is_sliced_and_used_whole_too_is_fine(mesh):
    def step(x):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
        own = lax.dynamic_slice_in_dim(whole, lax.axis_index("tensor") * 64, 64, 1)
        return own, whole @ own

    function = mapped(mesh, step, P("tensor"), (P(None, "tensor"), P(None, "tensor")))
    assert of(function, placed(mesh, (256, 256), "tensor")) == []


def test_a_piece_larger_than_a_shard_is_no_resharding(mesh):
    def step(x):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index("data") * 128, 128, 1)

    function = mapped(mesh, step, P("tensor"), P("tensor", "data"))
    assert of(function, placed(mesh, (256, 256), "tensor")) == []


def test_a_small_resharding_is_not_worth_a_word(mesh):
    function = mapped(mesh, own_columns, P("tensor"), P(None, "tensor"))
    assert of(function, placed(mesh, (32, 256), "tensor")) == []


def exchanged(mesh, between, again="tensor", dims=(0, 1)):
    def step(x):
        y = between(lax.all_to_all(x, "tensor", 1, 0, tiled=True))
        return lax.all_to_all(y, again, *dims, tiled=True)

    both = ("data", "tensor")
    return mapped(mesh, step, P(both), P(both)), placed(mesh, (1024, 512), both)


def test_two_all_to_alls_there_and_back(mesh):
    (found,) = of(*exchanged(mesh, lambda y: y.T, dims=(1, 0)))
    assert (found.rule, found.severity) == ("resharding-chain", "warning")
    assert "there and back" in found.message
    assert found.wire_bytes == 1024 * 512 * 4 // 8 * 3 // 4


def test_two_all_to_alls_over_two_axes_in_a_row_are_information(mesh):
    (found,) = of(*exchanged(mesh, lambda y: y, again="data"))
    assert (found.rule, found.severity) == ("resharding-chain", "info")
    assert found.wire_bytes == 1024 * 512 * 4 // 8 * (6 + 4 - 7) // 8


def test_an_all_to_all_whose_result_is_used_besides_is_needed(mesh):
    def step(x):
        y = lax.all_to_all(x, "tensor", 1, 0, tiled=True)
        return lax.all_to_all(y, "data", 0, 1, tiled=True), y.T @ y

    both = ("data", "tensor")
    function = mapped(mesh, step, P(both), (P(both), P(both)))
    assert of(function, placed(mesh, (1024, 512), both)) == []


def test_work_between_two_all_to_alls_is_what_they_are_for(mesh):
    assert of(*exchanged(mesh, lambda y: jax.nn.softmax(y @ y.T) @ y)) == []


# --- gathered to be reduced -------------------------------------------------------------------


def test_logits_gathered_for_their_maximum(mesh):
    def step(x):
        return jnp.max(constrained(mesh, jnp.sin(x), "data", None), -1)

    (found,) = of(step, placed(mesh, (256, 1024), "data", "tensor"))
    assert (found.rule, found.severity) == ("gathered-to-reduce", "warning")
    assert "524,288 bytes over tensor" in found.message
    assert 0 < found.wire_bytes < 524_288 * 3 // 4
    assert "lax.pmax" in found.remedy


def test_logits_gathered_for_a_loss(mesh):
    def step(x, labels):
        logits = lax.all_gather(x, "tensor", axis=1, tiled=True)
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.sum(log_sum - label)[None]

    into, both = (P("data", "tensor"), P("data")), P(("data", "tensor"))
    function = mapped(mesh, step, into, both)
    labels = placed(mesh, (256,), "data", dtype=jnp.int32)
    (found,) = of(function, placed(mesh, (256, 1024), "data", "tensor"), labels)
    assert found.rule == "gathered-to-reduce"


def test_logits_gathered_to_choose_a_few_tokens(mesh):
    found = of(lambda x: lax.top_k(x, 2)[0], placed(mesh, (256, 1024), "data", "tensor"))
    assert [it.rule for it in found] == ["gathered-to-reduce", "before-opaque-call"]
    assert "over tensor" in found[0].message and "over data" in found[1].message


def test_a_reduction_along_another_dim_than_the_gathered_is_no_reason(mesh):
    assert of(*gather(mesh, lambda x: jnp.sum(x[:, :128], axis=1))) == []


def test_a_gather_for_a_matmul_is_what_gathers_are_for(mesh):
    def step(x, w):
        return jnp.max(lax.all_gather(x, "tensor", axis=0, tiled=True) @ w, 0)

    function = mapped(mesh, step, (P("tensor"), P()), P("tensor"))
    assert of(function, placed(mesh, (256, 512), "tensor"), placed(mesh, (512, 64))) == []


def test_a_cumulative_sum_needs_the_whole_dim(mesh):
    assert of(*gather(mesh, lambda x: jnp.cumsum(x, axis=0))) == []


def top_k(mesh, both=False, local=None):
    """The best 2 of rows that `tensor` shards, of which each shard sends its best `local`."""

    def step(x):
        if local is not None:
            x = lax.top_k(x, local)[0]
        values, indices = lax.top_k(lax.all_gather(x, "tensor", axis=1, tiled=True), 2)
        return (values, indices) if both else values

    spec = P(("data", "tensor"))
    out = (spec, spec) if both else spec
    function = jax.shard_map(step, mesh=mesh, in_specs=P("data", "tensor"), out_specs=out)
    return function, placed(mesh, (1024, 1024), "data", "tensor")


def test_of_the_best_few_the_candidates_of_each_shard_have_to_be_gathered(mesh):
    (found,) = of(*top_k(mesh))
    gathered, candidates = 512 * 1024 * 4 * 3 // 4, 512 * 2 * 4 * 3
    assert (found.rule, found.wire_bytes) == ("gathered-to-reduce", gathered - candidates)
    (found,) = of(*top_k(mesh, both=True))  # with their indices
    assert found.wire_bytes == gathered - 2 * candidates


@pytest.mark.parametrize("local", [2, 16])
def test_a_gather_of_candidates_is_how_to_choose_a_few(mesh, local):
    assert of(*top_k(mesh, local=local)) == []


SORTED = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%greater (x: f32[], y: f32[]) -> pred[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %compare = pred[] compare(%x, %y), direction=GT
}

ENTRY %main (p0: f32[512,256]) -> f32[512,8] {
  %p0 = f32[512,256]{1,0} parameter(0)
  %sort = f32[512,256]{1,0} sort(%p0), dimensions={1}, to_apply=%greater
  %slice = f32[512,32]{1,0} slice(%sort), slice={[0:512], [0:32]}
  %all-gather = f32[512,128]{1,0} all-gather(%slice), channel_id=1, replica_groups=[2,4]<=[8], \
dimensions={1}, use_global_device_ids=true
  %sort.1 = f32[512,128]{1,0} sort(%all-gather), dimensions={1}, to_apply=%greater
  ROOT %slice.1 = f32[512,8]{1,0} slice(%sort.1), slice={[0:512], [0:8]}
}
"""


def test_candidates_that_a_sort_and_a_slice_choose_are_candidates():
    assert of_text(SORTED) == []
    (found,) = of_text(SORTED.replace("sort(%p0), dimensions={1}, to_apply=%greater", "sine(%p0)"))
    assert found.wire_bytes == 512 * 128 * 4 * 3 // 4 - 512 * 8 * 4 * 3
    sorted_whole = SORTED.replace("slice(%sort), slice={[0:512], [0:32]}", "copy(%sort)")
    sorted_whole = sorted_whole.replace("512,32]", "512,256]").replace("512,128]", "512,1024]")
    assert [found.rule for found in of_text(sorted_whole)] == ["gathered-to-reduce"]


def masked_sum(mesh, weights, *sharded):
    """What `weights` make of a gather, summed."""

    def step(x, given):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
        return jnp.sum(whole * weights(given).astype(x.dtype), 0)

    spec = P(("data", "tensor"))
    function = jax.shard_map(step, mesh=mesh, in_specs=(P("tensor"), P(*sharded)), out_specs=spec)
    given = placed(mesh, (2048, 1) if sharded else (), *sharded)
    return function, placed(mesh, (1024, 64), "tensor"), given


@pytest.mark.parametrize(
    "weights",
    [
        lambda scale: jnp.full((1024, 1), 2.0) * scale,
        lambda scale: jnp.arange(1024)[:, None] < 300,
        lambda scale: lax.psum(jnp.sin(scale), ("data", "tensor")),
    ],
)
def test_a_sum_with_weights_that_all_devices_share_could_be_an_all_reduce(mesh, weights):
    assert "gathered-to-reduce" in [found.rule for found in of(*masked_sum(mesh, weights))]


@pytest.mark.parametrize(
    "weights",
    [
        lambda scale: jnp.arange(1024)[:, None] < 256 * lax.axis_index("tensor"),  # a prefix
        lambda scale: jnp.full((1024, 1), 1.0) * lax.axis_index("data").astype(jnp.float32),
    ],
)
def test_a_sum_with_weights_of_each_device_needs_the_whole(mesh, weights):
    assert of(*masked_sum(mesh, weights)) == []


def test_a_sum_with_weights_that_are_sharded_needs_the_whole(mesh):
    assert of(*masked_sum(mesh, lambda given: given, "data")) == []


TWICE = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%max (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %larger = f32[] maximum(%x, %y)
}

ENTRY %main (p0: f32[128,256]) -> f32[256] {
  %p0 = f32[128,256]{1,0} parameter(0)
  %low = f32[] constant(-inf)
  %all-gather = f32[128,1024]{1,0} all-gather(%p0), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, use_global_device_ids=true
  %all-gather.1 = f32[256,1024]{1,0} all-gather(%all-gather), channel_id=2, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, use_global_device_ids=true
  ROOT %reduce = f32[256]{0} reduce(%all-gather.1, %low), dimensions={1}, to_apply=%max
}
"""


def test_a_gather_over_another_axis_on_the_way_leaves_the_devices_with_the_same():
    assert [found.rule for found in of_text(TWICE)] == ["gathered-to-reduce"]
    others = "{{0,1},{4,5},{2,6},{3,7}}"  # some devices meet none of the other half
    assert of_text(TWICE.replace("{{0,4},{1,5},{2,6},{3,7}}", others)) == []


WINDOWS = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p0: f32[256,64]) -> f32[8,64] {
  %p0 = f32[256,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %all-gather = f32[1024,64]{1,0} all-gather(%p0), channel_id=1, replica_groups=[2,4]<=[8], \
dimensions={0}, use_global_device_ids=true
  ROOT %windows = f32[8,64]{1,0} reduce-window(%all-gather, %zero), \
window={size=128x1 stride=128x1}, to_apply=%add
}
"""


def test_windows_that_reduce_and_windows_that_run_over_the_dim():
    assert [found.rule for found in of_text(WINDOWS)] == ["gathered-to-reduce"]
    sliding = WINDOWS.replace("f32[8,64]", "f32[897,64]").replace(" stride=128x1", "")
    assert of_text(sliding) == []
    running = WINDOWS.replace("f32[8,64]", "f32[1024,64]").replace(
        "size=128x1 stride=128x1", "size=1024x1 pad=1023_0x0_0"
    )
    assert of_text(running) == []


# --- programs that are as they should be ------------------------------------------------------


@pytest.mark.parametrize("name", json.loads((HLO / "expected.json").read_text()))
def test_clean_programs_have_no_warning(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        found = of_text(file.read(), None)
    assert {it.rule for it in found} <= ({"promoted-dtype"} if ".cpu" in name else set())
    assert not [it for it in found if it.severity == "warning"]
