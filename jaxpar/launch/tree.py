"""The processes below this one: who they are, how busy, and how to end all of them.

A child that starts a session of its own is in no process group of ours any more, and an orphan is
nobody's child. So this process becomes the parent of its orphans (Linux: `prctl(2)`,
PR_SET_CHILD_SUBREAPER), and looks at /proc for what is below it. Where there is no /proc, process
groups have to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36

_PROC = Path("/proc")


class Process(NamedTuple):
    """One line of /proc: `cpu_s` are seconds of CPU time so far, of this process alone."""

    pid: int
    parent: int
    is_zombie: bool
    cpu_s: float


def adopt_orphans() -> bool:
    """Make orphans among this process's descendants its own children; False where none can be."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def processes() -> dict[int, Process]:
    """All that /proc shows, by pid; empty where there is no /proc."""
    found: dict[int, Process] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (folder / "stat").read_text(encoding="ascii", errors="replace")
                rest = stat.rpartition(")")[2].split()  # the name before may hold anything
                cpu_s = (int(rest[11]) + int(rest[12])) / tick
                pid = int(folder.name)
                found[pid] = Process(pid, int(rest[1]), rest[0] in "ZX", cpu_s)
    return found


def descendants(root: int, among: dict[int, Process] | None = None) -> list[Process]:
    """All below `root`, parents before their children."""
    among = processes() if among is None else among
    children: dict[int, list[Process]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def end_all(*, spare: Collection[int] = (), groups: Iterable[int] = (), within_s: float = 5) -> int:
    """SIGKILL to all descendants of this process but `spare`, again until none is left.

    Returns how many are left after `within_s` seconds: those the kernel cannot end. `groups` are
    process groups to end as well, for machines without /proc. Children are reaped.
    """
    deadline = time.monotonic() + within_s
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    while True:
        left = [process for process in descendants(os.getpid()) if process.pid not in spare]
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
            if process.parent == os.getpid():
                with contextlib.suppress(OSError):
                    os.waitpid(process.pid, os.WNOHANG)
        alive = sum(not process.is_zombie for process in left)
        if not left or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)
