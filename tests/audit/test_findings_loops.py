"""Rules about communication per trip and per piece: what each finds, and what it lets pass."""

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import AXES, compiled, vary

from jaxpar.audit.findings import loops, redundant
from jaxpar.audit.source import read

RULES = (*redundant.RULES, *loops.RULES)


def found(text, rules=RULES, mesh=tiny.AXES):
    return tiny.found(text, rules, mesh)


def names(text, rules=RULES):
    return [(finding.rule, finding.severity) for finding in found(text, rules)]


# --- loops -----------------------------------------------------------------------------------

INVARIANT = [("loop-invariant-collective", "warning")]
UNMOVED = "while-loop-invariant-code-motion"


def loop(body, length=5):
    """`length` trips of `y = body(y, w, i)`."""

    def function(x, w):
        trip = lambda y, i: (body(y, w, i), None)  # noqa: E731
        return lax.scan(trip, x, jnp.arange(length))[0]

    return function


def sums_parameter(y, w, i):
    return jnp.sin(y) * vary(lax.psum(jnp.tanh(w), "tensor"))


def gathers_parameter(y, w, i):
    return jnp.sin(y) * jnp.sum(lax.all_gather(w, "tensor"))


@pytest.mark.parametrize("body", [sums_parameter, gathers_parameter])
def test_a_value_that_no_trip_changes(body):
    (finding,) = found(compiled(loop(body), (32, 8), (32, 8), without=UNMOVED))
    assert [(finding.rule, finding.severity)] == INVARIANT
    size, factor = (8, 2) if body is sums_parameter else (32, 1)
    assert finding.wire_bytes == 4 * size * 8 * 4 * factor * 3 // 4  # four trips of five
    assert not names(compiled(loop(body), (32, 8), (32, 8)))  # by itself, XLA moves it out


def test_a_value_that_only_the_outer_loop_changes():
    def outer(y, w, i):
        scaled = w * jnp.sum(y)
        return loop(gathers_parameter, 3)(y, scaled)

    (finding,) = found(compiled(loop(outer), (32, 8), (32, 8), without=UNMOVED))
    assert [(finding.rule, finding.severity)] == INVARIANT
    assert finding.wire_bytes == 5 * 2 * 32 * 8 * 4 * 3 // 4  # two trips of three, five times


def test_a_value_made_of_what_the_outer_loop_changes_and_what_nothing_changes():
    def outer(y, w, i):
        scaled = jnp.cos(w) * jnp.sum(y)
        return loop(lambda y, both, i: gathers_parameter(y, both[0] + both[1], i), 3)(
            y, (w, scaled)
        )

    (finding,) = found(compiled(loop(outer), (32, 8), (32, 8), without=UNMOVED))
    assert finding.wire_bytes == 5 * 2 * 32 * 8 * 4 * 3 // 4


def gathers_its_layer(y, w, i):
    layer = lax.dynamic_index_in_dim(w, i, 0)
    return jnp.sin(y) * jnp.sum(lax.all_gather(layer, "tensor"))


def sums_state(y, w, i):
    return vary(lax.psum(jnp.sin(y), "tensor"))


def gathers_on_some_trips(y, w, i):
    gather = lambda w: lax.all_gather(w, "tensor", tiled=True)[:8]  # noqa: E731
    return y + lax.cond(i > 2, gather, lambda w: w, w)


@pytest.mark.parametrize("body", [gathers_its_layer, sums_state, gathers_on_some_trips])
def test_what_a_loop_has_to_communicate_on_each_trip(body):
    assert not names(compiled(loop(body), (32, 8), (32, 8), without=UNMOVED))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def accumulated(add, start=jnp.zeros_like):
    return lambda w, x: lax.scan(lambda g, xb: (add(g, w, xb), None), start(w), x)[0]


ACCUMULATION = "reduction-in-accumulation-loop"
WEIGHTS = ((16, 16), (3, 8, 16))  # parameters, and three micro-batches
ON_DATA = {"into": (P(), P(None, "data")), "out": P()}
SCATTERED = {"into": (P("data"), P(None, "data")), "out": P("data")}


def test_a_gradient_that_each_micro_batch_sums():
    function = accumulated(lambda g, w, x: g + jax.grad(loss)(w, x))
    (finding,) = found(compiled(function, *WEIGHTS, **ON_DATA))
    assert (finding.rule, finding.severity) == (ACCUMULATION, "warning")
    assert finding.wire_bytes == 2 * 16 * 16 * 4  # two trips of three; an all-reduce by two
    assert "pcast" in finding.remedy


def test_a_mean_of_gradients_in_two_parts():
    def add(g, w, x):
        a, b = g
        return a + jax.grad(loss)(w, x) / 3, b - jax.grad(loss)(2 * w, x) * 0.5

    function = accumulated(add, lambda w: (jnp.zeros_like(w), jnp.zeros_like(w)))
    text = compiled(function, *WEIGHTS, **ON_DATA)
    assert {finding.rule for finding in found(text)} <= {ACCUMULATION}
    added = sum(finding.wire_bytes for finding in found(text))
    assert added in (2 * 1024, 2 * 2 * 1024)  # the second is subtracted, or added once negated


def test_scattered_gradients_are_told_as_a_choice():
    def gathered_loss(w, x):
        return loss(lax.all_gather(w, "data", tiled=True), x)

    function = accumulated(lambda g, w, x: g + jax.grad(gathered_loss)(w, x))
    (finding,) = found(compiled(function, *WEIGHTS, **SCATTERED))
    assert (finding.rule, finding.severity) == (ACCUMULATION, "info")
    assert "memory" in finding.remedy


def descends(w, x):
    return lax.scan(lambda w, xb: (w - 0.1 * jax.grad(loss)(w, xb), None), w, x)[0]


def looks_at_the_sum(w, x):
    def add(g, xb):
        return g + jax.grad(loss)(w + 0.1 * g, xb), None

    return lax.scan(add, jnp.zeros_like(w), x)[0]


def hands_out_every_sum(w, x):
    def add(g, xb):
        g = g + jax.grad(loss)(w, xb)
        return g, jnp.sum(g)

    g, sums = lax.scan(add, jnp.zeros_like(w), x)
    return g * jnp.sum(sums)


def sums_once(w, x):
    local = lax.pcast(w, "data", to="varying")
    add = accumulated(lambda g, w, x: g + jax.grad(loss)(w, x))
    return lax.psum(add(local, x), "data")


@pytest.mark.parametrize("function", [descends, looks_at_the_sum, hands_out_every_sum, sums_once])
def test_gradients_that_a_loop_needs_or_sums_once(function):
    assert ACCUMULATION not in dict(names(compiled(function, *WEIGHTS, **ON_DATA)))


def test_gradients_of_layers_are_stacked_not_added():
    def model(w, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    text = compiled(
        jax.grad(model), (3, 16, 16), (8, 16), into=(P(), P("data")), out=P(),
        without="all-reduce-code-motion",
    )  # fmt: skip
    reading, _ = read(text, AXES)
    assert {site.collective.count for site in reading.sites} & {1, 3}
    assert ACCUMULATION not in dict(names(text))


# --- many small ones -------------------------------------------------------------------------

SMALL = [("many-small-collectives", "info")]


def gathers(number):
    """As many gathers, each of another value."""

    def function(x):
        parts = [lax.all_gather(jnp.sin(x * i), "tensor") for i in range(1, number + 1)]
        return sum(jnp.sum(part, axis=0) for part in parts)

    return function


def chained(x):
    for _ in range(10):
        x = jnp.sin(lax.all_gather(x, "tensor")[0]) + x
    return x


def test_many_small_gathers():
    (finding,) = found(compiled(gathers(10)))
    assert [(finding.rule, finding.severity)] == SMALL
    assert finding.wire_bytes is None
    assert (
        finding.message.startswith("10 all-gather operations") and "and 2 more" in finding.message
    )


def test_gathers_that_are_few_or_large_or_wait_for_each_other():
    assert not names(compiled(gathers(7)))
    assert not names(compiled(chained))
    assert not names(compiled(gathers(10), (512, 32)))  # 64 KiB each
