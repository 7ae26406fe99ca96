"""What `jaxpar explain prefill` and `jaxpar explain decode` do between options and output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import RenderableType

from jaxpar.console import Answer
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import preset
from jaxpar.predict.volume import wire_bytes_by_axes
from jaxpar.report.text import card_table, expected_table, literal, size, wire_text
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
) -> Answer:
    """A step's card, its closed form, and what the cache takes; and the same as JSON."""
    kind: Kind = "prefill" if name == "prefill" else "decode"
    given = plan_fields(other, ServePlan, example="num_slots=8")
    if compute_dtype is not None:
        given["compute_dtype"] = compute_dtype
    sizes = {"num_slots": num_slots, "max_seq_len": max_seq_len}
    plan = ServePlan(mesh=MeshSpec.load(mesh or "data=2,tensor=4"), **{**sizes, **given})
    config = preset(model)
    rows = expected(config, plan, kind)

    per_token, cache = plan.bytes_per_token(config), plan.cache_bytes(config)
    shown: list[RenderableType] = [
        card_table(CARDS[name]),
        expected_table(rows, f"{config.name} on {plan.mesh}, per step and device"),
        literal(f"On the wire: {wire_text(wire_bytes_by_axes(rows, plan))}."),
        literal(f"Rows of a step: {plan.num_rows(kind)} of {plan.row_len(kind)} tokens."),
        literal(
            f"The cache: {size(per_token)} for each token of a sequence; {plan.num_blocks} blocks "
            f"of {plan.block_len} tokens, {size(cache)} on each device."
        ),
    ]
    data = {
        "card": asdict(CARDS[name]),
        "expected": [asdict(row) for row in rows],
        "cache_bytes_per_token": per_token,
        "cache_bytes": cache,
    }
    return Answer(shown=shown, data=data)
