"""What `jaxpar recipe` does between its options and its output."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType

from jaxpar.console import Answer
from jaxpar.errors import PlanError
from jaxpar.model.config import preset
from jaxpar.predict.volume import expected, wire_bytes_by_axes
from jaxpar.recipes import RECIPES, recipe
from jaxpar.report.text import expected_table, literal, plain_table, wire_text
from jaxpar.strategies.plan import Plan, plan_fields, plan_in_words, plan_json

SCHEMA = "jaxpar.recipe/1"


def all_recipes() -> Answer:
    """What each is, in a sentence."""
    table = plain_table("Recipes", ["recipe"], [], ["what it is"])
    told = {name: _about(make) for name, make in RECIPES.items()}
    for name, about in told.items():
        table.add_row(name, about)
    return Answer(shown=[table], data={"schema": SCHEMA, "recipes": told})


def one_recipe(
    name: str,
    *,
    model: str,
    num_devices: int,
    batch_size: int,
    seq_len: int,
    sizes: dict[str, int | None],
    other: Iterable[str],
) -> Answer:
    """The plan that a recipe makes, and its closed form. `sizes` are the arguments of some."""
    make, config = recipe(name), preset(model)
    given = {size: value for size, value in sizes.items() if value is not None}
    known = inspect.signature(make).parameters
    if wrong := sorted(given.keys() - known.keys()):
        raise PlanError(
            f"recipe {name} has no axis whose size is --{wrong[0].replace('_', '-')}: "
            f"{_about(make)}"
        )
    plan: Plan = make(
        config,
        num_devices=num_devices,
        batch_size=batch_size,
        seq_len=seq_len,
        **given,
        **plan_fields(other),
    )
    rows = expected(config, plan)
    wire = wire_bytes_by_axes(rows, plan)
    data = {
        "schema": SCHEMA,
        "recipe": name,
        "model": config.name,
        "plan": plan_json(plan),
        "wire_bytes": {",".join(axes): n for axes, n in wire.items()},
    }
    shown: list[RenderableType] = [
        literal(f"{name}: {_about(make)}"),
        literal(f"Plan: {plan_in_words(plan)}"),
        expected_table(rows, f"{config.name} on {plan.mesh}, per step and device"),
        literal(f"On the wire: {wire_text(wire)}."),
    ]
    return Answer(shown=shown, data=data)


def _about(make: Any) -> str:
    paragraph = inspect.cleandoc(make.__doc__).split("\n\n")[0]
    return " ".join(paragraph.split())
