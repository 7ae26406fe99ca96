"""The devices JAX offers in this process, and how to have more of them on a CPU."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from jaxpar import processes
from jaxpar.compat import backends_are_up
from jaxpar.errors import MeshError, is_whole, nearest_whole, shown

MAX_CPU_DEVICES = 4096
"""Virtual devices of one process; JAX takes about a third of a megabyte for each."""

THREADS_PER_DEVICE = 4
"""XLA has a thread for each CPU device, and each collective keeps one waiting. Where a device is in
two at once, as a pipeline's may be, another one would never run, and all would wait for it."""


def use_cpu_devices(num: int) -> None:
    """Make JAX offer at least `num` CPU devices in this process; a larger number stays.

    The number is fixed once JAX has started, so call this before anything that lists devices or
    computes. Raises `MeshError` when it is too late and there are fewer. Under `jaxpar launch` the
    devices are there already, and the ones of all processes count.
    """
    if not is_whole(num) or not 1 <= num <= MAX_CPU_DEVICES:
        raise MeshError(
            f"{shown(num)} CPU devices cannot be made; a process can have 1 to {MAX_CPU_DEVICES}. "
            f"Nearest: {nearest_whole(num, 1, MAX_CPU_DEVICES)}."
        )
    if processes.is_launched():
        processes.initialize()
        have = len(devices_of("cpu"))
        if have < num:
            raise MeshError(
                f"jaxpar launch made {have} CPU devices in all processes together, and {num} are "
                f"needed. Give it more processes, or more --devices-per-process."
            )
        return
    if not backends_are_up():
        if num > _cpu_devices_asked_for():
            jax.config.update("jax_num_cpu_devices", num)
        # XLA's own word for how many threads to have; it has no option for it.
        os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * max(num, _cpu_devices_asked_for())))
        return
    have = sum(device.process_index == jax.process_index() for device in devices_of("cpu"))
    if have < num:
        raise MeshError(
            f"JAX has already started with {have} CPU devices, and {num} are needed. "
            f"Call use_cpu_devices({num}) before anything that lists devices or computes, "
            f"in a fresh process."
        )


def _cpu_devices_asked_for() -> int:
    """What the user set, either way JAX knows, before a backend is up."""
    in_flags = re.search(
        r"--xla_force_host_platform_device_count=([0-9]{1,6})\b", os.environ.get("XLA_FLAGS", "")
    )
    config: Any = jax.config  # its options are attributes made at run time
    return max(config.jax_num_cpu_devices, int(in_flags[1]) if in_flags else 1)


def devices_of(platform: str) -> list[jax.Device]:
    """All of a platform, none where JAX was not installed or started for it."""
    try:
        return list(jax.devices(platform))
    except RuntimeError:
        return []
