"""Traces, times and a simulated clock: what they say is checked by hand, and comes out twice."""

import contextlib
import copy
import dataclasses
import json
import shlex
import sys
from collections import Counter

import numpy as np
import pytest

from jaxpar import MeshSpec, Plan, cli_serve_options, cli_serve_sim
from jaxpar.cli import main
from jaxpar.errors import JaxparError, RequestError
from jaxpar.hardware import chip
from jaxpar.model.config import preset
from jaxpar.serve.closed_form import expected
from jaxpar.serve.estimate import collective, estimate_serving, estimate_training
from jaxpar.serve.handover import handover_bytes
from jaxpar.serve.measures import Level, Measures, Spread, Times
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.scheduler import Request
from jaxpar.serve.simulate import alike, estimated, given, measured, simulate
from jaxpar.serve.trace import Arrival, Trace
from tests.serve_helpers import DENSE, MAX_SEQ_LEN, plan
from tests.serving_helpers import answers_alone, one_and_two, two_replicas

TRACE = Trace(
    num_requests=14, requests_per_s=2.0, prompt_len=9, answer_len=6, max_seq_len=MAX_SEQ_LEN,
    vocab=DENSE.vocab, seed=4,
)  # fmt: skip
CLOCK = given(prefill_s=0.5, decode_s=0.25, handover_s=0.125)


def served(fleet, arrivals, clock=CLOCK, **options):
    fleet.start(**options)
    return simulate(fleet, arrivals, clock)


# --- the trace -------------------------------------------------------------------------------


def test_a_trace_is_its_seed():
    assert TRACE.arrivals() == TRACE.arrivals()
    assert TRACE.arrivals() != dataclasses.replace(TRACE, seed=5).arrivals()
    more = dataclasses.replace(TRACE, num_requests=4000, max_seq_len=1000).arrivals()
    gaps = np.diff([arrival.time_s for arrival in more])
    assert np.mean(gaps) == pytest.approx(0.5, rel=0.06)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.06), "exponential"
    assert np.mean([len(a.request.prompt) for a in more]) == pytest.approx(9, rel=0.08)
    assert np.mean([a.request.max_new_tokens for a in more]) == pytest.approx(6, rel=0.06)
    assert np.mean([a.request.sampling.temperature for a in more]) == pytest.approx(0.5, rel=0.06)
    for arrival in TRACE.arrivals():
        arrival.request.check(DENSE, plan("tensor=2"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "num_requests=0"),
        ({"requests_per_s": float("inf")}, "requests_per_s=inf"),
        ({"sampled": 1.5}, "a part of all requests"),
        ({"sampled": float("nan")}, "a part of all requests"),
        ({"answer_len": 30}, "Nearest answer_len: 23"),
        ({"prompt_len": 99}, "Nearest prompt_len: 31"),
    ],
)
def test_traces_that_cannot_be_are_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(TRACE, **fields)


# --- measures --------------------------------------------------------------------------------


def test_percentiles_are_by_nearest_rank():
    values = list(np.random.default_rng(0).random(37))
    found = Spread.of(values)
    for p in (50, 90, 99):
        assert getattr(found, f"p{p}") == np.percentile(values, p, method="inverted_cdf")
    assert found.mean == pytest.approx(np.mean(values)) and found.num == 37
    assert Spread.of([]).p99 is None
    assert Spread.of([3.0]).p50 == 3.0


def test_the_first_token_is_no_part_of_tpot():
    times = Times(arrival_s=1.0, token_s=[3.0, 3.5, 4.5])
    assert times.ttft_s == 2.0 and times.tpot_s == 0.75 and times.latency_s == 3.5
    assert times.gaps_s == [0.5, 1.0]
    one = Times(arrival_s=1.0, token_s=[9.0])
    assert one.tpot_s is None
    found = Measures.of([times, one], [], num_preempted=0, handover_bytes=0)
    assert found.tpot_s.num == 1 and found.ttft_s.num == 2
    assert found.tokens_per_s == pytest.approx(4 / 9) and found.duration_s == 9.0


def test_a_level_is_weighed_by_time():
    level = Level()
    level.set(1.0, 0.5)
    level.set(3.0, 0.25)
    assert level.mean(5.0) == pytest.approx((2 * 0.5 + 2 * 0.25) / 5) and level.peak == 0.5


# --- simulated -------------------------------------------------------------------------------


def test_times_of_one_request_are_those_of_its_steps():
    request = Request(prompt=(1,) * 10, max_new_tokens=4)
    found = served(two_replicas(), [Arrival(1.0, request)])
    # 8 tokens of the prompt, then its other two; three tokens more.
    assert found.requests[0].token_s == [2.0, 2.25, 2.5, 2.75]
    assert found.measures.ttft_s.p50 == 1.0 and found.measures.tpot_s.p99 == 0.25
    used = {one.name: one for one in found.measures.workers}
    assert used["replica 0"].busy == pytest.approx(1.75 / 2.75)
    assert (used["replica 0"].num_prefills, used["replica 0"].num_decodes) == (2, 3)
    assert used["replica 1"].busy == used["replica 1"].cache_peak == 0
    assert used["replica 0"].cache_peak == 4 / 12  # blocks of 4 for up to 13 tokens

    found = served(one_and_two(), [Arrival(1.0, request)])
    assert found.requests[0].token_s == [2.0, 2.375, 2.625, 2.875]
    decode = one_and_two().of("decode")[0].step.plan
    assert found.measures.handover_bytes == handover_bytes(DENSE, decode, 10)


def test_a_prompt_is_let_in_between_two_tokens_of_another():
    short, long = (Request(prompt=(1,) * n, max_new_tokens=8) for n in (2, 24))
    found = served(two_replicas(), [Arrival(0.0, short), Arrival(0.0, short), Arrival(0.1, long)])
    gaps = found.requests[0].gaps_s
    assert max(gaps) == 0.75 and gaps.count(0.75) == 3, "a chunk, and no more, at a time"
    apart = served(one_and_two(), [Arrival(0.0, short), Arrival(0.6, long)])
    assert max(apart.requests[0].gaps_s) == 0.375, "the hand-over and a decode"


@pytest.mark.parametrize("fleet", [two_replicas, one_and_two])
def test_tokens_are_the_reference_s_and_times_come_out_twice(fleet):
    arrivals = TRACE.arrivals()
    first, second = (served(fleet(), arrivals) for _ in range(2))
    assert first == second
    assert list(first.answers) == answers_alone([(0, arrival.request) for arrival in arrivals])
    assert [len(times.token_s) for times in first.requests] == list(map(len, first.answers))
    assert all(0 < one.busy <= 1 for one in first.measures.workers)
    for times, arrival in zip(first.requests, arrivals, strict=True):
        assert times.arrival_s == arrival.time_s
        assert times.token_s == sorted(times.token_s) and times.ttft_s >= 0.25
    data = first.measures.to_json()
    assert json.loads(json.dumps(data, allow_nan=False))["ttft_s"]["num"] == 14


@pytest.mark.parametrize("fleet", [two_replicas, one_and_two])
def test_workers_that_share_devices_serve_the_same(fleet):
    apart = fleet()
    together = copy.copy(apart)
    kinds = Counter(worker.kinds for worker in apart.workers)
    first = {worker.kinds: worker for worker in reversed(apart.workers)}
    together.workers = [w for kind, num in kinds.items() for w in alike(first[kind], num)]
    assert [w.name for w in together.workers] == [w.name for w in apart.workers]
    assert {w.devices for w in together.workers} < {w.devices for w in apart.workers}
    found = served(apart, TRACE.arrivals())
    assert served(together, TRACE.arrivals()) == found
    assert served(apart, TRACE.arrivals()) == found, "a second time, from the beginning"


def test_it_is_told_how_many_are_done():
    told = []
    two_replicas().start()
    simulate(two_replicas(), TRACE.arrivals(), CLOCK, told.append)
    assert told == sorted(told) and set(told) >= {0, 1, 14} and told[-1] == 14


def test_static_batches_say_the_same_and_take_longer():
    at_once = [arrival._replace(time_s=0.0) for arrival in TRACE.arrivals()]
    continuous, static = (
        served(two_replicas(), at_once, batching=batching, admission="queue")
        for batching in ("continuous", "static")
    )
    assert static.answers == continuous.answers
    assert static.measures.duration_s > 1.1 * continuous.measures.duration_s
    with pytest.raises(RequestError, match="'continuous', 'static'"):
        two_replicas().start(batching="whole")


def test_a_fleet_is_simulated_from_its_start():
    fleet = two_replicas()
    fleet.start()
    fleet.submit(Request(prompt=(1,), max_new_tokens=1))
    with pytest.raises(RequestError, match="taken 1 requests already"):
        simulate(fleet, [], CLOCK)
    fleet.start()
    far = Arrival(0.0, Request(prompt=(99,), max_new_tokens=1))
    with pytest.raises(RequestError, match="tokens go from 0 to 63"):
        simulate(fleet, [far], CLOCK)
    assert not fleet.requests


# --- clocks ----------------------------------------------------------------------------------


def test_estimated_steps_are_the_roofline_by_hand():
    large, h100 = preset("llama-3-8b"), chip("h100")
    served_on = ServePlan(mesh=plan("tensor=4").mesh, num_slots=8, max_seq_len=512, chunk_len=64)
    decode = estimate_serving(large, served_on, "decode", h100)
    matrices = large.num_parameters - large.vocab * large.embed  # a lookup is none
    weights = 2 * matrices / 4
    cache = 8 * 512 * 131_072 / 4
    assert decode.memory_bytes == pytest.approx(weights + cache, rel=1e-3)
    assert decode.memory_s == pytest.approx((weights + cache) / 3.35e12, rel=1e-2)
    sent = 1.5 * (2 * 32 + 1) * 8 * 4096 * 2  # two reductions a layer, and the embedding's
    assert decode.wire_bytes == pytest.approx(sent + 0.75 * 2 * 8 * 4 * 32 * 4, rel=1e-6)
    assert decode.bound == "memory" and decode.hidden_s == 0
    assert decode.step_s == pytest.approx(decode.memory_s + decode.link_s)
    prefill = estimate_serving(large, served_on, "prefill", h100)
    assert prefill.flops / decode.flops == pytest.approx(64 / 8, rel=0.1)
    trained = Plan(mesh=MeshSpec.parse("fsdp=2,tensor=4"), batch_size=16, seq_len=4096)
    train = estimate_training(large, trained, h100)
    state = 12 * large.num_parameters / 8  # a master copy and two moments, read and written
    assert train.memory_bytes == pytest.approx(2 * state, rel=1e-2)
    assert train.flops == pytest.approx(6 * matrices * 16 * 4096 / 8, rel=0.2)
    assert train.bound == "compute" and 0 < train.hidden_s < train.link_s
    clock = estimated(large, h100)
    assert clock.step_s(plan("tensor=4", num_slots=8, max_top_k=32), "decode", 8) < decode.step_s


def test_measured_times_are_of_this_machine():
    two_replicas().start()
    clock = measured(two_replicas())
    served_on = two_replicas().workers[0].step.plan
    assert clock.source.startswith("measured: on this machine, prefill ")
    assert 0 < clock.step_s(served_on, "decode", 8) < 10


def test_groups_of_a_closed_form_are_those_of_the_mesh():
    rows = expected(DENSE, plan("context=2,tensor=2"), "prefill")
    mesh = plan("context=2,tensor=2").mesh
    found = {(row.kind, row.axes): collective(row, mesh).groups.tolist() for row in rows}
    assert found["all-reduce", ("tensor",)] == [[0, 1], [2, 3]]
    assert found["all-reduce", ("context",)] == [[0, 2], [1, 3]]
    assert found["collective-permute", ("context",)] == [[0, 2], [2, 0], [1, 3], [3, 1]]


# --- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "everything"], "--only='everything'"),
        (["--clock", "given"], "needs --prefill-ms and --decode-ms"),
        (["--prefill-ms", "2"], "belong together"),
        (["--prefill-ms", "nan", "--decode-ms", "1"], "times above 0"),
        (["--timed-as", "gpt3-175b", "--max-seq-len", "4096"], "Nearest --max-seq-len: 2048"),
        (["--replicas", "0"], "--replicas=0 (int) must be"),
        (["--replicas", "100000000"], "Nearest --replicas: 1024"),
        (["--mesh", "tensor=16"], "tensor=16"),
        (["--mesh", "data=3"], "--slots=8 does not divide into equal parts of data=3"),
        (["--rate", "0"], "--rate=0.0 (float) must be a number above 0"),
        (["--model", "llama-3-405b"], "--model tiny --timed-as llama-3-405b"),
        (["--chip", "h99"], "Known: a100"),
    ],
)
def test_bad_options_end_the_command(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxpar", "serve-sim", *options])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_the_command_tells_how_far_it_is(monkeypatch, capsys):
    """What goes to the bar, of a fleet that is compiled already."""
    told = []

    class Bar(contextlib.nullcontext):
        def add_task(self, text, total):
            return len(told)

        def update(self, task, *, description, completed, total):
            told.append((description, completed, total))

    monkeypatch.setattr(cli_serve_options, "progress_bar", lambda: Bar(Bar()))
    monkeypatch.setattr(cli_serve_sim, "preset", lambda name: DENSE)
    monkeypatch.setattr(cli_serve_sim, "_params", lambda config: None)
    monkeypatch.setattr(cli_serve_sim, "_fleet", lambda *_: two_replicas())
    options = (
        "--only chunked --only static\\ batches --mesh tensor=2 --slots 2 --chunk-len 16 --rate 2 "
        f"--max-seq-len {MAX_SEQ_LEN} --prompt-len 9 --answer-len 6 --requests 5 "
        "--prefill-ms 500 --decode-ms 250"
    )
    monkeypatch.setattr(sys, "argv", ["jaxpar", "serve-sim", *shlex.split(options)])
    with pytest.raises(SystemExit) as exit:
        main()
    out = capsys.readouterr().out
    assert not exit.value.code and "2 × tensor=2" in out and "the same in every row" in out
    assert told[0] == (f"parameters of {DENSE.name}", 0, 5)
    for row in ("chunked (1 of 2), requests", "static batches (2 of 2), requests"):
        done = [completed for text, completed, total in told if text == row and total == 5]
        assert done == sorted(done) and set(done) == set(range(6))


def test_clocks_without_time_are_refused():
    with pytest.raises(JaxparError, match="decode_s=0"):
        given(prefill_s=1.0, decode_s=0)
