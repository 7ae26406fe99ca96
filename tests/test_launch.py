"""The launcher on ranks that import no JAX, and so start at once."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.launch import Launch, LaunchError
from jaxpar.launch.output import MAX_LINE, NUM_LINES, Stream, Tail, open_channel
from jaxpar.launch.supervisor import SETTLE_S, waits_in_jax
from jaxpar.launch.watch import DEFAULT_STALL_S, FINISH_S, FOLLOW_S, Watch
from tests.launch_helpers import (
    ROOT,
    assert_nothing_left,
    end_ours,
    finish,
    report,
    start,
    wait_for,
)


@pytest.fixture(autouse=True)
def leave_nothing(in_empty_folder):
    yield
    end_ours()


PRELUDE = (
    f"""
import json, os, runpy, signal, subprocess, sys, time
place = runpy.run_path({str(ROOT / "jaxpar/launch/messages.py")!r})["read_place"]()
rank = place.process_id
"""
    + """
def other(name):  # wait for a file that another rank makes
    while not os.path.exists(name):
        time.sleep(0.01)
def orphan():  # a child in a session of its own, without a parent
    subprocess.Popen(["sh", "-c", "(touch orphan; sleep 600) &"], start_new_session=True)
    other("orphan")
"""
)


def start_ranks(program: str, *options: str, num: int = 2) -> subprocess.Popen[str]:
    Path("ranks.py").write_text(PRELUDE + program)
    return start(["python", "ranks.py"], *options, num=num)


def run(program: str, *options: str, num: int = 2) -> tuple[int, str, str]:
    return finish(start_ranks(program, *options, num=num))


# --- going well --------------------------------------------------------------------------------


def test_rank_0_prints_as_if_alone():
    Path("logs").mkdir()
    code, out, err = run(
        """
sys.stdout.write("[Gloo] Rank 0 is connected to 7 peer ranks. Expected number is : 7\\n")
names = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"
print(rank, place.num_processes, place.coordinator, *(os.environ.get(name) for name in names))
sys.stdout.write("no newline")
sys.stdout.flush()
print("to stderr", rank, file=sys.stderr)
""",
        *("--logs", "logs", "--devices-per-process", "4"),
        num=3,
    )
    assert (code, err) == (0, "to stderr 0\n")
    assert re.fullmatch(r"0 3 127\.0\.0\.1:\d+ cpu 4\nno newline", out)
    assert report()["outcome"] == "finished"
    assert [rank["exit_code"] for rank in report()["ranks"]] == [0, 0, 0]
    host, port = out.split()[2].split(":")
    with socket.socket() as again:  # nobody holds it any more
        again.bind((host, int(port)))
    for rank in range(3):
        log = Path(f"logs/rank-{rank}.log").read_text()
        assert log.startswith(f"{rank} 3 ") and f"to stderr {rank}\n" in log


# --- failing -----------------------------------------------------------------------------------


def test_the_first_to_die_is_shown_with_its_last_lines():
    code, out, err = run(
        """
if rank == 1:
    for line in range(100):
        print(f"line {line} \\x1b[31mred\\x1b[0m")
    open("dying", "w").close()
    os._exit(3)
orphan()
other("dying")
print("rank", rank, "goes on")
time.sleep(0.3)
if rank == 2:
    os.abort()
time.sleep(600)
""",
        num=3,
    )
    assert code == 3
    assert out == "rank 0 goes on\n"
    assert "rank 1 failed first: it ended with exit code 3" in err
    shown = [line.strip() for line in err.splitlines() if line.startswith("  ")]
    assert shown == [f"line {line} red" for line in range(80, 100)]
    assert "Then rank 2 was ended by SIGABRT." in err
    assert report()["first"] == 1 and report()["seconds"] < 15


def test_an_abort_is_not_first_when_the_coordinator_died():
    """Both deaths are seen at once, so that only what is known of aborts can tell."""
    code, _, err = run(
        """
if rank == 1:
    other("dead")
    os.abort()
os.system(f"(sleep 0.01; touch dead) &")
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert code == 1
    assert "rank 0 failed first: it was ended by SIGKILL" in err


def test_a_stalled_rank_is_told_from_those_that_wait_for_it():
    code, _, err = run(
        """
open(f"at-{rank}", "w").close()
for r in range(3):
    other(f"at-{r}")
for step in range(4):
    place.tell("beat")
    print("step", step)
    if rank == 1 and step == 2:
        print("stuck")
        time.sleep(600)
    time.sleep(0.05)
time.sleep(600)
""",
        "--stall-timeout",
        "1",
        num=3,
    )
    assert code == 1
    assert "rank 1 failed first: it gave no sign of progress for 1 s" in err
    assert "  stuck" in err
    assert report()["seconds"] < 1 + SETTLE_S + 5


def test_a_rank_that_begins_to_exit_while_others_work():
    """As with sys.exit in one rank: JAX waits for the others, and they wait in a collective."""
    code, _, err = run(
        """
place.tell("beat")
if rank == 1:
    print("bad data")
    place.tell("leaving")
time.sleep(600)
""",
        "--stall-timeout",
        "1",
    )
    assert code == 1
    assert "rank 1 failed first: it began to exit" in err and "  bad data" in err


def test_a_rank_may_finish_its_work_alone():
    """It uses a CPU, so does not wait for the one that exits."""
    code, out, _ = run(
        """
if rank == 1:
    place.tell("leaving")
    other("done")
else:
    end = time.monotonic() + 4.5
    while time.monotonic() < end:
        pass
    print("written")
    open("done", "w").close()
""",
        "--stall-timeout",
        "2.5",
    )
    assert (code, out) == (0, "written\n")


# --- being ended -------------------------------------------------------------------------------

SLEEPER = """
orphan()
open(f"ready-{rank}", "w").close()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_all(number):
    launch = start_ranks(SLEEPER)
    wait_for("ready-0"), wait_for("ready-1")
    launch.send_signal(number)
    code, _, err = finish(launch)
    assert code == 128 + number
    assert "no process is left" in err
    assert report()["outcome"] == "stopped"


def test_who_listens_has_time_to_stop():
    launch = start_ranks(
        """
place.tell("listens")
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
open(f"ready-{rank}", "w").close()
while not stopping:
    time.sleep(0.01)
time.sleep(0.5)
print("checkpoint left")
"""
    )
    wait_for("ready-0"), wait_for("ready-1")
    launch.send_signal(signal.SIGINT)
    code, out, _ = finish(launch)
    assert (code, out) == (130, "checkpoint left\n")


def test_a_second_signal_ends_who_does_not_listen_at_once():
    launch = start_ranks("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER)
    wait_for("ready-0"), wait_for("ready-1")
    started = time.monotonic()
    launch.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launch.send_signal(signal.SIGINT)
    code, _, _ = finish(launch)
    assert code == 130 and time.monotonic() - started < 4


def test_the_launcher_killed_takes_all_along():
    launch = start_ranks(SLEEPER)
    wait_for("ready-0"), wait_for("ready-1")
    launch.kill()
    launch.communicate(timeout=10)
    assert_nothing_left()


def test_the_supervisor_killed_is_noticed():
    launch = start_ranks(SLEEPER)
    wait_for("ready-0"), wait_for("ready-1")
    (supervisor,) = map(
        int, Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
    )
    os.kill(supervisor, signal.SIGKILL)
    code, _, err = finish(launch)
    assert code == 2
    assert "The process that watches the ranks was killed" in err


# --- what cannot be started --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": []}, "no command to start"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 65}, "at most 64"),
        ({"devices_per_process": 3000}, "6000; at most 4096"),
        ({"stall_s": -1.0}, "stall timeout=-1.0"),
        ({"logs": Path("nowhere")}, "Cannot write logs to nowhere"),
    ],
)
def test_bad_launches_are_refused(fields, message):
    with pytest.raises(LaunchError, match=message):
        Launch(**{"command": ["true"], **fields})


def test_a_program_that_is_not_there():
    with pytest.raises(LaunchError, match="There is no program 'not-a-program' to start"):
        Launch(command=["not-a-program"]).resolved()


def test_jaxpar_and_python_are_those_that_launch():
    assert Launch(command=["jaxpar", "run"]).resolved() == [sys.executable, "-m", "jaxpar", "run"]
    found = Launch(command=["python", "x.py"]).resolved()
    assert os.path.dirname(found[0]) == os.path.dirname(sys.executable)


# --- parts -------------------------------------------------------------------------------------


def test_the_default_stall_is_within_the_promise():
    """20 s for what beats every second, and then what it takes to end all."""
    watch = Watch()
    for now in range(10):
        watch.beat(now, within_s=None, compiling=False)
    assert not watch.is_stalled(9 + DEFAULT_STALL_S - 0.1, last_busy_s=0)
    assert watch.is_stalled(9 + DEFAULT_STALL_S + 0.1, last_busy_s=0)
    assert DEFAULT_STALL_S + SETTLE_S + 5 <= 30  # 5 s is what end_all may take
    assert FOLLOW_S + SETTLE_S <= 20


def test_slow_steps_stretch_the_limit_but_not_the_user_s():
    watch, strict = Watch(), Watch(stall_s=3.0)
    for now in (0, 50, 100, 130):
        for one in (watch, strict):
            one.beat(now, within_s=None, compiling=False)
    assert not watch.is_stalled(130 + 249, last_busy_s=0)
    assert watch.is_stalled(130 + 251, last_busy_s=0)
    assert strict.is_stalled(133.1, last_busy_s=0)


def test_compiling_is_no_stall_as_long_as_a_cpu_is_busy():
    watch = Watch()
    watch.beat(0, within_s=1800, compiling=True)
    assert not watch.is_stalled(600, last_busy_s=590)
    assert watch.is_stalled(600, last_busy_s=570)
    assert watch.is_stalled(1801, last_busy_s=1801)
    watch.beat(700, within_s=None, compiling=False)
    # The step after the one that compiled may take as long as that one did, and not 1800 s.
    assert not watch.is_stalled(1399, last_busy_s=0)
    assert watch.is_stalled(1401, last_busy_s=0)
    watch.beat(701, within_s=None, compiling=False)
    assert watch.is_stalled(722, last_busy_s=0)


def test_who_waits_for_one_that_exits():
    """In a collective at work: at once. Never watched: if no CPU is busy. At rest: later."""
    at_work, never, at_rest = Watch(), Watch(), Watch()
    for watch in (at_work, at_rest):
        watch.beat(0, within_s=None, compiling=False)
        watch.beat(1, within_s=None, compiling=False)
    at_rest.rest(2)
    now = 3 + FOLLOW_S + 0.1
    assert at_work.is_quiet(now, 3, now) and not at_work.is_quiet(now - 0.2, 3, 0)
    assert never.is_quiet(now, 3, 3) and not never.is_quiet(now, 3, 4)
    assert not at_rest.is_quiet(now, 3, 3) and at_rest.is_quiet(3 + FINISH_S + 0.1, 3, 3)


def test_an_announced_pause_is_waited_for_even_when_idle():
    watch = Watch(stall_s=1.0)
    watch.beat(0, within_s=60, compiling=False)
    assert not watch.is_stalled(59, last_busy_s=0)
    assert watch.is_stalled(61, last_busy_s=61)


def test_tails_are_bounded_and_fit_for_a_terminal():
    tail = Tail()
    for i in range(1000):
        tail.feed(b"%d\n" % i)
    tail.feed(b"old\rnew \x1b]0;title\x07\x9b\xff" + b"x" * 1_000_000)
    lines = tail.lines()
    assert len(lines) == NUM_LINES and lines[-2] == "999"
    assert len(lines[-1]) <= MAX_LINE + 2
    assert all(line.isprintable() for line in lines)
    tail.feed(b"\nold\rnew \x1b]0;title\x07\x1b[1mbold\n")
    assert tail.lines()[-1] == "new bold"


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_only_gloo_s_greetings_are_left_out(size):
    """However the bytes come in pieces; and what merely begins like one is not held for ever."""
    text = (
        b"[Gloo] Rank 1 is connected to 7 peer ranks. Expected number is : 7\n"
        b"[ 10%] [Gloo] Rank is mine\n"
        b"[Gloo] Rank 12 is connected to 7 peer ranks. Expected number is : 7\n"
        b"[Gloo"
    )
    source, sink = os.pipe(), os.pipe()
    os.write(source[1], text)
    os.close(source[1])
    stream = Stream(source[0], Tail(), forward_to=sink[1], log=None)
    while stream.take(size):
        pass
    stream.close()
    os.close(sink[1])
    assert os.read(sink[0], 4096) == b"[ 10%] [Gloo] Rank is mine\n[Gloo"
    os.close(sink[0])


def test_a_terminal_stays_one():
    """So that progress bars move; what is no terminal gets a pipe."""
    theirs, ours = os.openpty()
    for destination, is_terminal in (
        (ours, True),
        (os.open("file", os.O_CREAT | os.O_RDWR), False),
    ):
        read, write = open_channel(destination)
        assert os.isatty(write) == is_terminal
        os.write(write, b"one\n")  # without the carriage return that the real one adds
        assert os.read(read, 100) == b"one\n"
        for fd in (read, write, destination):
            os.close(fd)
    os.close(theirs)


def test_stacks_tell_who_waits():
    head = "Stack (most recent call first):"
    waits = [head, '  File "/v/site-packages/jax/_src/array.py", line 623 in _value']
    works = [head, '  File "/home/me/train.py", line 3 in load']
    assert waits_in_jax(["a", *waits, "b"])
    assert not waits_in_jax(works) and not waits_in_jax([*waits, *works]) and not waits_in_jax([])
