"""Which links a collective uses, from where its devices are.

On a TPU the links of the torus run through hosts, so that hosts do not matter; on GPUs NVLink ends
at the host. `Where` holds what the topology itself says of its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.result import Collective
from jaxpar.errors import TargetError

NAMES = {
    "slice": "between slices",
    "host": "between hosts",
    "device": "NVLink",
    "core": "inside a chip",
}
_SLOWEST_FIRST = ("slice", "host", "x", "y", "z", "device", "core")


@dataclass(frozen=True, kw_only=True)
class Where:
    """Coordinates of each device in the order of the mesh, [num_devices, dims], and their names.

    rings: the dims along which links close.
    """

    dims: Mapping[str, int]
    coordinates: NDArray[np.int64]
    rings: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        dims: Mapping[str, int],
        devices: Sequence[Mapping[str, Any]],
        rings: frozenset[str] = frozenset(),
    ) -> Where:
        """From what the child says of the devices: coords, core, process and slice of each."""
        rows = [coordinates(dims, device) for device in devices]
        found = np.array(rows, np.int64).reshape(len(rows), len(dims))
        return cls(dims=dims, coordinates=found, rings=rings)

    def links(self, collective: Collective) -> str:
        """Such as "ICI x+y", "ICI z (8 of 16)", "NVLink", "between hosts + NVLink"; "" for none.

        Of a permute, what its pairs cross; how far along a dim the longest goes is added where
        that is not the neighbour.
        """
        blocks = _blocks(collective)
        if not blocks:
            return ""
        permute = collective.kind == "collective-permute"
        said = []
        for at, dim in sorted(enumerate(self.dims), key=lambda pair: _SLOWEST_FIRST.index(pair[1])):
            values = [self.coordinates[block, at] for block in blocks]
            if not any((rows != rows[:, :1]).any() for rows in values):
                continue
            if dim in NAMES:
                said.append(NAMES[dim])
            else:
                said.append(f"ICI {dim}{self._extent(dim, values, permute)}")
        return _joined(said)

    def _extent(self, dim: str, values: list[NDArray[np.int64]], permute: bool) -> str:
        whole = self.dims[dim]
        if permute:
            hops = max(int(_hops(rows, whole, dim in self.rings).max()) for rows in values)
            return "" if hops == 1 else f" ({hops} hops)"
        most = max(len(np.unique(row)) for rows in values for row in rows[:64])
        return "" if most == whole else f" ({most} of {whole})"


def coordinates(dims: Mapping[str, int], device: Mapping[str, Any]) -> tuple[int, ...]:
    """Of one device as the child describes it, along `dims`. TargetError if it has none there."""
    coords = list(device["coords"] or ())
    known: dict[str, int | None] = dict(zip("xyz", coords, strict=False))
    known |= {"slice": device["slice"], "core": device["core"], "host": device["process"]}
    known["device"] = device["local"]
    values = [known.get(dim) for dim in dims]
    if any(value is None for value in values):
        raise TargetError(
            f"The compiler's topology does not say where device {device['id']} is along "
            f"{', '.join(d for d, v in zip(dims, values, strict=True) if v is None)}. "
            f"Use a version of its plugin that belongs to this JAX."
        )
    return tuple(int(value) for value in values if value is not None)


def _blocks(collective: Collective) -> list[NDArray[np.int64]]:
    """Groups as arrays [groups, members]; of a permute, the pairs that move anything."""
    groups = collective.groups
    blocks = [groups] if isinstance(groups, np.ndarray) else [group[None] for group in groups]
    blocks = [block for block in blocks if block.size]
    if collective.kind == "collective-permute":
        blocks = [block[block[:, 0] != block[:, 1]] for block in blocks]
    return [block for block in blocks if block.size]


def _hops(rows: NDArray[np.int64], whole: int, is_ring: bool) -> NDArray[np.int64]:
    """Links between the first and the last of each row, on a ring the short way round."""
    distance = np.abs(rows[:, 0] - rows[:, -1])
    hops: NDArray[np.int64] = np.minimum(distance, whole - distance) if is_ring else distance
    return hops


def _joined(said: list[str]) -> str:
    """ "ICI x + ICI y" is said as "ICI x+y" where both are whole."""
    whole = [
        name.removeprefix("ICI ") for name in said if name.startswith("ICI ") and "(" not in name
    ]
    if len(whole) > 1:
        at = next(i for i, name in enumerate(said) if name.startswith("ICI ") and "(" not in name)
        rest = [name for name in said if not name.startswith("ICI ") or "(" in name]
        rest.insert(at, f"ICI {'+'.join(whole)}")
        said = rest
    return " + ".join(said)
