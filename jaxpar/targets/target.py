"""Names of hardware: `v5p:4x4x4` (chips of a torus), `h100:2x8` (hosts × devices of each)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpar.errors import MAX_SIZE, TargetError, did_you_mean, is_whole, nearest_multiples, shown
from jaxpar.hardware import Chip, chips
from jaxpar.mesh import MeshSpec

MAX_SLICES = 64

_TORUS_DIMS = {"v4": 3, "v5p": 3, "tpu7x": 3, "v5e": 2, "v6e": 2}
_DEVICES_PER_CHIP = {"v4": 2, "tpu7x": 2}
"""As topologies show them: a v4 chip, too, is two devices there."""

_FORM = re.compile(r"([a-z0-9-]+):([1-9][0-9]{0,5}(?:x[1-9][0-9]{0,5}){0,3})")
_EXAMPLES = "'v5p:4x4x4' (chips of a torus) or 'h100:1x8' (hosts × devices of each)"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware to compile for. Raises TargetError for what cannot be built.

    chip: a name of jaxpar/hardware.toml. shape: chips along each dim of a slice's torus (TPU), or
    hosts and devices of each (GPU). num_slices: such slices, joined by a slower network (TPU).
    """

    chip: str
    shape: tuple[int, ...]
    num_slices: int = 1

    def __post_init__(self) -> None:
        known = chips()
        if self.chip not in known:
            raise TargetError(
                f"target {self.told}: there is no chip {shown(self.chip)}. "
                f"{did_you_mean(self.chip, known)}"
            )
        if not is_whole(self.num_slices) or not 1 <= self.num_slices <= MAX_SLICES:
            raise TargetError(
                f"num_slices={shown(self.num_slices)} must be a whole number from 1 to "
                f"{MAX_SLICES}."
            )
        if self.platform == "tpu":
            self._check_torus()
        else:
            self._check_hosts()

    def _check_torus(self) -> None:
        dims, num_chips = _TORUS_DIMS[self.chip], math.prod(self.shape)
        if len(self.shape) != dims:
            example = "x".join(["4"] * dims)
            raise TargetError(
                f"target {self.told} has {len(self.shape)} dims, and the torus of {self.chip} has "
                f"{dims}. Write something like '{self.chip}:{example}'."
            )
        odd = [size for size in self.shape[:2] if size % 2]
        if odd and num_chips > 1:
            raise TargetError(
                f"target {self.told}: hosts of {self.chip} have 2 × 2 chips, so the first two "
                f"dims have to be even, and {odd[0]} is not. Nearest: "
                f"{nearest_multiples(odd[0], 2)}."
            )
        most = self.hardware.domain_size
        if num_chips > most:
            raise TargetError(
                f"target {self.told} has {num_chips:,} chips, and the largest pod of {self.chip} "
                f"has {most:,}. Take fewer, or several slices (num_slices)."
            )

    def _check_hosts(self) -> None:
        if len(self.shape) != 2:
            raise TargetError(
                f"target {self.told} has {len(self.shape)} numbers; write hosts × devices of each, "
                f"such as '{self.chip}:1x8'."
            )
        if self.num_slices != 1:
            raise TargetError(
                f"num_slices={self.num_slices} goes with TPUs; for GPUs say more hosts, such as "
                f"'{self.chip}:{self.num_slices * self.shape[0]}x{self.shape[1]}'."
            )
        most = self.hardware.domain_size
        if self.shape[1] > most:
            raise TargetError(
                f"target {self.told}: NVLink joins {most} {self.chip} in a host, and "
                f"{self.shape[1]} are given. Say more hosts: hosts × devices of each."
            )

    @classmethod
    def parse(cls, text: str, *, num_slices: int = 1) -> Target:
        """The target of "v5p:4x4x4" or "h100:1x8"."""
        found = _FORM.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if found is None:
            raise TargetError(
                f"target {shown(text)} is not chip:NxN; write something like {_EXAMPLES}."
            )
        shape = tuple(int(size) for size in found[2].split("x"))
        if math.prod(shape) > MAX_SIZE:
            raise TargetError(f"target {shown(text)} is larger than anything that was built.")
        return cls(chip=found[1], shape=shape, num_slices=num_slices)

    @classmethod
    def of_mesh(cls, mesh: MeshSpec, *, num_slices: int = 1) -> Target:
        """The target that a mesh file names."""
        if mesh.target is None:
            raise TargetError(
                f"Mesh {mesh.name or mesh} names no target. Give one, such as {_EXAMPLES}, or "
                f'write target = "v5e:2x4" in its file.'
            )
        return cls.parse(mesh.target, num_slices=num_slices)

    @cached_property
    def hardware(self) -> Chip:
        """Its chip, as many devices of it as the topology shows."""
        found = chips()[self.chip]
        return replace(found, devices_per_chip=self.devices_per_chip)

    @property
    def platform(self) -> str:
        """tpu or gpu, as in mesh files."""
        return "tpu" if self.chip in _TORUS_DIMS else "gpu"

    @property
    def devices_per_chip(self) -> int:
        return _DEVICES_PER_CHIP.get(self.chip, 1)

    @property
    def dims(self) -> dict[str, int]:
        """Name → size of the dims along which devices have coordinates, slowest links first.

        TPU: slice, the dims x, y, z of the torus, core (devices of one chip); GPU: host, device.
        Slices and cores are left out where there is one.
        """
        if self.platform == "gpu":
            return dict(zip(("host", "device"), self.shape, strict=True))
        torus = dict(zip("xyz", self.shape, strict=False))
        slices = {"slice": self.num_slices} if self.num_slices > 1 else {}
        cores = {"core": self.devices_per_chip} if self.devices_per_chip > 1 else {}
        return {**slices, **torus, **cores}

    def is_ring(self, dim: str) -> bool:
        """Whether links close along this dim of the torus."""
        wrap, size = self.hardware.wrap_size, self.dims.get(dim, 1)
        return dim in ("x", "y", "z") and wrap is not None and size % wrap == 0

    @property
    def rings(self) -> frozenset[str]:
        """The dims of the torus along which links close."""
        return frozenset(filter(self.is_ring, self.dims))

    @property
    def num_devices(self) -> int:
        return math.prod(self.dims.values())

    @property
    def extra(self) -> str:
        """What to install to compile for it."""
        return "jaxpar[tpu]" if self.platform == "tpu" else "jaxpar[cuda13]"

    @property
    def told(self) -> str:
        return f"'{self.chip}:{'x'.join(map(str, self.shape))}'"

    def __str__(self) -> str:
        slices = f" × {self.num_slices} slices" if self.num_slices > 1 else ""
        return self.told.strip("'") + slices
