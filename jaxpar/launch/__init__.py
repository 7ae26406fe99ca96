"""Several processes of one training run on this machine: started, watched, and ended together.

`jaxpar launch` is this; `launch` is the same for Python. What the processes do about it is in
`jaxpar.processes`, what watches them in launch/supervisor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jaxpar
from jaxpar.errors import JaxparError, require_positive, require_whole, shown
from jaxpar.launch.messages import VARIABLE
from jaxpar.launch.supervisor import Ended, Job, Report
from jaxpar.launch.tree import adopt_orphans, descendants, end_all

MAX_PROCESSES = 64
DEFAULT_GRACE_S = 60.0

_START = """
import sys
sys.path.append(sys.argv[1])
from jaxpar.launch.supervisor import main
main()
"""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchError(JaxparError):
    """A launch that cannot be started, or whose supervisor was killed."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What `launch` starts. Raises LaunchError for what cannot be.

    command: the program and its arguments. `jaxpar` and `python` are those that run the launch.
    devices_per_process: virtual CPU devices of each process.
    stall_s: seconds without a beat (`jaxpar.processes.beat`) that are a stall; None for 20, or as
        much more as slow steps need. Who never beats never stalls.
    grace_s: seconds that processes have to stop in when asked to, if they listen
        (`jaxpar.processes.stop_requested`); others have 5.
    logs: an existing folder for the output of every rank, rank-0.log and so on.
    """

    command: Sequence[str]
    num_processes: int = 2
    devices_per_process: int = 1
    stall_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S
    logs: Path | None = None

    def __post_init__(self) -> None:
        for field in ("num_processes", "devices_per_process"):
            require_whole(LaunchError, field, getattr(self, field))
        if self.num_processes > MAX_PROCESSES:
            raise LaunchError(
                f"num_processes={self.num_processes} are too many for one machine; at most "
                f"{MAX_PROCESSES}. Give each more devices with --devices-per-process."
            )
        if self.num_processes * self.devices_per_process > 4096:
            raise LaunchError(
                f"{self.num_processes} processes × {self.devices_per_process} virtual devices are "
                f"{self.num_processes * self.devices_per_process}; at most 4096 can be."
            )
        if self.stall_s is not None:
            require_positive(LaunchError, "stall timeout", self.stall_s, 20.0)
        require_positive(LaunchError, "grace", self.grace_s, DEFAULT_GRACE_S)
        if not self.command:
            raise LaunchError("There is no command to start. Write it after --: -- jaxpar run …")
        if self.logs is not None and not (self.logs.is_dir() and os.access(self.logs, os.W_OK)):
            raise LaunchError(f"Cannot write logs to {self.logs}: no folder, or read-only.")

    def resolved(self) -> list[str]:
        """The command as it is started. LaunchError where there is no such program."""
        program, *arguments = self.command
        if program == "jaxpar":
            return [sys.executable, "-m", "jaxpar", *arguments]
        here = os.path.dirname(sys.executable)
        path = shutil.which(program, path=os.pathsep.join((here, os.environ.get("PATH", ""))))
        if path is None:
            raise LaunchError(f"There is no program {shown(program)} to start.")
        return [path, *arguments]

    def environment(self) -> dict[str, str]:
        """Of every rank, but for its place in the launch."""
        devices = str(self.devices_per_process)
        given = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if flags := given.get("XLA_FLAGS"):
            given["XLA_FLAGS"] = _DEVICE_COUNT.sub("", flags)
        # A rank that is killed must not take its last lines with it.
        given["PYTHONUNBUFFERED"] = "1"
        return given | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a launch ended: `stopped_by` is the signal that this process was sent, if that was it."""

    launch: Launch
    report: Report
    stopped_by: int | None = None

    @property
    def exit_code(self) -> int:
        """0 where all ranks finished; else that of the rank that failed first, or 1."""
        if self.report.outcome == "stopped":
            return 128 + (self.stopped_by or signal.SIGTERM)
        code = None if self.first is None else self.first.exit_code
        return code if code is not None and code > 0 else int(self.report.outcome == "failed")

    @property
    def first(self) -> Ended | None:
        """The rank that failed first."""
        return None if self.report.first is None else self.report.ranks[self.report.first]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "jaxpar.launch/1",
            "command": list(self.launch.command),
            "num_processes": self.launch.num_processes,
            "devices_per_process": self.launch.devices_per_process,
            **asdict(self.report),
            "exit_code": self.exit_code,
        }


def launch(what: Launch) -> Result:
    """Run all processes of `what` to their end, however it comes; none is left afterwards.

    Rank 0 writes to this process's standard output and error. In the main thread, SIGINT, SIGTERM
    and SIGHUP stop the launch; a second one, at once.
    """
    command, environment = what.resolved(), what.environment()
    adopt_orphans()
    others = {process.pid for process in descendants(os.getpid())}
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="jaxpar-", dir=_short_folder()) as folder:
        job = Job(
            command=command,
            environment=environment,
            num_processes=what.num_processes,
            stall_s=None if what.stall_s is None else float(what.stall_s),
            grace_s=float(what.grace_s),
            folder=folder,
            logs=None if what.logs is None else str(what.logs.resolve()),
            report_fd=write,
        )
        root = str(Path(jaxpar.__file__).parent.parent)
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, root],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes here alone
            pass_fds=(write,),
        )
        os.close(write)
        assert supervisor.stdin is not None
        try:
            with _stopping(supervisor) as received:
                supervisor.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
                supervisor.stdin.flush()
                report = _read_report(read, supervisor)
        finally:
            # Closing is what ends the supervisor, and all below it, if it still runs.
            supervisor.stdin.close()
            try:
                supervisor.wait(timeout=10)
            except subprocess.TimeoutExpired:
                supervisor.kill()
            if supervisor.returncode != 0:
                end_all(spare=others)
            supervisor.wait()
            os.close(read)
    if report is None:
        raise LaunchError("The process that watches the ranks was killed; so are the ranks, now.")
    return Result(launch=what, report=report, stopped_by=received[0] if received else None)


def _read_report(read: int, supervisor: subprocess.Popen[bytes]) -> Report | None:
    """What the supervisor reports, once it does; None when it dies without."""
    data = b""
    while not data.endswith(b"\n"):
        if select.select([read], [], [], 1.0)[0]:
            more = os.read(read, 1 << 16)
            if not more:
                return None
            data += more
        elif supervisor.poll() is not None:
            return None
    given = json.loads(data)
    ranks = [Ended(**rank) for rank in given.pop("ranks")]
    return Report(ranks=ranks, **given)


@contextlib.contextmanager
def _stopping(supervisor: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Meanwhile, signals that would end this process stop the launch; yields those that came."""
    received: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        received.append(number)
        assert supervisor.stdin is not None
        with contextlib.suppress(OSError):  # it is ending already
            os.write(supervisor.stdin.fileno(), b"stop\n")

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # One that was ignored stays ignored: that is what nohup is for.
    before = {
        number: signal.signal(number, stop)
        for number in _STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _short_folder() -> str | None:
    """Where temporary folders go, unless that is too long a path for a socket (108 bytes)."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 70 else None
