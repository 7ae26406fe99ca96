"""Hardware that is not here: compile any step for it, and audit what its compiler made.

target.py names the hardware, placement.py lays a mesh on its torus, compiler.py runs its compiler
in a child process (child.py) and keeps results (cache.py), links.py tells which links a collective
uses, on_target.py puts it together.
"""

from jaxpar.targets.compiler import Limits
from jaxpar.targets.on_target import OnTarget, compile_for
from jaxpar.targets.target import Target

__all__ = ["Limits", "OnTarget", "Target", "compile_for"]
