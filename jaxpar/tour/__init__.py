"""The tour: every strategy trained, held against one device, audited, held against its closed form;
and prefill and decode served, the same.

This computes; `jaxpar.report` prints. The rows of training are whatever the strategies say they are
(see `Variant` in strategies/strategy.py), so a new strategy file appears here by being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar import recipes
from jaxpar.errors import PlanError, did_you_mean
from jaxpar.mesh import MeshSpec, use_cpu_devices
from jaxpar.model.config import ModelConfig, preset
from jaxpar.serve import variants
from jaxpar.serve.variants import ServingVariant
from jaxpar.strategies import compose
from jaxpar.strategies.strategy import Variant
from jaxpar.text import Corpus
from jaxpar.tour.row import Row
from jaxpar.tour.serving import Services, ServingRow
from jaxpar.tour.training import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    References,
    Trained,
    TrainingRow,
    default_optimizer,
    take_row,
    train,
)
from jaxpar.train import TrainStep

__all__ = [
    "LOSS_TOLERANCE",
    "PARAMETER_TOLERANCE",
    "References",
    "Row",
    "Services",
    "ServingRow",
    "Tour",
    "Trained",
    "TrainingRow",
    "chosen",
    "default_optimizer",
    "take_row",
    "take_tour",
    "train",
]

SCHEMA = "jaxpar.tour/1"


@dataclass(frozen=True, kw_only=True)
class Tour:
    """All rows, and what they were run on."""

    seconds: float
    model: str
    corpus: str
    num_steps: int
    rows: list[Row]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "seconds": self.seconds,
            "model": self.model,
            "corpus": self.corpus,
            "num_steps": self.num_steps,
            "jax": jax.__version__,
            "rows": [row.to_json() for row in self.rows],
        }


def take_tour(
    *,
    corpus: Corpus | None = None,
    config: ModelConfig | None = None,
    only: Sequence[str] = (),
    num_steps: int = 5,
    batch_size: int = 16,
    seq_len: int = 64,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Tour:
    """Run every variant of every strategy (or those named in `only`) on CPU devices.

    `config` is the model of all rows but those that name their own, `tiny` unless given.
    `progress(name, done, total)` is called before each row and once at the end. Raises PlanError
    for a name that no strategy has, MeshError when JAX is already running with too few devices.
    """
    started = time.perf_counter()
    config, corpus = config or preset("tiny"), corpus or Corpus.standard_library()
    wanted = chosen(only)
    models = [preset(v.model) if v.model else config for v in wanted]
    use_cpu_devices(max(MeshSpec.parse(v.mesh).num_devices for v in wanted))

    batches = [
        corpus.batch(step, batch_size=batch_size, seq_len=seq_len) for step in range(num_steps)
    ]
    optimizer = default_optimizer()
    references, services = References(), Services(corpus)
    rows: list[Row] = []
    for i, (variant, model) in enumerate(zip(wanted, models, strict=True)):
        progress(variant.name, i, len(wanted))
        if isinstance(variant, ServingVariant):
            rows.append(services.take_row(variant, model))
            continue
        plan = variant.plan(batch_size=batch_size, seq_len=seq_len)
        step = TrainStep(config=model, plan=plan, optimizer=optimizer)
        rows.append(take_row(variant.name, step, batches, references(step, batches)))
    progress("done", len(wanted), len(wanted))
    return Tour(
        seconds=time.perf_counter() - started,
        model=" and ".join(dict.fromkeys(model.name for model in models)),
        corpus=corpus.name,
        num_steps=num_steps,
        rows=rows,
    )


def chosen(only: Sequence[str]) -> list[Variant | ServingVariant]:
    """Rows of these names, or all. PlanError for a name that no row has."""
    of_strategies = (v for s in compose.all_strategies().values() for v in s.variants)
    rows: list[Variant | ServingVariant] = [*of_strategies, *recipes.VARIANTS, *variants.VARIANTS]
    names = [row.name for row in rows]
    for name in only:
        if name not in names:
            raise PlanError(f"The tour has no row {name!r}. {did_you_mean(name, names)}")
    return [row for row in rows if not only or row.name in only]
