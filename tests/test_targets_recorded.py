"""What real compilers made of rows of the tour, held against today's closed forms.

The programs in targets_hlo/ are what this writes there (JAX 0.12.0.1):

    jaxpar tour --target v5e:2x4 --only fsdp --hlo tests/targets_hlo     # and so on
"""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar import audit, expected, preset
from jaxpar.errors import CompilerError, OutOfDeviceMemoryError
from jaxpar.report.text import as_text
from jaxpar.targets import OnTarget, StepOnTarget, Target
from jaxpar.targets.changes import Changes, changes
from jaxpar.targets.compiler import Compiled
from jaxpar.targets.placement import place
from jaxpar.targets.report import memory_table, tour_table, verdict
from jaxpar.targets.tour import TargetRow, TargetTour, kinds_on_target
from jaxpar.tour import chosen, default_optimizer

FOLDER = Path(__file__).parent / "targets_hlo"
RECORDED = sorted(path.name.removesuffix(".txt.gz") for path in FOLDER.glob("*.txt.gz"))


def _found(name: str, closed_form_of: str | None = None) -> Changes:
    """What became of a row as its program was recorded, against its closed form or another's."""
    row, _, target = name.rpartition(".")
    (variant,) = chosen([closed_form_of or row])
    plan = replace(variant.plan(batch_size=16, seq_len=64), compute_dtype="bfloat16")
    text = gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()
    chip = Target.parse(target.replace("_", ":")).hardware
    found = audit(text, mesh=plan.mesh.all_axes, chip=chip)
    assert found.program.complete and found.program.platform == chip.platform
    return changes(expected(preset(variant.model or "tiny"), plan), found)


def test_foundations_are_recorded_for_both_kinds_of_hardware():
    rows = {name.rpartition(".")[0] for name in RECORDED}
    assert {"data", "fsdp", "hsdp", "tensor+sequence", "zero2", "pipeline-1f1b"} <= rows
    assert {name.rpartition(".")[2] for name in RECORDED} == {"v5e_2x4", "h100_1x8"}


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "zero2.v5e_2x4"])
def test_normalised_payload_is_the_closed_form(name):
    found = _found(name)
    assert found.agrees, [over.reason for over in found.over]
    for over in found.over:
        assert over.payload_bytes == over.normalised_bytes > 0


@pytest.mark.parametrize(
    ("name", "payload_bytes", "extra_wire_bytes"),
    [("fsdp.v5e_2x4", 229_376, 200_704), ("tensor+sequence.v5e_2x4", 1_310_720, 1_146_880)],
)
def test_scatters_over_two_dims_of_a_torus_become_all_reduces(
    name, payload_bytes, extra_wire_bytes
):
    told = [change for over in _found(name).over for change in over.changes]
    assert [str(change) for change in told] == ["reduce-scatter → all-reduce"]
    assert told[0].payload_bytes == payload_bytes
    assert told[0].extra_wire_bytes == extra_wire_bytes


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("h100_1x8")])
def test_a_gpu_keeps_every_kind(name):
    assert not any(over.changes for over in _found(name).over)


def test_scatters_that_a_tpu_moves_out_of_the_loop_over_micro_batches_are_told():
    """Gradients of both tables are summed over two micro-batches, and scattered once."""
    found = _found("zero2.v5e_2x4")
    (over,) = found.over
    assert not over.agrees and over.reason == "32,768 elements of reduce-scatter missing"
    assert over.payload_bytes - over.normalised_bytes == 4 * 2 * 256 * 64


@pytest.mark.parametrize("name", ["fsdp.v5e_2x4", "fsdp.h100_1x8"])
def test_another_strategy_of_the_same_mesh_does_not_agree(name):
    found = _found(name, closed_form_of="zero1")
    assert not found.agrees and "all-gather more" in found.over[0].reason


def _on_target(name: str, available_share: float) -> OnTarget:
    """A recorded row as `compile_for` returns it, on a device with a share of what it needs."""
    row, _, short = name.rpartition(".")
    target = Target.parse(short.replace("_", ":"))
    (variant,) = chosen([row])
    plan = replace(variant.plan(batch_size=16, seq_len=64), compute_dtype="bfloat16")
    step = StepOnTarget(config=preset("tiny"), plan=plan, optimizer=default_optimizer())
    text = gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()
    has = target.hardware.hbm_bytes
    memory = {
        "argument_bytes": 1 << 20,
        "output_bytes": 2 << 20,
        "alias_bytes": 1 << 20,
        "temp_bytes": round(has / available_share),
        "generated_code_bytes": 0,
        "peak_bytes": None,
    }
    devices = [
        {"id": i, "coords": [i // 4, i % 4], "core": 0, "process": 0, "local": i, "slice": 0}
        for i in range(8)
    ]
    compiled = Compiled(
        target=target, options={}, text=text, memory=memory, devices=tuple(devices), seconds=1.0,
        cpu_s=1.0, peak_rss_bytes=1, from_cache=False,
    )  # fmt: skip
    return OnTarget(
        plan=step.plan,
        target=target,
        placement=place(plan.mesh.named_axes, target.dims, str(target)),
        compiled=compiled,
        expected=(),
        asked=tuple(expected(step.config, plan)),
        audit=audit(text, mesh=plan.mesh.all_axes, chip=target.hardware),
    )


def _tour(*results: OnTarget) -> TargetTour:
    rows = [
        TargetRow(strategy="row", plan=it.plan, result=it, kinds=kinds_on_target(it))
        for it in results
    ]
    return TargetTour(
        target=results[0].target, model="tiny", batch_size=16, seq_len=64, options={}, seconds=1.0,
        rows=rows,
    )  # fmt: skip


def test_tables_name_links_kinds_costs_and_whether_it_fits():
    tour = _tour(_on_target("fsdp.v5e_2x4", 2.0))
    told = as_text([tour_table(tour), memory_table(tour), verdict(tour)])
    assert re.search(r"reduce-scatter +fsdp +ICI x\+y +16 / 8 +416 KiB / 192 KiB", told)
    assert "reduce-scatter → all-reduce: 224 KiB, 196 KiB more wire" in told
    assert re.search(r"all-gather .* 9 of 16 +\d+%", told)
    assert "fits, 8 GiB left" in told and tour.is_complete and tour.agrees
    assert "Normalised payload = closed form on all 1 rows" in told
    data = json.loads(json.dumps(tour.to_json()))
    assert data["schema"] == "jaxpar.target/1" and data["rows"][0]["memory"]["fits"]
    assert data["rows"][0]["placement"] == {"fsdp": "x·y"}
    assert len(data["rows"][0]["memory"]["largest"]) == 5


def test_a_program_that_needs_more_than_a_device_has_says_so():
    tour = _tour(_on_target("hsdp.h100_1x8", 0.5))
    told = as_text([memory_table(tour), verdict(tour)])
    assert "does not fit by 74.5 GiB" in told and "Too large for a device: row." in told
    assert not tour.is_complete


def test_rows_that_were_not_compiled_are_told():
    plan = chosen(["fsdp"])[0].plan(batch_size=16, seq_len=64)
    error = OutOfDeviceMemoryError("too large", used_bytes=30 << 30, available_bytes=10 << 30)
    rows = [
        TargetRow(strategy="big", plan=plan, result=None, error=error),
        TargetRow(strategy="odd", plan=plan, result=None, error=CompilerError("it ended")),
    ]
    tour = replace(_tour(_on_target("fsdp.v5e_2x4", 2.0)), rows=rows)
    told = as_text([tour_table(tour), memory_table(tour), verdict(tour)])
    assert "does not fit by 20 GiB" in told and "it ended" in told
    assert "Not compiled: big, odd." in told and not tour.is_complete
    memory = [row["memory"] for row in tour.to_json()["rows"]]
    assert memory[0]["device_bytes"] == 30 << 30 and memory[1] is None
