"""Which devices talk to each other, and along which mesh axes.

HLO prints device groups in four ways and permutes as pairs. All become sets of device ids, where
an id is a row-major position in the mesh. Axes are then inferred from the sets alone: names that
XLA prints may be inventions of the compiler, or half of an axis, and only end up in notes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.shape import integer
from jaxpar.errors import AuditError

MAX_DEVICES = 1 << 17
"""Most devices, or members of the groups of one operation, that are expanded: 131,072."""

PARTITION_KINDS = frozenset(
    {"all-to-all", "collective-permute", "collective-broadcast", "ragged-all-to-all"}
)
"""Kinds whose ids are partitions when they have a channel and nothing else is said."""

Ids = NDArray[np.int64]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_INNER = re.compile(r"\{([\d,\s]*)\}")
_AXIS = re.compile(
    r"(?:'((?:[^'\\]++|\\.)*+)(?:'|\\?\Z)|([^',=:{}\s]+))(?:=(\d+)|:\((\d+)\)(\d+))?"
)
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]++|\([^()]*\))*+)\))?\s*\{([^{}]*)\}"
)
_MAX_DIMS = 32  # what NumPy can reshape to in every version


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The answer: axis names in mesh order, or None with a note in words.

    `group_size` counts the devices that exchange data, `num_groups` how often that happens side by
    side. A permute along axes counts as groups as long as those axes.
    """

    axes: tuple[str, ...] | None
    note: str | None
    group_size: int
    num_groups: int


def parse_groups(text: str, devices: int | None) -> list[Ids] | Ids:
    """Device ids of each group: an array [groups, members], or a list when sizes differ.

    `devices` is what `{}` (everybody) means. AuditError for text that is no list of groups.
    """
    text = text.strip()
    if text.startswith("mesh["):
        return _from_mesh(text)
    if text.startswith("["):
        ids = _iota(text)
        return ids if ids.ndim == 2 else ids.reshape(1, -1)
    if text.replace(" ", "") in ("{}", "{{}}"):
        if devices is None:
            raise AuditError(
                "replica_groups={} means all devices, and the text does not say how many there "
                "are. Give mesh= with the axes and sizes of the program."
            )
        _bounded(devices, text)
        return np.arange(devices, dtype=np.int64).reshape(1, -1)
    if not (text.startswith("{") and text.endswith("}")) or _INNER.sub("", text[1:-1]).strip(", "):
        raise _unreadable(text, "replica_groups")
    groups = [_numbers(found, text) for found in _INNER.findall(text[1:-1])]
    _bounded(sum(map(len, groups)), text)
    if not groups or not all(groups):
        raise _unreadable(text, "replica_groups")
    if len({len(group) for group in groups}) == 1:
        return np.array(groups, dtype=np.int64)
    return [np.array(group, dtype=np.int64) for group in groups]


def parse_pairs(text: str) -> Ids:
    """`{{0,1},{1,0}}` as an array [pairs, 2] of (source, target). AuditError if it is none."""
    text = text.strip()
    if text.replace(" ", "") == "{}":
        return np.zeros((0, 2), dtype=np.int64)
    pairs = parse_groups(text, None)
    if not isinstance(pairs, np.ndarray) or pairs.shape[1] != 2:
        raise _unreadable(text, "source_target_pairs")
    return pairs


def to_device_ids(
    groups: list[Ids] | Ids,
    *,
    kind: str,
    channel: bool,
    global_ids: bool,
    replicas: int | None,
    partitions: int | None,
) -> list[Ids] | Ids:
    """Replica or partition ids as flat device ids (replica x partitions + partition).

    What an id means depends on the instruction: without a channel it is a replica; with one and
    `use_global_device_ids` already a device; with a channel alone a replica and all its partitions,
    except for all-to-alls, permutes and broadcasts, where it is a partition.
    Source: XLA, collective_ops_utils.h, CollectiveOpGroupMode.
    """
    if global_ids or replicas is None or partitions is None:
        return groups
    _bounded(replicas * partitions, "the header")
    biggest = max((int(np.max(group)) for group in groups if group.size), default=0)
    if channel and kind in PARTITION_KINDS:
        starts = np.arange(replicas, dtype=np.int64) * partitions
        return _spread(groups, starts, 1)
    if biggest >= replicas:
        return groups  # cannot be replicas: somebody shortened the text; the ids name devices
    everyone = np.arange(partitions, dtype=np.int64)
    if not channel:
        return _spread(groups, everyone, partitions)
    _bounded(sum(map(len, groups)) * partitions, "replica_groups")
    together = [(group[:, None] * partitions + everyone).reshape(-1) for group in groups]
    return np.array(together) if isinstance(groups, np.ndarray) else together


def wrong_members(groups: list[Ids] | Ids, paired: bool, devices: int | None) -> str:
    """What XLA would not accept about who takes part, in words; "" when nothing.

    A group operation names every device once; a permute sends from and to a device once at most.
    """
    if paired:
        pairs = np.asarray(groups, dtype=np.int64).reshape(-1, 2)
        columns = [pairs[:, 0], pairs[:, 1]]
    else:
        columns = [np.concatenate([np.asarray(group).reshape(-1) for group in groups])]
    for ids in filter(len, columns):
        if len(np.unique(ids)) != len(ids):
            return "one is named twice"
        if devices is not None and int(np.max(ids)) >= devices:
            return f"device {int(np.max(ids))} is named, and there are {devices}"
        if devices is not None and not paired and len(ids) != devices:
            return f"{len(ids)} are named, and there are {devices}"
    return ""


def axes_of_groups(groups: list[Ids] | Ids, mesh: Mapping[str, int] | None, label: str) -> Axes:
    """The axes that these groups span. `label` is the printed text, for notes without a mesh.

    AuditError when a device is outside the mesh.
    """
    size = max(len(group) for group in groups)
    answer = Axes(axes=None, note=None, group_size=size, num_groups=len(groups))
    if size == 1:
        return replace(answer, axes=(), note=None)
    if not isinstance(groups, np.ndarray):
        lengths = sorted({len(group) for group in groups})
        note = f"irregular groups of {' and '.join(map(str, lengths))} devices"
        return replace(answer, axes=None, note=note)
    if len(np.unique(groups)) != groups.size:
        note = f"some devices are in more than one of {len(groups)} groups"
        return replace(answer, axes=None, note=note)
    if mesh is None:
        return _axes_by_stride(answer, groups, label)
    names, sizes = _real_axes(mesh)
    if groups.size != math.prod(sizes):
        _inside(groups, sizes)
        note = f"only {groups.size} of {math.prod(sizes)} devices take part"
        return replace(answer, axes=None, note=note)
    coordinates = _coordinates(groups, sizes)  # [axes, groups, members]
    varying = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2)).tolist()
    spanned = tuple(name for name, moves in zip(names, varying, strict=True) if moves)
    full = math.prod(size for size, moves in zip(sizes, varying, strict=True) if moves)
    if full == size:  # distinct, otherwise fixed, and as many as the axes have: all of them
        return replace(answer, axes=spanned, note=None)
    part = f"groups of {size} are part of {_spelled(spanned, mesh)}"
    return replace(answer, axes=None, note=f"{part}, {_stride(groups)}")


def axes_of_pairs(pairs: Ids, mesh: Mapping[str, int] | None, devices: int | None) -> Axes:
    """The axes along which the pairs of a permute move data; pairs to oneself move none.

    The note of a permute along axes says its pattern. AuditError for a device outside the mesh.
    """
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    if not len(pairs):
        return Axes(axes=(), note=None, group_size=1, num_groups=devices or 1)
    if mesh is None:
        return _permute_by_stride(pairs, devices)
    names, sizes = _real_axes(mesh)
    coordinates = _coordinates(pairs, sizes)  # [axes, pairs, 2]
    steps = coordinates[:, :, 1] - coordinates[:, :, 0]
    moving = np.flatnonzero(steps.any(axis=1)).tolist()
    spanned = tuple(names[axis] for axis in moving)
    lengths = tuple(sizes[axis] for axis in moving)
    size = math.prod(lengths)
    note = f"{len(pairs)} of {math.prod(sizes)} devices send"
    positions = np.ravel_multi_index(tuple(coordinates[moving]), lengths)
    around = np.unique((positions[:, 1] - positions[:, 0]) % size)
    if len(around) == 1:
        step = int(around[0])
        step = step if step <= size // 2 else step - size
        ring = len(pairs) == math.prod(sizes)
        note = f"{'ring' if ring else 'shift'} by {step:+d}"
    return Axes(
        axes=spanned, note=note, group_size=size, num_groups=max(1, math.prod(sizes) // size)
    )


def _axes_by_stride(answer: Axes, groups: Ids, label: str) -> Axes:
    """Without a mesh: name each regular step `size<n>stride<s>`, the outermost first."""
    ordered = np.sort(groups, axis=1)
    offsets = ordered - ordered[:, :1]
    names: list[str] = []
    pattern = offsets[0]
    if (offsets == pattern).all():
        while len(pattern) > 1:
            stride = int(pattern[1])
            expected = np.arange(len(pattern)) * stride
            breaks = np.flatnonzero(pattern != expected)
            run = int(breaks[0]) if len(breaks) else len(pattern)
            if len(pattern) % run:
                break
            rows = pattern.reshape(-1, run)
            if (rows - rows[:, :1] != rows[0]).any():
                break
            names.append(f"size{run}stride{stride}")
            pattern = rows[:, 0]
        else:
            note = f"no mesh given: named by size and stride; printed as {label[:80]}"
            return replace(answer, axes=tuple(reversed(names)), note=note)
    note = f"no mesh given, and irregular groups; printed as {label[:80]}"
    return replace(answer, axes=None, note=note)


def _permute_by_stride(pairs: Ids, devices: int | None) -> Axes:
    """Without a mesh: the sets of devices that the pairs connect are the groups."""
    highest = int(np.max(pairs)) + 1
    _bounded(highest, "source_target_pairs")
    above = list(range(highest))
    for source, target in pairs.tolist():
        roots = []
        for node in (source, target):
            while above[node] != node:
                above[node] = above[above[node]]  # halving keeps long chains short
                node = above[node]
            roots.append(node)
        above[max(roots)] = min(roots)
    members: dict[int, list[int]] = {}
    for device in np.unique(pairs).tolist():
        root = device
        while above[root] != root:
            root = above[root]
        members.setdefault(root, []).append(device)
    sets = list(members.values())
    size = max(map(len, sets))
    if len({len(group) for group in sets}) == 1:
        answer = Axes(axes=None, note=None, group_size=size, num_groups=len(sets))
        return _axes_by_stride(answer, np.array(sets, dtype=np.int64), f"{len(pairs)} pairs")
    note = f"no mesh given; {len(pairs)} of {devices or 'all'} devices send, irregularly"
    return Axes(axes=None, note=note, group_size=size, num_groups=len(sets))


def _from_mesh(text: str) -> Ids:
    """`mesh['a'=2,'b'=4], device_ids=(…) {'b','a':(2)4}`: the named (parts of) axes together."""
    found = _MESH.fullmatch(text)
    if not found:
        raise _unreadable(text, "replica_groups")
    axes = {
        quoted or bare: integer(size or "0", "mesh axis size")
        for quoted, bare, size, _, _ in _AXIS.findall(found[1])
    }
    total = _product(list(axes.values()), text)
    if not axes or total < 1:
        raise _unreadable(text, "replica_groups")
    if found[2] is None:
        ids = np.arange(total, dtype=np.int64)
    elif found[2].startswith("["):
        ids = _iota(found[2]).reshape(-1)
    else:
        ids = np.array(_numbers(found[2], text), dtype=np.int64)
    if len(ids) != total:
        raise _unreadable(text, "replica_groups")

    # Cut each axis into the parts that are named and the rest, then bring the named ones last.
    cuts: dict[str, list[tuple[int, int, int]]] = {name: [] for name in axes}  # start, size, order
    for order, (quoted, bare, _, before, size) in enumerate(_AXIS.findall(found[3])):
        name = quoted or bare
        if name not in axes:
            raise _unreadable(text, "replica_groups")
        start = integer(before or "1", "sub-axis")
        cuts[name].append((start, integer(size, "sub-axis") if size else axes[name], order))
    dims: list[int] = []
    named: dict[int, int] = {}  # order of naming -> position among dims
    for name, length in axes.items():
        at = 1
        for start, size, order in sorted(cuts[name]):
            if start < at or start % at or size < 1 or length % (start * size):
                raise _unreadable(text, "replica_groups")
            dims.extend((start // at, size))
            named[order] = len(dims) - 1
            at = start * size
        dims.append(length // at)
    last = [named[order] for order in sorted(named)]
    first = [axis for axis in range(len(dims)) if axis not in named.values()]
    if len(dims) > _MAX_DIMS:
        raise _unreadable(text, "replica_groups")
    members = math.prod(dims[axis] for axis in last)
    return ids.reshape(dims).transpose(first + last).reshape(-1, members)


def _iota(text: str) -> Ids:
    """`[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)` where the shape of the result does not matter."""
    found = _IOTA.fullmatch(text.strip())
    if not found:
        raise _unreadable(text, "device list")
    shape = _numbers(found[1], text)
    source = _numbers(found[2], text) if found[2] else shape
    total = _product(source, text)
    order = _numbers(found[3], text) if found[3] else list(range(len(source)))
    if sorted(order) != list(range(len(source))) or total < 1:
        raise _unreadable(text, "device list")
    ids = np.arange(total, dtype=np.int64).reshape(source).transpose(order).reshape(-1)
    if not found[2]:
        return ids
    if _product(shape, text) != total:
        raise _unreadable(text, "device list")
    return ids.reshape(shape)


def _spread(groups: list[Ids] | Ids, starts: Ids, stride: int) -> list[Ids] | Ids:
    """The same groups once for each start, ids `stride` apart."""
    _bounded(sum(map(len, groups)) * len(starts), "replica_groups")
    if isinstance(groups, np.ndarray):
        return (groups * stride + starts[:, None, None]).reshape(-1, groups.shape[-1])
    return [group * stride + start for start in starts for group in groups]


def _coordinates(ids: Ids, sizes: Sequence[int]) -> Ids:
    _inside(ids, sizes)
    return np.array(np.unravel_index(ids, tuple(sizes)), dtype=np.int64)


def _inside(ids: Ids, sizes: Sequence[int]) -> None:
    total = math.prod(sizes)
    if ids.size and int(np.max(ids)) >= total:
        raise AuditError(
            f"Device {int(np.max(ids))} takes part in a collective, and the mesh has devices 0 to "
            f"{total - 1}. Give the mesh that the program was compiled for."
        )


def _real_axes(mesh: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    real = {name: size for name, size in mesh.items() if size > 1}
    return tuple(real), tuple(real.values())


def _stride(groups: Ids) -> str:
    steps = np.unique(np.diff(np.sort(groups, axis=1), axis=1))
    return f"devices {int(steps[0])} apart" if len(steps) == 1 else "not evenly spaced"


def _spelled(names: Sequence[str], mesh: Mapping[str, int]) -> str:
    spelled = " and ".join(f"{name!r} ({mesh[name]})" for name in names)
    return f"axis {spelled}" if len(names) == 1 else f"axes {spelled}"


def _product(sizes: list[int], text: str) -> int:
    if len(sizes) > _MAX_DIMS:
        raise _unreadable(text, f"device list of at most {_MAX_DIMS} dimensions")
    total = math.prod(sizes)
    _bounded(total, text)
    return total


def _numbers(text: str, whole: str) -> list[int]:
    if text.count(",") > MAX_DEVICES:
        raise _unreadable(whole, "device list")
    return [integer(word, "device id") for word in text.split(",") if word.strip()]


def _bounded(count: int, text: str) -> None:
    if count > MAX_DEVICES:
        raise AuditError(
            f"{text[:40]!r} names {count} devices, more than {MAX_DEVICES}. "
            "No machine has so many: the text is damaged."
        )


def _unreadable(text: str, what: str) -> AuditError:
    return AuditError(
        f"{text[:80]!r} is no {what} that HLO prints. The text is damaged, or a newer XLA has a "
        "new form; print it again with compiled.as_text()."
    )
