"""How much communication a compiled schedule hides, by compiler options and program forms.

    .venv/bin/python experiments/overlap_on_targets.py --target v5p:4x4x4
    .venv/bin/python experiments/overlap_on_targets.py --target h100:1x8 --only fsdp
    .venv/bin/python experiments/overlap_on_targets.py --only fsdp --options sparse-core-torus

Needs `pip install "jaxpar[tpu,cuda13]"`, no device. Llama 3 8B, scanned layers, 4096 tokens a
sequence. `hidden` is the part of the time on the links during which the schedule has something to
compute, weighted by that time: on TPU by XLA's own estimated cycles, on GPU by FLOPs and bytes at
the chip's peaks, so that a real GPU, which computes more slowly, hides more. A form is asked about
one axis; what goes over other axes is not in its rows. Option sets are those of
jaxpar/targets/options.toml.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import JaxparError, MeshSpec, Plan, preset
from jaxpar.report.text import size
from jaxpar.targets import Cache, StepOnTarget, Target, compile_for
from jaxpar.targets.cache import default_folder
from jaxpar.targets.options import option_sets
from jaxpar.targets.tour import kinds_on_target
from jaxpar.tour import default_optimizer

SEQ_LEN = 4096
_RING = {"sequence": True, "overlap": "unidirectional"}
_BOTH_WAYS = {"sequence": True, "overlap": "bidirectional"}
FORMS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "fsdp": ("fsdp", {"fsdp": 0}, {"zero": 3}),
    "fsdp, prefetch": ("fsdp", {"fsdp": 0}, {"zero": 3, "prefetch": True}),
    "hsdp": ("fsdp", {"data": 4, "fsdp": 0}, {"zero": 3}),
    "tensor=8+sequence": ("tensor", {"data": 0, "tensor": 8}, {"sequence": True}),
    "tensor=4+sequence": ("tensor", {"data": 0, "tensor": 4}, {"sequence": True}),
    "tensor=8, ring matmul": ("tensor", {"data": 0, "tensor": 8}, {**_RING, "remat": "selective"}),
    "tensor=4, ring matmul": ("tensor", {"data": 0, "tensor": 4}, {**_RING, "remat": "dots"}),
    "tensor=4, both ways": (
        "tensor",
        {"data": 0, "tensor": 4},
        {**_BOTH_WAYS, "remat": "selective"},
    ),
    "fsdp, tensor=2, ring matmul": (
        "tensor",
        {"fsdp": 0, "tensor": 2},
        {**_RING, "zero": 3, "remat": "dots"},
    ),
}
"""The axis that is asked about, axes (0: what the target has left), fields of the plan."""


def plan(form: str, target: Target, sequences_per_rank: int) -> Plan:
    """A form on all devices of a target; raises JaxparError where it has too few."""
    asked, sizes, fields = FORMS[form]
    left = max(1, target.num_devices // math.prod(size or 1 for size in sizes.values()))
    axes = {axis: size or left for axis, size in sizes.items()}
    mesh = MeshSpec(axes={axis: size for axis, size in axes.items() if size > 1 or axis == asked})
    ranks = mesh.size("fsdp") * mesh.size("data")
    return Plan(
        mesh=mesh,
        batch_size=ranks * sequences_per_rank,
        seq_len=SEQ_LEN,
        **{"remat": "full", **fields},
    )


def main(
    target: str = "v5p:4x4x4",
    only: Annotated[list[str] | None, typer.Option(help="A form; may be repeated.")] = None,
    options: Annotated[list[str] | None, typer.Option(help="An option set; or none.")] = None,
    sequences_per_rank: int = 2,
    model: str = "llama-3-8b",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    hardware = Target.parse(target)
    sets = {"none": {}, **option_sets(hardware)}
    table = Table(title=f"{model} on {target}, {SEQ_LEN} tokens", title_justify="left")
    for column in ("form", "options", "kind", "links", "wire", "time on links", "async", "hidden"):
        table.add_column(column, no_wrap=True)
    rows = []
    for form in only or FORMS:
        for name in options or sets:
            try:
                step = StepOnTarget(
                    config=preset(model),
                    plan=plan(form, hardware, sequences_per_rank),
                    optimizer=default_optimizer(),
                )
                result = compile_for(
                    step, hardware, options=sets[name], cache=Cache(default_folder())
                )
            except JaxparError as error:
                table.add_row(form, name, str(error))
                continue
            kinds = [row for row in kinds_on_target(result) if FORMS[form][0] in row.axes]
            for i, row in enumerate(kinds):
                told = {
                    "form": form,
                    "options": name,
                    "mesh": dict(step.plan.mesh.named_axes),
                    **{**vars(row), "axes": list(row.axes)},
                    "compile_s": result.compiled.seconds,
                    "compile_cpu_s": result.compiled.cpu_s,
                    "compile_peak_bytes": result.compiled.peak_rss_bytes,
                    "device_bytes": result.compiled.device_bytes,
                    "agrees": result.changes.agrees,
                }
                rows.append(told)
                hidden = row.exposed_fraction
                table.add_row(
                    form if i == 0 else "",
                    name if i == 0 else "",
                    row.kind,
                    row.links,
                    size(row.wire_bytes),
                    "?" if row.transfer_s is None else f"{row.transfer_s * 1e3:.1f} ms",
                    f"{row.num_async} of {row.num_operations}",
                    "?" if hidden is None else f"{1 - hidden:.0%}",
                )
            total = sum(row.transfer_s or 0.0 for row in kinds)
            exposed = sum((row.transfer_s or 0) * (row.exposed_fraction or 0) for row in kinds)
            part = f"{1 - exposed / total:.0%}" if total else "?"
            compiled = result.compiled
            took = f"{compiled.seconds:.0f} s, needs {size(compiled.device_bytes)}"
            table.add_row(
                "", str(step.plan.mesh), "all", took, "", f"{total * 1e3:.1f} ms", "", part
            )
            print(form, name, part, took, flush=True)
    Console(width=180).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
