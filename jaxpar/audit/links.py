"""How long a collective occupies a chip's links, at best."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxpar.audit.result import Collective
from jaxpar.hardware import Chip

_MOST = 10**30  # bytes; damaged text may speak of more than a float can hold


class Transfers:
    """Seconds on the links of `chip`, for the collectives of one program.

    On a torus a group is one ring of neighbours that sends both ways round, so twice a link's
    bandwidth counts; two devices share a single link, and a permute goes one way to the neighbour.
    An all-to-all passes through the devices between: floor(n²/4) hops of payload/n from each of n
    devices. These are the figures of jax-ml.github.io/scaling-book/sharding for one mesh axis with
    wraparound. The two devices of a tpu7x are neighbours in that ring.

    Behind a switch every device sends with all its links. Groups that reach beyond the domain of
    the links, whose devices are taken to be numbered domain by domain, leave it with the scale-out
    bandwidth of all their devices in one domain together.

    Latency is left out: small transfers take longer than said here.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._together: dict[int, tuple[int, bool]] = {}

    def seconds(self, collective: Collective) -> float:
        """Seconds of one execution, on a link that nothing else uses."""
        chip, n = self.chip, collective.group_size
        wire_bytes = max(0, min(collective.wire_bytes, _MOST))
        if chip.topology == "switch":
            bandwidth = chip.link_bytes_per_s * chip.num_links
            together, leaves = self._together_in(collective)
            if leaves:
                bandwidth = min(bandwidth, chip.scale_out_bytes_per_s * together)
            return wire_bytes / bandwidth
        if collective.kind == "collective-permute":
            return wire_bytes / chip.link_bytes_per_s
        directions = 2 if n > 2 else 1
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            hop_bytes = max(0, min(collective.payload_bytes, _MOST)) * (n * n // 4) / n
            return hop_bytes / directions / chip.link_bytes_per_s
        return wire_bytes / directions / chip.link_bytes_per_s

    def _together_in(self, collective: Collective) -> tuple[int, bool]:
        """Devices of a group that are in one domain where it is spread most; whether it leaves it.

        Of a permute, the groups are its pairs.
        """
        key = id(collective.groups)  # shared by the collectives that print the same groups
        if key not in self._together:
            groups = collective.groups
            blocks = [groups] if isinstance(groups, np.ndarray) else [it[None] for it in groups]
            most = max((_num_domains(it // self.chip.domain_size) for it in blocks), default=1)
            size = max((block.shape[-1] for block in blocks), default=1)
            self._together[key] = (max(1, size // most), most > 1)
        return self._together[key]


def _num_domains(domains: NDArray[np.int64]) -> int:
    """The most different values in a row of [groups, members]."""
    if not domains.size:
        return 1
    changes = np.diff(np.sort(domains, axis=1), axis=1) != 0
    return int(changes.sum(axis=1).max()) + 1
