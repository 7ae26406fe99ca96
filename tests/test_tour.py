"""The main job, as a user runs it; and the README, which shows what it prints."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

from jaxpar.cli import main
from jaxpar.strategies import compose

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """One run of `jaxpar tour`: (what it printed, its JSON, its page). It exits with 0."""
    folder = tmp_path_factory.mktemp("tour")
    arguments = ["tour", "--json", str(folder / "tour.json"), "--html", str(folder / "report.html")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxpar", *arguments])
        output = _captured(main)
    data = json.loads((folder / "tour.json").read_text())
    return output, data, (folder / "report.html").read_text()


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


def test_every_variant_of_every_strategy_is_there(tour):
    names = [v.name for s in compose.all_strategies().values() for v in s.variants]
    assert [row["strategy"] for row in tour[1]["rows"]] == names
    assert {"data", "tensor", "tensor+sequence", "fsdp", "data+tensor", "fsdp+tensor"} <= set(names)


def test_json_is_what_the_design_says(tour):
    for row in tour[1]["rows"]:
        assert {"strategy", "plan", "mesh", "agrees", "loss_error", "parameter_error"} <= row.keys()
        assert 0 <= row["loss_error"] <= 1e-5
        assert 0 <= row["parameter_error"] <= 1e-4
        for line in row["comparison"]:
            assert {"kind", "axes", "phase", "agrees", "note", "wire_bytes"} <= line.keys()
            for column in ("predicted", "asked", "compiled"):
                assert line[column]["payload_bytes"] == line["predicted"]["payload_bytes"]
            assert line["asked"]["count"] == line["predicted"]["count"] > 0
            assert line["compiled"]["count"] >= 1


def test_page_is_self_contained_and_holds_the_table(tour):
    _, data, page = tour
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    for row in data["rows"]:
        assert f"<td>{row['strategy']}</td>" in page
    assert "predicted = asked = compiled" in page


def test_readme_shows_what_the_tour_prints(tour):
    shown = re.search(r"\$ make tour\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert _facts(shown) == _facts(tour[0])


def _facts(table: str) -> list[list[str]]:
    """The words of each line, without what differs from machine to machine: errors, seconds."""
    text = re.sub(r"\b(loss|norm|params) \S+", r"\1", table)
    text = re.sub(r"in \d+ s\.|Written: .*|make\[?.*", "", text)
    return [line.split() for line in text.splitlines() if line.strip(" ─")]
