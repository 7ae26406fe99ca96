"""The ways to attend over a split sequence, side by side: bytes, memory, evenness, time.

    .venv/bin/python experiments/context.py
    .venv/bin/python experiments/context.py --seq-len 4096 --num-kv-heads 8 --repeats 3

One causal attention with its backward on 8 virtual CPU devices, in bfloat16. `wire` is what each
device sends, predicted and equal to what the program asks for; `scratch` the compiler's temporary
memory on one device; `work` the largest share of causal pairs on any device, over the mean; `time`
the median over runs that take turns, over the first row's. All devices share one processor's
cores, so time counts the work of all of them together, and hides nothing.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, ModelConfig, Plan
from jaxpar.audit.asked import asked
from jaxpar.collectives import wire_bytes
from jaxpar.strategies import context

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("context=8", {}),
    "ring, contiguous": ("context=8", {"context_layout": "contiguous"}),
    "allgather": ("context=8", {"context": "allgather"}),
    "ulysses": ("context=8", {"context": "ulysses"}),
    "ring × ulysses": ("context=2,ulysses=4", {}),
    "allgather × ulysses": ("context=2,ulysses=4", {"context": "allgather"}),
}


def attention_step(plan: Plan, config: ModelConfig) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Jitted (q, k, v, gradient) -> (output, gradients), and its arguments' shapes."""
    mesh = plan.mesh.build()
    spec = PartitionSpec(None, tuple(axis for axis in context.AXES if plan.size(axis) > 1))
    attention = context.attention(plan)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda q, k, v: attention(q, k, v, None),
            mesh=mesh,
            in_specs=(spec, spec, spec),
            out_specs=spec,
        )
        return local(q, k, v)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do)

    shapes = [
        jax.ShapeDtypeStruct(
            (plan.batch_size, plan.seq_len, heads, config.head_dim),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, spec),
        )
        for heads in (config.num_heads, *2 * [config.num_kv_heads], config.num_heads)
    ]
    return jax.jit(run), shapes


def sent(rows: Any, plan: Plan) -> int:
    return sum(
        row.count * wire_bytes(row.kind, row.payload_bytes, plan.size(row.axes[0])) for row in rows
    )


def main(
    seq_len: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 2048,
    num_kv_heads: Annotated[int, typer.Option(help="Of 8 query heads.")] = 2,
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = 5,
) -> None:
    config = ModelConfig(
        name="attention", num_layers=1, embed=64, num_heads=8, num_kv_heads=num_kv_heads,
        head_dim=64, mlp_hidden=64, vocab=256, max_seq_len=seq_len,
    )  # fmt: skip
    programs = {}
    for name, (mesh, fields) in WAYS.items():
        plan = Plan(mesh=MeshSpec.parse(mesh), batch_size=1, seq_len=seq_len, **fields)
        context.STRATEGY.check(config, plan)
        run, shapes = attention_step(plan, config)
        traced = run.trace(*shapes)
        predicted = sent(context.STRATEGY.expected(config, plan, ()), plan)
        if predicted != (found := sent(asked(traced.jaxpr), plan)):
            raise SystemExit(f"{name}: predicted {predicted:,} bytes, the program asks {found:,}")
        random = np.random.default_rng(0)
        arrays = [
            jax.device_put(random.normal(size=s.shape).astype(s.dtype), s.sharding) for s in shapes
        ]
        programs[name] = plan, traced.lower().compile(), arrays, predicted

    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats + 1):
        for name, (_, compiled, arrays, _) in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(compiled(*arrays))
            times[name].append(time.perf_counter() - started)

    table = Table(title=f"one attention and its backward, S = {seq_len}, 8 heads on {num_kv_heads}")
    for column in ("way", "mesh", "wire", "scratch", "work", "time"):
        table.add_column(column, justify="left" if column in ("way", "mesh") else "right")
    first = statistics.median(times["ring"][1:])
    for name, (plan, compiled, _, predicted) in programs.items():
        pairs = context.sequence_layout(plan).num_visible_pairs(seq_len)
        scratch = compiled.memory_analysis().temp_size_in_bytes
        table.add_row(
            name,
            str(plan.mesh),
            f"{predicted / 2**20:.2f} MiB",
            f"{scratch / 2**20:.1f} MiB",
            f"{max(pairs) / np.mean(pairs):.3f}",
            f"{statistics.median(times[name][1:]) / first:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
