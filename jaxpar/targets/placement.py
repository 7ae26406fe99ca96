"""Where a mesh lies on hardware: each axis on whole dims of the torus where that can be.

A collective over a whole dim of a torus is a ring that uses its links in both directions and
shares them with no other axis. So axes are given whole dims first, as many as possible, inner axes
before outer ones (they communicate most); only what is left is cut. Slices and hosts go to the
outermost axes, the devices of one chip to the innermost that can be halved. Along an axis of RINGS
that spans several dims the order is boustrophedon, so that the next device is a neighbour. Others
stay in the order of the dims, as JAX itself lays a mesh on a torus of three dims.

Pure arithmetic on coordinates: no device, no JAX.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxpar.errors import TargetError, nearest_divisors

OUTER = ("slice", "host")
INNER = ("core", "device")
RINGS = ("pipe", "context")
"""Axes along which data goes from each position to the next."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What an axis takes of a dim: `size` of its `whole` positions, `stride` apart."""

    dim: str
    size: int
    whole: int
    stride: int

    def __str__(self) -> str:
        return self.dim if self.size == self.whole else f"{self.size} of {self.dim} ({self.whole})"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """dims: name → size. parts: per axis larger than 1, what it lies on, outermost first.

    coordinates: [num_devices, dims] in the order of the mesh, row-major over its axes.
    """

    dims: Mapping[str, int]
    parts: Mapping[str, tuple[Part, ...]]
    coordinates: NDArray[np.int64]

    def told(self, axis: str) -> str:
        """Such as "x·y", "2 of z (16)"; "" for an axis of one device."""
        return "·".join(map(str, self.parts.get(axis, ())))


def place(axes: Mapping[str, int], dims: Mapping[str, int], target: str) -> Placement:
    """Lay axes (name → size, slowest links first) on dims. TargetError where they do not fit."""
    num_devices = math.prod(dims.values())
    _check_size(axes, num_devices, target)
    left = {axis: size for axis, size in axes.items() if size > 1}
    taken: dict[str, list[tuple[str, int]]] = {axis: [] for axis in left}
    for dim in OUTER:
        if dims.get(dim, 1) > 1:
            _take_outermost(dim, dims[dim], left, taken, target)
    ends = {dim: dims[dim] for dim in INNER if dims.get(dim, 1) > 1}
    inner: dict[str, list[tuple[str, int]]] = {axis: [] for axis in left}
    for dim, size in ends.items():
        _take_innermost(dim, size, left, inner)
    torus = {d: n for d, n in dims.items() if d not in (*OUTER, *INNER) and n > 1}
    for axis, parts in _on_torus(left, torus).items():
        taken[axis] += parts
    for axis, parts in inner.items():
        taken[axis] += parts
    return _placement(axes, dims, taken)


def _check_size(axes: Mapping[str, int], num_devices: int, target: str) -> None:
    total = math.prod(axes.values())
    if total == num_devices:
        return
    told = " × ".join(f"{axis}={size}" for axis, size in axes.items())
    fits = []
    for axis, size in axes.items():
        rest = total // size
        if num_devices % rest == 0:
            fits.append(f"{axis}={num_devices // rest}")
    advice = f"Make it {' or '.join(fits)}" if fits else _nearest(axes, num_devices)
    raise TargetError(
        f"Mesh {told} has {total:,} devices, and target {target} has {num_devices:,}: every device "
        f"of a target takes part. {advice}, or take a target of {total:,} devices."
    )


def _nearest(axes: Mapping[str, int], num_devices: int) -> str:
    axis, size = next(iter(axes.items()))
    return f"{axis}={size} could be {nearest_divisors(num_devices, size)}, the others what is left"


def _take_outermost(
    dim: str,
    size: int,
    left: dict[str, int],
    taken: dict[str, list[tuple[str, int]]],
    target: str,
) -> None:
    """Give a dim to the outermost axes, which it has to be a product of, with a rest at most."""
    rest = size
    for axis in left:
        share = math.gcd(left[axis], rest)
        if share > 1:
            taken[axis].append((dim, share))
            left[axis] //= share
            rest //= share
        if rest == 1 or left[axis] > 1:
            break
    if rest > 1:
        first = next(iter(left))
        whole = math.prod(n for d, n in taken[first]) * left[first]
        raise TargetError(
            f"Target {target} has {size} {dim}s, and they go to the outermost axis, {first}="
            f"{whole}, which is not a multiple of {size} (nor do the next axes make it one). "
            f"Put an axis of {size} first, such as slice={size} or data={size}."
        )


def _take_innermost(
    dim: str, size: int, left: dict[str, int], taken: dict[str, list[tuple[str, int]]]
) -> None:
    """Give a dim to the innermost axes, as much of it as each can have."""
    rest = size
    for axis in reversed(left):
        share = math.gcd(left[axis], rest)
        if share > 1:
            taken[axis].insert(0, (dim, share))
            left[axis] //= share
            rest //= share
    assert rest == 1  # the product of the axes is a multiple


def _on_torus(
    left: Mapping[str, int], torus: Mapping[str, int]
) -> dict[str, list[tuple[str, int]]]:
    """The best way to give dims to axes: most axes on whole dims, inner ones first."""
    axes = [axis for axis, size in left.items() if size > 1]
    best: tuple[tuple[int, ...], dict[str, tuple[str, ...]]] | None = None
    for choice in _whole(axes, left, torus):
        placed = [axis in choice for axis in axes]
        score = (sum(placed), *placed[::-1])
        if best is None or score > best[0]:
            best = score, choice
    assert best is not None  # nothing whole is a choice, too
    answer = {axis: [(dim, torus[dim]) for dim in dims] for axis, dims in best[1].items()}
    used = {dim for dims in best[1].values() for dim in dims}
    rest = {dim: size for dim, size in torus.items() if dim not in used}
    for axis in axes:
        if axis not in answer:
            answer[axis] = _cut(left[axis], rest)
    return answer


def _whole(
    axes: list[str], sizes: Mapping[str, int], torus: Mapping[str, int]
) -> Iterator[dict[str, tuple[str, ...]]]:
    """All ways to give some of the axes whole dims."""
    if not axes:
        yield {}
        return
    first, rest = axes[0], axes[1:]
    yield from _whole(rest, sizes, torus)
    for num in range(1, len(torus) + 1):
        for dims in itertools.combinations(torus, num):
            if math.prod(torus[dim] for dim in dims) == sizes[first]:
                others = {dim: size for dim, size in torus.items() if dim not in dims}
                for choice in _whole(rest, sizes, others):
                    yield {first: dims, **choice}


def _cut(size: int, rest: dict[str, int]) -> list[tuple[str, int]]:
    """Take `size` out of what is left of the dims, from as few as will do; changes `rest`."""
    parts = []
    while size > 1:
        dim = max(
            rest, key=lambda d: (rest[d] > 1 and size % rest[d] == 0, math.gcd(rest[d], size))
        )
        share = math.gcd(rest[dim], size)
        assert share > 1  # sizes of both sides multiply to the same number
        parts.append((dim, share))
        rest[dim] //= share
        size //= share
    return parts


def _placement(
    axes: Mapping[str, int],
    dims: Mapping[str, int],
    taken: Mapping[str, list[tuple[str, int]]],
) -> Placement:
    """Coordinates, from what each axis takes: outer axes take the outer, strided part of a dim."""
    stride = dict.fromkeys(dims, 1)
    cuts: list[tuple[str, Part]] = []
    for axis in reversed(list(taken)):
        for dim, size in reversed(taken[axis]):
            cuts.append((axis, Part(dim=dim, size=size, whole=dims[dim], stride=stride[dim])))
            stride[dim] *= size
    cuts.reverse()
    shape = [part.size for _, part in cuts]
    index = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), np.int64)
    names = list(dims)
    coordinates = np.zeros((index.shape[1], len(names)), np.int64)
    before: dict[str, NDArray[np.int64]] = {}  # of the same axis: how many turns were made
    for (axis, part), position in zip(cuts, index, strict=True):
        if axis in RINGS and part.dim not in (*OUTER, *INNER):
            turns = before.get(axis, np.zeros_like(position))
            before[axis] = turns * part.size + position
            position = np.where(turns % 2, part.size - 1 - position, position)
        coordinates[:, names.index(part.dim)] += position * part.stride
    parts = {axis: tuple(part for owner, part in cuts if owner == axis) for axis in taken}
    return Placement(dims=dict(dims), parts=parts, coordinates=coordinates)
