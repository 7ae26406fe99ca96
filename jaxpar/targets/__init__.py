"""Hardware that is not here: compile any step for it, and audit what its compiler made.

target.py names the hardware, placement.py lays a mesh on its torus, compiler.py runs its compiler
in a child process (child.py) and keeps results (cache.py), links.py tells which links a collective
uses, changes.py which kinds became others, on_target.py puts it together.

The names below are imported on first use: the child process needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.targets.cache import Cache
    from jaxpar.targets.compiler import Limits
    from jaxpar.targets.on_target import OnTarget, StepOnTarget, compile_for
    from jaxpar.targets.target import Target

_HOME = {
    "Cache": "jaxpar.targets.cache",
    "Limits": "jaxpar.targets.compiler",
    "OnTarget": "jaxpar.targets.on_target",
    "StepOnTarget": "jaxpar.targets.on_target",
    "Target": "jaxpar.targets.target",
    "compile_for": "jaxpar.targets.on_target",
}

__all__ = ["Cache", "Limits", "OnTarget", "StepOnTarget", "Target", "compile_for"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxpar.targets' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
