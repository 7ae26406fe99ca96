"""One real device: numbers equal a CPU's, axes of one device cost nothing, and how fast it is.

    python experiments/on_gpu.py                # where jax.devices("gpu") is not empty
    python experiments/on_gpu.py --platform cpu --model tiny --seq-len 64   # to try the script

Each strategy of the table is one plan whose axes have size 1. `loss` is the largest relative
difference of its first losses in float32 from the same steps on this machine's CPU (matmuls in full
float32; a GPU's TF32 is off for that). `moved` are the collectives of the compiled program that
move anything: none may. `time` is the median step in bfloat16, and `MFU` its share of the chip's
peak, causal FLOPs without recompute.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import Corpus, MeshSpec, ModelConfig, Plan, TrainStep, audit, preset
from jaxpar.predict.flops import KIND, peak_flops_per_s, step_flops
from jaxpar.reference import plain_step, reference_init
from jaxpar.tour import default_optimizer, train

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data=1", {}),
    "fsdp": ("fsdp=1", {"zero": 3}),
    "tensor": ("tensor=1", {}),
    "context": ("context=1", {"context": "ring"}),
    "hsdp+tensor": ("data=1,fsdp=1,tensor=1", {"zero": 3}),
    "remat-full": ("data=1", {"remat": "full"}),
}
LARGE = ModelConfig(
    name="on-gpu-1b", num_layers=16, embed=2048, num_heads=16, num_kv_heads=8, head_dim=128,
    mlp_hidden=8192, vocab=256, max_seq_len=2048,
)  # fmt: skip
NUM_CHECKED = 3


def losses(step: TrainStep, corpus: Corpus, start: Any) -> np.ndarray:
    """Of the first steps, from given parameters."""
    plan = step.plan
    state, found = step.init_from(start), []
    for i in range(NUM_CHECKED):
        batch = corpus.batch(i, batch_size=plan.batch_size, seq_len=plan.seq_len)
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    return np.array(found)


def timed(step: TrainStep, compiled: Any, corpus: Corpus, num_steps: int) -> float:
    """Median seconds of a step after the first two."""
    plan = step.plan
    batch = step.place(corpus.batch(0, batch_size=plan.batch_size, seq_len=plan.seq_len))
    state, seconds = step.init(), []
    for _ in range(num_steps + 2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def main(
    platform: str = "gpu",
    model: Annotated[str | None, typer.Option(help="A preset, instead of one of 1e9.")] = None,
    batch_size: int = 8,
    seq_len: int = 2048,
    num_steps: int = 10,
    only: Annotated[list[str] | None, typer.Option(help="A row; may be repeated.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    try:
        device = jax.devices(platform)[0]
    except RuntimeError as error:
        raise SystemExit(f"There is no {platform} here ({error}).") from None
    corpus, large = Corpus.standard_library(), preset(model) if model else LARGE
    optimizer, small = default_optimizer(), preset("tiny")
    peak = peak_flops_per_s([device], "bfloat16")
    batches = [corpus.batch(i, batch_size=4, seq_len=64) for i in range(NUM_CHECKED)]
    with jax.default_device(jax.devices("cpu")[0]):
        state = reference_init(small, optimizer)
        want = train(state, jax.jit(plain_step(small, optimizer)), batches)
    table = Table(title=f"{large.name} on {device.device_kind}; MFU: {KIND}", title_justify="left")
    for column in ("strategy", "loss", "moved", "time", "tokens/s", "MFU"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    rows, is_wrong = [], False
    for name in only or STRATEGIES:
        axes, fields = STRATEGIES[name]
        mesh = replace(MeshSpec.parse(axes), platform=platform)
        checked = TrainStep(
            config=small,
            plan=Plan(mesh=mesh, batch_size=4, seq_len=64, compute_dtype="float32", **fields),
            optimizer=optimizer,
        )
        with jax.default_matmul_precision("float32"):
            error = np.abs(losses(checked, corpus, want.start) / want.losses - 1).max()
        plan = Plan(mesh=mesh, batch_size=batch_size, seq_len=seq_len, **{"remat": "full"} | fields)
        step = TrainStep(config=large, plan=plan, optimizer=optimizer)
        compiled = step.jitted.lower(*step.abstract_inputs).compile()
        moved = sum(it.wire_bytes > 0 for it in audit(compiled, mesh=mesh.all_axes).collectives)
        seconds = timed(step, compiled, corpus, num_steps)
        mfu = step_flops(large, plan) / seconds / peak if peak else None
        rows.append(
            {"strategy": name, "loss_error": error, "moved": moved, "time_s": seconds, "mfu": mfu}
        )
        is_wrong |= bool(error > 1e-4 or moved)
        table.add_row(
            name, f"{error:.0e}", f"{moved}", f"{seconds * 1e3:.1f} ms",
            f"{batch_size * seq_len / seconds:,.0f}", f"{mfu:.1%}" if mfu else "?",
        )  # fmt: skip
        print(name, flush=True)
    Console(width=110).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(int(is_wrong))


if __name__ == "__main__":
    typer.run(main)
