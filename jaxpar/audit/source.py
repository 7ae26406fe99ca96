"""`audit(thing)`: from anything that names a compiled program to an `Audit`.

Text is read as a stream with a limit on its size and never handed to XLA's own parser, which can
kill the process on text that it did not print.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.audit.collect import Collector
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import execution
from jaxpar.audit.groups import MAX_DEVICES
from jaxpar.audit.memory import memory as memory_of
from jaxpar.audit.reader import MAX_PROBLEMS, Module, no_collection, read_hlo
from jaxpar.audit.reading import Reading
from jaxpar.audit.result import Audit, Finding, Memory, Program
from jaxpar.errors import AuditError

MAX_TEXT_BYTES = 1 << 29
"""Largest HLO text that is read, decompressed: 512 MiB, a hundred times a large program."""

_CHUNK = 1 << 22
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def audit(thing: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> Audit:
    """What `thing` communicates once compiled.

    `thing` is a jitted function with its arguments (arrays or `jax.ShapeDtypeStruct`s; nothing is
    run), a Lowered, a Compiled, HLO text, or the path of a file with HLO text (`.gz` too).
    `mesh` names the axes: a mapping of axis to size in mesh order, a text such as "dp=2,tp=4", a
    jax Mesh, or anything whose `shape` or `axes` is such a mapping. Without one, the mesh of the
    program's own shardings is used where it has one; else axes are named by size and stride, and
    notes say so.

    Raises AuditError for what is no compiled program, is not partitioned yet, is damaged beyond
    reading, or does not fit the mesh. Text with something missing gives `complete=False`.
    """
    axes = None if mesh is None else _axes(mesh)
    if isinstance(thing, (str, os.PathLike)):
        if args or kwargs:
            raise AuditError("A text or path takes no further arguments; give the function itself.")
        if isinstance(thing, str) and ("\n" in thing or thing.startswith("HloModule")):
            return _audit(_checked_text(thing), axes)
        return _audit(_file_text(Path(thing)), axes)
    compiled = _compiled(thing, args, kwargs)
    text = compiled.as_text()
    if not text:
        raise AuditError(
            "This Compiled shows no HLO text (its backend keeps none). "
            "Compile with xla_dump_to and audit the file that XLA writes."
        )
    shardings = _shardings(compiled)
    if axes is None:
        axes = _own_mesh(shardings)
    devices = (device for sharding in shardings for device in sharding.device_set)
    device = next(devices, None)
    platform = _PLATFORMS.get(device.platform, device.platform) if device else None
    return _audit(_checked_text(text), axes, platform=platform, compiled=compiled)


def _audit(
    text: str,
    mesh: dict[str, int] | None,
    *,
    platform: str | None = None,
    compiled: Any = None,
) -> Audit:
    with no_collection():
        reading, problems = read(text, mesh, platform=platform)
        memory = memory_of(reading.module)
    if memory is not None and compiled is not None:
        memory = _as_compiled(memory, compiled)
    return Audit(
        program=Program(
            name=reading.module.name,
            platform=reading.platform,
            num_devices=reading.num_devices,
            scheduled=reading.module.scheduled,
            complete=all(finding.severity != "error" for finding in problems),
        ),
        mesh=mesh,
        collectives=tuple(site.collective for site in reading.sites),
        memory=memory,
        findings=tuple(problems),
    )


def read(
    text: str | Iterable[str], mesh: dict[str, int] | None, *, platform: str | None = None
) -> tuple[Reading, list[Finding]]:
    """The module that a text, or its lines, prints, with its collectives; and what is missing."""
    module = read_hlo(text)
    if module.unpartitioned:
        raise AuditError(
            f"Line {module.unpartitioned} still awaits XLA's partitioner, so the text does not "
            "hold the collectives yet. Audit the compiled program: pass the Lowered itself, or "
            "lowered.compile()."
        )
    devices = _devices(module, mesh)
    flow = Dataflow(module)
    runs = execution(module, flow)
    platform = platform or module.platform
    collector = Collector(module, flow, runs, mesh=mesh, devices=devices, platform=platform)
    collector.run()
    missing = [
        *(f"computation {name!r} is called and not there" for name in runs.missing),
        *(f"no line defines {value}" for value in module.undefined()),
    ]
    incomplete = (
        Finding(
            rule="text-incomplete",
            severity="error",
            message=problem,
            source=None,
            remedy="Print the text again with compiled.as_text(), and pass all of it.",
        )
        for problem in [*module.problems, *missing[:MAX_PROBLEMS]]
    )
    reading = Reading(
        module=module,
        flow=flow,
        runs=runs,
        sites=tuple(collector.sites),
        mesh=mesh,
        num_devices=devices,
        platform=platform,
    )
    return reading, [*incomplete, *collector.findings]


def _devices(module: Module, mesh: dict[str, int] | None) -> int | None:
    """How many devices run the module: as it says, or as the mesh has. AuditError if they differ.

    A program over several slices is compiled per slice, so there the mesh may be larger; such a
    program communicates by sends, which make the audit incomplete.
    """
    on_mesh = None if mesh is None else math.prod(mesh.values())
    if module.replicas is None or module.partitions is None:
        return on_mesh
    devices = module.replicas * module.partitions
    if devices > MAX_DEVICES:
        raise AuditError(f"The header speaks of {devices} devices; at most {MAX_DEVICES} are read.")
    if on_mesh is None or on_mesh == devices or (on_mesh % devices == 0 and _has_slices(module)):
        return devices
    raise AuditError(
        f"The mesh {mesh} has {on_mesh} devices and the program was compiled for {devices}. "
        "Give the mesh that it was compiled for; text without num_partitions is not partitioned."
    )


def _has_slices(module: Module) -> bool:
    return any(found.opcode == "send" for _, found in module.find("_xla_megascale"))


def _axes(mesh: Any) -> dict[str, int]:
    """Axis sizes in mesh order out of a mapping, a jax Mesh, or something with such a mapping."""
    if isinstance(mesh, str):
        mesh = _parsed_axes(mesh)
    candidates = (mesh, getattr(mesh, "shape", None), getattr(mesh, "axes", None))
    axes = next((dict(found) for found in candidates if isinstance(found, Mapping)), None)
    if not axes:
        raise AuditError(
            f"mesh={mesh!r} names no axes. Give a mapping such as {{'data': 2, 'tensor': 4}}, "
            "a text such as 'data=2,tensor=4', or a jax Mesh."
        )
    for name, size in axes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 1:
            raise AuditError(
                f"mesh axis {name!r} has size {size!r}: names are strings, sizes positive integers."
            )
    if math.prod(axes.values()) > MAX_DEVICES:
        raise AuditError(f"mesh={axes} has more than {MAX_DEVICES} devices.")
    return axes


def _parsed_axes(text: str) -> dict[str, int]:
    """'dp=2,tp=4' as a mapping; any names, since the program is anybody's."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s=,]+)\s*=\s*([0-9]{1,7})\s*", part)
        if match is None or match[1] in axes:
            raise AuditError(
                f"{part.strip()[:40]!r} in mesh={text[:80]!r} is no axis of its own; write "
                "name=size, each name once, slowest links first: 'dp=2,tp=4'."
            )
        axes[match[1]] = int(match[2])
    return axes


def _compiled(thing: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from jax import stages

    if isinstance(thing, (stages.Compiled, stages.Lowered)):
        if args or kwargs:
            raise AuditError("A Lowered or Compiled already has its arguments; give none.")
        return thing.compile() if isinstance(thing, stages.Lowered) else thing
    if isinstance(thing, (bytes, bytearray)) or not callable(getattr(thing, "lower", None)):
        raise AuditError(
            f"{type(thing).__name__!r} cannot be audited. Give a jitted function (jax.jit(f)) with "
            "its arguments, a Lowered, a Compiled, HLO text, or the path of such text."
        )
    if not args and not kwargs:
        try:
            return thing.lower().compile()
        except (TypeError, ValueError) as error:
            raise AuditError(
                f"{getattr(thing, '__name__', 'The function')} cannot be compiled without "
                f"arguments. Give arrays or jax.ShapeDtypeStructs after it. ({_first_line(error)})"
            ) from error
    return thing.lower(*args, **kwargs).compile()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _shardings(compiled: Any) -> list[Any]:
    import jax

    try:
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    except (AttributeError, NotImplementedError, RuntimeError):
        return []  # compiled by a plug-in that does not tell
    return [leaf for leaf in leaves if isinstance(leaf, jax.sharding.Sharding)]


def _own_mesh(shardings: list[Any]) -> dict[str, int] | None:
    """The mesh of the program's own shardings, when they all speak of the same one."""
    shapes = [dict(sharding.mesh.shape) for sharding in shardings if hasattr(sharding, "mesh")]
    same = shapes and all(list(shape.items()) == list(shapes[0].items()) for shape in shapes)
    return (shapes[0] or None) if same else None


def _as_compiled(memory: Memory, compiled: Any) -> Memory:
    """What the text tells, with the totals of XLA's own analysis where it has one."""
    stats = compiled.memory_analysis()
    if stats is None:
        return memory
    return replace(
        memory,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        peak_bytes=getattr(stats, "peak_memory_in_bytes", None),
    )


def _checked_text(text: str) -> str:
    if len(text) > MAX_TEXT_BYTES:
        raise _too_large("The text")
    return text


def _file_text(path: Path) -> str:
    if path.suffix == ".pb":
        raise AuditError(f"{path} is a protocol buffer. Give the .txt that XLA writes beside it.")
    try:
        if path.is_dir():
            raise AuditError(
                f"{path} is a folder. Give one text file of it, *after_optimizations.txt."
            )
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped:
                with gzip.open(raw) as stream:
                    return _stream_text(stream.read, path)
            return _stream_text(raw.read, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AuditError(f"{path} is a damaged .gz file ({error}). Copy it again.") from error
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error.strerror or error}.") from error


def _stream_text(read: Callable[[int], bytes], path: Path) -> str:
    """All of it, as text, with a limit."""
    chunks = []
    total = 0
    while chunk := read(_CHUNK):
        total += len(chunk)
        if total > MAX_TEXT_BYTES:
            raise _too_large(str(path))
        if b"\0" in chunk:
            raise AuditError(f"{path} is binary. Give HLO text, as compiled.as_text() prints it.")
        chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace")


def _too_large(what: str) -> AuditError:
    return AuditError(
        f"{what} has more than {MAX_TEXT_BYTES >> 20} MiB. Print HLO without large constants, or "
        "scan over layers."
    )
