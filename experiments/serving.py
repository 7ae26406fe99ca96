"""Random requests that come and go, on many plans: every token against each request alone.

    .venv/bin/python experiments/serving.py
    .venv/bin/python experiments/serving.py --num-requests 50 --only pipe

Two small models, 8 virtual CPU devices, float32. Requests have random prompts, lengths, arrivals
and ways of sampling: half are greedy, the others draw with seeds of their own. Each row serves all
of them by continuous batching with chunked prefill; `wrong` are answers that differ in any token
from those of one device that has no cache and no batch, and the margin below the least distance by
which a token of these was ahead of the next one (scores differ between plans by up to 1e-5). `full`
is the most of the cache's blocks in use, `preempted` how often a sequence had to give its own back
and was computed again, `busy` the mean of slots that a decode step used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, ModelConfig
from jaxpar.model.transformer import Params, init_params
from jaxpar.serve.engine import Engine
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.reference import Reference
from jaxpar.serve.sampling import Sampling
from jaxpar.serve.scheduler import Admission, Request
from jaxpar.serve.step import ServeStep
from jaxpar.train import run_once

DENSE = ModelConfig(
    name="dense", num_layers=2, embed=32, num_heads=8, num_kv_heads=2, head_dim=8,
    mlp_hidden=64, vocab=256, max_seq_len=64,
)  # fmt: skip
EXPERTS = ModelConfig(
    name="experts", num_layers=3, embed=32, num_heads=4, num_kv_heads=4, head_dim=8,
    mlp_hidden=64, vocab=256, max_seq_len=64, num_experts=8, num_experts_per_token=2,
    num_shared_experts=1, expert_hidden=32, num_dense_layers=1,
)  # fmt: skip
MODELS = {model.name: model for model in (DENSE, EXPERTS)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row: a model on a mesh, how long chunks are, and how much room the cache has."""

    model: str = "dense"
    mesh: str
    chunk_len: int = 16
    blocks: float = 1.0  # of what all slots could fill
    admission: Admission = "preempt"
    fields: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> ServePlan:
        mesh, num_slots, max_seq_len, block_len = MeshSpec.parse(self.mesh), 8, 64, 4
        shards = mesh.size("data") * mesh.size("expert")
        most = num_slots * max_seq_len // block_len
        least = shards * max_seq_len // block_len
        return ServePlan(
            mesh=mesh,
            num_slots=num_slots,
            max_seq_len=max_seq_len,
            block_len=block_len,
            num_blocks=max(least, int(most * self.blocks) // shards * shards),
            chunk_len=self.chunk_len,
            compute_dtype="float32",
            **self.fields,
        )


SETTINGS = (
    Setting(mesh="data=1"),
    Setting(mesh="data=1", chunk_len=4, blocks=0.25, fields={"num_widths": 2}),
    Setting(mesh="tensor=8", chunk_len=8, blocks=0.25),
    Setting(mesh="data=2,tensor=4", blocks=0.4),
    Setting(mesh="data=2,tensor=2", chunk_len=32, blocks=0.4, admission="queue"),
    Setting(mesh="context=4", chunk_len=16, blocks=0.3, fields={"num_widths": 3}),
    Setting(mesh="data=2,context=2,tensor=2", chunk_len=8, blocks=0.4),
    Setting(mesh="pipe=2,data=2", chunk_len=8, blocks=0.4, fields={"num_microbatches": 2}),
    Setting(mesh="pipe=2,context=2,tensor=2", chunk_len=8, blocks=0.3,
            fields={"num_microbatches": 4}),
    Setting(model="experts", mesh="expert=4,tensor=2", chunk_len=8, blocks=0.6),
    Setting(model="experts", mesh="pipe=2,expert=2,tensor=2", chunk_len=16, blocks=0.4,
            fields={"num_microbatches": 2}),
    Setting(model="experts", mesh="data=2,expert=2,context=2", chunk_len=16, blocks=0.6,
            admission="queue"),
)  # fmt: skip


def some_params(config: ModelConfig) -> Params:
    """Larger than a fresh model's, so that different prompts have different answers."""
    params: Params = run_once(lambda: jax.tree.map(lambda p: 4 * p, init_params(config, 0)))
    return jax.device_get(params)


def some_requests(num: int, seed: int = 0) -> list[tuple[int, Request]]:
    """Random requests for sequences of 64 tokens, and the steps before which they come."""
    draw = np.random.default_rng(seed)
    requests = []
    step = 0
    for i in range(num):
        length = int(draw.integers(1, 48))
        sampling = Sampling()
        if i % 2:
            top_k = int(draw.choice([0, 4, 32]))
            sampling = Sampling(
                temperature=float(draw.choice([0.5, 1.0, 2.0])),
                top_k=top_k,
                top_p=float(draw.choice([0.7, 1.0])) if top_k else 1.0,
                seed=i,
            )
        request = Request(
            prompt=tuple(map(int, draw.integers(0, 256, length))),
            max_new_tokens=int(draw.integers(1, min(24, 64 - length) + 1)),
            sampling=sampling,
            stop_tokens=(7,) if i % 3 == 0 else (),
        )
        requests.append((step, request))
        step += int(draw.integers(0, 3))
    return requests


def main(
    num_requests: Annotated[int, typer.Option(help="Requests of each row.")] = 200,
    only: Annotated[str, typer.Option(help="Rows whose model or mesh has this in it.")] = "",
) -> None:
    requests = some_requests(num_requests)
    table = Table(title=f"{num_requests} requests, float32, 8 slots, blocks of 4 tokens")
    columns = ("model", "mesh", "chunk", "blocks", "when full", "wrong", "steps", "busy", "full",
               "preempted", "seconds")  # fmt: skip
    for column in columns:
        is_word = column in ("model", "mesh", "when full")
        table.add_column(column, justify="left" if is_word else "right")
    wanted: dict[str, list[tuple[int, ...]]] = {}
    least: dict[str, float] = {}
    num_wrong = 0
    for setting in SETTINGS:
        if only not in setting.model + setting.mesh:
            continue
        config, plan = MODELS[setting.model], setting.plan()
        params = some_params(config)
        if setting.model not in wanted:
            reference = Reference(config, params, plan.max_seq_len)
            answers = [reference(request) for _, request in requests]
            wanted[setting.model] = [answer.tokens for answer in answers]
            least[setting.model] = min(answer.margin for answer in answers)
        started = time.perf_counter()
        step = ServeStep(config=config, plan=plan)
        engine = Engine(step, step.place(params), admission=setting.admission)
        answers_here, reports = engine.run(requests)
        wrong = sum(a != b for a, b in zip(answers_here, wanted[setting.model], strict=True))
        num_wrong += wrong
        busy = [report.num_decoded for report in reports if report.num_decoded]
        assert plan.num_blocks is not None
        row = (
            setting.model,
            setting.mesh,
            f"{plan.chunk_len}",
            f"{plan.num_blocks}",
            setting.admission,
            f"{wrong}",
            f"{len(reports)}",
            f"{np.mean(busy) / plan.num_slots:.0%}",
            f"{max(report.used_blocks for report in reports) / plan.num_blocks:.0%}",
            f"{sum(report.num_preempted for report in reports)}",
            f"{time.perf_counter() - started:.0f}",
        )
        print(*row, flush=True)  # minutes before the table
        table.add_row(*row)
    Console(width=120).print(table)
    for name, answers_there in wanted.items():
        tokens = sum(map(len, answers_there))
        print(f"{name}: {tokens:,} tokens alone, least margin {least[name]:.1e}")
    if num_wrong:
        raise SystemExit(f"{num_wrong} answers differ")


if __name__ == "__main__":
    from jaxpar.mesh import use_cpu_devices

    use_cpu_devices(8)
    typer.run(main)
