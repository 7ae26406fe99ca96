"""Communication before, beside and between what it should not be."""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit.findings import gathers, placement, reshards
from jaxpar.audit.source import read

AXES = {"data": 2, "tensor": 4}
HLO = Path(__file__).parent / "hlo"
RULES = (*gathers.RULES, *reshards.RULES, *placement.RULES)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def placed(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P(*spec)))


def of_text(text, axes=AXES, **fields):
    reading, problems = read(text, axes)
    assert not [problem for problem in problems if problem.severity == "error"]
    reading = dataclasses.replace(reading, **fields)
    return [found for rule in RULES for found in rule(reading)]


def of(function, *args, **fields):
    return of_text(jax.jit(function).lower(*args).compile().as_text(), **fields)


# --- before what cannot be partitioned --------------------------------------------------------


FFT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%sliced (param_0: c64[64,256], param_1: u32[8], param_2: u32[]) -> f32[32,256] {
  %param_0 = c64[64,256]{1,0} parameter(0)
  %param_1 = u32[8]{0} parameter(1)
  %param_2 = u32[] parameter(2)
  %offset = u32[1]{0} dynamic-slice(%param_1, %param_2), dynamic_slice_sizes={1}
  %bitcast.1 = u32[] bitcast(%offset)
  %zero = u32[] constant(0)
  %own = c64[32,256]{1,0} dynamic-slice(%param_0, %bitcast.1, %zero), dynamic_slice_sizes={32,256}
  ROOT %real = f32[32,256]{1,0} real(%own)
}

ENTRY %main (param: c64[32,256]) -> f32[32,256] {
  %partition-id = u32[] partition-id()
  %param = c64[32,256]{1,0} parameter(0)
  %constant = u32[8]{0} constant({0, 0, 0, 0, 32, 32, 32, 32})
  %all-gather = c64[64,256]{1,0} all-gather(%param), channel_id=1, replica_groups=\
mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(f)/jit(fft)/fft" source_file="f.py" source_line=7}
  %fft = c64[64,256]{1,0} fft(%all-gather), fft_type=FFT, fft_length={256}
  ROOT %fusion = f32[32,256]{1,0} fusion(%fft, %constant, %partition-id), kind=kLoop, calls=%sliced
}
"""


def test_a_batch_that_is_gathered_for_an_fft():
    (found,) = of_text(FFT)
    assert (found.rule, found.severity) == ("before-opaque-call", "warning")
    assert "(fft)" in found.message and "jax.shard_map" in found.remedy
    assert found.wire_bytes == 64 * 256 * 8 // 2
    assert found.source == "f.py:7"


def test_dims_that_the_fft_works_along_have_to_be_whole():
    assert of_text(FFT.replace("fft_length={256}", "fft_length={64,256}")) == []


def test_an_fft_on_each_shard_gathers_nothing(mesh):
    mapped = jax.shard_map(
        lambda x: jnp.fft.fft(x).real, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    assert of(mapped, placed(mesh, (64, 256), "data")) == []


def test_a_batch_that_is_gathered_to_choose_tokens(mesh):
    (found,) = of(lambda x: lax.top_k(x, 2), placed(mesh, (256, 1024), "data"))
    assert found.rule == "before-opaque-call" and "TopK" in found.message
    assert found.wire_bytes == 256 * 1024 * 4 // 2
    assert found.source.split(":")[0].endswith("test_findings_placement.py")


CALLED = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (p0: f32[64,256]) -> f32[256,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %all-gather = f32[256,256]{1,0} all-gather(%p0), channel_id=1, replica_groups=[2,4]<=[8], \
dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/ffi_call"}
  %bitcast = f32[256,256]{1,0} bitcast(%all-gather)
  ROOT %custom-call = f32[256,256]{1,0} custom-call(%bitcast), custom_call_target="my_kernel"
}
"""


def test_a_kernel_that_xla_knows_nothing_about():
    (found,) = of_text(CALLED)
    assert found.rule == "before-opaque-call"
    assert found.wire_bytes == 256 * 256 * 4 * 3 // 4
    assert found.evidence == ("all-gather (line 5)", "custom-call (line 7)")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jit(f)/ffi_call", "jit(f)/shard_map/all_gather"),  # the program asked for it
        ("my_kernel", "__cublas$gemm"),  # a matmul, chosen after partitioning
        ("my_kernel", "ConcatBitcast"),
        ("bitcast(%all-gather)", "dot(%all-gather, %all-gather)"),
    ],
)
def test_a_gather_that_the_call_is_not_to_blame_for(old, new):
    assert of_text(CALLED.replace(old, new)) == []


# --- beside what could hide it ----------------------------------------------------------------

BESIDE = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p0: f32[1024,1024], p1: f32[8192,8192]) -> (f32[1024,1024], f32[8192,8192]) {
  %p0 = f32[1024,1024]{1,0} parameter(0)
  %p1 = f32[8192,8192]{1,0} parameter(1)
  %before = f32[1024,1024]{1,0} negate(%p0)
  %all-reduce = f32[1024,1024]{1,0} all-reduce(%before), channel_id=1, \
replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, \
backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":true}}
  %after = f32[1024,1024]{1,0} negate(%all-reduce)
  %dot = f32[8192,8192]{1,0} dot(%p1, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tuple = (f32[1024,1024]{1,0}, f32[8192,8192]{1,0}) tuple(%after, %dot)
}
"""


def test_a_matmul_that_could_run_beside_an_exposed_sum():
    (found,) = of_text(BESIDE)
    assert (found.rule, found.severity) == ("exposed-with-independent-compute", "info")
    assert found.evidence == ("all-reduce (line 13)", "dot (line 15)")
    assert "though dot and other work" in found.message
    assert "latency_hiding_scheduler" in found.remedy


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        (r"dot\(%p1, %p1\)", "dot(%p1, %wide)"),  # needs the result
        (r"negate\(%p0\)", "slice(%early)"),  # makes the operand
        (r"8192", "64"),  # takes less time than the transfer
        (r"1024,1024", "128,128"),  # too small to move
        (r"operation_queue_id", "outer_dimension_partitions"),  # a CPU overlaps nothing
        (r"is_scheduled=true, ", ""),
    ],
)
def test_an_exposed_sum_beside_which_nothing_could_run(pattern, new):
    text = re.sub(pattern, new, BESIDE)
    shape = "f32[8192,8192]{1,0}"
    text = text.replace(
        "  %dot =", f"  %wide = {shape} broadcast(%after), dimensions={{0,1}}\n  %dot ="
    )
    if "%early" in text:  # the matmul before all else
        line = next(line for line in text.splitlines() if "%dot =" in line)
        early = line.replace("%dot", "%early")
        text = text.replace(line + "\n", "").replace("  %before", early + "\n  %before")
        text = text.replace("tuple(%after, %dot)", "tuple(%after, %early)")
        text = re.sub(r"  %wide.*\n", "", text)
    assert of_text(text) == []


def test_synchronous_operations_of_a_real_gpu_program():
    with gzip.open(HLO / "tp.gpu_1x1x8.txt.gz", "rt") as file:
        found = of_text(file.read(), None)
    assert {it.rule for it in found} == {"exposed-with-independent-compute"}
    assert all(it.severity == "info" for it in found)


# --- across slower links ----------------------------------------------------------------------


def two_sums(order, heavy, light):
    sizes = {"data": 2, "tensor": 4}
    mesh = jax.make_mesh(
        tuple(sizes[axis] for axis in order), order, axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def function(x):
        return lax.psum(jnp.sin(lax.psum(x, heavy)[:2]), light)

    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(order), out_specs=P())
    text = jax.jit(mapped).lower(placed(mesh, (256, 64), order)).compile().as_text()
    return text, {axis: sizes[axis] for axis in order}


def crossing(order, heavy, light, hosts=4):
    return of_text(*two_sums(order, heavy, light), devices_per_host=hosts)


def test_the_busier_axis_crosses_hosts_and_need_not():
    (found,) = crossing(("tensor", "data"), "tensor", "data")
    assert (found.rule, found.severity) == ("crosses-slower-link", "warning")
    assert "Put 'tensor' last in the mesh: data=2,tensor=4" in found.remedy
    assert found.wire_bytes == 256 // 8 * 64 * 4 * 2 * 3 // 4
    assert f"{found.wire_bytes:,} bytes" in found.message and "'data' stays" in found.message


@pytest.mark.parametrize(
    ("order", "heavy", "light", "hosts"),
    [
        (("data", "tensor"), "tensor", "data", 4),  # stays within a host
        (("tensor", "data"), "data", "tensor", 4),  # has less traffic than what stays
        (("tensor", "data"), "tensor", "data", 2),  # is larger than a host
        (("tensor", "data"), "tensor", "data", 8),  # one host
        (("tensor", "data"), "tensor", "data", None),  # not known
    ],
)
def test_axes_that_lie_as_well_as_they_can(order, heavy, light, hosts):
    assert crossing(order, heavy, light, hosts) == []


# --- groups -----------------------------------------------------------------------------------

GROUPS = BESIDE.replace("is_scheduled=true, ", "")


def grouped(text):
    return of_text(GROUPS.replace("[2,4]<=[8]", text))


def test_groups_of_one_device_move_nothing(mesh):
    unit = jax.make_mesh((1, 8), ("unit", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def function(x):
        def body(x, _):
            return lax.pcast(lax.psum(jnp.sin(x), "unit"), "unit", to="varying"), None

        return lax.psum(lax.scan(body, x, length=3)[0], "x")

    mapped = jax.shard_map(function, mesh=unit, in_specs=P("unit", "x"), out_specs=P("unit"))
    (found,) = of(mapped, placed(unit, (8, 32), "unit", "x"), axes={"unit": 1, "x": 8})
    assert (found.rule, found.severity, found.wire_bytes) == ("size-one-groups", "info", 0)
    assert "1 operation (3 executions per step)" in found.message
    assert "axis_size" in found.remedy


def test_every_spelling_of_groups_of_one():
    for text in ("[8,1]<=[8]", "{{0},{1},{2},{3},{4},{5},{6},{7}}", "mesh['a'=8] {}"):
        assert [found.rule for found in grouped(text)] == ["size-one-groups"]


def test_a_permute_to_oneself_moves_nothing():
    pairs = "{{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}"
    text = re.sub(
        r"all-reduce\(%before\).*",
        f"collective-permute(%before), channel_id=1, source_target_pairs={pairs}",
        GROUPS,
    )
    assert [found.rule for found in of_text(text)] == ["size-one-groups"]
    assert of_text(text.replace("{0,0},{1,1}", "{0,1},{1,0}")) == []


def test_groups_of_different_sizes():
    (found,) = grouped("{{0,1},{2,3,4,5,6,7}}")
    assert (found.rule, found.severity) == ("irregular-groups", "warning")
    assert "2 and 6 devices" in found.message and "groups of 6" in found.message
    assert "axis_index_groups" in found.remedy


def test_part_of_an_axis_is_information():
    (found,) = grouped("{{0,1},{2,3},{4,5},{6,7}}")
    assert (found.rule, found.severity) == ("irregular-groups", "info")
    assert "part of axis 'tensor' (4)" in found.message


def test_the_same_groups_are_told_once_and_whole_axes_not_at_all():
    first = next(line for line in GROUPS.splitlines() if "all-reduce(" in line)
    second = first.replace("%all-reduce", "%after").replace("(%before)", "(%all-reduce)")
    again = re.sub(r"  %after = .*", second, GROUPS)
    assert of_text(again) == []
    (found,) = of_text(again.replace("[2,4]<=[8]", "[4,2]<=[8]"))
    assert "2 operations" in found.message


# --- programs that are as they should be ------------------------------------------------------


@pytest.mark.parametrize("name", json.loads((HLO / "expected.json").read_text()))
def test_clean_programs_have_no_warning(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        found = of_text(file.read(), None, devices_per_host=4)
    allowed = {"promoted-dtype"} if ".cpu" in name else {"exposed-with-independent-compute"}
    assert {it.rule for it in found} <= allowed
    assert all(it.severity == "info" for it in found)
