"""Experts in chunks: the same numbers and bytes as in one, and exchanges beside computations.

Whole training steps in chunks, and what is refused, are in test_expert.py.
"""

import itertools
from functools import partial

import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from jaxpar import expected
from jaxpar.strategies import compose, expert_dispatch
from tests.helpers import plan
from tests.test_closed_forms import asked_of, executions
from tests.test_expert import CAPACITY, CHUNKS, SOFTMAX, step
from tests.test_expert_dispatch import FORMS, NUMBER, F, arrays, at_home, error, on_mesh

CAPACITY_FORM, DROPLESS_FORM = "capacity, position", "dropless"


def in_chunks(form, num_chunks):
    """(loss, gradients) of a layer with 2 sequences of 6 tokens, or 2·2 places, per device."""
    experts, drop = FORMS[form]
    return on_mesh("expert=4", partial(experts, num_chunks=num_chunks), drop, "softmax")


@pytest.mark.parametrize(
    ("form", "num_chunks"),
    [
        (CAPACITY_FORM, 4),  # half of one sequence's places in each
        (DROPLESS_FORM, 3),  # 4 of 6 tokens: most chunks have tokens of two sequences
    ],
)
def test_same_numbers_in_any_number_of_chunks(form, num_chunks):
    got = in_chunks(form, num_chunks)(*arrays(), NUMBER)
    assert error(got, at_home(form, "softmax")) < 1e-5


@pytest.mark.parametrize("fields", [{}, CAPACITY | {"remat": "full"}])
def test_same_bytes_in_as_many_parts(fields):
    """Of token vectors; how many rows come is told once for all chunks."""
    whole, cut = (expected(SOFTMAX, plan("expert=4", **fields, **q)) for q in ({}, CHUNKS))
    vectors = [[r for r in rows if r.why.startswith("token vectors")] for rows in (whole, cut)]
    assert len(vectors[0]) == (6 if "remat" in fields else 4)
    for one, part in zip(*vectors, strict=True):
        assert part.count == 4 * one.count and 4 * part.payload_bytes == one.payload_bytes
    small = [
        [r.count for r in rows if r.kind == "all-to-all" and r.dtype == "s32"]
        for rows in (whole, cut)
    ]
    assert small[0] == small[1] == ([] if fields else [2])


def test_is_explained_and_toured():
    strategy, row = compose.strategy("expert-chunks")
    assert strategy.refines == "expert" and row.fields["num_expert_chunks"] > 1


# --- hidden ------------------------------------------------------------------------------------


def bodies(jaxpr):
    """Jaxprs within `jaxpr` that exchange token vectors by themselves."""
    if any(is_exchange(eqn) for eqn in jaxpr.eqns):
        yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from bodies(getattr(inner, "jaxpr", inner))


def is_exchange(eqn):
    return eqn.primitive.name == "all_to_all" and eqn.outvars[0].aval.dtype != jnp.int32


def is_experts_matmul(eqn):
    """The router's and the weighted sum of outputs know no hidden dim."""
    is_matmul = eqn.primitive.name in ("dot_general", "ragged_dot_general")
    return is_matmul and any(F in v.aval.shape for v in (*eqn.invars, *eqn.outvars))


def around(jaxpr):
    """Of each exchange: how many matmuls it waits for, and how many could run beside it."""
    past = {}  # of each value, the matmuls and exchanges that it comes from
    before = {}
    for at, eqn in enumerate(jaxpr.eqns):
        inputs = (v for v in eqn.invars if not isinstance(v, Literal))
        came = frozenset().union(*(past.get(v, ()) for v in inputs))
        if is_exchange(eqn) or is_experts_matmul(eqn):
            before[at] = came
            came |= {at}
        past |= dict.fromkeys(eqn.outvars, came)
    exchanges = [at for at in before if is_exchange(jaxpr.eqns[at])]
    matmuls = before.keys() - exchanges
    waits = [len(before[x] & matmuls) for x in exchanges]
    beside = [sum(m not in before[x] and x not in before[m] for m in matmuls) for x in exchanges]
    return sorted(waits), sorted(beside)


@pytest.mark.parametrize("form", [CAPACITY_FORM, DROPLESS_FORM])
def test_each_exchange_has_a_chunks_experts_beside_it(form):
    """Three matmuls per chunk: while one is computed, the next one comes and the last one goes."""
    forward, backward = bodies(in_chunks(form, 4).trace(*arrays(), NUMBER).jaxpr.jaxpr)
    assert around(forward) == ([0, 0, 3, 3, 6, 6, 9, 12], [0, 0, 3, 3, 3, 3, 3, 3])
    waits, beside = around(backward)
    assert waits == [0, 0, 3, 3, 6, 6, 9, 12] and sum(num < 3 for num in beside) <= 2


def test_untied_exchanges_are_seen(monkeypatch):
    """The numbers and the bytes stay right; XLA may then send everything before it computes."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda operands: operands)
    forward, _ = bodies(in_chunks(CAPACITY_FORM, 4).trace(*arrays(), NUMBER).jaxpr.jaxpr)
    assert around(forward)[0] == [0, 0, 0, 0, 3, 3, 3, 3]


# --- faults ------------------------------------------------------------------------------------

CHUNKED, COUNTS, WITH_CAPACITY = (
    expert_dispatch.in_chunks, expert_dispatch.exchange_counts, expert_dispatch.with_capacity,
)  # fmt: skip


def all_in_each(chunks, there, compute, back):
    """Every exchange moves the whole table, of which its chunk is then taken."""
    num = len(chunks)
    table = jnp.concatenate(list(chunks), axis=1)

    def only(i, _):
        x_eXD = there(i, table)
        n = lax.axis_size("expert")
        x_enQXD = x_eXD.reshape(x_eXD.shape[0], n, num, -1, x_eXD.shape[-1])
        return x_enQXD[:, :, i].reshape(x_eXD.shape[0], -1, x_eXD.shape[-1])

    return CHUNKED(chunks, only, compute, back)


def one_by_one(count_Qne):
    runs, counts = zip(*(COUNTS(count_ne[None]) for count_ne in count_Qne), strict=True)
    return list(itertools.chain(*runs)), jnp.concatenate(counts)


def first_waits_for_nothing(chunks, there, compute, back):
    """One chunk after the other: the same bytes, and nothing beside any exchange."""
    outputs = []
    for i, x in enumerate(chunks):
        if outputs:
            x, outputs[-1:] = lax.optimization_barrier((x, outputs[-1:]))
        outputs.append(back(i, compute(i, there(i, x))))
    return outputs


# name: (form, who sees it, name of what is replaced, by what)
FAULTS = {
    "outputs put together in the order they went out": (
        CAPACITY_FORM, "numbers", "in_chunks", lambda *given: CHUNKED(*given)[::-1]),
    "a chunk's rows counted as the next one's": (
        DROPLESS_FORM, "numbers", "exchange_counts",
        lambda counts: (COUNTS(counts)[0], jnp.roll(COUNTS(counts)[1], 1, axis=0))),
    "a chunk's outputs go back as the next one's": (
        DROPLESS_FORM, "numbers", "in_chunks",
        lambda chunks, there, compute, back: CHUNKED(
            chunks, there, compute, lambda i, y: back(1 - i, y))),
    "the first chunk's tokens in every chunk": (
        CAPACITY_FORM, "numbers", "in_chunks",
        lambda chunks, *given: CHUNKED([chunks[0]] * 2, *given)),
    "one chunk after the other": (
        CAPACITY_FORM, "order", "in_chunks", first_waits_for_nothing),
    "every chunk sends the whole table": (CAPACITY_FORM, "audit", "in_chunks", all_in_each),
    "counts of every chunk told one by one": (
        DROPLESS_FORM, "audit", "exchange_counts", one_by_one),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    form, seen_by, attribute, wrong = FAULTS[name]
    want = at_home(form, "softmax") if seen_by == "numbers" else None
    assert hasattr(expert_dispatch, attribute)
    monkeypatch.setattr(expert_dispatch, attribute, wrong)
    if seen_by == "numbers":
        assert error(in_chunks(form, 2)(*arrays(), NUMBER), want) > 1e-3
    elif seen_by == "order":
        forward, _ = bodies(in_chunks(form, 4).trace(*arrays(), NUMBER).jaxpr.jaxpr)
        assert set(around(forward)[1]) == {0}
    else:
        fields = CAPACITY if form == CAPACITY_FORM else {}
        explicit = step("expert=2", SOFTMAX, **fields, **CHUNKS)
        assert executions(expected(SOFTMAX, explicit.plan)) != executions(asked_of(explicit))
