"""Step time of each explicit strategy against the same model and mesh under plain jit (GSPMD).

    .venv/bin/python experiments/bench_step.py

Both programs take the same sharded state and batch and give the same numbers. They run in turn,
A B A B, on 8 virtual CPU devices, so that a ratio survives a machine whose speed drifts. Ratios are
explicit ÷ GSPMD: `time` is the median over pairs of steps, `wire` the audited bytes that a device
has to send. Below 1 the explicit step takes less.
"""

from __future__ import annotations

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
from jaxpar import Batch, Corpus, MeshSpec, ModelConfig, Plan, TrainStep
from jaxpar.model.parallel import Parallel
from jaxpar.reference import plain_step
from jaxpar.tour import default_optimizer

CONFIG = ModelConfig(
    name="bench", num_layers=4, embed=256, num_heads=8, num_kv_heads=8, head_dim=32,
    mlp_hidden=1024, vocab=256, max_seq_len=256,
)  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data=8", {}),
    "tensor": ("tensor=8", {}),
    "tensor+sequence": ("tensor=8", {"sequence": True}),
    "data+tensor": ("data=2,tensor=4", {}),
    "data+tensor+sequence": ("data=2,tensor=4", {"sequence": True}),
    "fsdp": ("fsdp=8", {}),
    "fsdp+tensor": ("fsdp=4,tensor=2", {}),
    "hsdp": ("data=2,fsdp=4", {}),
}


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


def main(
    num_steps: Annotated[int, typer.Option(min=1, help="Timed pairs per strategy.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    corpus = Corpus.standard_library()
    table = Table("strategy", "mesh", "explicit ms", "GSPMD ms", "time", "min … max", "wire")
    rows = []
    for name, (mesh, options) in CASES.items():
        plan = Plan(
            mesh=MeshSpec.parse(mesh),
            batch_size=16,
            seq_len=128,
            compute_dtype="float32",
            **options,
        )
        step = TrainStep(config=CONFIG, plan=plan, optimizer=default_optimizer())
        batch = corpus.batch(0, batch_size=16, seq_len=128)
        programs = explicit_and_gspmd(step)
        wire = [wire_bytes(step, program) for program in programs]
        times = pair_times(step, programs, batch, num_steps)
        ratios = sorted(a / b for a, b in times)
        ours, theirs = (statistics.median(t[i] for t in times) * 1e3 for i in (0, 1))
        ratio = statistics.median(ratios)
        rows.append({"strategy": name, "mesh": mesh, "explicit_ms": ours, "gspmd_ms": theirs,
                     "ratio": ratio, "min": ratios[0], "max": ratios[-1],
                     "explicit_wire_bytes": wire[0], "gspmd_wire_bytes": wire[1]})  # fmt: skip
        table.add_row(name, str(plan.mesh), f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.2f}",
                      f"{ratios[0]:.2f} … {ratios[-1]:.2f}",
                      f"{wire[0] / wire[1]:.2f}")  # fmt: skip
        print(name, f"{ratio:.2f}", flush=True)
    Console(width=100).print(table)
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
