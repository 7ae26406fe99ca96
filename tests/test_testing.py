"""The pytest plugin: snapshots, their files, budgets, expectations, and other people's projects."""

from __future__ import annotations

import gzip
import json
import os
import tomllib
import types
from pathlib import Path

import pytest

from jaxpar.audit.budget import Budget, BudgetError
from jaxpar.errors import AuditError, JaxparError
from jaxpar.testing import CommAudit, snapshot_path

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
HLO = Path(__file__).parent / "audit" / "hlo"
TP = HLO / "tp.gpu_1x1x8.txt.gz"
TP_CPU = HLO / "tp.cpu.txt.gz"
MESH = {"data": 2, "tensor": 4}


@pytest.fixture
def comm():
    """The fixture's value for a test in this folder, as that test would get it."""

    def comm(name="test_step", update=False):
        return CommAudit(path=Path.cwd() / "__comm__" / "test_x" / f"{name}.json", update=update)

    return comm


def message(call, *args, kind=AssertionError, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- snapshots ---------------------------------------------------------------------------------


def test_a_missing_snapshot_fails_and_is_not_written(comm):
    text = message(comm(), TP, mesh=MESH)
    assert text.startswith(f"There is no snapshot {Path.cwd()}/__comm__/test_x/test_step.json. ")
    assert "--comm-update" in text
    assert not list(Path().iterdir())


def test_an_unchanged_program_passes_and_gives_its_audit(comm):
    comm(update=True)(TP, mesh=MESH)
    assert comm()(TP, mesh=MESH).program.platform == "gpu"
    (path,) = Path("__comm__/test_x").iterdir()
    assert path.name == "test_step.json" and path.stat().st_mode & 0o777 == 0o644
    text = path.read_text()
    assert "strategies.py" not in text and "attn" not in text
    assert sum(row["count"] for row in json.loads(text)["collectives"]) == 30


def test_a_changed_program_fails_with_what_changed(comm):
    comm(update=True)(TP, mesh=MESH)
    text = message(comm(), TP_CPU, mesh=MESH)
    assert "snapshot → now" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "dtype, bytes all-reduce tensor 20 × 8 MiB bf16 20 × 16 MiB f32" in lines
    assert "all-reduce tensor 20 160 MiB → 320 MiB 240 MiB → 480 MiB" in lines
    assert text.endswith("If this is meant, run the test with --comm-update.")
    assert "\x1b" not in text


def test_operations_that_only_merged_change_the_signature_too(comm):
    comm(update=True)(TP, mesh=MESH)
    path = Path("__comm__/test_x/test_step.json")
    data = json.loads(path.read_text())
    row = next(row for row in data["collectives"] if row["axes"] == "tensor")
    row.update(count=row["count"] * 2, payload_bytes=row["payload_bytes"] // 2)
    path.write_text(json.dumps(data))
    text = message(comm(), TP, mesh=MESH)
    assert "merged" in text and "moves the same bytes along the same axes" in text


def test_an_update_writes_only_what_changed(comm):
    comm(update=True)(TP, mesh=MESH)
    path = Path("__comm__/test_x/test_step.json")
    before = path.read_bytes()
    os.utime(path, (1, 1))
    comm(update=True)(TP, mesh=MESH)
    assert path.stat().st_mtime == 1
    comm(update=True)(TP_CPU, mesh=MESH)
    assert path.read_bytes() != before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_calls_of_a_test_have_snapshots_of_their_own(comm):
    first = comm(update=True)
    first(TP, mesh=MESH)
    first(TP_CPU, mesh=MESH)
    names = {each.name for each in Path("__comm__/test_x").iterdir()}
    assert names == {"test_step.json", "test_step-call2.json"}
    again = comm()
    again(TP, mesh=MESH)
    again(TP_CPU, mesh=MESH)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\0", b"[" * 100_000])
def test_a_damaged_snapshot_is_told_with_its_path(comm, content):
    path = Path("__comm__/test_x/test_step.json")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    text = message(comm(), TP, mesh=MESH, kind=AuditError)
    assert "test_step.json: This is no snapshot: " in text
    assert text.endswith("Write it anew with --comm-update.")
    comm(update=True)(TP, mesh=MESH)
    comm()(TP, mesh=MESH)


def test_an_incomplete_audit_is_never_a_snapshot(comm):
    with gzip.open(TP_CPU, "rt") as file:
        program = file.read()
    text = message(comm(update=True), program[: len(program) // 2])
    assert text.startswith("The audit is incomplete") and "text-incomplete" in text
    assert not Path("__comm__").exists()


# --- budgets and expectations ------------------------------------------------------------------


def test_a_budget_is_read_beside_the_test_and_checked(comm, monkeypatch):
    Path("small.toml").write_text('max_wire_bytes = "64 MiB"')
    check = comm(update=True)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    text = message(check, TP, mesh=MESH, budget="small.toml")
    assert text.startswith("Over budget: all collectives: max_wire_bytes = 64 MiB, actual 280 MiB")
    assert "spike/strategies.py:106" in text
    text = message(comm(), TP, mesh=MESH, budget="nosuch.toml", snapshot=False, kind=BudgetError)
    assert "cannot be read" in text
    comm()(TP, mesh=MESH, budget=Budget(max_count=30), snapshot=False)
    assert "max_count = 29" in message(
        comm(), TP, mesh=MESH, budget=Budget(max_count=29), snapshot=False
    )


def test_expectations_are_about_kind_axis_phase_count_and_bytes(comm):
    check = comm()
    assert "call comm_audit(…) first" in message(check.expect, "all-reduce")
    check(TP, mesh=MESH, snapshot=False)
    check.expect("all-reduce")
    check.expect("all-reduce", axis="tensor", count=20, payload_bytes=20 * 8 << 20)
    check.expect("all-reduce", axis="tensor", phase="recompute", count=4)
    check.expect("all-to-all", count=0)
    text = message(check.expect, "all-reduce", axis="tensor", count=4)
    assert text.startswith("all-reduce over tensor: count is 20, not 4.\n")
    assert "jit_step, gpu, 8 devices" in text
    text = message(check.expect, "all-reduce", axis="tensor", count=20, payload_bytes=1)
    assert "payload_bytes is 167772160, not 1." in text
    assert "all-to-all: there is none." in message(check.expect, "all-to-all")
    assert "there is none" in message(check.expect, "all-reduce", axis="data,tensor")


def test_an_expectation_of_what_cannot_be_is_told(comm):
    check = comm()
    check(TP, mesh=MESH, snapshot=False)
    for arguments, text in [
        ({"kind": "allreduce"}, "Did you mean 'all-reduce'?"),
        ({"kind": "all-reduce", "axis": "tensr", "count": 0}, "Did you mean 'tensor'?"),
        ({"kind": "all-reduce", "phase": "fwd"}, "must be one of: 'forward'"),
    ]:
        with pytest.raises(JaxparError) as caught:
            check.expect(**arguments)
        assert text in str(caught.value)


def test_an_unknown_count_is_never_as_expected(comm):
    check = comm()
    check(HLO / "trip_fori_dyn.cpu.txt.gz", mesh={"data": 8}, snapshot=False)
    check.expect("collective-permute")
    assert "count is ?, not 0." in message(check.expect, "collective-permute", count=0)


# --- file names --------------------------------------------------------------------------------


def path_of(nodeid):
    return snapshot_path(types.SimpleNamespace(nodeid=nodeid, path=Path("/p/test_a.py"), name="n"))


def test_snapshots_stay_in_their_folder_whatever_a_test_is_called():
    folder = Path("/p/__comm__/test_a")
    assert path_of("test_a.py::test_step") == folder / "test_step.json"
    assert path_of("test_a.py::TestX::test_step") == folder / "TestX.test_step.json"
    ids = [
        "a/b",
        "a-b",
        "../../x",
        "a\0b",
        "ü",
        "\udcff",
        "A",
        "a",
        "",
        "x" * 5000,
        "x" * 5001,
        "a::b",
    ]
    names = [*(f"f[{each}]" for each in ids), "[..]", "[.]"]
    paths = [path_of(f"test_a.py::{name}") for name in names]
    assert len({str(path).lower() for path in paths}) == len(names)
    for path in paths:
        assert path.parent == folder
        assert path.name.isascii() and path.name.isprintable() and len(path.name) < 130
        assert not path.name.startswith(".") and not set(path.name) & set('/\\:*?"<>| []')


# --- in pytest ---------------------------------------------------------------------------------

FILE = f"""
import pytest

@pytest.mark.parametrize("which", ["tp.gpu_1x1x8", "tp.cpu"], ids=["a/b", "../../c"])
def test_step(comm_audit, which):
    comm_audit(f"{HLO}/{{which}}.txt.gz", mesh={MESH})
"""
STRICT = ["-W", "error", "-p", "no:cacheprovider"]


def test_update_then_pass_then_fail_in_parallel(pytester):
    pytester.makepyfile(test_step=FILE)
    plugin = ["-p", "jaxpar.testing", *STRICT]
    pytester.runpytest_subprocess(*plugin, "--comm-update", "-n", "2").assert_outcomes(passed=2)
    stored = sorted(each.name for each in pytester.path.rglob("*.json"))
    assert len(stored) == 2
    assert all((pytester.path / "__comm__" / "test_step" / name).is_file() for name in stored)
    pytester.makepyfile(test_step=FILE.replace('"tp.cpu"]', '"tpsp.cpu"]'))
    result = pytester.runpytest_subprocess(*plugin)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: The communication is not that of *"])
    result.stdout.fnmatch_lines(["E *appeared *all-gather *tensor*"])
    result.stdout.no_fnmatch_line("*jaxpar/testing.py*")


def test_a_step_is_compiled_and_ci_does_not_write_its_snapshot(pytester):
    pytester.makepyfile("""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        def test_sum(comm_audit):
            jax.config.update("jax_num_cpu_devices", 2)
            mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
            total = jax.shard_map(
                lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
            )
            x = jax.ShapeDtypeStruct((8,), jnp.float32)
            comm_audit(jax.jit(total), x, mesh=mesh, snapshot=False)
            comm_audit.expect("all-reduce", axis="data", count=1, payload_bytes=16)
            comm_audit(jax.jit(total), x, mesh=mesh)
    """)
    result = pytester.runpytest_subprocess("-p", "jaxpar.testing", *STRICT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*There is no snapshot * Run this test with --comm-update*"])
    assert not list(pytester.path.rglob("__comm__"))


@pytest.mark.parametrize("also", [[], ["-p", "jaxpar.testing"]])
def test_an_installed_plugin_is_there_once_and_leaves_others_alone(pytester, monkeypatch, also):
    info = pytester.path / "site" / "jaxpar-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxpar\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["pytest11"].items()
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    paths = [str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    pytester.makepyfile("""
        import sys

        def test_nothing_was_loaded(pytestconfig):
            heavy = {"jax", "flax", "rich", "typer", "cattrs", "jaxpar.audit.diff"}
            assert not heavy & sys.modules.keys()
            plugins = pytestconfig.pluginmanager.get_plugins()
            assert sum(getattr(each, "__name__", "") == "jaxpar.testing" for each in plugins) == 1
    """)
    result = pytester.runpytest_subprocess(*also, *STRICT)
    result.assert_outcomes(passed=1)
    assert not list(pytester.path.rglob("__comm__"))
