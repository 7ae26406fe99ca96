"""Runs a target's compiler in a child process, with limits; its failures are told in words.

TPU compilers take a lock that keeps a second one out, ask the network which machine this is, and
end the process when they find themselves wrong. So the child gets an environment of its own, and
whatever becomes of it, the parent gets HLO text or an error. Nothing on the machine is removed:
neither that lock nor anybody's process.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxpar.errors import CompilerError, OutOfDeviceMemoryError, TargetError, shown
from jaxpar.targets import cache as caches
from jaxpar.targets.links import Where
from jaxpar.targets.placement import Placement
from jaxpar.targets.target import Target

GIB = 1 << 30

Options = Mapping[str, str | bool | int | float]
Progress = Callable[[str, float, int], None]
"""Called several times a second with the stage, seconds so far, bytes of memory."""

_CHILD = """
import json, sys
path, folder, parent = map(json.loads, sys.argv[1:])
sys.path[:] = path
from pathlib import Path
from jaxpar.targets.child import main
sys.exit(main(Path(folder), parent))
"""
_POLL_S = 0.1
_MAX_SAID_BYTES = 1 << 26
_PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
_ACCELERATORS = {"v4": "v4", "v5p": "v5p", "v5e": "v5litepod", "v6e": "v6e", "tpu7x": "tpu7x"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OUT_OF_MEMORY = re.compile(
    r"CompileTime\w*Oom|Ran out of memory|RESOURCE_EXHAUSTED|XLA:TPU compile permanent"
)
_SIZES = (
    re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm"),
    re.compile(r"\(([\d.]+)([KMGT]?)i?B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)i?B?\)"),
)
_OPTION = re.compile(r"[Nn]o such compile option:? *'?([\w.]+)|(?:option|flag)s? '?(xla_\w+)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a compiler may take: seconds of wall clock, bytes of this machine's memory."""

    time_s: float = 1200.0
    memory_bytes: int = 12 * GIB


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program as a target's compiler made it.

    text: scheduled HLO. memory: of one device by XLA's own account, in bytes: argument_bytes,
    output_bytes, alias_bytes (outputs that take an argument's place), temp_bytes,
    generated_code_bytes, and peak_bytes or None. where: the devices in the order of the mesh.
    seconds, cpu_s, peak_rss_bytes: what the compiler took, when it ran: wall clock, processor time
    of all its threads, memory. from_cache: it did so earlier.
    """

    target: Target
    options: Options
    text: str
    memory: Mapping[str, int | None]
    devices: tuple[Mapping[str, Any], ...]
    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    from_cache: bool

    @cached_property
    def where(self) -> Where:
        return Where.of(self.target.dims, self.devices, self.target.rings)

    @property
    def device_bytes(self) -> int:
        """Memory that one device needs: arguments, outputs that have no argument's place,
        temporaries, code."""
        m = {name: value or 0 for name, value in self.memory.items()}
        own_outputs = max(0, m["output_bytes"] - m["alias_bytes"])
        return m["argument_bytes"] + own_outputs + m["temp_bytes"] + m["generated_code_bytes"]


def silent(stage: str, seconds: float, rss_bytes: int) -> None:
    """Progress that nobody is told of."""


def compile_module(
    module: bytes,
    *,
    fingerprint: bytes | None = None,
    target: Target,
    placement: Placement,
    options: Options | None = None,
    limits: Limits | None = None,
    cache: caches.Cache | None = None,
    progress: Progress = silent,
) -> Compiled:
    """Compile StableHLO bytecode for a target; nothing of it runs.

    fingerprint: by what the cache knows the program, where not by all its bytes.

    Raises TargetError where the compiler is not installed or does not know the target or an option,
    OutOfDeviceMemoryError where the program is too large for it, CompilerError where it ended or
    went over `limits`.
    """
    options, limits = dict(options or {}), limits or Limits()
    versions = require_compiler(target)
    request = {
        "topology": _topology(target),
        "dims": dict(target.dims),
        "order": placement.coordinates.tolist(),
        "options": options,
    }
    key = caches.key_of(fingerprint or module, {"request": request, "versions": versions})
    found = cache.get(key) if cache is not None else None
    answer = found
    if answer is None:
        answer = _run(module, request, target, limits, progress)
        if cache is not None:
            cache.put(key, answer)
    if "out_of_memory" in answer:
        raise _out_of_memory(answer["out_of_memory"], target)
    return Compiled(
        target=target,
        options=options,
        text=answer["text"],
        memory=answer["memory"],
        devices=tuple(answer["devices"]),
        seconds=answer["seconds"],
        cpu_s=answer["cpu_s"],
        peak_rss_bytes=answer["peak_rss_bytes"],
        from_cache=found is not None,
    )


# --- the child -------------------------------------------------------------------------------


def _run(
    module: bytes, request: Mapping[str, Any], target: Target, limits: Limits, progress: Progress
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jaxpar-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "module.mlirbc").write_bytes(module)
        started = time.monotonic()
        before = _cpu_s_of_children()
        code, peak = _watched(folder, target, limits, progress)
        cpu_s = _cpu_s_of_children() - before
        seconds = time.monotonic() - started
        said = _tail(folder / "stderr")
        try:
            answer = json.loads((folder / "answer.json").read_text())
        except (OSError, ValueError):
            raise _ended(code, said, target) from None
        if "error" in answer:
            message = answer["error"]
            if _OUT_OF_MEMORY.search(message):
                return {"out_of_memory": message[:4000]}
            raise _refused(message, said, target, request["options"])
        text = (folder / "program.txt").read_text()
    measured = {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "peak_rss_bytes": peak}
    return {**answer, "text": text, **measured}


def _watched(folder: Path, target: Target, limits: Limits, progress: Progress) -> tuple[int, int]:
    """Run the child to its end or to a limit: its exit code, and the most memory it had."""
    imports = [os.fspath(path) for path in sys.path]
    arguments = [json.dumps(it) for it in (imports, str(folder), os.getpid())]
    peak, started = 0, time.monotonic()
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=_environment(target, folder),
            cwd=folder,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    process.wait(_POLL_S)
                    return process.returncode, peak
                except subprocess.TimeoutExpired:
                    pass
                seconds, rss = time.monotonic() - started, _rss_bytes(process.pid)
                peak = max(peak, rss)
                progress(_stage(folder), seconds, rss)
                _check_limits(seconds, rss, limits, target)
                if err.seek(0, os.SEEK_END) > _MAX_SAID_BYTES:
                    raise CompilerError(f"The compiler for {target} printed without end.")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nobody else's
                process.wait()


def _check_limits(seconds: float, rss_bytes: int, limits: Limits, target: Target) -> None:
    advice = "Scan over layers rather than unroll them, take fewer of them, or raise the limit"
    if seconds > limits.time_s:
        raise CompilerError(
            f"Compiling for {target} was stopped after {seconds:.0f} s (time limit "
            f"{limits.time_s:.0f} s). {advice} (--time-limit)."
        )
    if rss_bytes > limits.memory_bytes:
        raise CompilerError(
            f"Compiling for {target} was stopped when it used {rss_bytes / GIB:.1f} GiB of this "
            f"machine's memory (limit {limits.memory_bytes / GIB:.1f} GiB). {advice} "
            f"(--memory-limit)."
        )


def _cpu_s_of_children() -> float:
    """Processor time of the children of this process that have ended, in seconds."""
    times = os.times()
    return times.children_user + times.children_system


def _rss_bytes(pid: int) -> int:
    """Memory of a process, 0 where it is gone or the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stage(folder: Path) -> str:
    words = _tail(folder / "stdout").split()
    return words[-1] if words else "starting"


def _tail(path: Path, most: int = 16_384) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _environment(target: Target, folder: Path) -> dict[str, str]:
    """This process's, without flags that would change the program behind our back."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TPU_", "JAX_", "LIBTPU_", "XLA_", "MEGASCALE_"))
    }
    told = {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Otherwise a second compiler stops at the first one's lock.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Nothing is asked of a network that may not be there.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": str(folder),
    }
    if target.platform == "tpu":
        told["TPU_ACCELERATOR_TYPE"] = f"{_ACCELERATORS[target.chip]}-8"
    return mine | told


# --- what the compiler is told ---------------------------------------------------------------


def require_compiler(target: Target) -> dict[str, str]:
    """Versions of all that decides what comes out. TargetError where the compiler is missing."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    for name in _PACKAGES[target.platform]:
        try:
            return {**versions, name: importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    what = "libtpu" if target.platform == "tpu" else "JAX's CUDA plugin (no GPU, no driver)"
    raise TargetError(
        f"Compiling for {target} needs {what}, which is not installed. Install what belongs to "
        f'JAX {versions["jax"]} with: pip install "{target.extra}".'
    )


def _topology(target: Target) -> dict[str, Any]:
    """The arguments of jax.experimental.topologies.get_topology_desc."""
    if target.platform == "tpu":
        slices = {"num_slices": target.num_slices} if target.num_slices > 1 else {}
        one = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(target.shape) == 1 else {}
        return {"platform": "tpu", "topology_name": target.told.strip("'"), **slices, **one}
    hosts, devices = target.shape
    return {
        "platform": "cuda",
        "topology_name": target.chip,
        "topology": f"1x{hosts}x{devices}",
        "target_config": _gpu_description(target.chip),
    }


def _gpu_description(chip: str) -> str:
    """What XLA would ask the device, as a GpuTargetConfigProto in text form."""
    with files("jaxpar").joinpath("targets/gpus.toml").open("rb") as file:
        gpu = tomllib.load(file)[chip]
    major, minor = gpu["compute_capability"].split(".")
    accelerated = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu["shared_bytes_per_multiprocessor"],
        "threads_per_core_limit": 2048,
        "core_count": gpu["num_multiprocessors"],
        "fpus_per_core": gpu["lanes_per_multiprocessor"],
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu["memory_bytes_per_s"],
        "l2_cache_size": gpu["l2_bytes"],
        "clock_rate_ghz": gpu["clock_ghz"],
        "device_memory_size": gpu["memory_bytes"],
        "shared_memory_per_block_optin": gpu["shared_bytes_per_block"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    told = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    capability = f"  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}"
    return (
        f"gpu_device_info {{\n{told}\n{capability}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\n'
        f'device_description_str: "{gpu["name"]}"\n'
    )


# --- what went wrong -------------------------------------------------------------------------


def _refused(message: str, said: str, target: Target, options: Options) -> TargetError:
    """A compiler that gave a reason."""
    first = " ".join(message.split())[:400]
    option = _OPTION.search(message)
    name = option and (option[1] or option[2])
    if name and name in options:
        return TargetError(
            f"The compiler for {target} does not take option {name}={shown(options[name])}: "
            f"{first}. Options and their values are those of XLA; leave it out, or correct it."
        )
    if "lockfile" in message or "already in use" in message:
        return CompilerError(
            f"Another process uses the TPU compiler and does not share it ({first}). Nothing was "
            f"removed; wait for it to end, and try again."
        )
    if "not installed" in message or "not implemented for cuda" in message:
        return TargetError(
            f"JAX found no compiler for {target} ({first}). Install the one that belongs to this "
            f'JAX: pip install "{target.extra}".'
        )
    if "Misplaced" in message or ("topology" in message.lower() and "INVALID" in message):
        return TargetError(f"The compiler does not build {target}: {first}.")
    return CompilerError(f"The compiler for {target} refused the program: {first}.")


def _ended(code: int, said: str, target: Target) -> CompilerError:
    """A compiler that is gone."""
    if re.search(r"lockfile|already in use by", said):
        return CompilerError(
            f"Another process uses the TPU compiler and does not share it. Nothing was removed; "
            f"wait for it to end, and try again. It said: {_last_words(said)}"
        )
    how = f"signal {-code} ({_signal(-code)})" if code < 0 else f"exit code {code}"
    return CompilerError(
        f"The compiler for {target} ended with {how} and left no program. It said last: "
        f"{_last_words(said)} Take options out one by one, or another version of its plugin."
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _last_words(said: str) -> str:
    """The line of its output that says why, as far as one does."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} |.*[Cc]heck fail|.*Fatal|.*Error", line)]
    told = (fatal or lines or ["nothing"])[-1 if not fatal else 0]
    return told[:300].rstrip(".") + "."


def _out_of_memory(message: str, target: Target) -> OutOfDeviceMemoryError:
    used = available = None
    for sizes in _SIZES:
        if found := sizes.search(message):
            used = round(float(found[1]) * _UNITS[found[2]])
            available = round(float(found[3]) * _UNITS[found[4]])
            break
    if used is None or available is None:
        numbers = " ".join(message.split())[:300]
    else:
        numbers = (
            f"it needs {used / GIB:.2f} GiB of a device that has {available / GIB:.2f} GiB, "
            f"{(used - available) / GIB:.2f} GiB too much"
        )
    return OutOfDeviceMemoryError(
        f"The program does not fit on {target}: {numbers}. Shard more (fsdp, tensor), take a "
        f"smaller batch or more accumulation_steps, or remat='full'.",
        used_bytes=used,
        available_bytes=available,
    )
