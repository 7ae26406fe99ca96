"""What to train: one frozen value that a script defines, and `jaxpar run` carries out.

experiment = Experiment(config=preset("tiny"), plan=Plan(...), optimizer=optax.adamw(1e-3),
                        num_steps=100)

if __name__ == "__main__":
    jaxpar.main(["run", *sys.argv])
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import optax

from jaxpar.errors import ExperimentError, JaxparError, in_a_line, require_whole, shown
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.strategies.plan import Plan, plan_fields
from jaxpar.text import Batch, Corpus
from jaxpar.train import TrainStep

NAME = "experiment"
"""What a script calls its Experiment."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training, from its seed to its last step. Raises ExperimentError for what cannot be.

    num_steps: in all, those before a restart among them.
    clip_norm: largest global norm of the gradients; infinity never clips.
    seed: of the parameters and of the order of the data.
    corpus: the text; None for the source of Python's standard library.
    checkpoint_every, keep_checkpoints: steps from one to the next, and how many stay on disk.
    """

    config: ModelConfig
    plan: Plan
    optimizer: optax.GradientTransformation
    num_steps: int
    clip_norm: float = 1.0
    seed: int = 0
    corpus: Corpus | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        for field, at_least in (
            ("num_steps", 1), ("seed", 0), ("checkpoint_every", 1), ("keep_checkpoints", 1),
        ):  # fmt: skip
            require_whole(ExperimentError, field, getattr(self, field), at_least)
        if self.corpus is not None and not isinstance(self.corpus, Corpus):
            raise ExperimentError(
                f"corpus={shown(self.corpus)} ({type(self.corpus).__name__}) must be a Corpus, "
                f"such as Corpus.from_file('text.txt'), or None for the standard library."
            )

    def on_mesh(self, mesh: MeshSpec) -> Experiment:
        """The same training on another mesh: the same tokens in the same order."""
        return replace(self, plan=replace(self.plan, mesh=mesh))

    def with_options(self, mesh: str | None, fields: Sequence[str]) -> Experiment:
        """The same with what a command line says in place of its plan's: a mesh (a file, a shipped
        name or axes; None for its own), and "field=value" of others. They are put in together: a
        mesh may need another field. Raises MeshError and PlanError for what cannot be."""
        on = self.plan.mesh if mesh is None else MeshSpec.load(mesh)
        return replace(self, plan=replace(self.plan, mesh=on, **plan_fields(fields)))

    def step(self) -> TrainStep:
        """The step that is trained with; raises PlanError for what its mesh does not allow."""
        return TrainStep(
            config=self.config,
            plan=self.plan,
            optimizer=self.optimizer,
            clip_norm=self.clip_norm,
        )

    @cached_property
    def text(self) -> Corpus:
        return self.corpus or Corpus.standard_library()

    def batch(self, index: int) -> Batch:
        """The batch of step `index`, counted from 0; it does not depend on the mesh."""
        plan = self.plan
        return self.text.batch(
            index,
            batch_size=plan.batch_size,
            seq_len=plan.seq_len,
            seed=self.seed,
            packed=plan.packed,
        )

    def data(self) -> dict[str, Any]:
        """What the order of the tokens follows from, beside the step."""
        return {
            "corpus": self.text.name,
            "num_bytes": self.text.data.size,
            "sha256": hashlib.sha256(self.text.data.tobytes()).hexdigest(),
            "seed": self.seed,
            "batch_size": self.plan.batch_size,
            "seq_len": self.plan.seq_len,
            "packed": self.plan.packed,
        }


def load(path: str | os.PathLike[str]) -> Experiment:
    """The `experiment` that a Python script defines. The script is run, and may import what lies
    beside it.

    Raises ExperimentError where there is no such file, where it fails, and where it defines none.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise ExperimentError(
            f"Experiment {shown(str(path))} {problem}. Give a Python script that defines "
            f"`{NAME} = Experiment(...)`, such as experiments/train.py."
        )
    try:
        with _importing_from(path.resolve().parent):
            names = runpy.run_path(str(path), run_name=f"<{NAME}>")
    except JaxparError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"  # of the script, or of what it imports
        raise ExperimentError(f"{where} is not Python: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        line = next(_lines_of(error, path), None)
        raise ExperimentError(
            f"{path}{f':{line}' if line else ''} failed: {in_a_line(error)}. "
            f"`python {path}` shows where."
        ) from error
    found = names.get(NAME)
    if not isinstance(found, Experiment):
        others = [name for name, value in names.items() if isinstance(value, Experiment)]
        hint = f" It defines {others[0]}: call it {NAME}." if others else ""
        have = "" if found is None else f", and has {shown(found)} ({type(found).__name__})"
        raise ExperimentError(
            f"{path} has to define `{NAME} = Experiment(config=..., plan=..., optimizer=..., "
            f"num_steps=...)`{have}.{hint}"
        )
    return found


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """As when Python runs a script: modules beside it come first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _lines_of(error: BaseException, path: Path) -> Iterator[int]:
    """Lines of the script that led to the error, the last one first."""
    lines, traceback = [], error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    yield from reversed(lines)
