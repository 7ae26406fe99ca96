"""What a program *asks* for: its collectives counted on the jaxpr, before any compiler sees it.

The count is exact: every collective is one equation, and a scan says its length. What depends on
data (a `while`, branches that ask for different things) has no count, and says so with None.

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

    loops: lengths of the scans around it, outermost first; None when how often depends on data.
    dtype: by its HLO name.
    """

    kind: str
    axes: tuple[str, ...]
    loops: tuple[int, ...] | None
    payload_bytes: int
    dtype: str
    phase: str
    scope: str

    @property
    def count(self) -> int | None:
        """Executions per step and device, None when it depends on data."""
        return None if self.loops is None else math.prod(self.loops)


def asked(jaxpr: Any) -> list[Asked]:
    """The collectives of a traced program, in program order.

    `jaxpr` is what `jitted.trace(*args).jaxpr` or `jax.make_jaxpr(f)(*args)` give. Collectives over
    axes of one device are left out: they move nothing. Raises AuditError for a collective that is
    not known here, rather than leaving it out.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if not hasattr(jaxpr, "eqns"):
        raise AuditError(
            f"A {type(jaxpr).__name__} has no jaxpr. Give jitted.trace(*arguments).jaxpr, or "
            "jax.make_jaxpr(f)(*arguments)."
        )
    found = list(_walk(jaxpr, (), {}, ""))
    differentiated = any("transpose(" in path for _, path in found)
    return [
        replace(row, phase=phase_of(path, differentiated), scope=scope_of(path))
        for row, path in found
    ]


def _walk(
    jaxpr: Jaxpr, loops: tuple[int, ...] | None, sizes: Mapping[str, int], path: str
) -> Iterator[tuple[Asked, str]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        here = f"{path}/{eqn.source_info.name_stack}"
        if row := _collective(eqn, loops, sizes):
            yield row, f"{here}/{name}"
            continue
        inner_loops, inner_sizes = loops, sizes
        if name == "shard_map":
            inner_sizes = dict(eqn.params["mesh"].shape)
        elif name == "scan" and loops is not None:
            inner_loops = (*loops, eqn.params["length"])
        elif name == "while":
            inner_loops = None
        bodies = [
            list(_walk(getattr(body, "jaxpr", body), inner_loops, inner_sizes, here))
            for body in jaxprs_in_params(eqn.params)
        ]
        if name == "cond":
            yield from _branches(bodies)
        else:
            for body in bodies:
                yield from body


def _branches(bodies: list[list[tuple[Asked, str]]]) -> Iterator[tuple[Asked, str]]:
    """Exact when every branch asks for the same; otherwise nothing is known of how often."""
    rows = [[row for row, _ in body] for body in bodies]
    if all(row == rows[0] for row in rows):
        yield from bodies[0]
        return
    for body in bodies:
        for row, path in body:
            yield replace(row, loops=None), path


def _collective(eqn: Any, loops: tuple[int, ...] | None, sizes: Mapping[str, int]) -> Asked | None:
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
    return Asked(
        kind=kind,
        axes=axes,
        loops=loops,
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
