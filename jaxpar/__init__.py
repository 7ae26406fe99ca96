"""Every LLM parallelism strategy as a named-axis mesh with explicit collectives, and an auditor.

The public names; all but `audit` are imported on first use, so that `import jaxpar` is cheap and
starts no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, because the function and the package it lives in have the same name: whichever is bound
# last is what `jaxpar.audit` means. (It does not import JAX.)
from jaxpar.audit import audit

if TYPE_CHECKING:
    from jaxpar.audit import Audit
    from jaxpar.audit.asked import asked
    from jaxpar.audit.compare import compare
    from jaxpar.checkpoint import Checkpoints
    from jaxpar.cli import main
    from jaxpar.errors import JaxparError
    from jaxpar.experiment import Experiment
    from jaxpar.mesh import MeshSpec, use_cpu_devices
    from jaxpar.model.config import ModelConfig, preset
    from jaxpar.predict.volume import expected
    from jaxpar.serve.engine import Engine
    from jaxpar.serve.plan import ServePlan
    from jaxpar.serve.sampling import Sampling
    from jaxpar.serve.scheduler import Request
    from jaxpar.serve.step import ServeStep
    from jaxpar.strategies.plan import Plan
    from jaxpar.text import Batch, Corpus
    from jaxpar.train import TrainState, TrainStep

__version__ = "0.1.0"

_HOME = {
    "Audit": "jaxpar.audit",
    "asked": "jaxpar.audit.asked",
    "compare": "jaxpar.audit.compare",
    "Checkpoints": "jaxpar.checkpoint",
    "main": "jaxpar.cli",
    "JaxparError": "jaxpar.errors",
    "Experiment": "jaxpar.experiment",
    "MeshSpec": "jaxpar.mesh",
    "use_cpu_devices": "jaxpar.mesh",
    "ModelConfig": "jaxpar.model.config",
    "preset": "jaxpar.model.config",
    "expected": "jaxpar.predict.volume",
    "Engine": "jaxpar.serve.engine",
    "ServePlan": "jaxpar.serve.plan",
    "Sampling": "jaxpar.serve.sampling",
    "Request": "jaxpar.serve.scheduler",
    "ServeStep": "jaxpar.serve.step",
    "Plan": "jaxpar.strategies.plan",
    "Batch": "jaxpar.text",
    "Corpus": "jaxpar.text",
    "TrainState": "jaxpar.train",
    "TrainStep": "jaxpar.train",
}

__all__ = [
    "Audit",
    "Batch",
    "Checkpoints",
    "Corpus",
    "Engine",
    "Experiment",
    "JaxparError",
    "MeshSpec",
    "ModelConfig",
    "Plan",
    "Request",
    "Sampling",
    "ServePlan",
    "ServeStep",
    "TrainState",
    "TrainStep",
    "asked",
    "audit",
    "compare",
    "expected",
    "main",
    "preset",
    "use_cpu_devices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
