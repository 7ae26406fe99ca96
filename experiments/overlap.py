"""Collective matmul beside gather-then-matmul: bytes, operations, time.

    .venv/bin/python experiments/overlap.py
    .venv/bin/python experiments/overlap.py --mesh data=2,tensor=4 --seq-len 512

One training step of a small model on virtual CPU devices. `wire` is what each device sends over
axis tensor, predicted and equal to what the program asks for; `temp` the compiler's temporary
memory; `time` the median of steps that take turns, over the first row's. Devices here share one
processor and a memory: there is nothing to hide behind, so time shows what the pieces cost.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import Corpus, MeshSpec, Plan, TrainStep, expected, preset
from jaxpar.collectives import wire_bytes
from jaxpar.mesh import use_cpu_devices
from jaxpar.tour import default_optimizer

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "gather, scatter": {"sequence": True},
    "unidirectional": {"sequence": True, "overlap": "unidirectional"},
    "bidirectional": {"sequence": True, "overlap": "bidirectional"},
}


def main(
    mesh: str = "tensor=8", batch_size: int = 8, seq_len: int = 256, num_steps: int = 5
) -> None:
    spec = MeshSpec.parse(mesh)
    use_cpu_devices(spec.num_devices)
    config = preset("tiny")
    batch = Corpus.standard_library().batch(0, batch_size=batch_size, seq_len=seq_len)
    runs: dict[str, tuple[TrainStep, Any, Any]] = {}
    for name, fields in WAYS.items():
        plan = Plan(mesh=spec, batch_size=batch_size, seq_len=seq_len, **fields)
        step = TrainStep(config=config, plan=plan, optimizer=default_optimizer())
        compiled = step.jitted.lower(*step.abstract_inputs).compile()
        state, _ = compiled(step.init(), step.place(batch))
        runs[name] = step, compiled, state

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_steps):
        for name, (step, compiled, state) in runs.items():
            placed = step.place(batch)
            start = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, placed))
            seconds[name].append(time.perf_counter() - start)
            runs[name] = step, compiled, state

    table = Table(title=f"{config.name} on {mesh}, bfloat16", title_justify="left")
    for column in ("way", "executions", "wire", "temp", "time"):
        table.add_column(column, justify="left" if column == "way" else "right")
    first = statistics.median(seconds["all-reduce"])
    for name, (step, compiled, _) in runs.items():
        rows = [row for row in expected(config, step.plan) if row.axes == ("tensor",)]
        n = step.plan.size("tensor")
        sent = sum(r.count * wire_bytes(r.kind, r.payload_bytes, n) for r in rows)
        temp = compiled.memory_analysis().temp_size_in_bytes
        table.add_row(
            name,
            f"{sum(row.count for row in rows)}",
            f"{sent / 2**20:.2f} MiB",
            f"{temp / 2**20:.2f} MiB",
            f"{statistics.median(seconds[name]) / first:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
