"""All-gathers with what becomes of their results: one walk for all rules that ask."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxpar.audit.findings.common import Use, uses
from jaxpar.audit.findings.values import ELEMENTWISE, REARRANGED, result_paths
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.shape import Array, leaves

MIN_BYTES = 1 << 16
"""Payload below which an operation costs its latency, not its bytes: not worth a change."""

_SAME_DIMS = ELEMENTWISE | {"all-gather", "all-gather-start"}  # that along another dim
_DIMENSIONS = re.compile(r"\{(\d{1,3}(?:,\s?\d{1,3})*)\}")


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Result `number` of an all-gather, at `path` of its value.

    `ends` are its uses, seen through rearrangement, elementwise operations and further gathers;
    empty when it has too many. `dim` is the dim that was gathered, None if the text does not say.
    """

    site: Site
    number: int
    path: tuple[int, ...]
    array: Array
    dim: int | None
    ends: tuple[Use, ...]


def gathers(reading: Reading) -> list[Gather]:
    """The results of all all-gathers that are worth a look, in the order of the sites."""
    found = []
    for site in reading.sites:
        if site.collective.kind != "all-gather":
            continue
        dim = next(iter(dims_in(site.instruction.attributes.get("dimensions", ""))), None)
        for number, path in enumerate(result_paths(site)):
            array = result_array(site, number)
            if array is None or array.nbytes < max(1, MIN_BYTES):
                continue
            ends = uses(
                reading,
                site.computation,
                site.instruction,
                path,
                through=REARRANGED,
                passes=lambda use: use.instruction.opcode in _SAME_DIMS,
            )
            found.append(
                Gather(site=site, number=number, path=path, array=array, dim=dim, ends=ends or ())
            )
    return found


def dims_in(text: str) -> list[int]:
    """The numbers in a list such as `{0,2}`; none for any other text."""
    found = _DIMENSIONS.fullmatch(text.strip())
    return [int(number) for number in found[1].split(",")] if found else []


def result_array(site: Site, number: int) -> Array | None:
    """Result `number` of a collective; None if there is none."""
    shape = site.instruction.shape
    if site.instruction.opcode.endswith("-start") and not isinstance(shape, Array):
        shape = shape[1] if len(shape) > 1 else shape  # its operands, then its results
    arrays = list(leaves(shape))
    return arrays[number] if number < len(arrays) else None
