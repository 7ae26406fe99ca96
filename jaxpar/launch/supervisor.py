"""The process between `jaxpar launch` and the ranks: it starts them, watches them, and ends them.

It is a process of its own so that none of the two can die alone: when the launcher is killed, the
pipe on standard input closes and this process ends everything below it; when this one is killed,
the launcher does (see launch/tree.py). It never imports JAX.

In: a line of JSON (`Job`), then "stop" lines. Out: a line of JSON (`Report`) on `job.report_fd`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxpar.launch.messages import MAX_MESSAGE_BYTES, VARIABLE, Place
from jaxpar.launch.output import Stream, Tail, open_channel
from jaxpar.launch.tree import adopt_orphans, descendants, end_all, processes
from jaxpar.launch.watch import MIN_BUSY, Watch

SETTLE_S = 2.5
"""From the first failure to the end of all: what the others say meanwhile may explain it."""

STOP_S = 5.0
"""Grace of ranks that are asked to stop and never said they listen."""

POLL_S = 0.05
CPU_SAMPLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run; `folder` is private to this launch and exists."""

    command: list[str]
    environment: dict[str, str]
    num_processes: int
    stall_s: float | None
    grace_s: float
    folder: str
    logs: str | None
    report_fd: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One rank at its end. `exit_code` is negative for a signal, as in `subprocess`; None while
    it ran on. `how` says what went wrong in a few words, "" where nothing did."""

    rank: int
    exit_code: int | None
    how: str
    num_beats: int
    last_lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """How it went. `first` is the rank that failed first; `leavers` ended before it did."""

    outcome: str  # finished, failed, stopped
    seconds: float
    ranks: list[Ended]
    first: int | None = None
    leavers: list[int] = field(default_factory=list)
    num_left: int = 0
    """Processes that even SIGKILL did not end."""


@dataclass(kw_only=True)
class Rank:
    """One of the processes, and what is known of it: times are of `time.monotonic`.

    listens: it stops by itself when asked. can_dump: it prints its stack at SIGUSR1.
    """

    index: int
    process: subprocess.Popen[bytes]
    streams: list[Stream]
    tail: Tail
    watch: Watch
    exit_code: int | None = None
    failed_at: float | None = None
    how: str = ""
    left_at: float | None = None
    listens: bool = False
    can_dump: bool = False

    def fail(self, now: float, how: str) -> None:
        if self.failed_at is None:
            self.failed_at, self.how = now, how


class Supervisor:
    """One launch from start to end; `run` is all of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        self.control = b""
        self.is_orphan = False
        self.stop_by: float | None = None
        self.num_stops = 0
        self.last_busy = self.last_sample = self.started
        self.cpu_s: dict[int, float] = {}
        # Bound, never listened on: it keeps the port from everybody but rank 0's gRPC server,
        # which like this socket agrees to share it.
        self.port = socket.socket()
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port.bind(("127.0.0.1", 0))
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.inbox.setblocking(False)
        self.inbox.bind(os.path.join(job.folder, "inbox"))
        self.ranks: list[Rank] = []

    def run(self) -> Report:
        try:
            for index in range(self.job.num_processes):
                self.ranks.append(self._start(index))
            outcome = self._watch()
        finally:
            groups = [rank.process.pid for rank in self.ranks]
            num_left = end_all(groups=groups)
            self.port.close()
            self.inbox.close()
        self._drain()
        first, leavers = self._first()
        return Report(
            outcome=outcome,
            seconds=time.monotonic() - self.started,
            ranks=[
                Ended(
                    rank=rank.index,
                    exit_code=rank.exit_code,
                    how=rank.how,
                    num_beats=rank.watch.num_beats,
                    last_lines=rank.tail.lines(),
                )
                for rank in self.ranks
            ],
            first=first if outcome == "failed" else None,
            leavers=leavers if outcome == "failed" else [],
            num_left=num_left,
        )

    def _start(self, index: int) -> Rank:
        place = Place(
            coordinator=f"127.0.0.1:{self.port.getsockname()[1]}",
            num_processes=self.job.num_processes,
            process_id=index,
            inbox=os.path.join(self.job.folder, "inbox"),
        )
        is_main = index == 0
        ends = [open_channel(1), open_channel(2)] if is_main else [os.pipe()]
        tail = Tail()
        log = Path(self.job.logs) / f"rank-{index}.log" if self.job.logs else None
        process = subprocess.Popen(
            self.job.command,
            env={**self.job.environment, VARIABLE: place.to_json()},
            stdin=subprocess.DEVNULL,
            stdout=ends[0][1],
            stderr=ends[-1][1],
            start_new_session=True,
        )
        for _, write in ends:
            os.close(write)
        streams = [
            Stream(read, tail, forward_to=number if is_main else None, log=log)
            for number, (read, _) in enumerate(ends, start=1)
        ]
        watch = Watch(stall_s=self.job.stall_s)
        return Rank(index=index, process=process, streams=streams, tail=tail, watch=watch)

    # --- the loop ------------------------------------------------------------------------------

    def _watch(self) -> str:
        """Until all have ended, or have to: finished, failed or stopped."""
        failed_at: float | None = None
        while True:
            self._wait()
            now = time.monotonic()
            # Exits before messages: what a survivor says of a death comes after it.
            self._reap(now)
            self._read_inbox(now)
            if self.is_orphan:
                return "stopped"
            if self.stop_by is not None and now > self.stop_by:
                return "stopped"
            if all(rank.exit_code is not None for rank in self.ranks):
                if self.stop_by is not None:
                    return "stopped"
                return "failed" if any(rank.failed_at for rank in self.ranks) else "finished"
            if failed_at is None and self.stop_by is None:
                self._sample_cpu(now)
                self._look_for_stalls(now)
            # Who is asked to stop, and does, has not failed.
            fine = () if self.stop_by is None else (-signal.SIGTERM,)
            if any(rank.failed_at and rank.exit_code not in fine for rank in self.ranks):
                failed_at = failed_at or now
                if now > failed_at + SETTLE_S:
                    return "failed" if self.stop_by is None else "stopped"

    def _wait(self) -> None:
        """Sleep until something is there to be read, and read output and orders."""
        readers: dict[int, Stream] = {}
        writers: dict[int, list[Stream]] = {}
        for rank in self.ranks:
            for stream in rank.streams:
                if stream.fd >= 0 and stream.forward_to is None:
                    readers[stream.fd] = stream
                elif stream.fd >= 0:
                    writers.setdefault(stream.forward_to or 0, []).append(stream)
        # What rank 0 prints is read only when somebody takes it, so that nothing here ever blocks.
        _, open_now, _ = select.select([], list(writers), [], 0)
        for number in open_now:
            readers |= {stream.fd: stream for stream in writers[number]}
        if len(open_now) < len(writers):
            for rank in self.ranks:
                rank.watch.excuse(time.monotonic())
        wanted = [*readers, self.inbox.fileno(), *([] if self.is_orphan else [0])]
        ready, _, _ = select.select(wanted, [], [], POLL_S)
        for fd in ready:
            if fd in readers and not readers[fd].take():
                readers[fd].close()
        if 0 in ready:
            self._read_orders()

    def _read_orders(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self.is_orphan = True
            return
        *lines, self.control = (self.control + data).split(b"\n")
        for _ in lines:
            self.num_stops += 1
            listens = any(rank.listens for rank in self.ranks)
            grace_s = self.job.grace_s if listens else min(self.job.grace_s, STOP_S)
            self.stop_by = time.monotonic() + (grace_s if self.num_stops == 1 else 0)
            for rank in self.ranks:
                if rank.exit_code is None:
                    with contextlib.suppress(OSError):
                        os.killpg(rank.process.pid, signal.SIGTERM)

    def _reap(self, now: float) -> None:
        for rank in self.ranks:
            if rank.exit_code is None and rank.process.poll() is not None:
                rank.exit_code = rank.process.returncode
                rank.watch.rest(now)
                rank.left_at = rank.left_at or now
                if rank.exit_code:
                    rank.fail(now, _told(rank.exit_code))

    def _read_inbox(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._hear(self.inbox.recv(MAX_MESSAGE_BYTES), now)

    def _hear(self, message: bytes, now: float) -> None:
        try:
            said = json.loads(message)
            rank, what = self.ranks[said["rank"]], said["what"]
            if what == "beat":
                within_s = said.get("within_s")
                rank.watch.beat(
                    now,
                    within_s=None if within_s is None else float(within_s),
                    compiling=bool(said.get("compiling")),
                )
            elif what == "rest":
                rank.watch.rest(now)
            elif what == "failed":
                rank.fail(now, f"raised {said['why']}")
            elif what == "leaving":
                rank.watch.rest(now)
                rank.left_at = rank.left_at or now
            elif what == "listens":
                rank.listens = True
            elif what == "joined":
                rank.can_dump = True
        except (ValueError, KeyError, IndexError, TypeError):
            return  # from nobody we started

    def _sample_cpu(self, now: float) -> None:
        """Keep when the ranks, and what they started, were last seen to use a CPU."""
        matters = any(rank.watch.is_compiling or rank.left_at for rank in self.ranks)
        if not matters or now - self.last_sample < CPU_SAMPLE_S:
            return
        among = processes()
        cpu_s = {process.pid: process.cpu_s for process in descendants(os.getpid(), among)}
        enough_s = MIN_BUSY * (now - self.last_sample)
        grown_s = (used_s - self.cpu_s.get(pid, used_s) for pid, used_s in cpu_s.items())
        if not among or cpu_s.keys() != self.cpu_s.keys() or max(grown_s, default=0) > enough_s:
            self.last_busy = now
        self.cpu_s, self.last_sample = cpu_s, now

    def _look_for_stalls(self, now: float) -> None:
        at_work = [rank for rank in self.ranks if rank.left_at is None]
        stalled = any(rank.watch.is_stalled(now, self.last_busy) for rank in at_work)
        # With its last breath JAX waits for the others, unless the process is gone already.
        waiting = [rank for rank in self.ranks if rank.left_at and rank.exit_code is None]
        if at_work and waiting:
            leaver = min(waiting, key=lambda rank: rank.left_at or now)
            left_at = leaver.left_at or now
            if stalled or all(r.watch.is_quiet(now, left_at, self.last_busy) for r in at_work):
                why = f"began to exit {now - left_at:.0f} s ago, and others did not follow"
                leaver.fail(now, why)
                self._dump_all()
        elif stalled:
            # All wait for one: for who has come least far.
            fewest = min(rank.watch.num_beats for rank in at_work)
            for rank in at_work:
                if rank.watch.num_beats == fewest:
                    quiet_s = now - (rank.watch.last_beat_s or self.started)
                    rank.fail(now, f"gave no sign of progress for {quiet_s:.0f} s")
            self._dump_all()

    def _dump_all(self) -> None:
        """Have the ranks print where they are, into their last lines."""
        for rank in self.ranks:
            if not rank.can_dump or rank.exit_code is not None:
                continue
            # A rank may be below a shell.
            for pid in (rank.process.pid, *(p.pid for p in descendants(rank.process.pid))):
                if _handles_dumps(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGUSR1)

    # --- the end -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """What is still in the pipes, now that nobody writes any more."""
        deadline = time.monotonic() + 1
        for rank in self.ranks:
            for stream in rank.streams:
                while stream.fd >= 0 and time.monotonic() < deadline:
                    if stream.forward_to is not None:
                        _, can_write, _ = select.select([], [stream.forward_to], [], 0.1)
                        if not can_write:
                            break
                    ready, _, _ = select.select([stream.fd], [], [], 0.1)
                    if not ready or not stream.take():
                        break
                stream.close()

    def _first(self) -> tuple[int | None, list[int]]:
        """Who failed first, and who had ended before without being told off for it.

        When rank 0 dies, and with it JAX's coordinator, the others abort at once. Of those who
        have stalled in the same step, it is the one that is not inside of JAX, waiting for others.
        """
        failed = [rank for rank in self.ranks if rank.failed_at is not None]
        if not failed:
            return None, []
        abort = -signal.SIGABRT
        no_coordinator = self.ranks[0].exit_code not in (None, 0, abort)
        first = min(
            failed,
            key=lambda rank: (
                no_coordinator and rank.exit_code == abort,
                rank.failed_at,
                rank.exit_code is None and waits_in_jax(rank.tail.lines()),
                rank.index,
            ),
        )
        leavers = [
            rank.index
            for rank in self.ranks
            if rank is not first and rank.left_at and rank.left_at < (first.failed_at or 0)
        ]
        return first.index, leavers


def waits_in_jax(lines: list[str]) -> bool:
    """Whether the stack that these last lines of a rank end with is inside of JAX."""
    tops = [line for before, line in pairwise(lines) if before.startswith("Stack (most recent")]
    return bool(tops) and re.search(r"/jax/(_src|experimental)/", tops[-1]) is not None


def _told(exit_code: int) -> str:
    if exit_code > 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _handles_dumps(pid: int) -> bool:
    """Whether SIGUSR1 is caught by this process, rather than its end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def main() -> None:
    """Entry point; see the top of this file."""
    line = b""
    while not line.endswith(b"\n"):  # not sys.stdin, which would read on and keep it
        data = os.read(0, 1)
        if not data:
            sys.exit(2)
        line += data
    given: dict[str, Any] = json.loads(line)
    job = Job(**given)
    adopt_orphans()
    supervisor = Supervisor(job)
    # Whoever ends this process politely gets the same as from the launcher; it leads its session,
    # so a terminal's signals do not come here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: setattr(supervisor, "is_orphan", True))
    report = supervisor.run()
    if supervisor.is_orphan:
        shutil.rmtree(job.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.write(job.report_fd, json.dumps(asdict(report)).encode() + b"\n")


if __name__ == "__main__":
    main()
