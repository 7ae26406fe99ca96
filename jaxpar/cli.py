"""The command line. Exit codes: 0 fine, 1 a check failed, 2 bad input, 3 incomplete input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxpar import cli_target_options
from jaxpar.cli_serve_options import serve_sim
from jaxpar.console import (
    BAD_INPUT,
    FAILED,
    Answer,
    Json,
    Verb,
    check_writable,
    ends_at_once,
    open_console,
    print_table,
    progress_bar,
    show,
    tell,
    write,
    write_json,
)
from jaxpar.errors import JaxparError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="Model preset.")]


@app.command()
def tour(
    only: Annotated[
        list[str] | None, typer.Option(help="Only this row, e.g. fsdp; may be repeated.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this file instead.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Training steps per row.")] = 5,
    json_path: Json = None,
    html: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    target: cli_target_options.Target = None,
    num_slices: cli_target_options.Slices = 1,
    option: cli_target_options.XlaOptions = None,
    time_limit: cli_target_options.TimeLimit = 1200.0,
    memory_limit: cli_target_options.MemoryLimit = 12.0,
    cache: cli_target_options.UseCache = True,
    hlo: cli_target_options.HloFolder = None,
) -> None:
    """Every strategy on 8 virtual CPU devices: trained, compared with one device, audited.

    With --target it is compiled for that hardware instead, which need not be here, and audited.
    """
    import jax

    if target is not None:
        return cli_target_options.tour_on_target(
            only, json_path, target=target, num_slices=num_slices, options=option or (),
            time_limit_s=time_limit, memory_limit_gib=memory_limit, use_cache=cache, hlo=hlo,
        )  # fmt: skip

    from jaxpar.report.html import tour_page
    from jaxpar.report.text import literal, tour_table, tour_verdict
    from jaxpar.text import Corpus
    from jaxpar.tour import take_tour

    # The tour is about virtual CPU devices; an accelerator that happens to be there stays free.
    jax.config.update("jax_platforms", "cpu")
    # Programs run for five steps: compiling them well would take longer than it saves, and what
    # they communicate is settled before machine code is made.
    jax.config.update("jax_disable_most_optimizations", True)
    check_writable(json_path, html)
    with ends_at_once(), progress_bar() as bar:
        task = bar.add_task("", total=None)
        result = take_tour(
            corpus=Corpus.from_file(text) if text else None,
            only=only or (),
            num_steps=steps,
            progress=lambda name, done, total: bar.update(
                task, description=name, completed=done, total=total
            ),
        )
    console = open_console()
    print_table(console, tour_table(result))
    console.print(tour_verdict(result))
    write(html, tour_page(result))
    console.print(literal(f"Written: {html}"), soft_wrap=True)
    write_json(json_path, result.to_json())
    if not result.agrees:
        raise typer.Exit(FAILED)


@app.command(cls=Verb)
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="STRATEGY", help="data, fsdp, ..., a row of the tour: hsdp, or prefill, decode."
        ),
    ],
    model: Model = "llama-3-8b",
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh file, shipped name, or axes; as in the tour if not given."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    num_accumulation_steps: Annotated[
        int | None,
        typer.Option("--accumulation-steps", help="Micro-batches per step, one after the other."),
    ] = None,
    sequence: Annotated[
        bool | None, typer.Option("--sequence", help="Sequence parallelism over axis tensor.")
    ] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    remat: Annotated[str | None, typer.Option(help="none, selective, dots or full.")] = None,
    other: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Any field of a Plan, such as num_microbatches=16; may be repeated.",
        ),
    ] = None,
    json_path: Json = None,
) -> None:
    """A strategy's card, and its closed form for a model on a mesh. Nothing is run."""
    from jaxpar import cli_explain

    check_writable(json_path)
    training_only = {
        "num_accumulation_steps": num_accumulation_steps,
        "sequence": sequence,
        "reduce_dtype": reduce_dtype,
        "remat": remat,
    }
    if name in cli_explain.SERVING:
        said = cli_explain.of_serving(
            name, model=model, mesh=mesh, batch_size=batch_size, seq_len=seq_len,
            compute_dtype=compute_dtype, training_only=training_only, other=other or (),
        )  # fmt: skip
    else:
        said = cli_explain.of_training(
            name, model=model, mesh=mesh, batch_size=batch_size, seq_len=seq_len,
            fields={**training_only, "compute_dtype": compute_dtype}, other=other or (),
        )  # fmt: skip
    tell(said, json_path)


@app.command(cls=Verb)
def recipe(
    name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="large-dense, moe, ...; none: list them.")
    ] = None,
    model: Model = "llama-3-8b",
    num_devices: Annotated[int, typer.Option("--devices", min=1, help="Devices in all.")] = 64,
    num_devices_per_node: Annotated[
        int | None,
        typer.Option("--devices-per-node", min=1, help="Devices that share the fastest links; 8."),
    ] = None,
    tensor: Annotated[int | None, typer.Option(min=1, help="Size of this axis.")] = None,
    pipe: Annotated[int | None, typer.Option(min=1, help="Size of this axis.")] = None,
    expert: Annotated[int | None, typer.Option(min=1, help="Size of this axis.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Size of this axis.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 512,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    other: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the plan."),
    ] = None,
    json_path: Json = None,
) -> None:
    """A usual combination of strategies for a model on a cluster, and what it communicates."""
    from jaxpar import cli_recipe

    check_writable(json_path)
    if name is None:
        said = cli_recipe.all_recipes()
    else:
        sizes = {"tensor": tensor, "pipe": pipe, "expert": expert, "context": context}
        said = cli_recipe.one_recipe(
            name,
            model=model,
            num_devices=num_devices,
            batch_size=batch_size,
            seq_len=seq_len,
            sizes=sizes | {"num_devices_per_node": num_devices_per_node},
            other=other or (),
        )
    tell(said, json_path)


@app.command()
def table(
    zero: Annotated[
        bool, typer.Option("--zero", help="State per device by ZeRO stage and number of devices.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A preset, instead of the table's own models; may be repeated."),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Training, prefill and decode side by side.")
    ] = False,
    chip: Annotated[str, typer.Option(help="Chip by which steps are timed.")] = "h100",
    target: cli_target_options.Target = None,
    json_path: Json = None,
) -> None:
    """A table of closed forms; of small models' steps, compiled and audited too. Nothing is run."""
    from jaxpar.cli_table import answer

    check_writable(json_path)
    shown, data = answer(zero, model or [], inference=inference, chip=chip, target=target)
    code = 0 if data.get("agrees", True) else FAILED
    tell(Answer(shown=[shown], data=data, code=code), json_path)


@app.command()
def audit(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PATH|MODULE:FN",
            help="Compiled HLO: text (.txt, .hlo, or .gz of it), a serialized module (.pb), a "
            "folder that XLA dumped into; or a function without arguments of a module that can be "
            "imported from here: it returns (jitted, *arguments), a Lowered, a Compiled or HLO "
            "text, or is a jitted function itself.",
        ),
    ],
    mesh: Annotated[
        str | None, typer.Option(help="Your axes, any names: dp=2,tp=4; or a mesh file.")
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            help="Sums instead of operations, by axis, kind, phase, scope, source or layer: the "
            "part of the scope that ends in layer(s), block(s) or is h, with its number "
            "(layers_3, h.3); without one, as in a scan over layers, 'layers (scan)'."
        ),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Bytes from each device to each other.")
    ] = False,
    budget: Annotated[
        Path | None, typer.Option(help="TOML file of limits; exit code 1 when one is not kept.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|MODULE:FN",
            help="What changed since this program; exit code 1 when the communication differs.",
        ),
    ] = None,
    chip: Annotated[
        str | None, typer.Option(help="Chip by which times are estimated, e.g. h100.")
    ] = None,
    devices_per_host: Annotated[
        int | None, typer.Option(min=1, help="Tells which groups leave a host.")
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="In a dump folder: the module with this in its name.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="In a dump folder: final, or partitioned.")
    ] = None,
    json_path: Json = None,
) -> None:
    """What a compiled program communicates: which collective, which axis, how often, how much."""
    from jaxpar.cli_audit import Request, answer

    check_writable(json_path)
    options = {
        "chip": chip,
        "devices_per_host": devices_per_host,
        "module": module,
        "stage": stage,
    }
    said = answer(
        Request(
            what=what,
            mesh=mesh,
            group_by=group_by,
            matrix=matrix,
            budget=budget,
            against=against,
            options={key: value for key, value in options.items() if value is not None},
        )
    )
    tell(said, json_path)


@app.command(cls=Verb)
def schedule(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE.csv",
            help="gpipe, 1f1b, interleaved or zb-h1; or your table: a row per slot, a column per "
            "stage, cells such as F3 (forward), B0 (backward), I0 and W0 (its halves), F3.1 "
            "(chunk 1), F3 B0 (one after the other).",
        ),
    ],
    num_stages: Annotated[
        int | None, typer.Option("--stages", help="Devices along axis pipe; 4.")
    ] = None,
    num_microbatches: Annotated[
        int | None, typer.Option("--microbatches", help="Micro-batches per step; 8.")
    ] = None,
    num_virtual_stages: Annotated[
        int | None, typer.Option("--virtual", help="Chunks of layers per stage; 1.")
    ] = None,
    phased: Annotated[
        bool, typer.Option("--phased", help="A forward and then a backward in each slot.")
    ] = False,
    forward: Annotated[float, typer.Option(help="Time of a forward, in any unit.")] = 1.0,
    backward: Annotated[float | None, typer.Option(help="Time of a backward; 2.")] = None,
    input_gradient: Annotated[float | None, typer.Option(help="Instead: of its halves; 1.")] = None,
    weight_gradient: Annotated[float | None, typer.Option(help="And the other one; 1.")] = None,
    send: Annotated[float, typer.Option(help="Time of a message.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Write the timelines to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    json_path: Json = None,
) -> None:
    """A pipeline schedule: drawn, and how long it is, idle, and in memory. Nothing is run."""
    from jaxpar.cli_schedule import Request, answer

    check_writable(svg, csv, json_path)
    console = open_console()
    said = answer(
        Request(
            what=what,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_virtual_stages=num_virtual_stages,
            phased=phased,
            forward=forward,
            backward=backward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            send=send,
            width=console.width,
        )
    )
    drawn = said.svg if svg is not None else ""
    show(said.shown, console)
    for path, content in ((svg, drawn), (csv, said.csv)):
        if path is not None:
            write(path, content)
    write_json(json_path, said.data)


@app.command()
def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND…", help="What each process runs: jaxpar run …"),
    ],
    num: Annotated[int, typer.Option("-n", "--num-processes", help="Processes.")] = 2,
    devices_per_process: Annotated[int, typer.Option(help="Virtual CPU devices of each.")] = 1,
    stall_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress; 20, or more where steps are slow."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds after Ctrl-C in which to leave a checkpoint.")
    ] = 60.0,
    logs: Annotated[
        Path | None, typer.Option(help="Existing folder for the output of all ranks.")
    ] = None,
    json_path: Json = None,
) -> None:
    """One run in several processes of this machine; if one fails, all end, and it is told which."""
    from jaxpar.cli_launch import told
    from jaxpar.launch import Launch
    from jaxpar.launch import launch as run_all
    from jaxpar.report.text import literal

    check_writable(json_path)
    result = run_all(
        Launch(
            command=command,
            num_processes=num,
            devices_per_process=devices_per_process,
            stall_s=stall_timeout,
            grace_s=grace,
            logs=logs,
        )
    )
    console = Console(stderr=True)  # standard output is rank 0's
    for line in told(result):
        console.print(literal(line), soft_wrap=True)
    write_json(json_path, result.to_json())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@app.command(cls=Verb)
def run(
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT.py", help="A script that defines `experiment = Experiment(...)`."
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option(help="Train on this one: a mesh file, a shipped name, or axes."),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Any other field of the plan; may be repeated."
        ),
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps in all, those before a restart too.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this file instead.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Save the training here on its way.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint in that folder.")
    ] = False,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Append a line per step to this file.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write scalars for TensorBoard here.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Train what a script says, on any mesh. Ctrl-C leaves a checkpoint."""
    from jaxpar.cli_run import Request, answer
    from jaxpar.processes import is_main

    check_writable(metrics, json_path, folders=(checkpoint, tensorboard))
    said = answer(
        Request(
            script=script,
            mesh=mesh,
            fields=tuple(other or ()),
            num_steps=num_steps,
            text=text,
            checkpoint=checkpoint,
            resume=resume,
            metrics=metrics,
            tensorboard=tensorboard,
        ),
        open_console(),
    )
    tell(said, json_path if is_main() else None)


app.command("serve-sim", cls=Verb)(serve_sim)
app.command("compile")(cli_target_options.compile_)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="The version, and JAX's.")] = False,
) -> None:
    """Parallelism strategies in JAX: predicted, compiled, audited, executed."""
    if show:
        import jax

        import jaxpar

        typer.echo(f"jaxpar {jaxpar.__version__}, JAX {jax.__version__}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `jaxpar` command: errors people can mend are told in one paragraph.

    arguments: verb and options; those of the command line where not given.
    """
    try:
        app(args=arguments, prog_name="jaxpar")
    except JaxparError as error:
        from jaxpar.report.text import literal

        Console(stderr=True).print(literal(f"jaxpar: {error}", style="red"), soft_wrap=True)
        if processes := sys.modules.get("jaxpar.processes"):
            processes.failing(type(error).__name__, BAD_INPUT)  # others may wait for this one
        sys.exit(getattr(error, "exit_code", BAD_INPUT))
