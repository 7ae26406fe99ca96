"""What `audit` takes, what it refuses, and the live programs it reads."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit import audit, files
from jaxpar.audit.result import Audit
from jaxpar.errors import AuditError

AXES = {"data": 2, "tensor": 4}
SHAPE = (8, 32)
LOCAL = 4 * 8 * 4  # bytes of a shard: [4, 8] float32


EVERYWHERE = P(("data", "tensor"))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(mesh, function, out=None):
    into = P("data", "tensor")
    out = into if out is None else out
    mapped = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out)
    return jax.jit(mapped), jax.ShapeDtypeStruct(SHAPE, jnp.float32)


def one(mesh, function, **kwargs):
    (found,) = audit(*sharded(mesh, function, **kwargs), mesh=AXES).collectives
    return found


def summed(x, axis):
    """A sum that a loop can carry on with."""
    return lax.pcast(lax.psum(x, axis), axis, to="varying")


def ring(axis):
    n = AXES[axis]
    return [(i, (i + 1) % n) for i in range(n)]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("kind", "call", "payload"),
    [
        ("all-reduce", lambda x, axis: lax.psum(x, axis), lambda n: LOCAL),
        ("all-gather", lambda x, axis: lax.all_gather(x, axis, tiled=True), lambda n: LOCAL * n),
        (
            "reduce-scatter",
            lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
            lambda n: LOCAL,
        ),
        ("collective-permute", lambda x, axis: lax.ppermute(x, axis, ring(axis)), lambda n: LOCAL),
        ("all-to-all", lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), lambda n: LOCAL),
    ],
)
def test_each_collective_on_each_axis(mesh, kind, call, payload, axis):
    found = one(mesh, lambda x: call(x, axis), out=EVERYWHERE)
    n = AXES[axis]
    assert found.kind == kind
    assert found.axes == (axis,)
    assert (found.group_size, found.num_groups) == (n, 8 // n)
    assert found.payload_bytes == payload(n)
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
    assert found.wire_bytes == factor * found.payload_bytes
    assert (found.count, found.count_min, found.count_max) == (1, 1, 1)
    assert (found.dtype, found.program_dtype, found.parts) == ("f32", "f32", 1)
    assert found.source.split(":")[0].endswith("test_source.py")
    assert found.phase == "forward"


def test_several_axes_are_in_mesh_order(mesh):
    found = one(mesh, lambda x: lax.psum(x, ("tensor", "data")), out=EVERYWHERE)
    assert found.axes == ("data", "tensor")


def test_axes_of_one_device_do_not_appear():
    mesh = jax.make_mesh((1, 8), ("unit", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    function = jax.shard_map(
        lambda a: (lax.psum(a, ("unit", "x")), lax.psum(a, "unit")),
        mesh=mesh,
        in_specs=P("unit", "x"),
        out_specs=P(("unit", "x")),
    )
    args = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    (found,) = audit(jax.jit(function), args, mesh={"before": 1, "unit": 1, "x": 8}).collectives
    assert found.axes == ("x",)


def test_nested_scans_multiply(mesh):
    def inner(x, _):
        with jax.named_scope("inner"):
            return lax.ppermute(jnp.sin(x), "tensor", ring("tensor")), None

    def outer(x, _):
        return lax.scan(inner, x, length=3)[0], None

    found = one(mesh, lambda x: lax.scan(outer, x, length=5)[0])
    assert found.count == 15
    assert found.scope == "inner"
    assert found.axes_note == "ring by +1"


def test_a_loop_decided_by_data_has_no_count(mesh):
    def function(x):
        n = jnp.abs(x[0, 0]).astype(jnp.int32)
        return lax.fori_loop(0, n, lambda i, y: lax.ppermute(y, "tensor", ring("tensor")), x)

    result = audit(*sharded(mesh, function), mesh=AXES)
    found = result.collectives[-1]
    assert (found.count, found.count_min, found.count_max) == (None, 0, None)
    assert [finding.rule for finding in result.findings] == ["unknown-trip-count"]
    assert result.findings[0].source.split(":")[0].endswith("test_source.py")
    assert result.program.complete
    assert result.totals[-1].payload_bytes is None


def test_bf16_on_cpu_is_told_apart(mesh):
    function, args = sharded(
        mesh, lambda x: lax.psum(x.astype(jnp.bfloat16), "tensor"), out=EVERYWHERE
    )
    (found,) = audit(function, args, mesh=AXES).collectives
    assert (found.dtype, found.program_dtype) == ("f32", "bf16")


def test_phases_of_a_differentiated_step(mesh):
    def loss(w, x):
        with jax.named_scope("layer"):
            return lax.psum(jnp.sum(jnp.tanh(x @ w)), "data")

    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        with jax.named_scope("clip"):
            return lax.pmax(gradient, "data")

    function = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=EVERYWHERE)
    args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (8, 16)))
    result = audit(jax.jit(function), *args, mesh=AXES)
    assert ("update", "clip") in {(found.phase, found.scope) for found in result.collectives}


def test_gspmd_programs(mesh):
    sharding = jax.NamedSharding(mesh, P("data", "tensor"))
    args = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding)
    result = audit(jax.jit(lambda x: jnp.sum(x)), args)
    assert result.mesh == AXES  # of the program's own shardings
    assert all(found.axes for found in result.collectives)
    assert result.collectives


def test_everything_that_names_a_program(mesh, tmp_path):
    function, args = sharded(mesh, lambda x: lax.psum(x, "tensor"), out=EVERYWHERE)
    lowered = function.lower(args)
    compiled = lowered.compile()
    text = compiled.as_text()
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.hlo").write_text(text.replace("\n", "\r\n"), newline="")
    with gzip.open(tmp_path / "a.gz", "wt") as file:
        file.write(text)
    things = [text, tmp_path / "a.txt", str(tmp_path / "a.hlo"), tmp_path / "a.gz"]
    for thing in (lowered, compiled, *things):
        result = audit(thing, mesh=mesh)
        assert [found.axes for found in result.collectives] == [("tensor",)]
        assert result.mesh == AXES
        assert (result.memory.temp_bytes is None) == (thing in things)
    memory = audit(compiled).memory
    assert memory.argument_bytes == LOCAL
    assert memory.peak_bytes is None or memory.peak_bytes >= LOCAL
    assert audit(compiled).program.platform == "cpu"


SCHEMA = {
    "schema": str,
    "program": {
        "name": str, "platform": str, "num_devices": int, "scheduled": bool, "complete": bool,
    },
    "mesh": {"data": int, "tensor": int},
    "collectives": [{
        "kind": str, "axes": [str], "axes_note": (str, type(None)), "group_size": int,
        "num_groups": int, "dtype": str, "program_dtype": str, "count": (int, type(None)),
        "count_min": int, "count_max": (int, type(None)), "payload_bytes": int, "wire_bytes": int,
        "phase": str, "scope": str, "source": (str, type(None)), "async": bool,
        "exposed_fraction": (float, type(None)), "parts": int, "transfer_s": (float, type(None)),
        "name": str, "line": int, "num_overlapped": int, "overlapped": [str],
        "device_counts": (list, type(None)),
    }],
    "totals": [{
        "kind": str, "axes": [str], "count": (int, type(None)), "count_min": int,
        "count_max": (int, type(None)), "payload_bytes": (int, type(None)),
        "wire_bytes": (int, type(None)),
    }],
    "exposure": [{
        "axes": [str], "exposed_fraction": (float, type(None)), "transfer_s": (float, type(None)),
    }],
    "memory": {
        "argument_bytes": int, "output_bytes": int, "temp_bytes": (int, type(None)),
        "peak_bytes": (int, type(None)), "live_bytes": (int, type(None)),
        "largest": [{"name": str, "nbytes": int, "shape": str, "source": (str, type(None))}],
    },
    "findings": [{"rule": str, "severity": str, "message": str, "source": (str, type(None)),
                  "remedy": str, "evidence": [str], "wire_bytes": (int, type(None))}],
}  # fmt: skip


def check(data, schema):
    if isinstance(schema, dict):
        assert list(data) == list(schema) or set(data) == set(schema)
        for key, inner in schema.items():
            check(data[key], inner)
    elif isinstance(schema, list):
        assert isinstance(data, list)
        for item in data:
            check(item, schema[0])
    else:
        assert isinstance(data, schema)


def test_json(mesh):
    def function(x):
        n = x[0, 0].astype(jnp.int32)
        y = lax.fori_loop(0, n, lambda i, y: summed(y, "tensor"), x)
        return lax.psum(y, "data")

    result = audit(*sharded(mesh, function, out=EVERYWHERE), mesh=AXES)
    data = result.to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["schema"] == "jaxpar.audit/1"
    assert data["findings"]
    assert len(data["totals"]) == 2
    check(data, SCHEMA)


def test_totals_are_counts_times_bytes(mesh):
    def function(x):
        y, _ = lax.scan(lambda y, _: (summed(jnp.sin(y), "tensor"), None), x, length=3)
        return lax.psum(jnp.cos(y), "tensor")

    (total,) = audit(*sharded(mesh, function, out=EVERYWHERE), mesh=AXES).totals
    assert (total.kind, total.axes, total.count) == ("all-reduce", ("tensor",), 4)
    assert total.payload_bytes == 4 * LOCAL
    assert total.wire_bytes == 4 * LOCAL * 3 // 2


def test_results_are_frozen(mesh):
    result = audit(*sharded(mesh, lambda x: x), mesh=AXES)
    assert isinstance(result, Audit)
    with pytest.raises(AttributeError):
        result.mesh = {}


# --- refused ---------------------------------------------------------------------------------


def test_programs_that_are_not_partitioned(mesh):
    function, args = sharded(mesh, lambda x: lax.psum(x, "tensor"), out=EVERYWHERE)
    lowered = function.lower(args)
    with pytest.raises(AuditError, match="awaits XLA's partitioner"):
        audit(lowered.as_text("hlo"))
    with pytest.raises(AuditError, match="StableHLO"):
        audit(lowered.as_text())
    auto = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    text = jax.jit(jnp.sum).lower(auto).as_text("hlo")
    for given in (text, text.partition("\n")[2]):
        with pytest.raises(AuditError, match="awaits XLA's partitioner"):
            audit(given)


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (len, "cannot be audited"),
        (b"HloModule", "cannot be audited"),
        (3, "cannot be audited"),
        ("no/such/file.txt", "cannot be read"),
        ("HloModule x", "no HLO computation"),
        ("", "folder|cannot be read"),
    ],
)
def test_what_is_no_program(thing, message):
    with pytest.raises(AuditError, match=message):
        audit(thing)


def test_arguments_where_none_belong(mesh):
    function, args = sharded(mesh, lambda x: x)
    with pytest.raises(AuditError, match="give none"):
        audit(function.lower(args), args)
    with pytest.raises(AuditError, match="no further arguments"):
        audit("HloModule x", 3)


@pytest.mark.parametrize("given", [{}, 3, {"a": 0}, {"a": "b"}, {3: 3}, {"a": 1 << 40}])
def test_meshes_that_are_none(given):
    with pytest.raises(AuditError, match="mesh"):
        audit("HloModule x", mesh=given)


def test_a_mesh_of_another_size(mesh):
    with pytest.raises(AuditError, match=r"has 4 devices and the program was compiled for 8"):
        audit(*sharded(mesh, lambda x: lax.psum(x, "tensor"), out=EVERYWHERE), mesh={"x": 4})


def test_files_that_are_no_text(tmp_path):
    with pytest.raises(AuditError, match="holds no module"):
        audit(tmp_path)
    for name, content, message in [
        ("a.pb", b"x", "a.pb"),
        ("a.txt", b"\0\1\2", "binary"),
        ("b.gz", b"\x1f\x8bnonsense", "damaged .gz"),
        ("c.gz", gzip.compress(b"HloModule x\n" * 1000)[:-9], "damaged .gz"),
        ("d.gz", gzip.compress(b"\xff\xfe not text"), "no HLO computation"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(AuditError, match=message):
            audit(tmp_path / name)


def test_bombs_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 1 << 23)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\n" * (1 << 26)))
    with pytest.raises(AuditError, match="more than 8 MiB"):
        audit(tmp_path / "bomb.gz")
    with pytest.raises(AuditError, match="more than 8 MiB"):
        audit("\n" * (1 << 24))


def test_numpy_arguments_are_not_run(mesh):
    function, _ = sharded(mesh, lambda x: lax.psum(x, "data"), out=EVERYWHERE)
    assert audit(function, np.ones(SHAPE, np.float32), mesh=AXES).collectives[0].axes == ("data",)


def test_a_program_for_one_device_has_no_collectives():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    placed = jax.sharding.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=placed)
    by_partitioner = jax.jit(lambda x: x * 2)
    by_hand = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec,
                                    out_specs=jax.sharding.PartitionSpec()))  # fmt: skip
    for function in (by_partitioner, by_hand):
        result = audit(function, x, mesh=mesh)
        assert result.collectives == () and result.program.complete


def test_a_function_without_its_arguments_is_told_to_bring_them():
    with pytest.raises(AuditError, match="cannot be compiled without arguments"):
        audit(jax.jit(lambda x: x))


@pytest.mark.parametrize("mesh", ["a=2,b", "a=2,a=4", "=8", "a=b", ""])
def test_axes_that_cannot_be_read(mesh):
    with pytest.raises(AuditError):
        audit(jax.jit(lambda x: x), jnp.ones(2), mesh=mesh)
