"""Bytes between devices: by hand for each kind, and rows that sum to what a collective sends."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.audit.matrix import MAX_MATRIX_DEVICES, byte_matrix
from jaxpar.collectives import wire_bytes
from jaxpar.errors import AuditError
from tests.audit.records import collective

GROUPS = np.array([[0, 2], [1, 3]])
RINGS = ("all-reduce", "all-gather", "reduce-scatter")


def one(kind, groups, payload, size, count=1, **fields):
    made = collective(kind, count=count, payload_bytes=payload)
    return replace(
        made, groups=groups, group_size=size, wire_bytes=wire_bytes(kind, payload, size), **fields
    )


def test_a_ring_sends_to_the_next_in_the_order_of_its_group():
    ring = one("all-gather", np.array([[0, 2, 1]]), 300, 3, count=2)
    expected = np.zeros((4, 4), int)
    expected[0, 2] = expected[2, 1] = expected[1, 0] = 2 * 200
    np.testing.assert_array_equal(byte_matrix([ring], 4), expected)


def test_pairs_send_the_payload_and_nothing_to_oneself():
    pairs = np.array([[0, 1], [1, 2], [3, 3]])
    permute = one("collective-permute", pairs, 100, 4, device_counts=(5, 7, 9, 11), count=(5, 11))
    expected = np.zeros((4, 4), int)
    expected[0, 1], expected[1, 2] = 500, 700  # as often as the sender runs it
    np.testing.assert_array_equal(byte_matrix([permute], 4), expected)


def test_all_to_all_sends_a_share_to_each_other_member():
    found = byte_matrix([one("all-to-all", np.array([[0, 1, 3]]), 300, 3)], 4)
    expected = 100 * np.outer([1, 1, 0, 1], [1, 1, 0, 1]) * (1 - np.eye(4, dtype=int))
    np.testing.assert_array_equal(found, expected)


def test_a_broadcast_goes_down_a_chain():
    found = byte_matrix([one("collective-broadcast", np.array([[2, 0, 1]]), 50, 3)], 3)
    np.testing.assert_array_equal(found, [[0, 50, 0], [0, 0, 0], [50, 0, 0]])


def test_groups_of_several_sizes():
    groups = (np.array([0, 1]), np.array([2]))
    found = byte_matrix([one("all-reduce", groups, 100, 2)], 3)
    np.testing.assert_array_equal(found, [[0, 100, 0], [100, 0, 0], [0, 0, 0]])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*RINGS, "all-to-all", "collective-permute"]),
    order=st.permutations(range(12)),
    size=st.sampled_from([2, 3, 4, 6, 12]),
    counts=st.lists(st.integers(0, 1000), min_size=12, max_size=12),
    unit=st.integers(1, 1 << 30),
)
def test_rows_sum_to_executions_times_wire_bytes(kind, order, size, counts, unit):
    payload = unit * size  # what divides evenly
    groups = np.array(order).reshape(-1, size)
    if kind == "collective-permute":
        groups = np.stack([order, np.roll(order, 1)], axis=1)
    found = one(kind, groups, payload, size, count=(min(counts), max(counts)),
                device_counts=tuple(counts))  # fmt: skip
    matrix = byte_matrix([found, found], 12)
    assert matrix.sum(axis=1).tolist() == [2 * count * found.wire_bytes for count in counts]
    assert matrix.diagonal().tolist() == [0] * 12
    known = replace(found, count=3, count_min=3, count_max=3, device_counts=None)
    assert math.isclose(byte_matrix([known], 12).sum(), 12 * 3 * found.wire_bytes)


@pytest.mark.parametrize(
    ("given", "devices", "message"),
    [
        ({"count": (0, None)}, 4, "decided by data"),
        ({"groups": np.array([[0, 9]])}, 4, "names device 9"),
        ({"groups": ()}, 4, "not known"),
        ({}, 0, "cannot be made"),
        ({}, MAX_MATRIX_DEVICES + 1, "cannot be made"),
    ],
)
def test_what_would_be_too_small_is_refused(given, devices, message):
    found = one("all-reduce", given.pop("groups", GROUPS), 100, 2, **given)
    with pytest.raises(AuditError, match=message):
        byte_matrix([found], devices)
