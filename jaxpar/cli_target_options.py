"""`jaxpar compile`, and what `jaxpar tour --target` takes: the command line of `cli_target`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxpar.console import Json, check_writable, tell

Target = Annotated[
    str | None,
    typer.Option(help="Compile for v5e:2x4, h100:1x8, ..., or a mesh file's; nothing is run."),
]
Slices = Annotated[int, typer.Option(min=1, help="TPU slices, of the target's size each.")]
XlaOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="XLA_NAME=VALUE|SET", help="For its compiler, or a set of options."
    ),
]
TimeLimit = Annotated[float, typer.Option(min=1, help="Seconds for one compilation.")]
MemoryLimit = Annotated[float, typer.Option(min=0.1, help="GiB of this machine for it.")]
HloFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Existing folder for the compiled HLO, one .gz each."),
]
UseCache = Annotated[bool, typer.Option(help="Keep and reuse what was compiled.")]


def tour_on_target(only: list[str] | None, json_path: Path | None, **told: Any) -> None:
    """Rows of the tour, compiled; `told` is what a `cli_target.Request` takes."""
    from jaxpar import cli_target

    _start(json_path)
    tell(cli_target.tour(cli_target.Request(**told), only or ()), json_path)


def compile_(
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT.py", help="A script that defines `experiment = Experiment(...)`."
        ),
    ],
    target: Annotated[
        str, typer.Option(help="v5p:4x4x4 (chips), h100:2x8 (hosts × devices), or a mesh file.")
    ],
    mesh: Annotated[
        str | None, typer.Option(help="Another mesh: a file, a shipped name, or axes.")
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the plan."),
    ] = None,
    num_slices: Slices = 1,
    option: XlaOptions = None,
    time_limit: TimeLimit = 1200.0,
    memory_limit: MemoryLimit = 12.0,
    cache: UseCache = True,
    hlo: HloFolder = None,
    json_path: Json = None,
) -> None:
    """Compile a training for hardware that need not be here, and audit what its compiler made."""
    from jaxpar import cli_target

    _start(json_path)
    request = cli_target.Request(
        target=target,
        num_slices=num_slices,
        options=option or (),
        time_limit_s=time_limit,
        memory_limit_gib=memory_limit,
        use_cache=cache,
        hlo=hlo,
    )
    tell(cli_target.compile_script(request, script, mesh, other or ()), json_path)


def _start(json_path: Path | None) -> None:
    import jax

    check_writable(json_path)
    jax.config.update("jax_platforms", "cpu")  # a device that happens to be there stays free
