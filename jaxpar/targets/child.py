"""What the child process does: one program, one target, and files with the answer.

It reads `request.json` and `module.mlirbc` in its folder, says on stdout which stage it is in, and
writes `program.txt` (HLO) and `answer.json`. It may be ended at any time, by its compiler too.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1 << 30

_PDEATHSIG = 1


def main(folder: Path, parent: int) -> int:
    """The exit code; everything else is in the folder."""
    _restrict(parent)
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = _compiled(request, folder)
    except MemoryError as error:
        answer = {"error": f"MemoryError: {error}"}
    except Exception as error:  # whatever XLA throws is told in words by the parent
        answer = {"error": f"{type(error).__name__}: {error}"[:100_000]}
    (folder / "answer.json").write_text(json.dumps(answer))
    return 0


def _compiled(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    _stage("starting")
    from jax.experimental import topologies

    from jaxpar import compat
    from jaxpar.targets.links import coordinates

    topology = topologies.get_topology_desc(**request["topology"])
    told = _told(topology.devices)
    at = {coordinates(request["dims"], row): n for n, row in enumerate(told)}
    try:
        order = [at[tuple(place)] for place in request["order"]]
    except KeyError as error:
        return {"error": f"Misplaced: the topology has no device at {error}"}
    _stage("compiling")
    module = (folder / "module.mlirbc").read_bytes()
    devices = [topology.devices[n] for n in order]
    executable = compat.compile_only(module, devices, request["options"])
    _stage("writing")
    (folder / "program.txt").write_text(compat.executable_text(executable))
    stats = executable.get_compiled_memory_stats()
    names = ("argument", "output", "alias", "temp", "generated_code")
    memory = {f"{name}_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    memory["peak_bytes"] = getattr(stats, "peak_memory_in_bytes", None) or None
    return {"memory": memory, "devices": [told[n] for n in order]}


def _told(devices: Any) -> list[dict[str, Any]]:
    """Where each device is, as far as it says so itself."""
    num_seen: Counter[int] = Counter()
    rows = []
    for device in devices:
        process = device.process_index
        rows.append(
            {
                "id": device.id,
                "kind": device.device_kind,
                "process": process,
                "local": num_seen[process],
                "slice": getattr(device, "slice_index", None) or 0,
                "coords": list(getattr(device, "coords", None) or ()),
                "core": getattr(device, "core_on_chip", None),
            }
        )
        num_seen[process] += 1
    return rows


def _stage(name: str) -> None:
    print(name, flush=True)


def _restrict(parent: int) -> None:
    """No dump of memory, no endless file, and no life without the parent."""
    import os

    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
