"""`audit(thing)`: from anything that names a compiled program to an `Audit`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.audit.collect import Collector
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import execution
from jaxpar.audit.files import checked_text, file_text
from jaxpar.audit.findings import findings
from jaxpar.audit.groups import MAX_DEVICES
from jaxpar.audit.integrity import contradictions
from jaxpar.audit.memory import memory as memory_of
from jaxpar.audit.overlap import Overlap, exposed_by_axes, overlaps
from jaxpar.audit.reader import MAX_PROBLEMS, MAX_READ, Module, no_collection, read_hlo
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Audit, Finding, Memory, Program
from jaxpar.audit.skeleton import decided
from jaxpar.compat import compiled_text
from jaxpar.errors import AuditError, is_whole, shown
from jaxpar.hardware import Chip, chip_of
from jaxpar.hardware import chip as chip_named

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def audit(
    thing: Any,
    *args: Any,
    mesh: Any = None,
    chip: str | Chip | None = None,
    devices_per_host: int | None = None,
    module: str | None = None,
    stage: str = "final",
    **kwargs: Any,
) -> Audit:
    """What `thing` communicates once compiled. Nothing is run.

    `thing` is a jitted function with its arguments (arrays or `jax.ShapeDtypeStruct`s), a Lowered,
    a Compiled, HLO text, or a path: HLO text (`.txt`, `.hlo`, or `.gz` of it), a serialized module
    (`.pb`), or a folder that XLA dumped into, where `module` names one of several modules and
    `stage` is "final" or "partitioned" (right after the partitioner).
    `mesh` names the axes: a mapping of axis to size in mesh order, a text such as "dp=2,tp=4", a
    jax Mesh, or anything whose `shape` or `axes` is such a mapping. Without one, the mesh of the
    program's own shardings is used where it has one; else axes are named by size and stride, and
    notes say so.
    `chip`, one of `jaxpar.hardware`, is what times are estimated for, and with them how much of
    asynchronous communication is exposed; a Compiled for such a chip says so itself.
    `devices_per_host` lets the findings tell which groups leave a host.

    Raises AuditError for what is no compiled program, is not partitioned yet, is damaged beyond
    reading, or does not fit the mesh, with file and line where a line is to blame. Text with
    something missing gives `complete=False`.
    """
    axes = None if mesh is None else _axes(mesh)
    if isinstance(chip, str):
        chip = chip_named(chip)
    if devices_per_host is not None and (not is_whole(devices_per_host) or devices_per_host < 1):
        raise AuditError(f"devices_per_host={shown(devices_per_host)} must be a positive integer.")
    given = _Given(mesh=axes, chip=chip, devices_per_host=devices_per_host)
    if isinstance(thing, (str, os.PathLike)):
        if args or kwargs:
            raise AuditError("A text or path takes no further arguments; give the function itself.")
        if isinstance(thing, str) and ("\n" in thing or thing.startswith("HloModule")):
            return _audit(checked_text(thing), given, "line ")
        path, text = file_text(Path(thing), module=module, stage=stage)
        return _audit(text, given, f"{path}:")
    compiled = _compiled(thing, args, kwargs)
    printed = compiled_text(compiled)
    if not printed:
        raise AuditError(
            "This Compiled shows no HLO text (its backend keeps none). "
            "Compile with xla_dump_to and audit the file that XLA writes."
        )
    return _audit(checked_text(printed), _with_own(given, compiled), "line ", compiled)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What is known about a program beside its text."""

    mesh: dict[str, int] | None
    chip: Chip | None
    devices_per_host: int | None
    platform: str | None = None


def _with_own(given: _Given, compiled: Any) -> _Given:
    """What the program's own shardings and devices tell, where nobody said otherwise."""
    shardings = _shardings(compiled)
    given = replace(given, mesh=given.mesh or _own_mesh(shardings))
    devices = [device for sharding in shardings[:1] for device in sharding.device_set]
    if not devices:
        return given
    platform = devices[0].platform
    kind = chip_of(devices[0].device_kind)
    hosts = len({device.process_index for device in devices})
    return replace(
        given,
        platform=_PLATFORMS.get(platform, platform),
        chip=given.chip or (None if kind is None else chip_named(kind)),
        devices_per_host=given.devices_per_host or (len(devices) // hosts if hosts > 1 else None),
    )


def _audit(text: str, given: _Given, place: str, compiled: Any = None) -> Audit:
    try:
        with no_collection():
            return _read_and_judged(text, given, compiled)
    except AuditError as error:
        if error.line is None:
            raise
        raise AuditError(f"{place}{error.line}: {error}") from error


def _read_and_judged(text: str, given: _Given, compiled: Any) -> Audit:
    reading, problems = read(
        text, given.mesh, platform=given.platform, devices_per_host=given.devices_per_host
    )
    beside = overlaps(reading, given.chip)
    sites = tuple(map(_with_overlap, reading.sites, beside))
    reading = replace(reading, sites=sites)
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
        mesh=given.mesh,
        collectives=tuple(site.collective for site in sites),
        exposure=exposed_by_axes([site.collective for site in sites], beside),
        memory=memory,
        findings=(*problems, *findings(reading)),
    )


def _with_overlap(site: Site, found: Overlap) -> Site:
    collective = site.collective
    told = (collective.exposed_fraction, collective.num_overlapped, collective.transfer_s)
    if told == (found.exposed_fraction, found.num_overlapped, found.transfer_s):
        return site
    collective = replace(
        collective,
        exposed_fraction=found.exposed_fraction,
        num_overlapped=found.num_overlapped,
        overlapped=found.overlapped,
        transfer_s=found.transfer_s,
    )
    return replace(site, collective=collective)


def read(
    text: str | Iterable[str],
    mesh: dict[str, int] | None,
    *,
    platform: str | None = None,
    devices_per_host: int | None = None,
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
    runs = decided(module, flow, execution(module, flow), num_devices=devices)
    platform = platform or module.platform
    collector = Collector(module, flow, runs, mesh=mesh, devices=devices, platform=platform)
    collector.run()
    missing = [
        *contradictions(module, flow),
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
    module.forget_inert(unless=MAX_READ)
    reading = Reading(
        module=module,
        flow=flow,
        runs=runs,
        sites=tuple(collector.sites),
        mesh=mesh,
        num_devices=devices,
        platform=platform,
        devices_per_host=devices_per_host,
    )
    return reading, [*incomplete, *collector.findings]


def _devices(module: Module, mesh: dict[str, int] | None) -> int | None:
    """How many devices run the module: as it says, or as the mesh has. AuditError if they differ.

    A program over several slices is compiled per slice, so there the mesh may be larger.
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
