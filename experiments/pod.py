"""Llama 3 on thousands of chips: what its step communicates and needs, compiled on this machine.

    .venv/bin/python experiments/pod.py
    .venv/bin/python experiments/pod.py --only 8b-fsdp-tensor --target v5p:4x4x4
    .venv/bin/python experiments/pod.py --options quick

Needs `pip install "jaxpar[tpu]"`, no TPU. Layers are scanned: a program is as long for 80 of
them as for one, and as long for 4096 chips as for 64. `compile` is the compiler's time and the most
memory it took here; `needs` what a chip needs by XLA's own account; `exposed` the part of the time
on the links during which the schedule has nothing to compute.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import JaxparError, MeshSpec, Plan, preset
from jaxpar.report.text import size
from jaxpar.targets import Cache, Limits, OnTarget, StepOnTarget, Target, compile_for
from jaxpar.targets.cache import default_folder
from jaxpar.targets.options import option_set
from jaxpar.targets.tour import TargetRow, kinds_on_target
from jaxpar.tour import default_optimizer

SEQ_LEN = 4096
ROWS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "8b-data-tensor": ("llama-3-8b", {"data": 0, "tensor": 8}, {"sequence": True}),
    "8b-fsdp-tensor": ("llama-3-8b", {"fsdp": 0, "tensor": 8}, {"sequence": True, "zero": 3}),
    "70b-hsdp-tensor": (
        "llama-3-70b",
        {"data": 0, "fsdp": 32, "tensor": 8},
        {"sequence": True, "zero": 3},
    ),
    "70b-pipe-tensor": (
        "llama-3-70b",
        {"pipe": 8, "fsdp": 0, "tensor": 8},
        {"sequence": True, "zero": 1, "schedule": "1f1b", "num_microbatches": 16},
    ),
}
"""Model, axes (0: what the target has left), fields of the plan."""


def plan(name: str, target: Target) -> Plan:
    """A row on all devices of a target, with one sequence for each rank of data or fsdp."""
    _, axes, fields = ROWS[name]
    known = 1
    for size_ in axes.values():
        known *= max(1, size_)
    axes = {axis: size_ or max(1, target.num_devices // known) for axis, size_ in axes.items()}
    mesh = MeshSpec(axes=axes)
    batch_size = mesh.size("data") * mesh.size("fsdp") * fields.get("num_microbatches", 1)
    return Plan(mesh=mesh, batch_size=batch_size, seq_len=SEQ_LEN, remat="full", **fields)


def cells(name: str, result: OnTarget, seconds: float) -> list[str]:
    compiled = result.compiled
    spare = result.available_bytes - compiled.device_bytes
    kinds = [row for row in kinds_on_target(result) if row.transfer_s]
    total = sum(row.transfer_s or 0.0 for row in kinds)
    exposed = [(row.exposed_fraction, row.transfer_s or 0.0) for row in kinds]
    known = all(fraction is not None for fraction, _ in exposed)
    hidden = sum((fraction or 0.0) * time_s for fraction, time_s in exposed) / total if total else 0
    return [
        name,
        str(result.plan.mesh),
        f"{compiled.seconds:.0f} s ({compiled.cpu_s:.0f} s of processor), "
        f"{compiled.peak_rss_bytes / 2**30:.1f} GiB" + (" (cached)" if compiled.from_cache else ""),
        f"{seconds:.0f} s",
        f"{size(compiled.device_bytes)}, {'fits' if spare >= 0 else 'too much'}",
        size(sum(row.wire_bytes or 0 for row in kinds)),
        f"{hidden:.0%}" if known else "?",
        "yes" if result.changes.agrees else "no",
    ]


def main(
    target: str = "v5p:16x16x16",
    only: Annotated[list[str] | None, typer.Option(help="A row; may be repeated.")] = None,
    options: Annotated[str, typer.Option(help="A set of jaxpar/targets/options.toml.")] = "none",
    memory_limit: Annotated[float, typer.Option(help="GiB of this machine.")] = 6.0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    hardware = Target.parse(target)
    taken = {} if options == "none" else option_set(options, hardware)
    limits = Limits(memory_bytes=round(memory_limit * 2**30))
    table = Table(title=f"Llama 3 on {target}, {SEQ_LEN} tokens a sequence", title_justify="left")
    columns = ("row", "mesh", "compile", "in all", "needs", "wire", "exposed", "= closed form")
    for column in columns:
        table.add_column(column, no_wrap=True)
    rows = []
    for name in only or ROWS:
        started = time.perf_counter()
        step = StepOnTarget(
            config=preset(ROWS[name][0]), plan=plan(name, hardware), optimizer=default_optimizer()
        )
        try:
            result = compile_for(
                step, hardware, options=taken, limits=limits, cache=Cache(default_folder())
            )
        except JaxparError as error:
            table.add_row(name, str(step.plan.mesh), str(error))
            rows.append(TargetRow(strategy=name, plan=step.plan, result=None, error=error))
        else:
            table.add_row(*cells(name, result, time.perf_counter() - started))
            kinds = kinds_on_target(result)
            rows.append(TargetRow(strategy=name, plan=step.plan, result=result, kinds=kinds))
        print(name, f"{time.perf_counter() - started:.0f} s", flush=True)
    Console(width=200).print(table)
    if json_path:
        json_path.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
