"""`jaxpar run`: what it trains and tells, how it stops, and how it goes on."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from jaxpar import cli, cli_run, recording
from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint_folder import MARKER
from jaxpar.errors import DivergedError, ExperimentError, JaxparError, PlanError
from jaxpar.experiment import Experiment, load
from jaxpar.loop import Record, Watch, train
from jaxpar.numerics import first_difference
from jaxpar.recording import JsonLines
from jaxpar.strategies.plan import plan_in_words
from tests.checkpoint_helpers import ODD, experiment, losses

ROOT = Path(__file__).parent.parent

SCRIPT = """
from tests.checkpoint_helpers import experiment as make

experiment = make("data=2", num_steps=6)
"""

STEPS = {}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """jaxpar with these arguments: exit code, stdout, stderr. Equal plans are compiled once."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    make = Experiment.step

    def shared(self):
        return STEPS.setdefault(plan_in_words(self.plan), make(self))

    monkeypatch.setattr(Experiment, "step", shared)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxpar", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def refused(result):
    code, out, err = result
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    return line


def numbers(folder):
    return [int(entry.name[5:]) for entry in sorted(Path(folder).glob("step_*"))]


# --- training --------------------------------------------------------------------------------


def test_it_trains_records_saves_and_goes_on(run):
    """Whole; then in two parts, the second one on the same mesh, to the bit, and on another one."""
    code, out, err = run(
        "run", "script.py", "--checkpoint", "whole", "--metrics", "whole.jsonl",
        "--tensorboard", "board", "--json", "whole.json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    whole = lines_of("whole.jsonl")
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    assert set(whole[0]) == {"schema", *re.findall(r"^    (\w+)  ", recording.__doc__, re.M)}
    assert whole[0]["tokens_per_s"] is None and whole[1]["tokens_per_s"] > 0
    of = experiment("data=2")
    assert [line["num_tokens"] for line in whole] == [
        int(of.batch(i).mask_BS.sum()) for i in range(6)
    ]
    assert scalars("board")["loss"] == [(line["step"], np.float32(line["loss"])) for line in whole]
    result = json.loads(Path("whole.json").read_text())
    assert result["schema"] == "jaxpar.run/1"
    assert (result["last_step"], result["stopped_by"]) == (6, None)
    assert result["loss"] == whole[-1]["loss"] and result["checkpoint"].endswith("step_00000006")
    assert numbers("whole") == [2, 4, 6]
    for told in (
        f"odd, {ODD.num_parameters:,} parameters: data=2, compute_dtype=float32",
        "8 × 8 tokens per step",
        "MFU: no peak known for cpu",
        "step 6  loss",
        "Steps 1 to 6: loss",
        "Saved: ",
    ):
        assert told in out, told  # fmt: skip

    run("run", "script.py", "--checkpoint", "part", "--metrics", "part.jsonl", "--steps", 4)
    shutil.copytree("part", "other")
    for folder, options, same in (
        ("part", (), 0.0),
        ("other", ("--mesh", "tensor=2"), 1e-5),
    ):
        more = ("--checkpoint", folder, "--metrics", f"{folder}.jsonl", "--resume", *options)
        code, out, err = run("run", "script.py", *more)
        assert (code, err) == (0, "") and "Going on after step 4." in out
        later = lines_of(f"{folder}.jsonl")[-2:]
        assert [line["step"] for line in later] == [5, 6]
        for mine, theirs in zip(later, whole[4:], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=same, abs=0)

    again = run("run", "script.py", "--checkpoint", "part", "--resume")
    assert again[0] == 0 and "Nothing to do: step 6 was the last one" in again[1]
    fewer = run("run", "script.py", "--checkpoint", "part", "--resume", "--steps", 4)
    assert fewer[0] == 0 and (
        "Nothing to do: the checkpoint is of step 6, and --steps 4 counts all steps, those before "
        "a restart too. For 4 more: --steps 10.\n" in fewer[1]
    )
    assert "Go on from there with --resume" in refused(
        run("run", "script.py", "--checkpoint", "part")
    )
    Path("text").write_bytes(b"another text than before " * 40)
    assert "corpus='noise' there and 'text' here" in refused(
        run("run", "script.py", "--checkpoint", "part", "--resume", "--text", "text")
    )
    assert "batch_size=8 there and 16 here" in refused(
        run("run", "script.py", "--checkpoint", "part", "--resume", "--set", "batch_size=16")
    )


def scalars(folder):
    """(step, value) by tag of what TensorBoard would read: TFRecords of Event protos."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = Path(folder).iterdir()
    content, at, found = file.read_bytes(), 0, {}
    while at < len(content):
        (size,) = struct.unpack("<Q", content[at : at + 8])
        event = Event.FromString(content[at + 12 : at + 12 + size])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, np.float32(value.simple_value)))
        at += 16 + size
    return found


@pytest.mark.parametrize(
    ("sent", "options"), [(signal.SIGINT, ("--checkpoint", "folder")), (signal.SIGTERM, ())]
)
def test_a_signal_leaves_a_checkpoint_and_says_how_to_go_on(run, monkeypatch, sent, options):
    show = cli_run.Screen.show

    def showing(self, record):
        if record.step == 3:
            os.kill(os.getpid(), sent)
        return show(self, record)

    monkeypatch.setattr(cli_run.Screen, "show", showing)
    folder = "folder" if options else "script.checkpoint-2"
    if options:  # killed before its first checkpoint was complete, and started again
        Path("folder", "step_00000002.orbax-checkpoint-tmp").mkdir(parents=True)
        Path("folder", MARKER).touch()
        options = (*options, "--resume")
    Path("script.checkpoint").mkdir()  # of an earlier run
    before = signal.getsignal(sent)
    code, out, _ = run("run", "script.py", "--metrics", "m.jsonl", "--json", "r.json", *options)
    assert signal.getsignal(sent) == before
    assert code == 128 + sent and numbers(folder)[-1] == 4
    assert ("holds no complete checkpoint: from the beginning." in out) == bool(options)
    result = json.loads(Path("r.json").read_text())
    assert (result["stopped_by"], result["last_step"]) == (sent.name, 4)
    assert f"{sent.name}: saving after this step. Once more ends it at once." in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:3] == ["jaxpar", "run", "script.py"]
    monkeypatch.setattr(cli_run.Screen, "show", show)
    assert run(*command[1:])[0] == 0
    assert [line["step"] for line in lines_of("m.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert numbers(folder)[-1] == 6


def test_what_is_not_finite_stops_it_and_the_checkpoint_stays(run):
    Path("bad.py").write_text(
        "import jax.numpy as jnp, optax\n"
        "from tests.checkpoint_helpers import experiment as make\n"
        "rate = lambda count: jnp.where(count < 3, -1e-3, jnp.inf)\n"
        "experiment = make('data=2', num_steps=6, optimizer=optax.scale_by_schedule(rate))\n"
    )
    STEPS.clear()  # that optimizer is another
    code, _, err = run("run", "bad.py", "--checkpoint", "folder", "--metrics", "m.jsonl")
    STEPS.clear()
    assert code == 1
    message = " ".join(err.split())
    assert re.search(
        r"Training stopped at step 4: the loss is [\d.]+ and the gradient norm [\d.]+\. Strategy: "
        r"data=2, compute_dtype=float32\. First leaf that is not finite after it: "
        r"params\.embedding\.table \(\d+ of 12 are not\)\. The last checkpoint is kept: "
        r"\S+/folder/step_00000002",
        message,
    ), message
    assert numbers("folder") == [2]
    assert [line["step"] for line in lines_of("m.jsonl")] == [1, 2, 3]


def test_python_runs_the_shipped_script(tmp_path):
    """As a newcomer does, but for two steps on one device; no warning allowed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "experiments" / "train.py", "--mesh", "data=1",
         "--steps", "2", "--set", "seq_len=16", "--metrics", "m.jsonl"],
        capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
             "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny, 106,816 parameters: data=1" in done.stdout
    assert [line["step"] for line in lines_of(tmp_path / "m.jsonl")] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


# --- the loop --------------------------------------------------------------------------------


def test_steps_ahead_change_nothing(run, tmp_path):
    """Dispatched before the last one's numbers are read, as on an accelerator; stopped too."""
    of = experiment("data=2", num_steps=5, checkpoint_every=3)
    step = of.step()
    first, ends = step.init(), []

    def fresh():
        return jax.tree.map(jnp.copy, first)

    for num_ahead in (0, 1, 2):
        records, folder = [], tmp_path / str(num_ahead)
        with Checkpoints(folder) as checkpoints:
            ended = train(
                of, step, fresh(), checkpoints=checkpoints, on_step=records.append,
                num_ahead=num_ahead,
            )  # fmt: skip
        assert [record.step for record in records] == [1, 2, 3, 4, 5]
        assert [record.is_first for record in records] == [True, False, False, False, False]
        assert numbers(folder) == [3, 5] and (ended.saved, ended.signal) == (5, 0)
        ends.append(([record.loss for record in records], jax.device_get(ended.state)))
    assert ends[0][0] == ends[1][0] == ends[2][0]
    assert first_difference(ends[1][1], ends[0][1]) is None
    assert losses(step, fresh(), [of.batch(i) for i in range(5)])[1] == ends[0][0]

    with Checkpoints(tmp_path / "stopped") as checkpoints:
        ended = train(
            of, step, fresh(), checkpoints=checkpoints, num_ahead=1,
            asked_to_stop=lambda number: 15 if number == 1 else 0,
        )  # fmt: skip
    # Asked in step 1, read while step 2 ran, which was then the last one.
    assert (ended.num_steps, ended.signal, numbers(tmp_path / "stopped")) == (2, 15, [2])


def with_first(state, name, value):
    """The same state with another first element in the leaf of this name."""

    def changed(path, leaf):
        is_it = jax.tree_util.keystr(path, simple=True, separator=".") == name
        return leaf.at[(0,) * leaf.ndim].set(value) if is_it else leaf

    return jax.tree.map_with_path(changed, state)


def test_the_first_bad_leaf_is_named(run):
    of = experiment("data=2")
    step = of.step()
    watch, state = Watch(step), step.init()
    assert np.asarray(watch(state, 0)).tolist() == [0, 0, 0]
    assert np.asarray(watch(state, 2)).tolist() == [0, 0, 2]
    for name, bad in (("params.layers.mlp.up", np.inf), ("opt_state.0.nu.norm.scale", np.nan)):
        first, num_bad, _ = np.asarray(watch(with_first(state, name, bad), 0)).tolist()
        assert (watch._names[first], num_bad) == (name, 1)
    with pytest.raises(DivergedError) as caught:
        train(of, step, with_first(state, "params.norm.scale", np.nan))
    # A bad one on the way in makes all gradients bad, and so all that they move.
    assert (caught.value.step, caught.value.leaf) == (1, "params.embedding.table")
    assert "the loss is nan" in str(caught.value) and "There is no checkpoint" in str(caught.value)


def test_the_order_of_the_data_does_not_depend_on_the_mesh():
    one = experiment("data=2")
    other = one.on_mesh(experiment("fsdp=8").plan.mesh)
    assert other.plan.mesh.num_devices == 8 and one.data() == other.data()
    for index in (0, 5):
        mine, theirs = one.batch(index), other.batch(index)
        assert first_difference(mine._asdict() | {"segments_BS": 0},
                                theirs._asdict() | {"segments_BS": 0}) is None  # fmt: skip


def test_options_of_the_plan_are_put_in_together():
    """A mesh that needs another batch size than the plan's own, and the other way round."""
    of = experiment("data=2")
    assert of.with_options(None, ()) == of
    changed = of.with_options("data=3", ["batch_size=9", "compute_dtype=bfloat16"])
    assert str(changed.plan.mesh) == "data=3" and replace(changed, plan=of.plan) == of
    assert (changed.plan.batch_size, changed.plan.compute_dtype) == (9, "bfloat16")
    for alone in (("data=3", ()), (None, ["batch_size=9"])):
        with pytest.raises(PlanError, match="does not divide into"):
            of.with_options(*alone)


# --- what is shown and recorded --------------------------------------------------------------

RECORD = Record(
    step=7, loss=2.5, gradient_norm=0.5, num_tokens=60, time_s=0.5, is_first=False,
    imbalance=None, dropped_fraction=None,
)  # fmt: skip


def test_utilisation_is_labelled_and_of_the_peak_that_is_known(run, monkeypatch):
    of = experiment("data=2", num_steps=10)
    monkeypatch.setattr(cli_run, "peak_flops_per_s", lambda devices, dtype: 1e9)
    console = Console(record=True, width=200, force_terminal=True, file=io.StringIO())
    with cli_run.Screen(console, of, of.step(), 0) as screen:
        shown = [screen.show(RECORD) for _ in range(2)]
    flops = cli_run.step_flops(of.config, of.plan)
    assert shown[0]["mfu"] == pytest.approx(flops / 0.5 / 1e9) == screen.mfu() * 2
    text = console.export_text()
    assert "MFU: causal FLOPs, without recompute; peak 0 TFLOP/s" in text
    assert f"loss 2.5000  gradient norm 0.5  120 tokens/s  MFU {flops / 0.5 / 1e9:.1%}" in text


def test_a_script_s_own_number_of_steps_is_told_as_such():
    told = cli_run._nothing_to_do(cli_run.Request(script=Path("script.py")), 4, 6)
    assert "step 6, and num_steps=4 of script.py counts all steps" in told


def test_what_json_cannot_say_is_null():
    bad = Record(**{**RECORD.__dict__, "loss": float("nan"), "gradient_norm": float("inf")})
    numbers = recording.line(bad, model_flops=1.0, peak_flops_per_s=None)
    assert (numbers["loss"], numbers["gradient_norm"], numbers["mfu"]) == (None, None, None)


def test_a_line_that_was_cut_stays_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = JsonLines(path)
    lines.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'
    lines.close()
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(JaxparError, match=r"Metrics file '/dev/full': No space left"):
        lines.write({"step": 2})
    lines.close()


def test_tensorboard_is_an_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(JaxparError, match=r'pip install "jaxpar\[tensorboard\]"'):
        recording.TensorBoard(tmp_path / "board", done=0)


def test_a_board_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JaxparError, match="TensorBoard folder '.+/file/board': Not a directory"):
        recording.TensorBoard(tmp_path / "file" / "board", done=0)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", r"bad\.py:1 is not Python"),
        ("\nimport nothing_of_that_name", r"bad\.py:2 failed: ModuleNotFoundError: No module"),
        (
            "def f():\n    1 / 0\n\n\nf()",
            r"bad\.py:2 failed: ZeroDivisionError.+`python .+bad\.py`",
        ),
        ("raise SystemExit(3)", r"bad\.py:1 failed: SystemExit: 3"),
        ("x = 1", r"has to define `experiment = Experiment"),
        ("experiment = 3", r"and has 3 \(int\)"),
        (SCRIPT.replace("experiment = make", "other = make"), "It defines other: call it"),
        (SCRIPT.replace("num_steps=6", "num_steps=0"), "num_steps=0 .+ Nearest: 1"),
        (SCRIPT.replace("num_steps=6", "corpus='text.txt'"), "multiple values|must be a Corpus"),
    ],
)
def test_a_script_that_defines_no_experiment(text, message, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ExperimentError, match=message):
        load(tmp_path / "bad.py")
    assert str(tmp_path) not in sys.path


def test_a_script_finds_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text(SCRIPT)
    (tmp_path / "good.py").write_text("from beside_it import experiment")
    assert load(tmp_path / "good.py").num_steps == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py",), "'none.py' does not exist"),
        ((".",), r"'\.' is not a file"),
        (("script.py", "--resume"), "give --checkpoint FOLDER too"),
        (("script.py", "--checkpoint", "none", "--resume"), "none' does not exist"),
        (("script.py", "--checkpoint", "script.py"), "is a file, and has to be a folder"),
        (("script.py", "--checkpoint", "."), r"holds something else \('script.py'\)"),
        (("script.py", "--mesh", "dat=2"), "Did you mean 'data'"),
        (("script.py", "--mesh", "data=3"), "batch_size=8 does not divide into 3"),
        (("script.py", "--set", "zer=1"), "Did you mean 'zero'"),
        (("script.py", "--text", "none.txt"), "'none.txt' does not exist"),
        (("script.py", "--metrics", "none/m.jsonl"), "none/m.jsonl: no such folder as .+make it"),
        (("script.py", "--metrics", "."), r"Cannot write \.: it is a folder"),
        (("script.py", "--tensorboard", "none/board"), "write none/board: no such folder as"),
        (("script.py", "--tensorboard", "script.py"), "script.py: it is a file, and has to"),
        (("script.py", "--checkpoint", "none/saved"), "write none/saved: no such folder as"),
        (("script.py", "--checkpoint", "script.py/saved"), "write script.py/saved: no such folder"),
    ],
)
def test_options_that_cannot_be(arguments, message, run, tmp_path):
    assert re.search(message, refused(run("run", *arguments)))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["script.py"]


def test_what_a_file_says_is_called_as_the_file_calls_it(run):
    Path("mesh.toml").write_text("num_steps = 3\n[axes]\ndata = 2\n")
    line = refused(run("run", "script.py", "--steps", 3, "--mesh", "mesh.toml"))
    assert "unknown key 'num_steps'" in line
    Path("bad.py").write_text(SCRIPT.replace("num_steps=6", "num_steps=0"))
    assert "num_steps=0 (int)" in refused(run("run", "bad.py", "--steps", 3))
    too_many = 1 << 31
    assert f"--steps={too_many} (int)" in refused(run("run", "script.py", "--steps", too_many))


def test_an_optimizer_is_one():
    with pytest.raises(JaxparError, match="optimizer="):
        experiment("data=2", optimizer=optax.adamw).step()


def test_devices_that_fail_are_told_in_words(run, monkeypatch):
    def failing(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n…")

    monkeypatch.setattr(cli_run, "train", failing)
    code, _, err = run("run", "script.py")
    assert code == 2 and re.fullmatch(
        r"jaxpar: The devices cannot carry out data=2, compute_dtype=float32: RESOURCE_EXHAUSTED: "
        r"Out of memory allocating 9 bytes\. Where memory is short, try .+fsdp\.\n",
        err,
    )
