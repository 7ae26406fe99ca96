"""An audit for a terminal: operations, sums, the device matrix, memory, findings.

Every name in it comes from somebody's program and is shown as it is (`literal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from jaxpar.audit.grouping import Bounds, Group, axis_label, executions
from jaxpar.audit.result import Audit, AxesExposure, Finding, Memory
from jaxpar.report.text import literal, plain_table, size

MAX_FINDINGS = 10
"""Of one rule that are shown; the JSON has all."""

MAX_EVIDENCE = 5

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def audit_table(audit: Audit) -> Table:
    """One line per collective operation; counts are executions per step on each device."""
    table = plain_table(
        audit_title(audit),
        ["collective", "axis", "phase"],
        ["count", "payload", "wire"],
        ["dtype", "scope", "source"],
    )
    for found in audit.collectives:
        same = found.dtype == found.program_dtype
        table.add_row(
            *map(
                literal,
                [
                    found.kind,
                    axis_label(found),
                    found.phase,
                    count_text(executions(found)) + (" by device" if found.device_counts else ""),
                    size(found.payload_bytes),
                    size(found.wire_bytes),
                    found.dtype if same else f"{found.program_dtype} as {found.dtype}",
                    found.scope,
                    found.source or "",
                ],
            )
        )
    return table


def audit_title(audit: Audit) -> str:
    return f"{audit.program.name}, {audit.program.platform}, {audit.program.num_devices} devices"


def count_text(count: Bounds) -> str:
    """Executions of one operation: 4, or 0…1, or 0…? where no bound is known."""
    if count.exact is not None:
        return str(count.exact)
    return f"{count.low}…{'?' if count.high is None else count.high}"


def sum_text(total: Bounds, show: Callable[[int], str] = str) -> str:
    """A sum: exact, between two bounds, ≥ a lower bound, or ? where nothing is known."""
    if total.exact is not None:
        return show(total.exact)
    if total.high is not None:
        return f"{show(total.low)}…{show(total.high)}"
    return f"≥ {show(total.low)}" if total.low else "?"


def percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{100 * fraction:.1f}".removesuffix(".0") + "%"


def groups_table(title: str, by: str, groups: Sequence[Group]) -> Table:
    """Sums per group: operations, executions, bytes of a whole step, share of the wire."""
    numbers = ["operations", "count", "payload", "wire", "share of wire"]
    table = plain_table(f"{title}, per step by {by}", [by], numbers, [])
    for group in groups:
        table.add_row(
            literal(group.key),
            str(group.num_operations),
            sum_text(group.count),
            sum_text(group.payload_bytes, size),
            sum_text(group.wire_bytes, size),
            percent(group.wire_share),
        )
    return table


def matrix_table(matrix: NDArray[Any], names: Sequence[str], title: str) -> Table:
    """Bytes that each row sends to each column, [n, n]; `names` are those of the rows."""
    table = plain_table(title, ["from \\ to"], list(map(str, names)), [])
    for name, row in zip(names, matrix.tolist(), strict=True):
        table.add_row(literal(name), *(size(sent) if sent else "·" for sent in row))
    return table


def memory_text(memory: Memory) -> Iterable[Text]:
    """What XLA says of one device's memory, and the largest buffers of the fullest moment."""
    named = {
        "arguments": memory.argument_bytes,
        "outputs": memory.output_bytes,
        "temporaries": memory.temp_bytes,
        "peak": memory.peak_bytes,
        "live at once": memory.live_bytes,
    }
    known = (f"{name} {size(value)}" for name, value in named.items() if value is not None)
    yield literal(f"Memory of a device: {', '.join(known)}.")
    for buffer in memory.largest:
        source = f"  {buffer.source}" if buffer.source else ""
        yield literal(f"  {size(buffer.nbytes):>10}  {buffer.shape}  {buffer.name}{source}")


def exposure_text(audit: Audit) -> Iterable[Text]:
    """How much of the communication nothing hides, where any of it could be hidden."""
    known = [row for row in audit.exposure if row.exposed_fraction is not None]
    if known and any(found.is_async for found in audit.collectives):
        yield literal(f"Exposed communication: {', '.join(map(_exposed, known))}.")


def _exposed(row: AxesExposure) -> str:
    axes = ",".join(row.axes) if row.axes else "other devices"
    time = "" if row.transfer_s is None else f" of {row.transfer_s * 1e3:.3g} ms"
    return f"{axes} {percent(row.exposed_fraction)}{time}"


def findings_text(findings: Sequence[Finding]) -> Iterable[Text]:
    """Findings rule by rule, errors first, then by the bytes at stake."""
    rules: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        rules.setdefault((finding.severity, finding.rule), []).append(finding)
    for (severity, rule), found in sorted(rules.items(), key=_worst_first):
        yield _heading(severity, rule, found)
        for finding in sorted(found, key=lambda one: -(one.wire_bytes or 0))[:MAX_FINDINGS]:
            yield from _finding(finding, at_stake=len(found) > 1)
        if len(found) > MAX_FINDINGS:
            yield Text(f"  … and {len(found) - MAX_FINDINGS} more; --json writes all.")
        for remedy in dict.fromkeys(finding.remedy for finding in found[:MAX_FINDINGS]):
            yield literal(f"  → {remedy}")


def _worst_first(item: tuple[tuple[str, str], list[Finding]]) -> tuple[int, int]:
    (severity, _), found = item
    order = list(_STYLES)
    rank = order.index(severity) if severity in order else len(order)
    return rank, -sum(finding.wire_bytes or 0 for finding in found)


def _heading(severity: str, rule: str, found: Sequence[Finding]) -> Text:
    heading = literal(f"{severity}: ", style=_STYLES.get(severity, ""))
    heading.append_text(literal(rule, style="bold"))
    if len(found) > 1:
        heading.append(f", {len(found)} times")
    at_stake = sum(finding.wire_bytes or 0 for finding in found)
    if at_stake:
        heading.append(f", {size(at_stake)} on the wire per step at stake")
    return heading


def _finding(finding: Finding, at_stake: bool) -> Iterable[Text]:
    source = f" [{finding.source}]" if finding.source else ""
    stake = f" ({size(finding.wire_bytes)})" if at_stake and finding.wire_bytes else ""
    yield literal(f"  {finding.message.removesuffix('.')}{stake}.{source}")
    if finding.evidence:
        more = len(finding.evidence) - MAX_EVIDENCE
        seen = ", ".join(finding.evidence[:MAX_EVIDENCE]) + (f", … {more} more" * (more > 0))
        yield literal(f"    seen: {seen}")
