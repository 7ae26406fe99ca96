"""How much communication a compiled schedule hides, by compiler options and program forms.

    .venv/bin/python experiments/overlap_on_targets.py --target v5p:4x4x4
    .venv/bin/python experiments/overlap_on_targets.py --target h100:1x8 --only fsdp

Needs `pip install "jaxpar[tpu,cuda13]"`, no device. Llama 3 8B, scanned layers, 4096 tokens a
sequence. `hidden` is the part of the time on the links during which the schedule has something to
compute, weighted by that time: on TPU by XLA's own estimated cycles, on GPU by FLOPs and bytes at
the chip's peaks, so that a real GPU, which computes more slowly, hides more. `compute` and `links`
are those sums, as far as the schedule tells. Option sets are those of jaxpar/targets/options.toml.
"""

from __future__ import annotations

import json
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
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"zero": 3}),
    "fsdp, prefetch": ("fsdp", {"zero": 3, "prefetch": True}),
    "tensor+sequence": ("tensor", {"sequence": True}),
    "tensor+sequence, ring matmul": ("tensor", {"sequence": True, "overlap": "unidirectional"}),
    "tensor+sequence, both ways": ("tensor", {"sequence": True, "overlap": "bidirectional"}),
}
"""The axis that is asked about, and fields of the plan."""


def plan(form: str, target: Target, sequences_per_rank: int) -> Plan:
    """fsdp over all devices; or tensor over 8 of them and data over the rest."""
    axis, fields = FORMS[form]
    num = target.num_devices
    tensor = min(8, num)
    axes = {"fsdp": num} if axis == "fsdp" else {"data": num // tensor, "tensor": tensor}
    mesh = MeshSpec(axes={name: n for name, n in axes.items() if n > 1 or name == axis})
    ranks = mesh.size("fsdp") * mesh.size("data")
    return Plan(
        mesh=mesh,
        batch_size=ranks * sequences_per_rank,
        seq_len=SEQ_LEN,
        remat="full",
        **fields,
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
            step = StepOnTarget(
                config=preset(model),
                plan=plan(form, hardware, sequences_per_rank),
                optimizer=default_optimizer(),
            )
            try:
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
                    **{**vars(row), "axes": list(row.axes)},
                    "compile_s": result.compiled.seconds,
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
            compile_s = f"compiled in {result.compiled.seconds:.0f} s"
            table.add_row("", "", "all", compile_s, "", f"{total * 1e3:.1f} ms", "", part)
            print(form, name, part, compile_s, flush=True)
    Console(width=180).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
