"""`jaxpar table --zero` is table 1 of Rajbhandari et al. 2020."""

import json

import pytest
from typer.testing import CliRunner

from jaxpar.cli import app
from jaxpar.errors import PlanError
from jaxpar.model.config import preset
from jaxpar.predict.states import states, zero_bytes
from tests.helpers import plan

# GB as printed there: devices, then stages 1, 2 and 3 of each model. Larger ones are cut off there,
# not rounded.
PAPER = {
    "7.5B": {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5),
             64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    "128B": {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
             256: (518, 263, 8), 1024: (513, 257, 2)},
    "1T": {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
           64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip


def table(*arguments):
    return CliRunner().invoke(app, ["table", *arguments], catch_exceptions=False)


def test_every_number_of_the_paper(tmp_path):
    path = tmp_path / "table.json"
    result = table("--zero", "--json", str(path))
    assert result.exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 18
    for row in rows:
        printed = PAPER[row["model"]][row["num_devices"]]
        assert row["data_parallel_bytes"] == 16 * row["num_parameters"]
        for zero, want in enumerate(printed, 1):
            have = row[f"zero{zero}_bytes"] / 1e9
            assert have == pytest.approx(
                want, abs=1.0 if want > 100 else 0.051 if want > 2 else 0.006
            )


def test_the_line_everybody_quotes():
    (line,) = [line for line in table("--zero").output.splitlines() if line.split()[:1] == ["64"]]
    assert line.split()[1:4] == ["31.4", "16.6", "1.88"]
    assert zero_bytes(7_500_000_000, 64, 0) == 120e9


def test_a_preset_instead(tmp_path):
    path = tmp_path / "table.json"
    table("--zero", "--model", "llama-3-8b", "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert {row["num_parameters"] for row in rows} == {preset("llama-3-8b").num_parameters}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plan_comes_near_the_paper(zero):
    """But for norm scales, which stay whole, and whole gradients of data parallelism in float32."""
    mesh, fields = ("fsdp=8", {"zero": zero}) if zero else ("data=8", {})
    config = preset("llama-3-8b")
    explicit = plan(mesh, batch_size=8, compute_dtype="bfloat16", reduce_dtype="bfloat16", **fields)
    paper = zero_bytes(config.num_parameters, 8, zero)
    assert states(config, explicit).total == pytest.approx(paper, rel=1e-3)


def test_no_table_asked_for():
    with pytest.raises(PlanError, match="Which table.*--zero"):
        table()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0, 8, 1), "num_parameters"), ((8, 0, 1), "num_devices"), ((8, 8, 4), "zero")],
)
def test_numbers_that_are_none(arguments, field):
    with pytest.raises(PlanError, match=f"^{field}="):
        zero_bytes(*arguments)
