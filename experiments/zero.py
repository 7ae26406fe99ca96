"""Bytes per parameter and device under each ZeRO stage: the paper's, the closed form's, XLA's.

    .venv/bin/python experiments/zero.py                # float32, as wide as a CPU computes
    .venv/bin/python experiments/zero.py --tpu v5e:2x4  # bfloat16, compiled for TPUs; needs none

The second needs `pip install "jaxpar[tpu]"`, and no TPU. Nothing is run: the model is large, and
its batch tiny, so that activations do not count.

`state` is what the closed form says of weights, gradients and optimizer state (predict/states.py),
`gathered` what a layer's weights add while it runs, `XLA` arguments and temporaries of the compiled
step, all divided by the number of parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, ModelConfig, Plan, TrainStep, audit, expected
from jaxpar.predict.states import states, zero_bytes
from jaxpar.predict.volume import wire_bytes_by_axes
from jaxpar.targets import StepOnTarget, compile_for
from jaxpar.tour import default_optimizer

NUM_DEVICES = 8
SMALL = ModelConfig(
    name="zero-8m", num_layers=32, embed=128, num_heads=4, num_kv_heads=4, head_dim=32,
    mlp_hidden=512, vocab=256, max_seq_len=8,
)  # fmt: skip
LARGE = ModelConfig(
    name="zero-270m", num_layers=16, embed=1024, num_heads=8, num_kv_heads=8, head_dim=128,
    mlp_hidden=4096, vocab=256, max_seq_len=8,
)  # fmt: skip
"""Shards of whole tiles: a TPU pads the last dim of an array to 128."""

CASES: dict[str, dict[str, Any]] = {
    "data": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero2, 4 micro-batches": {"zero": 2, "num_accumulation_steps": 4},
    "fsdp": {"zero": 3},
    "fsdp, kept": {"zero": 3, "reshard_after_forward": False},
    "fsdp, prefetched": {"zero": 3, "prefetch": True},
    "fsdp, 4 layers at once": {"zero": 3, "num_layers_per_gather": 4},
}


def row(name: str, config: ModelConfig, dtype: Any, tpu: str | None) -> dict[str, Any]:
    """One stage: closed forms and what the compiler says, in bytes per device."""
    fields = CASES[name]
    axis = "fsdp" if "zero" in fields else "data"
    plan = Plan(
        mesh=MeshSpec.parse(f"{axis}={NUM_DEVICES}"),
        batch_size=NUM_DEVICES * fields.get("num_accumulation_steps", 1),
        seq_len=8,
        compute_dtype=dtype,
        reduce_dtype=dtype,
        **fields,
    )
    kind = StepOnTarget if tpu else TrainStep
    step = kind(config=config, plan=plan, optimizer=default_optimizer())
    if tpu:
        result = compile_for(step, tpu)
        found, told = result.audit, result.compiled.memory
        arguments, temporaries = told["argument_bytes"], told["temp_bytes"]
    else:
        program = step.jitted.lower(*step.abstract_inputs).compile()
        found, memory = audit(program, mesh=plan.mesh), program.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    closed = states(config, plan)
    return {
        "name": name,
        "paper": zero_bytes(config.num_parameters, NUM_DEVICES, fields.get("zero", 0)),
        "state": closed.total,
        "gathered": closed.gathered,
        "arguments": arguments,
        "temporaries": temporaries,
        "wire_predicted": sum(wire_bytes_by_axes(expected(config, plan), plan).values()),
        "wire_compiled": sum(t.wire_bytes or 0 for t in found.totals),
    }


def main(
    tpu: Annotated[str | None, typer.Option(help="Topology, such as v5e:2x4.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A row; may be repeated.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    config, dtype = (LARGE, "bfloat16") if tpu else (SMALL, "float32")
    columns = ("paper, bf16", "state", "gathered", "XLA", "wire predicted", "wire compiled")
    table = Table("stage", *columns, title=f"{config.name}, {dtype}, bytes per parameter")
    rows = []
    for name in only or CASES:
        rows.append(found := row(name, config, dtype, tpu))
        amounts = (
            found["paper"], found["state"], found["gathered"],
            found["arguments"] + found["temporaries"],
            found["wire_predicted"], found["wire_compiled"],
        )  # fmt: skip
        table.add_row(name, *(f"{value / config.num_parameters:.2f}" for value in amounts))
        print(name, flush=True)
    Console(width=120).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
