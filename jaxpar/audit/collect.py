"""From a module that was read to its collectives: each logical operation once, with its cost.

Groups of one device move nothing and are dropped here, as are operations that never run. Whatever
is recognised as communication and not understood becomes a finding of severity "error", which
makes the audit incomplete: no number is ever smaller in silence.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.dtypes import program_dtype
from jaxpar.audit.execution import Count, Execution
from jaxpar.audit.groups import (
    PARTITION_KINDS,
    Axes,
    Ids,
    axes_of_groups,
    axes_of_pairs,
    parse_groups,
    parse_pairs,
    to_device_ids,
    wrong_members,
)
from jaxpar.audit.reader import MAX_READ, Computation, Instruction, Module, Operand
from jaxpar.audit.reading import Site
from jaxpar.audit.result import Buffer, Collective, Finding
from jaxpar.audit.scope import phase_of, scope_of, unmerged
from jaxpar.audit.shape import Array, Shape, integer, leaves, nbytes
from jaxpar.audit.transfers import num_slices, over_slices, sliced_payload, transfers
from jaxpar.errors import AuditError

KINDS = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "ragged-all-to-all",
        "collective-broadcast",
    }
)
"""Opcodes that communicate, without `-start`."""

MAX_MEMBERS = 1 << 25
"""Members of all different device groups of a module that are expanded, together."""

MAX_OPERANDS = 1 << 15
"""Buffers that one operation passes."""

_RELATED = ("all-", "collective-", "ragged-", "reduce-scatter")
_ENDS = ("-done", "-update")  # the operation was counted where it started
_LOCAL = frozenset({"after-all"})
_NEWER = "Update jaxpar, or report the text: this form of communication is not understood yet."
_AGAIN = "print it again with compiled.as_text()."
_DAMAGED = "Print the text again with compiled.as_text(), and pass all of it."


class Collector:
    """Walks over one module; `sites` and `findings` grow as it goes."""

    def __init__(
        self,
        module: Module,
        flow: Dataflow,
        runs: Execution,
        *,
        mesh: Mapping[str, int] | None,
        devices: int | None,
        platform: str,
    ) -> None:
        self.module = module
        self.flow = flow
        self.runs = runs
        self.mesh = mesh
        self.devices = devices
        self.platform = platform
        self.sites: list[Site] = []
        self.findings: list[Finding] = []
        self._homes: dict[str, None] = {}  # computations that communicate
        self._axes: dict[tuple[str, ...], tuple[Axes, list[Ids] | Ids]] = {}
        self._expanded = 0
        self._slices = num_slices(mesh, devices)
        self._chains: dict[tuple[str, str], bool] = {}  # TPU fusions: was the start seen?
        self._async_starts = {
            computation.name
            for computation, found in module.find("AsyncCollectiveStart")
            if found.opcode == "custom-call"
        }

    def run(self) -> None:
        """Fill `sites` and `findings`. AuditError for damaged groups, types or devices."""
        for computation in self.module.active:
            for found in computation.instructions.values():
                opcode = found.opcode
                if "-" not in opcode:
                    continue
                kind = opcode.removesuffix("-start")
                try:
                    if kind in KINDS:
                        self._collective(computation, found, kind)
                    elif not opcode.endswith(_ENDS):
                        self._other(found)
                except AuditError as error:
                    raise error.at(found.line) from None
        for (_, chain), started in self._chains.items():
            if not started:
                self._unhandled(f"an asynchronous TPU collective, chain {chain}, without start")
        for one in transfers(self.module, self.runs, mesh=self.mesh, devices=self.devices):
            if isinstance(one, Finding):
                self.findings.append(one)
            else:
                self._homes[one.computation.name] = None
                self.sites.append(one)
        self.sites.sort(key=lambda site: site.instruction.line)
        self._undecided()

    def _collective(self, computation: Computation, found: Instruction, kind: str) -> None:
        count = self.runs.counts.get(computation.name)
        if count is None:
            self._unhandled(f"{found.opcode} in {computation.name}, which nobody calls", found)
            return
        if count.high == 0:
            return
        callers = self.flow.callers.get(computation.name, [])
        home, outer = callers[0] if len(callers) == 1 else (None, None)
        fused = outer is not None and outer.opcode == "fusion"
        waits = found.opcode.endswith("-start") or computation.name in self.runs.waits
        payload = None
        if fused and kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            # TPU: an all-reduce of which each device keeps its slice, done as a reduce-scatter.
            kind = "reduce-scatter"
            payload = sum(nbytes(given.shape) for given in computation.parameters.values())
        elif fused and self.platform == "tpu":
            chain = found.chain
            if not chain:
                self._unhandled(f"{found.opcode} inside fusion {computation.name}", found)
                return
            # TPU: printed where it starts, in each fusion it overlaps with, and where it ends.
            key = (callers[0][0].name, chain)
            starts = computation.name in self._async_starts
            self._chains[key] = self._chains.get(key, False) or starts
            if not starts:
                return
            waits = True
        if "slice_sizes=" in found.attributes_text and kind == "collective-permute":
            payload = sliced_payload(computation, found)
            if payload is None:
                self._unhandled(f"{found.opcode} of slices of several types", found)
                return
        self._homes[computation.name] = None
        self.module.forget_inert(unless=MAX_READ)
        collective = self._priced(computation, found, kind, count, outer, waits, payload)
        if collective is not None:
            self.sites.append(
                Site(
                    collective=collective,
                    computation=computation,
                    instruction=found,
                    caller=outer,
                    caller_home=home,
                )
            )

    def _priced(
        self,
        computation: Computation,
        found: Instruction,
        kind: str,
        count: Count,
        outer: Instruction | None,
        waits: bool,
        payload: int | None,
    ) -> Collective | None:
        """The operation with its axes, bytes and metadata; None when it moves nothing."""
        from jaxpar.collectives import wire_bytes  # imports JAX, which reading text does not need

        where, groups = self._where(found, kind)
        if where.group_size == 1:
            return None
        results = _results(found, kind)
        if payload is None:
            payload = self._payload(computation, found, kind, results, where)
        described = found
        # TPU's SparseCore clones one operation's metadata into all that look like it.
        cloned = outer is not None and outer.opcode.endswith("-start")
        if outer is not None and outer.op_name and (cloned or not found.op_name):
            described = outer
        on_each = self.runs.device_counts.get(computation.name)
        is_async = waits and '"is_sync":true' not in found.attributes_text
        return Collective(
            kind=kind,
            axes=where.axes,
            axes_note=where.note,
            group_size=where.group_size,
            num_groups=where.num_groups,
            dtype="+".join(dict.fromkeys(array.dtype for array in leaves(results))),
            program_dtype=program_dtype(self.flow, computation, found, results, self.platform),
            count=count.exact,
            count_min=count.low,
            count_max=count.high,
            payload_bytes=payload,
            wire_bytes=wire_bytes(kind, payload, where.group_size),
            phase=phase_of(described.op_name, self.module.differentiated),
            scope=scope_of(described.op_name),
            source=self.module.source_of(described),
            is_async=is_async,
            exposed_fraction=None if is_async else 1.0,
            buffers=self._buffers(computation, found, kind, results, payload, described.op_name),
            name=found.name,
            line=found.line,
            device_counts=None if on_each is None else tuple(on_each.tolist()),
            groups=groups if isinstance(groups, np.ndarray) else tuple(groups),
        )

    def _where(self, found: Instruction, kind: str) -> tuple[Axes, list[Ids] | Ids]:
        """Axes and devices; worked out once for all operations that print the same groups."""
        attributes = found.attributes
        paired = kind == "collective-permute"
        attribute = "source_target_pairs" if paired else "replica_groups"
        if attribute not in attributes:
            raise AuditError(f"{found.name} has no {attribute}. The text is damaged; {_AGAIN}")
        text = attributes[attribute]
        channel = "channel_id" in attributes
        global_ids = attributes.get("use_global_device_ids") == "true"
        key = (kind, text, str(channel), str(global_ids))
        if key not in self._axes:
            replicas, partitions = self.module.replicas, self.module.partitions
            everyone = self.devices
            if replicas and partitions and not global_ids:
                everyone = partitions if channel and kind in PARTITION_KINDS else replicas
            groups = to_device_ids(
                parse_pairs(text) if paired else parse_groups(text, everyone),
                kind=kind,
                channel=channel,
                global_ids=global_ids,
                replicas=replicas,
                partitions=partitions,
            )
            if wrong := wrong_members(groups, paired, self.devices):
                message = f"the devices of {found.name} (line {found.line}): {wrong}"
                self._error("damaged-groups", message, found, _DAMAGED)
            groups = over_slices(groups, self._slices, self.devices or 0)
            self._expanded += sum(map(len, groups))
            if self._expanded > MAX_MEMBERS:
                raise AuditError(
                    f"All device groups together have more than {MAX_MEMBERS} members. "
                    "No program needs so many different ones; the text is damaged."
                )
            if paired:
                pairs = np.asarray(groups, dtype=np.int64).reshape(-1, 2)
                self._axes[key] = (axes_of_pairs(pairs, self.mesh, self.devices), pairs)
            else:
                self._axes[key] = (axes_of_groups(groups, self.mesh, text), groups)
        return self._axes[key]

    def _payload(
        self,
        computation: Computation,
        found: Instruction,
        kind: str,
        results: Shape,
        where: Axes,
    ) -> int:
        """Payload from the result, checked against the operands: both say it, or neither counts."""
        result = nbytes(results)
        payload = result * where.group_size if kind == "reduce-scatter" else result
        if len(found.operands) > MAX_OPERANDS:
            raise AuditError(
                f"{found.name} has {len(found.operands)} operands, more than {MAX_OPERANDS}. "
                "No program merges so many; the text is damaged."
            )
        given = [self._shape(computation, operand) for operand in found.operands]
        if None in given or not given:
            message = f"{found.name} (line {found.line}) reads a value that is not in the text"
            self._error("missing-operand", message, found, _DAMAGED)
            return payload
        buffers = [nbytes(shape) for shape in given if shape is not None]
        if kind == "ragged-all-to-all":
            self.findings.append(
                Finding(
                    rule="ragged-upper-bound",
                    severity="info",
                    message=f"{found.name} sends as much of its buffer as the data asks for; "
                    f"its {buffers[0]} bytes are the upper bound",
                    source=self.module.source_of(found),
                    remedy="Nothing to change; measure it where the real amount matters.",
                )
            )
            return buffers[0]
        expected = sum(buffers) * (where.group_size if kind == "all-gather" else 1)
        if expected != payload:
            message = (
                f"{found.name} (line {found.line}): its operands mean {expected} bytes and its "
                f"result {payload}"
            )
            self._error("shape-mismatch", message, found, _DAMAGED)
        return max(payload, expected)

    def _buffers(
        self,
        computation: Computation,
        found: Instruction,
        kind: str,
        results: Shape,
        payload: int,
        op_name: str,
    ) -> tuple[Buffer, ...]:
        """The payload divided among the results, each with its own phase where that was kept."""
        arrays = list(leaves(results))
        if kind == "all-to-all" and "dimensions" not in found.attributes:
            arrays = arrays[:1]  # one buffer, passed in pieces
        differentiated = self.module.differentiated
        names = unmerged(op_name)
        if len(names) != len(arrays):
            names = [op_name] * len(arrays)
            for user in computation.users(found.name):
                if user.opcode == "get-tuple-element" and user.op_name:
                    index = integer(user.attributes.get("index", ""), f"index of {user.name}")
                    if 0 <= index < len(names):
                        names[index] = user.op_name
        total = sum(array.nbytes for array in arrays)
        return tuple(
            Buffer(
                dtype=array.dtype,
                payload_bytes=array.nbytes * payload // total if total else 0,
                phase=phase_of(name, differentiated),
            )
            for array, name in zip(arrays, names, strict=True)
        )

    def _shape(self, computation: Computation, operand: Operand) -> Shape | None:
        producer = computation.get(operand.name)
        if producer is None:
            return None
        shape = producer.shape
        for step in operand.path:
            if isinstance(shape, Array) or step >= len(shape):
                return None
            shape = shape[step]
        return shape

    def _other(self, found: Instruction) -> None:
        """Findings for communication that is none of `KINDS`."""
        opcode = found.opcode
        if opcode.startswith(_RELATED) and opcode not in _LOCAL:
            self._unhandled(f"the operation {opcode}", found)

    def _unhandled(self, what: str, found: Instruction | None = None, remedy: str = _NEWER) -> None:
        name = f" ({found.name}, line {found.line})" if found is not None else ""
        message = f"not counted: {what}{name}"
        self._error("unhandled-communication", message, found, remedy)

    def _error(self, rule: str, message: str, found: Instruction | None, remedy: str) -> None:
        source = self.module.source_of(found) if found is not None else None
        self.findings.append(
            Finding(rule=rule, severity="error", message=message, source=source, remedy=remedy)
        )

    def _undecided(self) -> None:
        """Findings for loops and branches that communicate nobody knows how often."""
        above = self.flow.above(self._homes)
        reasons = {id(one.instruction): one.reason for one in self.runs.undecided}
        for loop in self.runs.unknown_loops:
            if above.intersection(name for _, name in loop.called):
                why = reasons.pop(id(loop), "")
                self._open(
                    loop,
                    "unknown-trip-count",
                    f"loop {loop.name} communicates, and how often it runs is decided by data; "
                    "counts inside are unknown",
                    why,
                    "Use lax.scan or a fori_loop with constant bounds, or read the counts as per "
                    "trip of this loop.",
                )
        for one in self.runs.undecided:
            found = one.instruction
            if id(found) in reasons and above.intersection(name for _, name in found.called):
                self._open(
                    found,
                    "undecided-branch",
                    f"whether what {found.name} chooses communicates is not known; counts inside "
                    "are bounds",
                    one.reason,
                    "Nothing to change where data should decide; else make the choice from "
                    "constants, loop counters and lax.axis_index.",
                )

    def _open(self, found: Instruction, rule: str, message: str, why: str, remedy: str) -> None:
        self.findings.append(
            Finding(
                rule=rule,
                severity="warning" if rule == "unknown-trip-count" else "info",
                message=f"{message}: {why}" if why else message,
                source=self.module.source_of(found),
                remedy=remedy,
                evidence=(f"{found.name} (line {found.line})",),
            )
        )


def _results(found: Instruction, kind: str) -> Shape:
    """The result part of a type: a start's type holds its operands before its results."""
    shape = found.shape
    if not found.opcode.endswith("-start") or isinstance(shape, Array) or len(shape) < 2:
        return shape
    plain = all(isinstance(part, Array) for part in shape)
    if kind == "all-reduce" and plain and len(found.operands) == len(shape):
        return shape  # older XLA prints only the results of an all-reduce-start
    return shape[1]
