"""Random small programs that communicate: what they ask for is what an audit has to find.

A program is a block: collectives and loops of blocks, one after the other, on a local [8, 8] array
that every step gives back in its own shape and dtype. Each step changes its input by constants of
its own, so that no two are the same and none is left out.
"""

from __future__ import annotations

import collections
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxpar.audit import Audit, audit
from jaxpar.audit.asked import Asked, asked
from jaxpar.audit.dump import choose
from jaxpar.compat import varying_axes

MESH = {"a": 2, "b": 2, "c": 2}
SIZE = 8

_DTYPES = {"f32": jnp.float32, "s32": jnp.int32, "bf16": jnp.bfloat16}
_SINGLE = ("all_to_all", "ppermute")  # over one axis at a time
_MAX_DEPTH = 2

Sums: TypeAlias = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One collective over `axes`, passing the array in `dtype`."""

    name: str
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Loop:
    """`body`, `length` times: by a scan, or by a fori_loop whose bounds the compiler knows."""

    name: str
    length: int
    body: Block


Block: TypeAlias = "tuple[Op | Loop, ...]"


def use_devices() -> None:
    """8 virtual devices on this machine's CPU, for a script; tests have them already."""
    from jaxpar.mesh import use_cpu_devices

    jax.config.update("jax_platforms", "cpu")
    use_cpu_devices(8)


def random_program(chance: random.Random, depth: int = 0) -> Block:
    """A block of one to three parts, loops nested up to two deep."""
    parts: list[Op | Loop] = []
    for _ in range(chance.randint(1, 3)):
        if depth < _MAX_DEPTH and chance.randint(0, 2) == 0:
            name, length = chance.choice(("scan", "fori")), chance.randint(1, 4)
            body = random_program(chance, depth + 1)
            parts.append(Loop(name=name, length=length, body=body))
            continue
        name = chance.choice(tuple(_STEPS))
        num_axes = 1 if name in _SINGLE else chance.randint(1, len(MESH))
        axes = tuple(sorted(chance.sample(sorted(MESH), num_axes)))
        parts.append(Op(name=name, axes=axes, dtype=chance.choice(tuple(_DTYPES))))
    return tuple(parts)


def jitted(program: Block) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The program as a jitted function on the mesh, and the argument it takes."""
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))
    spec = PartitionSpec(tuple(MESH))
    numbers = itertools.count(1)

    def body(x: jax.Array) -> jax.Array:
        return _run(program, x, numbers)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped), jax.ShapeDtypeStruct((SIZE * mesh.size, SIZE), jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A program: what it asks for, its audits right after partitioning and as compiled (`text`)."""

    rows: list[Asked]
    partitioned: Audit
    final: Audit
    text: str


def disagreements(tried: Tried) -> Iterator[str]:
    """In words, where what the program asks for is not what audits of it find.

    Right after partitioning, count and payload are exactly those of the jaxpr. Of the program as
    compiled the payload is, with every bf16 widened to f32, which is what CPUs do.
    """
    rows, partitioned, final = tried.rows, tried.partitioned, tried.final
    for name, result in (("partitioned", partitioned), ("compiled", final)):
        if not result.program.complete:
            yield f"{name}: incomplete, {[found.message for found in result.findings]}"
    want, have = of_jaxpr(rows), of_audit(partitioned)
    if want != have:
        yield f"partitioned: asked {want}, found {have}"
    wide = [replace(row, payload_bytes=row.payload_bytes * _widening(row)) for row in rows]
    payloads, found = _payloads(of_jaxpr(wide)), _payloads(of_audit(final))
    if payloads != found:
        yield f"compiled: asked {payloads}, found {found}"


def tried_out(program: Block) -> Tried:
    """The program, compiled once."""
    function, argument = jitted(program)
    traced = function.trace(argument)
    with tempfile.TemporaryDirectory() as folder:
        compiled = traced.lower().compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_hlo_pass_re": ".*spmd-partitioning",
            }
        )
        partitioned = audit(choose(Path(folder), stage="partitioned"), mesh=MESH)
    return Tried(
        rows=asked(traced.jaxpr),
        partitioned=partitioned,
        final=audit(compiled, mesh=MESH),
        text=compiled.as_text() or "",
    )


def of_jaxpr(rows: list[Asked]) -> Sums:
    """(count, payload bytes) by kind and axes."""
    sums: Sums = collections.defaultdict(lambda: (0, 0))
    for row in rows:
        assert row.count is not None
        count, payload = sums[row.kind, row.axes]
        sums[row.kind, row.axes] = count + row.count, payload + row.count * row.payload_bytes
    return dict(sums)


def of_audit(result: Audit) -> Sums:
    """The same of a compiled program, whose counts and axes have to be known."""
    assert all(None not in (total.count, total.axes) for total in result.totals)
    return {
        (total.kind, total.axes or ()): (total.count or 0, total.payload_bytes or 0)
        for total in result.totals
    }


def _widening(row: Asked) -> int:
    return 2 if row.dtype == "bf16" else 1


def _payloads(sums: Sums) -> dict[tuple[str, tuple[str, ...]], int]:
    return {key: payload for key, (_, payload) in sums.items()}


def _run(block: Block, x: jax.Array, numbers: Iterator[int]) -> jax.Array:
    for part in block:
        if isinstance(part, Op):
            x = _step(part, x, next(numbers))
        else:
            x = _loop(part, x, numbers)
    return x


def _loop(loop: Loop, x: jax.Array, numbers: Iterator[int]) -> jax.Array:
    if loop.name == "fori":
        return lax.fori_loop(0, loop.length, lambda _, y: _run(loop.body, y, numbers), x)
    return lax.scan(lambda y, _: (_run(loop.body, y, numbers), None), x, length=loop.length)[0]


def _step(op: Op, x: jax.Array, number: int) -> jax.Array:
    x = x * jnp.float32(1 + 1 / number) + jnp.float32(number)
    y = _STEPS[op.name](x.astype(_DTYPES[op.dtype]), op.axes)
    y = jnp.tanh(y.astype(jnp.float32))
    missing = tuple(axis for axis in MESH if axis not in varying_axes(y))
    return lax.pcast(y, missing, to="varying") if missing else y


def _all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes).sum(axis=0, dtype=x.dtype)


def _psum_scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    part = lax.psum_scatter(x, axes, tiled=True)
    return jnp.tile(part, (x.shape[0] // part.shape[0], 1))


def _all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_to_all(x, axes[0], 0, 1, tiled=True).reshape(x.shape)


def _ppermute(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    size = lax.axis_size(axes[0])
    return lax.ppermute(x, axes[0], [(i, (i + 1) % size) for i in range(size)])


_STEPS: dict[str, Callable[[jax.Array, tuple[str, ...]], jax.Array]] = {
    "psum": lax.psum,
    "pmax": lax.pmax,
    "all_gather": _all_gather,
    "psum_scatter": _psum_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}
