"""Rules about communication whose result is already there, or could be had with fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.audit.dataflow import Place
from jaxpar.audit.findings.common import above, axes_text, finding, home_of, step_bytes
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding

_REPEATS = frozenset({"all-gather", "all-reduce", "reduce-scatter"})


def loop_invariant_collective(reading: Reading) -> Iterator[Finding]:
    """A collective in a loop whose operands no trip changes."""
    for site in reading.sites:
        if site.collective.kind not in _REPEATS or not site.instruction.operands:
            continue
        num_useful = _useful_runs(reading, site)
        if num_useful is None or num_useful == site.collective.count:
            continue
        count = site.collective.count
        known = count is not None and num_useful > 0
        yield finding(
            reading,
            "loop-invariant-collective",
            f"{site.collective.kind} {axes_text(site)} is in a loop and its operand is the same on "
            f"every trip; it runs {count if count else 'unknown'} times a step",
            "Do the collective before the loop and let the loop body close over its result.",
            [site.instruction],
            wire_bytes=step_bytes(site, 1 - num_useful / count) if known and count else None,
        )


def _useful_runs(reading: Reading, site: Site) -> int | None:
    """How often the operands of `site` are new; 0 for unknown, None when on every execution."""
    loops = 0
    homes = {site.computation.name: 0}
    for home, call in above(reading, site.computation):
        if call.opcode == "conditional":
            break
        loops += call.opcode == "while"
        homes.setdefault(home.name, loops)
    useful = 0
    for operand in site.instruction.operands:
        end = reading.flow.origin(Place(computation=site.computation, operand=operand))
        if end is None or not homes.get(home_of(end).name):
            return None
        count = reading.runs.counts.get(home_of(end).name)
        useful = max(useful, (count.exact or 0) if count else 0)
    return useful


RULES = (loop_invariant_collective,)
