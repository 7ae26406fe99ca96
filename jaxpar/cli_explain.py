"""What `jaxpar explain` does between its options and its output: of training, and of serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from jaxpar.console import Answer, typed
from jaxpar.errors import PlanError
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import preset
from jaxpar.predict import volume
from jaxpar.recipes import RECIPES
from jaxpar.report.text import card_table, expected_table, literal, size, wire_text
from jaxpar.serve import closed_form
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.variants import VARIANTS
from jaxpar.strategies import compose
from jaxpar.strategies.plan import Plan, plan_fields

SERVING = {variant.name: variant for variant in VARIANTS}


def of_training(
    name: str,
    *,
    model: str,
    mesh: str | None,
    batch_size: int,
    seq_len: int,
    fields: Mapping[str, Any],
    other: Iterable[str],
) -> Answer:
    """A strategy's card, and its part of a step's closed form. fields: None where not given."""
    if name in RECIPES:
        raise PlanError(f"{name} combines strategies: see `jaxpar recipe {name}`.")
    strategy, variant = compose.strategy(name, also=SERVING)
    given = {field: value for field, value in fields.items() if value is not None}
    plan = Plan(
        mesh=MeshSpec.load(mesh or variant.mesh),
        batch_size=batch_size,
        seq_len=seq_len,
        **{**variant.fields, **given, **plan_fields(other)},
    )
    config = preset(model)
    whole_step = volume.expected(config, plan)
    is_active = strategy.is_active(plan)
    rows = strategy.expected(config, plan, compose.layout(config, plan)) if is_active else []
    shown: list[RenderableType] = [
        card_table(strategy.card),
        expected_table(rows, f"{config.name} on {plan.mesh}, per step and device"),
    ]
    if not is_active:
        shown.append(literal(f"This plan does not use {name}. Its axis: {strategy.card.axis}."))
    for whose, some in ((name, rows), ("the whole step", whole_step)):
        wire = wire_text(volume.wire_bytes_by_axes(some, plan))
        shown.append(literal(f"On the wire, {whose}: {wire}."))
    data = {
        "card": asdict(strategy.card),
        "expected": [asdict(row) for row in rows],
        "whole_step": [asdict(row) for row in whole_step],
    }
    return Answer(shown=shown, data=data)


def of_serving(
    name: str,
    *,
    model: str,
    mesh: str | None,
    batch_size: int,
    seq_len: int,
    compute_dtype: str | None,
    training_only: Mapping[str, Any],
    other: Iterable[str],
) -> Answer:
    """A step's card, its closed form, and what the cache takes. training_only: what may not be
    given, by field."""
    for field, value in training_only.items():
        if value is not None:
            option = field.removeprefix("num_").replace("_", "-")
            raise PlanError(f"--{option} is about training, and {name} is not. Leave it out.")
    variant, kind = SERVING[name], SERVING[name].kind
    given = variant.fields | plan_fields(other, ServePlan, example="num_slots=8")
    if compute_dtype is not None:
        given["compute_dtype"] = compute_dtype
    sizes = {"num_slots": batch_size, "max_seq_len": seq_len}
    with typed({"num_slots": ("--batch-size", batch_size), "max_seq_len": ("--seq-len", seq_len)}):
        plan = ServePlan(mesh=MeshSpec.load(mesh or variant.mesh), **{**sizes, **given})
        config = preset(model)
        rows = closed_form.expected(config, plan, kind)

    per_token, cache = plan.bytes_per_token(config), plan.cache_bytes(config)
    shown: list[RenderableType] = [
        card_table(closed_form.CARDS[kind]),
        expected_table(rows, f"{config.name} on {plan.mesh}, per step and device"),
        literal(f"On the wire: {wire_text(volume.wire_bytes_by_axes(rows, plan))}."),
        literal(f"Rows of a step: {plan.num_rows(kind)} of {plan.row_len(kind)} tokens."),
        literal(
            f"The cache: {size(per_token)} for each token of a sequence; {plan.num_blocks} blocks "
            f"of {plan.block_len} tokens, {size(cache)} on each device."
        ),
    ]
    data = {
        "card": asdict(closed_form.CARDS[kind]),
        "expected": [asdict(row) for row in rows],
        "cache_bytes_per_token": per_token,
        "cache_bytes": cache,
    }
    return Answer(shown=shown, data=data)
