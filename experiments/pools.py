"""How `size_pools` splits devices between prefill and decode, against every split, simulated.

    .venv/bin/python experiments/pools.py [--requests 240] [--json PATH]

Each load comes faster than eight workers of one device can serve it, so that the requests served
per second are what the busier pool allows. All tokens are computed; steps take the given times.
`predicted` is what `size_pools` says of the split, `simulated` what the clock said at the end,
which is less, as pools run empty at the end of a trace and full ones push back. `of the best` is
what counts: the split that was chosen ÷ the best of all. Exit code 1 where that is below 0.9.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, preset
from jaxpar.mesh import use_cpu_devices
from jaxpar.model.transformer import init_params
from jaxpar.serve.disaggregation import Disaggregated, size_pools
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.simulate import alike, given, simulate
from jaxpar.serve.trace import Trace

NUM_DEVICES, MAX_SEQ_LEN = 8, 128
LOADS = {
    "long prompts": {"prompt_len": 96, "answer_len": 8},
    "alike": {"prompt_len": 48, "answer_len": 24},
    "long answers": {"prompt_len": 16, "answer_len": 64},
}
"""Mean lengths of a trace."""
STEPS = {"prefill_s": 0.02, "decode_s": 0.01}


def main(
    requests: Annotated[int, typer.Option(min=20, help="Of each trace.")] = 240,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Exit code 1 where a chosen split serves less than 0.9 of the best one."""
    jax.config.update("jax_platforms", "cpu")
    use_cpu_devices(2)
    config = preset("tiny")
    plan = ServePlan(
        mesh=MeshSpec.parse("tensor=1"), num_slots=8, max_seq_len=MAX_SEQ_LEN, block_len=16,
        chunk_len=32, num_prefill_rows=2, compute_dtype="float32",
    )  # fmt: skip
    fleet = Disaggregated(config, init_params(config, 0), prefill=plan, decode=plan)
    pools = [alike(worker, NUM_DEVICES - 1) for worker in fleet.workers]
    table = Table("load", "prefill + decode", "predicted", "simulated", "of the best", "")
    told: list[dict[str, Any]] = []
    for load, lengths in LOADS.items():
        trace = Trace(
            num_requests=requests, requests_per_s=1000.0, max_seq_len=MAX_SEQ_LEN,
            vocab=config.vocab, **lengths,
        )  # fmt: skip
        arrivals = trace.arrivals()
        asked = [arrival.request for arrival in arrivals]
        how = {"prefill": plan, "decode": plan, **STEPS}
        chosen = size_pools(asked, trace.requests_per_s, **how, num_devices=NUM_DEVICES)
        per_s: dict[int, float] = {}
        for num in range(1, NUM_DEVICES):
            fleet.workers = pools[0][:num] + pools[1][: NUM_DEVICES - num]
            fleet.start()
            served = simulate(fleet, arrivals, given(**STEPS))
            per_s[num] = requests / max(times.token_s[-1] for times in served.requests)
        best = max(per_s.values())
        for num, rate in per_s.items():
            mine = num == chosen.num_prefill
            row = {
                "load": load, "num_prefill": num, "num_decode": NUM_DEVICES - num,
                "simulated": rate, "of_best": rate / best, "is_chosen": mine,
                "predicted": trace.requests_per_s * chosen.requests_per_s if mine else None,
            }  # fmt: skip
            told.append(row)
            table.add_row(
                load if num == 1 else "", f"{num} + {NUM_DEVICES - num}",
                f"{row['predicted']:.1f}/s" if mine else "", f"{rate:.1f}/s", f"{rate / best:.2f}",
                "chosen" if mine else "",
            )  # fmt: skip
        table.add_section()
    Console().print(table)
    if json_path:
        json_path.write_text(json.dumps(told, indent=1) + "\n")
    if any(row["is_chosen"] and row["of_best"] < 0.9 for row in told):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
