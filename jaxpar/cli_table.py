"""What `jaxpar table` does between its options and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from jaxpar.errors import PlanError
from jaxpar.model.config import preset
from jaxpar.predict.states import zero_bytes
from jaxpar.report.text import plain_table
from jaxpar.report.text import size as with_unit

if TYPE_CHECKING:
    from jaxpar.hardware import Chip
    from jaxpar.serve.comparison import Compile
    from jaxpar.serve.estimate import Phase
    from jaxpar.serve.step import ServeStep
    from jaxpar.targets import OnTarget
    from jaxpar.train import TrainStep

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


COMPARED = ("tiny", "tiny-moe", "llama-3-8b", "mixtral-8x7b")
"""Models of the comparison: small ones, whose programs are audited, and large ones."""

COMPILED_THERE = ("tiny", "tiny-moe")
"""Models of the comparison that are compiled for a target unless others are asked for."""

NUM_COMPARED = 8
"""Devices of the comparison."""


def inference_table(
    models: list[str], chip_name: str, target_name: str | None = None
) -> tuple[Table, dict[str, Any]]:
    """Training, prefill and decode side by side, of these presets on 8 devices."""
    import jax

    from jaxpar.hardware import chip
    from jaxpar.mesh import use_cpu_devices
    from jaxpar.serve.comparison import MOST_COMPILED, compared

    jax.config.update("jax_platforms", "cpu")  # an accelerator that is here stays free
    default = COMPILED_THERE if target_name else COMPARED
    configs, which, there = [preset(name) for name in models or default], chip(chip_name), None
    if target_name is not None:
        which, there = _for_target(target_name)
    elif any(config.num_parameters <= MOST_COMPILED for config in configs):
        use_cpu_devices(NUM_COMPARED)
    table = plain_table(
        f"One step on {NUM_COMPARED} devices; times in ms on {which.name}, at the least",
        ["model", "step", "mesh", "main communication"],
        ["times", "wire", "B/MFLOP", "can hide", "compute", "memory", "links", "step"],
        ["bound by", "from"],
    )
    rows, agrees = [], True
    for config in configs:
        for row in compared(config, which, num_devices=NUM_COMPARED, there=there):
            main, found = row.shares[0], row.estimate
            part = main.wire_bytes / found.wire_bytes
            source = "closed form" if row.agrees is None else "audited"
            if row.exposed_part is not None:
                source += f", {row.exposed_part:.0%} of links exposed"
            source += "".join(f"; {change}" for change in row.changes)
            table.add_row(
                config.name if row.phase == "train" else "",
                row.phase,
                str(row.mesh),
                f"{main.kind} over {','.join(main.axes)}, {part:.0%}",
                f"{main.count}",
                with_unit(found.wire_bytes),
                f"{row.bytes_per_megaflop:.3g}",
                f"{row.hidden_part:.0%}",
                *(f"{1e3 * t:.3g}" for t in (found.compute_s, found.memory_s, found.link_s)),
                f"{1e3 * found.step_s:.3g}",
                found.bound,
                "audit differs" if row.agrees is False else source,
            )
            rows.append(row.to_json())
            agrees = agrees and row.agrees is not False
        table.add_section()
    return table, {
        "schema": SCHEMA,
        "table": "inference",
        "chip": which.name,
        "target": target_name,
        "num_devices": NUM_COMPARED,
        "agrees": agrees,
        "rows": rows,
    }


def _for_target(name: str) -> tuple[Chip, Compile]:
    """The target's chip, and how steps are compiled for it; programs are kept on disk."""
    from jaxpar.serve.on_target import compile_serving_for
    from jaxpar.targets import Cache, Target, compile_for
    from jaxpar.targets.cache import default_folder
    from jaxpar.train import TrainStep

    target, cache = Target.parse(name), Cache(default_folder())

    def there(step: TrainStep | ServeStep, phase: Phase) -> OnTarget:
        if isinstance(step, TrainStep):
            return compile_for(step, target, cache=cache)
        assert phase != "train"
        return compile_serving_for(step, phase, target, cache=cache)

    return target.hardware, there


def answer(
    zero: bool,
    models: list[str],
    *,
    inference: bool = False,
    chip: str = "h100",
    target: str | None = None,
) -> tuple[Table, dict[str, Any]]:
    """Raises PlanError where no table was asked for, or two."""
    if zero == inference:
        raise PlanError(
            "Which table? --zero: state per device by ZeRO stage. --inference: training, prefill "
            "and decode side by side. One at a time."
        )
    if target is not None and not inference:
        raise PlanError("--target compiles the steps of --inference; --zero compiles nothing.")
    return inference_table(models, chip, target) if inference else zero_table(models)
