"""The three columns: what the jaxpar counter sees, and which differences the comparison accepts."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import MeshSpec, asked, audit, compare
from jaxpar.audit.compare import agree
from jaxpar.errors import AuditError
from jaxpar.strategies.strategy import Expected

MESH = MeshSpec.parse("data=2,tensor=4")


def traced(f, *shapes, dtype=jnp.float32, **specs):
    mesh = MESH.build()
    specs = {"in_specs": P(("data", "tensor")), "out_specs": P(("data", "tensor")), **specs}
    run = jax.jit(jax.shard_map(f, mesh=mesh, **specs))
    return run.trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def vary(x, axes):
    return lax.pcast(x, axes, to="varying")


def rows(f, *shapes, **options):
    return [
        (row.kind, row.axes, row.count, row.payload_bytes, row.dtype)
        for row in asked(traced(f, *shapes, **options).jaxpr)
    ]


# --- asked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda x: x + vary(lax.psum(x, "data"), "data"), ("all-reduce", ("data",), 1, 32, "f32")),
        (lambda x: x + vary(lax.pmax(x, ("tensor", "data")), ("data", "tensor")),
         ("all-reduce", ("data", "tensor"), 1, 32, "f32")),
        (lambda x: lax.all_gather(x, "tensor", tiled=True)[:8],
         ("all-gather", ("tensor",), 1, 128, "f32")),
        (lambda x: lax.psum_scatter(x, "tensor", tiled=True).repeat(4),
         ("reduce-scatter", ("tensor",), 1, 32, "f32")),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
         ("collective-permute", ("data",), 1, 32, "f32")),
        (lambda x: lax.all_to_all(x, "tensor", 0, 0, tiled=True),
         ("all-to-all", ("tensor",), 1, 32, "f32")),
    ],
)  # fmt: skip
def test_each_primitive_and_its_payload(f, want):
    assert rows(f, (64,)) == [want]


def test_scans_multiply_and_axes_of_one_device_do_not_count():
    def f(x):
        def outer(x, _):
            x, _ = lax.scan(lambda x, _: (lax.ppermute(x, "data", [(0, 1)]), None), x, length=3)
            return x + vary(lax.psum(x, "pipe"), "pipe"), None

        return lax.scan(outer, vary(x, "pipe"), length=5)[0]

    got = rows(f, (64,), out_specs=P(("data", "tensor", "pipe")))
    assert got == [("collective-permute", ("data",), 15, 32, "f32")]


def test_what_depends_on_data_has_no_count():
    def loop(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.ppermute(x, "data", [(0, 1)]), x)

    assert rows(loop, (64,)) == [("collective-permute", ("data",), None, 32, "f32")]

    def branch(x):
        swap = lambda x: lax.ppermute(x, "data", [(0, 1)])  # noqa: E731
        return lax.cond(x.sum() > 0, swap, lambda x: x, x)

    assert rows(branch, (64,)) == [("collective-permute", ("data",), None, 32, "f32")]


def test_branches_that_ask_for_the_same_are_counted():
    def branch(x):
        def f(sign):
            return lambda x: lax.ppermute(sign * x, "data", [(0, 1)])

        return lax.cond(x.sum() > 0, f(1.0), f(-1.0), x)

    assert rows(branch, (64,)) == [("collective-permute", ("data",), 1, 32, "f32")]


def test_parts_of_an_axis_are_refused_rather_than_left_out():
    def f(x):
        return lax.all_gather(x, "tensor", axis_index_groups=[[0, 1], [2, 3]], tiled=True)[:8]

    with pytest.raises(AuditError, match="axis_index_groups"):
        asked(traced(f, (64,)).jaxpr)


def test_phases_and_scopes_follow_the_program():
    def f(x):
        def loss(x):
            with jax.named_scope("mine"):
                return jnp.sum(lax.all_gather(x, "tensor", tiled=True) ** 2)

        gradient = jax.grad(loss)(x)
        return gradient + vary(lax.psum(gradient, "data"), "data")

    got = [(row.kind, row.phase, row.scope) for row in asked(traced(f, (64,)).jaxpr)]
    assert got == [
        ("all-gather", "forward", "mine"),
        ("reduce-scatter", "backward", "mine"),
        ("all-reduce", "update", ""),
    ]


# --- the comparison --------------------------------------------------------------------------


def two_sums(x):
    return vary(lax.psum(x, "data"), "data") + vary(lax.psum(2 * x, "data"), "data")


@pytest.fixture(scope="module")
def program():
    """(asked, audit) of two all-reduces of 32 bytes over data, which XLA merges into one."""
    both = traced(two_sums, (64,))
    return asked(both.jaxpr), audit(both.lower().compile(), mesh=MESH.axes)


def predicted(**changes):
    row = Expected(
        kind="all-reduce", axes=("data",), count=2, payload_bytes=32, dtype="f32",
        phase="forward", why="test",
    )  # fmt: skip
    return replace(row, **changes)


def test_merged_operations_agree_and_are_named(program):
    (line,) = compare([predicted()], *program)
    assert line.agrees and line.note == "merged"
    assert (line.predicted.count, line.asked.count, line.compiled.count) == (2, 2, 1)
    assert line.predicted.payload_bytes == line.compiled.payload_bytes == 64
    assert line.wire_bytes == 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 3},
        {"count": 1, "payload_bytes": 64},  # the same bytes, but not what the program asks for
        {"dtype": "bf16"},
        {"phase": "backward"},
        {"axes": ("tensor",)},
        {"kind": "reduce-scatter"},
    ],
)
def test_a_wrong_prediction_disagrees(program, wrong):
    lines = compare([predicted(**wrong)], *program)
    assert not agree(lines)
    assert any("predicted" in line.note for line in lines)


def test_a_compiled_program_that_moves_more_or_less_disagrees(program):
    asks, result = program
    (found,) = result.collectives
    for collectives in ((), (found, found), (replace(found, axes=None, axes_note="odd"),)):
        lines = compare([predicted()], asks, replace(result, collectives=collectives))
        assert not agree(lines), collectives
        assert "compiled" in " ".join(line.note for line in lines)


def test_an_unknown_trip_count_never_agrees(program):
    asks, result = program
    unknown = replace(result.collectives[0], count=None, count_max=None)
    (line,) = compare([predicted()], asks, replace(result, collectives=(unknown,)))
    assert not line.agrees and "not known" in line.note


def test_a_wider_wire_is_accepted_only_when_every_element_is_accounted_for():
    def f(x):
        return vary(lax.psum(x, "data"), "data")

    narrow = traced(f, (64,), dtype=jnp.bfloat16)
    asks, result = asked(narrow.jaxpr), audit(narrow.lower().compile(), mesh=MESH.axes)
    want = [predicted(count=1, payload_bytes=16, dtype="bf16")]
    (line,) = compare(want, asks, result)
    assert line.agrees and line.note == "cpu: bf16 goes as f32"
    assert (line.asked.payload_bytes, line.compiled.payload_bytes) == (16, 32)

    (found,) = result.collectives
    (buffer,) = found.buffers
    for size in (16, 28, 64):
        odd = replace(found, buffers=(replace(buffer, payload_bytes=size),), payload_bytes=size)
        assert not agree(compare(want, asks, replace(result, collectives=(odd,)))), size


def test_gathers_that_a_backend_moves_out_of_a_loop_are_named():
    def f(x):
        def body(total, _):
            return total + lax.all_gather(x, "data", tiled=True).sum(), None

        return lax.scan(body, vary(jnp.float32(0), ("data", "tensor")), length=5)[0][None]

    program = traced(f, (64,))
    asks, result = asked(program.jaxpr), audit(program.lower().compile(), mesh=MESH.axes)
    want = [predicted(kind="all-gather", count=5, payload_bytes=64)]
    (line,) = compare(want, asks, result)
    assert (line.asked.count, line.compiled.count) == (5, 1)
    assert line.agrees and line.note == "hoisted"

    (found,) = result.collectives
    for count in (0, 2, 4, 6):  # neither in the loop nor before it
        odd = replace(result, collectives=(replace(found, count=count),))
        assert not agree(compare(want, asks, odd)), count
    for kind in ("all-reduce", "reduce-scatter"):
        asks_kind = [replace(asks[0], kind=kind)]
        odd = replace(result, collectives=(replace(found, kind=kind),))
        assert not agree(compare([replace(want[0], kind=kind)], asks_kind, odd)), kind


def test_a_phase_that_xla_forgot_is_shown_where_its_bytes_are(program):
    asks, result = program
    (found,) = result.collectives
    moved = tuple(replace(buffer, phase="backward") for buffer in found.buffers)
    lines = compare(
        [predicted()], asks, replace(result, collectives=(replace(found, buffers=moved),))
    )
    assert [(line.phase, line.compiled is None) for line in lines] == [
        ("forward", True), ("backward", False),
    ]  # fmt: skip
    assert agree(lines) and lines[0].note == "XLA says another phase"


def test_lines_are_plain_data(program):
    (line,) = compare([predicted()], *program)
    data = json.loads(json.dumps(line.to_json()))
    assert data["compiled"] == {"count": 1, "payload_bytes": 64, "dtype": "f32"}
