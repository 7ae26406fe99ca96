"""Bytes that each device sends to each other one per step, as the best ring algorithms send them.

A permute sends along its pairs. Rings (all-reduce, all-gather, reduce-scatter) send everything to
the next device in the group's order, an all-to-all an equal share to every member, a broadcast goes
down the chain of its group.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.result import Collective
from jaxpar.errors import AuditError

MAX_MATRIX_DEVICES = 8192
"""Devices up to which a matrix of all pairs is made: half a gigabyte."""


def byte_matrix(collectives: Iterable[Collective], num_devices: int) -> NDArray[np.int64]:
    """Bytes from device i (row) to device j (column) per step, [num_devices, num_devices].

    Each device sends as often as it runs an operation. In rings and permutes a row sums to the
    device's count x `wire_bytes`; an all-to-all's shares are rounded down to whole bytes, a ragged
    one's are upper bounds, the last of a broadcast's chain sends nothing. AuditError for a count
    that is not known (a matrix without it would be too small), for groups that are not known or
    name a device beyond `num_devices`, and for more than MAX_MATRIX_DEVICES.
    """
    if not 1 <= num_devices <= MAX_MATRIX_DEVICES:
        raise AuditError(
            f"A matrix of {num_devices} x {num_devices} devices cannot be made; from 1 to "
            f"{MAX_MATRIX_DEVICES} are possible. Look at totals along the mesh's axes instead."
        )
    sent = np.zeros((num_devices, num_devices), np.int64)
    for found in collectives:
        counts = _counts(found, num_devices)
        if found.kind == "collective-permute":
            _along(sent, np.asarray(found.groups, np.int64).reshape(-1, 2), found, counts)
            continue
        if not len(found.groups):
            raise _no_groups(found)
        for group in found.groups:
            _within(sent, np.asarray(group, np.int64), found, counts)
    return sent


def _within(
    sent: NDArray[np.int64], group: NDArray[np.int64], found: Collective, counts: NDArray[np.int64]
) -> None:
    """Adds what the devices of one group send for `found`."""
    size = len(group)
    if size < 2:
        return
    if found.kind in ("all-to-all", "ragged-all-to-all"):
        _inside(group, len(sent), found)
        others = ~np.eye(size, dtype=np.bool_)
        share = found.payload_bytes // size
        sent[np.ix_(group, group)] += others * (counts[group] * share)[:, None]
        return
    ring = np.stack([group, np.roll(group, -1)], axis=1)
    _along(sent, ring[:-1] if found.kind == "collective-broadcast" else ring, found, counts)


def _along(
    sent: NDArray[np.int64], pairs: NDArray[np.int64], found: Collective, counts: NDArray[np.int64]
) -> None:
    """Adds `wire_bytes` along pairs of source and target; what a device keeps is not sent."""
    _inside(pairs, len(sent), found)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    np.add.at(sent, (pairs[:, 0], pairs[:, 1]), counts[pairs[:, 0]] * found.wire_bytes)


def _counts(found: Collective, num_devices: int) -> NDArray[np.int64]:
    """Executions on each device."""
    if found.device_counts is not None and len(found.device_counts) == num_devices:
        return np.array(found.device_counts, np.int64)
    if found.count is None:
        raise AuditError(
            f"How often {found.name} (line {found.line}) runs is decided by data, so a matrix of "
            "bytes per step would be wrong. Look at count_min and count_max of the collectives, or "
            "audit a program whose loops and branches are known."
        )
    return np.full(num_devices, found.count, np.int64)


def _inside(devices: NDArray[np.int64], num_devices: int, found: Collective) -> None:
    if devices.size and not (np.min(devices) >= 0 and np.max(devices) < num_devices):
        raise AuditError(
            f"{found.name} (line {found.line}) names device {int(np.max(devices))}, and the matrix "
            f"has {num_devices}. Give the number of devices that the program was compiled for."
        )


def _no_groups(found: Collective) -> AuditError:
    return AuditError(
        f"The devices that {found.name} (line {found.line}) connects are not known, so the bytes "
        "between them cannot be told. Give mesh= with the axes and sizes of the program."
    )
