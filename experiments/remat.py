"""Bytes a layer keeps under each choice: published, by this model's formula, and in the program.

    .venv/bin/python experiments/remat.py
    .venv/bin/python experiments/remat.py --mesh tensor=4 --sequence --seq-len 1024

`GPT` is Korthikanti et al. 2022, table 2; `formula` that of this project's layers; `kept` what the
traced step hands from its forward to its backward, which has to be the same; `temp` how much the
compiler's temporary memory grows per layer, on a CPU: by that and by the layer's gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, ModelConfig, Plan, TrainStep
from jaxpar.mesh import use_cpu_devices
from jaxpar.predict.activations import gpt_layer_bytes, kept, layer_bytes
from jaxpar.tour import default_optimizer

MODEL = ModelConfig(
    name="remat", num_layers=3, embed=256, num_heads=8, num_kv_heads=8, head_dim=32,
    mlp_hidden=1024, vocab=512, max_seq_len=4096, mlp="gelu",
)  # fmt: skip


def measured(config: ModelConfig, plan: Plan) -> tuple[int, int]:
    """Bytes kept per layer in the jaxpr, and temporary bytes of the compiled step."""
    step = TrainStep(config=config, plan=plan, optimizer=default_optimizer())
    traced = step.jitted.trace(*step.abstract_inputs)
    compiled: Any = traced.lower().compile()
    in_jaxpr = sum(array.num_bytes for array in kept(traced.jaxpr, config.num_layers))
    return in_jaxpr, compiled.memory_analysis().temp_size_in_bytes


def main(
    mesh: str = "tensor=2", batch_size: int = 2, seq_len: int = 512, sequence: bool = False
) -> None:
    spec = MeshSpec.parse(mesh)
    use_cpu_devices(spec.num_devices)
    table = Table(title=f"KiB per layer and device on {mesh}, bfloat16", title_justify="left")
    for column in ("remat", "GPT", "formula", "kept", "temp"):
        table.add_column(column, justify="left" if column == "remat" else "right")
    for choice in ("none", "selective", "dots", "full"):
        plan = Plan(
            mesh=spec, batch_size=batch_size, seq_len=seq_len, sequence=sequence, remat=choice
        )
        few, temp = measured(MODEL, plan)
        _, more_temp = measured(dataclasses.replace(MODEL, num_layers=7), plan)
        cells = [
            None if choice == "dots" else gpt_layer_bytes(MODEL, plan),
            sum(layer_bytes(MODEL, plan).values()),
            few,
            (more_temp - temp) / 4,
        ]
        table.add_row(choice, *("" if c is None else f"{c / 1024:,.0f}" for c in cells))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
