"""What `jaxpar serve-sim` does between its options and its output."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
from rich.table import Table

from jaxpar.console import FAILED, Answer
from jaxpar.errors import PlanError, RequestError, require_choice, require_whole
from jaxpar.hardware import chip
from jaxpar.mesh import MeshSpec, use_cpu_devices
from jaxpar.model.config import ModelConfig, preset
from jaxpar.model.transformer import Params, init_params
from jaxpar.report.text import literal, plain_table, size
from jaxpar.serve.disaggregation import Disaggregated, Sizes, size_pools
from jaxpar.serve.measures import Spread
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.replicas import Replicas
from jaxpar.serve.simulate import Clock, Served, alike, estimated, given, measured, simulate
from jaxpar.serve.trace import Trace
from jaxpar.serve.workers import Fleet

SCHEMA = "jaxpar.serve/1"

ROWS = ("chunked", "whole prompts", "static batches", "disaggregated")

CLOCKS = ("estimated", "measured", "given")

MAX_BLOCK_LEN = 16
MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of the command, as they were given; None for what was not."""

    model: str
    mesh: str
    num_replicas: int
    prefill_mesh: str
    decode_mesh: str
    num_prefill: int
    num_decode: int
    num_slots: int
    num_blocks: int | None
    chunk_len: int
    num_widths: int
    max_seq_len: int
    num_requests: int
    requests_per_s: float
    prompt_len: int
    answer_len: int
    seed: int
    clock: str
    timed_as: str
    chip: str
    prefill_ms: float | None
    decode_ms: float | None
    only: tuple[str, ...]


def answer(request: Request, progress: Callable[[str, int, int], None]) -> Answer:
    """Serve the trace in every way that was asked for. Raises JaxparError for bad options.

    progress: called with what is being simulated, its requests, and how many of them are done.
    """
    wanted = request.only or ROWS
    for name in wanted:
        require_choice(RequestError, "--only", name, ROWS)
    for field in ("num_replicas", "num_prefill", "num_decode"):
        require_whole(PlanError, field, getattr(request, field))
        if getattr(request, field) > MOST_WORKERS:
            raise PlanError(
                f"{field}={getattr(request, field)}: a simulation has at most {MOST_WORKERS} of "
                f"each kind. Nearest {field}: {MOST_WORKERS}."
            )
    config = replace(preset(request.model), max_seq_len=request.max_seq_len)
    trace = Trace(
        num_requests=request.num_requests,
        requests_per_s=request.requests_per_s,
        prompt_len=request.prompt_len,
        answer_len=request.answer_len,
        max_seq_len=request.max_seq_len,
        vocab=config.vocab,
        seed=request.seed,
    )
    plans = _plans(request)
    clock = _clock(request)
    for plan in plans.values():
        plan.check(config)
    _check_size(config)
    one_of_each = replace(request, num_replicas=1, num_prefill=1, num_decode=1)
    use_cpu_devices(max(_num_devices(name, one_of_each, plans) for name in wanted))
    progress(f"parameters of {config.name}", trace.num_requests, 0)
    params = _params(config)
    fleets: dict[str, Fleet] = {}
    served: dict[str, Served] = {}
    sources: dict[str, str] = {}
    sizes: Sizes | None = None
    for number, name in enumerate(wanted, start=1):
        told = partial(
            progress, f"{name} ({number} of {len(wanted)}), requests", trace.num_requests
        )
        told(0)
        made = "chunked" if name == "static batches" else name
        if made not in fleets:
            fleets[made] = _fleet(made, request, config, params, plans)
        fleet = fleets[made]
        fleet.start(batching="static" if name == "static batches" else "continuous")
        its_clock = clock or measured(fleet)
        served[name] = simulate(fleet, trace.arrivals(), its_clock, told)
        sources[name] = its_clock.source
        if name == "disaggregated":
            sizes = _sizes(request, trace, plans, its_clock)
    return _told(request, trace, plans, served, sources, sizes)


def _plans(request: Request) -> dict[str, ServePlan]:
    """By row; "prefill" and "decode" are those of the disaggregated one."""

    def plan(mesh: str, chunk_len: int) -> ServePlan:
        return ServePlan(
            mesh=MeshSpec.load(mesh),
            num_slots=request.num_slots,
            max_seq_len=request.max_seq_len,
            block_len=MAX_BLOCK_LEN,
            num_blocks=request.num_blocks,
            chunk_len=chunk_len,
            num_widths=request.num_widths,
            compute_dtype="float32",
        )

    return {
        "chunked": plan(request.mesh, request.chunk_len),
        "whole prompts": plan(request.mesh, request.max_seq_len),
        "prefill": plan(request.prefill_mesh, request.chunk_len),
        "decode": plan(request.decode_mesh, request.chunk_len),
    }


def _num_devices(name: str, request: Request, plans: dict[str, ServePlan]) -> int:
    if name == "disaggregated":
        here, there = plans["prefill"].mesh, plans["decode"].mesh
        return request.num_prefill * here.num_devices + request.num_decode * there.num_devices
    return request.num_replicas * plans["chunked"].mesh.num_devices


def _clock(request: Request) -> Clock | None:
    """None where it has to be measured first."""
    require_choice(RequestError, "--clock", request.clock, CLOCKS)
    if (request.prefill_ms is None) != (request.decode_ms is None):
        raise RequestError("--prefill-ms and --decode-ms belong together: give both, or none.")
    if request.prefill_ms is not None and request.decode_ms is not None:
        if not request.prefill_ms > 0 or not request.decode_ms > 0:
            raise RequestError("--prefill-ms and --decode-ms are times above 0, such as 20 and 8.")
        return given(prefill_s=request.prefill_ms / 1e3, decode_s=request.decode_ms / 1e3)
    if request.clock == "given":
        raise RequestError("--clock given needs --prefill-ms and --decode-ms, such as 20 and 8.")
    if request.clock == "estimated":
        large = preset(request.timed_as)
        if large.max_seq_len < request.max_seq_len:
            raise PlanError(
                f"--max-seq-len {request.max_seq_len} is more than {large.name}, by which steps "
                f"are timed, allows. Nearest --max-seq-len: {large.max_seq_len}."
            )
        return estimated(large, chip(request.chip))
    return None


def _check_size(config: ModelConfig) -> None:
    """Before minutes of work that end without memory: the whole model, and once on its devices."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 2 * 4 * config.num_parameters
    if needed > here:
        raise RequestError(
            f"--model {config.name} chooses the tokens, and with {config.num_parameters:,} float32 "
            f"parameters takes {size(needed)} at the least; this machine has {size(here)}. Let a "
            f"smaller one choose them, and time its steps as those of the large one: --model tiny "
            f"--timed-as {config.name}."
        )


def _params(config: ModelConfig) -> Params:
    """Larger than a fresh model's, so that different prompts have different answers."""
    fresh = jax.jit(lambda: jax.tree.map(lambda p: 4 * p, init_params(config, 0)))
    params: Params = jax.device_get(fresh())
    return params


def _fleet(
    name: str,
    request: Request,
    config: ModelConfig,
    params: Params,
    plans: dict[str, ServePlan],
) -> Fleet:
    """As many workers as were asked for; those of one kind share devices, see `alike`."""
    fleet: Fleet
    if name == "disaggregated":
        numbers: tuple[int, ...] = request.num_prefill, request.num_decode
        fleet = Disaggregated(config, params, prefill=plans["prefill"], decode=plans["decode"])
    else:
        numbers = (request.num_replicas,)
        fleet = Replicas(config, plans[name], params, num_replicas=1)
    kinds = zip(fleet.workers, numbers, strict=True)
    fleet.workers = [worker for first, num in kinds for worker in alike(first, num)]
    return fleet


def _sizes(request: Request, trace: Trace, plans: dict[str, ServePlan], clock: Clock) -> Sizes:
    """What `size_pools` would make of as many devices, for steps with the longest block tables."""
    prefill, decode = plans["prefill"], plans["decode"]
    return size_pools(
        [arrival.request for arrival in trace.arrivals()],
        trace.requests_per_s,
        prefill=prefill,
        decode=decode,
        prefill_s=clock.step_s(prefill, "prefill", prefill.blocks_per_sequence),
        decode_s=clock.step_s(decode, "decode", decode.blocks_per_sequence),
        num_devices=_num_devices("disaggregated", request, plans),
    )


def _told(
    request: Request,
    trace: Trace,
    plans: dict[str, ServePlan],
    served: dict[str, Served],
    sources: dict[str, str],
    sizes: Sizes | None,
) -> Answer:
    first = next(iter(served.values()))
    wrong = {
        name: sum(a != b for a, b in zip(one.answers, first.answers, strict=True))
        for name, one in served.items()
    }
    notes = [f"Simulated clock, {source}." for source in dict.fromkeys(sources.values())]
    notes.append(
        "TTFT: arrival to first token. TPOT: per token behind the first, which is excluded. "
        "gap: from one token to the next."
    )
    if sizes is not None:
        notes.append(
            f"Pools for this load on as many devices: {sizes.num_prefill} × prefill, "
            f"{sizes.num_decode} × decode, good for {sizes.requests_per_s:.2g} times as many "
            f"requests."
        )
    same = not any(wrong.values())
    told = "the same in every row" if same else f"different: {wrong}"
    notes.append(f"Answers, {first.measures.num_tokens:,} tokens of {request.model}: {told}.")
    data = {
        "schema": SCHEMA,
        "trace": asdict(trace),
        "pool_sizes": None if sizes is None else asdict(sizes),
        "rows": [
            {"name": name, "clock": sources[name], "num_wrong": wrong[name],
             "measures": one.measures.to_json()}
            for name, one in served.items()
        ],
    }  # fmt: skip
    table = _table(request, trace, plans, served)
    return Answer(shown=[table, *map(literal, notes)], data=data, code=0 if same else FAILED)


def _table(
    request: Request, trace: Trace, plans: dict[str, ServePlan], served: dict[str, Served]
) -> Table:
    table = plain_table(
        f"{trace.num_requests} requests, {trace.requests_per_s:g}/s, of about {trace.prompt_len} + "
        f"{trace.answer_len} tokens, seed {trace.seed}; times in ms: p50 / p90 / p99",
        ["served", "on"],
        ["TTFT", "TPOT", "gap p99", "tokens/s", "cache mean", "peak", "preempted", "handed over"],
        [],
    )
    for name, one in served.items():
        found = one.measures
        table.add_row(
            name,
            _devices(name, request, plans),
            _spread(found.ttft_s),
            _spread(found.tpot_s),
            _ms(found.gap_s.p99),
            f"{found.tokens_per_s:,.0f}",
            f"{sum(w.cache_mean for w in found.workers) / len(found.workers):.0%}",
            f"{max(w.cache_peak for w in found.workers):.0%}",
            f"{found.num_preempted}",
            size(found.handover_bytes) if found.handover_bytes else "",
        )
    return table


def _devices(name: str, request: Request, plans: dict[str, ServePlan]) -> str:
    if name == "disaggregated":
        return (
            f"{request.num_prefill} × {plans['prefill'].mesh}, "
            f"{request.num_decode} × {plans['decode'].mesh}"
        )
    return f"{request.num_replicas} × {plans['chunked'].mesh}"


def _spread(spread: Spread) -> str:
    return " / ".join(_ms(value) for value in (spread.p50, spread.p90, spread.p99))


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"
