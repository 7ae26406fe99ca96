"""Signatures: what they keep, what they leave out, and snapshots that somebody edited."""

import dataclasses
import json
import random

import pytest

from jaxpar.audit.grouping import Bounds
from jaxpar.audit.signature import from_text, signature, to_text
from jaxpar.errors import AuditError
from tests.audit.records import audit_of, collective


def test_a_snapshot_has_one_line_per_kind_of_operation_and_no_names():
    result = audit_of(
        collective(count=4, scope="layers/mlp"),
        collective("all-gather", axis="data", dtype="f32", count=1),
        collective(count=2, source="other.py:1"),
        collective(count=(0, None)),
        collective(axis=None, count=(1, 3), program_dtype="f32"),
    )
    head, *lines, end, _ = to_text(signature(result)).splitlines()[1:]
    assert (head, lines.pop(0), end) == (' "schema": "jaxpar.comm/1",', ' "collectives": [', " ]")
    rows = [json.loads(line.removesuffix(",")) for line in lines]
    assert [(row["kind"], row["axes"], row["dtype"]) for row in rows] == [
        ("all-gather", "data", "f32"), ("all-reduce", "half of tensor, stride 2", "bf16"),
        ("all-reduce", "tensor", "bf16"), ("all-reduce", "tensor", "bf16"),
    ]  # fmt: skip
    assert [list(row.values())[3:] for row in rows] == [
        [2, 1024, 512, 1], [4, 1024, 1536, 1, 3], [4, 1024, 1536, 0, None], [4, 1024, 1536, 6],
    ]  # fmt: skip
    assert list(rows[1])[6:] == ["count_min", "count_max"] and list(rows[3])[6:] == ["count"]


def test_no_communication_is_a_snapshot_too():
    text = to_text(signature(audit_of()))
    assert json.loads(text) == {"schema": "jaxpar.comm/1", "collectives": []}
    assert from_text(text) == ()


def test_a_snapshot_reads_back_whatever_the_order_and_the_names():
    collectives = [
        collective(kind, axis, count=count, payload_bytes=size)
        for kind in ("all-reduce", "all-to-all")
        for axis in ("data", "tensor", 'a"b\n\u202e', None)
        for count in (0, 3, (0, None), (1, 2))
        for size in (0, 64, 1 << 40)
    ]
    want = signature(audit_of(*collectives))
    assert from_text(to_text(want)) == want
    random.Random(0).shuffle(collectives)
    moved = [dataclasses.replace(c, line=9, name="x", scope="y", source=None) for c in collectives]
    assert signature(audit_of(*moved)) == want


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "all-to-all"}, {"axis": "data"}, {"dtype": "f32"}, {"payload_bytes": 1023},
        {"count": 5}, {"count": (4, None)}, {"group_size": 2}, {"wire_bytes": 1},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_changes_the_communication_changes_the_signature(change):
    assert signature(audit_of(collective(**change))) != signature(audit_of(collective()))


def test_the_order_in_which_buffers_were_merged_does_not_matter():
    one, other = (collective(buffers=[(dtype, 8, "forward") for dtype in dtypes])
                  for dtypes in (("f32", "bf16"), ("bf16", "f32")))  # fmt: skip
    assert signature(audit_of(one)) == signature(audit_of(other))


ROW = {
    "kind": "all-reduce", "axes": "tensor", "dtype": "bf16", "group_size": 4,
    "payload_bytes": 8, "wire_bytes": 12, "count": 1,
}  # fmt: skip


def test_a_row_without_a_bound_says_so_with_null():
    low = {key: value for key, value in ROW.items() if key != "count"} | {"count_min": 2}
    (entry,) = from_text(snapshot({**low, "count_max": None}))
    assert entry.count == Bounds(low=2, high=None)
    with pytest.raises(AuditError):
        from_text(snapshot(low))


def snapshot(*rows):
    return json.dumps({"schema": "jaxpar.comm/1", "collectives": list(rows)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("9" * 10_000, "no JSON"),
        ("[]", "its schema is list"),
        ("{}", "its schema is None"),
        ('{"schema": "jaxpar.comm/2"}', "its schema is 'jaxpar.comm/2', not \"jaxpar.comm/1\""),
        ('{"schema": "jaxpar.comm/1"}', "no list of collectives"),
        (snapshot(3), "A collective of this snapshot is 3, no object"),
        *(
            (snapshot({**ROW, key: value}), "it needs kind, axes, dtype as text")
            for key, value in [
                ("count", None), ("count", -1), ("count", True), ("count", 1.0), ("axes", ["a"]),
                ("kind", None), ("payload_bytes", "8"), ("group_size", float("nan")),
            ]
        ),
        *(
            (snapshot({k: v for k, v in ROW.items() if k != key}), "it needs kind, axes, dtype")
            for key in ROW
        ),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_told(text, message):
    with pytest.raises(AuditError) as caught:
        from_text(text)
    assert message in str(caught.value)
