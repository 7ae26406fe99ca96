"""Rules that look for communication a program could do without, and name what to write instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from jaxpar.audit.findings import gathers, loops, placement, redundant, reshards
from jaxpar.audit.reading import Reading
from jaxpar.audit.result import Finding

Rule = Callable[[Reading], Iterator[Finding]]

MAX_PER_RULE = 50
"""Findings of one rule that are told one by one; further ones are only counted."""

RULES: tuple[Rule, ...] = (
    *redundant.RULES,
    *loops.RULES,
    *gathers.RULES,
    *reshards.RULES,
    *placement.RULES,
)
"""In the order in which their findings are listed."""


def findings(reading: Reading) -> tuple[Finding, ...]:
    """What the rules find in a module, rule by rule. AuditError for a damaged text."""
    return tuple(found for rule in RULES for found in _bounded(rule(reading)))


def _bounded(found: Iterator[Finding]) -> Iterator[Finding]:
    """The first findings of a rule, and how many more there are."""
    last = None
    for last in itertools.islice(found, MAX_PER_RULE):
        yield last
    num_more = sum(1 for _ in found)
    if last is not None and num_more:
        yield Finding(
            rule=last.rule,
            severity=last.severity,
            message=f"and {num_more} more like the {MAX_PER_RULE} above",
            source=None,
            remedy=last.remedy,
        )
