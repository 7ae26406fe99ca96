"""Communication that is no collective opcode: sends with their receives, and permutes of slices.

A pair of `send` and `recv` is a permute that XLA took apart to overlap it (its pairs are in
`_xla_send_recv_source_target_pairs`; source: xla/service/collective_ops_utils.h), or an operation
between TPU slices that goes through the hosts: the program is compiled for one slice, hands its
buffer to a runtime and gets back the result. What the runtime does stands in
`_xla_megascale_transfer_type`, and between whom in `_xla_megascale_target`, in one of three forms:
`"{1,2}x{0:7}"` (slices 1 and 2, for each of devices 0 to 7), groups or pairs of numbers such as
200003, slice 2 and its device 3. Measured, an ALL_REDUCE of n slices moves the 2(n-1)/n of a ring.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.audit.execution import Count, Execution
from jaxpar.audit.groups import (
    MAX_DEVICES,
    Axes,
    Ids,
    axes_of_groups,
    axes_of_pairs,
    parse_groups,
    parse_pairs,
    to_device_ids,
)
from jaxpar.audit.instruction import split_top
from jaxpar.audit.reader import Computation, Instruction, Module
from jaxpar.audit.reading import Site
from jaxpar.audit.result import Buffer, Collective, Finding
from jaxpar.audit.scope import phase_of, scope_of
from jaxpar.audit.shape import Array, Shape, bit_width, integer, leaves, nbytes
from jaxpar.errors import AuditError

HOST_KINDS: Mapping[str, str] = {
    "ONE_TO_ONE": "collective-permute",
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
"""Kind of collective by the type of a transfer between slices."""

THROUGH_HOSTS = "between slices, through hosts"

_PAIRS = "_xla_send_recv_source_target_pairs"
_VALID = "_xla_send_recv_validation"
_TYPE = "_xla_megascale_transfer_type"
_TARGET = "_xla_megascale_target"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_PRODUCT = re.compile(r"\{([\d,\s]{1,100000})\}x\{(\d{1,9}):(\d{1,9})\}")
_SLICE = 100_000  # device numbers start again at each multiple of this, slices count from 1
_SIZES = re.compile(r"\{([\d,\s]*)\}")
_NEWER = "Update jaxpar, or report the text: this form of communication is not understood yet."
_DAMAGED = "Print the text again with compiled.as_text(), and pass all of it."


@dataclass(frozen=True, kw_only=True)
class _End:
    """A send or a recv, how often it runs, and what it says about the other end."""

    computation: Computation
    found: Instruction
    count: Count
    words: Mapping[str, str]

    @property
    def buffer(self) -> Shape:
        """What is sent or received, without the context and the token that come with it."""
        shape = self.found.shape
        if isinstance(shape, Array) or not shape:
            raise AuditError(
                f"{self.found.name} (line {self.found.line}) has type "
                f"{self.found.type_text[:60]!r}, which is none of a {self.found.opcode}. {_DAMAGED}"
            )
        return shape[0]


def num_slices(mesh: Mapping[str, int] | None, devices: int | None) -> int:
    """How many slices of `devices` the mesh spans; 1 where one of them is not known.

    AuditError when a mesh of several slices does not begin with axes that count them: then devices
    of a slice are no block of the mesh.
    """
    if mesh is None or not devices or math.prod(mesh.values()) <= devices:
        return 1
    slices, rest = divmod(math.prod(mesh.values()), devices)
    before = 1
    for size in mesh.values():
        if before == slices:
            break
        before *= size
    if rest or before != slices:
        raise AuditError(
            f"The mesh {dict(mesh)} has {math.prod(mesh.values())} devices and the program was "
            f"compiled for slices of {devices}. Name the axes between slices first."
        )
    return slices


def over_slices(groups: list[Ids] | Ids, slices: int, devices: int) -> list[Ids] | Ids:
    """The same groups within each of several slices of `devices`, which follow one another."""
    if slices == 1:
        return groups
    if sum(map(len, groups)) * slices > MAX_DEVICES:
        raise AuditError(f"{slices} slices of {devices} are more than {MAX_DEVICES} devices.")
    starts = np.arange(slices, dtype=np.int64) * devices
    if isinstance(groups, np.ndarray):
        return (groups + starts[:, None, None]).reshape(-1, groups.shape[-1])
    return [group + start for start in starts for group in groups]


def transfers(
    module: Module, runs: Execution, *, mesh: Mapping[str, int] | None, devices: int | None
) -> Iterator[Site | Finding]:
    """Each pair of sends and receives once, as the collective that it is; and what is not counted.

    `devices` run the module (one slice, where there are several). A send counts as often as it
    runs, and its receives have to run as often. What moves data between a device and its host only
    is left out. AuditError for damaged groups or types.
    """
    slices = num_slices(mesh, devices)
    ends: dict[tuple[str, ...], dict[str, list[_End]]] = {}
    for computation, found in module.find(" send(", " recv("):
        if found.opcode not in ("send", "recv"):
            continue
        words = _frontend_attributes(found)
        key: tuple[str, ...]
        if words.get(_VALID) == "invalid":
            continue  # XLA's way to say that this one is skipped
        if _PAIRS in words:
            key = (_PAIRS, words[_PAIRS], found.type_text.partition("{")[0])
        elif _TYPE in words or _TARGET in words:
            key = (_TYPE, words.get(_TYPE, ""), words.get(_TARGET, ""), words.get(_RENDEZVOUS, ""))
        elif "is_host_transfer=true" in found.attributes_text:
            continue
        else:
            yield _unhandled(module, found, "a transfer that does not say between whom")
            continue
        count = runs.counts.get(computation.name)
        if count is None:
            yield _unhandled(module, found, f"in {computation.name}, which nobody calls,")
        elif count.high != 0:
            end = _End(computation=computation, found=found, count=count, words=words)
            ends.setdefault(key, {}).setdefault(found.opcode, []).append(end)
    for both in ends.values():
        sends, receives = both.get("send", []), both.get("recv", [])
        if problem := _unpaired(sends, receives):
            yield _unhandled(module, (sends or receives)[0].found, problem)
            continue
        for send in sends:
            try:
                yield from _counted(module, send, receives[0], mesh, devices, slices)
            except AuditError as error:
                raise error.at(send.found.line) from None


def sliced_payload(computation: Computation, found: Instruction) -> int | None:
    """Bytes that each device sends in a permute of slices, which writes them into a larger buffer.

    Its `slice_sizes` are in elements of the first operand. None where that has arrays of different
    types, so that nobody knows which slice is of which.
    """
    given = computation.get(found.operands[0].name) if found.operands else None
    if given is None or found.operands[0].path:
        return None
    widths = {bit_width(array.dtype) for array in leaves(given.shape)}
    text = found.attributes.get("slice_sizes", "")
    sizes = _SIZES.findall(text[1:-1])
    if len(widths) != 1 or not sizes:
        return None
    elements = sum(
        math.prod(integer(size, "slice size") for size in slice_.split(",") if size.strip())
        for slice_ in sizes
    )
    return (elements * widths.pop() + 7) // 8


def _counted(
    module: Module,
    send: _End,
    receive: _End,
    mesh: Mapping[str, int] | None,
    devices: int | None,
    slices: int,
) -> Iterator[Site | Finding]:
    """The pair as a Site, unless it moves nothing; with a finding where bytes do not fit."""
    from jaxpar.collectives import wire_bytes  # imports JAX, which reading text does not need

    kind = HOST_KINDS.get(send.words.get(_TYPE, ""), "collective-permute")
    if _PAIRS in send.words:
        where, groups = _between_devices(module, send, mesh, devices, slices)
    elif send.words.get(_TYPE, "") not in HOST_KINDS:
        named = send.words.get(_TYPE, "")
        yield _unhandled(module, send.found, f"a transfer between slices of type {named[:40]!r}")
        return
    elif (between := _between_slices(send, kind, mesh, devices, slices)) is None:
        target = send.words.get(_TARGET, "")
        yield _unhandled(module, send.found, f"a transfer between slices to {target[:60]!r}")
        return
    else:
        where, groups = between
    if where.group_size == 1:
        return
    sent, received = nbytes(send.buffer), nbytes(receive.buffer)
    whole_sent = sent * (where.group_size if kind == "all-gather" else 1)
    whole_received = received * (where.group_size if kind == "reduce-scatter" else 1)
    if whole_sent != whole_received:
        message = (
            f"{send.found.name} (line {send.found.line}) sends {sent} bytes and "
            f"{receive.found.name} (line {receive.found.line}) receives {received}, which is no "
            f"{kind} of {where.group_size}"
        )
        yield _finding(module, send.found, "shape-mismatch", "error", message, _DAMAGED)
    if send.words.get(_VALID):
        message = f"{send.found.name} sends in some iterations only; its count is the upper bound"
        remedy = "Nothing to change; _xla_send_recv_validation in the text says in which."
        yield _finding(module, send.found, "transfer-upper-bound", "info", message, remedy)
    payload = max(whole_sent, whole_received)
    described = send.found if send.found.op_name else receive.found
    phase = phase_of(described.op_name, module.differentiated)
    dtype = "+".join(dict.fromkeys(array.dtype for array in leaves(send.buffer)))
    collective = Collective(
        kind=kind,
        axes=where.axes,
        axes_note=where.note,
        group_size=where.group_size,
        num_groups=where.num_groups,
        dtype=dtype,
        program_dtype=dtype,
        count=send.count.exact,
        count_min=send.count.low,
        count_max=send.count.high,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, where.group_size),
        phase=phase,
        scope=scope_of(described.op_name),
        source=module.source_of(described),
        is_async=True,
        exposed_fraction=None,
        buffers=(Buffer(dtype=dtype, payload_bytes=payload, phase=phase),),
        name=send.found.name,
        line=send.found.line,
        groups=groups,
    )
    yield Site(collective=collective, computation=send.computation, instruction=send.found)


def _unpaired(sends: list[_End], receives: list[_End]) -> str:
    """Why these are no pairs, in words; "" when they are."""
    if not sends or not receives:
        return f"a transfer without {'recv' if sends else 'send'}"
    counts = [[end.count.exact for end in ends] for ends in (sends, receives)]
    if any(None in known for known in counts):
        return ""  # decided by data; both ends are there
    times = [sum(count for count in known if count is not None) for known in counts]
    if times[0] == times[1]:
        return ""
    return f"a transfer that sends {times[0]} times and receives {times[1]} times"


def _between_devices(
    module: Module,
    send: _End,
    mesh: Mapping[str, int] | None,
    devices: int | None,
    slices: int,
) -> tuple[Axes, Ids]:
    """Of a permute that was taken apart; without a channel its pairs are replicas."""
    pairs = to_device_ids(
        parse_pairs(send.words[_PAIRS]),
        kind="collective-permute",
        channel=send.found.attributes.get("channel_id", "0") != "0",
        global_ids=False,
        replicas=module.replicas,
        partitions=module.partitions,
    )
    pairs = np.asarray(over_slices(pairs, slices, devices or 1), dtype=np.int64).reshape(-1, 2)
    return axes_of_pairs(pairs, mesh, devices), pairs


def _between_slices(
    send: _End, kind: str, mesh: Mapping[str, int] | None, devices: int | None, slices: int
) -> tuple[Axes, Ids] | None:
    """Devices numbered through all slices, slice after slice; None for an unknown target.

    A device's number within its slice is that of the hardware, not its place in the mesh. So axes
    are named only where every group is of devices with the same number.
    """
    target = send.words.get(_TARGET, "")
    paired = kind == "collective-permute"
    numbers = _numbers(target, paired)
    if numbers is None or not numbers.size:
        return None
    which, device = numbers // _SLICE - 1, numbers % _SLICE
    known = devices or int(np.max(device)) + 1
    if np.min(which) < 0 or np.max(device) >= known:
        return None
    most = int(np.max(which)) + 1
    ids = which * known + device
    if mesh is not None and slices == 1:
        where = _unnamed(ids, f"{most} of them, and the mesh is that of one")
    elif mesh is not None and most > slices:
        raise AuditError(
            f"{send.found.name} (line {send.found.line}) speaks to slice {most}, and the mesh "
            f"{dict(mesh)} has {slices}. Give the mesh of all slices."
        )
    elif (device != device[:, :1]).any():
        where = _unnamed(ids, "devices within a slice by hardware number")
    elif paired:
        where = axes_of_pairs(ids, mesh, known * most)
    else:
        where = axes_of_groups(ids, mesh, target)
    note = f"{THROUGH_HOSTS}; {where.note}" if where.note else THROUGH_HOSTS
    return replace(where, note=note), ids


def _numbers(target: str, paired: bool) -> Ids | None:
    """Slice and device of everybody in each group, [groups, members]; None for unknown forms."""
    product = _PRODUCT.fullmatch(target)
    if product:
        slices = [integer(word, "slice") for word in product[1].split(",") if word.strip()]
        first, last = int(product[2]), int(product[3])
        if last < first or (last - first + 1) * len(slices) > MAX_DEVICES or last >= _SLICE:
            return None
        devices = np.arange(first, last + 1, dtype=np.int64)
        return devices[:, None] + _SLICE * np.array(slices, dtype=np.int64)
    if not target.startswith("{{") or paired != ("->" in target):
        return None
    if paired:
        return parse_pairs(target.replace("->", ","))
    groups = parse_groups(target, None)
    return groups if isinstance(groups, np.ndarray) else None


def _unnamed(ids: Ids, note: str) -> Axes:
    return Axes(axes=None, note=note, group_size=ids.shape[1], num_groups=len(ids))


def _frontend_attributes(found: Instruction) -> dict[str, str]:
    text = found.attributes.get("frontend_attributes", "")
    pairs = (part.strip().partition("=") for part in split_top(text[1:-1]))
    return {key: value.strip('"') for key, _, value in pairs}


def _unhandled(module: Module, found: Instruction, what: str) -> Finding:
    message = f"not counted: {found.opcode} {found.name} (line {found.line}), {what}"
    return _finding(module, found, "unhandled-communication", "error", message, _NEWER)


def _finding(
    module: Module, found: Instruction, rule: str, severity: str, message: str, remedy: str
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        message=message,
        source=module.source_of(found),
        remedy=remedy,
    )
