"""Experts left alone, balanced by a loss, or by a bias; with every token, or with a limit.

    .venv/bin/python experiments/experts.py
    .venv/bin/python experiments/experts.py --num-steps 200 --mesh expert=8

The same small model on the same text, 8 virtual CPU devices. `busiest` is the tokens of the busiest
expert over the mean, in the worst layer, over the first and the last tenth of the steps: what a
device waits for, since a layer ends when its last expert does. `dropped` is the part of all choices
that found no place; `loss` is the cross-entropy alone, in bits per byte; `sent` what each device
sends to experts and back in one step, over what has to move: predicted, and equal to what the
program asks for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import Corpus, MeshSpec, ModelConfig, Plan, TrainStep, asked, expected, preset
from jaxpar.tour import default_optimizer

BATCH_SIZE, SEQ_LEN = 16, 64

ALONE = {"balance_weight": 0.0, "router_z_weight": 0.0}
CAPACITY = {"experts": "capacity", "capacity_factor": 1.25}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "left alone": (ALONE, {}),
    "loss per sequence": ({**ALONE, "balance_weight": 0.05}, {}),
    "loss over the batch": ({**ALONE, "balance_weight": 0.05, "balance": "batch"}, {}),
    "bias": ({**ALONE, "router": "sigmoid", "bias_rate": 0.01}, {}),
    "left alone, 1.25 places": (ALONE, CAPACITY),
    "loss per sequence, 1.25 places": ({**ALONE, "balance_weight": 0.05}, CAPACITY),
    "the same, largest weights stay": (
        {**ALONE, "balance_weight": 0.05}, {**CAPACITY, "drop_policy": "weight"}),
}  # fmt: skip


def vectors(rows: Any) -> int:
    """Bytes of token vectors to and from experts, of one step."""
    exchanges = [r for r in rows if r.kind == "all-to-all" and r.dtype != "s32"]
    return sum(row.count * row.payload_bytes for row in exchanges)


def main(
    num_steps: Annotated[int, typer.Option(help="Training steps, 10 or more.")] = 60,
    mesh: Annotated[str, typer.Option(help="Axes of 8 devices or fewer.")] = "data=2,expert=4",
) -> None:
    base, corpus = preset("tiny-moe"), Corpus.standard_library()
    table = Table(title=f"{base.name} on {mesh}, {num_steps} steps of {BATCH_SIZE} × {SEQ_LEN}")
    for column in ("experts", "busiest", "", "dropped", "loss", "sent"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for name, (routing, fields) in WAYS.items():
        config: ModelConfig = replace(base, **routing)
        plan = Plan(
            mesh=MeshSpec.parse(mesh),
            batch_size=BATCH_SIZE,
            seq_len=SEQ_LEN,
            compute_dtype="float32",
            **fields,
        )
        step = TrainStep(config=config, plan=plan, optimizer=default_optimizer())
        traced = step.jitted.trace(*step.abstract_inputs)
        predicted = vectors(expected(config, plan))
        if predicted != (found := vectors(asked(traced.jaxpr))):
            raise SystemExit(f"{name}: predicted {predicted:,} bytes, the program asks {found:,}")
        compiled, state = traced.lower().compile(), step.init()
        seen = []
        for i in range(num_steps):
            batch = corpus.batch(i, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
            state, metrics = compiled(state, step.place(batch))
            extra = metrics.stats["objective"].sum() if "objective" in metrics.stats else 0.0
            loss = metrics.loss - extra / metrics.num_tokens
            seen.append((metrics.imbalance.max(), metrics.dropped_fraction.mean(), loss))
        busiest, dropped, loss = np.array(jax.device_get(seen), np.float64).T
        tenth = max(1, num_steps // 10)
        tokens = plan.local_batch_size * SEQ_LEN * config.num_experts_per_token
        least = 4 * config.num_layers * tokens * config.embed * plan.compute_bytes
        table.add_row(
            name,
            f"{busiest[:tenth].mean():.2f}",
            f"{busiest[-tenth:].mean():.2f}",
            f"{100 * dropped.mean():.1f} %",
            f"{loss[-tenth:].mean() / math.log(2):.3f}",
            f"{predicted / least:.2f} ×",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    from jaxpar.mesh import use_cpu_devices

    use_cpu_devices(8)
    typer.run(main)
