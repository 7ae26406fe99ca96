"""Prefill and decode on meshes of different shape: the same tokens, and the bytes that go over."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import audit
from jaxpar.errors import LostError, PlanError
from jaxpar.model.config import preset
from jaxpar.serve.cache import KV
from jaxpar.serve.disaggregation import Disaggregated, size_pools
from jaxpar.serve.handover import Handover, handover_bytes, held, pieces, powers, stacks
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.pool import blocks_of
from jaxpar.serve.scheduler import Request
from jaxpar.serve.workers import StepOn, cut
from tests.serve_helpers import DENSE, EXPERTS, plan, requests, some_params
from tests.serving_helpers import answers_alone, one_and_two


@pytest.fixture
def pools():
    one_and_two().start()
    return one_and_two()


def finish(pools, given=()):
    """Serve until all is done; their numbers, if (step, request) pairs are to come."""
    numbers = [None] * len(given)
    for step in range(2000):
        for i, (when, request) in enumerate(given):
            if when == step:
                numbers[i] = pools.submit(request)
        if None not in numbers and pools.is_idle:
            return numbers
        pools.step()
    raise AssertionError("somebody never ends")


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", ["preempt", "queue"])
def test_answers_are_those_of_one_device_and_full_pools_push_back(pools, admission):
    pools.start(admission=admission)
    given = requests(16, seed=5)
    answers = [pools.answer(number) for number in finish(pools, given)]
    assert answers == answers_alone(given)
    assert pools.num_held_back > 0
    assert (pools.num_again > 0) == (admission == "preempt")
    assert all(worker.scheduler.used_blocks == 0 for worker in pools.workers)


def test_bytes_of_all_handovers_are_the_closed_form(pools):
    pools.start(admission="queue")  # nothing goes over twice
    prompts = [(1,), (2, 3), (4,) * 4, (5,) * 5, (6,) * 13, (7,) * 20]
    numbers = [pools.submit(Request(prompt=p, max_new_tokens=3)) for p in prompts]
    finish(pools)
    # Of the last chunk's single token the decode worker makes the key itself, so 8 + 1 go as 8.
    cached = [len(p) if len(p) % 8 != 1 else len(p) - 1 for p in prompts]
    decode = pools.of("decode")[0].step.plan
    by_hand = sum(
        2 * DENSE.num_layers * 4 * math.ceil(n / 4) * DENSE.num_kv_heads * DENSE.head_dim * 4
        for n in cached
    )
    assert pools.moved.num_bytes == by_hand
    assert by_hand == sum(handover_bytes(DENSE, decode, n) for n in cached)
    sent = sum(len(powers(blocks_of(n, 4))) for n in cached)
    assert pools.moved.num_pieces == sent * 2 * decode.mesh.num_devices
    assert all(pools.answer(number) for number in numbers)


def test_one_that_is_lost_takes_no_answer_with_it(pools):
    given = [(0, request) for _, request in requests(10, seed=6)]
    numbers = [pools.submit(request) for _, request in given]
    for _ in range(5):
        pools.step()
    assert pools.workers[1].sequences
    pools.lose("decode 0")
    finish(pools)
    assert [pools.answer(number) for number in numbers] == answers_alone(given)


def test_handovers_under_way_are_called_off_when_either_side_is_lost(pools):
    given = [(0, Request(prompt=(i, 2, 3), max_new_tokens=6)) for i in range(3)]
    numbers = [pools.submit(request) for _, request in given]
    prefill, first = pools.workers[0], pools.workers[1]
    pools.finish(prefill, pools.begin(prefill))
    while len(pools.ready()) < 3:
        pools.finish(prefill, pools.begin(prefill))
    transits = pools.begin_handovers()
    assert len(transits) == 3 and all(pools.begin(w) is None for w in pools.of("decode"))
    pools.lose("decode 0")
    assert [pools.land(transit) for transit in transits] == [
        t.target is not first for t in transits
    ]
    finish(pools)
    assert [pools.answer(number) for number in numbers] == answers_alone(given)


def begun_handover(pools):
    """The only request, ready and on its way."""
    number = pools.submit(Request(prompt=(1, 2, 3), max_new_tokens=6))
    prefill = pools.workers[0]
    pools.finish(prefill, pools.begin(prefill))
    (transit,) = pools.begin_handovers()
    assert transit.target.scheduler.used_blocks > 0
    return number, transit


def test_one_preempted_on_its_way_stays_where_it_was(pools):
    number, transit = begun_handover(pools)
    transit.target.scheduler.preempt(transit.there)
    pools._take_back(transit.target)
    assert not pools.land(transit) and pools.num_again == 0
    assert [s.id for worker in pools.workers for s in worker.sequences] == [number]
    finish(pools)
    assert [pools.answer(number)] == answers_alone([(0, pools.requests[number])])


def test_one_whose_keys_are_lost_on_the_way_leaves_nothing_behind(pools):
    number, transit = begun_handover(pools)
    pools.lose("prefill 0")
    assert not pools.land(transit)
    assert all(worker.scheduler.used_blocks == 0 for worker in pools.of("decode"))
    with pytest.raises(LostError, match="after 1 of at most 6 tokens: all prefill workers"):
        pools.answer(number)


def test_without_a_pool_requests_fail_by_name(pools):
    numbers = [pools.submit(Request(prompt=(i, 2, 3), max_new_tokens=9)) for i in range(4)]
    while not pools.of("decode")[0].sequences:
        pools.step()
    gone_over = {s.id for worker in pools.of("decode") for s in worker.sequences}
    pools.lose("prefill 0")
    finish(pools)
    want = answers_alone([(0, pools.requests[number]) for number in numbers])
    assert 0 < len(gone_over) < 4
    for number in numbers:
        if number in gone_over:
            assert pools.answer(number) == want[number]
        else:
            with pytest.raises(LostError, match="all prefill workers are lost"):
                pools.answer(number)
    with pytest.raises(LostError, match="all prefill workers are lost"):
        pools.submit(Request(prompt=(1,), max_new_tokens=1))

    pools.start()
    number = pools.submit(Request(prompt=(1, 2), max_new_tokens=2))
    pools.lose("decode 0")
    pools.lose("decode 1")
    assert pools.is_idle
    with pytest.raises(LostError, match="Request 0 .* all decode workers are lost"):
        pools.answer(number)


# --- from one mesh to another ----------------------------------------------------------------

PAIRS = [
    (DENSE, "tensor=4", "tensor=2"),
    (DENSE, "tensor=2", "tensor=4"),
    (DENSE, "tensor=1", "context=4,tensor=2"),
    (DENSE, "context=2,tensor=2", "tensor=4"),
    (EXPERTS, "pipe=2,context=2", "tensor=4"),
    (EXPERTS, "tensor=4", "pipe=2,tensor=2"),
    (EXPERTS, "context=4", "context=2"),
]


def whole(config, stack, num_blocks, seed):
    """Keys of the model: [L, blocks, block_len, K, H], every number another one."""
    shape = stacks(config)[stack], num_blocks, 4, config.num_kv_heads, config.head_dim
    return (seed + np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


@pytest.mark.parametrize(("config", "here", "there"), PAIRS)
def test_pieces_are_everything_the_target_needs_once(config, here, there):
    source, target = plan(here), plan(there)
    total = 0
    for stack in stacks(config):
        keys = whole(config, stack, 1, 0)[:, 0]
        needs = [keys[tuple(slice(*x) for x in box)] for box in held(config, target, stack)]
        has = [keys[tuple(slice(*x) for x in box)] for box in held(config, source, stack)]
        arrived = [np.full_like(x, np.nan) for x in needs]
        for piece in pieces(config, source, target, stack):
            cut_out, put_in = (
                tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                for start in (piece.source_start, piece.target_start)
            )
            assert np.isnan(arrived[piece.target][put_in]).all(), "sent twice"
            arrived[piece.target][put_in] = has[piece.source][cut_out]
            total += 2 * arrived[piece.target][put_in].nbytes
        assert all(np.array_equal(a, b) for a, b in zip(arrived, needs, strict=True))
    assert total == handover_bytes(config, target, 4)
    assert total == target.bytes_per_token(config) * 4


def test_copies_of_a_head_take_turns():
    sent = pieces(DENSE, plan("tensor=4"), plan("tensor=2"), "layers")
    assert [piece.source for piece in sent] == [0, 2]
    sent = pieces(DENSE, plan("tensor=4"), plan("tensor=4"), "layers")
    assert [piece.source for piece in sent] == [0, 1, 2, 3]


def cache_of(step, seed):
    """A cache whose every number tells where it is."""
    config, found = step.config, {}
    copies = step.plan.num_kv_heads(config) // config.num_kv_heads
    for stack, like in step.abstract_inputs("decode")[1].items():
        keys = whole(config, stack, like.k.shape[1], seed)
        keys = np.repeat(keys, copies, axis=3)
        keys = np.concatenate([keys, np.zeros((like.k.shape[0] - len(keys), *keys.shape[1:]))])
        found[stack] = KV(*(jax.device_put(jnp.float32(x), like.k.sharding) for x in (keys, -keys)))
    return found


@pytest.mark.parametrize(("config", "here", "there"), [PAIRS[1], PAIRS[4]])
def test_blocks_arrive_where_they_should_and_nothing_else_changes(config, here, there):
    plans = plan(here, num_blocks=8), plan(there, num_blocks=10)
    parts = cut([p.mesh for p in plans], jax.devices("cpu"))
    source, target = (
        StepOn(config=config, plan=p, devices=devices)
        for p, devices in zip(plans, parts, strict=True)
    )
    given, before = cache_of(source, 1), jax.device_get(cache_of(target, 50_000))
    handover = Handover(source, target)
    blocks, to = [6, 0, 3], [1, 9, 4]
    after, moved = handover(given, blocks, cache_of(target, 50_000), to)
    for stack, kv in after.items():
        copies = plans[1].num_kv_heads(config) // config.num_kv_heads
        sent = np.repeat(whole(config, stack, 8, 1)[:, blocks], copies, axis=3)
        for got, old, sign in zip(kv, before[stack], (1, -1), strict=True):
            want = old.copy()
            want[: len(sent), to] = sign * sent
            assert np.array_equal(np.asarray(got), want)
            assert got.sharding.is_equivalent_to(target.init_cache()[stack].k.sharding, 5)
    assert moved.num_bytes == handover_bytes(config, plans[1], 12)
    some = np.zeros(2, np.int32)
    arrived = jax.tree.map(lambda x: x[:, :2], jax.device_get(after))
    for jitted, arguments in (
        (handover.take, (given, some)),
        (handover.put, (after, arrived, some)),
    ):
        assert audit(jitted.lower(*arguments).compile()).collectives == ()


def test_bytes_of_a_large_model():
    large = preset("llama-3-8b")
    four, sixteen = (
        ServePlan(mesh=plan(f"tensor={n}").mesh, num_slots=1, max_seq_len=8192) for n in (4, 16)
    )
    assert handover_bytes(large, four, 2048) == 2048 * 131_072
    assert handover_bytes(large, sixteen, 2048) == 2 * 2048 * 131_072, "each head on two devices"
    assert handover_bytes(large, four, 1) == 16 * 131_072, "whole blocks"


def test_powers_are_the_number():
    assert powers(5) == [4, 1] and powers(8) == [8] and powers(0) == []


# --- how large pools should be ---------------------------------------------------------------


def test_pools_are_sized_by_what_each_has_to_do():
    here, there = plan("tensor=2"), plan("tensor=1")
    load = [Request(prompt=(1,) * 16, max_new_tokens=8)]
    times = {"prefill": here, "decode": there, "prefill_s": 0.2, "decode_s": 0.1}
    # Of a request, a prefill worker has 2 steps of 0.2 s, a decode worker 8 of 0.1 s for 4 of them.
    found = size_pools(load, 2.0, **times, num_devices=8)
    assert (found.num_prefill, found.num_decode) == (3, 2)
    assert found.prefill_busy == pytest.approx(0.8 / 3)
    assert found.decode_busy == pytest.approx(0.4 / 2)
    assert found.requests_per_s == pytest.approx(3 / 0.8)
    long = [Request(prompt=(1, 2), max_new_tokens=30)]
    found = size_pools(long, 2.0, **{**times, "decode_s": 0.2}, num_devices=8)
    assert (found.num_prefill, found.num_decode) == (1, 6)
    # A request has up to 23 tokens there, 6 blocks; of 8 slots 2 have so many.
    few = {**times, "decode": plan("tensor=1", num_slots=8, num_blocks=12)}
    assert size_pools(load, 1.0, **few, num_devices=3).decode_busy == pytest.approx(0.8 / 2)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "fields", "message"),
    [
        ("data=2", "tensor=2", {}, "prefill plan's mesh data=2 splits"),
        ("tensor=2", "data=2", {}, "decode plan's mesh data=2 splits"),
        ("tensor=2", "tensor=1", {"block_len": 8}, "block_len is 4 in the prefill plan and 8"),
        ("tensor=2", "tensor=1", {"compute_dtype": "bfloat16"}, "Nearest: 'float32' in both"),
        ("tensor=8", "tensor=2", {}, "num_heads=4 cannot be split over tensor=8"),
    ],
)
def test_plans_that_do_not_fit_each_other_are_refused(here, there, fields, message):
    with pytest.raises(PlanError, match=message):
        Disaggregated(DENSE, some_params(DENSE), prefill=plan(here), decode=plan(there, **fields))


def test_pools_of_nothing_are_refused():
    small = {"prefill": plan("tensor=2"), "decode": plan("tensor=1")}
    with pytest.raises(PlanError, match="num_decode=0"):
        Disaggregated(DENSE, some_params(DENSE), **small, num_decode=0)
    load = [Request(prompt=(1,), max_new_tokens=1)]
    times = {"prefill_s": 0.1, "decode_s": 0.1}
    with pytest.raises(PlanError, match="Nearest num_devices: 3"):
        size_pools(load, 1.0, **small, **times, num_devices=2)
    with pytest.raises(PlanError, match="prefill_s=0"):
        size_pools(load, 1.0, **small, **{**times, "prefill_s": 0}, num_devices=8)
    with pytest.raises(PlanError, match="says nothing about the load"):
        size_pools([], 1.0, **small, **times, num_devices=8)
    with pytest.raises(PlanError, match="each is on devices of its own"):
        steps = [
            StepOn(config=DENSE, plan=p, devices=tuple(jax.devices("cpu")[: p.mesh.num_devices]))
            for p in small.values()
        ]
        Handover(*steps)
