"""Chips: peak compute, memory and links, each figure with its source in hardware.toml.

What is not published, and cannot be derived from what is, is left out rather than guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from jaxpar.errors import JaxparError, did_you_mean

_PEAKS = {"bf16_flops": "bf16", "f32_flops": "f32", "int8_flops": "s8", "f8_flops": "f8"}
_WORDS = (  # in a device_kind, lower case; the first that is found counts
    (r"tpu v4(?! lite)", "v4"),
    (r"tpu v5 ?(lite|e)", "v5e"),
    (r"tpu v5", "v5p"),
    (r"tpu v6 ?(lite|e)", "v6e"),
    (r"tpu ?7x", "tpu7x"),
    (r"\b(?:pcie|nvl|40gb)\b", ""),  # slower boards of the same name
    (r"\ba100\b", "a100"),
    (r"\bh100\b", "h100"),
    (r"\bh200\b", "h200"),
    (r"\bb200\b", "b200"),
)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, which JAX shows as `devices_per_chip` devices that share its figures.

    peak_flops: dense FLOP/s by HLO element type: bf16, f32 (GPU: TF32), s8, f8 where published.
    hbm_bytes, hbm_bytes_per_s: memory and its bandwidth.
    topology: what the links join: "torus" (neighbours) or "switch" (all of a domain).
    link_bytes_per_s: of one of num_links links, in one direction.
    wrap_size: a dim of a slice is a ring where it is a multiple of this, else a line; None behind a
    switch.
    domain_size: chips that links join, directly or over others; beyond it they send
    scale_out_bytes_per_s each.
    clock_hz: cycles per second of XLA's estimates (TPU), else None.
    source: where the figures are from, by subject.
    """

    name: str
    platform: str
    devices_per_chip: int
    peak_flops: Mapping[str, float]
    hbm_bytes: int
    hbm_bytes_per_s: float
    topology: str
    link_bytes_per_s: float
    num_links: int
    wrap_size: int | None
    domain_size: int
    scale_out_bytes_per_s: float
    clock_hz: float | None
    source: Mapping[str, str]

    def flops_per_s(self, dtype: str) -> float:
        """Peak of one device for matmuls of an HLO element type; bf16's where none is published."""
        key = "f8" if dtype.startswith("f8") else dtype
        return self.peak_flops.get(key, self.peak_flops["bf16"]) / self.devices_per_chip

    @property
    def device_hbm_bytes_per_s(self) -> float:
        """Memory bandwidth of one device."""
        return self.hbm_bytes_per_s / self.devices_per_chip


def chips() -> Mapping[str, Chip]:
    """All chips by name, in the order of the file."""
    with files("jaxpar").joinpath("hardware.toml").open("rb") as file:
        return MappingProxyType(
            {name: _chip(name, row) for name, row in tomllib.load(file).items()}
        )


def chip(name: str) -> Chip:
    """The chip of that name, in any case. Raises JaxparError for one that is not in the table."""
    known = chips()
    found = known.get(name.lower())
    if found is None:
        advice = did_you_mean(name.lower(), known)
        raise JaxparError(f"chip={name!r} is not in jaxpar's hardware table. {advice}")
    return found


def chip_of(device_kind: str) -> str | None:
    """The chip behind a JAX `device_kind` such as "TPU v5 lite"; None when the table lacks it."""
    words = device_kind.lower()
    return next((name for pattern, name in _WORDS if re.search(pattern, words)), "") or None


def _chip(name: str, row: dict[str, Any]) -> Chip:
    """One table of the file; a key that is missing or unknown is an error of the file."""
    peaks = {dtype: row.pop(key) for key, dtype in _PEAKS.items() if key in row}
    platform = "tpu" if row["topology"] == "torus" else "gpu"
    hbm_bytes, clock_hz = int(row.pop("hbm_bytes")), row.pop("clock_hz", None)
    wrap_size = row.pop("wrap_size", None)
    return Chip(
        name=name,
        platform=platform,
        peak_flops=MappingProxyType(peaks),
        hbm_bytes=hbm_bytes,
        clock_hz=clock_hz,
        wrap_size=wrap_size,
        **row,
    )
