"""`jaxpar table --inference`: what it says of a phase is what its audited program does."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import jaxpar
import jaxpar.targets.on_target
from jaxpar.cli import main
from jaxpar.cli_table import answer
from jaxpar.errors import PlanError, TargetError
from jaxpar.hardware import chip
from jaxpar.model.config import preset
from jaxpar.serve import comparison, on_target
from jaxpar.serve.comparison import compared, plans
from jaxpar.targets import Target
from tests.serve_helpers import DENSE, served


def test_small_models_are_audited_and_an_error_is_told(monkeypatch):
    rows = compared(DENSE, chip("h100"), num_devices=2)
    assert [(row.phase, row.agrees) for row in rows] == [
        ("train", True), ("prefill", True), ("decode", True),
    ]  # fmt: skip
    assert [row.shares[0].kind for row in rows] == ["all-reduce"] * 3
    _, serving = plans(DENSE, 2, is_small=True)
    short = comparison.expected(DENSE, serving, "decode")[1:]
    monkeypatch.setattr(comparison, "expected", lambda *_: short)
    assert comparison._serve(DENSE, serving, "decode", chip("h100"), True).agrees is False


def test_what_differs_ends_the_command_with_1(monkeypatch, capsys):
    wrong = [
        comparison._serve(preset("tiny"), plans(preset("tiny"), 8, is_small=True)[1], "decode",
                          chip("h100"), False)
    ]  # fmt: skip
    wrong[0] = type(wrong[0])(**{**vars(wrong[0]), "agrees": False})
    monkeypatch.setattr(comparison, "compared", lambda *_, **__: wrong)
    monkeypatch.setattr(sys, "argv", ["jaxpar", "table", "--inference", "--model", "llama-3-8b"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 1 and "audit differs" in capsys.readouterr().out


def test_large_models_by_their_closed_forms():
    _, data = answer(False, ["llama-3-8b", "mixtral-8x7b"], inference=True)
    rows = {(row["model"], row["phase"]): row for row in data["rows"]}
    assert json.loads(json.dumps(data, allow_nan=False)) == data and data["agrees"]
    assert all(row["agrees"] is None for row in rows.values())
    dense = rows["llama-3-8b", "decode"]
    # Two reductions in each of 32 layers and one behind the embedding, of 32 rows on a device.
    first = dense["communication"][0]
    assert (first["kind"], first["axes"], first["count"]) == ("all-reduce", ["tensor"], 65)
    assert first["wire_bytes"] == 65 * 1.5 * 32 * 4096 * 2
    assert dense["bound"] == "memory" and dense["hidden_part"] == 0
    assert rows["llama-3-8b", "prefill"]["bound"] == "compute"
    for model, axis in (("llama-3-8b", "tensor"), ("mixtral-8x7b", "expert")):
        for phase in ("train", "prefill", "decode"):
            row = rows[model, phase]
            assert row["communication"][0]["axes"] == [axis]
            sums = sum(part["wire_bytes"] for part in row["communication"])
            assert row["wire_bytes"] == sums
            work = max(row["compute_s"], row["memory_s"])
            assert work < row["step_s"] <= work + row["link_s"]
    train = rows["llama-3-8b", "train"]
    hidden = [p["wire_bytes"] for p in train["communication"] if p["beside"] == "other layers"]
    assert train["hidden_part"] == pytest.approx(sum(hidden) / train["wire_bytes"]) and hidden


def test_programs_of_a_target_are_audited_with_its_chip(monkeypatch):
    """The compiler is one of CPUs here; all around it is as for a real one."""
    step = served("tensor=2")
    text = step.compiled("decode").as_text()
    asked_for = {}

    def compile_module(module, **options):
        asked_for.update(options, module=module)
        memory = dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes", "peak_bytes"), 0)
        return SimpleNamespace(text=text, seconds=0.0, memory=memory)

    monkeypatch.setattr(jaxpar.targets.on_target, "compile_module", compile_module)
    monkeypatch.setattr(jaxpar.targets.on_target, "require_compiler", lambda target: None)
    target = Target.parse("h100:1x2")
    found = on_target.compile_serving_for(step, "decode", target)
    assert asked_for["target"] == target and asked_for["module"].startswith(b"ML")
    assert found.changes.agrees and found.exposed_part == 1.0, "CPUs wait for every one"
    monkeypatch.setattr(comparison, "ServeStep", lambda **_: step)
    row = comparison._serve(DENSE, step.plan, "decode", target.hardware, False, lambda *_: found)
    assert (row.agrees, row.exposed_part, row.changes) == (True, 1.0, ())
    assert replace(found, audit=jaxpar.audit(text)).exposed_part is None


def test_one_table_at_a_time():
    for zero in (True, False):
        with pytest.raises(PlanError, match="Which table.*--inference"):
            answer(zero, [], inference=zero)
    with pytest.raises(PlanError, match="--zero compiles nothing"):
        answer(True, [], target="h100:1x8")
    with pytest.raises(TargetError, match="h99"):
        answer(False, [], inference=True, target="h99:1x8")
