"""Comparing numbers on the host, where a NaN cannot hide.

XLA's maximum can lose a NaN and Python's depends on the order; NumPy's does neither.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpar.errors import JaxparError


def relative_error(got: Any, want: Any) -> float:
    """Largest error of any leaf, relative to the largest element of that leaf in `want`.

    Both are pytrees of arrays or numbers. NaN or infinity anywhere, in either, gives infinity,
    and so does any difference from a leaf of zeros. Raises JaxparError when the trees, or the
    shapes or dtypes of two leaves, differ: there is no number to give then.
    """
    worst = 0.0
    for _, a, b in _pairs(got, want):
        if a.size == 0:
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return float("inf")
        error, scale = float(np.abs(a - b).max()), float(np.abs(b).max())
        if error:
            worst = max(worst, error / scale if scale else float("inf"))
    return worst


def first_difference(got: Any, want: Any) -> str | None:
    """Where two trees differ in a single bit, in words; None when they are identical.

    NaNs are equal when their bits are. Raises JaxparError as `relative_error` does.
    """
    for path, a, b in _pairs(got, want):
        bits_a, bits_b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
        if not np.array_equal(bits_a, bits_b):
            index = np.unravel_index(int(np.argmax(bits_a != bits_b)) // a.itemsize, a.shape)
            return f"{path}{list(map(int, index))}: {a[index]!r} is not {b[index]!r}"
    return None


def _pairs(got: Any, want: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    mine, theirs = ({jax.tree_util.keystr(path): np.asarray(leaf)
                     for path, leaf in jax.tree.leaves_with_path(tree)}
                    for tree in (got, want))  # fmt: skip
    if missing := theirs.keys() - mine.keys():
        raise JaxparError(f"A leaf is missing: {', '.join(sorted(missing))}.")
    if extra := mine.keys() - theirs.keys():
        raise JaxparError(f"A leaf is there that should not be: {', '.join(sorted(extra))}.")
    for path, a in mine.items():
        b = theirs[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise JaxparError(
                f"Leaf {path or '(the whole tree)'} is {a.dtype}{list(a.shape)}, and should be "
                f"{b.dtype}{list(b.shape)}."
            )
    return [(path, a, theirs[path]) for path, a in mine.items()]
