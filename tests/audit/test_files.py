"""Real compiled programs of four backends, and what happens when parts of them are missing."""

import gzip
import json
import random
from pathlib import Path

import pytest

from jaxpar.audit import audit
from jaxpar.errors import AuditError

HLO = Path(__file__).parent / "hlo"
EXPECTED = json.loads((HLO / "expected.json").read_text())
EXPECTED["fsdp.cpu_jax0102"] = EXPECTED["fsdp.cpu"]
EXPECTED["tp.tpu_tpu7x_2x2x1"] = EXPECTED["tp.tpu_v5e_2x4"]  # on SparseCores, the same bytes
MESHES = {
    "dp_auto": {"dp": 8},
    "fsdp": {"fsdp": 8},
    "ep": {"ep": 8},
    "cp": {"cp": 8},
    "tp": {"dp": 2, "tp": 4},
    "tpsp": {"dp": 2, "tp": 4},
    "pp": {"dp": 2, "pp": 4},
}
# What is true of the program: v5e sums small shards whole, and keeps a slice.
FLAWS = {"fsdp.tpu_v5e_2x4": {"all-reduce-then-slice"}}


def text_of(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        return file.read()


def by_kind(result):
    sums = {}
    for total in result.totals:
        into = sums.setdefault(total.kind, {"count": 0, "payload_bytes": 0})
        into["count"] += total.count
        into["payload_bytes"] += total.payload_bytes
    return sums


@pytest.mark.parametrize("name", EXPECTED)
def test_strategies(name):
    mesh = MESHES[name.split(".")[0]]
    result = audit(HLO / f"{name}.txt.gz", mesh=mesh)
    assert by_kind(result) == EXPECTED[name]
    assert result.program.complete
    warned = {found.rule for found in result.findings if found.severity != "info"}
    assert warned == FLAWS.get(name, set())
    told = {found.rule for found in result.findings} - warned
    assert told <= ({"promoted-dtype"} if ".cpu" in name else {"exposed-with-independent-compute"})
    assert result.program.platform == name.split(".")[1][:3]
    assert result.program.num_devices == 8
    assert result.mesh == mesh
    for found in result.collectives:
        assert found.axes
        assert set(found.axes) <= set(mesh)
        # TPU keeps no metadata of gradients that it merged.
        assert found.phase != "unknown" or result.program.platform == "tpu"
        assert found.source is None or found.source.startswith("spike/")
        assert sum(buffer.payload_bytes for buffer in found.buffers) == found.payload_bytes
        if result.program.platform == "cpu":
            assert not found.is_async
            assert found.exposed_fraction == 1.0


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "tpsp", "ep", "cp", "pp", "dp_auto"])
def test_cpu_widens_what_other_backends_do_not(strategy):
    """Program dtypes make the CPU's bytes those of the GPU again, but for concatenations."""
    widths = {"f32": 4, "bf16": 2, "s32": 4}

    def program_bytes(name):
        total = 0
        for found in audit(HLO / f"{name}.txt.gz").collectives:
            single = found.program_dtype.split("+")
            if len(single) == 1:
                total += (
                    found.count * found.payload_bytes * widths[single[0]] // widths[found.dtype]
                )
        return total

    cpu = audit(HLO / f"{strategy}.cpu.txt.gz")
    assert any(found.program_dtype != found.dtype for found in cpu.collectives)
    if all("+" not in found.program_dtype for found in cpu.collectives):
        assert program_bytes(f"{strategy}.cpu") == program_bytes(f"{strategy}.gpu_1x1x8")


def test_scopes_and_phases_of_fsdp():
    result = audit(HLO / "fsdp.cpu.txt.gz", mesh={"fsdp": 8})
    seen = {(found.kind, found.phase, found.scope) for found in result.collectives}
    assert ("all-gather", "forward", "fsdp_gather") in seen
    assert ("all-gather", "recompute", "fsdp_gather") in seen
    assert ("reduce-scatter", "backward", "fsdp_gather") in seen
    assert ("all-reduce", "backward", "attn/rmsnorm + mlp/rmsnorm") in seen
    assert {found.source for found in result.collectives} >= {"spike/strategies.py:83"}


def test_merged_buffers_keep_their_phases():
    found = audit(HLO / "tp.cpu.txt.gz").collectives[-1]
    assert [(b.dtype, b.payload_bytes, b.phase) for b in found.buffers] == [
        ("f32", 4, "forward"),
        ("f32", 4 * 4096 * 1024, "backward"),
        ("f32", 4 * 1024, "backward"),
        ("f32", 4 * 4096 * 1024, "backward"),
    ]
    assert found.program_dtype == "f32+bf16"
    (tpu,) = (
        found
        for found in audit(HLO / "tp.tpu_v5e_2x4.txt.gz").collectives
        if (found.dtype, found.payload_bytes) == ("f32", 4100)
    )
    assert [buffer.phase for buffer in tpu.buffers] == ["forward", "backward"]


def test_sparsecore_operations_keep_their_own_metadata():
    found = audit(HLO / "tp.tpu_tpu7x_2x2x1.txt.gz").collectives
    assert [one.phase for one in found].count("forward") == 3
    assert {one.scope for one in found} >= {"attn", "mlp"}


@pytest.mark.parametrize("name", ["fsdp.gpu_1x1x8", "fsdp.gpu_opt_dblbuf"])
def test_pipelined_loops_add_up(name):
    sums = by_kind(audit(HLO / f"{name}.txt.gz"))
    assert {kind: sums[kind]["payload_bytes"] for kind in ("all-gather", "reduce-scatter")} == {
        "all-gather": 218103808,
        "reduce-scatter": 117440512,
    }


def test_right_after_partitioning():
    """No schedule, no trip counts, elided get-tuple-elements."""
    result = audit(HLO / "fsdp.postspmd.cpu.txt.gz", mesh={"fsdp": 8})
    assert not result.program.scheduled
    assert result.program.complete
    gathers = [total for total in result.totals if total.kind == "all-gather"]
    assert gathers[0].payload_bytes == EXPECTED["fsdp.tpu_v5e_2x4"]["all-gather"]["payload_bytes"]


def test_4096_devices():
    result = audit(HLO / "scale_scan32_tpu_v5p_16x16x16.txt.gz", mesh={"dp": 256, "tp": 16})
    assert {found.axes for found in result.collectives} == {("dp",), ("tp",)}
    assert result.program.num_devices == 4096


def test_compiler_made_meshes():
    for name in ("gspmd.cpu", "meta.cpu", "meta.gpu_1x1x8"):
        result = audit(HLO / f"{name}.txt.gz", mesh={"one": 1, "x": 2, "y": 4})
        assert all(found.axes for found in result.collectives)


def test_tpu_reduce_scatter_forms():
    kinds = {
        name: [found.kind for found in audit(HLO / f"{name}.txt.gz").collectives]
        for name in ("micro_rs_v5e_major", "micro_rs_v5p_fused", "micro_rs_v5p_ar")
    }
    assert kinds["micro_rs_v5e_major"] == ["reduce-scatter"]
    assert kinds["micro_rs_v5p_fused"] == ["reduce-scatter", "collective-permute"]
    assert kinds["micro_rs_v5p_ar"] == ["all-reduce"]


def test_sends_between_slices_count_once_and_along_their_axis():
    for name, kind in [
        ("multislice_perm.tpu_v5e_2x4_x2", "collective-permute"),
        ("multislice_psum_both.tpu_v5e_2x4_x2", "all-reduce"),
    ]:
        result = audit(HLO / f"{name}.txt.gz", mesh={"slice": 2, "data": 8})
        assert result.program.complete
        (between,) = (one for one in result.collectives if one.axes == ("slice",))
        assert (between.kind, between.count) == (kind, 1)


def test_ragged_is_an_upper_bound():
    result = audit(HLO / "ragged_a2a.tpu_v5e_2x4.txt.gz")
    assert [finding.rule for finding in result.findings] == ["ragged-upper-bound"]
    assert result.collectives[0].payload_bytes == 64 * 128 * 4


@pytest.mark.parametrize("name", ["fsdp.gpu_1x1x8", "tp.cpu", "tp.tpu_v5e_2x4", "pp.cpu"])
def test_cut_text_never_gives_a_smaller_number_in_silence(name):
    text = text_of(name)
    expected = EXPECTED[name]
    chance = random.Random(0)
    for _ in range(10):
        start, end = sorted(chance.randrange(len(text)) for _ in range(2))
        for part in (text[:end], text[start:], text[:start] + text[end:]):
            try:
                result = audit("\n" + part)
            except AuditError:
                continue
            if result.program.complete:
                assert by_kind(result) == expected


@pytest.mark.parametrize("name", ["fsdp.cpu", "tp.tpu_v5e_2x4", "fsdp.gpu_1x1x8"])
def test_lines_missing_from_the_middle(name):
    lines = text_of(name).split("\n")
    chance = random.Random(1)
    for _ in range(10):
        at = chance.randrange(len(lines))
        try:
            result = audit("\n".join(lines[:at] + lines[at + chance.choice((1, 7)) :]))
        except AuditError:
            continue
        if result.program.complete:
            assert by_kind(result) == EXPECTED[name]


def test_damaged_bytes_give_no_other_error():
    text = text_of("trip_nested.tpu_v5e_2x4")
    chance = random.Random(2)
    for _ in range(300):
        characters = list(text)
        for _ in range(chance.choice((1, 5, 50))):
            characters[chance.randrange(len(text))] = chance.choice('(){}[]"\\%#,=0x \n')
        try:
            audit("\n" + "".join(characters)).to_json()
        except AuditError as error:
            assert len(str(error)) < 1000
