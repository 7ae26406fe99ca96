"""Where a run's numbers go: a file of JSON lines, and TensorBoard. Both only grow.

One object per line and step, written and flushed as the step is read; after a restart the later
line of a step counts. Keys, `schema: "jaxpar.metrics/1"`:

    step              counted from 1, over restarts
    loss              mean over the tokens of the batch that have a label
    gradient_norm     before clipping
    num_tokens        tokens with a label
    time_s            since the line before; of a run's first step with compiling
    tokens_per_s      null on a run's first step
    model_flops       of the step, over all devices: causal FLOPs, without recompute
    mfu               model_flops / time_s / peak of all devices; null where no peak is known
    imbalance         of experts: busiest over mean, in the least even layer; null without experts
    dropped_fraction  of choices of experts; null without experts
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, shown
from jaxpar.loop import Record

SCHEMA = "jaxpar.metrics/1"


def line(record: Record, *, model_flops: float, peak_flops_per_s: float | None) -> dict[str, Any]:
    """A step's numbers by key, as the module says; what is not finite becomes null."""
    timed = record.time_s > 0 and not record.is_first
    flops_per_s = model_flops / record.time_s if timed else None
    numbers = {
        "step": record.step,
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "num_tokens": record.num_tokens,
        "time_s": record.time_s,
        "tokens_per_s": record.num_tokens / record.time_s if timed else None,
        "model_flops": model_flops,
        "mfu": flops_per_s / peak_flops_per_s if flops_per_s and peak_flops_per_s else None,
        "imbalance": record.imbalance,
        "dropped_fraction": record.dropped_fraction,
    }
    finite = {k: None if v is None or not math.isfinite(v) else v for k, v in numbers.items()}
    return {"schema": SCHEMA, **finite}


class JsonLines:
    """Appends to `path`. Raises JaxparError where it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)  # a line is there as soon as it is known
            if path.stat().st_size:
                with path.open("rb") as file:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":  # a line that was cut short stays alone
                        self._file.write(b"\n")
        except OSError as error:
            raise self._told(error) from None

    def write(self, numbers: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(numbers, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise self._told(error) from None

    def close(self) -> None:
        self._file.close()

    def _told(self, error: OSError) -> JaxparError:
        return JaxparError(f"Metrics file {shown(str(self._path))}: {error.strerror}.")


class TensorBoard:
    """One scalar per key in `folder`. Needs tensorboardX: `pip install "jaxpar[tensorboard]"`."""

    def __init__(self, folder: Path, *, done: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise JaxparError(
                f"--tensorboard needs tensorboardX ({error}). Install it with: "
                f'pip install "jaxpar[tensorboard]".'
            ) from None
        try:
            # What an earlier run wrote of later steps is not shown any more.
            self._writer = SummaryWriter(str(folder), purge_step=done + 1)
        except OSError as error:
            raise JaxparError(
                f"TensorBoard folder {shown(str(folder))}: {error.strerror}."
            ) from None

    def write(self, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            if key not in ("schema", "step", "model_flops") and value is not None:
                self._writer.add_scalar(key, value, numbers["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
