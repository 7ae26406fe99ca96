"""Pipeline schedules as CSV, as pictures, and on the command line."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar import cli
from jaxpar.errors import ScheduleError
from jaxpar.strategies.pipeline import drawing
from jaxpar.strategies.pipeline.builders import build
from jaxpar.strategies.pipeline.schedule import Schedule
from jaxpar.strategies.pipeline.simulate import Times, simulate
from jaxpar.strategies.pipeline.tables import MAX_BYTES, from_csv, read_csv, to_csv
from tests.test_pipeline_schedules import schedule, schedules, table

PAGE = (Path(__file__).parent.parent / "docs" / "07-pipeline-schedules.md").read_text()

# --- CSV -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(schedules(max_microbatches=6))
def test_a_table_is_read_as_it_was_written(s):
    assert from_csv(to_csv(s), s.name) == s


def test_what_is_written():
    s = schedule(("interleaved", True), 2, 1, 2)
    assert to_csv(s) == "stage 0,stage 1\nF0,\n,F0\nF0.1,\n,F0.1 B0.1\nB0.1,\n,B0\nB0,\n"
    one = schedule(("1f1b", False), 1, 1)
    idle = Schedule(name="1f1b", num_stages=1, num_microbatches=1, slots=(*one.slots, ((),)))
    assert to_csv(idle) == 'stage 0\nF0\nB0\n""\n'
    assert from_csv(to_csv(idle), "1f1b") == idle


@pytest.mark.parametrize(
    "text",
    [
        "F0,\n,F0\n,B0\nB0,\n",
        "Device_0,device 1\nF0,\n,F0\n,B0\nB0,",
        "\nstage,stage\r\nF0,\r\n , F0 \r\n\r\n,B0\r\nB0,\r\n\r\n",
        'rank0,rank1\n"F0",""\n,"F0.0"\n,B0\nB0,\n',
    ],
)
def test_what_spreadsheets_write_is_read(text, tmp_path):
    expected = ("F0", ""), ("", "F0"), ("", "B0"), ("B0", "")
    assert from_csv(text).slots == table(*expected)
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8-sig", newline="")
    assert read_csv("mine.csv") == from_csv(text, "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Table 'x' is empty. It has one row for each slot."),
        ("stage 0,stage 1\n", "Table 'x' is empty."),
        (",\n,\n", "Table 'x' has no action. A cell holds one such as F0."),
        ("F0\nB0 f1", "line 2, column 1: 'f1' is no action. One is a letter, a micro-batch and"),
        ("F0,\n,F-1", "line 2, column 2: 'F-1' is no action."),
        ("stages,\nF0,", "line 1, column 1: 'stages' is no action."),
        ("F0;;\n", "line 1, column 1: 'F0;;' is no action."),
        ("F٣", "line 1, column 1: 'F٣' is no action."),
        ("F0.", "line 1, column 1: 'F0.' is no action."),
        ("F0\nX0", "line 2, column 1: 'X0' has the letter 'X'. Known: F (forward), B (backward), "),
        ("F0\n\n\nB0,", "line 4: 2 columns, and the first row has 1. Every row has a column for"),
        ("stage 0,stage 1\nF0", "line 2: 1 columns, and the first row has 2."),
        ('F0\n"B0', "line 2: no CSV (unexpected end of data)."),
        ("F0\n\0", "line 2, column 1: '\\x00' is no action."),
        ("F" * 200_000, "line 1: no CSV (field larger than field limit"),
        ("F0," * 70_000, "num_stages=70001, num_microbatches=1"),
        ("F0 " * 30_000, "F0 F0 F0 cannot share a cell"),
        ("F999999999", "A table for num_stages=1, num_microbatches=1000000000 and"),
        ("F0.999999999", "num_virtual_stages=1000000000 has more than 262144 cells."),
        ("F" + "9" * 5000, "is no action."),
        ("\x1b[31m", r"'\x1b[31m' is no action."),
        ("F0,\n,F0 B0\n", "Schedule 'x', stage 0: B0 is missing."),
    ],
    ids=range(22),
)
def test_what_is_no_table(text, message):
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        from_csv(text, "x")
    assert len(str(caught.value)) < 500


@settings(max_examples=200, deadline=None)
@given(st.text("FBIW01. ,\n\"'\0\r;-ſ", max_size=40))
def test_any_text_is_a_table_or_refused(text):
    try:
        s = from_csv(text)
    except ScheduleError:
        return
    assert from_csv(to_csv(s), s.name) == s


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfeF0", "x.csv is no text in UTF-8, so no CSV table: "),
        (b" " * (MAX_BYTES + 1), "x.csv is larger than 8 MiB: no such table."),
    ],
    ids=["UTF-16", "large"],
)
def test_files_that_are_none(content, message, tmp_path):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        read_csv("x.csv")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch.csv", "nosuch.csv cannot be read: No such file or directory."),
        (".", ". cannot be read: Is a directory."),
        ("x" * 300, "cannot be read: File name too long."),
        ("x\0", "is no path: embedded null byte."),
    ],
)
def test_paths_that_are_none(path, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        read_csv(path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_stages": 3}, "has 2 columns, one for each stage, and num_stages=3 are asked for."),
        ({"num_microbatches": 3}, "stage 0: F2 is missing."),
        ({"num_microbatches": 1}, "F1 names micro-batch 1; with num_microbatches=1 they are 0."),
        ({"num_microbatches": 0}, "num_microbatches=0 (int) must be a whole number from 1"),
        ({"num_virtual_stages": 2}, "stage 0: F0.1 is missing."),
    ],
)
def test_sizes_asked_for_are_those_of_the_table(sizes, message):
    text = to_csv(schedule(("1f1b", True), 2, 2))
    from_csv(text, num_stages=2, num_microbatches=2, num_virtual_stages=1)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        from_csv(text, **sizes)


# --- pictures ------------------------------------------------------------------------------------


def test_text():
    assert drawing.text(schedule(("1f1b", False), 2, 3)) == (
        "slot     0  1  2  3  4  5  6  7\n"
        "stage 0  F0 F1 ·  B0 F2 B1 ·  B2\n"
        "stage 1  ·  F0 B0 F1 B1 F2 B2 ·\n"
    )
    assert drawing.text(schedule(("1f1b", True), 2, 3), width=9 + 3 * 3) == (
        "slot     0  1  2\nstage 0  F0 F1 F2\n         ·  ·  B0\n"
        "stage 1  ·  F0 F1\n         ·  B0 B1\n"
        "\n"
        "slot     3  4\nstage 0  ·  ·\n         B1 B2\nstage 1  F2 ·\n         B2 ·\n"
    )  # fmt: skip


def test_text_is_never_wider_than_asked_unless_a_slot_is():
    s = schedule(("interleaved", False), 4, 12, 2)
    for width in (1, 40, 160):
        lines = drawing.text(s, width).splitlines()
        assert max(map(len, lines)) <= max(width, len("stage 0  F10.1"))
        cells = [word for line in lines for word in line.split() if word[0] in "FB"]
        assert sorted(cells) == sorted(str(action) for *_, action in s.actions())


SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    """(x, y, width, what is told) of each action in the picture."""
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        x, y, width = (float(box.get(key)) for key in ("x", "y", "width"))
        yield x, y, width, group.find(f"{SVG}title").text


def test_svg_has_a_box_for_each_action_on_one_scale_of_time():
    times = Times(forward=1, input_gradient=1, weight_gradient=2)
    s = schedule(("interleaved", False), 2, 4, 2)
    pictured = [simulate(s, times), simulate(s, times, lock_step=True)]
    found = list(boxes(drawing.svg(pictured)))
    told = "{} of micro-batch {}, stage {}, chunk {}: {:.6g} to {:.6g}"
    wanted = []
    for one in pictured:
        for _, stage, action, start in one.starts:
            time = times.per_chunk(2)[action.kind]
            numbers = action.microbatch, stage, action.chunk, start, start + time
            wanted.append((told.format(action.kind.noun, *numbers), start, time))
    left, scale = found[0][0], found[0][2] / wanted[0][2]
    for (x, _, width, title), (text, start, time) in zip(found, wanted, strict=True):
        assert title == text
        assert (x - left, width) == pytest.approx((start * scale, time * scale), rel=1e-3)
    lanes = {}
    for x, y, width, _ in found:
        lanes.setdefault(y, []).append((x, x + width))
    assert len(lanes) == 4
    for lane in lanes.values():
        lane.sort()
        assert all(one[1] <= other[0] + 0.02 for one, other in itertools.pairwise(lane))


def test_svg_shows_names_as_they_are_and_loads_nothing():
    name = "<script>alert(1)</script>&\x1b[31m\u202e"
    slots = schedule(("1f1b", True), 2, 2).slots
    s = Schedule(name=name, num_stages=2, num_microbatches=2, slots=slots)
    svg = drawing.svg([simulate(s, Times())])
    root = ElementTree.fromstring(svg)
    assert root.find(f"{SVG}title").text == (
        r"Pipeline schedule <script>alert(1)</script>&\x1b[31m\u202e"
    )
    assert {child.tag for child in root.iter()} == {
        SVG + tag for tag in ("svg", "title", "rect", "text", "g")
    }
    assert not re.search("href|url|@import|style=|on[a-z]+=", svg)
    assert svg.count("http") == 1


def test_what_nobody_could_see_is_not_drawn(monkeypatch):
    monkeypatch.setattr(drawing, "MAX_DRAWN", 2 * 8 - 1)
    s = schedule(("1f1b", False), 2, 3)
    for draw in (lambda: drawing.text(s), lambda: drawing.svg([simulate(s, Times())])):
        with pytest.raises(ScheduleError, match="A drawing of 8 slots × 2 stages .* are 15 cells"):
            draw()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """jaxpar schedule with these arguments: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxpar", "schedule", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def test_schedule(run):
    files = ["--svg", "x.svg", "--csv", "x.csv", "--json", "x.json"]
    code, out, err = run("interleaved", "--virtual", 2, "--phased", "--backward", 4, *files)
    assert (code, err) == (0, "")
    assert out.startswith("interleaved: 4 stages, 8 micro-batches, 2 chunks per stage, 26 slots\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert "forward 1, backward 2 + 2, send 0" in out
    assert ["lock-step", "47.5", "40", "7.5", "15.8%"] in rows
    assert ["in flight at most", "5.5, 4.5, 3.5, 2.5 micro-batches, by stage"] in rows
    assert ["stash per device", "10 inputs, 0 gradients, each of one chunk"] in rows
    assert ["messages needed", "16, 16, 16, 8 by stage and direction"] in rows
    assert ["slots with messages", "19 forward, 19 backward"] in rows

    s = schedule(("interleaved", True), 4, 8, 2)
    assert drawing.text(s, 160) in out
    assert read_csv("x.csv").slots == s.slots
    times = Times(forward=1, input_gradient=2, weight_gradient=2)
    pictured = [simulate(s, times), simulate(s, times, lock_step=True)]
    assert Path("x.svg").read_text() == drawing.svg(pictured)
    data = json.loads(Path("x.json").read_text())
    assert data["schema"] == "jaxpar.schedule/1"
    assert data["schedule"]["slots"][7] == ["F3.1", "F2.1", "F1.1", "F0.1 B0.1"]
    assert data["lock_step"] == data["asynchronous"]
    assert data["lock_step"] == {"makespan": 47.5, "bubble": 7.5 / 47.5, "bubble_time": 7.5}
    assert (data["work"], data["peak_in_flight"]) == (40, [5.5, 4.5, 3.5, 2.5])
    assert data["stash"] == {"inputs": 10, "gradients": 0}

    again = run("x.csv", "--backward", 4)
    assert again == (0, out.replace("interleaved:", "x:", 1), "")


def test_schedule_of_halves(run):
    _, out, _ = run("zb-h1", "--stages", 3, "--input-gradient", 3, "--weight-gradient", 2)
    assert "forward 1, backward 3 + 2, send 0" in out
    assert "I7 W7" in out.splitlines()[3]


def test_a_table_too_large_to_be_drawn_is_still_told(run, monkeypatch):
    monkeypatch.setattr(drawing, "MAX_DRAWN", 10)
    code, out, err = run("1f1b", "--json", "x.json")
    assert (code, err) == (0, "")
    assert "A drawing of 22 slots × 4 stages" in out
    assert "8, 8, 8, 0 by stage and direction" in out
    assert len(json.loads(Path("x.json").read_text())["schedule"]["slots"]) == 22
    code, out, err = run("1f1b", "--svg", "x.svg")
    assert (code, out) == (2, "") and "Draw fewer micro-batches" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpip"], "no schedule 'gpip'. Did you mean 'gpipe'? A table of your own is a file that"),
        (["[red]x[/red]"], "no schedule '[red]x[/red]'. Known: 1f1b, gpipe, interleaved, zb-h1."),
        (["x.csv"], "x.csv cannot be read: No such file or directory."),
        (["mine.csv", "--phased"], "--phased chooses a form of a published schedule, and mine.csv"),
        (["mine.csv", "--stages", "3"], "Table 'mine' has 2 columns, one for each stage, and"),
        (["1f1b", "--virtual", "2"], "=2 asks for more. Use 'interleaved', or --virtual=1."),
        (["zb-h1", "--phased"], "Schedule 'zb-h1' has no phased form"),
        (["1f1b", "--stages", "0"], "--stages=0 (int) must be a whole number from 1"),
        (["1f1b", "--forward", "nan"], "forward=nan (float) must be a number above 0"),
        (["1f1b", "--backward", "0"], "--backward=0.0 (float) must be a number above 0"),
        (["1f1b", "--backward", "2", "--weight-gradient", "1"], "--backward is the sum of "),
        (["1f1b", "--send", "-1"], "send=-1.0 (float) must be a number above 0"),
        (["1f1b", "--svg", "nosuch/x.svg"], "Cannot write nosuch/x.svg: no such folder"),
        (["1f1b", "--csv", "."], "Cannot write .: it is a folder."),
        (["1f1b", "--json", "nosuch/x.json"], "Cannot write nosuch/x.json: no such folder"),
        (["mine.csv", "--microbatches", "2"], "stage 0: F1 is missing."),
        (["mine.csv", "--virtual", "2"], "stage 0: F0.1 is missing."),
    ],
)
def test_refusals_are_one_paragraph(run, arguments, message):
    Path("mine.csv").write_text("F0,\n,F0 B0\nB0,\n")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("jaxpar: ") and message in line
    assert not Path("x.svg").exists()


# --- the page ------------------------------------------------------------------------------------


def test_the_table_on_the_page_is_one(run):
    (text,) = re.findall(r"^```csv\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    s = from_csv(text)
    assert s.slots == build("zb-h1", num_stages=2, num_microbatches=2).slots
    assert to_csv(s) == text
    (refused,) = re.findall(r"^jaxpar: (.+)$", PAGE, re.MULTILINE)
    early = text.replace("\n,I0\nI0,F1\n", "\nI0,I0\n,F1\n")
    assert early != text
    Path("mine.csv").write_text(early)
    code, out, err = run("mine.csv")
    assert (code, out, err) == (2, "", f"jaxpar: {refused}\n")
