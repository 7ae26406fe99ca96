"""Small trainings that several test files save, restore and run; each plan is compiled once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpar import Experiment, ModelConfig, TrainStep
from jaxpar.text import Batch, Corpus
from jaxpar.tour import default_optimizer
from tests.helpers import plan

ODD = ModelConfig(
    name="odd", num_layers=3, embed=16, num_heads=4, num_kv_heads=4, head_dim=4, mlp_hidden=16,
    vocab=256, max_seq_len=16,
)  # fmt: skip
"""Three layers: a pipeline of two stages has to pad them, and cannot split them evenly."""

BATCH_SIZE, SEQ_LEN = 8, 8

PLANS: dict[str, dict[str, Any]] = {
    "tensor=4": {},
    "fsdp=8": {},
    "data=4": {},
    "pipe=2,tensor=2": {"num_microbatches": 2},
    "data=2,fsdp=2": {"zero": 1, "offload": "optimizer"},
}


def experiment(mesh: str, config: ModelConfig = ODD, **fields: Any) -> Experiment:
    made = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, **PLANS.get(mesh, {})}
    return Experiment(
        config=config,
        plan=plan(mesh, **made),
        optimizer=fields.pop("optimizer", default_optimizer()),
        corpus=corpus(),
        **{"num_steps": 4, "checkpoint_every": 2, **fields},
    )


@functools.cache
def step(mesh: str) -> TrainStep:
    return experiment(mesh).step()


@functools.cache
def corpus() -> Corpus:
    return Corpus(np.random.default_rng(0).integers(0, 64, 4096).astype(np.uint8), "noise")


def batches(first: int, last: int) -> Sequence[Batch]:
    made = experiment("data=4")
    return [made.batch(i) for i in range(first, last)]


def losses(step: TrainStep, state: Any, some: Sequence[Batch]) -> tuple[Any, list[float]]:
    found = []
    for batch in some:
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    return state, found
