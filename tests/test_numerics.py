"""The comparator sees one ulp, one NaN, one leaf too many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.errors import JaxparError
from jaxpar.numerics import first_difference, relative_error

ONE = np.float32(1)
NEXT = np.nextafter(ONE, np.float32(2))
INF = float("inf")


def tree(value=ONE):
    """Three leaves, `value` at one place of a matrix."""
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    matrix[1, 2] = value
    return {"a": [matrix, np.int32(3)], "b": jnp.ones(2, jnp.bfloat16)}


def test_equal_trees():
    assert relative_error(tree(), tree()) == 0
    assert first_difference(tree(), tree()) is None


def test_one_ulp():
    where = "['a'][0][1, 2]: np.float32(1.0000001) is not np.float32(1.0)"
    assert first_difference(tree(NEXT), tree(ONE)) == where
    # Relative to the largest element of the leaf, which is 4.
    assert relative_error(tree(NEXT), tree(ONE)) == (float(NEXT) - 1) / 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "bool"])
def test_one_bit_of_any_dtype(dtype):
    one = np.ones(5, jnp.dtype(dtype))
    other = one.copy()
    other.view(np.uint8)[-1 if dtype == "bool" else -other.itemsize] ^= 1
    assert first_difference(one, one.copy()) is None
    assert first_difference(other, one).startswith("[4]: ")
    assert 0 < relative_error(other, one) <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_what_is_not_finite_is_infinitely_far(bad, sides):
    got, want = (tree(bad if is_bad else ONE) for is_bad in sides)
    assert relative_error(got, want) == INF
    difference = first_difference(got, want)
    assert difference is None if all(sides) else difference.startswith("['a'][0][1, 2]: ")


def test_a_nan_does_not_hide_behind_a_larger_error():
    assert relative_error([ONE, np.float32(np.nan)], [NEXT, ONE]) == INF
    assert relative_error([np.float32(np.nan), ONE], [ONE, NEXT]) == INF


def test_nans_of_other_bits_differ():
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert first_difference(quiet, quiet.copy()) is None
    assert first_difference(other, quiet) == "[0]: np.float32(nan) is not np.float32(nan)"


def test_zeros_of_other_signs_differ_in_bits_alone():
    assert first_difference(tree(-0.0), tree(0.0)) == (
        "['a'][0][1, 2]: np.float32(-0.0) is not np.float32(0.0)"
    )
    assert relative_error(tree(-0.0), tree(0.0)) == 0


def test_a_reference_of_zeros():
    zeros = np.zeros(3, np.float32)
    assert relative_error(zeros, zeros.copy()) == 0
    assert relative_error(zeros + np.float32(1e-30), zeros) == INF
    assert relative_error(zeros, zeros + ONE) == 1


def test_the_worst_leaf_counts_on_its_own_scale():
    want = {"large": np.full(2, 1e6, np.float32), "small": np.full(2, 1e-6, np.float32)}
    got = {**want, "small": want["small"] * np.float32(1.5)}
    assert relative_error(got, want) == pytest.approx(0.5)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_zero_sizes(shape):
    empty = np.zeros(shape, np.float32)
    assert relative_error(empty, empty.copy()) == 0
    assert first_difference(empty, empty.copy()) is None
    assert relative_error([empty, NEXT], [empty, ONE]) > 0
    assert first_difference([empty, NEXT], [empty, ONE]).startswith("[1][]: ")


@pytest.mark.parametrize(("got", "want"), [(1.5, 1.0), (np.float32(1.5), ONE), (3, 2)])
def test_scalars(got, want):
    assert relative_error(got, want) == 0.5
    assert relative_error(want, want) == 0
    assert first_difference(want, want) is None
    assert (
        first_difference(got, want)
        == f"[]: {np.asarray(got)[()]!r} is not {np.asarray(want)[()]!r}"
    )


def test_other_memory_layouts_are_the_same_numbers():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert first_difference(np.asfortranarray(matrix), matrix) is None
    assert first_difference(matrix[:, ::-1], matrix[:, ::-1].copy()) is None
    assert first_difference(jax.device_put(matrix), matrix) is None


LEAF = np.ones((2, 3), np.float32)


@pytest.mark.parametrize("compare", [relative_error, first_difference])
@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ({"a": LEAF}, {"a": LEAF, "b": LEAF}, r"A leaf is missing: \['b'\]\."),
        ({"a": LEAF, "b": None}, {"a": LEAF, "b": LEAF}, r"A leaf is missing: \['b'\]\."),
        ([LEAF], [LEAF, LEAF], r"A leaf is missing: \[1\]\."),
        ({"a": LEAF, "b": LEAF}, {"a": LEAF}, r"should not be: \['b'\]\."),
        ({"a": LEAF}, {"b": LEAF}, r"A leaf is missing: \['b'\]\."),
        ({}, {"a": LEAF}, r"A leaf is missing: \['a'\]\."),
        (LEAF, LEAF.T, r"the whole tree\) is float32\[2, 3\], and should be float32\[3, 2\]"),
        ([LEAF], [LEAF[None]], r"\[0\] is float32\[2, 3\], and should be float32\[1, 2, 3\]"),
        (ONE, np.ones(1, np.float32), r"is float32\[\], and should be float32\[1\]"),
        (LEAF[:0], LEAF[:0].T, r"is float32\[0, 3\], and should be float32\[3, 0\]"),
        (LEAF, LEAF.astype(np.float64), r"is float32\[2, 3\], and should be float64\[2, 3\]"),
        (LEAF, LEAF.astype(jnp.bfloat16), r"is float32\[2, 3\], and should be bfloat16\[2, 3\]"),
        (1, 1.0, r"is int64\[\], and should be float64\[\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(compare, got, want, message):
    with pytest.raises(JaxparError, match=message):
        compare(got, want)
