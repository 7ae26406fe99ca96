"""Every training of the tour against what it should cost, in ratios taken in one run.

    .venv/bin/python experiments/bench_strategies.py [--only fsdp] [--json PATH]

On 8 virtual CPU devices, with a model large enough to time:

* `bound`: bytes that the compiled program sends per device, as audited ÷ the closed form's, which
  is the least that the strategy's card allows;
* `time`, `wire`: the explicit step ÷ the same model, mesh and shardings under plain jit, where
  XLA's partitioner (GSPMD) can express the strategy at all. The two give the same numbers and run
  in turn, A B A B, so that a ratio survives a machine whose speed drifts: `time` is the median over
  pairs of steps. Below 1 the explicit step takes less;
* `ticks`: slots that the compiled pipeline goes through, in its forward phases ÷ the ideal
  vm + p - 1.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar import Batch, Corpus, TrainStep
from jaxpar.model.config import preset
from jaxpar.model.parallel import Parallel
from jaxpar.predict.volume import expected, wire_bytes_by_axes
from jaxpar.reference import plain_step
from jaxpar.strategies.strategy import Variant
from jaxpar.tour import chosen, default_optimizer

SIZES = {
    "embed": 256, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "mlp_hidden": 1024,
    "max_seq_len": 256,
}  # fmt: skip
"""What every preset of the tour is scaled to; layers, experts and vocabulary stay."""

BATCH_SIZE, SEQ_LEN = 16, 128

BY_GSPMD = (
    "data", "tensor", "data+tensor", "tensor+sequence", "data+tensor+sequence", "fsdp",
    "fsdp+tensor", "hsdp",
)  # fmt: skip
"""Rows that sharding annotations express too. XLA's partitioner has no pipeline, no ring, no choice
of when states are gathered, and none of where experts' tokens go."""


def explicit_and_gspmd(step: TrainStep) -> tuple[Any, Any]:
    """The two compiled programs, each (state, batch) -> (state, metrics), donating the state."""
    state, batch = step.abstract_inputs
    shardings = jax.tree.map(lambda x: x.sharding, (state, batch))
    whole = NamedSharding(step.mesh, PartitionSpec())
    plain = jax.jit(
        plain_step(
            step.config,
            step.optimizer,
            compute_dtype=step.plan.compute_dtype,
            parallel=constraints(step),
        ),
        in_shardings=shardings,
        out_shardings=(shardings[0], whole),
        donate_argnums=0,
    )
    return step.jitted.lower(state, batch).compile(), plain.lower(state, batch).compile()


def constraints(step: TrainStep) -> Parallel:
    """What a careful GSPMD user writes: activations keep the batch split (and the sequence, where
    the plan splits it). Without it, XLA would rather split the model's matmuls over `fsdp`."""
    batch_axes = step.batch_spec[0]
    between = PartitionSpec(batch_axes, "tensor" if step.plan.sequence else None)

    def pin(spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(step.mesh, spec))

    return Parallel(enter=pin(PartitionSpec(batch_axes)), leave=pin(between))


def wire_bytes(step: TrainStep, program: Any) -> int:
    """What each device has to send per step of a compiled program, as audited."""
    totals = jaxpar.audit(program, mesh=step.plan.mesh).totals
    assert all(total.wire_bytes is not None for total in totals)
    return sum(total.wire_bytes or 0 for total in totals)


def pair_times(
    step: TrainStep, programs: tuple[Any, Any], batch: Batch, num_steps: int
) -> list[tuple[float, float]]:
    """Seconds of one explicit and one GSPMD step, run one after the other, after a warm-up."""
    states = [step.init(), step.init()]
    placed = step.place(batch)
    times = []
    for i in range(num_steps + 2):
        pair = []
        for which, program in enumerate(programs):
            start = time.perf_counter()
            states[which], metrics = program(states[which], placed)
            jax.block_until_ready((states[which], metrics))
            pair.append(time.perf_counter() - start)
        if i >= 2:
            times.append((pair[0], pair[1]))
    return times


def compare_with_gspmd(step: TrainStep, batch: Batch, num_steps: int) -> dict[str, Any]:
    programs = explicit_and_gspmd(step)
    wire = [wire_bytes(step, program) for program in programs]
    times = pair_times(step, programs, batch, num_steps)
    ratios = sorted(a / b for a, b in times)
    ours, theirs = (statistics.median(t[i] for t in times) * 1e3 for i in (0, 1))
    return {
        "explicit_ms": ours,
        "gspmd_ms": theirs,
        "time": statistics.median(ratios),
        "time_min": ratios[0],
        "time_max": ratios[-1],
        "wire": wire[0] / wire[1],
    }


def measure(variant: Variant, num_steps: int) -> dict[str, Any]:
    config = dataclasses.replace(preset(variant.model or "tiny"), **SIZES)
    plan = variant.plan(batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    step = TrainStep(config=config, plan=plan, optimizer=default_optimizer())
    row: dict[str, Any] = {"strategy": variant.name, "mesh": variant.mesh}
    compiled = step.jitted.lower(*step.abstract_inputs).compile()
    bound = sum(wire_bytes_by_axes(expected(config, plan), plan).values())
    row["bound"] = wire_bytes(step, compiled) / bound if bound else 1.0
    if plan.size("pipe") > 1:
        row["ticks"] = ticks(step, compiled)
    if variant.name in BY_GSPMD:
        batch = Corpus.standard_library().batch(0, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
        row |= compare_with_gspmd(step, batch, num_steps)
    return row


def ticks(step: TrainStep, compiled: Any) -> float:
    """Executions of the permute that carries activations ÷ forward slots of an ideal pipeline."""
    plan = step.plan
    sends = [
        found.count or 0
        for found in jaxpar.audit(compiled, mesh=plan.mesh).collectives
        if (found.kind, found.axes, found.phase) == ("collective-permute", ("pipe",), "forward")
    ]
    ideal = plan.num_virtual_stages * plan.num_microbatches + plan.size("pipe") - 1
    return sum(sends) / ideal


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only this row; may be repeated.")] = None,
    num_steps: Annotated[int, typer.Option(min=1, help="Timed pairs per strategy.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    jaxpar.use_cpu_devices(8)
    variants = [v for v in chosen(only or ()) if isinstance(v, Variant)]
    columns = ("strategy", "mesh", "bound", "time", "min … max", "wire", "ticks")
    table = Table(*columns)
    rows = []
    for variant in variants:
        row = measure(variant, num_steps)
        rows.append(row)
        print(row["strategy"], f"{row['bound']:.3f}", flush=True)
        shown = {name: f"{row[name]:.2f}" for name in columns if isinstance(row.get(name), float)}
        if "time" in row:
            shown["min … max"] = f"{row['time_min']:.2f} … {row['time_max']:.2f}"
        table.add_row(row["strategy"], row["mesh"], *(shown.get(name, "") for name in columns[2:]))
    Console(width=110).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
