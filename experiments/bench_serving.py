"""Serving against what it should cost, in ratios taken in one run.

    .venv/bin/python experiments/bench_serving.py [--only decode] [--json PATH]

On 8 virtual CPU devices:

* `decode`, `prefill`: one step of the explicit program ÷ the same model, cache and shardings under
  plain jit, where XLA's partitioner (GSPMD) finds the collectives. Both are the same code; for jit
  it runs on a mesh whose role axes all have one device, so that no collective of ours is there. The
  two choose the same tokens and run in turn, A B A B: `time` is the median over pairs of steps, and
  below 1 the explicit step takes less. `wire` compares bytes sent, as audited.
* `batching`: tokens per second of continuous ÷ static batching on the same trace with the same
  programs. `steps` counts programs and is the same everywhere; `time` is this machine's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar import MeshSpec
from jaxpar.model.config import ModelConfig, preset
from jaxpar.model.transformer import Params, init_params
from jaxpar.serve.cache import Rows, idle_rows
from jaxpar.serve.measures import Measures
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.serve.replicas import Replicas
from jaxpar.serve.simulate import given, simulate
from jaxpar.serve.step import ServeStep
from jaxpar.serve.trace import Trace
from jaxpar.serve.workers import Batching

LARGE: dict[str, Any] = {
    "num_layers": 4, "embed": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64,
    "mlp_hidden": 2048, "vocab": 4096, "max_seq_len": 256,
}  # fmt: skip
"""What preset tiny is scaled to, for steps that are worth timing."""

MESHES = ("tensor=8", "data=2,tensor=4")


def params_of(config: ModelConfig) -> Params:
    make = jax.jit(lambda: jax.tree.map(lambda p: 4 * p, init_params(config, 0)))
    params: Params = jax.device_get(make())
    return params


# --- explicit and plain ----------------------------------------------------------------------


class Plain:
    """The step of `step` with no collective of ours: compiled by jit for the same shardings."""

    def __init__(self, step: ServeStep) -> None:
        self.step = step
        sizes = {axis: n for axis, n in step.plan.mesh.named_axes.items() if n > 1}
        roles = tuple(step.plan.mesh.all_axes)
        names = (*roles, *(f"plain_{axis}" for axis in sizes))
        grid = step.mesh.devices.reshape((1,) * len(roles) + tuple(sizes.values()))
        self.mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        self.alone = ServeStep(
            config=step.config, plan=replace(step.plan, mesh=MeshSpec.parse("data=1"))
        )
        self.roles = set(roles)

    def compile(self, kind: Kind) -> Any:
        inputs = self.step.abstract_inputs(kind)
        shardings = jax.tree.map(lambda x: self._renamed(x.sharding.spec), inputs)
        rows = shardings[2].tokens
        mapped = jax.shard_map(
            lambda *arguments: self.alone._local_step(kind, *arguments),
            mesh=self.mesh,
            in_specs=(PartitionSpec(),) * 3,
            out_specs=(PartitionSpec(), PartitionSpec()),
            axis_names=self.roles,
            check_vma=True,
        )
        like = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            inputs, shardings,
        )  # fmt: skip
        jitted = jax.jit(mapped, donate_argnums=1, out_shardings=(shardings[1], rows))
        return jitted.lower(*like).compile()

    def _renamed(self, spec: PartitionSpec) -> NamedSharding:
        def plain(entry: Any) -> Any:
            if isinstance(entry, tuple):
                return tuple(f"plain_{axis}" for axis in entry)
            return entry and f"plain_{entry}"

        return NamedSharding(self.mesh, PartitionSpec(*map(plain, spec)))

    def rows(self, rows: Rows) -> Rows:
        """The same with blocks numbered over the whole cache: jit knows of no part of the batch."""
        shards = self.step.plan.num_batch_shards
        first = np.arange(shards) * self.step.plan.blocks_per_shard
        table: Any = np.asarray(rows.table)
        table = table + np.repeat(first, len(table) // shards)[:, None].astype(np.int32)
        return rows._replace(table=table)


def full_rows(plan: ServePlan, kind: Kind) -> Rows:
    """Every row in use: sequences of three quarters of the longest, each with blocks of its own."""
    rows = idle_rows(plan, kind)
    num, length = len(np.asarray(rows.start)), plan.row_len(kind)
    start = 3 * plan.max_seq_len // 4 // plan.block_len * plan.block_len if kind == "decode" else 0
    per_shard = num // plan.num_batch_shards
    blocks = np.arange(plan.blocks_per_sequence)
    for row in range(num):
        np.asarray(rows.table)[row] = row % per_shard * plan.blocks_per_sequence + blocks
    tokens = np.random.default_rng(0).integers(0, 256, np.shape(rows.tokens), dtype=np.int32)
    for field, value in (("tokens", tokens), ("start", start), ("num_tokens", length)):
        getattr(rows, field)[...] = value
    return rows


def compare_steps(mesh: str, kind: Kind, num_pairs: int) -> dict[str, Any]:
    config = replace(preset("tiny"), **LARGE)
    plan = ServePlan(
        mesh=MeshSpec.parse(mesh), num_slots=16, max_seq_len=256, chunk_len=64,
        num_prefill_rows=4, compute_dtype="float32",
    )  # fmt: skip
    step = ServeStep(config=config, plan=plan)
    plain = Plain(step)
    programs = step.compiled(kind), plain.compile(kind)
    given_rows = full_rows(plan, kind)
    rows = given_rows, plain.rows(given_rows)
    whole = params_of(config)
    params = [step.place(whole)]
    params.append(jax.tree.map(lambda x: jax.device_put(x, plain._renamed(x.sharding.spec)),
                               params[0]))  # fmt: skip
    caches = [step.init_cache()]
    caches.append(jax.tree.map(lambda x: jax.device_put(x, plain._renamed(x.sharding.spec)),
                               step.init_cache()))  # fmt: skip
    pairs, tokens = [], [np.zeros(0), np.zeros(0)]
    for i in range(num_pairs + 2):
        pair = []
        for which, program in enumerate(programs):
            began = time.perf_counter()
            caches[which], found = program(params[which], caches[which], rows[which])
            tokens[which] = np.asarray(found)
            pair.append(time.perf_counter() - began)
        assert np.array_equal(tokens[0], tokens[1]), (
            "explicit and plain steps choose different tokens"
        )
        if i >= 2:
            pairs.append(pair)
    ratios = sorted(a / b for a, b in pairs)
    wire = [
        sum(total.wire_bytes or 0 for total in jaxpar.audit(program).totals) for program in programs
    ]
    return {
        "what": kind,
        "on": mesh,
        "ours_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "plain_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "time": statistics.median(ratios),
        "time_min": ratios[0],
        "time_max": ratios[-1],
        "wire": wire[0] / wire[1],
    }


# --- continuous and static -------------------------------------------------------------------


def compare_batching() -> dict[str, Any]:
    config = replace(preset("tiny"), max_seq_len=256)
    plan = ServePlan(
        mesh=MeshSpec.parse("tensor=2"), num_slots=16, max_seq_len=256, chunk_len=64,
        num_prefill_rows=4, compute_dtype="float32",
    )  # fmt: skip
    replica = Replicas(config, plan, params_of(config), num_replicas=1)
    trace = Trace(
        num_requests=256, requests_per_s=1e4, prompt_len=24, answer_len=48, max_seq_len=256,
        vocab=config.vocab,
    )  # fmt: skip
    seconds: dict[Batching, float] = {}
    found: dict[Batching, Measures] = {}
    kinds: tuple[Batching, ...] = ("continuous", "static")
    clock = given(prefill_s=0.01, decode_s=0.01)
    simulate(replica, trace.arrivals()[:1], clock)  # compiles
    for batching in kinds:
        replica.start(batching=batching)
        began = time.perf_counter()
        served = simulate(replica, trace.arrivals(), clock)
        seconds[batching], found[batching] = time.perf_counter() - began, served.measures
    steps = {
        name: sum(one.num_prefills + one.num_decodes for one in measures.workers)
        for name, measures in found.items()
    }
    return {
        "what": "batching",
        "on": "tensor=2, 16 slots",
        "ours_ms": 1e3 * seconds["continuous"],
        "plain_ms": 1e3 * seconds["static"],
        "tokens": found["continuous"].num_tokens,
        "steps": steps["static"] / steps["continuous"],
        "time": seconds["static"] / seconds["continuous"],
    }


def measured(only: str, num_pairs: int) -> Iterator[dict[str, Any]]:
    kinds: tuple[Kind, ...] = ("decode", "prefill")
    for kind in kinds:
        for mesh in MESHES:
            if only in (kind, ""):
                yield compare_steps(mesh, kind, num_pairs)
    if only in ("batching", ""):
        yield compare_batching()


def main(
    only: Annotated[str, typer.Option(help="decode, prefill or batching.")] = "",
    num_pairs: Annotated[int, typer.Option(min=1, help="Timed pairs of steps.")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    jaxpar.use_cpu_devices(8)
    columns = ("what", "on", "ours ms", "other ms", "time", "min … max", "wire", "steps")
    table, rows = Table(*columns), []
    for row in measured(only, num_pairs):
        rows.append(row)
        print(row["what"], row["on"], f"{row['time']:.3f}", flush=True)
        table.add_row(
            row["what"], row["on"], f"{row['ours_ms']:.1f}", f"{row['plain_ms']:.1f}",
            f"{row['time']:.2f}",
            f"{row['time_min']:.2f} … {row['time_max']:.2f}" if "time_min" in row else "",
            f"{row['wire']:.2f}" if "wire" in row else "",
            f"{row['steps']:.2f}" if "steps" in row else "",
        )  # fmt: skip
    Console(width=110).print(table)
    print("Steps: ours ÷ plain jit, goal at most 1.00. Batching: continuous ÷ static, goal 2.")
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
