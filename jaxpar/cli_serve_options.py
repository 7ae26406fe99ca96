"""`jaxpar serve-sim`: its options. What it does with them is in cli_serve_sim.py."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxpar.console import Json, check_writable, progress_bar, tell


def serve_sim(
    model: Annotated[str, typer.Option(help="Model preset that chooses the tokens.")] = "tiny",
    mesh: Annotated[str, typer.Option(help="Mesh of each replica.")] = "tensor=4",
    num_replicas: Annotated[
        int, typer.Option("--replicas", help="Replicas, each with a cache of its own.")
    ] = 2,
    prefill_mesh: Annotated[str, typer.Option(help="Disaggregated: of each prefill worker.")] = (
        "tensor=4"
    ),
    decode_mesh: Annotated[str, typer.Option(help="Disaggregated: of each decode worker.")] = (
        "tensor=2"
    ),
    num_prefill: Annotated[int, typer.Option(help="Disaggregated: prefill workers.")] = 1,
    num_decode: Annotated[int, typer.Option(help="Disaggregated: decode workers.")] = 2,
    num_slots: Annotated[int, typer.Option("--slots", help="Sequences in each decode step.")] = 8,
    num_blocks: Annotated[
        int | None,
        typer.Option("--blocks", help="Blocks of each cache, of 16 tokens; for all slots."),
    ] = None,
    chunk_len: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 64,
    num_widths: Annotated[
        int, typer.Option("--widths", help="Lengths of block tables to compile for.")
    ] = 1,
    max_seq_len: Annotated[int, typer.Option(help="Most tokens of a sequence.")] = 512,
    num_requests: Annotated[int, typer.Option("--requests", help="Requests of the trace.")] = 32,
    requests_per_s: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 200.0,
    prompt_len: Annotated[int, typer.Option(help="Mean tokens of a prompt.")] = 160,
    answer_len: Annotated[int, typer.Option(help="Mean tokens of an answer.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 0,
    clock: Annotated[
        str, typer.Option(help="Step times: estimated, measured (here), or given.")
    ] = "estimated",
    timed_as: Annotated[str, typer.Option(help="Preset whose step times are estimated.")] = (
        "llama-3-8b"
    ),
    chip: Annotated[str, typer.Option(help="Chip for which they are.")] = "h100",
    prefill_ms: Annotated[float | None, typer.Option(help="Given time of a prefill step.")] = None,
    decode_ms: Annotated[float | None, typer.Option(help="Given time of a decode step.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="chunked, whole prompts, static batches or disaggregated; repeat."),
    ] = None,
    json_path: Json = None,
) -> None:
    """A seeded trace served on virtual CPU devices and a simulated clock: TTFT, TPOT, rates."""
    import jax

    from jaxpar.cli_serve_sim import Request, answer

    # Tokens have to be right; how long these programs take is not looked at, unless measured.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", clock != "measured")
    check_writable(json_path)
    with progress_bar() as bar:
        task = bar.add_task("", total=None)
        said = answer(
            Request(
                model=model,
                mesh=mesh,
                num_replicas=num_replicas,
                prefill_mesh=prefill_mesh,
                decode_mesh=decode_mesh,
                num_prefill=num_prefill,
                num_decode=num_decode,
                num_slots=num_slots,
                num_blocks=num_blocks,
                chunk_len=chunk_len,
                num_widths=num_widths,
                max_seq_len=max_seq_len,
                num_requests=num_requests,
                requests_per_s=requests_per_s,
                prompt_len=prompt_len,
                answer_len=answer_len,
                seed=seed,
                clock=clock,
                timed_as=timed_as,
                chip=chip,
                prefill_ms=prefill_ms,
                decode_ms=decode_ms,
                only=tuple(only or ()),
            ),
            lambda name, total, done: bar.update(
                task, description=name, completed=done, total=total
            ),
        )
    tell(said, json_path)
