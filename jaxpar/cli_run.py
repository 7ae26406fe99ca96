"""What `jaxpar run` does between its options and its output."""

from __future__ import annotations

import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxpar import processes
from jaxpar.checkpoint import Checkpoints
from jaxpar.console import Answer
from jaxpar.errors import CheckpointError, ExperimentError
from jaxpar.experiment import Experiment, load
from jaxpar.hardware import chip_of
from jaxpar.loop import Ended, Record, train
from jaxpar.predict.flops import KIND, peak_flops_per_s, step_flops
from jaxpar.recording import JsonLines, TensorBoard, line
from jaxpar.report.text import literal
from jaxpar.strategies.plan import plan_in_words
from jaxpar.text import Corpus
from jaxpar.train import TrainStep
from jaxpar.update import TrainState

SCHEMA = "jaxpar.run/1"

NUM_SMOOTHED = 20
"""Steps over which speed on the screen is taken."""

NUM_LINES = 10
"""Of a whole run, where there is no terminal to show a bar on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one `jaxpar run`; None where they were not given."""

    script: Path
    mesh: str | None = None
    fields: tuple[str, ...] = ()
    num_steps: int | None = None
    text: Path | None = None
    checkpoint: Path | None = None
    resume: bool = False
    metrics: Path | None = None
    tensorboard: Path | None = None

    def again(self, folder: Path) -> str:
        """The command that goes on from what is in `folder`."""
        options: dict[str, Any] = {
            "--mesh": self.mesh,
            "--steps": self.num_steps,
            "--text": self.text,
            "--checkpoint": folder,
            "--metrics": self.metrics,
            "--tensorboard": self.tensorboard,
        }
        words = ["jaxpar", "run", str(self.script)]
        words += [word for k, v in options.items() if v is not None for word in (k, str(v))]
        words += [word for field in self.fields for word in ("--set", field)]
        return shlex.join([*words, "--resume"])


def answer(request: Request, console: Console) -> Answer:
    """Train as the request says, and show it on its way. Exit code: 0, or 128 + the signal that
    ended it. Raises JaxparError for what cannot be trained or saved."""
    if request.resume and request.checkpoint is None:
        raise ExperimentError("--resume goes on from a checkpoint: give --checkpoint FOLDER too.")
    processes.initialize()
    console = console if processes.is_main() else Console(quiet=True)
    experiment = _experiment(request)
    step = experiment.step()
    folder = request.checkpoint or _unused(Path(f"{request.script.stem}.checkpoint"))
    with Checkpoints(folder, keep=experiment.keep_checkpoints) as checkpoints, ExitStack() as stack:
        done, state = _start(request, checkpoints, experiment, step)
        if request.checkpoint:  # before minutes of training, not after them
            checkpoints.folder.claim()
        outlets = _outlets(request, done) if processes.is_main() else []
        for outlet in outlets:
            stack.callback(outlet.close)
        screen = Screen(console, experiment, step, done)
        if request.resume and state is None:
            screen.say(f"{folder} holds no complete checkpoint: from the beginning.")
        with screen, Interruption(screen.say) as interruption:

            def on_step(record: Record) -> None:
                numbers = screen.show(record)
                for outlet in outlets:
                    outlet.write(numbers)

            with _told_of_devices(experiment):
                ended = train(
                    experiment,
                    step,
                    step.init(experiment.seed) if state is None else state,
                    done=done,
                    checkpoints=checkpoints if request.checkpoint else None,
                    on_step=on_step,
                    asked_to_stop=interruption.at,
                )
            if ended.signal and ended.saved != ended.num_steps and ended.num_steps > done:
                checkpoints.save(step, ended.state, ended.num_steps, experiment.data())
                ended = replace(ended, saved=ended.num_steps)
            checkpoints.wait()
        return _finished(request, screen, checkpoints, ended, done, experiment.num_steps)


def _outlets(request: Request, done: int) -> list[JsonLines | TensorBoard]:
    outlets: list[JsonLines | TensorBoard] = []
    if request.metrics is not None:
        outlets.append(JsonLines(request.metrics))
    if request.tensorboard is not None:
        outlets.append(TensorBoard(request.tensorboard, done=done))
    return outlets


def _experiment(request: Request) -> Experiment:
    """The script's, with the options in place of what it says itself."""
    experiment = load(request.script).with_options(request.mesh, request.fields)
    return replace(
        experiment,
        num_steps=request.num_steps or experiment.num_steps,
        corpus=Corpus.from_file(request.text) if request.text else experiment.corpus,
    )


def _start(
    request: Request, checkpoints: Checkpoints, experiment: Experiment, step: TrainStep
) -> tuple[int, TrainState | None]:
    """How many steps are done, and the state after them; None where there is none to go on from."""
    folder, numbers = checkpoints.folder, checkpoints.folder.numbers()
    # A run that was killed before its first checkpoint was complete starts again.
    if request.resume and (numbers or not folder.is_begun):
        return _restored(checkpoints, experiment, step)
    if numbers:
        raise CheckpointError(
            f"{folder.path} has checkpoints up to step {numbers[-1]}. Go on from there with "
            f"--resume, or give another folder."
        )
    return 0, None


@contextmanager
def _told_of_devices(experiment: Experiment) -> Iterator[None]:
    """No memory, or a device that fails, in words."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ExperimentError(
            f"The devices cannot carry out {plan_in_words(experiment.plan)}: "
            f"{str(error).strip().splitlines()[0][:300]} Where memory is short, try a "
            f"smaller batch_size, remat='full', or more devices along fsdp."
        ) from error


def _restored(
    checkpoints: Checkpoints, experiment: Experiment, step: TrainStep
) -> tuple[int, TrainState]:
    restored = checkpoints.restore(step)
    here, there = experiment.data(), restored.data
    differs = [
        f"{key}={there.get(key)!r} there and {here[key]!r} here"
        for key in here
        if there.get(key) != here[key]
    ]
    if differs:
        raise CheckpointError(
            f"{checkpoints.folder.folder(restored.num_steps)} is of a training with other data: "
            f"{'; '.join(differs)}. Its order would be another one. Give the text, seed, "
            f"batch_size and seq_len that it was saved with, or start in another folder."
        )
    return restored.num_steps, restored.state


def _unused(path: Path) -> Path:
    """Where an interrupted run goes that was told no folder."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in range(2, 10_000))
    return next((p for p in (path, *numbered) if not p.exists()), path)


class Interruption:
    """SIGINT and SIGTERM end training after the step at hand; the second one ends it at once.

    In a run of several processes JAX has SIGTERM, and tells all of them at the same step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signal = 0
        self._before: dict[int, Any] = {}

    def at(self, step: int) -> int:
        """What was sent until this step, or 0."""
        return signal.SIGTERM if processes.stop_requested(step) else self._signal

    def __enter__(self) -> Interruption:
        is_alone = not jax.distributed.is_initialized()
        for number in (signal.SIGINT, signal.SIGTERM) if is_alone else (signal.SIGINT,):
            self._before[number] = signal.signal(number, self._sent)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _sent(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        self._say(
            f"{signal.Signals(number).name}: saving after this step. Once more ends it at once."
        )


class Screen:
    """A bar on a terminal, some lines elsewhere, and the figures that both show."""

    def __init__(
        self, console: Console, experiment: Experiment, step: TrainStep, done: int
    ) -> None:
        self._console = console
        self._num_steps = experiment.num_steps
        self._every = max(1, (experiment.num_steps - done) // NUM_LINES)
        self._flops = step_flops(experiment.config, experiment.plan)
        devices = list(step.mesh.devices.flat)
        self._peak = peak_flops_per_s(devices, experiment.plan.compute_dtype)
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_SMOOTHED)
        self.losses: list[float] = []
        self.num_tokens, self.seconds = 0, 0.0
        config, plan = experiment.config, experiment.plan
        self.say(
            f"{config.name}, {config.num_parameters:,} parameters: {plan_in_words(plan)}\n"
            f"{plan.batch_size} × {plan.seq_len} tokens per step of {experiment.text.name}\n"
            f"{self._told_peak(devices)}"
        )
        if done:
            self.say(f"Going on after step {done}.")
        self._bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=console,
            )
            self._task = self._bar.add_task("compiling", total=self._num_steps, completed=done)

    def __enter__(self) -> Screen:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(literal(text), soft_wrap=True)

    def show(self, record: Record) -> dict[str, Any]:
        """Show one step; its numbers by key, as recording.py has them."""
        numbers = line(record, model_flops=self._flops, peak_flops_per_s=self._peak)
        self.losses.append(record.loss)
        if not record.is_first:
            self._recent.append(numbers)
            self.num_tokens += record.num_tokens
            self.seconds += record.time_s
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=self._told(record))
        elif record.is_first or record.step % self._every == 0 or record.step == self._num_steps:
            self.say(f"step {record.step:>{len(str(self._num_steps))}}  {self._told(record)}")
        return numbers

    def mfu(self) -> float | None:
        """Of all steps but the first, or None."""
        timed = len(self.losses) - 1
        if self._peak is None or not self.seconds:
            return None
        return timed * self._flops / self.seconds / self._peak

    def tokens_per_s(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None

    def _told(self, record: Record) -> str:
        seconds = sum(numbers["time_s"] for numbers in self._recent)
        tokens = sum(numbers["num_tokens"] for numbers in self._recent)
        parts = [
            f"loss {record.loss:.4f}",
            f"gradient norm {record.gradient_norm:.3g}",
            f"{tokens / seconds:,.0f} tokens/s" if seconds else "compiled",
        ]
        if seconds and self._peak is not None:
            parts.append(f"MFU {len(self._recent) * self._flops / seconds / self._peak:.1%}")
        return "  ".join(parts)

    def _told_peak(self, devices: list[Any]) -> str:
        kind = devices[0].device_kind
        if self._peak is None:
            return f"MFU: no peak known for {kind}"
        return (
            f"MFU: {KIND}; peak {self._peak / 1e12:,.0f} TFLOP/s, {len(devices)} × {chip_of(kind)}"
        )


def _finished(
    request: Request,
    screen: Screen,
    checkpoints: Checkpoints,
    ended: Ended,
    done: int,
    num_steps: int,
) -> Answer:
    saved = None if ended.saved is None else checkpoints.folder.folder(ended.saved)
    name = signal.Signals(ended.signal).name if ended.signal else None
    speed = screen.tokens_per_s()
    if ended.num_steps == done:
        screen.say(_nothing_to_do(request, num_steps, done))
    else:
        told = f"{screen.losses[0]:.4f} → {screen.losses[-1]:.4f}"
        rate = f", {speed:,.0f} tokens/s without the first step" if speed else ""
        screen.say(f"Steps {done + 1} to {ended.num_steps}: loss {told}{rate}.")
    if saved is not None:
        screen.say(f"Saved: {saved}")
    if name is not None:
        screen.say(f"Stopped by {name}. To go on:\n  {request.again(checkpoints.folder.path)}")
    data = {
        "schema": SCHEMA,
        "experiment": str(request.script),
        "first_step": done + 1,
        "last_step": ended.num_steps,
        "stopped_by": name,
        "loss": screen.losses[-1] if screen.losses else None,
        "tokens_per_s": speed,
        "mfu": screen.mfu(),
        "mfu_kind": KIND,
        "checkpoint": None if saved is None else str(saved),
    }
    return Answer(shown=[], data=data, code=128 + ended.signal if ended.signal else 0)


def _nothing_to_do(request: Request, num_steps: int, done: int) -> str:
    if done == num_steps:
        return f"Nothing to do: step {done} was the last one. More with --steps."
    asked = (
        f"--steps {num_steps}"
        if request.num_steps
        else f"num_steps={num_steps} of {request.script}"
    )
    return (
        f"Nothing to do: the checkpoint is of step {done}, and {asked} counts all steps, those "
        f"before a restart too. For {num_steps} more: --steps {done + num_steps}."
    )
