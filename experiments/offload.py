"""What waits in host memory, how many bytes travel for it, and what that takes at least.

    .venv/bin/python experiments/offload.py
    .venv/bin/python experiments/offload.py --model llama-3-70b --mesh fsdp=64,tensor=8

Nothing runs: a table of closed forms, per device and step. `time` is at 25 GB/s each way, half of
what one PCIe 5.0 x16 slot can do at best (63 GB/s; PCI-SIG, PCIe 5.0), both ways at once.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxpar import MeshSpec, Plan, preset
from jaxpar.strategies import compose, offload

GB_PER_SECOND = 25.0
CHOICES = {
    "optimizer": {"offload": "optimizer"},
    "activations, remat='full'": {"offload": "activations", "remat": "full"},
    "activations, remat='dots'": {"offload": "activations", "remat": "dots"},
    "both, remat='full'": {"offload": "both", "remat": "full"},
}


def main(
    model: str = "llama-3-8b",
    mesh: str = "fsdp=8",
    batch_size: int = 8,
    seq_len: int = 8192,
    num_moments: Annotated[int, typer.Option(help="Of the optimizer; Adam's 2.")] = 2,
) -> None:
    config = preset(model)
    table = Table(title=f"{model} on {mesh}, {batch_size} × {seq_len} tokens", title_justify="left")
    for column in ("offload", "to host", "to device", "time"):
        table.add_column(column, justify="left" if column == "offload" else "right")
    for name, fields in CHOICES.items():
        plan = Plan(mesh=MeshSpec.parse(mesh), batch_size=batch_size, seq_len=seq_len, **fields)
        compose.check(config, plan)
        layout = compose.layout(config, plan)
        moved = {"to host": 0, "to device": 0}
        for copy in offload.transfers(config, plan, layout, num_moments=num_moments):
            moved[copy.direction] += copy.executions * copy.num_bytes
        seconds = max(moved.values()) / (GB_PER_SECOND * 1e9)
        cells = (f"{size / 2**30:.2f} GiB" for size in moved.values())
        table.add_row(name, *cells, f"{seconds * 1e3:.0f} ms")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
