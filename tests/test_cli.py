"""The command line: exit codes, one-paragraph errors, and text of others shown as it is."""

from __future__ import annotations

import dataclasses
import gzip
import html
import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxpar import cli, console
from jaxpar.audit.compare import Amount, Line
from jaxpar.errors import JaxparError
from jaxpar.report.html import tour_page
from jaxpar.report.text import card_table, literal, tour_table, tour_verdict
from jaxpar.strategies import compose
from jaxpar.tour import Tour, TrainingRow
from tests.helpers import plan

HLO = Path(__file__).parent / "audit" / "hlo"


@pytest.fixture
def run(monkeypatch, capsys):
    """jaxpar with these arguments: exit code, what went to stdout, what went to stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxpar", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def paragraph(result):
    """The message of a refusal, after checking that it is nothing else."""
    code, out, err = result
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("jaxpar: ")
    return line


def text_of(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        return file.read()


def rendered(*things):
    console = Console(width=400, record=True, file=io.StringIO())
    for thing in things:
        console.print(thing)
    return console.export_text()


# --- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["tour"], ["explain"], ["audit"]])
def test_help(run, arguments):
    code, out, err = run(*arguments, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: jaxpar {' '.join(arguments)}".strip() in out
    if not arguments:
        assert all(command in out for command in ("tour", "explain", "audit"))


def test_explain(run):
    code, out, err = run("explain", "tensor", "--mesh", "data=2,tensor=4", "--json", "out.json")
    assert (code, err) == (0, "")
    # Llama 3 8B: 2·32 layers + 1, of 32 sequences × 4096 tokens × 4096 × 2 bytes each.
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert ["all-reduce", "tensor", "forward", "65", "1 GiB", "65 GiB", "bf16",
            "leave attention and MLP of each layer, and embedding"] in lines  # fmt: skip
    data = json.loads(Path("out.json").read_text())
    assert data["card"]["name"] == "tensor"
    assert data["expected"][0] == {
        "kind": "all-reduce", "axes": ["tensor"], "phase": "forward",
        "count": 65, "payload_bytes": 32 * 4096 * 4096 * 2, "dtype": "bf16",
        "why": "leave attention and MLP of each layer, and embedding", "device_counts": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", compose.all_strategies())
def test_explain_knows_every_strategy(run, name):
    found, variant = compose.strategy(name)
    model = variant.model or "tiny"
    code, out, err = run("explain", name, "--model", model, "--seq-len", 64)
    assert (code, err) == (0, "")
    assert found.card.source in out and found.card.name in out
    assert f"On the wire, {name}: " in out
    assert "This plan does not use" not in out


@pytest.mark.parametrize("name", compose.all_strategies())
def test_explain_says_where_a_mesh_has_no_use_for_a_strategy(run, name):
    found, variant = compose.strategy(name)
    model = variant.model or "tiny"
    answer = run("explain", name, "--model", model, "--mesh", "data=1", "--seq-len", 64)
    if answer[0]:
        assert "(data=1)" in paragraph(answer)
        return
    everywhere = {"data", "clip", "remat", "offload", "expert"}
    told = f"This plan does not use {name}. Its axis: {found.card.axis}." in answer[1]
    assert told == (name not in everywhere)
    assert "On the wire, the whole step: nothing." in answer[1]


def test_explain_sets_any_field_of_a_plan(run):
    def told(*options):
        return run("explain", "pipeline", "--model", "llama-3-8b", *options)

    few, many = (told("--set", f"num_microbatches={m}")[1] for m in (4, 8))
    assert few != many
    assert "Did you mean 'schedule'?" in paragraph(told("--set", "shedule=1f1b"))
    assert "write schedule=…" in paragraph(told("--set", "schedule"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "tensr"], "no strategy 'tensr'. Did you mean 'tensor'?"),
        (["explain", "[red]x[/red]"], "no strategy '[red]x[/red]'. Known: "),
        (["explain", "data", "--model", "llama-3-8"], "Did you mean 'llama-3-8b'?"),
        (["explain", "expert", "--mesh", "expert=8"], "Presets that have: tiny-moe, mixtral-8x7b"),
        (["explain", "data", "--mesh", "nosuch"], "no mesh file 'nosuch'"),
        (["explain", "data", "--mesh", "tensr=2"], "no axis role 'tensr'. Did you mean 'tensor'?"),
        (["explain", "tensor", "--mesh", "tensor=3"], "num_heads=32 cannot be split over tensor=3"),
        (["explain", "data", "--batch-size", "63"], "Nearest batch_size: 56 or 64."),
        (["explain", "data", "--seq-len", "8193"], "Nearest seq_len: 8192."),
        (["explain", "data", "--seq-len", "0"], "seq_len=0 (int) must be a whole number from 1"),
        (["explain", "data", "--json", "nosuch/x.json"], "Cannot write nosuch/x.json: no such"),
        (["explain", "data", "--json", "."], "Cannot write .: it is a folder."),
        (["explain", "data", "--json", "x" * 300], "xxx: File name too long."),
        (["tour", "--only", "nosuch"], "no row 'nosuch'. Known: "),
        (["tour", "--only", "fsd"], "no row 'fsd'. Did you mean 'fsdp'?"),
        (["tour", "--html", "nosuch/x.html"], "Cannot write nosuch/x.html: no such folder"),
        (["tour", "--json", "."], "Cannot write .: it is a folder."),
        (["tour", "--text", "nosuch.txt"], "Text file 'nosuch.txt' does not exist"),
        (["audit", "nosuch.txt"], "nosuch.txt cannot be read: No such file or directory."),
        (["audit", "."], ". holds no module that XLA compiled"),
        (["audit", "x" * 300], "xxx cannot be read: File name too long."),
        (["audit", "[bold]x[/bold]:smile:"], "[bold]x[/bold]:smile: cannot be read"),
        (["audit", "\x1b[31mred\u202e"], r"jaxpar: \x1b[31mred\u202e cannot be read"),
        (["audit", HLO / "tp.cpu.txt.gz", "--mesh", "data=2"], "2 devices and the program was com"),
        (["audit", HLO / "tp.cpu.txt.gz", "--json", "nosuch/x"], "Cannot write nosuch/x: no such"),
    ],
)  # fmt: skip
def test_refusals_are_one_paragraph(run, arguments, message):
    assert message in paragraph(run(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "data", "--accumulation-steps", "0"], "jaxpar: --accumulation-steps=0 (int)"),
        (["explain", "data", "--set", "num_accumulation_steps=0"], ": num_accumulation_steps=0 (i"),
        (["explain", "decode", "--batch-size", "63"],
         "--batch-size=63 does not divide into equal parts of data=2: it is no multiple of 2. "
         "Nearest --batch-size: 62 or 64."),
        (["explain", "decode", "--set", "num_slots=63"], "Nearest num_slots: 62 or 64."),
        (["explain", "decode-pipe"], "Did you mean 'decode-pipeline'?"),
        (["explain", "prefill", "--seq-len", "0"], "jaxpar: --seq-len=0 (int) must"),
        (["schedule", "1f1b", "--microbatches", "0"], "jaxpar: --microbatches=0 (int) must"),
        (["recipe", "medium", "--devices", "12"], "jaxpar: --devices=12 cannot be spread"),
    ],
)  # fmt: skip
def test_errors_name_what_was_typed(run, arguments, message):
    assert message in paragraph(run(*arguments))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_steps=5: too few. Nearest num_steps: 6.", "--steps=5: too few. Nearest --steps: 6."),
        ("num_steps=5 and num_steps=6 here.", "--steps=5 and --steps=6 here."),
        (
            "num_steps=5, not num_steps.txt or num_steps/x",
            "--steps=5, not num_steps.txt or num_steps/x",
        ),
        ("num_steps=50 of the script", None),
        ("num_steps=5.5 of the script", None),
        ("max_num_steps=5", None),
        ("mesh.toml: unknown key 'num_steps'.", None),
    ],
)
def test_a_field_is_called_as_the_option_that_filled_it(text, told):
    with pytest.raises(JaxparError) as caught, console.typed({"num_steps": ("--steps", 5)}):
        raise JaxparError(text)
    assert str(caught.value) == (told or text)


@pytest.mark.parametrize(
    "arguments",
    [["nosuch"], ["tour", "--steps", "0"], ["explain"], ["audit"], ["explain", "a", "b"]],
)
def test_wrong_usage(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: jaxpar" in err
    assert "Traceback" not in err


def test_outputs_are_checked_before_the_work(run, monkeypatch):
    def work(*_, **__):
        raise AssertionError("worked first")

    monkeypatch.setattr("jaxpar.tour.take_tour", work)
    monkeypatch.setattr("jaxpar.strategies.compose.strategy", work)
    monkeypatch.setattr(sys.modules["jaxpar.audit"], "audit", work)
    for command in (["tour"], ["tour", "--html", "x.html"], ["explain", "data"], ["audit", "x"]):
        assert "Cannot write nosuch/x.json" in paragraph(run(*command, "--json", "nosuch/x.json"))
    assert "Cannot write nosuch/x.html" in paragraph(run("tour", "--html", "nosuch/x.html"))
    assert not list(Path().iterdir())


def test_a_disk_that_fills_up_is_told(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(JaxparError, match=r"Cannot write x: No space left on device\."):
        console.write(Path("x"), "")


def test_a_folder_without_permission_is_told(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(JaxparError, match=r"Cannot write x: permission denied\."):
        console.check_writable(Path("x"))


def test_json_is_strict():
    with pytest.raises(ValueError, match="JSON"):
        console.write_json(Path("x.json"), {"error": float("inf")})


# --- audit -------------------------------------------------------------------------------------


def test_audit(run):
    code, out, err = run(
        "audit", HLO / "tp.cpu.txt.gz", "--mesh", "data=2,tensor=4", "--json", "out.json"
    )
    assert (code, err) == (0, "")
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert ["all-reduce", "tensor", "forward", "4", "16 MiB", "24 MiB", "bf16 as f32", "attn",
            "spike/strategies.py:106"] in lines  # fmt: skip
    data = json.loads(Path("out.json").read_text())
    assert data["schema"] == "jaxpar.audit/1"
    assert list(data) == [
        "schema", "program", "mesh", "collectives", "totals", "exposure", "memory", "findings",
    ]  # fmt: skip
    assert data["program"] == {
        "name": "jit_step", "platform": "cpu", "num_devices": 8,
        "scheduled": True, "complete": True,
    }  # fmt: skip
    assert data["mesh"] == {"data": 2, "tensor": 4}
    assert set(data["collectives"][0]) >= {
        "kind", "axes", "axes_note", "group_size", "num_groups", "dtype", "program_dtype", "count",
        "count_min", "count_max", "payload_bytes", "wire_bytes", "phase", "scope", "source",
        "async", "exposed_fraction",
    }  # fmt: skip
    want = json.loads((HLO / "expected.json").read_text())["tp.cpu"]["all-reduce"]
    assert sum(total["count"] for total in data["totals"]) == want["count"]
    assert sum(total["payload_bytes"] for total in data["totals"]) == want["payload_bytes"]


def test_audit_of_a_text_that_was_cut(run):
    text = text_of("tp.cpu")
    Path("cut.txt").write_text(text[: len(text) // 2])
    code, out, err = run("audit", "cut.txt", "--json", "out.json")
    assert (code, err) == (3, "")
    assert "error: " in out
    assert " Print the text again with compiled.as_text(), and pass all of it." in out
    assert json.loads(Path("out.json").read_text())["program"]["complete"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((HLO / "tp.cpu.txt.gz").read_bytes()[:3000], "is a damaged .gz file"),
        (b"hello\n", "holds no HLO computation"),
        (b"", "holds no HLO computation"),
        (b"HloModule\0", "is binary"),
    ],
)
def test_audit_of_what_is_no_program(run, content, message):
    Path("file").write_bytes(content)
    assert message in paragraph(run("audit", "file"))


def test_audit_shows_names_as_they_are(run):
    evil = "[red]x[/red]:smile:\x1b[31m\x07<b>"
    text = text_of("tp.cpu").replace("/attn/", f"/{evil}/")
    text = re.sub("HloModule [^,]*", "HloModule [bold]m[/bold]", text, count=1)
    Path("[red]f.txt").write_text(text)
    code, out, _ = run("audit", "[red]f.txt", "--json", "out.json")
    assert code == 0
    assert r"[red]x[/red]:smile:\x1b[31m\x07<b>" in out
    assert "[bold]m[/bold], cpu, 8 devices" in out
    assert "\x1b" not in out
    scopes = {found["scope"] for found in json.loads(Path("out.json").read_text())["collectives"]}
    assert evil in scopes


# --- the tour's reports ------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>[red]x[/red]:smile:\x1b[31m{{ 7 * 7 }}"
SHOWN = EVIL.replace("\x1b", r"\x1b")


def small_tour(**changes):
    amount = Amount(count=2, payload_bytes=4096, dtype="f32")
    line = Line(kind="all-reduce", axes=("data",), phase="backward", predicted=amount, asked=amount,
                compiled=amount, wire_bytes=4096, agrees=True, note="merged")  # fmt: skip
    row = TrainingRow(strategy="data", plan=plan("data=2"), lines=[line], loss_error=0.0,
              gradient_norm_error=0.0, parameter_error=1e-6)  # fmt: skip
    tour = Tour(seconds=1.0, model="tiny", corpus="text", num_steps=5, rows=[row])
    line = dataclasses.replace(line, **changes.pop("line", {}))
    row = dataclasses.replace(row, lines=[line], **changes.pop("row", {}))
    return dataclasses.replace(tour, rows=[row], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": EVIL},
        {"corpus": EVIL},
        {"row": {"strategy": EVIL}},
        {"row": {"strategy": EVIL, "loss_error": 1.0}},
        {"line": {"kind": EVIL}},
        {"line": {"axes": (EVIL, "data")}},
        {"line": {"phase": EVIL}},
        {"line": {"note": EVIL}},
        {"line": {"note": EVIL, "agrees": False}},
    ],
    ids=str,
)
def test_names_of_others_come_out_as_they_are(changes):
    tour = small_tour(**changes)
    text = rendered(tour_table(tour), tour_verdict(tour))
    assert SHOWN in text
    assert "\x1b" not in text
    page = tour_page(tour).replace("\x1b", r"\x1b")
    assert html.escape(SHOWN, quote=False) in page
    assert "<script" not in page


def test_cards_come_out_as_they_are():
    card = compose.strategy("data")[0].card
    for field in dataclasses.fields(card):
        assert SHOWN in rendered(card_table(dataclasses.replace(card, **{field.name: EVIL})))


def test_the_page_is_one_file_without_scripts_or_requests():
    page = tour_page(small_tour())
    assert not re.search(r"<script|<link|<img|<iframe|https?://|url\(|@import|\bon\w+=", page)
    assert page.count("<tbody>") == 1
    for strategy in compose.all_strategies().values():
        assert f"<h3>{strategy.card.name}</h3>" in page
        assert html.escape(strategy.card.costs, quote=False) in page


def test_disagreement_is_told():
    for changes in ({"line": {"agrees": False}}, {"row": {"parameter_error": 1.0}}):
        tour = small_tour(**changes)
        assert not tour.agrees
        assert str(tour_verdict(tour)) == "Disagreement in data."
        assert "✗" in rendered(tour_table(tour))
        assert '<p class="verdict bad">' in tour_page(tour)
    good = small_tour()
    assert "✗" not in rendered(tour_table(good)) + tour_page(good)


def test_literal_keeps_what_can_be_read():
    assert str(literal("B·S·D × 2 ≥ 1 – “ü” 漢字\nnext")) == "B·S·D × 2 ≥ 1 – “ü” 漢字\nnext"
    assert str(literal("\x1b\r\x7f\u200b\udcff")) == r"\x1b\r\x7f\u200b\udcff"


@pytest.mark.parametrize(
    ("row", "shown"),
    [("hsdp", "on data=2 × fsdp=4,"), ("tensor+sequence", "on tensor=8,"), ("data", "on data=8,")],
)
def test_explain_takes_rows_of_the_tour(run, row, shown):
    code, out, err = run("explain", row, "--model", "tiny", "--seq-len", 64)
    assert (code, err) == (0, "") and shown in out
    assert ("reduce-scatter" in out) == (row != "data")


def test_explain_takes_the_plans_fields(run):
    def told(*options):
        return run("explain", "data+tensor", "--model", "tiny", "--seq-len", 64, *options)[1]

    answers = [
        told(),
        told("--sequence"),
        told("--remat", "full"),
        told("--compute-dtype", "float32"),
        told("--reduce-dtype", "bfloat16"),
        told("--accumulation-steps", 2),
    ]
    assert len(set(answers)) == len(answers)


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0 and re.fullmatch(r"jaxpar \d+\.\d+\.\d+, JAX \d+\.\d+\.\S+\n", out)


def test_audit_takes_anybodys_axis_names(run):
    code, out, _ = run("audit", HLO / "tp.cpu.txt.gz", "--mesh", "mine=2,yours=4")
    assert code == 0 and " yours " in out and " mine " in out
    code, _, err = run("audit", HLO / "tp.cpu.txt.gz", "--mesh", "mine=2,mine=4")
    assert code == 2 and "write name=size, each name once" in err


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_number_off(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run("explain", "fsdp", "--mesh", "fsdp=8")
    assert "…" not in out and "50.6 GiB" in out
