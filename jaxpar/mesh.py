"""Meshes with named axes, read from small TOML files.

An axis name is a *role*: it says what the devices along it share (see `ROLES`). A file names only
the roles it uses, slowest links first. The `jax.sharding.Mesh` made from it always has every role,
unused ones with size 1, so that one piece of code serves every combination.

    platform = "cpu"

    [axes]
    data = 2
    tensor = 4
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from cattrs import Converter, ForbiddenExtraKeysError
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpar import processes
from jaxpar.devices import devices_of, use_cpu_devices
from jaxpar.errors import MeshError, did_you_mean, is_whole, nearest_whole, shown

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "replica": "independent copies of a model that serves: they share nothing",
        "slice": "whole replicas across the slowest links, such as between TPU slices",
        "pipe": "layers are split into stages; activations go from stage to stage",
        "data": "whole replicas; gradients are all-reduced",
        "fsdp": "the batch is split, and so are optimizer states, gradients or parameters",
        "expert": "experts are spread over it; outside MoE layers it splits the batch",
        "context": "the sequence is split, attention included",
        "ulysses": "the sequence is split, and attention by heads, inside each rank of context",
        "tensor": "every matrix is split; activations are reduced inside each layer",
    }
)
"""What the devices along each axis share; canonical order, slowest links first."""

PLATFORMS = ("cpu", "gpu", "tpu")

MAX_DEVICES = 1 << 20
"""Of one mesh: above any machine built, so that a slip of the finger is told at once."""

MAX_FILE_BYTES = 64 * 1024


class Axes(Mapping[str, int]):
    """Role → size in order. Immutable, hashable; unlike for a dict, the order counts in `==`."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, int]) -> None:
        self._items = tuple(items.items())

    def __getitem__(self, role: str) -> int:
        return dict(self._items)[role]

    def __iter__(self) -> Iterator[str]:
        return (role for role, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return self._items == tuple(other.items())
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """What a mesh file says. Building one checks all of it and raises `MeshError`.

    `axes` maps roles to sizes, slowest links first. `target` names hardware to compile for without
    having it, as chips ("v5p:4x4x4") or as hosts × devices of each ("h100:1x8").
    """

    axes: Mapping[str, int]
    name: str = ""
    platform: str = "cpu"
    target: str | None = None
    description: str = ""

    def __post_init__(self) -> None:
        for key in ("name", "description", "platform"):
            if not isinstance(value := getattr(self, key), str):
                raise MeshError(f"{key} is {shown(value)}; it has to be a string.")
        if self.platform not in PLATFORMS:
            raise MeshError(
                f"platform {shown(self.platform)} is unknown. "
                f"{did_you_mean(self.platform, PLATFORMS)}"
            )
        _check_target(self.target, self.platform)
        _check_axes(self.axes)
        object.__setattr__(self, "axes", Axes(self.axes))

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> MeshSpec:
        """Read a mesh file, given its path, the name of a shipped one, or axes as for `parse`.

        Raises `MeshError` for a file that is missing, too large, not TOML, or says what cannot be.
        """
        if not isinstance(path_or_name, str | os.PathLike):
            raise MeshError(
                f"{shown(path_or_name)} ({type(path_or_name).__name__}) is no mesh file; for axes "
                f"in Python write MeshSpec(axes={{'data': 2, 'tensor': 4}})."
            )
        given = os.fspath(path_or_name)
        try:
            path = _find(given)
            if path is None and "=" in given:
                return cls.parse(given)
            if path is None:
                raise MeshError(
                    f"There is no mesh file {shown(given)}. Give a path, axes such as "
                    f"'data=2,tensor=4', or a shipped name: {', '.join(shipped_meshes())}."
                )
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise MeshError(f"Mesh file {shown(given)} cannot be read: {error.strerror}.") from None
        try:
            return _decode(content, default_name=path.stem)
        except MeshError as error:
            raise MeshError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text: str, *, platform: str = "cpu") -> MeshSpec:
        """The mesh of "data=2,tensor=4" (or of `str(spec)`), slowest links first."""
        axes: dict[str, int] = {}
        for part in re.split("[,×]", text):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*([+-]?[0-9]{1,30})\s*", part)
            if match is None:
                raise MeshError(
                    f"{shown(part.strip())} in {shown(text)} is not an axis; "
                    f"write role=size, such as 'data=2,tensor=4'."
                )
            role, size = match.groups()
            if role in axes:
                raise MeshError(f"Axis {role!r} is given twice in {shown(text)}; once is enough.")
            axes[role] = int(size)
        return cls(axes=axes, platform=platform)

    @property
    def num_devices(self) -> int:
        """The product of all sizes."""
        return math.prod(self.axes.values())

    @property
    def named_axes(self) -> dict[str, int]:
        """Role → size of the axes that the user named, in the user's order."""
        return dict(self.axes)

    @property
    def all_axes(self) -> dict[str, int]:
        """Role → size of every axis of the built mesh, in its order: unused roles last, size 1."""
        return {**self.axes, **{role: 1 for role in ROLES if role not in self.axes}}

    def size(self, role: str) -> int:
        """How many devices share along `role`; 1 for a role this mesh does not use."""
        if role not in ROLES:
            raise _unknown_role(role)
        return self.axes.get(role, 1)

    def over(self, devices: Sequence[Any]) -> Mesh:
        """The mesh of exactly these devices, in its order; all axes are of type Auto."""
        names, sizes = zip(*self.all_axes.items(), strict=True)
        grid = np.array(devices).reshape(sizes)
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    def abstract(self) -> AbstractMesh:
        """As `build`, for devices that are only described: what can be traced and lowered on it
        starts none."""
        axes = self.all_axes
        types = (AxisType.Auto,) * len(axes)
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)

    def build(self) -> Mesh:
        """The `jax.sharding.Mesh` over the first `num_devices` devices.

        It has the axes of `all_axes`, all of type Auto. For "cpu" the devices are made if need be,
        see `use_cpu_devices`. In a run of several processes (see `jaxpar.processes`) the devices
        are those of all of them, process after process, so that outer axes cross processes and
        inner ones stay within; and it has to have every one of them.
        Raises `MeshError` if there are too few devices, ProcessesError if the processes do not fit.
        """
        processes.initialize(detect_cluster=False)
        if self.platform == "cpu" and not jax.distributed.is_initialized():
            use_cpu_devices(self.num_devices)
        devices = sorted(devices_of(self.platform), key=lambda device: device.process_index)
        processes.require_all_devices(str(self), self.num_devices, devices)
        if len(devices) < self.num_devices:
            fits = f"Make the sizes multiply to {len(devices)} or less; to" if devices else "To"
            raise MeshError(
                f"Mesh {self} needs {self.num_devices} {self.platform} devices, and JAX finds "
                f"{len(devices)} here. {fits} try it on virtual CPU devices, "
                f'write platform = "cpu" and no target.'
            )
        return self.over(devices[: self.num_devices])

    def to_toml(self) -> str:
        """A mesh file that `load` reads back as an equal spec."""
        head = {key: getattr(self, key) for key in ("name", "description", "platform", "target")}
        lines = [f"{key} = {_toml_string(value)}" for key, value in head.items() if value]
        lines += ["", "[axes]", *(f"{role} = {size}" for role, size in self.axes.items())]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return " × ".join(f"{role}={size}" for role, size in self.axes.items())


def shipped_meshes() -> tuple[str, ...]:
    """The names of the mesh files that come with jaxpar."""
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.toml")))


def _shipped_folder() -> Path:
    """Inside the package once it is installed (see pyproject.toml), beside it in a checkout."""
    installed = Path(__file__).parent / "meshes"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "meshes"


def _find(given: str) -> Path | None:
    """A path that exists wins over a shipped name; a bare word is never a path."""
    path, is_bare = Path(given), os.path.basename(given) == given
    if path.is_file() and (given.endswith(".toml") or not is_bare):
        return path
    shipped = _shipped_folder() / f"{given.removesuffix('.toml')}.toml"
    return shipped if is_bare and shipped.is_file() else None


def _decode(content: bytes, default_name: str) -> MeshSpec:
    """The spec that a file's bytes describe; `MeshError` for everything else."""
    if len(content) > MAX_FILE_BYTES:
        raise MeshError(f"more than {MAX_FILE_BYTES:,} bytes; a mesh file takes a few lines.")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MeshError(f"not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:  # ValueError: bad TOML, or digits without end
        lines = content.count(b"\n") + 1
        message = str(error).replace("end of document", f"end of document, line {lines}")
        raise MeshError(f"not TOML: {message}.") from None

    # The spec checks the values itself, whoever makes it; cattrs matches keys with its fields.
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(str, _as_it_is)
    converter.register_structure_hook_func(lambda kind: kind is not MeshSpec, _as_it_is)
    try:
        return converter.structure({"name": default_name, "axes": {}, **document}, MeshSpec)
    except ForbiddenExtraKeysError as error:
        key = min(error.extra_fields)
        keys = [field.name for field in fields(MeshSpec)]
        hint = "It is an axis: write it below [axes]." if key in ROLES else did_you_mean(key, keys)
        raise MeshError(f"unknown key {shown(key)}. {hint}") from None


def _as_it_is(value: Any, _type: Any) -> Any:
    return value


def _unknown_role(role: Any) -> MeshError:
    return MeshError(f"There is no axis role {shown(role)}. {did_you_mean(str(role), ROLES)}")


def _check_axes(axes: Any) -> None:
    """Every role known, every size whole and at least 1, the product bounded."""
    if not isinstance(axes, Mapping):
        raise MeshError(f"axes is {shown(axes)}; it has to be a table of role = size.")
    if not axes:
        raise MeshError("[axes] is missing or empty; name one, such as data = 1.")
    for role, size in axes.items():
        if role not in ROLES:
            raise _unknown_role(role)
        if not is_whole(size) or not 1 <= size <= MAX_DEVICES:
            raise MeshError(
                f"axis {role!r} has size {shown(size)} ({type(size).__name__}); a size is a whole "
                f"number from 1 to {MAX_DEVICES:,}. Nearest: {nearest_whole(size, 1, MAX_DEVICES)}."
            )
    total = math.prod(axes.values())
    if total > MAX_DEVICES:
        raise MeshError(f"the axes multiply to {total:,} devices; at most {MAX_DEVICES:,} can be.")


def _check_target(target: Any, platform: str) -> None:
    """The form only: which chips exist is for the code that compiles for them."""
    if target is None:
        return
    form = r"[a-z][a-z0-9-]*:[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,2}"
    if not isinstance(target, str) or re.fullmatch(form, target) is None:
        raise MeshError(
            f"target {shown(target)} is not chip:NxN; write something like 'v5p:4x4x4' (chips) "
            f"or 'h100:1x8' (hosts × devices of each)."
        )
    if platform == "cpu":
        raise MeshError(
            f'target {target!r} does not go with platform "cpu"; write platform = "tpu" or "gpu", '
            f"or leave target out."
        )


def _toml_string(text: str) -> str:
    """A TOML basic string: JSON's escapes, and DEL, which JSON leaves alone and TOML forbids."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
