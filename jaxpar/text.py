"""Real text to train on, with nothing to download: one token is one byte.

The default corpus is the source of Python's own standard library, which every machine that runs
this has. (It differs between Python versions, so losses are comparable within one version.)

Batches are a function of the seed and the step alone. A run can therefore resume at any step, and
every mesh sees the same tokens, which is what lets it be compared with one device.

Shapes: B is the batch, S the sequence.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpar.errors import TextError, is_whole, shown

VOCABULARY_SIZE = 256
"""Tokens are bytes."""

MIB = 1 << 20


class Batch(NamedTuple):
    """One batch, a JAX pytree. A corpus fills it with NumPy arrays, a step with its own shards.

    The types are open because the same tree also carries shapes and PartitionSpecs.
    """

    tokens_BS: Any
    """int32 bytes; 0 where the mask is 0."""
    labels_BS: Any
    """int32, the byte after each token; 0 where the mask is 0."""
    mask_BS: Any
    """float32: 1 where token and label count, 0 in the padding at the end of a row."""
    segments_BS: Any = None
    """int32 document of each token, where rows are packed: it sees its own document only."""
    numbers_BS: Any = None
    """uint32 number of each token in all the data that is trained on: dropout's noise is its."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Some text as read-only bytes, and the name it goes by in tables."""

    data: npt.NDArray[np.uint8]
    name: str

    def __post_init__(self) -> None:
        data = np.asarray(self.data)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise TextError(f"The text is {data.dtype}{list(data.shape)}; it has to be uint8[n].")
        if data.size < 2:
            raise TextError(f"{self.name} has {data.size} bytes; a token and a label take 2.")
        data = data.view()
        data.flags.writeable = False
        object.__setattr__(self, "data", data)

    @classmethod
    def standard_library(cls, max_bytes: int = MIB) -> Corpus:
        """The first `max_bytes` of the standard library's top-level modules, sorted by name."""
        _check_whole("max_bytes", max_bytes, at_least=2)
        folder = Path(sysconfig.get_paths()["stdlib"])
        content = b""
        for path in sorted(folder.glob("*.py")):
            if len(content) >= max_bytes:
                break
            content += path.read_bytes()
        if not content:
            raise TextError(
                f"There are no sources of Python's standard library in {folder}. "
                f"Use Corpus.from_file with a text of your own."
            )
        return cls(np.frombuffer(content[:max_bytes], np.uint8), "Python standard library")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], max_bytes: int = 64 * MIB) -> Corpus:
        """All bytes of a file, whatever they encode. `TextError` if it is larger than `max_bytes`.

        It is an error rather than a cut, so that a corpus is never silently part of a file.
        """
        _check_whole("max_bytes", max_bytes, at_least=2)
        path = Path(path)
        try:
            if not path.is_file():
                problem = "is not a file" if path.exists() else "does not exist"
                raise TextError(f"Text file {shown(str(path))} {problem}; give one of any text.")
            with path.open("rb") as file:
                content = file.read(max_bytes + 1)
        except OSError as error:
            raise TextError(
                f"Text file {shown(str(path))} cannot be read: {error.strerror}."
            ) from None
        if len(content) > max_bytes:
            raise TextError(
                f"Text file {shown(str(path))} has {path.stat().st_size:,} bytes, above max_bytes="
                f"{max_bytes:,}. Raise max_bytes or cut the file: it is held in memory whole."
            )
        return cls(np.frombuffer(content, np.uint8), path.name)

    def batch(
        self, step: int, *, batch_size: int, seq_len: int, seed: int = 0, packed: bool = False
    ) -> Batch:
        """The batch of `step`: `batch_size` rows cut anywhere from the text, of unequal length.

        Rows hold between a quarter of `seq_len` and all of it, the rest is padding. They are sorted
        by length, one way or the other, so that no split of the batch or of the sequence gives all
        devices the same number of tokens: a loss averaged per device instead of per token is then
        wrong in every batch, and a test sees it. (Without effect where a row can only be full:
        `batch_size` or `seq_len` of 1.)

        With `packed` a row is filled with about four documents, each cut from another place, and
        `segments_BS` numbers them from 1; padding is document 0.

        `numbers_BS` counts tokens, padding too, from a place that the seed chooses, over rows and
        steps of this size, modulo 2³².

        Raises `TextError` for sizes below 1, a negative step or seed, and a text that is too short.
        """
        _check_whole("step", step, at_least=0)
        _check_whole("seed", seed, at_least=0)
        _check_whole("batch_size", batch_size, at_least=1)
        _check_whole("seq_len", seq_len, at_least=1)
        if seq_len >= self.data.size:
            raise TextError(
                f"seq_len={seq_len} takes {seq_len + 1} bytes of text (one more for the last "
                f"label), and {self.name} has {self.data.size}. "
                f"Use seq_len ≤ {self.data.size - 1} or a longer text."
            )
        random = np.random.default_rng(np.random.SeedSequence((seed, step)))
        starts_B = random.integers(self.data.size - seq_len, size=batch_size)
        lengths_B = np.sort(random.integers(-(-seq_len // 4), seq_len + 1, size=batch_size))
        lengths_B[0] = max(1, min(lengths_B[0], seq_len - 1))  # never all rows the same
        lengths_B[-1] = seq_len
        if random.integers(2):
            lengths_B = lengths_B[::-1]

        mask_BS = np.arange(seq_len) < lengths_B[:, None]
        from_BS = starts_B[:, None] + np.arange(seq_len)
        segments_BS = None
        if packed:
            begins_BS = random.random((batch_size, seq_len)) < 4 / seq_len
            begins_BS[:, 0] = True
            segments_BS = np.cumsum(begins_BS, axis=1, dtype=np.int32) * mask_BS
            jumps_BS = random.integers(self.data.size - seq_len, size=begins_BS.shape)
            first_BS = np.maximum.accumulate(np.where(begins_BS, np.arange(seq_len), 0), axis=1)
            from_BS = np.take_along_axis(jumps_BS, first_BS, axis=1) + np.arange(seq_len)
        return Batch(
            tokens_BS=self.data[from_BS].astype(np.int32) * mask_BS,
            labels_BS=self.data[from_BS + 1].astype(np.int32) * mask_BS,
            mask_BS=mask_BS.astype(np.float32),
            segments_BS=segments_BS,
            numbers_BS=_numbers(seed, step, (batch_size, seq_len)),
        )


def _numbers(seed: int, step: int, shape: tuple[int, int]) -> npt.NDArray[np.uint32]:
    size = shape[0] * shape[1]
    first = int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0]) + step * size
    return (first % 2**32 + np.arange(size, dtype=np.uint64)).astype(np.uint32).reshape(shape)


def _check_whole(name: str, value: Any, *, at_least: int) -> None:
    if not is_whole(value) or value < at_least:
        raise TextError(
            f"{name} is {shown(value)} ({type(value).__name__}); "
            f"it has to be a whole number, {at_least} or more."
        )
