"""Collectives of values that are known on every device: who gets what, with NumPy.

A value is an array [devices or 1, *dims]. Used where control depends on what devices tell each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.groups import parse_groups, parse_pairs, to_device_ids
from jaxpar.audit.reader import Instruction, Module
from jaxpar.audit.shape import integer
from jaxpar.errors import AuditError

EXCHANGES = ("all-reduce", "all-gather", "collective-permute")


def exchange(
    found: Instruction, module: Module, num_devices: int, combine: Any
) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What the collective `found` makes of its one operand; `combine` is a ufunc for all-reduces.

    AuditError for groups that are none, or that leave devices out.
    """
    kind = found.opcode.removesuffix("-start")
    attributes = found.attributes
    permutes = kind == "collective-permute"
    text = attributes.get("source_target_pairs" if permutes else "replica_groups")
    if text is None:
        raise AuditError(f"{found.name} does not say which devices it connects.")
    groups = to_device_ids(
        parse_pairs(text) if permutes else parse_groups(text, num_devices),
        kind=kind,
        channel="channel_id" in attributes,
        global_ids=attributes.get("use_global_device_ids") == "true",
        replicas=module.replicas,
        partitions=module.partitions,
    )
    members = np.concatenate(list(groups)) if len(groups) else np.zeros(0, np.int64)
    if permutes:
        if members.size and np.max(members) >= num_devices:
            raise AuditError(f"{found.name} names a device beyond {num_devices}.")
        return lambda value: _permuted(_on_all(value, num_devices), np.asarray(groups))
    if not np.array_equal(np.sort(members), np.arange(num_devices)):
        raise AuditError(f"The groups of {found.name} do not hold each device once.")
    if kind == "all-reduce":
        return lambda value: _reduced(_on_all(value, num_devices), groups, combine)
    axis = integer(attributes.get("dimensions", "").strip("{}"), "dimensions") + 1
    return lambda value: _gathered(_on_all(value, num_devices), groups, axis)


def _on_all(value: NDArray[Any], num_devices: int) -> NDArray[Any]:
    return np.broadcast_to(value, (num_devices, *value.shape[1:]))


def _permuted(value: NDArray[Any], pairs: NDArray[np.int64]) -> NDArray[Any]:
    answer = np.zeros_like(value)  # who gets nothing gets zeros
    answer[pairs[:, 1]] = value[pairs[:, 0]]
    return answer


def _reduced(value: NDArray[Any], groups: Any, combine: Any) -> NDArray[Any]:
    answer = np.empty_like(value)
    if isinstance(groups, np.ndarray):
        answer[groups] = combine.reduce(value[groups], axis=1, dtype=value.dtype)[:, None]
        return answer
    for group in groups:
        answer[group] = combine.reduce(value[group], axis=0, dtype=value.dtype)
    return answer


def _gathered(value: NDArray[Any], groups: Any, axis: int) -> NDArray[Any]:
    parts: list[Any] = [None] * len(value)
    for group in groups:
        together = np.concatenate([value[device] for device in group], axis=axis - 1)
        for device in group:
            parts[device] = together
    return np.stack(parts)
