"""The training loop: steps, what they measured, checkpoints, and when to stop.

It prints nothing and knows no options; `jaxpar run` (cli_run.py) does. On an accelerator nothing
waits for a step that was just dispatched: its numbers are read while the next one runs, except
where a checkpoint is due, since only a state that is known to be finite is saved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import processes
from jaxpar.checkpoint import Checkpoints
from jaxpar.errors import DivergedError
from jaxpar.experiment import Experiment
from jaxpar.strategies import offload
from jaxpar.strategies.plan import plan_in_words
from jaxpar.train import Metrics, TrainStep
from jaxpar.update import TrainState

SAVE_S = 600.0
"""Seconds that a launcher lets a checkpoint take before it thinks that training has stalled."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one step measured, on the host.

    step: counted from 1, over restarts too. num_tokens: those with a label.
    time_s: since the record before, whatever happened; of a run's first step with compiling.
    is_first: of this run.
    imbalance: of the layer with the least even experts, tokens of the busiest one over the mean.
    dropped_fraction: of all choices of experts; both None where there are none.
    """

    step: int
    loss: float
    gradient_norm: float
    num_tokens: int
    time_s: float
    is_first: bool
    imbalance: float | None
    dropped_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The state after `num_steps` steps, and the signal that ended training early, or 0.

    saved: the last step that this run has saved, or None.
    """

    state: TrainState
    num_steps: int
    signal: int
    saved: int | None


class _Dispatched(NamedTuple):
    """A step on its way: its number, and what will be known of it."""

    number: int
    metrics: Metrics
    signs: Array


def train(
    experiment: Experiment,
    step: TrainStep,
    state: TrainState,
    *,
    done: int = 0,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[Record], None] = lambda record: None,
    asked_to_stop: Callable[[int], int] = lambda step: 0,
    num_ahead: int | None = None,
) -> Ended:
    """Train from step `done` + 1 on; `state` is used up.

    on_step: called with each step's record, on every process.
    asked_to_stop: called in each step with its number; the signal this process was sent, or 0. If
        any process was sent one, all stop after the same step, which is saved.
    num_ahead: steps that are dispatched before the numbers of one are read; None for 1, and for 0
        on CPUs, which compute when they are told to.

    Raises DivergedError for a loss, gradient norm or state that is not finite, and CheckpointError
    where a checkpoint cannot be written; checkpoints that were complete stay.
    """
    watch, data = Watch(step), experiment.data()
    if num_ahead is None:
        num_ahead = 0 if experiment.plan.mesh.platform == "cpu" else 1
    unread: deque[_Dispatched] = deque()
    number, stop, saved, read_at = done, 0, None, time.perf_counter()
    for number in processes.watched(range(done + 1, experiment.num_steps + 1)):
        state, metrics = step(state, experiment.batch(number - 1))
        unread.append(_Dispatched(number, metrics, watch(state, asked_to_stop(number))))
        is_due = number % experiment.checkpoint_every == 0 or number == experiment.num_steps
        while len(unread) > (0 if is_due or stop else num_ahead):
            oldest = unread.popleft()
            stop = max(stop, watch.check(oldest, checkpoints))
            before, read_at = read_at, time.perf_counter()
            on_step(_record(oldest, read_at - before, is_first=oldest.number == done + 1))
        if checkpoints is not None and (is_due or stop):
            processes.beat(next_within_s=SAVE_S)
            checkpoints.save(step, state, number, data)
            saved = number
        if stop:
            break
    return Ended(state=state, num_steps=number, signal=stop, saved=saved)


def _record(dispatched: _Dispatched, time_s: float, *, is_first: bool) -> Record:
    metrics: Metrics = dispatched.metrics
    has_experts = bool(metrics.stats)
    return Record(
        step=dispatched.number,
        loss=float(metrics.loss),
        gradient_norm=float(metrics.gradient_norm),
        num_tokens=int(metrics.num_tokens),
        time_s=time_s,
        is_first=is_first,
        imbalance=float(np.max(metrics.imbalance)) if has_experts else None,
        dropped_fraction=float(np.mean(metrics.dropped_fraction)) if has_experts else None,
    )


class Watch:
    """After each step: is its state finite, and has any process been asked to stop?

    One small program, dispatched behind the step; it reads the state once. Leaves in host memory
    are left out: what is wrong there shows in the parameters one step later.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        mesh = step.mesh
        self._flags = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._look = jax.jit(_signs, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: dict[int, Array] = {}
        self._names = list(self._watched(step.abstract_inputs[0]))

    def __call__(self, state: TrainState, signal: int) -> Array:
        """int32 [3]: the first leaf that is not finite, how many are not, the largest signal."""
        if signal not in self._asked:
            self._asked[signal] = jax.make_array_from_callback(
                (self._step.mesh.size,), self._flags, lambda _: np.array([signal], np.int32)
            )
        return self._look(list(self._watched(state).values()), self._asked[signal])

    def check(self, dispatched: _Dispatched, checkpoints: Checkpoints | None) -> int:
        """The signal to stop, or 0. Raises DivergedError where something is not finite."""
        first, num_bad, signal = map(int, jax.device_get(dispatched.signs))
        loss, norm = float(dispatched.metrics.loss), float(dispatched.metrics.gradient_norm)
        if num_bad or not math.isfinite(loss) or not math.isfinite(norm):
            leaf = self._names[first] if num_bad else None
            raise DivergedError(
                self._told(dispatched.number, loss, norm, leaf, num_bad, checkpoints),
                step=dispatched.number,
                leaf=leaf,
            )
        return signal

    def _watched(self, state: Any) -> dict[str, Any]:
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree.leaves_with_path(state)
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not offload.is_on_host(leaf)
        }

    def _told(
        self,
        number: int,
        loss: float,
        norm: float,
        leaf: str | None,
        num_bad: int,
        checkpoints: Checkpoints | None,
    ) -> str:
        what = f"the loss is {loss} and the gradient norm {norm}"
        where = "No leaf of the state is affected."
        if leaf is not None:
            where = f"First leaf that is not finite after it: {leaf}"
            where += f" ({num_bad} of {len(self._names)} are not)."
        kept = "There is no checkpoint"
        if checkpoints is not None:
            checkpoints.wait()
            if numbers := checkpoints.folder.numbers():
                kept = f"The last checkpoint is kept: {checkpoints.folder.folder(numbers[-1])}"
        return (
            f"Training stopped at step {number}: {what}. Strategy: {plan_in_words(self._step.plan)}"
            f". {where} {kept}. Try a lower learning rate or clip_norm, or compute_dtype='float32'."
        )


def _signs(leaves: list[Array], flags: Array) -> Array:
    is_bad = jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])
    return jnp.stack([jnp.argmax(is_bad), is_bad.sum(), flags.max()]).astype(jnp.int32)
