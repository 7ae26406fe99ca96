"""Rules that look for communication a program could do without, and name what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from jaxpar.audit.findings import gathers, loops, placement, redundant, reshards
from jaxpar.audit.reader import MAX_READ
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
    found: list[Finding] = []
    for rule in RULES:
        found += _bounded(rule(reading))
        reading.module.forget_inert(unless=MAX_READ)
    return tuple(found)


def _bounded(found: Iterator[Finding]) -> Iterator[Finding]:
    """The first findings of each rule, which a function may serve several of; and the rest."""
    last: dict[str, Finding] = {}
    num_found: dict[str, int] = {}
    for one in found:
        num_found[one.rule] = num_found.get(one.rule, 0) + 1
        if num_found[one.rule] <= MAX_PER_RULE:
            last[one.rule] = one
            yield one
    for rule, count in num_found.items():
        if count > MAX_PER_RULE:
            more = f"and {count - MAX_PER_RULE} more like the {MAX_PER_RULE} above"
            yield dataclasses.replace(
                last[rule], message=more, source=None, evidence=(), wire_bytes=None
            )
