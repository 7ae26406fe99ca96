"""The scheduler without a device: a cache on paper, which knows what each block holds."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import RequestError
from jaxpar.serve.pool import BlockPool, blocks_of
from jaxpar.serve.sampling import Sampling
from jaxpar.serve.scheduler import Request, Scheduler
from tests.serve_helpers import DENSE, MAX_SEQ_LEN, plan


class PaperModel:
    """Programs as a scheduler sees them: the next token is a hash of all tokens before it, which
    are read where the row's table says they are, and nowhere else."""

    def __init__(self, plan):
        self.plan, self.cache = plan, {}

    def run(self, work):
        rows, num_rows = work.rows, len(work.rows.start)
        rows_per_shard = num_rows // self.plan.num_batch_shards
        tokens = [None] * num_rows
        assert len({part.row for part in work.parts}) == len(work.parts)
        for row in range(num_rows):  # all rows write before any attends
            for i in range(rows.num_tokens[row]):
                position = rows.start[row] + i
                self.cache[self._place(row, rows_per_shard, rows, position)] = (
                    int(position), int(rows.tokens[row, i]))  # fmt: skip
        for row in range(num_rows):
            if rows.num_tokens[row]:
                past = [
                    self.cache[self._place(row, rows_per_shard, rows, position)]
                    for position in range(rows.start[row] + rows.num_tokens[row])
                ]
                assert [position for position, _ in past] == list(range(len(past)))
                tokens[row] = hashed([token for _, token in past])
        return tokens

    def _place(self, row, rows_per_shard, rows, position):
        column, offset = divmod(int(position), self.plan.block_len)
        return row // rows_per_shard, int(rows.table[row, column]), offset


def hashed(tokens):
    return hashlib.sha256(bytes(tokens)).digest()[0] % DENSE.vocab


def answer_alone(request):
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        tokens.append(hashed(tokens))
        if tokens[-1] in request.stop_tokens:
            break
    return tuple(tokens[len(request.prompt) :])


REQUEST = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 63), min_size=1, max_size=20).map(tuple),
    max_new_tokens=st.integers(1, 12),
    stop_tokens=st.sampled_from([(), (3,), (3, 4, 5, 6, 7, 8)]),
)
ARRIVALS = st.lists(st.tuples(st.integers(0, 12), REQUEST), min_size=1, max_size=12)
PLANS = st.builds(
    lambda mesh, chunk, blocks, rows, widths: plan(
        mesh,
        num_widths=widths,
        chunk_len=chunk,
        num_prefill_rows=rows * (2 if mesh == "data=2" else 1),
        num_blocks=(8 + blocks) * (2 if mesh == "data=2" else 1),
    ),
    st.sampled_from(["data=1", "data=2"]),
    st.sampled_from([4, 8, 16]),
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 4),
)


def serve(scheduler, arrivals, max_steps=4000):
    """Answers in the order given; checks of every step that no block has two owners."""
    model, sequences, step = PaperModel(scheduler.plan), {}, 0
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    while waiting or not scheduler.is_idle:
        assert step < max_steps, "somebody never ends"
        while waiting and arrivals[waiting[0]][0] <= step:
            i = waiting.pop(0)
            sequences[i] = scheduler.submit(arrivals[i][1])
        for find_work in (scheduler.prefill, scheduler.decode):
            if work := find_work():
                scheduler.finish(work, model.run(work))
            owned = [(s.shard, block) for s in scheduler.running for block in s.blocks]
            assert len(owned) == len(set(owned)) == scheduler.used_blocks
            slots = [(s.shard, s.slot) for s in scheduler.running]
            assert len(slots) == len(set(slots))
        step += 1
    assert scheduler.used_blocks == 0
    return [sequences[i].answer for i in range(len(arrivals))]


@settings(deadline=None, max_examples=60)
@given(ARRIVALS, PLANS, st.sampled_from(["preempt", "queue"]))
def test_every_answer_is_that_of_its_request_alone(arrivals, plan, admission):
    scheduler = Scheduler(DENSE, plan, admission=admission)
    answers = serve(scheduler, arrivals)
    assert answers == [answer_alone(request) for _, request in arrivals]
    assert admission == "preempt" or scheduler.num_preempted == 0


def crowd(num=6):
    return [(0, Request(prompt=tuple(range(i, i + 12)), max_new_tokens=12)) for i in range(num)]


def test_a_full_cache_preempts_the_last_one_or_lets_it_wait():
    small = plan("data=1", num_blocks=10)
    preempting = Scheduler(DENSE, small)
    queueing = Scheduler(DENSE, small, admission="queue")
    assert serve(preempting, crowd()) == serve(queueing, crowd())
    assert preempting.num_preempted > 0 and queueing.num_preempted == 0


def test_requests_are_served_in_turn_and_leave_at_once():
    scheduler = Scheduler(DENSE, plan("data=1", num_slots=1))
    first, second = (scheduler.submit(r) for _, r in crowd(2))
    model = PaperModel(scheduler.plan)
    while not first.is_done:
        assert second.shard < 0
        for find_work in (scheduler.prefill, scheduler.decode):
            if work := find_work():
                scheduler.finish(work, model.run(work))
    assert scheduler.prefill().parts[0].sequence is second


def test_a_long_prompt_holds_up_nobody():
    """Every step with a chunk of it also extends the others by one token."""
    scheduler = Scheduler(DENSE, plan("data=1", chunk_len=4))
    model = PaperModel(scheduler.plan)
    short = scheduler.submit(Request(prompt=(1, 2), max_new_tokens=20))
    scheduler.finish(work := scheduler.prefill(), model.run(work))
    long = scheduler.submit(Request(prompt=tuple(range(24)), max_new_tokens=2))
    for _ in range(6):
        before = len(short.answer), long.num_cached
        for find_work in (scheduler.prefill, scheduler.decode):
            scheduler.finish(work := find_work(), model.run(work))
        assert (len(short.answer), long.num_cached) >= (before[0] + 1, before[1] + 4)
    assert long.is_done


# --- blocks ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_pool_never_gives_a_block_to_two(num_blocks, moves):
    pool, held = BlockPool(num_blocks), []
    for takes, num in moves:
        if takes:
            blocks = pool.take(num)
            assert (blocks is None) == (num > num_blocks - sum(map(len, held)))
            held += [blocks] if blocks is not None else []
        elif held:
            pool.give_back(held.pop(num % len(held)))
        flat = [block for blocks in held for block in blocks]
        assert len(flat) == len(set(flat)) and set(flat) <= set(range(num_blocks))
        assert pool.num_free == num_blocks - len(flat)


def test_a_block_is_given_back_once():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody has it"):
        pool.give_back(blocks)


def test_blocks_of_tokens():
    assert [blocks_of(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(prompt=(), max_new_tokens=1), "empty"),
        (lambda: Request(prompt=[1], max_new_tokens=1), "must be a tuple of whole numbers"),
        (lambda: Request(prompt=(1.0,), max_new_tokens=1), "must be a tuple of whole numbers"),
        (lambda: Request(prompt=(1,), max_new_tokens=0), "max_new_tokens=0"),
        (lambda: Request(prompt=(1,), max_new_tokens=1, sampling=1), "must be a Sampling"),
        (lambda: Sampling(temperature=-1.0), "temperature=-1.0"),
        (lambda: Sampling(temperature=float("nan")), "temperature=nan"),
        (lambda: Sampling(temperature=1.0, top_p=1.5, top_k=2), "Nearest top_p: 1"),
        (lambda: Sampling(temperature=1.0, top_p=0.5), "such as top_k=32"),
        (lambda: Sampling(top_k=3), "Give a temperature"),
        (lambda: Sampling(temperature=1.0, seed=-1), "seed=-1"),
        (lambda: Scheduler(DENSE, plan("data=1"), admission="never"), "'preempt', 'queue'"),
    ],
)
def test_bad_requests_are_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": (64,)}, "tokens go from 0 to 63"),
        ({"prompt": (-1, 2)}, "has a token -1"),
        ({"stop_tokens": (99,)}, "has a token 99"),
        ({"max_new_tokens": 32}, "Nearest max_new_tokens: 31"),
        ({"prompt": (*range(MAX_SEQ_LEN), 1)}, "Shorten the prompt"),
        ({"sampling": Sampling(temperature=1.0, top_k=5)}, "Nearest top_k: 4"),
    ],
)
def test_requests_without_a_place_are_refused_when_submitted(fields, message):
    request = Request(**{"prompt": (1,), "max_new_tokens": 1, **fields})
    scheduler = Scheduler(DENSE, plan("data=1"))
    with pytest.raises(RequestError, match=message):
        scheduler.submit(request)
    assert scheduler.is_idle
