"""`jaxpar tour --target` and `jaxpar compile`: what is behind them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxpar import experiment
from jaxpar.console import Answer
from jaxpar.errors import TargetError, shown
from jaxpar.mesh import MeshSpec, shipped_meshes
from jaxpar.report.text import literal
from jaxpar.targets.cache import Cache, default_folder
from jaxpar.targets.compiler import GIB, Limits, Options
from jaxpar.targets.on_target import StepOnTarget, compile_for
from jaxpar.targets.options import option_set
from jaxpar.targets.report import memory_table, tour_table, verdict
from jaxpar.targets.target import Target
from jaxpar.targets.tour import TargetRow, TargetTour, kinds_on_target, tour_on_target


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line says of hardware and compiler. target: its name, or a mesh file's."""

    target: str
    num_slices: int = 1
    options: Sequence[str] = ()
    time_limit_s: float = 1200.0
    memory_limit_gib: float = 12.0
    use_cache: bool = True
    hlo: Path | None = None

    def __post_init__(self) -> None:
        if self.hlo is not None and not self.hlo.is_dir():
            raise TargetError(f"--hlo {shown(str(self.hlo))} is no folder. Make it first.")

    def parsed(self) -> Target:
        """Raises TargetError for what is no target."""
        if self.target in shipped_meshes() or self.target.endswith(".toml"):
            return Target.of_mesh(MeshSpec.load(self.target), num_slices=self.num_slices)
        return Target.parse(self.target, num_slices=self.num_slices)

    @property
    def limits(self) -> Limits:
        return Limits(time_s=self.time_limit_s, memory_bytes=round(self.memory_limit_gib * GIB))

    @property
    def cache(self) -> Cache | None:
        return Cache(default_folder()) if self.use_cache else None


def tour(request: Request, only: Sequence[str]) -> Answer:
    """Rows of the tour, compiled for the target."""
    target = request.parsed()
    options = compiler_options(request.options, target)
    with _progress() as told:
        result = tour_on_target(
            target,
            only=only,
            options=options,
            limits=request.limits,
            cache=request.cache,
            progress=lambda name, done, total, stage: told(
                f"{target}: {name}, {done} of {total}: {stage}"
            ),
        )
    return _answer(result, request)


def compile_script(
    request: Request, script: Path, mesh: str | None, fields: Sequence[str]
) -> Answer:
    """The training step that a script's Experiment says, compiled for the target."""
    target = request.parsed()
    options = compiler_options(request.options, target)
    loaded = experiment.load(script).with_options(mesh, fields)
    step = StepOnTarget(
        config=loaded.config,
        plan=loaded.plan,
        optimizer=loaded.optimizer,
        clip_norm=loaded.clip_norm,
    )
    with _progress() as told:
        result = compile_for(
            step,
            target,
            options=options,
            limits=request.limits,
            cache=request.cache,
            progress=lambda stage, seconds, rss: told(
                f"{target}: {stage} {seconds:.0f} s, {rss / GIB:.1f} GiB"
            ),
        )
    row = TargetRow(
        strategy=script.stem, plan=step.plan, result=result, kinds=kinds_on_target(result)
    )
    return _answer(
        TargetTour(
            target=target,
            model=step.config.name,
            batch_size=step.plan.batch_size,
            seq_len=step.plan.seq_len,
            options=options,
            seconds=result.compiled.seconds,
            rows=[row],
        ),
        request,
    )


def _answer(result: TargetTour, request: Request) -> Answer:
    parts: list[RenderableType] = [tour_table(result), memory_table(result), verdict(result)]
    if request.hlo is not None:
        parts += [literal(f"Written: {path}") for path in _write_hlo(result, request.hlo)]
    return Answer(shown=parts, data=result.to_json(), code=0 if result.is_complete else 1)


def _write_hlo(result: TargetTour, folder: Path) -> Iterator[Path]:
    """The programs as `jaxpar audit` reads them."""
    target = re.sub(r"[^a-z0-9]+", "_", str(result.target))
    for row in result.rows:
        if row.result is None:
            continue
        path = folder / f"{row.strategy}.{target}.txt.gz"
        try:
            path.write_bytes(gzip.compress(row.result.compiled.text.encode(), mtime=0))
        except OSError as error:
            raise TargetError(f"Cannot write {path}: {error.strerror}.") from None
        yield path


def compiler_options(given: Sequence[str], target: Target) -> Options:
    """XLA's options from "name=value" each; true, false and numbers are what they look like.

    A word alone is the name of a set for this target, see jaxpar/targets/options.toml.
    """
    options: dict[str, str | bool | int | float] = {}
    for text in given:
        if "=" not in text and not text.startswith("xla_"):
            options |= option_set(text, target)
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().startswith("xla_"):
            raise TargetError(
                f"--option {shown(text)} is not xla_name=value, such as "
                f"xla_tpu_enable_latency_hiding_scheduler=true."
            )
        if name in options:
            raise TargetError(f"--option {name} is given twice; once is enough.")
        options[name.strip()] = _value(value.strip())
    return options


def _value(text: str) -> str | bool | int | float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr while a compiler works, gone when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)
