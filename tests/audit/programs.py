"""Small programs as people write them, each with the communication that was derived by hand.

A program is a function, its inputs on a mesh of 8 devices, what XLA moves for it (`moves`,
`sends`), what any program with this result and these shardings has to send (`needs`), and the
program to write instead where that is less.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.audit import Audit, audit


@dataclass(frozen=True, kw_only=True)
class Input:
    """An array of random numbers; integers are below `below`, `name` is what its type prints."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    at: P
    below: int = 1

    def value(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if np.issubdtype(self.dtype, np.integer):
            return rng.integers(self.below, size=self.shape).astype(self.dtype)
        return rng.standard_normal(self.shape).astype(self.dtype)

    def __str__(self) -> str:
        axes = ", ".join(repr(axis) for axis in self.at)
        return f"{self.name}[{','.join(map(str, self.shape))}] P({axes})"


@dataclass(frozen=True, kw_only=True, order=True)
class Move:
    """One collective: executions, bytes of the logical buffer; `axes` None for part of an axis."""

    kind: str
    payload_bytes: int
    count: int | None = 1
    axes: tuple[str, ...] | None = ("x",)
    group_size: int = 8


Outcome = tuple[Sequence[Move], int | None]


@dataclass(frozen=True, kw_only=True)
class Program:
    """`either` maps a pattern to the moves and bytes sent of a program whose HLO matches it.

    That is one empty pattern where XLA's versions agree. Bytes sent, and `needs`, are those of one
    device in a step, None where a count is not known. `one_device` computes the same on no mesh.
    """

    function: Callable[..., Any]
    mesh: str
    inputs: Sequence[Input]
    out: Any
    either: Mapping[str, Outcome]
    needs: int
    instead: str
    one_device: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def why(self) -> str:
        return " ".join((self.function.__doc__ or "").split())

    @property
    def code(self) -> str:
        """What the function does, as it is written, on one line."""
        source = textwrap.dedent(inspect.getsource(self.function))
        lines = source.split('"""', 2)[2].strip().splitlines()
        return "; ".join(line.strip().removeprefix("return ") for line in lines)

    def given(self) -> str:
        """Inputs by name, type and sharding."""
        names = inspect.signature(self.function).parameters
        return ", ".join(f"{name}: {it}" for name, it in zip(names, self.inputs, strict=True))

    def outcome(self, text: str) -> Outcome:
        """Moves and bytes sent that belong to the HLO in `text`."""
        (found,) = (it for pattern, it in self.either.items() if re.search(pattern, text))
        return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """A program once compiled, audited and run on 8 devices; `reference` is from one device."""

    audit: Audit
    text: str
    result: list[np.ndarray]
    reference: list[np.ndarray]

    def moves(self) -> list[Move]:
        return sorted(
            (
                Move(
                    kind=found.kind,
                    payload_bytes=found.payload_bytes,
                    count=found.count,
                    axes=found.axes,
                    group_size=found.group_size,
                )
                for found in self.audit.collectives
            ),
            key=_order,
        )

    def sends(self) -> int | None:
        """Bytes each device sends in a step; None where a count is not known."""
        totals = [total.wire_bytes for total in self.audit.totals]
        return None if None in totals else sum(total or 0 for total in totals)


def _order(move: Move) -> tuple[str, int, int]:
    return move.kind, move.payload_bytes, move.count or 0


PROGRAMS: dict[str, Program] = {}


def program(
    *inputs: Input,
    out: Any = None,
    moves: Sequence[Move] = (),
    sends: int | None = 0,
    either: Mapping[str, Outcome] | None = None,
    needs: int = 0,
    instead: str = "",
    mesh: str = "x=8",
    one_device: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function below. `out`: specs of the results, None for what XLA chooses."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Program(
            function=function,
            mesh=mesh,
            inputs=inputs,
            out=out,
            either=either or {"": (sorted(moves, key=_order), sends)},
            needs=needs,
            instead=instead,
            one_device=one_device or function,
        )
        return function

    return register


@functools.cache
def mesh_of(text: str = "x=8") -> jax.sharding.Mesh:
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def at(x: jax.Array, *spec: Any, mesh: str = "x=8") -> jax.Array:
    """`x`, constrained to be sharded so."""
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh_of(mesh), P(*spec)))


def per_device(
    function: Callable[..., Any], into: Any, out: Any, *, mesh: str = "x=8", **kwargs: Any
) -> Any:
    """`function` of the shards."""
    return jax.shard_map(function, mesh=mesh_of(mesh), in_specs=into, out_specs=out, **kwargs)


@functools.cache
def run(name: str) -> Run:
    """Compiles once, audits, and runs on 8 devices and on one."""
    one = PROGRAMS[name]
    mesh = mesh_of(one.mesh)
    values = [it.value(seed) for seed, it in enumerate(one.inputs)]
    places = [jax.NamedSharding(mesh, it.at) for it in one.inputs]
    arrays = [jax.device_put(*pair) for pair in zip(values, places, strict=True)]
    options = {}
    if one.out is not None:
        options["out_shardings"] = jax.tree.map(
            lambda spec: jax.NamedSharding(mesh, spec), one.out, is_leaf=lambda it: type(it) is P
        )
    compiled = jax.jit(one.function, **options).lower(*arrays).compile()
    return Run(
        audit=audit(compiled),
        text=compiled.as_text() or "",
        result=_numbers(compiled(*arrays)),
        reference=_numbers(jax.jit(one.one_device)(*map(jnp.asarray, values))),
    )


def check(name: str) -> None:
    """The audit is what was derived by hand, and 8 devices compute what one does."""
    one, done = PROGRAMS[name], run(name)
    moves, sends = one.outcome(done.text)
    assert done.audit.program.complete
    assert done.moves() == list(moves), f"{done.moves()} is not {moves}"
    assert done.sends() == sends, f"sends {done.sends()}, not {sends}"
    assert sends is None or sends >= one.needs, f"{sends} B are less than {one.needs} B"
    _assert_close(done.result, done.reference)


def check_instead(name: str) -> None:
    """The better program takes and gives the same, and sends less; no less than anybody must."""
    one = PROGRAMS[name]
    better, done = PROGRAMS[one.instead], run(name)
    assert (better.inputs, better.out) == (one.inputs, one.out)
    _assert_close(run(better.name).result, done.result)
    improved, sends = run(better.name).sends(), one.outcome(done.text)[1]
    assert improved is not None and sends is not None
    assert improved >= one.needs
    assert improved < sends or sends == one.needs, f"{improved} B are not less than {sends} B"


def _assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def registered() -> Mapping[str, Program]:
    """All programs in `public/`, by name."""
    for path in sorted((Path(__file__).parent / "public").glob("*.py")):
        importlib.import_module(f"tests.audit.public.{path.stem}")
    return PROGRAMS


def _numbers(tree: Any) -> list[np.ndarray]:
    wide = {"bfloat16": np.float32}
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.astype(wide.get(leaf.dtype.name, leaf.dtype)) for leaf in leaves]


def _input(name: str, dtype: Any) -> Callable[..., Input]:
    def make(*shape: int, at: P | None = None, below: int = 1) -> Input:
        spec = P("x") if at is None else at
        return Input(name=name, dtype=dtype, shape=shape, at=spec, below=below)

    return make


f32 = _input("f32", np.float32)
c64 = _input("c64", np.complex64)
i32 = _input("s32", np.int32)


def _move(kind: str) -> Callable[..., Move]:
    def make(payload_bytes: int, **kwargs: Any) -> Move:
        return Move(kind=kind, payload_bytes=payload_bytes, **kwargs)

    return make


all_gather = _move("all-gather")
all_reduce = _move("all-reduce")
all_to_all = _move("all-to-all")
permute = _move("collective-permute")
reduce_scatter = _move("reduce-scatter")
