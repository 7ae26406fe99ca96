import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.audit.groups import (
    axes_of_groups,
    axes_of_pairs,
    parse_groups,
    parse_pairs,
    to_device_ids,
)
from jaxpar.errors import AuditError

MESH = {"one": 1, "data": 2, "unit": 1, "tensor": 4}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 3}, {2, 1}}", [[0, 3], [2, 1]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['dp'=2,'tp'=4] {'tp'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['dp'=2,'tp'=4] {'dp'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['dp'=2,'tp'=4] {'tp','dp'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['dp'=2,'tp'=4] {}", [[i] for i in range(8)]),
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh[a=2,b=2] {b}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_every_printed_form(text, groups):
    assert parse_groups(text, 4).tolist() == groups


def test_irregular_groups_stay_apart():
    groups = parse_groups("{{0,1,2},{3}}", None)
    found = axes_of_groups(groups, {"x": 4}, "")
    assert (found.axes, found.group_size, found.num_groups) == (None, 3, 2)
    assert "1 and 3" in found.note


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1}",
        "{{0,1},{a}}",
        "{{0,1},{}}",
        "{{0,-1}}",
        "[4,2]<=[9]",
        "[4,2]<=[2,4]T(1,1)",
        "[2,0]<=[0]",
        "mesh['a'=8]",
        "mesh['a'=8] {'b'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=8] {'a','a'}",
        "mesh['a'=0] {'a'}",
        "mesh[] {}",
        "mesh['a'=2], device_ids=(0,1,2) {'a'}",
        "nonsense",
        "[" + ",".join(["2"] * 100) + "]<=[8]",
        "[1000000000,8]<=[8000000000]",
        "mesh['a'=999999999999] {'a'}",
        "{{" + "9" * 30 + "}}",
        "{" * 50_000,
        "mesh[" + "]{" * 50_000,
        "mesh[" + "\\'" * 50_000,
    ],
)
def test_damaged_groups(text):
    start = time.process_time()
    with pytest.raises(AuditError, match=r"(?i)damaged|compiled\.as_text"):
        parse_groups(text, 8)
    assert time.process_time() - start < 2


def test_everybody_needs_a_number_of_devices():
    with pytest.raises(AuditError, match="Give mesh="):
        parse_groups("{}", None)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",)),
        ("{{3,1,2,0},{4,7,6,5}}", ("tensor",)),  # a set has no order
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor")),
        ("mesh['x'=8] {'x'}", ("data", "tensor")),  # printed names do not count
        ("mesh['data'=4,'tensor'=2] {'tensor'}", None),
        ("{{0,1},{2,3},{4,5},{6,7}}", None),
        ("{{0,2},{1,3},{4,6},{5,7}}", None),
        ("{{0,5},{1,4},{2,7},{3,6}}", None),
        ("{{0,1,2,4},{3,5,6,7}}", None),
        ("{{0,1,2,3}}", None),
        ("{{0,1},{0,1}}", None),
    ],
)
def test_axes_come_from_sets(text, axes):
    found = axes_of_groups(parse_groups(text, 8), MESH, text)
    assert found.axes == axes
    assert (found.note is None) == (axes is not None)


def test_the_same_group_twice_is_no_axis():
    found = axes_of_groups(parse_groups("{{0,1},{0,1}}", 4), {"x": 2, "y": 2}, "")
    assert found.axes is None
    assert "more than one" in found.note


def test_a_part_of_an_axis_is_said_in_words():
    note = axes_of_groups(parse_groups("{{0,2},{1,3},{4,6},{5,7}}", 8), MESH, "").note
    assert note == "groups of 2 are part of axis 'tensor' (4), devices 2 apart"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_axes_of_any_mesh(sizes, data):
    mesh = {f"axis{i}": size for i, size in enumerate(sizes)}
    chosen = [i for i in range(len(sizes)) if data.draw(st.booleans())]
    rest = [i for i in range(len(sizes)) if i not in chosen]
    members = math.prod(sizes[i] for i in chosen)
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(rest + chosen).reshape(-1, members)
    order = data.draw(st.permutations(range(members)))
    found = axes_of_groups(ids[::-1][:, order], mesh, "")
    assert found.axes == tuple(f"axis{i}" for i in chosen if sizes[i] > 1)
    assert (found.group_size, found.num_groups) == (members, len(ids))


def test_no_wrong_axes_for_any_partition_of_four_devices():
    """All ways to pair up four devices, on a 2x2 mesh: only the two axes get a name."""
    named = {}
    for a, b, c, d in itertools.permutations(range(4)):
        found = axes_of_groups(np.array([[a, b], [c, d]]), {"x": 2, "y": 2}, "")
        named.setdefault(found.axes, set()).add(frozenset({frozenset({a, b}), frozenset({c, d})}))
    assert {axes: len(sets) for axes, sets in named.items()} == {("x",): 1, ("y",): 1, None: 1}


def test_a_device_outside_the_mesh():
    with pytest.raises(AuditError, match="Device 9 takes part"):
        axes_of_groups(np.array([[0, 9]]), MESH, "")
    with pytest.raises(AuditError, match="Device 9 takes part"):
        axes_of_pairs(np.array([[0, 9]]), MESH, 8)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("size4stride1",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("size2stride4",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("size2stride4", "size2stride1")),
        ("{{0,1,3},{2,4,5}}", None),
    ],
)
def test_without_a_mesh_axes_are_named_by_stride(text, axes):
    found = axes_of_groups(parse_groups(text, None), None, text)
    assert found.axes == axes
    assert "no mesh given" in found.note
    assert text in found.note


@pytest.mark.parametrize(
    ("pairs", "axes", "note"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tensor",), "ring by +1"),
        ("{{1,0},{2,1},{3,2},{0,3},{5,4},{6,5},{7,6},{4,7}}", ("tensor",), "ring by -1"),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("tensor",), "shift by +1"),
        ("{{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}", ("data",), "ring by +1"),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", ("data", "tensor"), "ring by +1"),
        ("{{0,5},{5,0}}", ("data", "tensor"), "2 of 8 devices send"),
    ],
)
def test_permutes(pairs, axes, note):
    found = axes_of_pairs(parse_pairs(pairs), MESH, 8)
    assert (found.axes, found.note) == (axes, note)
    assert found.group_size == math.prod(MESH[axis] for axis in axes)


def test_a_permute_to_oneself_moves_nothing():
    assert axes_of_pairs(parse_pairs("{{0,0},{1,1}}"), MESH, 8).group_size == 1
    assert axes_of_pairs(parse_pairs("{}"), MESH, 8).group_size == 1


def test_permutes_without_a_mesh():
    pairs = parse_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}")
    assert axes_of_pairs(pairs, None, 8).axes == ("size4stride1",)
    assert axes_of_pairs(parse_pairs("{{0,1},{2,3},{3,5}}"), None, 8).axes is None


def test_pairs_that_are_none():
    with pytest.raises(AuditError, match="source_target_pairs"):
        parse_pairs("{{0,1,2}}")


@pytest.mark.parametrize(
    ("kind", "channel", "global_ids", "groups"),
    [
        ("all-reduce", True, True, [[0, 1]]),
        ("all-reduce", True, False, [[0, 1, 2, 3, 4, 5]]),
        ("all-reduce", False, False, [[0, 3], [1, 4], [2, 5]]),
        ("all-to-all", True, False, [[0, 1], [3, 4]]),
        ("all-to-all", False, False, [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_what_an_id_means(kind, channel, global_ids, groups):
    """Two replicas of three partitions."""
    found = to_device_ids(
        np.array([[0, 1]]),
        kind=kind,
        channel=channel,
        global_ids=global_ids,
        replicas=2,
        partitions=3,
    )
    assert found.tolist() == groups


def test_4096_devices_are_cheap():
    mesh = {"data": 256, "tensor": 16}
    text = (
        "{" + ",".join("{" + ",".join(map(str, range(i, 4096, 16))) + "}" for i in range(16)) + "}"
    )
    ring = np.stack([np.arange(4096), (np.arange(4096) + 16) % 4096], axis=1)
    start = time.process_time()
    for _ in range(10):
        assert axes_of_groups(parse_groups(text, None), mesh, text).axes == ("data",)
        assert axes_of_pairs(ring, mesh, 4096).note == "ring by +1"
        assert axes_of_pairs(ring, None, 4096).axes == ("size256stride16",)
    assert time.process_time() - start < 2
