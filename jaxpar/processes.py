"""One training run in several processes: joining them, telling them apart, and signs of life.

The same script runs in one process, under `jaxpar launch`, and on a cluster:

    processes.initialize()
    for i in processes.watched(range(num_steps)):
        state, metrics = step(state, batches(i))
        if processes.is_main():
            print(i, float(metrics.loss))
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from jaxpar import compat
from jaxpar.errors import JaxparError
from jaxpar.launch.messages import VARIABLE, Place, read_place

T = TypeVar("T")

COMPILE_S = 1800.0
"""Seconds a first step may take, as long as it uses the CPU."""


class ProcessesError(JaxparError):
    """Processes that cannot join, or a mesh that does not fit them."""


def initialize(*, detect_cluster: bool = True) -> None:
    """Join the run this process belongs to, if it belongs to one; before JAX starts its backends.

    Under `jaxpar launch` that run is the launch. Elsewhere it is whatever JAX detects by itself:
    SLURM, Open MPI, Kubernetes, Cloud TPU. Without any of them, or with detect_cluster=False,
    nothing is joined. A second call does nothing.

    From then on a process that raises takes the others along: it tells the launcher, or ends at
    once with exit code 1 (without handlers of `atexit`), which clusters are told to look for.

    Raises ProcessesError when JAX has started already, or cannot join what it has detected.
    """
    if jax.distributed.is_initialized():
        return
    place = _place()
    cluster = compat.detected_cluster() if place is None and detect_cluster else None
    if place is None and cluster is None:
        if detect_cluster:
            _require_no_mpi()
        return
    whom = f"the {place.num_processes} processes of jaxpar launch" if place else f"the {cluster}"
    if compat.backends_are_up():
        raise ProcessesError(
            f"This process belongs to {whom} and has to join before JAX starts its backends, which "
            f"has happened. Call jaxpar.processes.initialize() before anything that lists devices, "
            f"makes arrays or computes."
        )
    try:
        if place is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(
                place.coordinator,
                place.num_processes,
                place.process_id,
                cluster_detection_method="deactivate",
                coordinator_bind_address=place.coordinator,  # not on every interface
            )
    except Exception as error:
        # JAX and the clusters' own clients raise what they like.
        raise ProcessesError(
            f"This process belongs to {whom}, and could not join: {error} To train in this process "
            f"alone, call initialize(detect_cluster=False)."
        ) from error
    _fail_at_once()
    if place is not None:
        _report_to(place)


def is_launched() -> bool:
    """Whether `jaxpar launch` started this process."""
    return _place() is not None


def is_main() -> bool:
    """Whether this is process 0, the one that prints and writes; true in a run of one process."""
    return compat.process_id() == 0


def beat(*, next_within_s: float | None = None, compiling: bool = False) -> None:
    """Tell the launcher that this process is making progress; outside of one, nothing.

    From the first beat on the launcher takes silence for a stall. Quick steps get 20 s, slow ones
    five times the longest so far, and `jaxpar launch --stall-timeout` sets another limit.

    next_within_s: seconds that what comes now may take, where that is more: a checkpoint, an
        evaluation. compiling: it takes CPU time, so that idle processes have stalled.
    """
    if (place := _place()) is not None:
        place.tell("beat", within_s=next_within_s, compiling=compiling)


def rest() -> None:
    """No beats are to be expected from here to the next one."""
    if (place := _place()) is not None:
        place.tell("rest")


def watched(steps: Iterable[T]) -> Iterator[T]:
    """The same `steps`, with a beat before each; the first one may take long, for it compiles."""
    try:
        for number, step in enumerate(steps):
            if number == 0:
                beat(next_within_s=COMPILE_S, compiling=True)
            else:
                beat()
            yield step
    finally:
        rest()


def stop_requested(step: int) -> bool:
    """Whether to stop after this step because some process was asked to, by SIGTERM.

    Every process has to ask in every step, with the same number; all get the same answer, so that
    they can save a checkpoint together. In a run of one process it is False: handle SIGINT there.
    """
    if not jax.distributed.is_initialized():
        return False
    from jax.experimental import multihost_utils

    if (place := _place()) is not None:
        _announce(place)
    return bool(multihost_utils.reached_preemption_sync_point(step))


def spread(tree: Any, shardings: Any) -> Any:
    """Global arrays with these shardings, from arrays of which every process has all.

    Nobody compares what the processes have: that would be a broadcast in every step.
    """
    if not jax.distributed.is_initialized():
        return jax.device_put(tree, shardings)  # all arrays in one go
    return jax.tree.map(_spread, tree, shardings)


def _spread(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def is_everywhere(array: jax.Array, mesh: jax.sharding.Mesh) -> bool:
    """False for what only this process has, where the mesh has devices of others."""
    return not mesh.is_multi_process or not array.is_fully_addressable


def require_all_devices(mesh: str, num_devices: int, devices: list[jax.Device]) -> None:
    """Raise ProcessesError unless a mesh of several processes has all their devices."""
    num_processes = len({device.process_index for device in devices})
    if num_processes > 1 and num_devices != len(devices):
        local = len(devices) / num_processes
        raise ProcessesError(
            f"Mesh {mesh} has {num_devices} devices, and {num_processes} processes × {local:g} "
            f"devices each are {len(devices)}. Where there are several processes a mesh has to "
            f"have all devices: make the sizes multiply to {len(devices)}, or start "
            f"{_processes_for(num_devices, int(local))}."
        )


def _processes_for(num_devices: int, num_local: int) -> str:
    if num_devices % num_local == 0:
        num = num_devices // num_local
        return f"{num} process" + "es" * (num > 1)
    return f"as many processes, with as many devices each, as multiply to {num_devices}"


@functools.cache
def _place() -> Place | None:
    """What the launcher said, read once and taken away: children of this process are no ranks."""
    try:
        place = read_place()
    except (ValueError, TypeError, AttributeError):
        raise ProcessesError(
            f"{VARIABLE} is set to {os.environ.get(VARIABLE)!r}, and only jaxpar launch sets it. "
            f"Unset it."
        ) from None
    os.environ.pop(VARIABLE, None)
    return place


@functools.cache
def _announce(place: Place) -> None:
    place.tell("listens")


def _report_to(place: Place) -> None:
    """Let the launcher know at once what it could only guess at."""
    # Handlers run last in, first out, so this is before JAX waits.
    atexit.register(place.tell, "leaving")
    # Where a stalled process is, on demand.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    place.tell("joined")


def _fail_at_once() -> None:
    """A process that raises does not end: at exit JAX waits for the others, which wait for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        failing(kind.__name__, 1)

    sys.excepthook = hook


def failing(why: str, exit_code: int) -> None:
    """This process is about to end with an error that it has printed; the others must not wait.

    Tells the launcher. On a cluster the process ends here and now, without handlers of `atexit`, so
    that srun, mpirun or the Job see it and end the others. In a run of one process, nothing.
    """
    if (place := _place()) is not None:
        place.tell("failed", why=why)
    elif jax.distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)


def _require_no_mpi() -> None:
    """Raise ProcessesError in one of several processes that JAX takes for a run of its own.

    Each would train alone, and all would write to the same files.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        num = os.environ.get(name, "")
        if num.isdigit() and int(num) > 1:
            raise ProcessesError(
                f"This is one of {num} processes that MPI started ({name}), and JAX "
                f"{jax.__version__} detects no cluster. It knows Open MPI 4; for Open MPI 5 "
                f"it needs JAX 0.12 and `pip install mpi4py`. To train in each process alone, call "
                f"initialize(detect_cluster=False)."
            )
