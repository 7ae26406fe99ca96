"""Sends with their receives, between slices and between devices; permutes of slices."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from jaxpar.audit.reading import Site
from jaxpar.audit.source import read
from jaxpar.audit.transfers import THROUGH_HOSTS, num_slices, over_slices, sliced_payload, transfers
from jaxpar.errors import AuditError

HLO = Path(__file__).parent / "hlo"
FOUR = {"slice": 4, "data": 8}
LOCAL = 1024 * 256 * 4  # bytes of what each device holds in the programs for four slices
HEADER = "HloModule f, is_scheduled=true, num_partitions=4"
RING = "{{0,1},{1,2},{2,3},{3,0}}"


def found_in(text, mesh=None):
    reading, _ = read(text, None)
    both = list(transfers(reading.module, reading.runs, mesh=mesh, devices=reading.num_devices))
    collectives = [one.collective for one in both if isinstance(one, Site)]
    return collectives, [one for one in both if not isinstance(one, Site)]


def dump(name):
    with gzip.open(HLO / f"multislice_{name}.txt.gz", "rt") as file:
        return file.read()


def program(*lines, before="", header=HEADER):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{header}\n\n{before}ENTRY %main (p: f32[8]) -> f32[8] {{\n"
        f"  %p = f32[8]{{0}} parameter(0)\n  %t = token[] after-all()\n{body}\n}}\n"
    )


def pair(attributes, received=None, sent="f32[8]", name="a", value="%p", token="%t"):
    """The four lines of a transfer; `received` are attributes of the recv where they differ."""
    received = attributes if received is None else received
    return (
        f"%recv.{name} = ({sent}, u32[], token[]) recv({token}), channel_id=1{received}",
        f"%send.{name} = ({sent}, u32[], token[]) send({value}, {token}), channel_id=1{attributes}",
        f"%send-done.{name} = token[] send-done(%send.{name}), channel_id=1",
        f"%recv-done.{name} = ({sent}, token[]) recv-done(%recv.{name}), channel_id=1",
    )


def peers(pairs=RING, more=""):
    return f", frontend_attributes={{_xla_send_recv_source_target_pairs={pairs}{more}}}"


def host(kind="ALL_REDUCE", target='"{1,2}x{0:3}"', rendezvous="a"):
    return (
        ", is_host_transfer=true, frontend_attributes={"
        f'_xla_host_transfer_rendezvous="{rendezvous}",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )


def one(*lines, mesh=None, **kwargs):
    (found,), findings = found_in(program(*lines, **kwargs), mesh)
    assert findings == []
    return found


def refused(*lines, mesh=None, **kwargs):
    found, (finding,) = found_in(program(*lines, **kwargs), mesh)
    assert finding.severity == "error"
    return len(found), finding.rule, finding.message


# --- between slices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "axes", "size", "number", "count", "payload", "wire"),
    [
        ("psum_a", {"a": 2, "b": 2, "data": 8}, "all-reduce", ("a",), 2, 16, 1, LOCAL, LOCAL),
        ("scan_psum", FOUR, "all-reduce", ("slice",), 4, 8, 5, LOCAL, LOCAL * 3 // 2),
        ("all_gather", FOUR, "all-gather", ("slice",), 4, 8, 1, LOCAL * 4, LOCAL * 3),
        ("gather_both", FOUR, "all-gather", ("slice",), 4, 8, 1, LOCAL * 4, LOCAL * 3),
        ("psum_scatter", FOUR, "reduce-scatter", ("slice",), 4, 8, 1, LOCAL, LOCAL * 3 // 4),
        ("all_to_all", FOUR, "all-to-all", ("slice",), 4, 8, 1, LOCAL, LOCAL * 3 // 4),
        ("ring", FOUR, "collective-permute", ("slice",), 4, 8, 1, LOCAL, LOCAL),
    ],
)
def test_a_transfer_through_hosts_is_the_collective_it_stands_for(
    name, mesh, kind, axes, size, number, count, payload, wire
):
    (found,), findings = found_in(dump(f"{name}.tpu_v5e_2x4_x4"), mesh)
    assert findings == []
    assert (found.kind, found.axes, found.group_size, found.num_groups) == (
        kind, axes, size, number,
    )  # fmt: skip
    assert (found.count, found.payload_bytes, found.wire_bytes) == (count, payload, wire)
    assert found.axes_note.startswith(THROUGH_HOSTS)
    assert found.is_async and found.exposed_fraction is None
    assert sum(buffer.payload_bytes for buffer in found.buffers) == payload
    assert np.unique(found.groups).tolist() == list(range(32))


@pytest.mark.parametrize("name", ["psum_both", "perm"])
def test_two_slices(name):
    (found,), findings = found_in(dump(f"{name}.tpu_v5e_2x4_x2"), {"slice": 2, "data": 8})
    assert findings == []
    assert found.axes == ("slice",)
    shard = 1024 * 2048 * 4
    assert found.payload_bytes == (shard if name == "perm" else shard // 8)


def test_without_a_mesh_slices_are_named_by_stride():
    (found,), _ = found_in(dump("psum_a.tpu_v5e_2x4_x4"))
    assert found.axes == ("size2stride16",)
    assert "no mesh given" in found.axes_note


def test_the_mesh_of_one_slice_has_no_axis_for_it():
    (found,), _ = found_in(dump("psum_a.tpu_v5e_2x4_x4"), {"data": 8})
    assert found.axes is None
    assert found.axes_note == f"{THROUGH_HOSTS}; 4 of them, and the mesh is that of one"
    assert found.payload_bytes == LOCAL


def test_hardware_numbers_are_no_places_in_the_mesh():
    """The last device of a slice sends to the first of the next."""
    (found,), _ = found_in(dump("ringboth.tpu_v5e_2x4_x4"), FOUR)
    assert (found.kind, found.axes, found.payload_bytes) == ("collective-permute", None, LOCAL)
    assert "hardware number" in found.axes_note
    assert found.groups.tolist() == [[7, 8], [15, 16], [23, 24], [31, 0]]


def test_more_slices_than_the_mesh_has():
    with pytest.raises(AuditError, match=r"speaks to slice 4, and the mesh .* has 2"):
        found_in(dump("ring.tpu_v5e_2x4_x4"), {"slice": 2, "data": 8})


@pytest.mark.parametrize(
    ("mesh", "devices", "slices"),
    [
        (None, 8, 1),
        ({"x": 8}, None, 1),
        ({"x": 8}, 8, 1),
        ({"x": 4}, 8, 1),
        ({"slice": 2, "x": 8}, 8, 2),
        ({"one": 1, "a": 2, "b": 3, "x": 8}, 8, 6),
    ],
)
def test_number_of_slices(mesh, devices, slices):
    assert num_slices(mesh, devices) == slices


@pytest.mark.parametrize("mesh", [{"x": 8, "slice": 2}, {"a": 4, "x": 4}, {"x": 12}])
def test_slices_are_the_first_axes(mesh):
    with pytest.raises(AuditError, match="Name the axes between slices first"):
        num_slices(mesh, 8)


def test_groups_within_slices_are_repeated_for_each():
    groups = np.array([[0, 1], [2, 3]])
    assert over_slices(groups, 1, 4) is groups
    assert over_slices(groups, 2, 4).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    unequal = over_slices([np.array([0, 1, 2]), np.array([3])], 2, 4)
    assert [group.tolist() for group in unequal] == [[0, 1, 2], [3], [4, 5, 6], [7]]
    with pytest.raises(AuditError, match="more than"):
        over_slices(groups, 1 << 17, 4)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (host(kind="BROADCAST"), "of type 'BROADCAST'"),
        (host(kind=""), "of type ''"),
        (host(target='"{1,2}x{0:4}"'), "to '{1,2}x{0:4}'"),
        (host(target='"{0,1}x{0:3}"'), "to '{0,1}x{0:3}'"),
        (host(target='"{1,2}x{3:0}"'), "to '{1,2}x{3:0}'"),
        (host(target='"{1,2}x{0:99999999}"'), "to '{1,2}x{0:99999999}'"),
        (host(target='"everybody"'), "to 'everybody'"),
        (host(target='""'), "to ''"),
        (host(target="{{100000->200000}}"), "to '{{100000->"),
        (host(target="{{100000,200000},{300000}}"), "to '{{100000,"),
        (host(kind="ONE_TO_ONE", target="{{100000,200000}}"), "to '{{100000,"),
        (host(kind="ONE_TO_ONE", target="{{100000->200004}}"), "to '{{100000->"),
    ],
)
def test_unknown_transfers_between_slices_are_said(attributes, message):
    number, rule, said = refused(*pair(attributes))
    assert (number, rule) == (0, "unhandled-communication")
    assert message in said


def test_bytes_that_do_not_fit_the_kind():
    lines = list(pair(host(kind="ALL_GATHER")))
    number, rule, message = refused(*lines)
    assert (number, rule) == (1, "shape-mismatch")
    assert "sends 32 bytes and recv.a (line 6) receives 32, which is no all-gather of 2" in message
    lines[0] = lines[0].replace("f32[8]", "f32[16]")
    assert one(*lines).payload_bytes == 64


# --- between devices -------------------------------------------------------------------------


def test_a_permute_that_was_taken_apart():
    found = one(*pair(peers()), mesh={"x": 2, "y": 2})
    assert (found.kind, found.axes, found.axes_note) == (
        "collective-permute", ("x", "y"), "ring by +1",
    )  # fmt: skip
    assert (found.count, found.payload_bytes, found.wire_bytes) == (1, 32, 32)
    assert found.dtype == "f32"
    assert found.groups.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]


@pytest.mark.parametrize("pairs", ['"{{0,1},{2,3}}"', "{{0, 1}, {2, 3}}"])
def test_pairs_in_quotes_and_with_spaces(pairs):
    assert one(*pair(peers(pairs)), mesh={"x": 2, "y": 2}).axes == ("y",)


def test_metadata_of_either_end():
    metadata = ', metadata={op_name="jit(f)/transpose(jvp(layer))/ppermute" source_file="m.py" '
    metadata += "source_line=42}"
    found = one(*pair(peers(), received=peers() + metadata), before="")
    assert (found.scope, found.phase, found.source) == ("layer", "backward", "m.py:42")


def loop(*lines, trips=5):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "%cond (s: (f32[8], token[])) -> pred[] {\n  %s = (f32[8], token[]) parameter(0)\n"
        "  ROOT %c = pred[] constant(true)\n}\n\n"
        "%body (s: (f32[8], token[])) -> (f32[8], token[]) {\n"
        "  %s = (f32[8], token[]) parameter(0)\n"
        "  %v = f32[8] get-tuple-element(%s), index=0\n"
        f"  %k = token[] get-tuple-element(%s), index=1\n{body}\n"
        "  ROOT %o = (f32[8], token[]) tuple(%v, %k)\n}\n\n"
    ), (
        "%w = (f32[8], token[]) while(%p), condition=%cond, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    )


def test_a_loop_multiplies():
    before, call = loop(*pair(peers(), value="%v", token="%k"))
    assert one(call, before=before).count == 5


def test_a_loop_that_never_runs_sends_nothing():
    before, call = loop(*pair(peers(), value="%v", token="%k"), trips=0)
    assert found_in(program(call, before=before)) == ([], [])


def test_a_pipelined_loop_sends_as_often_as_it_receives():
    """The first recv and the last send stand outside: five of each."""
    recv, send, _, _ = pair(peers(), value="%v", token="%k", name="in")
    before, call = loop(recv, send, trips=4)
    first, last, _, _ = pair(peers(), name="out")
    found, findings = found_in(program(first, call, last, before=before))
    assert findings == []
    assert [(each.name, each.count) for each in found] == [("send.in", 4), ("send.out", 1)]
    number, rule, message = refused(first, call, before=before)
    assert (number, rule) == (0, "unhandled-communication")
    assert "sends 4 times and receives 5 times" in message


def test_ends_that_do_not_belong_together():
    recv, send, _, _ = pair(peers())
    assert "without send" in refused(recv)[2]
    assert "without recv" in refused(send)[2]
    _, findings = found_in(program(*pair(peers("{{0,1}}"), received=peers("{{1,0}}"))))
    assert [finding.rule for finding in findings] == ["unhandled-communication"] * 2
    _, findings = found_in(program(recv.replace("f32[8]", "f32[9]"), send))
    assert len(findings) == 2


def test_how_often_is_decided_by_data():
    before, call = loop(*pair(peers(), value="%v", token="%k"))
    found = one(call.partition(", backend_config")[0], before=before)
    assert (found.count, found.count_min, found.count_max) == (None, 0, None)


def test_without_a_channel_pairs_are_replicas():
    header = "HloModule f, is_scheduled=true, replica_count=2, num_partitions=2"
    lines = pair(peers("{{0,1},{1,0}}"))
    mesh = {"r": 2, "p": 2}
    assert one(*lines, header=header, mesh=mesh).axes == ("p",)
    replicas = [line.replace("channel_id=1", "channel_id=0") for line in lines]
    assert one(*replicas, header=header, mesh=mesh).axes == ("r",)


def test_pairs_of_slices_are_repeated_for_each():
    found = one(*pair(peers("{{0,1},{1,0}}")), mesh={"slice": 2, "x": 4})
    assert found.groups.tolist() == [[0, 1], [1, 0], [4, 5], [5, 4]]


def test_iterations_in_which_nothing_is_sent():
    assert found_in(program(*pair(peers(more=',_xla_send_recv_validation="invalid"')))) == ([], [])
    bounds = ',_xla_send_recv_validation="{{0,6},{1,7},{2,8},{3,9}}"'
    (found,), (finding,) = found_in(program(*pair(peers(more=bounds))))
    assert found.count == 1
    assert (finding.rule, finding.severity) == ("transfer-upper-bound", "info")


def test_a_device_and_its_host_are_no_communication():
    attributes = (
        ", is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="callback",_xla_host_transfer_rendezvous="0"}'
    )
    assert found_in(program(*pair(attributes))) == ([], [])
    assert found_in(program(*pair(", is_host_transfer=true"))) == ([], [])


def test_a_transfer_to_nobody_in_particular():
    _, findings = found_in(program(*pair("")))
    assert [finding.severity for finding in findings] == ["error", "error"]
    assert "does not say between whom" in findings[0].message


def test_pairs_to_oneself_move_nothing():
    assert found_in(program(*pair(peers("{{0,0},{1,1}}")))) == ([], [])


def test_what_nobody_calls_is_not_counted():
    recv, send, _, _ = pair(peers(), value="%v", token="%k")
    before, _ = loop(recv, send)
    found, findings = found_in(program("ROOT %r = f32[8] negate(%p)", before=before))
    assert found == []
    assert "which nobody calls" in findings[0].message


def test_types_that_are_no_transfers():
    lines = [line.replace("(f32[8], u32[], token[])", "f32[8]") for line in pair(peers())]
    with pytest.raises(AuditError, match="none of a send"):
        found_in(program(*lines))
    with pytest.raises(AuditError, match="source_target_pairs|damaged"):
        found_in(program(*pair(peers("{{0,1,2}}"))))


# --- permutes of slices ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "sizes", "payload"),
    [
        ("f32[128,32]", "{{128,32}}", 128 * 32 * 4),
        ("s32[8,8,128]", "{{1,8,128},{1,8,128}}", 2 * 8 * 128 * 4),
        ("(bf16[8,8], bf16[4])", "{{2,8},{4}}", (16 + 4) * 2),
        ("s4[64]", "{{7}}", 4),
        ("(bf16[8,8], f32[4])", "{{2,8},{4}}", None),
        ("f32[8]", "{}", None),
        ("f32[]", "{{}}", 4),
    ],
)
def test_bytes_of_permuted_slices(types, sizes, payload):
    line = (
        "ROOT %r = f32[128,128] collective-permute-start(%given, %p, %p, %p), channel_id=1, "
        f"source_target_pairs={RING}, slice_sizes={sizes}"
    )
    reading, _ = read(program(f"%given = {types} custom-call(%p)", line), None)
    entry = reading.module.entry
    assert sliced_payload(entry, entry.instructions["r"]) == payload


def test_slices_of_a_value_that_is_not_there():
    line = "ROOT %r = f32[8] collective-permute(%gone), channel_id=1, slice_sizes={{4}}"
    reading, _ = read(program(line), None)
    entry = reading.module.entry
    assert sliced_payload(entry, entry.instructions["r"]) is None
