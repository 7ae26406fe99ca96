"""Random requests on replicas and on prefill and decode pools, each answer against the reference.

    .venv/bin/python experiments/fleets.py [--num-requests 200] [--only experts]

Each row serves the same requests as `experiments/serving.py`, with caches too small for all slots,
and loses a worker on the way. `wrong` counts answers that are not those of the same request alone,
on one device, without a cache. Hand-overs assert that they sent the bytes of the closed form.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from serving import MODELS, some_params, some_requests

from jaxpar import MeshSpec, use_cpu_devices
from jaxpar.serve.disaggregation import Disaggregated
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.reference import Reference
from jaxpar.serve.replicas import Replicas
from jaxpar.serve.scheduler import Admission, Arrivals
from jaxpar.serve.workers import Fleet


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row. meshes: of each replica, or of prefill and decode workers, each with how many."""

    model: str = "dense"
    meshes: tuple[tuple[str, int], ...]
    lost: str
    admission: Admission = "preempt"

    def fleet(self) -> Fleet:
        config = MODELS[self.model]
        plans = [
            ServePlan(
                mesh=MeshSpec.parse(mesh), num_slots=4, max_seq_len=64, block_len=4, num_blocks=32,
                chunk_len=16, compute_dtype="float32",
            )
            for mesh, _ in self.meshes
        ]  # fmt: skip
        params = some_params(config)
        if len(plans) == 1:
            return Replicas(config, plans[0], params, num_replicas=self.meshes[0][1],
                            admission=self.admission)  # fmt: skip
        (_, num_prefill), (_, num_decode) = self.meshes
        return Disaggregated(
            config, params, prefill=plans[0], decode=plans[1], num_prefill=num_prefill,
            num_decode=num_decode, admission=self.admission,
        )  # fmt: skip


SETTINGS = (
    Setting(meshes=(("tensor=2", 4),), lost="replica 2"),
    Setting(meshes=(("context=2,tensor=2", 2),), lost="replica 0", admission="queue"),
    Setting(meshes=(("tensor=4", 1), ("tensor=2", 2)), lost="decode 1"),
    Setting(meshes=(("tensor=1", 2), ("tensor=4", 1)), lost="prefill 0"),
    Setting(meshes=(("context=2,tensor=2", 1), ("tensor=2", 2)), lost="decode 0",
            admission="queue"),
    Setting(model="experts", meshes=(("tensor=2", 2), ("pipe=2", 2)), lost="prefill 1"),
)  # fmt: skip


def serve(fleet: Fleet, num_requests: int, lost: str) -> tuple[list[tuple[int, ...]], int]:
    """Answers, and steps that were taken; the worker is lost a third of the way."""
    coming, numbers, num_steps = Arrivals(some_requests(num_requests)), list[int](), 0
    while coming or not fleet.is_idle:
        for _, request in coming.due(num_steps):
            numbers.append(fleet.submit(request))
            if len(numbers) == num_requests // 3:
                fleet.lose(lost)
        fleet.step()
        num_steps += 1
    return [fleet.answer(number) for number in numbers], num_steps


def main(
    num_requests: Annotated[int, typer.Option(min=3, help="Requests of each row.")] = 200,
    only: Annotated[str, typer.Option(help="Rows whose model or lost worker has this.")] = "",
) -> None:
    use_cpu_devices(8)
    columns = ("model", "on", "when full", "lost", "wrong", "steps", "preempted", "sent", "seconds")
    table, num_wrong = Table(*columns), 0
    wanted: dict[str, list[tuple[int, ...]]] = {}
    for setting in SETTINGS:
        if only not in setting.model + setting.lost:
            continue
        if setting.model not in wanted:
            config = MODELS[setting.model]
            reference = Reference(config, some_params(config), 64)
            requests = [request for _, request in some_requests(num_requests)]
            wanted[setting.model] = [reference(request).tokens for request in requests]
        began = time.perf_counter()
        fleet = setting.fleet()
        answers, num_steps = serve(fleet, num_requests, setting.lost)
        wrong = sum(a != b for a, b in zip(answers, wanted[setting.model], strict=True))
        num_wrong += wrong
        on = " → ".join(f"{num} × {mesh}" for mesh, num in setting.meshes)
        cells = (setting.model, on, setting.admission, setting.lost, f"{wrong}", f"{num_steps}",
                 f"{fleet.num_preempted}", f"{fleet.handover_bytes:,} B",
                 f"{time.perf_counter() - began:.0f}")  # fmt: skip
        print(*cells, flush=True)
        table.add_row(*cells)
    Console(width=120).print(table)
    if num_wrong:
        raise SystemExit(f"{num_wrong} answers differ")


if __name__ == "__main__":
    typer.run(main)
