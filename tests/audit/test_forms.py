"""Each form in which XLA prints communication, with exact counts and bytes."""

import gzip
from pathlib import Path

import pytest

from jaxpar.audit import audit

HLO = Path(__file__).parent / "hlo"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
MESH = {"dp": 2, "tp": 4}
HEADER = "HloModule f, is_scheduled=true, num_partitions=8"
TP = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"
TPU = ', backend_config={"flag_configs":[]}'


def program(*lines, before="", header=HEADER):
    entry = "\n".join(f"  {line}" for line in lines)
    return (
        f"{header}\n\n{ADD}\n{before}\nENTRY %main (p: f32[8,4], q: bf16[16]) -> f32[8,4] {{\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n  %q = bf16[16]{{0}} parameter(1)\n{entry}\n}}\n"
    )


def computation(name, *lines, thread=""):
    body = "".join(f"  {line}\n" for line in ("%v = f32[8,4] parameter(0)", *lines))
    return f"%{name} (v: f32[8,4]) -> f32[8,4] {{\n{body}}}{thread}\n\n"


def read(*lines, mesh=MESH, **kwargs):
    result = audit(program(*lines, **kwargs), mesh=mesh)
    assert result.program.complete, result.findings
    return result.collectives


def one(*lines, **kwargs):
    (found,) = read(*lines, **kwargs)
    return found


@pytest.mark.parametrize(
    ("groups", "axes", "size", "number"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tp",), 4, 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("dp",), 2, 4),
        ("{}", ("dp", "tp"), 8, 1),
        ("[4,2]<=[2,4]T(1,0)", ("dp",), 2, 4),
        ("[1,8]<=[8]", ("dp", "tp"), 8, 1),
        ("mesh['dp'=2,'tp'=4] {'dp'}", ("dp",), 2, 4),
        ("mesh['dp'=2,'tp'=4] {'tp','dp'}", ("dp", "tp"), 8, 1),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("tp",), 4, 2),  # half of what the compiler made
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("dp",), 2, 4),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", None, 2, 4),  # half of what the user made
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", None, 2, 4),
        ("mesh['x'=2,'y'=4], device_ids=([2,4]T(0,1)) {'x'}", ("dp",), 2, 4),
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}", ("dp",), 2, 4),
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'x'}", ("tp",), 4, 2),
    ],
)
def test_groups_in_every_notation(groups, axes, size, number):
    line = f"ROOT %r = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={groups}, "
    found = one(f"{line}use_global_device_ids=true, to_apply=%add")
    assert (found.axes, found.group_size, found.num_groups) == (axes, size, number)
    assert (found.count, found.payload_bytes) == (1, 128)
    assert found.wire_bytes == 2 * (size - 1) * 128 // size
    assert (found.axes_note is None) == (axes is not None)


@pytest.mark.parametrize(
    ("kind", "meaning", "groups", "axes", "size"),
    [
        ("all-reduce", "", "{{0,1}}", ("r",), 2),
        ("all-reduce", "channel_id=1, ", "{{0,1}}", ("r", "x", "y"), 8),
        ("all-reduce", "channel_id=1, ", "{{0},{1}}", ("x", "y"), 4),
        ("all-reduce", "channel_id=1, use_global_device_ids=true, ", "{{0,1},{2,3},{4,5},{6,7}}",
         ("y",), 2),
        ("collective-broadcast", "", "{{0,1}}", ("r",), 2),
        ("collective-broadcast", "channel_id=1, ", "{{0,1},{2,3}}", ("y",), 2),
        ("all-to-all", "channel_id=1, ", "{{0,2},{1,3}}", ("x",), 2),
        ("collective-permute", "", "{{0,1},{1,0}}", ("r",), 2),
        ("collective-permute", "channel_id=1, ", "{{0,1},{1,0},{2,3},{3,2}}", ("y",), 2),
    ],
)  # fmt: skip
def test_what_ids_mean_with_two_replicas_of_four_partitions(kind, meaning, groups, axes, size):
    header = "HloModule f, is_scheduled=true, replica_count=2, num_partitions=4"
    key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    rest = {"all-reduce": ", to_apply=%add", "all-to-all": ", dimensions={0}"}.get(kind, "")
    line = f"ROOT %r = f32[8,4] {kind}(%p), {meaning}{key}={groups}{rest}"
    found = one(line, header=header, mesh={"r": 2, "x": 2, "y": 2})
    assert (found.axes, found.group_size, found.payload_bytes) == (axes, size, 128)
    assert found.num_groups * size == 8


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("thread", ["", ', execution_thread="sparsecore"'])
@pytest.mark.parametrize("wrapper", ["async", "custom-call"])
def test_a_wrapper_around_several_collectives(wrapper, thread, update):
    inner = computation(
        "wrapped",
        f"%g = f32[32,4] all-gather(%v), {TP}, dimensions={{0}}",
        f"%s = f32[2,4] reduce-scatter(%v), {TP}, dimensions={{0}}, to_apply=%add",
        "ROOT %both = (f32[32,4], f32[2,4]) tuple(%g, %s)",
        thread=thread,
    )
    types = "((f32[8,4]), (f32[32,4], f32[2,4]), u32[])"
    name = "%u" if update else "%s"
    lines = [f"%s = {types} {wrapper}-start(%p), calls=%wrapped"]
    if update:
        lines.append(f"%u = {types} {wrapper}-update(%s), calls=%wrapped")
    lines.append(f"ROOT %d = (f32[32,4], f32[2,4]) {wrapper}-done({name}), calls=%wrapped")
    found = read(*lines, before=inner)
    assert [(each.kind, each.count, each.payload_bytes, each.is_async) for each in found] == [
        ("all-gather", 1, 512, True),
        ("reduce-scatter", 1, 128, True),
    ]


def test_a_wrapper_around_a_fusion():
    inner = computation(
        "fused", f"ROOT %g = f32[32,4] all-gather(%v), {TP}, dimensions={{0}}"
    ) + computation("wrapped", "ROOT %f = f32[32,4] fusion(%v), kind=kCustom, calls=%fused")
    found = one(
        "%s = ((f32[8,4]), f32[32,4], u32[]) async-start(%p), calls=%wrapped",
        "ROOT %d = f32[32,4] async-done(%s)",
        before=inner,
    )
    assert (found.kind, found.count, found.payload_bytes, found.is_async) == (
        "all-gather", 1, 512, True,
    )  # fmt: skip


def test_a_fusion_that_starts():
    inner = computation("fused", f"ROOT %r = f32[8,4] all-reduce(%v), {TP}, to_apply=%add")
    found = one(
        "%s = ((f32[8,4]), f32[8,4], u32[]) fusion-start(%p), kind=kCustom, calls=%fused",
        "ROOT %d = f32[8,4] fusion-done(%s)",
        before=inner,
    )
    assert (found.kind, found.count, found.is_async) == ("all-reduce", 1, True)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("micro_rs_v5e_major", [("reduce-scatter", 1, 2)]),
        ("micro_rs_v5e_minor", [("reduce-scatter", 1, 2)]),
        ("micro_rs_v5p_fused", [("reduce-scatter", 1, 2), ("collective-permute", 1, None)]),
        ("micro_rs_v5p_ar", [("all-reduce", 1, 2)]),
    ],
)
def test_reduce_scatter_as_tpus_do_it(name, forms):
    """Natively, as a fusion around an all-reduce, and as a true all-reduce before a slice."""
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        text = file.read()
    result = audit(text)
    assert result.program.complete
    assert [(found.kind, found.count) for found in result.collectives] == [
        (kind, count) for kind, count, _ in forms
    ]
    whole = nbytes_of_entry(text)
    for found, (_, _, of_input) in zip(result.collectives, forms, strict=True):
        assert of_input is None or found.payload_bytes == whole


def nbytes_of_entry(text):
    """Bytes of the only parameter, by its printed type."""
    types = text.partition("entry_computation_layout={(")[2].partition(")->")[0]
    dtype, _, dims = types.partition("[")
    size = {"f32": 4, "bf16": 2}[dtype]
    for dim in dims.partition("]")[0].split(","):
        size *= int(dim)
    return size


def test_a_tpu_collective_printed_four_times_runs_once():
    def piece(name, extra=""):
        return computation(
            name,
            f"%g = f32[32,4] all-gather(%v), {TP}, dimensions={{0}}, "
            'frontend_attributes={chain_id="7"}',
            f"ROOT %c = f32[32,4] {extra or 'copy(%g)'}",
        )

    start = piece("start", 'custom-call(%g), custom_call_target="AsyncCollectiveStart"')
    names = ("start", "async_collective_fusion.1", "async_collective_fusion.2", "end")
    lines = [f"%{n}.f = f32[32,4] fusion(%p), kind=kCustom, calls=%{n}{TPU}" for n in names]
    lines[-1] = f"ROOT {lines[-1]}"
    found = one(*lines, before=start + "".join(map(piece, names[1:])))
    assert (found.kind, found.count, found.payload_bytes, found.is_async) == (
        "all-gather", 1, 512, True,
    )  # fmt: skip


@pytest.mark.parametrize("start", [False, True])
def test_ragged_all_to_all_is_an_upper_bound_and_says_so(start):
    types = "((f32[8,4], f32[16,4]), f32[16,4])" if start else "f32[16,4]"
    opcode = "ragged-all-to-all-start" if start else "ragged-all-to-all"
    offsets = ", ".join(["%o"] * 4)
    result = audit(
        program(
            "%out = f32[16,4] broadcast(%p)",
            "%o = s32[4] constant({0, 1, 2, 3})",
            f"ROOT %r = {types} {opcode}(%p, %out, {offsets}), channel_id=1, "
            "replica_groups={{0,1,2,3},{4,5,6,7}}",
        ),
        mesh=MESH,
    )
    (found,) = result.collectives
    assert (found.kind, found.axes, found.payload_bytes) == ("ragged-all-to-all", ("tp",), 128)
    assert found.wire_bytes == 96
    assert [finding.rule for finding in result.findings] == ["ragged-upper-bound"]
    assert "upper bound" in result.findings[0].message


@pytest.mark.parametrize("start", [False, True])
def test_collective_broadcast(start):
    if start:
        found = one(
            f"%s = ((f32[8,4]), f32[8,4]) collective-broadcast-start(%p), {TP}",
            "ROOT %d = f32[8,4] collective-broadcast-done(%s)",
        )
    else:
        found = one(f"ROOT %r = f32[8,4] collective-broadcast(%p), {TP}")
    assert (found.kind, found.payload_bytes, found.wire_bytes) == ("collective-broadcast", 128, 128)


def test_several_buffers_in_one_operation():
    found = one(f"ROOT %r = (f32[8,4], bf16[16]) all-reduce(%p, %q), {TP}, to_apply=%add")
    assert (found.dtype, found.parts, found.count, found.payload_bytes) == ("f32+bf16", 2, 1, 160)
    assert [(each.dtype, each.payload_bytes) for each in found.buffers] == [
        ("f32", 128),
        ("bf16", 32),
    ]
    gathered = one(f"ROOT %r = (f32[32,4], bf16[64]) all-gather(%p, %q), {TP}, dimensions={{0}}")
    assert (gathered.parts, gathered.payload_bytes, gathered.wire_bytes) == (2, 640, 480)


PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0},{4,5},{5,4}}"
PIECES = "(f32[2,4], f32[2,4], f32[2,4], f32[2,4])"
OPERANDS = "%n, %n, %n, %n"


@pytest.mark.parametrize(
    ("start", "kind", "parts", "payload"),
    [
        (f"((f32[8,4], bf16[16]), (f32[8,4], bf16[16])) collective-permute-start(%p, %q), {PAIRS}",
         "collective-permute", 2, 160),
        (f"((f32[8,4], bf16[16]), (f32[8,4], bf16[16]), u32[], u32[]) "
         f"collective-permute-start(%p, %q), {PAIRS}", "collective-permute", 2, 160),
        (f"((f32[8,4], bf16[16]), (f32[2,4], bf16[4])) reduce-scatter-start(%p, %q), {TP}, "
         "dimensions={0}, to_apply=%add", "reduce-scatter", 2, 160),
        (f"({PIECES}, {PIECES}) all-to-all-start({OPERANDS}), {TP}", "all-to-all", 1, 128),
        (f"{PIECES} all-to-all({OPERANDS}), {TP}", "all-to-all", 1, 128),
        (f"(f32[2,4], bf16[4]) reduce-scatter(%p, %q), {TP}, dimensions={{0}}, to_apply=%add",
         "reduce-scatter", 2, 160),
        (f"(f32[8,4], bf16[16]) collective-permute(%p, %q), {PAIRS}",
         "collective-permute", 2, 160),
        (f"(f32[8,4], bf16[16]) collective-broadcast(%p, %q), {TP}",
         "collective-broadcast", 2, 160),
    ],
)  # fmt: skip
def test_every_kind_takes_several_buffers(start, kind, parts, payload):
    waits = "-start(" in start
    lines = [
        "%n = f32[2,4] slice(%p), slice={[0:2], [0:4]}",
        f"{'' if waits else 'ROOT '}%s = {start}",
    ]
    if waits:
        lines.append(f"ROOT %d = (f32[8,4], bf16[16]) {kind}-done(%s)")
    found = one(*lines)
    assert (found.kind, found.count, found.parts, found.payload_bytes) == (kind, 1, parts, payload)
    assert found.is_async == waits


def test_tuples_with_index_comments():
    shapes = ["f32[8,4]{1,0:T(8,128)}"] * 7
    names = ["%p"] * 7
    for place in (shapes, names):
        place[5] = f"/*index=5*/{place[5]}"
    types = ", ".join(shapes)
    line = f"({types}) all-reduce({', '.join(names)}), {TP}, to_apply=%add"
    found = one(f"ROOT %r = {line}")
    assert (found.parts, found.payload_bytes) == (7, 7 * 128)
    start = line.replace(f"({types}) all-reduce", f"(({types}), ({types})) all-reduce-start")
    found = one(f"%s = {start}", f"ROOT %d = ({types}) all-reduce-done(%s)")
    assert (found.parts, found.payload_bytes) == (7, 7 * 128)


def test_gradients_concatenated_into_one_row():
    concat = computation(
        "fused",
        "%flat = f32[32] bitcast(%v)",
        "ROOT %row = f32[64] concatenate(%flat, %flat), dimensions={0}",
    )
    found = one(
        "%row = f32[64] fusion(%p), kind=kLoop, calls=%fused",
        f"%s = f32[64] all-reduce-start(%row), {TP}, to_apply=%add, "
        'metadata={op_name="jit(step)/transpose(jvp(layer))/psum_invariant"}',
        "%d = f32[64] all-reduce-done(%s)",
        "ROOT %r = f32[32] slice(%d), slice={[0:32]}",
        before=concat,
    )
    assert (found.kind, found.count, found.parts, found.payload_bytes) == ("all-reduce", 1, 1, 256)
    assert (found.phase, found.scope) == ("backward", "layer")


@pytest.mark.parametrize(
    ("dtype", "layout", "payload"),
    [
        ("s4", "{0:E(4)}", 32),
        ("u4", "{0:T(512)(32,128)E(4)}", 32),
        ("s2", "{0:E(2)}", 16),
        ("u1", "{0:E(1)}", 8),
        ("f4e2m1fn", "{0:E(4)}", 32),
        ("f8e4m3fn", "{0}", 64),
        ("f8e5m2", "{0}", 64),
        ("f8e4m3b11fnuz", "{0}", 64),
        ("f8e8m0fnu", "{0}", 64),
        ("f8e3m4", "{0}", 64),
        ("pred", "{0}", 64),
        ("c64", "{0}", 512),
    ],
)
def test_narrow_types(dtype, layout, payload):
    found = one(
        f"%n = {dtype}[16]{layout} convert(%q)",
        f"ROOT %g = {dtype}[64]{layout} all-gather(%n), {TP}, dimensions={{0}}",
    )
    assert (found.dtype, found.payload_bytes) == (dtype, payload)
    assert found.wire_bytes == payload * 3 // 4


def test_dimensions_that_are_bounds_count_in_full():
    found = one(
        "%size = s32[] constant(3)",
        "%n = f32[<=8,4]{1,0} set-dimension-size(%p, %size), dimensions={0}",
        f"ROOT %r = f32[<=8,4]{{1,0}} all-reduce(%n), {TP}, to_apply=%add",
    )
    assert found.payload_bytes == 128


def test_custom_calls_that_are_no_communication():
    lines = (
        '%k = f32[8,4] custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"all-reduce all-gather-start("}}',
        '%m = (f32[8,4], s8[64]) custom-call(%k), custom_call_target="__cublas$gemm", '
        'metadata={op_name="jit(f)/all-reduce(x)" source_file="all-gather(.py" source_line=3}',
        f"ROOT %r = f32[8,4] all-reduce(%k), {TP}, to_apply=%add",
    )
    assert one(*lines).name == "r"
    assert read(*lines[:2], "ROOT %n = f32[8,4] negate(%k)") == ()


def test_compact_dump_syntax():
    """Right after a pass: elided get-tuple-elements, no schedule, operands without types."""
    text = (
        "HloModule jit_f, entry_computation_layout={((f32[8,4], (f32[16], s32[])))->f32[32,4]}, "
        "num_partitions=8\n\n"
        "%region (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n\n"
        "ENTRY %main_spmd (param: (f32[8,4], (f32[16], s32[]))) -> f32[32,4] {\n"
        "  %param = (f32[8,4]{1,0}, (f32[16]{0}, s32[])) parameter(0)\n"
        "  %all-reduce = f32[16]{0} all-reduce(%param#1#0), channel_id=1, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%region\n"
        "  ROOT %all-gather = f32[32,4]{1,0} all-gather(%param#0), channel_id=2, "
        "replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true\n}\n"
    )
    result = audit(text, mesh=MESH)
    assert result.program.complete and not result.program.scheduled
    assert [(found.kind, found.axes, found.payload_bytes) for found in result.collectives] == [
        ("all-reduce", ("dp",), 64),
        ("all-gather", ("tp",), 512),
    ]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[2,4]<=[8]", ("size4stride1",)),
        ("[4,2]<=[2,4]T(1,0)", ("size2stride4",)),
        ("mesh['dp'=2,'tp'=4] {'dp'}", ("size2stride4",)),
        ("{}", ("size8stride1",)),
    ],
)
def test_without_a_mesh_axes_are_named_and_the_note_says_so(groups, axes):
    found = one(
        f"ROOT %r = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add",
        mesh=None,
    )
    assert found.axes == axes
    assert found.axes_note.startswith("no mesh given: named by size and stride")
