"""The tour on hardware that is not here: every strategy compiled for a target, and audited."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.audit.result import Collective
from jaxpar.errors import JaxparError, OutOfDeviceMemoryError, TargetError
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig, preset
from jaxpar.serve.on_target import compile_serving_for
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.step import ServeStep
from jaxpar.serve.variants import ServingVariant
from jaxpar.strategies.plan import OnMesh, Plan
from jaxpar.targets.cache import Cache
from jaxpar.targets.compiler import Limits, Options, Progress
from jaxpar.targets.on_target import OnTarget, StepOnTarget, compile_for
from jaxpar.targets.target import Target
from jaxpar.tour import chosen, default_optimizer

SCHEMA = "jaxpar.target/1"


@dataclass(frozen=True, kw_only=True)
class KindOnTarget:
    """One kind over the same axes, per step and device: asked for and compiled.

    Counts and bytes are those of the busiest device. wire_bytes: of the compiled program, None
    where a count is not known. links: which it uses. num_async, num_operations: of its operations
    in the program, how many are asynchronous. exposed_fraction: of its time on the chip's links
    (transfer_s), 0 to 1; None where the schedule does not tell.
    """

    kind: str
    axes: tuple[str, ...]
    links: str
    asked_count: int
    asked_bytes: int
    compiled_count: int
    compiled_bytes: int
    wire_bytes: int | None
    num_async: int
    num_operations: int
    exposed_fraction: float | None
    transfer_s: float | None


def kinds_on_target(result: OnTarget) -> list[KindOnTarget]:
    """One row for each (axes, kind) that was asked for or compiled."""
    rows = []
    for over in result.changes.over:
        asked = {it.kind: it for it in over.asked}
        compiled = {it.kind: it for it in over.compiled}
        for kind in {**asked, **compiled}:
            found = [
                it
                for it in result.audit.collectives
                if it.kind == kind
                and (it.axes or (it.axes_note or "irregular groups",)) == over.axes
            ]
            before, after = asked.get(kind), compiled.get(kind)
            seconds, fraction = _exposed(found)
            rows.append(
                KindOnTarget(
                    kind=kind,
                    axes=over.axes,
                    links="; ".join(dict.fromkeys(filter(None, map(result.links, found)))),
                    asked_count=before.count if before else 0,
                    asked_bytes=before.payload_bytes if before else 0,
                    compiled_count=after.count if after else 0,
                    compiled_bytes=after.payload_bytes if after else 0,
                    wire_bytes=_wire(found),
                    num_async=sum(it.is_async for it in found),
                    num_operations=len(found),
                    exposed_fraction=fraction,
                    transfer_s=seconds,
                )
            )
    return rows


def _most(found: Collective) -> int | None:
    """Executions on the device that has most."""
    return max(found.device_counts) if found.device_counts else found.count


def _wire(found: Sequence[Collective]) -> int | None:
    counts = [_most(it) for it in found]
    if any(count is None for count in counts):
        return None
    return sum((count or 0) * it.wire_bytes for count, it in zip(counts, found, strict=True))


def _exposed(found: Sequence[Collective]) -> tuple[float | None, float | None]:
    """Seconds on the links, and the part of them during which nothing is computed."""
    total = exposed = 0.0
    known = True
    for it in found:
        count = _most(it)
        if count is None or it.transfer_s is None:
            return None, None
        total += count * it.transfer_s
        if it.exposed_fraction is None:
            known = False
        else:
            exposed += count * it.transfer_s * it.exposed_fraction
    return total, (exposed / total if total else None) if known else None


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """One strategy: what became of it, or why it could not be compiled."""

    strategy: str
    plan: OnMesh
    result: OnTarget | None
    error: JaxparError | None = None
    kinds: list[KindOnTarget] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.result is not None and self.result.changes.agrees

    def to_json(self) -> dict[str, Any]:
        head = {
            "strategy": self.strategy,
            "mesh": dict(self.plan.mesh.named_axes),
            "agrees": self.agrees,
        }
        if self.result is None:
            memory = _oom(self.error) if isinstance(self.error, OutOfDeviceMemoryError) else None
            return {**head, "error": str(self.error), "memory": memory}
        result, compiled = self.result, self.result.compiled
        largest = result.audit.memory.largest if result.audit.memory else ()
        return {
            **head,
            "error": None,
            "placement": {a: result.placement.told(a) for a in self.plan.mesh.named_axes},
            "kinds": [{**vars(row), "axes": list(row.axes)} for row in self.kinds],
            "changes": result.changes.to_json(),
            "compile_s": compiled.seconds,
            "compile_cpu_s": compiled.cpu_s,
            "compile_peak_bytes": compiled.peak_rss_bytes,
            "from_cache": compiled.from_cache,
            "memory": {
                **compiled.memory,
                "device_bytes": compiled.device_bytes,
                "available_bytes": result.available_bytes,
                "fits": result.fits,
                "largest": [vars(it) for it in largest],
            },
        }


def _oom(error: OutOfDeviceMemoryError) -> dict[str, Any]:
    return {
        "device_bytes": error.used_bytes,
        "available_bytes": error.available_bytes,
        "fits": False,
    }


@dataclass(frozen=True, kw_only=True)
class TargetTour:
    """All rows, and what they were compiled for."""

    target: Target
    model: str
    batch_size: int
    seq_len: int
    options: Mapping[str, Any]
    seconds: float
    rows: list[TargetRow]

    @property
    def is_complete(self) -> bool:
        """Whether every row was compiled, and fits into the memory of a device."""
        return all(row.result is not None and row.result.fits for row in self.rows)

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "target": str(self.target),
            "platform": self.target.platform,
            "num_devices": self.target.num_devices,
            "model": self.model,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "options": dict(self.options),
            "seconds": self.seconds,
            "agrees": self.agrees,
            "rows": [row.to_json() for row in self.rows],
        }


def tour_on_target(
    target: Target,
    *,
    config: ModelConfig | None = None,
    only: Sequence[str] = (),
    batch_size: int = 16,
    seq_len: int = 64,
    options: Options | None = None,
    limits: Limits | None = None,
    cache: Cache | None = None,
    progress: Callable[[str, int, int, str], None] = lambda name, done, total, stage: None,
) -> TargetTour:
    """Compile rows of the tour, in bfloat16, for a target with as many devices as they have.

    Where the target has more, axis data takes them, and the batch grows with it. Raises TargetError
    where no row can be compiled (the compiler is not installed, an option is unknown); what one row
    alone meets is told in that row.
    """
    started = time.perf_counter()
    variants = chosen(only)
    rows: list[TargetRow] = []
    models = [preset(v.model) if v.model else config or preset("tiny") for v in variants]
    for i, (variant, model) in enumerate(zip(variants, models, strict=True)):
        name, told = variant.name, _in_row(progress, variant.name, i, len(variants))
        how: dict[str, Any] = {
            "options": options,
            "limits": limits,
            "cache": cache,
            "progress": told,
        }
        plan: OnMesh
        try:
            if isinstance(variant, ServingVariant):
                plan = served = _more_slots(variant.plan(), target)
                serve_step = ServeStep(config=model, plan=served)
                result = compile_serving_for(serve_step, variant.kind, target, **how)
            else:
                whole = variant.plan(batch_size=batch_size, seq_len=seq_len)
                plan = trained = _larger_batch(whole, target)
                step = StepOnTarget(config=model, plan=trained, optimizer=default_optimizer())
                result = compile_for(step, target, **how)
        except JaxparError as error:
            if type(error) is TargetError:  # of the target, not of this row
                raise
            rows.append(TargetRow(strategy=name, plan=plan, result=None, error=error))
        else:
            kinds = kinds_on_target(result)
            rows.append(TargetRow(strategy=name, plan=plan, result=result, kinds=kinds))
    progress("done", len(variants), len(variants), "")
    return TargetTour(
        target=target,
        model=" and ".join(dict.fromkeys(model.name for model in models)),
        batch_size=batch_size,
        seq_len=seq_len,
        options=dict(options or {}),
        seconds=time.perf_counter() - started,
        rows=rows,
    )


def _in_row(
    progress: Callable[[str, int, int, str], None], name: str, done: int, total: int
) -> Progress:
    def told(stage: str, seconds: float, rss_bytes: int) -> None:
        progress(name, done, total, f"{stage} {seconds:.0f} s, {rss_bytes / 2**30:.1f} GiB")

    return told


def _larger_batch(plan: Plan, target: Target) -> Plan:
    """In bfloat16 on all of the target's devices: with as many replicas as fit."""
    mesh, factor = _stretched(plan.mesh, target)
    batch_size = plan.batch_size * factor
    return replace(plan, mesh=mesh, batch_size=batch_size, compute_dtype="bfloat16")


def _more_slots(plan: ServePlan, target: Target) -> ServePlan:
    """The same for serving: each replica has slots and blocks of its own."""
    mesh, factor = _stretched(plan.mesh, target)
    of_all: dict[str, Any] = {
        name: getattr(plan, name) * factor
        for name in ("num_slots", "num_blocks", "num_prefill_rows")
    }
    return replace(plan, mesh=mesh, compute_dtype="bfloat16", **of_all)


def _stretched(mesh: MeshSpec, target: Target) -> tuple[MeshSpec, int]:
    """The mesh on all of the target's devices, and how many times as many devices it has."""
    axes = mesh.named_axes
    factor, rest = divmod(target.num_devices, mesh.num_devices)
    if factor <= 1 or rest:
        return mesh, 1
    more = {"data": axes.get("data", 1) * factor}
    return MeshSpec(axes={**axes, **more} if "data" in axes else {**more, **axes}), factor
