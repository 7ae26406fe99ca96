"""Named sets of compiler options, from options.toml."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from jaxpar.errors import TargetError, did_you_mean
from jaxpar.targets.target import Target


def option_sets(target: Target) -> dict[str, dict[str, Any]]:
    """Name → options of the sets that are for this chip, in the order of the file."""
    with files("jaxpar").joinpath("targets/options.toml").open("rb") as file:
        sets = tomllib.load(file)
    return {name: row["options"] for name, row in sets.items() if target.chip in row["chips"]}


def option_set(name: str, target: Target) -> dict[str, Any]:
    """The options of one set. TargetError for a name that the chip has no set of."""
    sets = option_sets(target)
    if name not in sets:
        raise TargetError(f"{target.chip} has no option set {name!r}. {did_you_mean(name, sets)}")
    return sets[name]
