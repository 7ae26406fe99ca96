"""What `jaxpar table` does between its options and its output."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from jaxpar.errors import PlanError
from jaxpar.model.config import preset
from jaxpar.predict.states import zero_bytes
from jaxpar.report.text import plain_table

SCHEMA = "jaxpar.table/1"

MODELS = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
"""The models of Rajbhandari et al. 2020, table 1."""

NUM_DEVICES = (1, 4, 16, 64, 256, 1024)

STAGES = {1: "zero 1", 2: "zero 2", 3: "zero 3"}


def zero_table(models: list[str]) -> tuple[Table, dict[str, Any]]:
    """State bytes per device by ZeRO stage and devices: the paper's models, or these presets."""
    sizes = {name: preset(name).num_parameters for name in models} or MODELS
    columns = [f"{name}, {label}" for name in sizes for label in STAGES.values()]
    table = plain_table("State per device in GB (10⁹ bytes)", [], ["devices", *columns], [])
    rows = []
    for n in NUM_DEVICES:
        cells = [str(n)]
        for name, size in sizes.items():
            found = {zero: zero_bytes(size, n, zero) for zero in STAGES}
            cells += [in_gigabytes(value) for value in found.values()]
            rows.append(
                {
                    "model": name,
                    "num_parameters": size,
                    "num_devices": n,
                    "data_parallel_bytes": zero_bytes(size, n, 0),
                    **{f"zero{zero}_bytes": value for zero, value in found.items()},
                }
            )
        table.add_row(*cells)
    return table, {
        "schema": SCHEMA,
        "table": "zero",
        "source": "Rajbhandari et al. 2020, table 1",
        "rows": rows,
    }


def in_gigabytes(num_bytes: float) -> str:
    """Three digits, halves up, as the paper prints them; more in front of the point."""
    value = num_bytes / 1e9 * (1 + 1e-9)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def answer(zero: bool, models: list[str]) -> tuple[Table, dict[str, Any]]:
    """Raises PlanError where no table was asked for."""
    if not zero:
        raise PlanError("Which table? --zero: state per device by ZeRO stage.")
    return zero_table(models)
