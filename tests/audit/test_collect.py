"""Operations in the forms that real files of ours do not show."""

import pytest

from jaxpar.audit import audit, collect
from jaxpar.errors import AuditError

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
HEADER = "HloModule f, is_scheduled=true, num_partitions=4"


def program(*lines, before="", header=HEADER):
    """An entry with parameters p: f32[8] and q: bf16[8], and these lines."""
    entry = "\n".join(f"  {line}" for line in lines)
    return (
        f"{header}\n\n{ADD}\n{before}\nENTRY %main (p: f32[8], q: bf16[8]) -> f32[8] {{\n"
        f"  %p = f32[8]{{0}} parameter(0)\n  %q = bf16[8]{{0}} parameter(1)\n{entry}\n}}\n"
    )


def read(*lines, mesh=None, **kwargs):
    result = audit(program(*lines, **kwargs), mesh=mesh)
    assert result.program.complete, result.findings
    return result.collectives


def incomplete(*lines, **kwargs):
    result = audit(program(*lines, **kwargs))
    assert not result.program.complete
    return [finding.rule for finding in result.findings]


DONE = "ROOT %d = f32[8] {0}-done(%s)"


@pytest.mark.parametrize(
    ("start", "payload", "dtype", "parts"),
    [
        ("((f32[8]), f32[8]) all-reduce-start(%p), to_apply=%add", 32, "f32", 1),
        ("(f32[8], f32[8]) all-reduce-start(%p), to_apply=%add", 32, "f32", 1),
        ("f32[8] all-reduce-start(%p), to_apply=%add", 32, "f32", 1),
        ("(f32[8], bf16[8]) all-reduce-start(%p, %q), to_apply=%add", 48, "f32+bf16", 2),
        ("((f32[8], bf16[8]), (f32[8], bf16[8])) all-reduce-start(%p, %q)", 48, "f32+bf16", 2),
        ("(f32[8], f32[32]) all-gather-start(%p), dimensions={0}", 128, "f32", 1),
        ("((f32[8]), f32[32]) all-gather-start(%p), dimensions={0}", 128, "f32", 1),
        (
            "((f32[8], bf16[8]), (f32[32], bf16[32])) all-gather-start(%p, %q), dimensions={0}",
            192, "f32+bf16", 2,
        ),
        ("((f32[8]), f32[2]) reduce-scatter-start(%p), dimensions={0}", 32, "f32", 1),
        ("((f32[8]), f32[8]) all-to-all-start(%p), dimensions={0}", 32, "f32", 1),
        ("((f32[8]), f32[8]) collective-broadcast-start(%p)", 32, "f32", 1),
    ],
)  # fmt: skip
def test_start_types_hold_operands_and_results(start, payload, dtype, parts):
    kind = start.rpartition(")")[0].rpartition("-start")[0].split()[-1]
    (found,) = read(f"%s = {start}, {GROUPS}", f"ROOT %d = f32[8] {kind}-done(%s)")
    assert (found.kind, found.payload_bytes, found.dtype) == (kind, payload, dtype)
    assert (found.parts, found.count, found.is_async) == (parts, 1, True)
    assert found.exposed_fraction == 1.0  # nothing computes beside it


@pytest.mark.parametrize(
    "types",
    ["(f32[8], f32[8], u32[]{:S(2)}, u32[]{:S(2)})", "((f32[8]), (f32[8]), u32[])"],
)
def test_permutes_with_context(types):
    (found,) = read(
        f"%s = {types} collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}, "
        "channel_id=1",
        "ROOT %d = f32[8] collective-permute-done(%s)",
        mesh={"x": 2, "y": 2},
    )
    assert (found.kind, found.axes, found.payload_bytes) == ("collective-permute", ("y",), 32)
    assert found.wire_bytes == 32


@pytest.mark.parametrize("wrapper", ["async", "call", "custom-call"])
def test_async_wrappers_are_one_operation(wrapper):
    inner = (
        "%wrapped (v: f32[8]) -> f32[2] {\n  %v = f32[8] parameter(0)\n"
        f"  ROOT %r = f32[2] reduce-scatter(%v), dimensions={{0}}, {GROUPS}, to_apply=%add\n"
        '}, execution_thread="parallel"\n'
    )
    (found,) = read(
        f"%s = ((f32[8]), f32[2], u32[]) {wrapper}-start(%p), calls=%wrapped, "
        'metadata={op_name="jit(f)/zero/psum_scatter"}',
        f"%u = ((f32[8]), f32[2], u32[]) {wrapper}-update(%s), calls=%wrapped",
        f"ROOT %d = f32[2] {wrapper}-done(%u), calls=%wrapped",
        before=inner,
    )
    assert (found.kind, found.payload_bytes, found.count) == ("reduce-scatter", 32, 1)
    assert found.is_async
    assert found.scope == "zero"


def test_what_a_wrapper_calls_is_asynchronous_too():
    parts = (
        "%inner (v: f32[8]) -> f32[8] {\n  %v = f32[8] parameter(0)\n"
        f"  ROOT %r = f32[8] all-reduce(%v), {GROUPS}, to_apply=%add\n}}\n\n"
        "%outer (v: f32[8]) -> f32[8] {\n  %v = f32[8] parameter(0)\n"
        "  ROOT %r = f32[8] call(%v), to_apply=%inner\n}\n"
    )
    (found,) = read(
        "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%outer",
        "ROOT %d = f32[8] async-done(%s)",
        before=parts,
    )
    assert found.is_async


def test_a_start_that_waits_is_synchronous():
    (found,) = read(
        f"%s = ((f32[8]), f32[8]) all-reduce-start(%p), {GROUPS}, to_apply=%add, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "ROOT %d = f32[8] all-reduce-done(%s)",
    )
    assert not found.is_async
    assert found.exposed_fraction == 1.0


def test_tuple_all_to_all_is_one_buffer_in_pieces():
    pieces = ", ".join(["f32[8]"] * 4)
    (found,) = read(f"ROOT %r = ({pieces}) all-to-all(%p, %p, %p, %p), {GROUPS}")
    assert (found.payload_bytes, found.parts) == (128, 1)


@pytest.mark.parametrize(
    "line",
    [
        "all-reduce(%p), channel_id=1, replica_groups=[4,1]<=[4], use_global_device_ids=true",
        "all-reduce(%p), replica_groups={}",  # one replica: cross-replica moves nothing
        "collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,1}}",
        "collective-permute(%p), channel_id=1, source_target_pairs={}",
    ],
)
def test_groups_of_one_move_nothing(line):
    assert read(f"ROOT %r = f32[8] {line}") == ()


def test_replicas_are_devices_too():
    header = "HloModule f, is_scheduled=true, replica_count=4"
    (found,) = read("ROOT %r = f32[8] all-reduce(%p), replica_groups={}", header=header)
    assert (found.group_size, found.num_groups) == (4, 1)


@pytest.mark.parametrize(
    ("line", "size", "number"),
    [
        ("all-reduce(%p), channel_id=1, replica_groups={}", 4, 1),
        ("all-reduce(%p), replica_groups={}", 2, 2),
        ("all-reduce(%p), channel_id=1, replica_groups={{0},{1}}", 2, 2),
        ("all-to-all(%p), channel_id=1, replica_groups={}, dimensions={0}", 2, 2),
        ("all-to-all(%p), replica_groups={}, dimensions={0}", 2, 2),
    ],
)
def test_two_replicas_of_two_partitions(line, size, number):
    header = "HloModule f, is_scheduled=true, replica_count=2, num_partitions=2"
    (found,) = read(f"ROOT %r = f32[8] {line}", header=header)
    assert (found.group_size, found.num_groups) == (size, number)


def test_without_a_header():
    groups = "channel_id=1, replica_groups={}, use_global_device_ids=true"
    line = f"ROOT %r = f32[8] all-reduce(%p), {groups}"
    with pytest.raises(AuditError, match="Give mesh="):
        audit(program(line, header=""))
    (found,) = read(line, header="", mesh={"x": 4})
    assert found.axes == ("x",)


@pytest.mark.parametrize(
    ("kind", "before", "after", "dtype"),
    [
        ("all-gather", True, True, "bf16"),
        ("all-gather", True, False, "bf16"),
        ("all-gather", False, True, "bf16"),
        ("all-gather", False, False, "f32"),
        ("all-reduce", True, True, "bf16"),
        ("all-reduce", True, False, "f32"),
        ("all-reduce", False, True, "f32"),
    ],
)
def test_widened_by_converts(kind, before, after, dtype):
    size = 32 if kind == "all-gather" else 8
    rest = "dimensions={0}" if kind == "all-gather" else "to_apply=%add"
    (found,) = read(
        "%wide = f32[8] convert(%q)",
        f"%r = f32[{size}] {kind}({'%wide' if before else '%p'}), {GROUPS}, {rest}",
        f"%t = f32[{size}] copy(%r)",
        f"ROOT %n = bf16[{size}] convert(%t)" if after else f"ROOT %n = f32[{size}] negate(%t)",
    )
    assert (found.dtype, found.program_dtype) == ("f32", dtype)


@pytest.mark.parametrize(("others", "dtype"), [(("bf16", "f16"), "f32"), (("bf16",) * 2, "bf16")])
def test_all_users_have_to_agree(others, dtype):
    (found,) = read(
        f"%r = f32[32] all-gather(%p), {GROUPS}, dimensions={{0}}",
        f"%a = {others[0]}[32] convert(%r)",
        f"ROOT %b = {others[1]}[32] convert(%r)",
    )
    assert found.program_dtype == dtype


def test_promoted_reducer():
    before = ADD.replace("%add", "%add_promoted")
    (found,) = read(
        f"ROOT %r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add_promoted", before=before
    )
    assert found.program_dtype == "bf16"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (
            "ROOT %r = (f32[8], u32[], token[]) send(%p, %p), channel_id=1",
            "unhandled-communication",
        ),
        ("ROOT %r = f32[8] all-permute(%p), channel_id=1", "unhandled-communication"),
        ("ROOT %r = f32[8] collective-spin-start(%p)", "unhandled-communication"),
        (f"ROOT %r = f32[8] all-gather(%p), {GROUPS}", "shape-mismatch"),
        (f"ROOT %r = f32[8] reduce-scatter(%p), {GROUPS}", "shape-mismatch"),
        (f"ROOT %r = f32[8] all-reduce(%gone), {GROUPS}, to_apply=%add", "missing-operand"),
        ("ROOT %r = f32[8] call(%p), to_apply=%gone", "text-incomplete"),
    ],
)
def test_never_smaller_in_silence(line, rule):
    assert rule in incomplete(line)


def test_computations_that_nobody_calls():
    lost = (
        "%lost (v: f32[8]) -> f32[8] {\n  %v = f32[8] parameter(0)\n"
        f"  ROOT %r = f32[8] all-reduce(%v), {GROUPS}\n}}\n"
    )
    assert incomplete("ROOT %r = f32[8] negate(%p)", before=lost) == ["unhandled-communication"]


def test_a_host_callback_is_no_communication():
    assert read("ROOT %r = (f32[8], u32[], token[]) send(%p, %p), is_host_transfer=true") == ()


def test_an_unknown_kind_of_tpu_fusion():
    fused = (
        "%fused (v: f32[8]) -> f32[8] {\n  %v = f32[8] parameter(0)\n"
        f"  ROOT %r = f32[8] all-reduce(%v), {GROUPS}, to_apply=%add\n}}\n"
    )
    line = "ROOT %f = f32[8] fusion(%p), kind=kCustom, calls=%fused"
    mark = ', backend_config={"flag_configs":[]}'
    assert incomplete(line + mark, before=fused) == ["unhandled-communication"]
    assert [found.kind for found in read(line, before=fused)] == ["all-reduce"]


def test_a_tpu_chain_is_one_operation_and_needs_its_start():
    def piece(name, extra):
        return (
            f"%{name} (v: f32[8]) -> f32[32] {{\n  %v = f32[8] parameter(0)\n"
            f"  %g = f32[32] all-gather(%v), dimensions={{0}}, {GROUPS}, "
            f'frontend_attributes={{chain_id="1"}}\n{extra}}}\n\n'
        )

    kept = "  ROOT %k = f32[32] copy(%g)\n"
    start = piece(
        "start", '  ROOT %c = f32[32] custom-call(%g), custom_call_target="AsyncCollectiveStart"\n'
    )
    rest = piece("middle", kept) + piece("end", kept)
    lines = [
        f"%{name} = f32[32] fusion(%p), kind=kCustom, calls=%{name}, "
        'backend_config={"flag_configs":[]}'
        for name in ("start", "middle", "end")
    ]
    lines[-1] = f"ROOT {lines[-1]}"
    (found,) = read(*lines, before=start + rest)
    assert (found.kind, found.payload_bytes, found.is_async) == ("all-gather", 128, True)
    assert incomplete(*lines[1:], before=rest) == ["unhandled-communication"]


def test_far_too_many_devices():
    header = "HloModule f, is_scheduled=true, num_partitions=99999999"
    with pytest.raises(AuditError, match="99999999 devices"):
        audit(program("ROOT %r = f32[8] negate(%p)", header=header))


def test_groups_that_cost_too_much_together(monkeypatch):
    monkeypatch.setattr(collect, "MAX_MEMBERS", 1 << 20)
    lines = [
        f"%r{i} = f32[8] all-reduce(%p), channel_id=1, use_global_device_ids=true, "
        f"replica_groups=[{1 << (17 - i)},{1 << i}]<=[{1 << 17}]"
        for i in range(17)
    ]
    with pytest.raises(AuditError, match="members"):
        audit(program(*lines, header="HloModule f, num_partitions=131072"))
