"""Which worker gets a request: the one with the least left to do, or each in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jaxpar.errors import RequestError, require_choice

Routing = Literal["load", "turn"]


class Router:
    """Chooses among workers that are there, by name.

    load: the one with the fewest tokens still to be computed; of equals the one that has been given
        the fewest requests. Requests differ in length by orders of magnitude, so that equal numbers
        of requests are no equal work.
    turn: one after the other, whatever they have to do.
    """

    def __init__(self, routing: Routing = "load") -> None:
        require_choice(RequestError, "routing", routing, ("load", "turn"))
        self.routing = routing
        self.num_given: dict[str, int] = {}

    def choose(self, loads: Mapping[str, int]) -> str:
        """The name of one of `loads` (worker -> tokens left to compute), which is not empty."""
        assert loads

        def rank(name: str) -> tuple[int, int]:
            load = loads[name] if self.routing == "load" else 0
            return load, self.num_given.get(name, 0)

        name = min(loads, key=rank)
        self.num_given[name] = self.num_given.get(name, 0) + 1
        return name
