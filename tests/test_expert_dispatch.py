"""Routing against its formulas in NumPy; tokens to experts and back against every expert at home.

Function by function, under `shard_map`, with gradients of everything; test_expert.py trains.
"""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar import MeshSpec, asked
from jaxpar.model import routing
from jaxpar.numerics import relative_error
from jaxpar.strategies import expert_dispatch

B, S, D, E, K, F = 8, 6, 8, 8, 3, 12
FACTOR = 0.7
"""Below 1, so that something has to be dropped whatever the router says."""

NUMBER = 1000.0 * np.arange(B, dtype=np.float32).reshape(B, 1, 1)

DROPS = {
    policy: partial(routing.drop_over_capacity, factor=FACTOR, policy=policy)
    for policy in ("position", "weight")
}
CAPACITY, DROPLESS = (
    partial(expert_dispatch.with_capacity, factor=FACTOR),
    partial(expert_dispatch.without_limit, exchange="padded"),
)
FORMS = {
    "capacity, position": (CAPACITY, DROPS["position"]),
    "capacity, weight": (CAPACITY, DROPS["weight"]),
    "dropless": (DROPLESS, lambda r: r),
}


@functools.cache
def arrays():
    """x, router, weights, mask and bias; sequences hold 1 to S valid tokens."""
    key = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(key[0], (B, S, D))
    router = jax.random.normal(key[1], (D, E))
    gate, up = (0.3 * jax.random.normal(key[i], (E, D, F)) for i in (2, 3))
    down = 0.3 * jax.random.normal(key[4], (E, F, D))
    mask = (jnp.arange(S) < (1 + jnp.arange(B) % S)[:, None]).astype(jnp.float32)
    return x, router, routing.ExpertWeights(gate, up, down), mask


def routed(x, router, mask, *, kind="softmax", bias=None, is_normalized=True, num_chosen=K):
    return routing.route(
        x @ router, bias, mask, kind=kind, num_chosen=num_chosen, is_normalized=is_normalized,
        scale=2.0,
    )  # fmt: skip


def layer_loss(x, router, weights, mask, number, *, experts, drop, kind):
    """A scalar that each output influences in its own way: `number` tells sequences apart."""
    bias = jnp.linspace(-0.1, 0.3, E)
    y = experts(x, drop(routed(x, router, mask, kind=kind, bias=bias)), weights)
    factor = jnp.sin(number + jnp.arange(S * D, dtype=jnp.float32).reshape(S, D))
    return jnp.sum(y * factor)


def on_mesh(mesh, experts, drop, kind):
    """(loss, gradients) of `layer_loss` with sequences and experts spread over the mesh."""
    batch = PartitionSpec(("data", "expert"))

    def local(*arguments):
        loss = layer_loss(*arguments, experts=experts, drop=drop, kind=kind)
        return lax.psum(loss, ("data", "expert"))

    spread = jax.shard_map(
        local,
        mesh=MeshSpec.parse(mesh).build(),
        in_specs=(batch, PartitionSpec(), PartitionSpec("expert"), batch, batch),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    return jax.jit(jax.value_and_grad(spread, argnums=(0, 1, 2)))


@functools.cache
def at_home(form, kind):
    loss = partial(layer_loss, experts=routing.every_expert, drop=FORMS[form][1], kind=kind)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays(), NUMBER)


def error(got, want):
    return max(
        relative_error(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize(
    ("mesh", "form", "kind"),
    [
        ("data=2", "dropless", "softmax"),
        ("expert=8", "dropless", "sigmoid"),
        ("data=2,expert=4", "capacity, weight", "sigmoid"),
    ],
)
def test_tokens_meet_the_same_experts_wherever_those_are(mesh, form, kind):
    got = on_mesh(mesh, *FORMS[form], kind)(*arrays(), NUMBER)
    assert error(got, at_home(form, kind)) < 1e-5


def emulated(operand, output, starts, sizes, their_starts, their_sizes, *, axis_name):
    """ragged_all_to_all as its documentation has it, of what a CPU does have."""
    me = lax.axis_index(axis_name)
    everyones = (lax.all_gather(t, axis_name) for t in (operand, starts, sizes, their_starts))
    rows = jnp.arange(operand.shape[0])
    for theirs, start, size, to in zip(*everyones, strict=True):
        is_mine = (rows >= start[me]) & (rows < start[me] + size[me])
        to_row = jnp.where(is_mine, rows - start[me] + to[me], output.shape[0])
        output = output.at[to_row].set(theirs, mode="drop")
    return output


def test_ragged_exchange_moves_what_the_padded_one_does(monkeypatch):
    """With every backend's meaning of the primitive, which no CPU runs; and it lowers for a TPU."""
    ragged = partial(expert_dispatch.without_limit, exchange="ragged")
    step = on_mesh("data=2,expert=4", ragged, lambda r: r, "softmax")
    traced = step.trace(*arrays(), NUMBER)
    assert "@ragged_all_to_all" in traced.lower(lowering_platforms=("tpu",)).as_text()
    rows = [r for r in asked(traced.jaxpr) if r.axes == ("expert",)]
    sent, slots = B // 8 * S * K * D * 4, 4 * (B // 8 * S * min(K, E // 4)) * D * 4
    assert [(r.kind, r.phase, r.payload_bytes) for r in rows] == [
        ("all-to-all", "forward", 4 * (E + 4)),
        ("ragged-all-to-all", "forward", sent),
        ("ragged-all-to-all", "forward", slots),
        ("ragged-all-to-all", "backward", sent),
        ("ragged-all-to-all", "backward", slots),
    ]
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    step = on_mesh("data=2,expert=4", partial(ragged, num_chunks=2), lambda r: r, "softmax")
    assert error(step(*arrays(), NUMBER), at_home("dropless", "softmax")) < 1e-5


# --- faults ------------------------------------------------------------------------------------

A2A, COMBINE, GROUPED, ROUTE = (
    expert_dispatch.all_to_all, expert_dispatch.combine, expert_dispatch.grouped, routing.route,
)  # fmt: skip


def swapped(x, axis, *, split_dim, concat_dim, scope):
    """Rows of different sources interleaved: same shape, same bytes."""
    if x.ndim < 3 or split_dim == concat_dim:
        return A2A(x, axis, split_dim=split_dim, concat_dim=concat_dim, scope=scope)
    n = lax.axis_size(axis)
    if split_dim == 0:
        x = A2A(x, axis, split_dim=0, concat_dim=0, scope=scope)
        return x.reshape(x.shape[0] // n, n * x.shape[1], x.shape[2])
    return A2A(x, axis, split_dim=1, concat_dim=0, scope=scope)


FAULTS = {
    "what arrives laid along the experts instead of their places": (
        "capacity, position", "all_to_all", swapped),
    "weights of another expert in the sum": (
        "dropless", "combine",
        lambda y, r: COMBINE(y, r._replace(weight_BSK=r.weight_BSK[..., ::-1]))),
    "a dropped token gets what lies in its expert's first place": (
        "capacity, weight", "slots", lambda r: jnp.zeros_like(r.expert_BSK)),
    "places counted over the batch instead of the sequence": (
        "capacity, position", "slots",
        lambda r: routing.slots(r) + jnp.arange(r.expert_BSK.shape[0])[:, None, None]),
    "padding sent to experts": (
        "dropless", "route", lambda x, bias, mask, **how: ROUTE(x, bias, mask**0, **how)),
    "outputs given back in the order they were sorted in": (
        "dropless", "grouped", lambda x, count, w: GROUPED(x[::-1], count, w)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_changes_the_numbers(name, monkeypatch):
    form, attribute, wrong = FAULTS[name]
    want = at_home(form, "softmax")
    home = routing if attribute == "route" else expert_dispatch
    assert hasattr(home, attribute)
    monkeypatch.setattr(home, attribute, wrong)
    got = on_mesh("expert=4", *FORMS[form], "softmax")(*arrays(), NUMBER)
    assert error(got, want) > 1e-3


def test_a_product_of_local_means_is_another_loss():
    """Two devices with half of the sequences each, as one that forgot to add up would have it."""
    x, router, _, mask = arrays()
    wanted = routed(x, router, mask)
    halves = [jax.tree.map(lambda t, h=h: t[h::2], wanted) for h in (0, 1)]
    counts = routing.tokens_per_expert(wanted)
    whole = routing.balance_by_batch(wanted, lambda c: c)
    right = sum(routing.balance_by_batch(half, lambda c: counts) for half in halves)
    wrong = sum(routing.balance_by_batch(half, lambda c: c) for half in halves)
    assert abs(right - whole) < 1e-5 * whole < 1e-2 * whole < abs(wrong - whole)


def test_places_counted_over_a_batch_depend_on_who_holds_it():
    """Why capacity is of a sequence: two devices keep other tokens than one."""
    x, router, _, mask = arrays()

    def kept(*parts):
        flat = [jax.tree.map(lambda t: t.reshape(1, -1, *t.shape[2:]), part) for part in parts]
        return np.concatenate([DROPS["position"](part).is_kept_BSK[0] for part in flat])

    wanted = routed(x, router, mask)
    halves = [jax.tree.map(lambda t, h=h: t[4 * h : 4 * h + 4], wanted) for h in (0, 1)]
    assert (kept(wanted) != kept(*halves)).any()
    together = DROPS["position"](wanted).is_kept_BSK
    assert (np.concatenate([DROPS["position"](h).is_kept_BSK for h in halves]) == together).all()


# --- routing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_routing_is_the_formula(kind, is_normalized):
    x, router, _, mask = arrays()
    bias = np.linspace(0.5, -0.5, E).astype(np.float32)
    got = routed(x, router, mask, kind=kind, bias=bias, is_normalized=is_normalized)
    logits = np.asarray(x @ router, np.float64)
    exp = np.exp(logits)
    score = exp / exp.sum(-1, keepdims=True) if kind == "softmax" else 1 / (1 + 1 / exp)
    order = np.argsort(-(score + bias), axis=-1)[..., :K]
    assert (np.sort(order) == np.sort(got.expert_BSK)).all()
    weight = np.take_along_axis(score, np.asarray(got.expert_BSK), -1)
    weight = 2.0 * (weight / weight.sum(-1, keepdims=True) if is_normalized else weight)
    np.testing.assert_allclose(got.weight_BSK, weight, rtol=1e-5)
    np.testing.assert_allclose(
        got.probability_BSE, score / score.sum(-1, keepdims=True), rtol=1e-5, atol=1e-7
    )
    assert (np.asarray(got.is_kept_BSK).all(-1) == (np.asarray(mask) != 0)).all()


def test_bias_chooses_and_does_not_weigh():
    x, router, _, mask = arrays()
    plain = routed(x, router, mask, is_normalized=False)
    same = routed(x, router, mask, is_normalized=False, bias=jnp.full((E,), 0.25))
    assert (plain.weight_BSK == same.weight_BSK).all()
    pushed = routed(x, router, mask, bias=jnp.zeros((E,)).at[3].set(10.0))
    assert (pushed.expert_BSK == 3).any(-1).all()


def test_a_single_expert_keeps_its_probability():
    """Normalised it would be 1 whatever the router says, which then could not learn."""
    x, router, _, mask = arrays()
    one = routed(x, router, mask, num_chosen=1)
    assert (one.weight_BSK[..., 0] == 2.0 * one.probability_BSE.max(-1)).all()


@pytest.mark.parametrize("form", [*FORMS, "every expert"])
def test_a_masked_token_goes_nowhere_and_gets_nothing(form):
    experts, drop = FORMS.get(form, (routing.every_expert, lambda r: r))
    spec = PartitionSpec()
    layer = jax.shard_map(
        lambda x, router, weights, mask: experts(x, drop(routed(x, router, mask)), weights),
        mesh=MeshSpec.parse("data=1").build(),
        in_specs=4 * (spec,),
        out_specs=spec,
    )
    y, mask = np.asarray(jax.jit(layer)(*arrays())), np.asarray(arrays()[3])
    assert (y[mask == 0] == 0).all() and np.abs(y[mask != 0]).sum() > 1


# --- capacity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "num_experts", "num_chosen", "factor", "places"),
    [
        (4096, 64, 6, 1.0, 384),  # an even share
        (4096, 64, 6, 1.25, 480),
        (100, 8, 2, 1.1, 28),  # 27.5 rounded up
        (10, 10, 1, 1.1, 2),  # 1.1, and not 1.1000000000000001 of another ten
        (100, 10, 1, 1.1, 11),  # not 12, for all that 1.1 x 10 is a little above 11
        (16, 8, 2, 100.0, 16),  # a sequence has no more tokens than it has
        (16, 8, 2, 1e-6, 1),
    ],
)
def test_capacity(seq_len, num_experts, num_chosen, factor, places):
    assert routing.capacity(seq_len, num_experts, num_chosen, factor) == places


@pytest.mark.parametrize("policy", DROPS)
def test_drop_policy_is_what_a_loop_would_do(policy):
    x, router, _, mask = arrays()
    wanted = routed(x, router, mask)
    kept = np.asarray(DROPS[policy](wanted).is_kept_BSK)
    expert, weight = np.asarray(wanted.expert_BSK), np.asarray(wanted.weight_BSK)
    limit = math.ceil(FACTOR * K * S / E)
    want = np.zeros_like(kept)
    for b in range(B):
        for e in range(E):
            takers = [(s, k) for s, k in np.argwhere(expert[b] == e) if mask[b, s]]
            if policy == "weight":
                takers.sort(key=lambda at: -weight[b, at[0], at[1]].astype(jnp.bfloat16))
            for s, k in takers[:limit]:
                want[b, s, k] = True
    assert (kept == want).all()
    assert 0 < kept.sum() < np.asarray(wanted.is_kept_BSK).sum()


def test_position_does_not_look_ahead_and_weight_does():
    x, router, _, mask = arrays()
    mask = jnp.ones_like(mask)
    changed = x.at[:, -1].set(-x[:, -1])

    def early(policy, x):
        return DROPS[policy](routed(x, router, mask)).is_kept_BSK[:, :-1]

    assert (early("position", x) == early("position", changed)).all()
    assert (early("weight", x) != early("weight", changed)).any()


# --- balance -----------------------------------------------------------------------------------


def balance_in_words(groups, kind="softmax"):
    """Σ over groups of tokens of T·Σ_i f_i P_i, from DeepSeek-V3's eq. 17-20 as they stand."""
    x, router, _, mask = arrays()
    wanted = routed(x, router, mask, kind=kind)
    expert, probability = np.asarray(wanted.expert_BSK), np.asarray(wanted.probability_BSE)
    total = 0.0
    for sequences in groups:
        tokens = [(b, s) for b in sequences for s in range(S) if mask[b, s]]
        T = len(tokens)
        for i in range(E):
            f = E / (K * T) * sum(i in expert[b, s] for b, s in tokens)
            P = sum(float(probability[b, s, i]) for b, s in tokens) / T
            total += T * f * P
    return wanted, total


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_balance_by_sequence_is_the_formula(kind):
    wanted, want = balance_in_words([[b] for b in range(B)], kind)
    assert float(routing.balance_by_sequence(wanted, lambda c: c)) == pytest.approx(want, rel=1e-5)


def test_balance_by_batch_is_the_formula():
    wanted, want = balance_in_words([range(B)])
    assert float(routing.balance_by_batch(wanted, lambda c: c)) == pytest.approx(want, rel=1e-5)


def test_balance_is_one_per_token_when_even():
    even = routing.Routing(
        jnp.full((2, 4, 4), 0.25), jnp.arange(16).reshape(2, 4, 2) % 4, jnp.ones((2, 4, 2)),
        jnp.ones((2, 4, 2), bool),
    )  # fmt: skip
    for balance in (routing.balance_by_sequence, routing.balance_by_batch):
        assert float(balance(even, lambda c: c)) == pytest.approx(2 * 4)


def test_no_valid_token_gives_no_nan():
    x, router, weights, mask = arrays()

    def loss(router):
        wanted = routed(x, router, jnp.zeros_like(mask))
        return (
            routing.balance_by_sequence(wanted, lambda c: c)
            + routing.balance_by_batch(wanted, lambda c: c)
            + routing.router_z(x @ router, jnp.zeros_like(mask))
            + routing.every_expert(x, wanted, weights).sum()
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(router)
    assert float(value) == 0.0 and (np.asarray(gradient) == 0).all()


def test_router_z_is_the_formula():
    x, router, _, mask = arrays()
    logits = np.asarray(x @ router, np.float64)
    want = (np.log(np.exp(logits).sum(-1)) ** 2 * np.asarray(mask)).sum()
    assert float(routing.router_z(x @ router, mask)) == pytest.approx(want, rel=1e-5)


def test_bias_falls_where_there_are_too_many_tokens():
    bias = jnp.array([[0.0, 0.5, -0.5, 0.25]])
    got = routing.balanced_bias(bias, jnp.array([[9.0, 1.0, 5.0, 5.0]]), 0.125)
    assert got.tolist() == [[-0.125, 0.625, -0.5, 0.25]]
