"""The corpus: real bytes, the same for everybody, in batches that never come out even."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import TextError
from jaxpar.text import VOCABULARY_SIZE, Corpus

COUNTING = Corpus(np.arange(1, 252, dtype=np.uint8), "1, 2, 3 …")
"""Every byte differs and none is 0, so that a token tells where it comes from."""

SIZES = {"batch_size": st.integers(1, 16), "seq_len": st.integers(1, 64)}
STEPS = {"step": st.integers(0, 2**40), "seed": st.integers(0, 2**40)}


@settings(deadline=None)
@given(**SIZES, **STEPS)
def test_batch_holds_the_text(batch_size: int, seq_len: int, step: int, seed: int) -> None:
    batch = COUNTING.batch(step, batch_size=batch_size, seq_len=seq_len, seed=seed)
    tokens, labels, mask, segments, numbers = batch
    assert segments is None, "rows are not packed"
    assert tokens.shape == labels.shape == mask.shape == (batch_size, seq_len)
    assert (tokens.dtype, labels.dtype, mask.dtype) == (np.int32, np.int32, np.float32)
    valid = mask == 1
    assert np.all(valid | (mask == 0))
    assert (numbers.shape, numbers.dtype) == (tokens.shape, np.uint32)
    assert np.all(np.diff(numbers.reshape(-1)) == 1), "tokens are counted, modulo 2³²"
    assert np.all(labels[valid] == tokens[valid] + 1), "a label is the next byte"
    assert np.all(tokens[:, 1:][valid[:, 1:]] == labels[:, :-1][valid[:, 1:]]), "rows are windows"
    assert not tokens[~valid].any() and not labels[~valid].any()
    lengths = valid.sum(axis=1)
    assert np.array_equal(valid, np.arange(seq_len) < lengths[:, None]), "padding comes last"
    assert lengths.min() >= 1 and lengths.max() == seq_len


@settings(deadline=None)
@given(groups=st.integers(2, 8), rows=st.integers(1, 4), seq_len=st.integers(2, 64), **STEPS)
def test_devices_have_unequal_numbers_of_tokens(
    groups: int, rows: int, seq_len: int, step: int, seed: int
) -> None:
    mask = COUNTING.batch(step, batch_size=groups * rows, seq_len=seq_len, seed=seed).mask_BS
    assert len(set(mask.reshape(groups, -1).sum(axis=1))) > 1, "split along the batch"
    assert mask[:, 0].sum() > mask[:, -1].sum(), "split along the sequence"


def test_batch_depends_on_seed_and_step_alone() -> None:
    sizes = {"batch_size": 4, "seq_len": 32}
    batch = COUNTING.batch(3, **sizes)
    COUNTING.batch(4, **sizes)
    for ours, again in zip(batch, COUNTING.batch(3, seed=0, **sizes), strict=True):
        np.testing.assert_array_equal(ours, again)
    for other in (COUNTING.batch(4, **sizes), COUNTING.batch(3, seed=1, **sizes)):
        assert not np.array_equal(batch.tokens_BS, other.tokens_BS)


def test_every_byte_can_be_drawn() -> None:
    text = Corpus(np.arange(5, dtype=np.uint8), "five bytes")
    starts = {int(text.batch(step, batch_size=1, seq_len=3).tokens_BS[0, 0]) for step in range(40)}
    assert starts == {0, 1}
    assert text.batch(0, batch_size=1, seq_len=4).labels_BS.tolist() == [[1, 2, 3, 4]]


def test_batch_is_a_pytree() -> None:
    batch = COUNTING.batch(0, batch_size=2, seq_len=8)
    doubled = jax.tree.map(lambda leaf: leaf * 2, batch)
    np.testing.assert_array_equal(doubled.labels_BS, batch.labels_BS * 2)


def test_standard_library() -> None:
    corpus = Corpus.standard_library(max_bytes=100_000)
    assert corpus.data.size == 100_000
    assert (
        corpus.data.tobytes() == Corpus.standard_library(max_bytes=200_000).data[:100_000].tobytes()
    )
    assert b"def " in corpus.data.tobytes()
    assert corpus.data.max() < VOCABULARY_SIZE
    assert Corpus.standard_library().data.size == 1 << 20


def test_text_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        COUNTING.data[0] = 0


def test_standard_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(TextError, match=r"no sources.*Use Corpus\.from_file"):
        Corpus.standard_library()


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(256)))
    corpus = Corpus.from_file(path)
    assert corpus.name == "mine.txt"
    assert corpus.data.tolist() == list(range(256))
    with pytest.raises(TextError, match=r"mine\.txt' has 256 bytes, above max_bytes=255"):
        Corpus.from_file(path, max_bytes=255)


def test_file_that_cannot_be_text(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"a")
    (tmp_path / "empty").touch()
    for name, said in [
        ("missing", "missing' does not exist"),
        ("", "is not a file"),
        ("empty", "empty has 0 bytes; a token and a label take 2"),
        ("short", "short has 1 bytes"),
        ("x" * 5000, "File name too long"),
    ]:
        with pytest.raises(TextError, match=said):
            Corpus.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"seq_len": 251}, "seq_len=251 takes 252 bytes .* has 251.*Use seq_len ≤ 250"),
        ({"seq_len": 0}, "seq_len is 0 .*1 or more"),
        ({"batch_size": 0}, "batch_size is 0 .*1 or more"),
        ({"batch_size": 2.0}, "batch_size is 2.0 .float"),
        ({"batch_size": True}, "batch_size is True"),
        ({"step": -1}, "step is -1 .*0 or more"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_bad_batch(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(TextError, match=said):
        COUNTING.batch(**{"step": 0, "batch_size": 2, "seq_len": 8, **sizes})


@pytest.mark.parametrize("data", [np.arange(8), np.zeros((2, 4), np.uint8), np.zeros(1, np.uint8)])
def test_bad_data(data: np.ndarray) -> None:
    with pytest.raises(TextError):
        Corpus(data, "mine")
