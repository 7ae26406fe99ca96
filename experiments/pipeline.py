"""What a pipeline's slots cost: measured steps against the lock-step formula, memory, and sends.

    .venv/bin/python experiments/pipeline.py [--num-steps 3]

On pipe=4 × tensor=2 of 8 virtual CPU devices, where every stage computes in every slot, so that the
time of a step is that of its slots whatever the number of cores: f for each slot with forwards and
b for each with backwards (a forward again, and twice that backward). `ideal` is vm + p - 1 slots of
one v-th of both; `slots` the table's own, `measured` the time of a step, both as multiples of the
first row's. `sends` are permutes of one direction on each device, `useful` those that carry
something over each boundary. `temp` is the compiler's temporary memory, in inputs of one stage.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import jax
import optax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import Corpus, MeshSpec, Plan, TrainStep
from jaxpar.mesh import use_cpu_devices
from jaxpar.model.config import preset
from jaxpar.strategies.pipeline.builders import build
from jaxpar.strategies.pipeline.choice import schedule_of
from jaxpar.strategies.pipeline.program import phases
from jaxpar.strategies.pipeline.schedule import Schedule

MESH, ROWS, SEQ_LEN = "pipe=4,tensor=2", 2, 64
FORWARD, BACKWARD = 1.0, 3.0

CASES: list[tuple[str | Schedule, int, int]] = [
    ("1f1b", 4, 1),
    ("1f1b", 16, 1),
    ("gpipe", 4, 1),
    ("gpipe", 16, 1),
    ("interleaved", 4, 2),
    ("interleaved", 16, 2),
    (build("1f1b", num_stages=4, num_microbatches=16), 16, 1),
    ("zb-h1", 16, 1),
]
"""Schedule, micro-batches of `ROWS` sequences, chunks per stage."""


def main(num_steps: Annotated[int, typer.Option(min=1)] = 3) -> None:
    use_cpu_devices(8)
    config = dataclasses.replace(preset("tiny-deep"), name="deep", num_layers=8, embed=128,
                                 mlp_hidden=512)  # fmt: skip
    corpus = Corpus.standard_library()
    titles = ("schedule", "m", "v", "slots", "ideal", "measured", "slots/ideal", "measured/slots",
              "sends", "useful", "temp")  # fmt: skip
    table = Table(*titles)
    first = None
    for schedule, m, v in CASES:
        plan = Plan(
            mesh=MeshSpec.parse(MESH), batch_size=ROWS * m, seq_len=SEQ_LEN, schedule=schedule,
            num_microbatches=m, num_virtual_stages=v, compute_dtype="float32",
        )  # fmt: skip
        step = TrainStep(config=config, plan=plan, optimizer=optax.sgd(1e-3))
        compiled = step.jitted.trace(*step.abstract_inputs).lower().compile()
        batch = step.place(corpus.batch(0, batch_size=ROWS * m, seq_len=SEQ_LEN))
        state = step.init()
        best = float("inf")
        for _ in range(num_steps + 1):  # the first one warms up
            started = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, batch))
            best = min(best, time.perf_counter() - started)

        found = schedule_of(plan)
        forwards, backwards = map(len, phases(found))
        slots = (forwards * FORWARD + backwards * BACKWARD) / v
        ideal = (m + 3 / v) * (FORWARD + BACKWARD)
        first = first or (slots, best)
        stage_input = 4 * ROWS * SEQ_LEN * config.embed
        memory = compiled.memory_analysis().temp_size_in_bytes / stage_input
        is_phased = "" if found.is_phased else ", one action a slot"
        measured = best / first[1]
        table.add_row(
            found.name + is_phased, str(m), str(v), f"{slots / first[0]:.2f}",
            f"{ideal / first[0]:.2f}", f"{measured:.2f}", f"{slots / ideal:.2f}",
            f"{measured / (slots / first[0]):.2f}", f"{forwards}", f"{m * v}", f"{memory:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
