"""What several test files share: small models, plans, and their training on one device."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar import Corpus, MeshSpec, ModelConfig, Plan, TrainStep
from jaxpar.reference import plain_step, reference_init
from jaxpar.tour import Trained, default_optimizer, train
from jaxpar.update import TrainState

BATCH_SIZE, SEQ_LEN = 16, 16

SMALL = ModelConfig(
    name="small", num_layers=2, embed=32, num_heads=8, num_kv_heads=2, head_dim=4,
    mlp_hidden=32, vocab=256, max_seq_len=64,
)  # fmt: skip
"""Two key/value heads: whole on every device as soon as axis tensor has more than two."""

TIED = ModelConfig(
    name="tied", num_layers=2, embed=32, num_heads=8, num_kv_heads=8, head_dim=4,
    mlp_hidden=64, vocab=256, max_seq_len=64, mlp="gelu", tied_embedding=True,
)  # fmt: skip


def plan(mesh: str, **fields: Any) -> Plan:
    """A float32 plan on `mesh`; `fields` override."""
    defaults = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "compute_dtype": "float32"}
    return Plan(mesh=MeshSpec.parse(mesh), **{**defaults, **fields})


def step(mesh: str, config: ModelConfig = SMALL, **fields: Any) -> TrainStep:
    return TrainStep(config=config, plan=plan(mesh, **fields), optimizer=default_optimizer())


@functools.cache
def corpus() -> Corpus:
    return Corpus.standard_library()


def batches(num_steps: int) -> Sequence[Any]:
    return [corpus().batch(i, batch_size=BATCH_SIZE, seq_len=SEQ_LEN) for i in range(num_steps)]


def start(step: TrainStep) -> TrainState:
    """What `step.init()` makes, which takes ten times as long to compile on a mesh."""
    return step.init_from(reference(step.config, 0).start)


@functools.cache
def reference(config: ModelConfig, num_steps: int) -> Trained:
    optimizer = default_optimizer()
    run = jax.jit(plain_step(config, optimizer))
    return train(reference_init(config, optimizer), run, batches(num_steps))


def run_program(program: str, folder: Path) -> str:
    """What a program of the documentation prints, in a Python of its own; no warning allowed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
