"""One row of the tour: what a program communicates, and how far its numbers are from the right
ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxpar.audit.compare import Line, agree
from jaxpar.strategies.plan import OnMesh


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """One program on one mesh. lines: predicted, asked and compiled, of each collective."""

    strategy: str
    plan: OnMesh
    lines: list[Line]

    @property
    @abstractmethod
    def numbers_agree(self) -> bool:
        """Whether it computed what one device does."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """How far it is from that, as JSON has it."""

    @abstractmethod
    def told(self) -> list[str]:
        """The same in a few words each."""

    @abstractmethod
    def plan_json(self) -> dict[str, Any]:
        """All fields of the plan, as JSON has them."""

    @property
    def agrees(self) -> bool:
        return self.numbers_agree and agree(self.lines)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan_json()
        mesh = plan.pop("mesh")
        return {
            "strategy": self.strategy,
            "plan": plan,
            "mesh": mesh,
            "agrees": self.agrees,
            **self.numbers(),
            "comparison": [line.to_json() for line in self.lines],
        }


def finite(error: float) -> float | None:
    """JSON has no infinity; null is an error beyond measure."""
    return error if math.isfinite(error) else None


def short(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"
