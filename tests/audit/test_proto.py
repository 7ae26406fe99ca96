"""Serialized modules: the same audit as of the text, and nothing they hold harms the process."""

import dataclasses
import gzip
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.audit import audit, proto
from jaxpar.audit.proto import fields, find_module, proto_text
from jaxpar.compat import compiled_text
from jaxpar.errors import AuditError

TABLE = np.arange(48, dtype=np.int32).reshape(12, 4) % 5
RING = [(k, (k + 1) % 4) for k in range(4)]


def scheduled(x):
    """A loop whose branch a table decides: a large constant, a permute, a conditional."""

    def body(c, i):
        kind = jnp.asarray(TABLE)[i, lax.axis_index("tensor")]
        c = lax.cond(kind > 2, lambda a: lax.psum(a, "data"), lambda a: lax.psum(a * 2, "data"), c)
        return lax.pcast(lax.ppermute(c, "tensor", RING), "data", to="varying"), None

    return lax.scan(body, x, jnp.arange(12))[0]


def trained(x):
    def loss(w):
        full = lax.all_gather(w.astype(jnp.bfloat16), "tensor", axis=1, tiled=True)
        with jax.named_scope("layer"):
            return lax.psum(jnp.sum(jnp.tanh(full)).astype(jnp.float32), "data")

    return jax.grad(loss)(x)


def exchanged(x):
    return lax.all_to_all(jnp.sin(x), "tensor", 0, 0, tiled=True)


@pytest.fixture(scope="module")
def compiled():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    into = P("data", "tensor")
    programs = {}
    for function in (scheduled, trained, exchanged):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=into)
        x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
        programs[function.__name__] = jax.jit(mapped).lower(x).compile()
    return programs


def serialized(compiled):
    return compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number, value):
    return varint(number << 3 | 2) + varint(len(value)) + value


def without(data, *numbers):
    """A message without some of its fields, all of which have a length or are numbers."""
    kept = (
        field(number, bytes(value)) if not isinstance(value, int) else
        varint(number << 3) + varint(value)
        for number, value in fields(memoryview(data)) if number not in numbers
    )  # fmt: skip
    return b"".join(kept)


def text_of(tmp_path, data, name="a.pb"):
    (tmp_path / name).write_bytes(data)
    return proto_text(tmp_path / name)


def without_lines(found):
    """Line numbers differ: the text of a Compiled also lists frames that nobody refers to."""
    kept = (dataclasses.replace(one, line=0) for one in found.collectives)
    findings = (dataclasses.replace(one, evidence=()) for one in found.findings)
    return dataclasses.replace(found, collectives=tuple(kept), findings=tuple(findings))


def refused(tmp_path, data):
    with pytest.raises(AuditError) as caught:
        text_of(tmp_path, data)
    assert str(tmp_path / "a.pb") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["scheduled", "trained", "exchanged"])
def test_a_proto_gives_the_same_audit_as_the_text(compiled, tmp_path, name):
    module = serialized(compiled[name])
    from_text = audit(compiled_text(compiled[name]), mesh={"data": 2, "tensor": 4})
    assert from_text.collectives
    hlo_proto = field(1, module) + field(3, b"\x0a\x00")  # with a buffer assignment
    snapshot = field(1, hlo_proto) + field(2, b"") + field(4, b"Host")
    forms = (module, gzip.compress(module), hlo_proto, snapshot)
    for form in forms if name == "scheduled" else forms[:1]:
        found = audit(text_of(tmp_path, form), mesh={"data": 2, "tensor": 4})
        assert without_lines(found) == without_lines(from_text)
        assert found.program.scheduled and found.program.complete


def test_the_header_tells_the_devices(compiled, tmp_path):
    module = serialized(compiled["scheduled"])
    assert "replica_count=1, num_partitions=8\n" in text_of(tmp_path, module)
    unassigned = without(module, 15)
    assert ", num_partitions=8\n" in text_of(tmp_path, unassigned)
    assert audit(text_of(tmp_path, unassigned)).program.num_devices == 8
    local = jax.jit(jnp.sin).lower(jnp.ones(2)).compile()
    assert "num_partitions=1\n" in text_of(tmp_path, serialized(local))
    assert "num_partitions=unknown\n" in text_of(tmp_path, without(serialized(local), 15))


def test_small_integer_tables_are_printed(compiled, tmp_path):
    rows = ", ".join("{ " + ", ".join(map(str, row)) + " }" for row in TABLE.tolist())
    assert "constant({...})" in compiled["scheduled"].as_text()
    for text in (
        text_of(tmp_path, serialized(compiled["scheduled"])),
        compiled_text(compiled["scheduled"]),
    ):
        assert f"constant({{ {rows} }})" in text
        assert "constant({...})" not in text


def test_other_constants_stay_left_out():
    large = np.arange(1 << 17, dtype=np.int32) ** 2 % 7
    real = np.arange(1 << 10, dtype=np.float32) ** 2
    compiled = (
        jax.jit(lambda i: (jnp.array(large)[i], jnp.array(real)[i], jnp.array(TABLE)[i, 0]))
        .lower(jnp.int32(0))
        .compile()
    )
    text = compiled_text(compiled)
    for shape, is_printed in (("s32[131072]", False), ("f32[1024]", False), ("s32[12,4]", True)):
        lines = [line for line in text.splitlines() if f"= {shape}" in line and "constant(" in line]
        assert lines
        assert all(("{...}" not in line) == is_printed for line in lines)


def test_files_that_are_no_module(compiled, tmp_path):
    module = serialized(compiled["exchanged"])
    report = field(1, b"\x08\x01") + field(2, b"temp")
    for data, message in [
        (b"", "holds no HLO module"),
        (report, "holds no HLO module"),
        (field(1, field(1, field(1, module))), "holds no HLO module"),
        (without(module, 3), "holds no HLO module"),
        (b"HloModule jit_f\n", "no protocol buffer"),
        (module[:-1], "cut off"),
        (field(1, module)[:-100], "cut off"),
        (b"\xff" * 20, "no protocol buffer"),
        (b"\x1f\x8bnonsense", "damaged .gz"),
        (gzip.compress(module)[:-9], "damaged .gz"),
        (field(1, b"a") + field(2, b"e") + field(3, field(1, b"e")), "no module that XLA reads"),
    ]:
        assert message in refused(tmp_path, data)
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "none.pb", "No such file")):
        with pytest.raises(AuditError, match=message):
            proto_text(path)


def test_computations_that_are_missing_are_told(compiled, tmp_path):
    module = serialized(compiled["scheduled"])
    (first, *_) = (value for number, value in fields(memoryview(module)) if number == 3)
    refused(tmp_path, module.replace(field(3, bytes(first)), b"", 1))


def test_limits_on_size(compiled, tmp_path, monkeypatch):
    module = serialized(compiled["exchanged"])
    monkeypatch.setattr(proto, "MAX_PROTO_BYTES", 1 << 20)
    assert "more than 1 MiB" in refused(tmp_path, gzip.compress(bytes(1 << 24)))
    assert "more than 1 MiB" in refused(tmp_path, bytes(1 << 21))
    monkeypatch.setattr(proto, "MAX_TEXT_BYTES", 100)
    assert "of text" in refused(tmp_path, module)


def test_limits_on_memory_and_time(compiled, tmp_path, monkeypatch):
    module = serialized(compiled["exchanged"])
    with monkeypatch.context() as changed:
        changed.setattr(proto, "_MEMORY_BASE", 1 << 20)
        assert "damaged" in refused(tmp_path, module)
    monkeypatch.setattr(proto, "TIME_LIMIT_S", 0.01)
    start = time.perf_counter()
    assert "within 0.01 s" in refused(tmp_path, module)
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    ("how", "ending"), [("kill(getpid(), 11)", "signal 11"), ("_exit(7)", "7")]
)
def test_a_child_that_dies_is_an_error_for_people(compiled, tmp_path, monkeypatch, how, ending):
    monkeypatch.setattr(proto, "_CHILD", f"import os; from os import getpid; os.{how}")
    assert ending in refused(tmp_path, serialized(compiled["exchanged"]))


def test_damaged_modules_do_no_harm(compiled, tmp_path):
    module = serialized(compiled["scheduled"])
    chance = random.Random(3)
    for _ in range(6):
        data = bytearray(module)
        for _ in range(chance.choice((1, 3, 30))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        start = time.perf_counter()
        try:
            audit(text_of(tmp_path, bytes(data)))
        except AuditError as error:
            assert len(str(error)) < 1000
        assert time.perf_counter() - start < 30


def test_no_message_takes_long_to_look_through():
    """As many fields as fit, and numbers without an end."""
    start = time.perf_counter()
    for data in (b"\x08\x00" * 200_000, field(3, b"") * 200_000, b"\x80" * 500_000):
        with pytest.raises(AuditError):
            find_module(data)
    assert time.perf_counter() - start < 30


def test_the_child_needs_no_jax(compiled, tmp_path):
    (tmp_path / "a.pb").write_bytes(serialized(compiled["exchanged"]))
    code = (
        "import sys, io\nfrom jaxpar.audit import proto\n"
        "text = proto._text(proto.find_module(open('a.pb', 'rb').read()))\n"
        "assert text.startswith('HloModule') and 'jax' not in sys.modules"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert time.perf_counter() - start < 30
