"""A folder of checkpoints survives being killed, and nothing in it is deleted that is not ours."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint_folder import MARKER, CheckpointFolder
from jaxpar.errors import CheckpointError

PROGRAM = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
from jaxpar.checkpoint_folder import CheckpointFolder

jax.config.update("jax_platforms", "cpu")
abstract = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
with CheckpointFolder(sys.argv[1], keep=2) as folder:
    number = 0
    if folder.numbers():
        number = folder.latest()
        assert folder.about(number)["number"] == number
        assert (np.asarray(folder.restore(number, abstract)["x"]) == number).all()
    print("restored", number, flush=True)
    while number < int(sys.argv[2]):
        number += 1
        print("saving", number, flush=True)
        folder.save(number, {"x": jnp.full((64, 64), number, jnp.float32)}, {"number": number})
        folder.wait()
        print("saved", number, flush=True)
"""

NUM_KILLS = 3


def start(folder: Path, last: int = 1000, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(folder), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def tree(value: float) -> dict[str, jax.Array]:
    return {"x": jnp.full((4, 4), value, jnp.float32)}


def value(folder: CheckpointFolder, number: int) -> float:
    restored = folder.restore(number, {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)})
    (found,) = set(np.asarray(restored["x"]).flat)
    return float(found)


def leftovers(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if "." in entry.name]


def test_killed_while_saving_the_latest_complete_one_is_restored(tmp_path):
    """Killed at a random moment of a random save; experiments/kills.py does so with a training."""
    folder, random_ = tmp_path / "folder", random.Random(0)
    said = {"saved": 0, "saving": 0}
    for _ in range(NUM_KILLS):
        with start(folder) as child:
            name, number = child.stdout.readline().split()
            # What was reported as saved is there; more only if the kill came after the rename.
            assert name == "restored" and said["saved"] <= int(number) <= said["saving"]
            for _ in range(random_.randrange(4, 8)):
                name, number = child.stdout.readline().split()
                said[name] = int(number)
            time.sleep(random_.uniform(0, 0.06))
            child.kill()
            said |= {name: int(number) for name, number in map(str.split, child.stdout)}
    # One more is not killed: leftovers are gone, and so is what is older than the last two.
    last = said["saving"] + 2
    with start(folder, last) as child:
        assert child.stdout.readline().split()[0] == "restored"
        child.stdout.read()
    assert child.returncode == 0
    assert leftovers(folder) == []
    with CheckpointFolder(folder) as left:
        assert left.numbers() == [last - 1, last]


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_file_is_told_or_does_not_matter(how, tmp_path):
    """Each file in turn; what can be restored all the same is what was saved."""
    with CheckpointFolder(tmp_path / "folder") as folder:
        folder.save(1, tree(7), {})
        folder.wait()
        refused = []
        for file in sorted(f for f in folder.folder(1).rglob("*") if f.is_file()):
            content = file.read_bytes()
            if how == "gone":
                file.unlink()
            else:
                file.write_bytes(content[: len(content) // 2])
            try:
                folder.about(1)
                assert value(folder, 1) == 7.0
            except CheckpointError as error:
                told, reason = str(error).splitlines()
                assert "step_00000001 is no checkpoint, or is damaged: its a" in told
                assert told.endswith("for --checkpoint and without --resume.")
                assert re.fullmatch(r"Reason: .{,150}\.", reason)
                assert not re.search("tensorstore|zarr|ocdbt database|error", reason, re.I)
                refused.append((file.name, file.name in reason))
            file.write_bytes(content)
    assert len(refused) >= 3, refused  # the array, where it is, and what stands beside it
    assert any(is_named for _, is_named in refused), refused


def test_a_damaged_one_names_those_to_go_on_from(tmp_path):
    with CheckpointFolder(tmp_path / "folder") as folder:
        for number in (1, 2, 3):
            folder.save(number, tree(number), {})
        folder.wait()
        shutil.rmtree(folder.folder(3) / "state" / "d")
        with pytest.raises(CheckpointError) as caught:
            value(folder, 3)
    told, reason = str(caught.value).splitlines()
    assert told.endswith(
        "step_00000003 is no checkpoint, or is damaged: its arrays cannot be read. Nothing was "
        "changed. Other checkpoints there: step_00000001, step_00000002; to go on from the last of "
        "these, move this one away."
    )
    assert re.fullmatch(r"Reason: there is no state/d/\w+\.", reason)


def test_the_last_ones_stay(tmp_path):
    with CheckpointFolder(tmp_path / "new" / "folder", keep=2) as folder:
        for number in (3, 5, 10, 11):
            folder.save(number, tree(number), {"of": number})
        folder.wait()
        assert folder.numbers() == [10, 11]
        assert folder.about(10)["of"] == 10
        assert (value(folder, 10), value(folder, 11)) == (10.0, 11.0)
        with pytest.raises(CheckpointError, match="step_00000011 is there already"):
            folder.save(11, tree(0), {})


def test_nothing_is_deleted_that_is_not_ours(tmp_path):
    """Beside whole ones: somebody's folders with our names, a link, a newer schema, a file."""
    with CheckpointFolder(tmp_path / "folder", keep=1) as folder:
        for number in (4, 5, 6):
            folder.save(number, tree(number), {})
        folder.wait()
        path = folder.path
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    others = ["step_00000001", "step_00000002", "step_7", "step_00000003.orbax-checkpoint-tmp-mine"]
    for name in others[:3]:
        (path / name).mkdir()
        (path / name / "thesis.txt").write_text("years of work")
    newer = path / "step_00000002" / "about"
    newer.mkdir()
    (newer / "metadata").write_text(json.dumps({"schema": "jaxpar.checkpoint/9"}))
    (path / others[3]).write_text("a file")
    for link in ("step_00000000", "step_00000009.orbax-checkpoint-tmp", "step_00000008.deleting"):
        (path / link).symlink_to(outside)
    (path / "step_00000099").mkdir()  # seems to be the newest, and holds nothing
    left = path / "step_00000050.orbax-checkpoint-tmp"
    left.mkdir()

    with CheckpointFolder(path, keep=1) as folder:
        with pytest.raises(CheckpointError, match=r"step_00000099 is no .+; to go on .+ move this"):
            folder.about(folder.latest())
        for number in (7, 8):
            folder.save(number, tree(number), {})
        folder.wait()
        assert value(folder, 8) == 8.0
    assert not left.exists() and not (path / "step_00000006").exists()
    assert not (path / "step_00000007").exists()
    for name in others:
        assert (path / name).exists(), name
    assert (outside / "thesis.txt").read_text() == "years of work"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(CheckpointError, match=r"holds something else \('photo.jpg'\)"):
        CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, and has to be a folder"):
        CheckpointFolder(tmp_path / "photo.jpg")
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointFolder(tmp_path / "new", keep=0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_folder_without_checkpoints(tmp_path):
    with CheckpointFolder(tmp_path / "none") as folder:
        with pytest.raises(CheckpointError, match="does not exist"):
            folder.latest()
        with pytest.raises(CheckpointError, match="step_00000003 is no checkpoint"):
            folder.about(3)
        assert folder.numbers() == [] and not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    with CheckpointFolder(tmp_path / "empty") as folder:
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            folder.latest()
        folder.save(1, tree(1), {})


def test_two_runs_do_not_save_to_one_folder(tmp_path):
    with CheckpointFolder(tmp_path / "folder") as one:
        one.save(1, tree(1), {})
        with CheckpointFolder(tmp_path / "folder") as other:
            one.wait()
            assert value(other, 1) == 1.0
            with pytest.raises(CheckpointError, match="being saved to by another run"):
                other.save(2, tree(2), {})
    with CheckpointFolder(tmp_path / "folder") as other:
        other.save(2, tree(2), {})


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("/proc/jaxpar", tmp_path / "file" / "folder"):
        folder = CheckpointFolder(path)
        with pytest.raises(CheckpointError, match="cannot be saved to: .+Make room, or give"):
            folder.save(1, tree(1), {})
        folder.close()


NO_SPACE = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import jax, jax.numpy as jnp
from jaxpar.checkpoint_folder import CheckpointFolder
from jaxpar.errors import CheckpointError
jax.config.update("jax_platforms", "cpu")
x = {"x": jax.random.normal(jax.random.key(0), (512, 512))}
folder = CheckpointFolder(sys.argv[1], keep=1)
folder.save(1, x, {})
folder.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    folder.save(2, x, {})
    folder.wait()
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(folder.numbers())
folder.close()
with CheckpointFolder(sys.argv[1], keep=1) as again:
    again.save(3, x, {})
    again.wait()
    print(again.numbers())
"""


def test_no_room_is_told_and_the_one_before_stays(tmp_path):
    """Files may not grow beyond a limit, as on a full disk; nothing but our words is printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NO_SPACE, str(tmp_path / "folder")],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    message, kept, later = done.stdout.splitlines()
    assert "cannot be saved to: " in message and "Make room" in message
    assert (kept, later) == ("[1]", "[3]")


def test_the_marker_alone_says_whose_folder_it_is(tmp_path):
    with CheckpointFolder(tmp_path / "folder") as folder:
        folder.save(1, tree(1), {})
    os.remove(tmp_path / "folder" / MARKER)
    with pytest.raises(CheckpointError, match=MARKER):
        CheckpointFolder(tmp_path / "folder")
