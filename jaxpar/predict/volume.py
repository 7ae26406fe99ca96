"""Communication volume: the strategies' closed forms, summed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from jaxpar.collectives import wire_bytes
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import compose
from jaxpar.strategies.plan import OnMesh, Plan
from jaxpar.strategies.strategy import Expected


def expected(config: ModelConfig, plan: Plan) -> list[Expected]:
    """The closed form of one training step: what each active strategy says, one after the other.

    Raises PlanError for a plan that this model does not allow.
    """
    compose.check(config, plan)
    layout = compose.layout(config, plan)
    return [
        row for s in compose.active_strategies(plan) for row in s.expected(config, plan, layout)
    ]


def wire_bytes_by_axes(rows: Iterable[Expected], plan: OnMesh) -> dict[tuple[str, ...], int]:
    """Bytes each device sends per step over each set of axes, in the best ring algorithms."""
    total: dict[tuple[str, ...], int] = defaultdict(int)
    for row in rows:
        group_size = math.prod(plan.size(axis) for axis in row.axes)
        total[row.axes] += row.count * wire_bytes(row.kind, row.payload_bytes, group_size)
    return dict(total)
