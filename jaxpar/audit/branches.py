"""Which branches a traced program takes on which device, and how often.

A pipeline asks its position on the mesh and its loop counter what to do next. Both are known before
anything runs, so the part of a jaxpr that decides can be: small integers, for all devices at once,
in NumPy. What depends on data stays unknown, and so does every branch that it decides.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from numpy.typing import NDArray

from jaxpar.compat import scan_inputs

Path = tuple[int, ...]
"""Identities of the equations around a place, outermost first, and of the one that is there."""

Values = Sequence[NDArray[Any] | None]
"""One per variable, [devices, *its shape]; None where the value is not known."""

MAX_ELEMENTS = 1 << 14
"""Larger arrays are data, not decisions."""

MAX_EQUATIONS = 1 << 20
"""Equations looked at, over all iterations of all loops, before giving up."""


def branch_counts(jaxpr: Any, decides: Callable[[Any], bool]) -> dict[Path, NDArray[np.int64]]:
    """How often each branch of a `cond` runs on each device: [branches, devices] by path.

    Looked at are the equations for which `decides` is true, found anywhere in the (closed) jaxpr.
    Those whose choice depends on data, or stands in a loop of unknown length, are left out.
    """
    run = _Run(decides)
    run.body(*_opened(jaxpr), [None] * len(_opened(jaxpr)[0].invars), np.ones(1, np.int64), ())
    return {path: counts for path, counts in run.counts.items() if path not in run.unknown}


class _Run:
    def __init__(self, decides: Callable[[Any], bool]) -> None:
        self.decides = decides
        self.counts: dict[Path, NDArray[np.int64]] = {}
        self.unknown: set[Path] = set()
        self.coordinates: dict[str, NDArray[np.int32]] = {}
        self.num_left = MAX_EQUATIONS
        self._holds: dict[int, bool] = {}

    def holds(self, jaxpr: Any) -> bool:
        """Whether a deciding equation stands anywhere in `jaxpr`."""
        if id(jaxpr) not in self._holds:
            self._holds[id(jaxpr)] = any(
                self.decides(eqn) or any(map(self.holds, jaxprs_in_params(eqn.params)))
                for eqn in jaxpr.eqns
            )
        return self._holds[id(jaxpr)]

    def body(
        self, jaxpr: Any, consts: Sequence[Any], given: Values, active: NDArray[np.int64], at: Path
    ) -> list[NDArray[Any] | None]:
        """Run a jaxpr on the devices that `active` counts; what is known of its outputs."""
        num_devices = len(active)
        known: dict[Any, NDArray[Any] | None] = {}

        def value(atom: Any) -> NDArray[Any] | None:
            if isinstance(atom, Literal):
                return _on_all(atom.val, num_devices)
            return known.get(atom)

        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = _on_all(const, num_devices)
        known |= zip(jaxpr.invars, given, strict=True)
        for eqn in jaxpr.eqns:
            self.num_left -= 1
            if self.num_left < 0:
                self.unknown |= self.counts.keys()
                break
            outputs = self.equation(eqn, [value(atom) for atom in eqn.invars], active, at)
            known |= zip(eqn.outvars, outputs, strict=True)
        return [value(atom) for atom in jaxpr.outvars]

    def equation(
        self, eqn: Any, inputs: Values, active: NDArray[np.int64], at: Path
    ) -> list[NDArray[Any] | None]:
        nothing: list[NDArray[Any] | None] = [None] * len(eqn.outvars)
        here, name = (*at, id(eqn)), eqn.primitive.name
        bodies = list(jaxprs_in_params(eqn.params))
        inside = any(map(self.holds, bodies))
        if self.num_left < 0:
            return nothing
        if name == "cond" and (inside or self.decides(eqn)):
            return self.cond(eqn, inputs, active, here)
        if name == "scan" and inside:
            return self.scan(eqn, inputs, active, here)
        if name == "shard_map" and inside:
            return self.shard_map(eqn, inputs, active, here)
        if name in ("cond", "scan", "while", "shard_map"):
            return nothing
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            return [self.coordinates.get(axis) if isinstance(axis, str) else None]
        closed = _closed(eqn)
        if closed is not None and len(closed[0].invars) == len(inputs):
            return self.body(*closed, inputs, active, here)
        if bodies or any(x is None for x in inputs) or not all(map(_is_small, eqn.outvars)):
            return nothing
        if not inputs:  # such as iota
            return [_on_all(eqn.primitive.bind(**eqn.params), len(active))]
        return _evaluate(eqn, inputs) or nothing

    def cond(
        self, eqn: Any, inputs: Values, active: NDArray[np.int64], here: Path
    ) -> list[NDArray[Any] | None]:
        branches, index = eqn.params["branches"], inputs[0]
        if index is None:
            self.unknown.add(here)
            return [None] * len(eqn.outvars)
        taken = np.clip(index.astype(np.int64), 0, len(branches) - 1)
        chosen = np.stack([(taken == k) * active for k in range(len(branches))])
        self.counts[here] = self.counts.get(here, 0) + chosen
        outputs = [
            self.body(*_opened(branch), inputs[1:], chosen[k], here)
            for k, branch in enumerate(branches)
        ]
        return [_choose(taken, values) for values in zip(*outputs, strict=True)]

    def scan(
        self, eqn: Any, inputs: Values, active: NDArray[np.int64], here: Path
    ) -> list[NDArray[Any] | None]:
        num_fixed, num_carry = scan_inputs(eqn.params)
        num_kept = num_fixed + num_carry
        fixed, carry, xs = inputs[:num_fixed], inputs[num_fixed:num_kept], inputs[num_kept:]
        steps = range(eqn.params["length"])
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            rows = [None if x is None else x[:, step] for x in xs]
            given = [*fixed, *carry, *rows]
            carry = self.body(*_opened(eqn.params["jaxpr"]), given, active, here)[:num_carry]
        return [*carry, *[None] * (len(eqn.outvars) - len(carry))]

    def shard_map(
        self, eqn: Any, inputs: Values, active: NDArray[np.int64], here: Path
    ) -> list[NDArray[Any] | None]:
        sizes = dict(eqn.params["mesh"].shape)
        num_devices = math.prod(sizes.values())
        places = np.indices(tuple(sizes.values()), np.int32).reshape(len(sizes), -1)
        self.coordinates = dict(zip(sizes, places, strict=True))
        body, consts = _opened(eqn.params["jaxpr"])
        whole = [
            None if x is None or x.shape[1:] != v.aval.shape else np.repeat(x, num_devices, 0)
            for x, v in zip(inputs, body.invars, strict=True)
        ]
        self.body(body, consts, whole, np.full(num_devices, active[0]), here)
        self.coordinates = {}
        return [None] * len(eqn.outvars)


def _closed(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The one jaxpr that an equation calls with its own inputs, and its constants."""
    bodies = [v for v in eqn.params.values() if hasattr(v, "eqns") or hasattr(v, "consts")]
    if len(bodies) != 1:
        return None
    return _opened(bodies[0])


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _is_small(variable: Any) -> bool:
    aval = variable.aval
    dtype = getattr(aval, "dtype", None)
    return (
        dtype is not None
        and (dtype == np.bool_ or np.issubdtype(dtype, np.integer))
        and math.prod(aval.shape) <= MAX_ELEMENTS
    )


def _on_all(value: Any, num_devices: int) -> NDArray[Any] | None:
    dtype, size = getattr(value, "dtype", None), np.size(value)
    is_whole = dtype is None or dtype == np.bool_ or np.issubdtype(dtype, np.integer)
    if not is_whole or size > MAX_ELEMENTS:
        return None
    array = np.asarray(value)
    return np.broadcast_to(array, (num_devices, *array.shape))


def _choose(index: NDArray[np.int64], values: Values) -> NDArray[Any] | None:
    """On each device the value of the branch it took, where the branches that any took are known.

    A branch whose value is the same as another's need not be told apart from it.
    """
    taken = [value for k, value in enumerate(values) if (index == k).any()]
    if not taken or any(value is None for value in taken):
        return None
    result = np.array(taken[0])
    for k, value in enumerate(values):
        if value is not None:
            result[index == k] = value[index == k]
    return result


# --- primitives -------------------------------------------------------------------------------


def _same(*inputs: NDArray[Any]) -> NDArray[Any]:
    return inputs[0]


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "sign": np.sign, "abs": np.abs, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "rem": np.fmod, "clamp": lambda low, x, high: np.clip(x, low, high),
    "stop_gradient": _same, "copy": _same, "pvary": _same, "pcast": _same,
}  # fmt: skip


def _evaluate(eqn: Any, inputs: Values) -> list[NDArray[Any] | None] | None:
    """One equation on known whole numbers; None for what is not done here."""
    name, params = eqn.primitive.name, eqn.params
    x: Any = inputs[0] if inputs else None
    if name == "optimization_barrier":
        return list(inputs)
    aval = eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        if name in _ELEMENTWISE:
            result = _ELEMENTWISE[name](*_aligned(inputs))
        elif name == "convert_element_type":
            result = x
        elif name == "select_n":
            which, *cases = _aligned(inputs)
            result = np.choose(which.astype(np.int64), cases)
        elif name in ("reshape", "squeeze", "expand_dims"):
            result = x.reshape(len(x), *aval.shape)
        elif name == "broadcast_in_dim":
            shape = [1] * len(aval.shape)
            for dim, size in zip(params["broadcast_dimensions"], x.shape[1:], strict=True):
                shape[dim] = size
            result = np.broadcast_to(x.reshape(len(x), *shape), (len(x), *aval.shape))
        elif name == "slice":
            steps = params["strides"] or [1] * len(params["start_indices"])
            bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            result = x[(slice(None), *(slice(*bound) for bound in bounds))]
        elif name == "dynamic_slice":
            result = _dynamic_slice(x, inputs[1:], params["slice_sizes"])
        else:
            return _by_jax(eqn, inputs)
    return [np.asarray(result).astype(aval.dtype)]


def _aligned(inputs: Values) -> list[NDArray[Any]]:
    """Scalars beside arrays, [devices] and [devices, ..], made to broadcast."""
    rank = max(x.ndim for x in inputs if x is not None)
    return [x.reshape(x.shape + (1,) * (rank - x.ndim)) for x in inputs if x is not None]


def _dynamic_slice(x: NDArray[Any], starts: Values, sizes: Sequence[int]) -> NDArray[Any]:
    rows = []
    for device, row in enumerate(x):
        begins = [
            min(max(int(start[device]), 0), extent - size)
            for start, extent, size in zip(starts, row.shape, sizes, strict=True)
            if start is not None
        ]
        rows.append(row[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))])
    return np.stack(rows)


def _by_jax(eqn: Any, inputs: Values) -> list[NDArray[Any] | None] | None:
    """JAX's own answer to a rarer primitive (gathers, reductions, division)."""
    import jax

    def once(*arguments: Any) -> Any:
        return eqn.primitive.bind(*arguments, **eqn.params)

    try:
        outputs = jax.vmap(once)(*inputs)
    except (TypeError, ValueError, NotImplementedError):
        return None  # such as a collective, which has no meaning here
    return [np.asarray(y) for y in (outputs if eqn.primitive.multiple_results else [outputs])]
