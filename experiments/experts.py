"""Experts left alone, balanced by a loss, or by a bias; with every token, or with a limit.

    .venv/bin/python experiments/experts.py
    .venv/bin/python experiments/experts.py --num-steps 200 --mesh expert=8
    .venv/bin/python experiments/experts.py --tpu v5e:2x4   # chunks, compiled for TPUs; needs none

The same small model on the same text, 8 virtual CPU devices. `busiest` is the tokens of the busiest
expert over the mean, in the worst layer, over the first and the last tenth of the steps: what a
device waits for, since a layer ends when its last expert does. `dropped` is the part of all choices
that found no place; `loss` is the cross-entropy alone, in bits per byte; `sent` what each device
sends to experts and back in one step, over what has to move: predicted, and equal to what the
program asks for.

With --tpu nothing is run: a larger model whole and in 4 chunks, checkpointed layer by layer, is
compiled for TPUs and audited. `beside` are all-to-alls with something computed between start and
done, `exposed` the estimated time on the links during which a device computes nothing. It needs
`pip install "jaxpar[tpu]"`, and no TPU.
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
from jaxpar.targets import StepOnTarget, Target, compile_for
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
    "loss per sequence, in 4 chunks": (
        {**ALONE, "balance_weight": 0.05}, {"num_expert_chunks": 4}),
    "the same, 1.25 places": (
        {**ALONE, "balance_weight": 0.05}, {**CAPACITY, "num_expert_chunks": 4}),
}  # fmt: skip

LARGE = ModelConfig(
    name="experts-800m", num_layers=4, embed=1024, num_heads=8, num_kv_heads=8, head_dim=128,
    mlp_hidden=4096, vocab=4096, max_seq_len=1024, num_experts=16, num_experts_per_token=2,
    expert_hidden=4096,
)  # fmt: skip
OPTIONS = {"xla_tpu_enable_async_all_to_all": True}
"""Without it a v5e's all-to-alls are synchronous."""


def vectors(rows: Any) -> int:
    """Bytes of token vectors to and from experts, of one step."""
    exchanges = [r for r in rows if r.kind == "all-to-all" and r.dtype != "s32"]
    return sum(row.count * row.payload_bytes for row in exchanges)


def compile_chunks(tpu: str) -> None:
    """What is hidden of the all-to-alls of LARGE, by chunks."""
    jax.config.update("jax_platforms", "cpu")
    target = Target.parse(tpu)
    mesh = MeshSpec.parse(f"expert={target.num_devices}")
    table = Table(title=f"{LARGE.name}, capacity, on {mesh} of {tpu}, bfloat16, remat='full'")
    for column in ("chunks", "all-to-alls", "bytes", "beside", "on the links", "exposed"):
        table.add_column(column, justify="right")
    for num_chunks in (1, 4):
        plan = Plan(
            mesh=mesh,
            batch_size=32,
            seq_len=1024,
            remat="full",
            experts="capacity",
            num_expert_chunks=num_chunks,
        )
        step = StepOnTarget(config=LARGE, plan=plan, optimizer=default_optimizer())
        found = compile_for(step, target, options=OPTIONS).audit.collectives
        found = [r for r in found if r.kind == "all-to-all" and r.dtype == "bf16"]
        counts = [row.count or 0 for row in found]
        if vectors(expected(LARGE, plan)) != vectors(found):
            raise SystemExit(f"{num_chunks} chunks: other bytes than predicted")
        times = [n * (row.transfer_s or 0) for n, row in zip(counts, found, strict=True)]
        parts = [time * row.exposed_fraction for time, row in zip(times, found, strict=True)]
        row = (
            f"{num_chunks}",
            f"{sum(counts)}",
            f"{vectors(found) / 2**20:.0f} MiB",
            f"{sum(n for n, row in zip(counts, found, strict=True) if row.num_overlapped)}",
            f"{1e3 * sum(times):.1f} ms",
            f"{1e3 * sum(parts):.1f} ms",
        )
        print(*row, flush=True)  # minutes before the table
        table.add_row(*row)
    Console(width=110).print(table)


def main(
    num_steps: Annotated[int, typer.Option(help="Training steps, 10 or more.")] = 60,
    mesh: Annotated[str, typer.Option(help="Axes of 8 devices or fewer.")] = "data=2,expert=4",
    tpu: Annotated[str | None, typer.Option(help="Compile for it, such as v5e:2x4.")] = None,
) -> None:
    if tpu:
        return compile_chunks(tpu)
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
