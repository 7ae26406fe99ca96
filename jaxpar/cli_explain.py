"""What `jaxpar explain prefill` and `jaxpar explain decode` do between options and output."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from jaxpar.collectives import wire_bytes
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import preset
from jaxpar.report.text import card_table, expected_table, size
from jaxpar.serve.closed_form import CARDS, expected
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.strategies.plan import plan_fields


def explain(
    name: str,
    *,
    model: str,
    mesh: str | None,
    num_slots: int,
    max_seq_len: int,
    compute_dtype: str | None,
    other: Iterable[str],
) -> tuple[list[Table | str], dict[str, Any]]:
    """A step's card, its closed form, and what the cache takes; and the same as JSON."""
    kind: Kind = "prefill" if name == "prefill" else "decode"
    given = plan_fields(other, ServePlan, example="num_slots=8")
    if compute_dtype is not None:
        given["compute_dtype"] = compute_dtype
    sizes = {"num_slots": num_slots, "max_seq_len": max_seq_len}
    plan = ServePlan(mesh=MeshSpec.load(mesh or "data=2,tensor=4"), **{**sizes, **given})
    config = preset(model)
    rows = expected(config, plan, kind)

    sent: dict[tuple[str, ...], int] = defaultdict(int)
    for row in rows:
        group_size = math.prod(plan.size(axis) for axis in row.axes)
        sent[row.axes] += row.count * wire_bytes(row.kind, row.payload_bytes, group_size)
    wire = "; ".join(f"{size(n)} over {','.join(axes)}" for axes, n in sent.items())
    per_token, cache = plan.bytes_per_token(config), plan.cache_bytes(config)
    shown: list[Table | str] = [
        card_table(CARDS[name]),
        expected_table(rows, f"{config.name} on {plan.mesh}, per step and device"),
        f"On the wire: {wire or 'nothing'}.",
        f"Rows of a step: {plan.num_rows(kind)} of {plan.row_len(kind)} tokens.",
        f"The cache: {size(per_token)} for each token of a sequence; {plan.num_blocks} blocks of "
        f"{plan.block_len} tokens, {size(cache)} on each device.",
    ]
    return shown, {
        "card": asdict(CARDS[name]),
        "expected": [asdict(row) for row in rows],
        "cache_bytes_per_token": per_token,
        "cache_bytes": cache,
    }
