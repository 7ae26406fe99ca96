"""What real compilers made of rows of the tour, held against today's closed forms.

The programs in targets_hlo/ are what this writes there (JAX 0.12.0.1):

    jaxpar tour --target v5e:2x4 --only fsdp --hlo tests/targets_hlo     # and so on
"""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar import audit, expected, preset
from jaxpar.targets import Target
from jaxpar.targets.changes import Changes, changes
from jaxpar.tour import chosen

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
