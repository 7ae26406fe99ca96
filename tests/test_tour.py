"""The main job on the rows that the README shows, and the README, which shows what it prints.

Every other row is trained, counted and audited by its strategy's tests; CI takes the whole tour.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

from jaxpar.audit.compare import agree
from jaxpar.cli import main
from jaxpar.serve import step
from jaxpar.serve.variants import ServingVariant
from jaxpar.tour import Services, chosen
from tests.helpers import SMALL, corpus

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """One run of `jaxpar tour`: (what it printed, its JSON, its page). It exits with 0."""
    folder = tmp_path_factory.mktemp("tour")
    arguments = ["tour", "--json", str(folder / "tour.json"), "--html", str(folder / "report.html")]
    arguments += [word for name in rows_shown() for word in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxpar", *arguments])
        output = _captured(main)
    data = json.loads((folder / "tour.json").read_text())
    return output, data, (folder / "report.html").read_text()


def shown() -> str:
    """What the README says that `make tour` prints."""
    return re.search(r"\$ make tour\n(.*?)```", README.read_text(), re.DOTALL).group(1)


def rows_shown() -> list[str]:
    """Names at the beginnings of lines: of tables, continuation lines are indented."""
    return [name for name in every_row() if re.search(rf"^ {re.escape(name)} ", shown(), re.M)]


def every_row() -> list[str]:
    return [row.name for row in chosen(())]


def _captured(run):
    """Standard output of `run`, which has to exit with 0."""
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as exit:
        run()
    assert exit.value.code in (0, None), output.getvalue()
    return output.getvalue()


def test_everything_agrees_and_says_so(tour):
    output, data, _ = tour
    assert "✗" not in output
    assert re.search(r"predicted = asked = compiled, and = one device, on all \d+ rows", output)
    assert data["schema"] == "jaxpar.tour/1"
    assert all(row["agrees"] for row in data["rows"])


def test_rows_are_those_asked_for_and_the_design_has_no_other_names(tour):
    names = every_row()
    assert [row["strategy"] for row in tour[1]["rows"]] == rows_shown()
    assert len(set(names)) == len(names)
    assert {
        "data", "tensor", "tensor+sequence", "fsdp", "zero1", "zero2", "hsdp", "pipeline-gpipe",
        "pipeline-1f1b", "pipeline-interleaved", "pipeline-zb-h1", "expert-capacity",
        "expert-dropless", "context-ring", "context-ulysses", "context-allgather",
    } <= set(names)  # fmt: skip


def test_json_is_what_the_design_says(tour):
    for row in tour[1]["rows"]:
        assert {"strategy", "plan", "mesh", "agrees"} <= row.keys()
        if row["strategy"] in ("prefill", "decode"):
            assert row["num_tokens"] >= 12 and row["num_wrong"] == 0
        else:
            assert 0 <= row["loss_error"] <= 1e-5
            assert 0 <= row["parameter_error"] <= 1e-4
        for line in row["comparison"]:
            assert {"kind", "axes", "phase", "agrees", "note", "wire_bytes"} <= line.keys()
            for column in ("predicted", "asked", "compiled"):
                assert line[column]["payload_bytes"] == line["predicted"]["payload_bytes"]
            assert line["asked"]["count"] == line["predicted"]["count"] > 0
            assert line["compiled"]["count"] >= 1


def test_wrong_tokens_are_seen(monkeypatch):
    """Keys and queries that do not know where they stand."""
    rotary_angles = step.rotary_angles
    variant = ServingVariant(name="row", kind="decode", mesh="tensor=2")
    services = Services(corpus())
    honest = services.take_row(variant, SMALL)
    assert honest.agrees and honest.num_tokens > 60 and honest.told()[0].startswith("wrong 0 of")
    with monkeypatch.context() as patch:
        patch.setattr(step, "rotary_angles", lambda position, *of: rotary_angles(0 * position, *of))
        wrong = Services(corpus()).take_row(variant, SMALL)
    assert agree(wrong.lines) and wrong.num_wrong > 10 and not wrong.agrees


def test_page_is_self_contained_and_holds_the_table(tour):
    _, data, page = tour
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    for row in data["rows"]:
        assert f"<td>{row['strategy']}</td>" in page
    assert "predicted = asked = compiled" in page


def test_readme_shows_what_the_tour_prints(tour):
    assert _facts(shown()) == _facts(tour[0])
    assert f"on all {len(every_row())} rows" in shown()


def _facts(table: str) -> list[list[str]]:
    """The words of each line, without errors and seconds, which differ, and rows left out."""
    text = re.sub(r"\b(loss|norm|params) \S+", r"\1", table)
    text = re.sub(r"on all \d+ rows in \d+ s\.|Written: .*|make\[?.*|^ …$", "", text, flags=re.M)
    return [line.split() for line in text.splitlines() if line.strip(" ─")]
