"""Parts of serving on their own, and faults planted in them: each is caught."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import asked
from jaxpar.collectives import all_gather_same, vary
from jaxpar.serve import cache, sampling, scheduler
from jaxpar.serve.cache import KV, CachedAttention, Placement, Rows, cache_spec, own_tokens
from jaxpar.serve.closed_form import expected
from jaxpar.serve.reference import Reference
from jaxpar.serve.sampling import Sampling, choose
from jaxpar.serve.scheduler import Scheduler
from jaxpar.serve.step import ServeStep
from jaxpar.strategies import tensor
from jaxpar.strategies.context.blocks import Piece
from tests.serve_helpers import DENSE, alone, plan, requests, some_params
from tests.test_serve_scheduler import answer_alone, crowd, serve

# --- attention to pages, over `context` ------------------------------------------------------

B, N, K, H, NUM_BLOCKS = 2, 4, 2, 4, 16
LENGTHS = (13, 10)
TABLE = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32).reshape(B, -1)


@functools.cache
def keys_and_values():
    """k, v of two sequences [B, S, K, H]; scores reach ±200, where exp overflows in float32."""
    draw = np.random.default_rng(1)
    k, v = draw.normal(size=(2, B, 32, K, H)).astype(np.float32)
    return 10 * k, v


def filled(layout_len, num_blocks=NUM_BLOCKS):
    """A cache of one layer with the tokens of both at their places, NaN where nobody has been."""
    pages = []
    for x in keys_and_values():
        page = np.full((1, num_blocks, layout_len, K, H), np.nan, np.float32)
        for row in range(B):
            for position in range(LENGTHS[row]):
                column, offset = divmod(position, layout_len)
                page[0, TABLE[row, column], offset] = x[row, position]
        pages.append(page)
    return KV(*pages)


def attention_over(mesh, kind, num_new):
    """Of the sequences' last `num_new` tokens, with the others in the cache: [B, T, N, H]."""
    serving = plan(mesh, num_slots=B, num_prefill_rows=B, num_blocks=NUM_BLOCKS)
    start = np.array(LENGTHS, np.int32) - num_new
    start = start // 4 * 4 if kind == "prefill" else start
    k, v = (np.stack([x[b, start[b] : start[b] + num_new] for b in range(B)])
            for x in keys_and_values())  # fmt: skip
    q = np.random.default_rng(2).normal(size=(B, num_new, N, H)).astype(np.float32)
    q *= np.array([10, 0.02], np.float32)[:, None, None, None]  # one key wins; all count
    num = np.minimum(np.array(LENGTHS, np.int32) - start, num_new)
    nothing = np.zeros(B, np.int32)
    rows = Rows(nothing[:, None], start, num, TABLE, *[nothing] * 4)

    def local(q, k, v, pages, rows):
        where = Placement.of(rows, kind, serving)
        attention = CachedAttention(pages, jnp.int32(0), where)
        mine = (own_tokens(x, kind, serving, dim=1) for x in (q, k, v))
        o = attention(*mine, None)
        return o if kind == "decode" else (o, where.position_BT - rows.start[:, None])

    spec = cache_spec(serving, "layers")
    out = P() if kind == "decode" else (P(None, "context"), P(None, "context"))
    run = jax.shard_map(
        local, mesh=serving.mesh.build(), in_specs=(P(), P(), P(), spec, P()), out_specs=out,
        check_vma=True,
    )  # fmt: skip
    out = jax.jit(run)(q, k, v, filled(serving.block_len), rows)
    if kind == "prefill":
        o, index = map(np.asarray, out)
        out = np.take_along_axis(o, np.argsort(index, axis=1)[..., None, None], axis=1)
    return q, start, num, np.asarray(out)


def attention_error(mesh, kind, num_new):
    q, start, num, got = attention_over(mesh, kind, num_new)
    k, v = keys_and_values()
    worst = 0.0
    for b in range(B):
        for t in range(num[b]):
            past = start[b] + t + 1
            for n in range(N):
                score = k[b, :past, n // (N // K)].astype(np.float64) @ q[b, t, n] / H**0.5
                p = np.exp(score - score.max())
                want = p @ v[b, :past, n // (N // K)] / p.sum()
                worst = max(worst, float(np.nan_to_num(np.abs(got[b, t, n] - want), nan=9).max()))
    return worst


SETTINGS = {"one": ("data=1", "decode", 1), "pieces": ("context=4", "decode", 1),
            "ring": ("context=4", "prefill", 8)}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_attention_to_pages_is_attention(setting):
    assert attention_error(*SETTINGS[setting]) < 1e-5


def without_maximum(piece):
    weight = jnp.exp(piece.lse_BSN)[..., None]
    summand = jnp.concatenate([piece.o_BSNH * weight, weight], axis=-1)
    total = cache.all_reduce(summand, "context", scope="sum")
    return Piece(total[..., :-1] / total[..., -1:], jnp.log(total[..., -1]))


def mean_of_pieces(piece):
    o = cache.all_reduce(piece.o_BSNH, "context", scope="mean") / 4
    return Piece(o, cache.all_reduce_max(piece.lse_BSN, "context", scope="max"))


def one_place_further(self, rank, part_len):
    return PLACES(self, rank, part_len)._replace(
        position_BS=PLACES(self, rank, part_len).position_BS + 1
    )


def parts_of_the_sequence(self, rank, part_len):
    """As if device r had the r-th part of the sequence, not of every block."""
    M = self.table_BM.shape[1]
    return cache.Places((rank * M * part_len + jnp.arange(M * part_len))[None], None)


def everything_is_written(kv, layer, where, dtype):
    return tuple(
        x.at[layer, where.table_BM].get(mode="clip").reshape(B, -1, *x.shape[3:]) for x in kv
    )


def table_of_the_row_before(kv, layer, where, dtype):
    return READ(kv, layer, replace(where, table_BM=jnp.roll(where.table_BM, 1, axis=0)), dtype)


PLACES, READ = Placement.places, cache.read

ATTENTION_FAULTS = {
    "pieces weighed by exponentials that overflow": (
        "pieces", cache, "put_together", without_maximum),
    "pieces averaged": ("pieces", cache, "put_together", mean_of_pieces),
    "a position off by one": ("one", Placement, "places", one_place_further),
    "parts of the sequence taken for parts of blocks": (
        "ring", Placement, "places", parts_of_the_sequence),
    "what others left in a block is used": ("one", cache, "read", everything_is_written),
    "the blocks of another request": ("one", cache, "read", table_of_the_row_before),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION_FAULTS)
def test_fault_in_attention_is_seen(name, monkeypatch):
    setting, home, attribute, wrong = ATTENTION_FAULTS[name]
    monkeypatch.setattr(home, attribute, wrong)
    assert not attention_error(*SETTINGS[setting]) < 1e-2


# --- sampling over a split vocabulary --------------------------------------------------------

WAYS = [Sampling(), *(Sampling(temperature=t, top_k=k, top_p=p, seed=s)
        for s, (t, k, p) in enumerate([(1.0, 0, 1.0), (0.7, 0, 1.0), (2.0, 4, 1.0), (1.0, 4, 0.6),
                                       (1.0, 1, 1.0), (3.0, 2, 0.9), (1.0, 3, 1.0)]))]  # fmt: skip


@functools.cache
def some_scores():
    """float32 [rows, V]: for each way many, some with equal scores at the border of two devices."""
    draw = np.random.default_rng(3)
    score = draw.normal(size=(len(WAYS) * 16, DENSE.vocab)).astype(np.float32) * 2
    score[::4, 15] = score[::4, 16] = score[::4].max(axis=1) + 1
    return score


def chosen(num_devices, max_top_k=4):
    score = some_scores()
    ways = [WAYS[i % len(WAYS)] for i in range(len(score))]

    def each(field, dtype):
        return np.array([getattr(way, field) for way in ways], dtype)

    start = np.arange(len(ways), dtype=np.int32)
    rows = Rows(start[:, None], start, start * 0 + 1, start[:, None], each("seed", np.uint32),
                each("temperature", np.float32), each("top_k", np.int32),
                each("top_p", np.float32))  # fmt: skip
    mesh = plan(f"tensor={num_devices}").mesh.build()
    run = jax.shard_map(
        lambda score, rows: choose(score, rows, max_top_k), mesh=mesh,
        in_specs=(P(None, "tensor" if num_devices > 1 else None), P()), out_specs=P(),
        check_vma=True,
    )  # fmt: skip
    return ways, np.asarray(jax.jit(run)(score, rows))


@functools.cache
def chosen_alone():
    alone = Reference(DENSE, {}, 1)
    ways = [WAYS[i % len(WAYS)] for i in range(len(some_scores()))]
    return [alone._choose(s, way, i + 1)[0]
            for i, (s, way) in enumerate(zip(some_scores(), ways, strict=True))]  # fmt: skip


@pytest.mark.parametrize("num_devices", [1, 4])
def test_choice_does_not_depend_on_the_mesh(num_devices):
    ways, tokens = chosen(num_devices)
    assert tokens.tolist() == chosen_alone()
    differ = [t != s.argmax() for t, s, w in zip(tokens, some_scores(), ways, strict=True)
              if w.temperature and w.top_k != 1]  # fmt: skip
    assert 0.2 < np.mean(differ) < 1, "sampling does sample"


def test_what_is_drawn_has_the_softmax_for_its_distribution():
    score = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    position = np.arange(4000, dtype=np.int32)
    noise = sampling.noise(np.full(4000, 3, np.uint32), position,
                           np.tile(np.arange(4, dtype=np.int32), (4000, 1)))  # fmt: skip
    drawn = np.bincount(np.argmax(score + np.asarray(noise), axis=1), minlength=4) / 4000
    want = np.exp(score) / np.exp(score).sum()
    assert np.abs(drawn - want).max() < 4 * 0.5 / 4000**0.5


def noise_of_the_batch(seed, position, token):
    return NOISE(jnp.arange(len(seed), dtype=jnp.uint32), position, token)


def noise_of_the_candidate(seed, position, token):
    return NOISE(seed, position, jnp.broadcast_to(jnp.arange(token.shape[1]), token.shape))


NOISE = sampling.noise

SAMPLING_FAULTS = {
    "candidates of another device's part": ("first_token", lambda score: jnp.int32(0)),
    "a stream of the row, not of the request": ("noise", noise_of_the_batch),
    "a stream of the place among candidates, not of the token": ("noise", noise_of_the_candidate),
}


@pytest.mark.parametrize("name", SAMPLING_FAULTS)
def test_fault_in_sampling_is_seen(name, monkeypatch):
    want = chosen_alone()
    attribute, wrong = SAMPLING_FAULTS[name]
    monkeypatch.setattr(sampling, attribute, wrong)
    assert chosen(4)[1].tolist() != want


# --- the scheduler ---------------------------------------------------------------------------


def keeps_what_was_cached(self, sequence):
    num_cached = sequence.num_cached
    PREEMPT(self, sequence)
    sequence.num_cached = num_cached // self.plan.chunk_len * self.plan.chunk_len


def gives_blocks_back_too_early(self, num):
    """The last block is given to the next one who asks, too."""
    blocks = TAKE(self, num)
    if blocks:
        self._taken.discard(blocks[-1])
        self._free.insert(0, blocks[-1])
    return blocks


def forgets_the_new_block(self, rows, part, start):
    FILL(self, rows, part, start)
    row, sequence, _ = part
    if sequence.answer:
        rows.table[row, len(sequence.blocks) - 1] = 0


def position_of_the_next(self, rows, part, start):
    FILL(self, rows, part, start)
    rows.start[part.row] += part.num_tokens == 1


PREEMPT, TAKE, FILL = Scheduler.preempt, scheduler.BlockPool.take, Scheduler._fill

SCHEDULER_FAULTS = {
    "a preempted sequence trusts blocks it gave back": (
        Scheduler,
        "preempt",
        keeps_what_was_cached,
    ),
    "a block with two owners": (scheduler.BlockPool, "take", gives_blocks_back_too_early),
    "a table without the newest block": (Scheduler, "_fill", forgets_the_new_block),
    "a token at the position of the next": (Scheduler, "_fill", position_of_the_next),
}


@pytest.mark.parametrize("name", SCHEDULER_FAULTS)
def test_fault_in_the_scheduler_is_seen(name, monkeypatch):
    home, attribute, wrong = SCHEDULER_FAULTS[name]
    want = [answer_alone(request) for _, request in crowd()]
    assert serve(Scheduler(DENSE, plan("data=1", num_blocks=10)), crowd()) == want
    monkeypatch.setattr(home, attribute, wrong)
    try:
        assert serve(Scheduler(DENSE, plan("data=1", num_blocks=10)), crowd()) != want
    except (AssertionError, KeyError) as error:  # the paper cache has seen it before
        assert "somebody never ends" not in str(error)


# --- the whole step --------------------------------------------------------------------------


def test_another_devices_key_value_head_is_seen(monkeypatch):
    """Four devices, two key/value heads. (With their own head the tokens are those of one device:
    see test_serve.py.)"""
    monkeypatch.setattr(tensor, "kv_weight", lambda w, num: vary(w[:, :1], "tensor"))
    step = ServeStep(config=DENSE, plan=plan("tensor=4", num_prefill_rows=6))
    rows, found = cache.idle_rows(step.plan, "prefill"), requests(6, seed=5, longest=8)
    for row, (_, request) in enumerate(found):
        num = len(request.prompt)
        rows.tokens[row, :num], rows.num_tokens[row] = request.prompt, num
        rows.table[row, :2] = 2 * row, 2 * row + 1
    _, got = step.prefill(step.place(some_params(DENSE)), step.init_cache(), rows)
    want = [alone(DENSE).scores_after(list(r.prompt)).argmax() for _, r in found]
    assert (np.asarray(got) != want).any()


def all_scores(score_BV, max_top_k):
    """Right, and at the price of the whole vocabulary."""
    whole_BV = all_gather_same(score_BV, "tensor", dim=1, scope="scores")
    found_BC, token_BC = jax.lax.top_k(whole_BV, max_top_k)
    return found_BC, token_BC.astype(jnp.int32)


def test_scores_gathered_whole_are_seen(monkeypatch):
    step = ServeStep(config=DENSE, plan=plan("tensor=4"))

    def rows():
        found = asked(step.jitted["decode"].trace(*step.abstract_inputs("decode")).jaxpr)
        return Counter((r.kind, r.axes, r.payload_bytes) for r in found for _ in range(r.count))

    predicted = Counter(
        (r.kind, r.axes, r.payload_bytes)
        for r in expected(DENSE, step.plan, "decode")
        for _ in range(r.count)
    )
    monkeypatch.setattr(sampling, "candidates", all_scores)
    num_slots = step.plan.num_slots
    assert rows() - predicted == {("all-gather", ("tensor",), num_slots * DENSE.vocab * 4): 1}
