"""Training, prefill and decode of one model side by side: what each communicates and waits for.

Small models are compiled for CPU devices and audited, and the closed form has to agree; of large
ones the closed form is all there is, unless there is a target, for which all are compiled. Times
are the lower bounds of estimate.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxpar.audit.asked import asked
from jaxpar.audit.compare import agree, compare
from jaxpar.audit.source import audit
from jaxpar.collectives import wire_bytes
from jaxpar.hardware import Chip
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.predict.volume import expected as expected_of_training
from jaxpar.serve.closed_form import expected
from jaxpar.serve.estimate import (
    Estimate,
    Phase,
    beside,
    estimate_serving,
    estimate_training,
)
from jaxpar.serve.plan import KINDS, Kind, ServePlan
from jaxpar.serve.step import ServeStep
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Expected
from jaxpar.targets.on_target import OnTarget
from jaxpar.train import TrainStep

MOST_COMPILED = 5_000_000
"""Parameters up to which a model is compiled here."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A kind of collective over some axes: executions and wire bytes of one step and device, and
    what can run beside it."""

    kind: str
    axes: tuple[str, ...]
    count: int
    wire_bytes: int
    beside: str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One phase of one model. shares: most bytes first. num_tokens: of a step, all devices
    together. agrees: whether predicted = asked = compiled; None where nothing was compiled.
    exposed_part: of what a target's compiler scheduled, see OnTarget; None without one."""

    model: str
    phase: Phase
    mesh: MeshSpec
    num_tokens: int
    shares: tuple[Share, ...]
    estimate: Estimate
    agrees: bool | None
    exposed_part: float | None = None
    changes: tuple[str, ...] = ()

    @property
    def bytes_per_megaflop(self) -> float:
        """Sent, for each million of floating-point operations of a device."""
        return self.estimate.wire_bytes / self.estimate.flops * 1e6

    @property
    def hidden_part(self) -> float:
        """Of the bytes sent, those that have something to run beside them."""
        total = sum(share.wire_bytes for share in self.shares)
        hidden = sum(share.wire_bytes for share in self.shares if share.beside)
        return hidden / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        found = self.estimate
        return {
            "model": self.model,
            "phase": self.phase,
            "mesh": self.mesh.named_axes,
            "num_tokens": self.num_tokens,
            "agrees": self.agrees,
            "communication": [
                {"kind": share.kind, "axes": list(share.axes), "count": share.count,
                 "wire_bytes": share.wire_bytes, "beside": share.beside}
                for share in self.shares
            ],
            "flops": found.flops,
            "wire_bytes": found.wire_bytes,
            "bytes_per_megaflop": self.bytes_per_megaflop,
            "hidden_part": self.hidden_part,
            "exposed_part": self.exposed_part,
            "changes": list(self.changes),
            "compute_s": found.compute_s,
            "memory_s": found.memory_s,
            "link_s": found.link_s,
            "step_s": found.step_s,
            "bound": found.bound,
        }  # fmt: skip


Compile = Callable[[TrainStep | ServeStep, Phase], OnTarget]
"""For a target."""


def compared(
    config: ModelConfig, chip: Chip, *, num_devices: int = 8, there: Compile | None = None
) -> list[Row]:
    """Training, prefill and decode of `config` on as many devices; of 8, tensor=4, or with experts
    expert=4. Raises PlanError where the model does not divide."""
    is_small = config.num_parameters <= MOST_COMPILED
    training, serving = plans(config, num_devices, is_small=is_small, on_cpu=there is None)
    rows = [_train(config, training, chip, is_small, there)]
    return rows + [_serve(config, serving, kind, chip, is_small, there) for kind in KINDS]


def plans(
    config: ModelConfig, num_devices: int, *, is_small: bool, on_cpu: bool = True
) -> tuple[Plan, ServePlan]:
    """How a model is trained and served in the comparison: the same axes over the same devices,
    but for weights that training splits over the batch's axis, too."""
    outer, inner = max(1, num_devices // 4), min(4, num_devices)
    if config.num_experts:
        trained = served = MeshSpec(axes={"expert": inner, "tensor": outer})
    else:
        trained = MeshSpec(axes={"fsdp": outer, "tensor": inner})
        served = MeshSpec(axes={"data": outer, "tensor": inner})
    dtype: Any = "float32" if is_small and on_cpu else "bfloat16"  # CPUs send bfloat16 as float32
    seq_len = min(config.max_seq_len, 64 if is_small else 4096)
    training = Plan(mesh=trained, batch_size=2 * num_devices, seq_len=seq_len, compute_dtype=dtype)
    serving = ServePlan(
        mesh=served,
        num_slots=8 * num_devices,
        max_seq_len=seq_len,
        chunk_len=seq_len // 2,
        compute_dtype=dtype,
    )
    return training, serving


def _train(
    config: ModelConfig, plan: Plan, chip: Chip, is_small: bool, there: Compile | None = None
) -> Row:
    rows, found = expected_of_training(config, plan), _Found()
    if is_small or there:
        import optax

        step = TrainStep(config=config, plan=plan, optimizer=optax.adamw(1e-3))
        if there:
            found = _Found.there(there(step, "train"))
        else:
            traced = step.jitted.trace(*step.abstract_inputs)
            found = _Found(agrees=_agrees(rows, traced, plan.mesh))
    return Row(
        model=config.name,
        phase="train",
        mesh=plan.mesh,
        num_tokens=plan.batch_size * plan.seq_len,
        shares=shares(rows, plan.mesh, plan.num_microbatches),
        estimate=estimate_training(config, plan, chip),
        **vars(found),
    )


def _serve(
    config: ModelConfig,
    plan: ServePlan,
    kind: Kind,
    chip: Chip,
    is_small: bool,
    there: Compile | None = None,
) -> Row:
    rows, found = expected(config, plan, kind), _Found()
    if is_small or there:
        step = ServeStep(config=config, plan=plan)
        if there:
            found = _Found.there(there(step, kind))
        else:
            traced = step.jitted[kind].trace(*step.abstract_inputs(kind))
            found = _Found(agrees=_agrees(rows, traced, plan.mesh))
    return Row(
        model=config.name,
        phase=kind,
        mesh=plan.mesh,
        num_tokens=plan.num_rows(kind) * plan.row_len(kind),
        shares=shares(rows, plan.mesh, plan.num_parts(kind)),
        estimate=estimate_serving(config, plan, kind, chip),
        **vars(found),
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What compiling a step has told."""

    agrees: bool | None = None
    exposed_part: float | None = None
    changes: tuple[str, ...] = ()

    @classmethod
    def there(cls, found: OnTarget) -> _Found:
        told = [str(change) for over in found.changes.over for change in over.changes]
        return cls(
            agrees=found.changes.agrees,
            exposed_part=found.exposed_part,
            changes=tuple(dict.fromkeys(told)),
        )


def _agrees(rows: list[Expected], traced: Any, mesh: MeshSpec) -> bool:
    """Predicted = asked = compiled, for a traced program."""
    compiled = audit(traced.lower().compile(), mesh=mesh.all_axes)
    return agree(compare(rows, asked(traced.jaxpr), compiled))


def shares(rows: Iterable[Expected], mesh: MeshSpec, num_parts: int) -> tuple[Share, ...]:
    """The closed form summed by kind, axes and what can run beside it, most bytes first."""
    totals: dict[tuple[str, tuple[str, ...], str | None], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        group_size = math.prod(mesh.size(axis) for axis in row.axes)
        total = totals[row.kind, row.axes, beside(row, num_parts=num_parts)]
        total[0] += row.count
        total[1] += row.count * wire_bytes(row.kind, row.payload_bytes, group_size)
    found = [
        Share(kind=kind, axes=axes, count=count, wire_bytes=sent, beside=what)
        for (kind, axes, what), (count, sent) in totals.items()
    ]
    return tuple(sorted(found, key=lambda share: -share.wire_bytes))
