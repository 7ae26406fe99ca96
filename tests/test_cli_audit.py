"""`jaxpar audit`: what it prints, writes and answers, on real programs and on made ones."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxpar.audit import audit
from jaxpar.audit.grouping import Bounds, by_outer_axis
from jaxpar.audit.result import AxesExposure, Finding, LiveBuffer, Memory
from jaxpar.cli import app
from jaxpar.cli_audit import Request, answer, target
from jaxpar.errors import JaxparError
from jaxpar.report.audit import (
    audit_table,
    exposure_text,
    findings_text,
    groups_table,
    matrix_table,
    memory_text,
    sum_text,
)
from jaxpar.report.checks import budget_text, diff_text
from jaxpar.report.text import size
from tests.audit.records import MESH, audit_of, collective

HLO = Path(__file__).parent / "audit" / "hlo"
TP = HLO / "tp.gpu_1x1x8.txt.gz"
AXES = "data=2,tensor=4"


def run(*arguments):
    """Exit code, and the lines of the output as lists of cells."""
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    if isinstance(result.exception, JaxparError):
        raise result.exception
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    return result.exit_code, lines


def written(*arguments):
    code, _ = run(*arguments, "--json", "out.json")
    return code, json.loads(Path("out.json").read_text())


def rendered(parts):
    console = Console(width=300, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


# --- groups and matrix -------------------------------------------------------------------------


def test_group_by_prints_sums_and_writes_them():
    code, lines = run(TP, "--mesh", AXES, "--group-by", "axis")
    assert code == 0
    assert ["axis", "operations", "count", "payload", "wire", "share of wire"] in lines
    assert ["tensor", "5", "20", "160 MiB", "240 MiB", "85.7%"] in lines
    assert ["data", "4", "10", "40 MiB", "40 MiB", "14.3%"] in lines
    code, data = written(TP, "--mesh", AXES, "--group-by", "kind")
    assert (code, data["groups"]["by"]) == (0, "kind")
    (group,) = data["groups"]["groups"]
    assert (group["key"], group["num_operations"], group["count"]) == ("all-reduce", 9, 30)
    assert group["wire_bytes"] == sum(total["wire_bytes"] for total in data["totals"])


def test_sums_of_unknown_counts_are_shown_as_bounds():
    _, lines = run(HLO / "trip_fori_dyn.cpu.txt.gz", "--mesh", "data=8", "--group-by", "kind")
    assert ["collective-permute", "1", "?", "?", "?", "?"] in lines
    assert sum_text(Bounds(low=2048, high=None), size) == "≥ 2 KiB"
    assert sum_text(Bounds(low=1, high=3)) == "1…3"
    assert sum_text(Bounds(low=0, high=None)) == "?"
    assert sum_text(Bounds(low=7, high=7)) == "7"


def test_the_matrix_of_a_permute_is_a_ring():
    code, lines = run(HLO / "cp.cpu.txt.gz", "--mesh", "cp=8", "--matrix")
    rows = [line for line in lines if line[0] in map(str, range(8)) and len(line) == 9]
    assert code == 0 and len(rows) == 8
    assert all(row[1 + int(row[0])] == "·" for row in rows)
    _, data = written(HLO / "cp.cpu.txt.gz", "--mesh", "cp=8", "--matrix")
    matrix = np.array(data["matrix"])
    total = sum(found["wire_bytes"] * found["count"] for found in data["collectives"])
    assert matrix.shape == (8, 8)
    assert matrix.sum(axis=1) == pytest.approx([total] * 8, rel=1e-6)


def test_a_large_matrix_is_shown_by_its_outermost_axis():
    matrix = np.arange(64).reshape(8, 8)
    names, small = by_outer_axis(matrix, {"one": 1, "data": 2, "tensor": 4})
    assert names == ["data=0", "data=1"]
    assert small.tolist() == [
        [matrix[:4, :4].sum(), matrix[:4, 4:].sum()], [matrix[4:, :4].sum(), matrix[4:, 4:].sum()],
    ]  # fmt: skip
    assert by_outer_axis(matrix, None) is None
    assert by_outer_axis(matrix, {"data": 3}) is None


ONES = types.SimpleNamespace(byte_matrix=lambda _, n: np.ones((n, n), np.int64))
"""A byte from each device to each: what is tested here is how it is shown."""


@pytest.mark.parametrize(
    ("num_devices", "mesh", "said"),
    [
        (16, None, "15"),
        (32, {"data": 2, "tensor": 16}, "data=1"),
        (32, None, "The matrix of all 32 devices is in what --json writes."),
        (512, {"data": 512}, "The matrix of all 512 devices has over 256 rows: not written."),
    ],
)
def test_the_matrix_fits_the_terminal_and_the_file(monkeypatch, num_devices, mesh, said):
    program = dataclasses.replace(audit_of().program, num_devices=num_devices)
    result = dataclasses.replace(audit_of(mesh=mesh), program=program)
    monkeypatch.setattr(sys.modules["jaxpar.audit"], "audit", lambda *_, **__: result)
    monkeypatch.setitem(sys.modules, "jaxpar.audit.matrix", ONES)
    told = answer(Request(what="x", matrix=True))
    text = rendered(told.shown)
    assert said in text and ("256 B" in text) == (said == "data=1")
    assert (told.data["matrix"] is None) == (num_devices > 256)


def test_a_matrix_that_is_not_known_does_not_hide_the_audit():
    code, data = written(HLO / "trip_fori_dyn.cpu.txt.gz", "--matrix")
    assert (code, data["matrix"], len(data["collectives"])) == (0, None, 1)
    _, lines = run(HLO / "trip_fori_dyn.cpu.txt.gz", "--matrix")
    assert any(line[0].startswith("No matrix: ") for line in lines)


def test_a_text_without_devices_has_no_matrix(monkeypatch):
    program = dataclasses.replace(audit_of().program, num_devices=None)
    result = dataclasses.replace(audit_of(), program=program)
    monkeypatch.setattr(sys.modules["jaxpar.audit"], "audit", lambda *_, **__: result)
    with pytest.raises(JaxparError, match="does not say how many devices"):
        answer(Request(what="x", matrix=True))


# --- budget, against, exit codes ---------------------------------------------------------------


def budget(text):
    Path("budget.toml").write_text(text)
    return ["--budget", "budget.toml"]


def test_a_budget_that_is_not_kept_fails_with_the_lines_that_offend():
    over = budget('[[limit]]\naxis = "tensor"\nphase = "recompute"\nmax_payload_bytes = "31 MiB"')
    result = CliRunner().invoke(app, ["audit", str(TP), "--mesh", AXES, *over])
    assert result.exit_code == 1
    assert (
        "Over budget: all collectives over tensor, recompute: max_payload_bytes = 31 MiB, "
        "actual 32 MiB\n    4 × 8 MiB (12 MiB on the wire)  all-reduce over tensor  "
        "spike/strategies.py:106  attn\n"
    ) in result.output
    code, data = written(TP, "--mesh", AXES, *over)
    assert (code, data["budget"]["kept"]) == (1, False)
    (violation,) = data["budget"]["violations"]
    assert (violation["allowed"], violation["actual_min"]) == (31 << 20, 32 << 20)
    assert violation["collectives"][0]["source"] == "spike/strategies.py:106"


def test_a_budget_that_is_kept_passes():
    code, data = written(TP, "--mesh", AXES, *budget('max_wire_bytes = "280.1 MiB"'))
    assert (code, data["budget"]) == (0, {"kept": True, "violations": []})
    assert ["Within the budget."] in run(TP, *budget('forbidden = ["all-to-all"]'))[1]


def test_an_unknown_count_is_no_kept_budget():
    code, lines = run(HLO / "trip_fori_dyn.cpu.txt.gz", *budget("max_count = 1000000"))
    assert code == 1
    told = "Not known: all collectives: max_count = 1000000, actual ? (unknown count)"
    assert [told] in lines


def test_what_is_incomplete_keeps_no_budget_and_equals_nothing():
    with gzip.open(HLO / "tp.cpu.txt.gz", "rt") as file:
        text = file.read()
    cut = Path("cut.txt")
    cut.write_text(text[: len(text) // 2])
    code, data = written(cut, *budget('max_wire_bytes = "1 GiB"'))
    assert (code, data["budget"]["kept"]) == (3, False)
    assert run(cut, "--against", cut)[0] == 3
    code, lines = run(TP, "--against", cut)
    assert code == 3 and [f"{cut} is incomplete:"] in lines
    assert run(cut, *budget("max_count = 0"))[0] == 3


def test_against_the_same_program_on_another_backend():
    code, lines = run(TP, "--mesh", AXES, "--against", HLO / "tp.cpu.txt.gz")
    assert code == 1
    assert ["dtype, bytes", "all-reduce", "tensor", "forward", "4 × 16 MiB f32", "4 × 8 MiB bf16",
            "attn"] in lines  # fmt: skip
    assert ["all-reduce", "data", "5 → 10", "80 MiB → 40 MiB", "80 MiB → 40 MiB"] in lines
    assert ["The communication differs."] in lines
    code, data = written(TP, "--mesh", AXES, "--against", TP)
    assert (code, data["against"]["same"], data["against"]["changes"]) == (0, True, [])
    assert data["against"]["what"] == str(TP)


def test_against_a_merged_program_says_so_and_is_fine():
    code, lines = run(
        HLO / "tp.tpu_v5e_2x4.txt.gz", "--mesh", AXES, "--against", TP
    )  # the sum of losses travels with gradients on one of the two
    assert code == 0
    assert any(line[0] == "phase" for line in lines)
    told = "The communication is the same. What is listed moves the same bytes along the same axes."
    assert [told] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group-by", "axes"], "--group-by='axes' (str) must be one of: 'axis', 'kind'"),
        (["--budget", "nosuch.toml"], "Budget file 'nosuch.toml' cannot be read: No such file"),
        (["--budget", "bad.toml"], "unknown key 'max_cuont'. Did you mean 'max_count'?"),
        (["--budget", "axis.toml"], "There is no axis 'tensr' in this program"),
        (["--against", "nosuch.txt"], "nosuch.txt cannot be read: No such file or directory."),
    ],
)
def test_bad_options_are_told(arguments, message):
    Path("bad.toml").write_text("max_cuont = 1")
    Path("axis.toml").write_text('[[limit]]\naxis = "tensr"\nmax_count = 1')
    with pytest.raises(JaxparError) as caught:
        run(TP, "--mesh", AXES, *arguments)
    assert message in str(caught.value)


def test_chip_module_and_stage_are_passed_on_when_given(monkeypatch):
    given = []

    def record(thing, **options):
        given.append((thing, options))
        return audit_of()

    monkeypatch.setattr(sys.modules["jaxpar.audit"], "audit", record)
    run("a", "--against", "b", "--chip", "h100", "--module", "step", "--stage", "final",
        "--devices-per-host", 4)  # fmt: skip
    run("c")
    options = {"chip": "h100", "devices_per_host": 4, "module": "step", "stage": "final"}
    assert given == [
        (Path("a"), {"mesh": None, **options}), (Path("b"), {"mesh": None, **options}),
        (Path("c"), {"mesh": None}),
    ]  # fmt: skip


# --- module:fn ---------------------------------------------------------------------------------

PROGRAM = """
import gzip
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))

@jax.jit
def total(x):
    return x.sum()

def arguments():
    return total, x

def lowered():
    return total.lower(x)

compiled = total.lower(x).compile()

@jax.jit
def alone():
    return total(jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data"))))

def text():
    return compiled.as_text()

def path():
    return PATH

number = 3

def nothing():
    return None

def wants(config, *more, scale=1):
    return config

def fails():
    return 1 / 0

def leaves():
    raise SystemExit("use me as a module")
"""


@pytest.fixture
def module(monkeypatch):
    """A module in the current folder; Python forgets it afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("steps_of_mine.py").write_text(PROGRAM.replace("PATH", repr(str(TP))))
    yield "steps_of_mine"
    sys.modules.pop("steps_of_mine", None)


def test_a_function_of_a_module_gives_the_program(module):
    for name in ("arguments", "lowered", "compiled", "text"):
        code, data = written(f"{module}:{name}", "--mesh", "data=8")
        (found,) = data["collectives"]
        assert (code, found["kind"], found["axes"]) == (0, "all-reduce", ["data"]), name
        assert found["payload_bytes"] == 4
    assert written(f"{module}:alone")[0] == 0
    assert written(f"{module}:path")[1]["program"]["platform"] == "gpu"
    assert run(f"{module}:arguments", "--against", f"{module}:text")[0] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "Module steps_of_mine has no 'nosuch'. Name a function without arguments"),
        ("number", "steps_of_mine:number gives 3, which is no program."),
        ("nothing", "steps_of_mine:nothing gives None, which is no program."),
        ("wants", "steps_of_mine:wants wants arguments (config). Name a function without"),
        ("fails", "steps_of_mine:fails failed: ZeroDivisionError: division by zero."),
        ("leaves", "steps_of_mine:leaves failed: SystemExit: use me as a module."),
        ("total", "total cannot be compiled without arguments."),
    ],
)
def test_a_function_that_gives_no_program_is_told(module, name, message):
    with pytest.raises(JaxparError) as caught:
        run(f"{module}:{name}")
    assert message in str(caught.value)


def test_a_module_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {
        "broken_one": "import nosuch_thing", "broken_two": "1 +", "broken_three": "exit('no')",
    }.items():  # fmt: skip
        Path(f"{name}.py").write_text(text)
    for given, message in {
        "broken_zero:f": "There is no module 'broken_zero' here or installed.",
        "broken_zero.sub:f": "There is no module 'broken_zero' here or installed.",
        "broken_one:f": "Module broken_one cannot be imported: ModuleNotFoundError: No module",
        "broken_two:f": "Module broken_two cannot be imported: SyntaxError: ",
        "broken_three:f": "Module broken_three cannot be imported: SystemExit: no. `python -c",
    }.items():
        with pytest.raises(JaxparError) as caught:
            target(given)
        assert message in str(caught.value)


def test_a_file_is_a_file_whatever_its_name():
    Path("module:fn").write_text("x")
    for given in ("module:fn", "a/b.txt", "x:", ":y", "a b:c", "C:\\x.txt"):
        assert target(given) == (Path(given),)


# --- what is shown -----------------------------------------------------------------------------

EVIL = "<b>[red]x[/red]:smile:\x1b[31m\u202e"
SHOWN = r"<b>[red]x[/red]:smile:\x1b[31m\u202e"


def finding(**fields):
    defaults = {"rule": "promoted-dtype", "severity": "warning", "message": "wide",
                "source": "model.py:1", "remedy": "narrow it"}  # fmt: skip
    return Finding(**{**defaults, **fields})


def test_findings_come_by_rule_with_errors_first_then_by_bytes_at_stake():
    text = rendered(
        findings_text(
            [
                finding(rule="small", wire_bytes=8),
                finding(rule="note", severity="info", wire_bytes=1 << 30),
                finding(wire_bytes=1 << 20, message="one", evidence=("%a (line 3)", "%b (line 9)")),
                finding(wire_bytes=2 << 20, message="two.", source=None),
                finding(rule="text-incomplete", severity="error", remedy="print it again"),
            ]
        )
    )
    assert (
        text
        == """\
error: text-incomplete
  wide. [model.py:1]
  → print it again
warning: promoted-dtype, 2 times, 3 MiB on the wire per step at stake
  two (2 MiB).
  one (1 MiB). [model.py:1]
    seen: %a (line 3), %b (line 9)
  → narrow it
warning: small, 8 B on the wire per step at stake
  wide. [model.py:1]
  → narrow it
info: note, 1 GiB on the wire per step at stake
  wide. [model.py:1]
  → narrow it
"""
    )


def test_many_findings_of_a_rule_are_cut_and_counted():
    text = rendered(
        findings_text([finding(message=f"n{i}", evidence=("x",) * 9) for i in range(99)])
    )
    assert text.startswith("warning: promoted-dtype, 99 times\n")
    assert "… and 89 more; --json writes all." in text
    assert "seen: x, x, x, x, x, … 4 more" in text
    assert len(text.splitlines()) == 1 + 10 * 2 + 1 + 1


def test_memory_says_what_is_known_with_the_largest_buffers():
    memory = Memory(
        argument_bytes=1 << 30, output_bytes=0, temp_bytes=None, peak_bytes=None,
        live_bytes=3 << 30,
        largest=(LiveBuffer(name="fusion.1", nbytes=2 << 30, shape="f32[8]", source="model.py:3"),),
    )  # fmt: skip
    assert rendered(memory_text(memory)) == (
        "Memory of a device: arguments 1 GiB, outputs 0 B, live at once 3 GiB.\n"
        "       2 GiB  f32[8]  fusion.1  model.py:3\n"
    )


def test_exposure_is_told_where_something_could_be_hidden():
    def told(fraction, time, is_async=True):
        rows = [
            AxesExposure(axes=("tensor",), exposed_fraction=fraction, transfer_s=time),
            AxesExposure(axes=None, exposed_fraction=1.0, transfer_s=None),
        ]
        found = collective(is_async=is_async, exposed_fraction=fraction)
        return rendered(exposure_text(audit_of(found, exposure=tuple(rows))))

    assert told(0.25, 0.0015) == (
        "Exposed communication: tensor 25% of 1.5 ms, other devices 100%.\n"
    )
    assert told(None, None) == "Exposed communication: other devices 100%.\n"
    assert told(1.0, None, is_async=False) == ""


def test_names_of_others_come_out_as_they_are():
    from jaxpar.audit.budget import Budget, Limit, check
    from jaxpar.audit.diff import diff
    from jaxpar.audit.grouping import GROUPINGS, grouped

    changes = [
        {"axis": None, "axes_note": EVIL}, {"axis": EVIL}, {"phase": EVIL}, {"dtype": EVIL},
        {"scope": EVIL}, {"source": EVIL},
    ]  # fmt: skip
    limit = Budget(limit=[Limit(max_count=0)])
    for change in changes:
        result = audit_of(collective(**change))
        assert SHOWN in rendered([audit_table(result)]), change
        groups = [groups_table(EVIL, by, grouped(result, by)) for by in GROUPINGS]
        assert SHOWN in rendered(groups)
        assert "\x1b" not in rendered(budget_text(check(limit, result)))
        other = diff(audit_of(collective(count=1)), result)
        assert SHOWN in rendered(diff_text(other, EVIL, "b"))
        assert "\x1b" not in rendered([*groups, *diff_text(other, EVIL, "b")])
    for key in ("rule", "severity", "message", "source", "remedy"):
        assert SHOWN in rendered(findings_text([finding(**{key: EVIL})]))
    assert SHOWN in rendered(findings_text([finding(evidence=(EVIL,))]))
    assert SHOWN in rendered([matrix_table(np.zeros((1, 1)), [EVIL], "t")])
    for key in ("name", "shape", "source"):
        fields = {"name": "n", "nbytes": 1, "shape": "s", "source": None, key: EVIL}
        memory = Memory(argument_bytes=0, output_bytes=0, temp_bytes=0, peak_bytes=0,
                        largest=(LiveBuffer(**fields),))  # fmt: skip
        assert SHOWN in rendered(memory_text(memory))


def test_a_long_diff_is_cut_and_counted():
    from jaxpar.audit.diff import diff

    other = audit_of(*(collective(scope=f"s{i}", dtype=f"u{i}") for i in range(60)))
    text = rendered(diff_text(diff(audit_of(), other), "a", "b"))
    assert "… and 10 more" in text and text.count("appeared") == 50


def test_the_json_of_everything_at_once_is_what_python_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxpar.audit.matrix", ONES)
    arguments = ["--mesh", AXES, "--matrix", "--group-by", "layer", "--against", TP,
                 *budget("max_count = 30")]  # fmt: skip
    code, data = written(TP, *arguments)
    assert code == 0
    with gzip.open(TP, "rt") as file:
        want = audit(file.read(), mesh=MESH).to_json()
    assert {key: data[key] for key in want} == want
    assert list(data)[len(want) :] == ["groups", "matrix", "budget", "against"]
