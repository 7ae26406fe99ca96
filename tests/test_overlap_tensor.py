"""Collective matmul: the same numbers and the same bytes as gather-then-matmul, one hop per dot."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar import expected
from jaxpar.audit.compare import agree
from jaxpar.collectives import ring_shift, wire_bytes
from jaxpar.errors import PlanError
from jaxpar.strategies import compose, overlap, sequence
from jaxpar.tour import take_row
from tests.helpers import SMALL, batches, plan, reference, step
from tests.test_closed_forms import asked_of, executions

DIRECTIONS = ("unidirectional", "bidirectional")
ONE_WAY = {"sequence": True, "overlap": "unidirectional"}
BOTH_WAYS = {"sequence": True, "overlap": "bidirectional"}


# --- the two functions, on their own -----------------------------------------------------------


def half_a_layer(x, w1, w2, w3, column, row):
    first, second = column(x, (w1, w2))
    hidden = jnp.sin(first) + jnp.cos(second).sum(-1)[:, :, None, None]
    return row(jnp.cumsum(hidden, axis=1), w3)  # where a token is has to matter


def plain_column(x, weights):
    h = sequence.enter(x)
    return tuple(jnp.tensordot(h, w, 1) for w in weights)


def plain_row(h, w):
    return sequence.leave(jnp.tensordot(h, w, w.ndim - 1))


def on_ring(n, column, row):
    """Output and all gradients of half a layer on `n` devices, as a function of global arrays."""
    tensor = PartitionSpec(None, "tensor")
    mesh = Mesh(np.array(jax.devices()[:n]), ("tensor",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        partial(half_a_layer, column=column, row=row),
        mesh=mesh,
        in_specs=(tensor, tensor, tensor, PartitionSpec("tensor")),
        out_specs=tensor,
    )

    def loss(*args):
        y = run(*args)
        return jnp.sum(jnp.sin(y) * y), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


@functools.cache
def plain_result(n):
    return on_ring(n, plain_column, plain_row)(*arguments(n))


def arguments(n):
    B, S, D = 2, 3 * n, 5
    shapes = (B, S, D), (D, 2 * n, 3), (D, n), (2 * n, 3, D)
    keys = jax.random.split(jax.random.key(n), 4)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def largest_difference(n, direction):
    """Of output and gradients from gather-then-matmul, each relative to its own largest value."""
    column = partial(overlap.gather_matmul, direction=direction)
    row = partial(overlap.matmul_scatter, direction=direction)
    have, want = on_ring(n, column, row)(*arguments(n)), plain_result(n)
    return max(
        float(np.abs(mine - theirs).max() / np.abs(theirs).max())
        for mine, theirs in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n", [3, 4])
def test_equals_gather_then_matmul(n, direction):
    assert largest_difference(n, direction) < 1e-4


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_every_piece_meets_every_device_once(n):
    for direction in DIRECTIONS:
        route = overlap.hops(n, direction)
        met = [by * r for by, num in route.items() for r in range(1, num + 1)]
        assert sorted(distance % n for distance in met) == list(range(1, n))
    assert overlap.hops(n, "unidirectional") == {1: n - 1}
    assert max(overlap.hops(n, "bidirectional").values()) == n // 2


# --- predicted = asked = compiled = executed ---------------------------------------------------

CASES = [
    ("tensor=2", ONE_WAY),
    ("tensor=8", BOTH_WAYS | {"remat": "full"}),
    ("data=2,tensor=4", BOTH_WAYS | {"num_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_whole_step(mesh, fields):
    row = take_row("overlap", step(mesh, **fields), batches(10), reference(SMALL, 10))
    assert agree(row.lines), [line for line in row.lines if not line.agrees]
    assert row.numbers_agree, row
    hops = [line for line in row.lines if line.kind == "collective-permute"]
    phases = {"forward", "backward"} | ({"recompute"} if "remat" in fields else set())
    assert {line.phase for line in hops} == phases


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("tensor=2", BOTH_WAYS | {"remat": "dots"}),
        ("tensor=8", ONE_WAY | {"remat": "selective"}),
        ("fsdp=2,tensor=4", BOTH_WAYS | {"remat": "full"}),
        ("context=2,tensor=2", ONE_WAY),
    ],
)
def test_predicted_is_what_the_program_asks_for(mesh, fields):
    explicit = step(mesh, compute_dtype="bfloat16", **fields)
    assert executions(expected(SMALL, explicit.plan)) == executions(asked_of(explicit))


def test_sends_the_bytes_of_the_collectives_it_replaces():
    def sent(**fields):
        rows = expected(SMALL, plan("tensor=8", sequence=True, **fields))
        return sum(r.count * wire_bytes(r.kind, r.payload_bytes, 8) for r in rows)

    for remat in ("none", "dots", "full"):
        for direction in DIRECTIONS:
            assert sent(remat=remat, overlap=direction) == sent(remat=remat)


def test_only_the_ends_of_the_model_still_gather():
    rows = asked_of(step("tensor=4", **ONE_WAY))
    L, n = SMALL.num_layers, 4
    hops = [row for row in rows if row.kind == "collective-permute"]
    assert sum(row.count for row in hops) == 8 * L * (n - 1)
    assert {row.payload_bytes for row in hops} == {16 * 16 * SMALL.embed * 4 // n}
    others = [row for row in rows if row.kind in ("all-gather", "reduce-scatter")]
    assert sum(row.count for row in others) == 4
    assert not any("layers" in row.scope for row in others)


# --- hidden ------------------------------------------------------------------------------------


def untied_hops(jaxpr):
    """Permutes whose result does not pass a barrier together with that of a matmul."""
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def is_product(v):
        """Of one matmul, or the sum of several."""
        eqn = maker.get(v)
        name = eqn and eqn.primitive.name
        return name == "dot_general" or (name == "add" and all(map(is_product, eqn.invars)))

    tied = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier" and any(map(is_product, eqn.invars)):
            tied |= set(eqn.invars)
    hops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ppermute"]
    found = [eqn for eqn in hops if not set(eqn.outvars) <= tied]
    for eqn in jaxpr.eqns:
        for body in jaxprs_in_params(eqn.params):
            found += untied_hops(getattr(body, "jaxpr", body))
    return found


@pytest.mark.parametrize("fields", [ONE_WAY, BOTH_WAYS | {"remat": "full"}])
def test_every_hop_is_tied_to_a_matmul_backward_too(fields):
    explicit = step("tensor=4", **fields)
    assert untied_hops(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr.jaxpr) == []


# --- refusals ----------------------------------------------------------------------------------


def test_without_sequence_there_is_nothing_to_take_apart():
    with pytest.raises(PlanError, match=r"overlap='bidirectional'.*sequence=False.*sequence=True"):
        step("tensor=2", overlap="bidirectional")
    with pytest.raises(PlanError, match=r"sequence=True.*tensor=1"):
        step("data=2", **ONE_WAY)
    with pytest.raises(PlanError, match=r"overlap='both' \(str\) must be one of"):
        plan("tensor=2", overlap="both")


def test_is_explained_and_toured():
    strategy, row = compose.strategy("overlap")
    assert strategy.refines == "sequence" and row.fields["overlap"] == "unidirectional"
    assert len(strategy.variants) == 2


# --- planted faults ----------------------------------------------------------------------------

SCATTER, GATHER, WRITE, HOPS = (
    overlap.matmul_ring_scatter, overlap.ring_gather, overlap._write, overlap.hops,
)  # fmt: skip


def backwards(x, axis, *, by, scope):
    return ring_shift(x, axis, by=-by, scope=scope)


def widened(x, axis, *, by, scope):
    return ring_shift(x.astype(jnp.float32), axis, by=by, scope=scope).astype(x.dtype)


def one_too_many(n, direction):
    return {by: num + 1 for by, num in HOPS(n, direction).items()}


def one_too_few(n, direction):
    return {by: num - 1 for by, num in HOPS(n, direction).items()}


def next_place(whole, rows, start):
    return WRITE(whole, rows, (start + rows.shape[1]) % whole.shape[1])


def all_at_once(x, weights, route):
    """What a ring of n-1 hops becomes when each of them carries the buffer of all pieces."""
    whole, *products = GATHER(x, weights, route)
    for _ in range(3):
        whole = ring_shift(whole, "tensor", scope="extra")
    back = ring_shift(whole, "tensor", scope="extra")
    return (back, *products)


def own_rows_twice(inputs, weights, route):
    y = SCATTER(inputs, weights, route)
    start = lax.axis_index("tensor") * y.shape[1]
    rows = (lax.dynamic_slice_in_dim(x, start, y.shape[1], axis=1) for x in inputs)
    return y + sum(jnp.matmul(x, w) for x, w in zip(rows, weights, strict=True))


def first_weight_only(inputs, weights, route):
    return SCATTER(inputs[:1], weights[:1], route)


def half_the_sequence(x, dy):
    return jnp.einsum("bsx,bsy->xy", *(t[:, : t.shape[1] // 2] for t in (x, dy)))


def hops_first(operands):
    """XLA may then run every hop before the first matmul."""
    return operands


# name: (direction, who sees it, name of what is replaced, by what)
FAULTS = {
    "pieces go round the wrong way": ("unidirectional", {"numbers"}, "ring_shift", backwards),
    "both directions exchanged": ("bidirectional", {"numbers"}, "ring_shift", backwards),
    "a hop too many": ("unidirectional", {"audit", "numbers"}, "hops", one_too_many),
    "a hop too few": ("bidirectional", {"audit", "numbers"}, "hops", one_too_few),
    "a piece written to another's place": ("unidirectional", {"numbers"}, "_write", next_place),
    "hops in a wider dtype": ("unidirectional", {"audit"}, "ring_shift", widened),
    "every hop carries all pieces": ("unidirectional", {"audit"}, "ring_gather", all_at_once),
    "own rows counted twice": (
        "bidirectional", {"numbers"}, "matmul_ring_scatter", own_rows_twice),
    "gradient of the first of two weights": (
        "unidirectional", {"numbers"}, "matmul_ring_scatter", first_weight_only),
    "weights' gradient of half the sequence": (
        "unidirectional", {"numbers"}, "_weight_gradient", half_the_sequence),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    direction, seen_by, attribute, wrong = FAULTS[name]
    assert hasattr(overlap, attribute)
    monkeypatch.setattr(overlap, attribute, wrong)
    bf16 = step("tensor=4", sequence=True, overlap=direction, compute_dtype="bfloat16")
    seen = {
        "audit": executions(expected(SMALL, bf16.plan)) != executions(asked_of(bf16)),
        "numbers": largest_difference(4, direction) > 1e-3,
    }
    assert {check for check, saw in seen.items() if saw} == seen_by


def test_untied_hop_is_seen(monkeypatch):
    """The numbers and the bytes stay right; only the order that XLA may choose is lost."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda operands: operands)
    explicit = step("tensor=4", **ONE_WAY)
    jaxpr = explicit.jitted.trace(*explicit.abstract_inputs).jaxpr.jaxpr
    assert len(untied_hops(jaxpr)) == 8 * (4 - 1)
