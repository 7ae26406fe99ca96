"""`jaxpar launch` as a command, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jaxpar

ROOT = Path(jaxpar.__file__).parent.parent

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    # As in conftest.py, so that numbers can be compared.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
}


def start(command: list[str], *options: str, num: int = 2) -> subprocess.Popen[str]:
    """`jaxpar launch` of `command`, in the folder of the test."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxpar", "launch", "-n", str(num), *options),
            *("--json", "launch.json", "--", *command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def finish(launch: subprocess.Popen[str], within_s: float = 20) -> tuple[int, str, str]:
    """Exit code, output and errors; nothing may be left of it."""
    out, err = launch.communicate(timeout=within_s)
    assert_nothing_left()
    return launch.returncode, out, err


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 15
    while not Path(name).exists():
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


def ours() -> list[int]:
    """The processes of this test, whose folder all of them work in."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_ours(pid)]


def assert_nothing_left() -> None:
    deadline = time.monotonic() + 10
    while left := ours():
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def end_ours() -> None:
    """After a test that failed."""
    for pid in ours():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def is_ours(pid: int) -> bool:
    try:
        here = os.readlink(f"/proc/{pid}/cwd") == os.getcwd()
        return here and pid != os.getpid()
    except OSError:
        return False


def report() -> dict:
    return json.loads(Path("launch.json").read_text())
