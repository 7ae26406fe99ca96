"""What a program *asks* for: its collectives counted on the jaxpr, before any compiler sees it.

The count is exact: every collective is one equation, and a scan says its length; branches that the
device's place on the mesh and loop counters decide are counted for each device (see branches.py).
What depends on data (a `while`, other branches that ask for different things) has no count, and
says so with None.

Compilers rewrite what was asked: they widen dtypes, merge operations, move them out of loops. The
comparison of this column with the compiled one is what names those rewrites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from numpy.typing import NDArray

from jaxpar.audit.branches import Path, branch_counts
from jaxpar.audit.scope import phase_of, scope_of
from jaxpar.errors import AuditError

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}

_FREE = {"axis_index", "pvary", "pcast"}
"""Primitives that name mesh axes and move nothing."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One collective of the program; payload_bytes is per execution (see jaxpar.collectives).

    loops: lengths of the scans around it, outermost first; None when how often depends on the
        device, or on data.
    dtype: by its HLO name.
    device_counts: executions on each device of the mesh, in its order, where devices differ.
    """

    kind: str
    axes: tuple[str, ...]
    loops: tuple[int, ...] | None
    payload_bytes: int
    dtype: str
    phase: str
    scope: str
    device_counts: tuple[int, ...] | None = None

    @property
    def count(self) -> int | None:
        """Executions per step and device, None when it depends on the device, or on data."""
        return None if self.loops is None else math.prod(self.loops)


def asked(jaxpr: Any) -> list[Asked]:
    """The collectives of a traced program, in program order.

    `jaxpr` is what `jitted.trace(*args).jaxpr` or `jax.make_jaxpr(f)(*args)` give. Collectives over
    axes of one device are left out: they move nothing. Raises AuditError for a collective that is
    not known here, rather than leaving it out.
    """
    closed, jaxpr = jaxpr, getattr(jaxpr, "jaxpr", jaxpr)
    if not hasattr(jaxpr, "eqns"):
        raise AuditError(
            f"A {type(jaxpr).__name__} has no jaxpr. Give jitted.trace(*arguments).jaxpr, or "
            "jax.make_jaxpr(f)(*arguments)."
        )
    walk = _Walk(closed)
    found = list(walk.rows(jaxpr, _Times(loops=()), {}, "", ()))
    differentiated = any("transpose(" in path for _, path in found)
    return [
        replace(row, phase=phase_of(path, differentiated), scope=scope_of(path))
        for row, path in found
    ]


@dataclass(frozen=True, kw_only=True)
class _Times:
    """How often a place is reached: by loops around it, or on each device, or nobody knows."""

    loops: tuple[int, ...] | None
    on_each: NDArray[np.int64] | None = None

    def times(self, length: int) -> _Times:
        if self.on_each is not None:
            return _Times(loops=None, on_each=self.on_each * length)
        return _Times(loops=None if self.loops is None else (*self.loops, length))


_UNKNOWN = _Times(loops=None)


class _Walk:
    def __init__(self, closed: Any) -> None:
        self.closed = closed
        self._counts: dict[Path, NDArray[np.int64]] | None = None

    @property
    def counts(self) -> dict[Path, NDArray[np.int64]]:
        """Of the branches that ask for something, computed when the first one is met."""
        if self._counts is None:
            self._counts = branch_counts(self.closed, _decides)
        return self._counts

    def rows(
        self, jaxpr: Jaxpr, times: _Times, sizes: Mapping[str, int], path: str, at: Path
    ) -> Iterator[tuple[Asked, str]]:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            here, place = f"{path}/{eqn.source_info.name_stack}", (*at, id(eqn))
            if row := _collective(eqn, times, sizes):
                yield row, f"{here}/{name}"
                continue
            inner_times, inner_sizes = times, sizes
            if name == "shard_map":
                inner_sizes = dict(eqn.params["mesh"].shape)
            elif name == "scan":
                inner_times = times.times(eqn.params["length"])
            elif name == "while":
                inner_times = _UNKNOWN
            bodies = [getattr(body, "jaxpr", body) for body in jaxprs_in_params(eqn.params)]
            if name == "cond":
                yield from self.branches(bodies, times, sizes, here, place)
                continue
            for body in bodies:
                yield from self.rows(body, inner_times, inner_sizes, here, place)

    def branches(
        self, bodies: list[Jaxpr], times: _Times, sizes: Mapping[str, int], path: str, at: Path
    ) -> Iterator[tuple[Asked, str]]:
        """Once where all branches ask for the same; else as often as each device takes each."""
        asked_by = [list(self.rows(body, times, sizes, path, at)) for body in bodies]
        first, *others = [[row for row, _ in rows] for rows in asked_by]
        if all(rows == first for rows in others):
            yield from asked_by[0]
            return
        counts = self.counts.get(at)
        for branch, body in enumerate(bodies):
            here = _UNKNOWN if counts is None else _Times(loops=None, on_each=counts[branch])
            yield from self.rows(body, here, sizes, path, at)


def _decides(eqn: Any) -> bool:
    """Whether an equation chooses between branches that communicate."""
    return eqn.primitive.name == "cond" and any(map(_communicates, jaxprs_in_params(eqn.params)))


def _communicates(jaxpr: Any) -> bool:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        eqn.primitive.name in _KINDS or any(map(_communicates, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _collective(eqn: Any, times: _Times, sizes: Mapping[str, int]) -> Asked | None:
    name, params = eqn.primitive.name, eqn.params
    given = params.get("axis_name", params.get("axes", ()))
    given = (given,) if isinstance(given, str) else given
    if not isinstance(given, tuple | list) or not any(isinstance(axis, str) for axis in given):
        return None
    if name in _FREE:
        return None
    if name not in _KINDS:
        raise AuditError(
            f"The program uses {name!r} over mesh axes {tuple(given)}, which is not a collective "
            f"known here ({', '.join(sorted(_KINDS))}); its bytes cannot be counted."
        )
    if params.get("axis_index_groups") is not None:
        raise AuditError(
            f"{name} uses axis_index_groups, so it runs on part of axis {tuple(given)}. "
            f"Use a mesh with more axes, and name one of them."
        )
    axes = tuple(axis for axis in sizes if axis in given and sizes[axis] > 1)
    if not axes:
        return None
    kind = _KINDS[name]
    avals = [v.aval for v in (eqn.outvars if kind == "all-gather" else eqn.invars)]
    if kind == "ragged-all-to-all":
        avals = avals[:1]  # the others are the output buffer, offsets and sizes
    loops, device_counts = times.loops, None
    if times.on_each is not None:
        first = int(times.on_each[0])
        if (times.on_each == first).all():
            loops = (first,)
        else:
            device_counts = tuple(times.on_each.tolist())
    return Asked(
        kind=kind,
        axes=axes,
        loops=loops,
        device_counts=device_counts,
        payload_bytes=sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals),
        dtype="+".join(sorted({hlo_dtype(aval.dtype) for aval in avals})),
        phase="unknown",
        scope="",
    )


def hlo_dtype(dtype: Any) -> str:
    """The name HLO gives a dtype: float32 -> f32, bfloat16 -> bf16, bool -> pred."""
    name = np.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"),
                        ("complex", "c"), ("bool", "pred")):  # fmt: skip
        if name.startswith(long):
            return (short + name[len(long) :]).replace("_", "")
    return name
