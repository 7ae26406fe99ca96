"""What a budget and a diff found, for a terminal and for the message of a failing test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from jaxpar.audit.budget import Violation
from jaxpar.audit.diff import Change, Diff, Side
from jaxpar.audit.grouping import Bounds, Portion, axis_label
from jaxpar.report.audit import count_text, percent, sum_text
from jaxpar.report.text import literal, plain_table, size

MAX_COLLECTIVES = 5
"""That are shown as what makes up one violation; the JSON has all."""

MAX_CHANGES = 50

_STYLES = {"appeared": "red", "vanished": "green", "merged": "dim", "split": "dim"}
_NOTES = {"regrouped": "dim", "phase": "dim"}


def budget_text(violations: Sequence[Violation]) -> Iterable[Text]:
    """One paragraph per limit that is not kept: limit, actual, and the collectives behind it."""
    if not violations:
        yield Text("Within the budget.", style="green")
    for violation in violations:
        yield _violation(violation)
        for portion in violation.portions[:MAX_COLLECTIVES]:
            yield literal(f"    {_portion(portion)}")
        more = len(violation.portions) - MAX_COLLECTIVES
        if more > 0:
            yield Text(f"    … and {more} more; --json writes all.")


def _violation(violation: Violation) -> Text:
    if violation.key == "forbidden":
        text = literal("Over budget: ", style="bold red")
        return text.append_text(literal(f"{violation.what} is forbidden; it is there"))
    word = "Not known: " if violation.is_unknown else "Over budget: "
    text = literal(word, style="bold red")
    allowed, actual = _amount(violation.key, violation.allowed), _actual(violation)
    why = " (unknown count)" if violation.is_unknown and violation.actual_max is None else ""
    rule = f"{violation.what}: {violation.key} = {allowed}, actual {actual}{why}"
    return text.append_text(literal(rule))


def _actual(violation: Violation) -> str:
    low, high = violation.actual_min, violation.actual_max
    if high is None:
        return sum_text(Bounds(low=int(low), high=None), lambda n: _amount(violation.key, n))
    shown = [_amount(violation.key, value) for value in (low, high)]
    return shown[0] if low == high else "…".join(shown)


def _amount(key: str, value: int | float) -> str:
    if isinstance(value, float) or key == "max_exposed_fraction":
        return percent(value)
    return size(value) if key.endswith("_bytes") else str(value)


def _portion(portion: Portion) -> str:
    found = portion.collective
    exposed = found.exposed_fraction
    waits = "" if exposed in (None, 1.0) else f", {percent(exposed)} exposed"
    where = "  ".join(text for text in (found.source, found.scope) if text)
    return (
        f"{count_text(portion.count)} × {size(portion.payload_bytes)} "
        f"({size(portion.wire_bytes)} on the wire{waits})  "
        f"{found.kind} over {axis_label(found)}  {where}"
    ).rstrip()


def diff_text(diff: Diff, before: str, after: str) -> list[Table | Text]:
    """What changed between two programs of these names, the totals, and a verdict."""
    verdict = Text("The communication is the same.", style="green")
    if not diff.same:
        verdict = Text("The communication differs.", style="bold red")
    elif diff.changes:
        verdict.append(" What is listed moves the same bytes along the same axes.")
    changes = [_changes(diff, f"{before} → {after}")] if diff.changes else []
    totals = [] if diff.same else [_totals(diff)]
    return [*changes, *totals, verdict]


def _changes(diff: Diff, title: str) -> Table:
    named = ["change", "collective", "axis", "phase"]
    table = plain_table(title, named, ["before", "after"], ["scope"])
    for change in diff.changes[:MAX_CHANGES]:
        table.add_row(
            literal(", ".join(change.what), style=_style(change)),
            *(literal(_both(change, field)) for field in ("kind", "axes", "phase")),
            *(literal(_side(side, change)) for side in (change.before, change.after)),
            literal(_both(change, "scope")),
        )
    if len(diff.changes) > MAX_CHANGES:
        table.add_row(f"… and {len(diff.changes) - MAX_CHANGES} more")
    return table


def _style(change: Change) -> str:
    return {**_STYLES, **_NOTES}.get(change.what[0], "yellow")


def _both(change: Change, field: str) -> str:
    sides = (change.before, change.after)
    texts = dict.fromkeys(getattr(side, field) for side in sides if side is not None)
    return " → ".join(text or "–" for text in texts) if any(texts) else ""


def _side(side: Side | None, change: Change) -> str:
    if side is None:
        return "–"
    groups = ""
    if "group size" in change.what:
        groups = f" in groups of {' and '.join(map(str, side.group_sizes))}"
    if len(side.sizes) == 1:
        return f"{count_text(side.count)} × {size(side.sizes[0])} {side.dtype}{groups}"
    total = sum_text(side.payload_bytes, size)
    return f"{count_text(side.count)}, together {total} {side.dtype}{groups}"


def _totals(diff: Diff) -> Table:
    numbers = ["count", "payload", "wire"]
    table = plain_table("Totals per step and device", ["collective", "axis"], numbers, [])
    for total in diff.totals:
        table.add_row(
            literal(total.kind),
            literal(total.axes),
            *(_moved(total.before, total.after, field) for field in _SUMS),
        )
    return table


_SUMS = ("count", "payload_bytes", "wire_bytes")


def _moved(before: Side | None, after: Side | None, field: str) -> Text:
    show = str if field == "count" else size
    texts = [
        "–" if side is None else sum_text(getattr(side, field), show) for side in (before, after)
    ]
    return Text(texts[0]) if texts[0] == texts[1] else Text(" → ".join(texts), style="yellow")
