"""Several processes: the same numbers as one, what they leave behind, and how they fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import cli, compat, processes
from jaxpar.checkpoint import Checkpoints
from jaxpar.experiment import load
from jaxpar.launch.messages import VARIABLE
from jaxpar.processes import ProcessesError
from tests.helpers import batches, step
from tests.launch_helpers import ENVIRONMENT, end_ours, finish, report, start


@pytest.fixture(autouse=True)
def leave_nothing(in_empty_folder):
    yield
    end_ours()


# --- the same numbers --------------------------------------------------------------------------

EXPERIMENT = """
from tests.helpers import SMALL, plan
from jaxpar import Experiment
from jaxpar.tour import default_optimizer

experiment = Experiment(
    config=SMALL,
    plan=plan("fsdp=4,tensor=2"),
    optimizer=default_optimizer(),
    num_steps=100_000,
)
"""


def test_a_launched_run_is_stopped_and_goes_on_in_one_process(tmp_path):
    """2 × 4 devices give the numbers of 1 × 8, and leave a checkpoint that 1 × 8 goes on from."""
    Path("experiment.py").write_text(EXPERIMENT)
    launch = start(
        ["jaxpar", "run", "experiment.py", "--checkpoint", "saved", "--metrics", "metrics.jsonl"],
        *("--devices-per-process", "4"),
    )
    metrics = Path("metrics.jsonl")
    deadline = time.monotonic() + 100
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert launch.poll() is None and time.monotonic() < deadline, launch.communicate()
        time.sleep(0.05)
    launch.send_signal(signal.SIGINT)
    code, out, err = finish(launch, within_s=60)
    assert code == 128 + signal.SIGINT, err
    assert out.count("Saved: ") == 1  # by process 0 alone
    there = [json.loads(line) for line in metrics.read_text().splitlines()]

    experiment = load("experiment.py")
    training, here = experiment.step(), []
    state = training.init(experiment.seed)
    for i in range(len(there) + 1):
        state, measured = training(state, experiment.batch(i))
        here.append((float(measured.loss), float(measured.gradient_norm)))
    with Checkpoints("saved") as checkpoints:
        restored = checkpoints.restore(training)
    assert restored.num_steps == len(there) == report()["ranks"][1]["num_beats"] - 1
    numbers = [(record["loss"], record["gradient_norm"]) for record in there]
    np.testing.assert_allclose(numbers, here[:-1], rtol=1e-6)
    state, measured = training(restored.state, experiment.batch(restored.num_steps))
    np.testing.assert_allclose(float(measured.loss), here[-1][0], rtol=1e-6)


ON_A_CLUSTER = """
import json
import jax
from jaxpar import MeshSpec, processes
processes.initialize()
processes.initialize()
from tests import helpers

training = helpers.step("data=2,tensor=4", sequence=True)
grid = training.mesh.devices.reshape(2, 4)
state = training.init(0)
losses = []
for i in processes.watched(range(2)):
    state, metrics = training(state, helpers.batches(2)[i])
    losses.append([float(metrics.loss), float(metrics.gradient_norm)])

def refused(do):
    try:
        do()
    except ValueError as error:
        return str(error)

alone = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), training.abstract_inputs[0])
print(json.dumps({
    "process": jax.process_index(),
    "is_main": processes.is_main(),
    "processes_by_axis": [[d.process_index for d in row] for row in grid],
    "losses": losses,
    "small_mesh": refused(lambda: MeshSpec.parse("data=4").build()),
    "state_alone": refused(lambda: training(alone, helpers.batches(1)[0])),
}), flush=True)
if not processes.is_main():
    raise ValueError("planted")
training(state, helpers.batches(1)[0])
"""


def test_a_cluster_that_jax_detects_is_joined():
    """SLURM's variables as srun sets them, for two tasks on this machine."""
    Path("train.py").write_text(ON_A_CLUSTER)
    port = free_port(61440, 65535)
    tasks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **ENVIRONMENT,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "4",
                "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
                "SLURM_JOB_ID": str(port - 61440),  # which is how JAX chooses the port
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
            },
        )
        for task in range(2)
    ]
    try:
        lines = [next(line for line in task.stdout if line.startswith("{")) for task in tasks]
        # Process 1 raises, and ends although process 0 does not: srun or mpirun see to the rest.
        assert tasks[1].wait(timeout=20) == 1
    finally:
        for task in tasks:
            task.kill()
            task.communicate()
    said = [json.loads(line) for line in lines]
    assert [one["is_main"] for one in said] == [True, False]
    assert said[0]["losses"] == said[1]["losses"]
    assert said[0]["processes_by_axis"] == [[0] * 4, [1] * 4]  # outer axes cross processes
    for one in said:
        assert (
            "Mesh data=4 has 4 devices, and 2 processes × 4 devices each are 8" in one["small_mesh"]
        )
        assert "start 1 process" in one["small_mesh"]
        assert "is on this process's devices alone" in one["state_alone"]

    training = step("data=2,tensor=4", sequence=True)
    state, here = training.init(0), []
    for i in range(2):
        state, metrics = training(state, batches(2)[i])
        here.append([float(metrics.loss), float(metrics.gradient_norm)])
    np.testing.assert_allclose(said[0]["losses"], here, rtol=1e-6)


def free_port(low: int, high: int) -> int:
    for port in range(low + os.getpid() % 2000, high):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


# --- how they fail -----------------------------------------------------------------------------

FAILS = """
import os, signal, subprocess, sys, time
import numpy as np, jax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxpar
from jaxpar import processes

jaxpar.use_cpu_devices(4)
mesh = jaxpar.MeshSpec.parse("data=4").build()
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
x = processes.spread(np.arange(4, dtype=np.float32), NamedSharding(mesh, P("data")))
for step in processes.watched(range(100_000)):
    if jax.process_index() == 1 and step == 3:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("last words", flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("planted")
        if sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)  # stalls
    print("step", step, float(total(x)))
"""


@pytest.mark.parametrize(
    ("mode", "how", "last_line", "within_s"),
    [
        ("raise", "raised ValueError", "ValueError: planted", 20),
        ("die", "was ended by SIGKILL", "last words", 20),
        # With the default of 20 s in place of 3: 27 s, of which 5 are JAX's start.
        ("stall", "gave no sign of progress", 'train.py", line 21 in <module>', 30 - 17),
    ],
)
def test_one_of_two_fails_and_both_are_down(mode, how, last_line, within_s):
    """Otherwise the one that raises waits for the other at its end, which waits in a collective."""
    Path("train.py").write_text(FAILS)
    options = ("--stall-timeout", "3") if mode == "stall" else ()
    launch = start(["python", "train.py", mode], "--devices-per-process", "2", *options)
    for line in launch.stdout:
        if line.startswith("step 2"):
            break
    else:
        raise AssertionError(launch.communicate())
    failed_at = time.monotonic()
    code, _, err = finish(launch, within_s=60)
    assert time.monotonic() - failed_at < within_s
    assert code == 1
    first = report()["ranks"][1]
    assert report()["first"] == 1 and how in first["how"]
    assert first["last_lines"][-1].endswith(last_line)
    assert f"rank 1 failed first: it {how}" in err and f"  {first['last_lines'][-1]}\n" in err


def test_errors_that_the_command_line_prints_are_told_as_well(monkeypatch, capsys):
    """No exception leaves the process then, and the others may be waiting for this one."""
    told = []
    monkeypatch.setattr(processes, "failing", lambda *error: told.append(error))
    monkeypatch.setattr(sys, "argv", ["jaxpar", "run", "nowhere.py"])
    with pytest.raises(SystemExit):
        cli.main()
    assert told == [("ExperimentError", 2)]
    assert "'nowhere.py' does not exist" in capsys.readouterr().err


# --- parts -------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """What a process has read of its environment is kept; tests set it."""
    processes._place.cache_clear()
    yield
    processes._place.cache_clear()


def test_alone_there_is_nothing_to_join(fresh, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    processes.initialize()
    assert not jax.distributed.is_initialized()
    assert processes.is_main() and not processes.is_launched()
    assert not processes.stop_requested(0)
    processes.beat()
    assert list(processes.watched(range(3))) == [0, 1, 2]


def test_too_late_to_join(fresh, monkeypatch):
    jax.devices()
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    assert compat.detected_cluster() == "slurm cluster that JAX detects"
    with pytest.raises(ProcessesError, match="the slurm cluster .* before JAX starts its backends"):
        processes.initialize()
    processes.initialize(detect_cluster=False)


def test_mpi_that_jax_does_not_detect(fresh, monkeypatch):
    monkeypatch.setattr(compat, "detected_cluster", lambda: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    processes.initialize()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ProcessesError, match="one of 2 processes that MPI started"):
        processes.initialize()
    processes.initialize(detect_cluster=False)


@pytest.mark.parametrize("value", ["", "1", "{}", '{"process_id": 0}'])
def test_the_launcher_s_variable_is_nobody_else_s(fresh, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ProcessesError, match="only jaxpar launch sets it"):
        processes.initialize()


def test_beats_arrive_and_end_with_the_loop(fresh, monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind("inbox")
        place = {"coordinator": "", "num_processes": 2, "process_id": 1, "inbox": "inbox"}
        monkeypatch.setenv(VARIABLE, json.dumps(place))
        for step_number in processes.watched(range(5)):
            if step_number == 1:
                break
        said = [json.loads(inbox.recv(4096)) for _ in range(3)]
    assert [message["what"] for message in said] == ["beat", "beat", "rest"]
    assert {message["rank"] for message in said} == {1}
    assert said[0]["compiling"] and not said[1]["compiling"]
    assert VARIABLE not in os.environ  # children are no ranks
    processes.beat()  # to nobody: the launch is gone, and that is no error


def test_spread_takes_what_is_there():
    mesh = step("data=8").mesh
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    whole = np.arange(16)
    for given in (whole, jax.numpy.asarray(whole)):
        placed = processes.spread(given, sharding)
        assert placed.sharding == sharding and np.array_equal(placed, whole)
    assert processes.spread(placed, sharding) is placed or np.array_equal(placed, whole)


@pytest.mark.parametrize(
    ("num_devices", "advice"),
    [(8, None), (4, "start 1 process"), (16, "start 4 processes"), (6, "as multiply to 6")],
)
def test_meshes_have_all_devices(num_devices, advice):
    devices = [SimpleNamespace(process_index=i // 4) for i in range(8)]
    if advice is None:
        processes.require_all_devices("data=8", num_devices, devices)
        return
    with pytest.raises(ProcessesError, match=advice):
        processes.require_all_devices("mesh", num_devices, devices)
