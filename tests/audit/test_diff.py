"""Diffs: what changed is named, what only looks different is not."""

import json
import random
from pathlib import Path

import pytest

from jaxpar.audit import audit
from jaxpar.audit.diff import compared, diff
from jaxpar.audit.signature import signature
from tests.audit.records import audit_of, collective

HLO = Path(__file__).parent / "hlo"


def real(name, mesh=None):
    return audit(HLO / f"{name}.txt.gz", mesh=mesh)


def what(before, after):
    return [" ".join(change.what) for change in diff(before, after).changes]


def only(before, after):
    (change,) = diff(before, after).changes
    return change


@pytest.mark.parametrize("name", ["tp.cpu", "pp.gpu_1x1x8", "ep.tpu_v5e_2x4", "trip_fori_dyn.cpu"])
def test_a_program_equals_itself_in_any_order(name):
    result = real(name)
    collectives = list(result.collectives)
    random.Random(0).shuffle(collectives)
    shuffled = audit_of(*collectives, mesh=None)
    assert diff(result, shuffled).changes == ()
    assert diff(result, result).same
    for total, want in zip(diff(result, result).totals, result.totals, strict=True):
        assert total.before == total.after
        assert total.after.count.exact == want.count
        assert total.after.payload_bytes.exact == want.payload_bytes
        assert total.after.wire_bytes.exact == want.wire_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axis": "data"}, "axis"),
        ({"dtype": "f32", "payload_bytes": 2048}, "dtype bytes"),
        ({"dtype": "f16"}, "dtype"),
        ({"count": 5}, "count"),
        ({"count": (4, None)}, "count"),
        ({"count": (0, 4)}, "count"),
        ({"payload_bytes": 1000}, "bytes"),
        ({"group_size": 8, "wire_bytes": 1792}, "group size"),
        ({"kind": "reduce-scatter"}, "kind"),
        ({"count": 5, "payload_bytes": 1000}, "count bytes"),
        ({"axis": "data", "count": 5}, "axis count"),
    ],
    ids=str,
)
def test_a_change_is_named(change, words):
    rest = collective("all-gather", scope="embed")
    before, after = audit_of(collective(), rest), audit_of(rest, collective(**change))
    assert not diff(before, after).same
    assert what(before, after) == [words]
    assert only(before, after).before == only(after, before).after


def test_appeared_and_vanished_with_the_largest_first():
    small = collective("all-to-all", axis="data", scope="router")
    large = collective("all-gather", payload_bytes=1 << 20, scope="embed", phase="backward")
    both = diff(audit_of(collective(), small), audit_of(large, collective()))
    assert [change.what for change in both.changes] == [("appeared",), ("vanished",)]
    assert (both.changes[0].before, both.changes[1].after) == (None, None)
    assert [(t.kind, t.before is None, t.after is None) for t in both.totals] == [
        ("all-reduce", False, False), ("all-to-all", False, True), ("all-gather", True, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([(4, 1024)], [(1, 4096)], "merged"),
        ([(1, 4096)], [(4, 512), (2, 1024)], "split"),
        ([(1, 1024), (1, 3072)], [(2, 2048)], "regrouped"),
    ],
)
def test_the_same_bytes_in_other_operations_are_no_difference(before, after, word):
    sides = [
        audit_of(*(collective(count=n, payload_bytes=size, scope=f"{n}") for n, size in side))
        for side in (before, after)
    ]
    assert what(*sides) == [word]
    assert diff(*sides).same
    # One byte more is one.
    more = audit_of(*sides[1].collectives, collective(count=1, payload_bytes=1, scope="4"))
    assert not diff(sides[0], more).same


def test_loops_that_were_unrolled_in_part_are_the_same():
    rolled, unrolled = [collective(count=4)], [collective(count=3), collective(count=1)]
    assert diff(audit_of(*rolled), audit_of(*unrolled)).changes == ()


def test_operations_merged_across_dtypes_and_phases_are_the_same_bytes():
    apart = audit_of(
        collective(axis="data", dtype="f32", payload_bytes=4, count=1),
        collective(axis="data", payload_bytes=512, count=1, phase="backward"),
        collective(axis="data", payload_bytes=512, count=1, phase="backward"),
    )
    merged = audit_of(
        collective(
            axis="data", count=1, buffers=[("f32", 4, "forward"), ("bf16", 1024, "backward")]
        )
    )
    assert what(apart, merged) == ["merged"] and diff(apart, merged).same
    (total,) = diff(apart, merged).totals
    assert (total.before.count.exact, total.after.count.exact) == (3, 1)
    assert total.before.payload_bytes == total.after.payload_bytes


def test_bytes_that_only_changed_their_phase_are_noted():
    before, after = (audit_of(collective(phase=phase)) for phase in ("forward", "unknown"))
    assert what(before, after) == ["phase"] and diff(before, after).same
    assert only(before, after).after.phase == "unknown"


def test_unknown_counts_are_equal_only_to_themselves():
    unknown = audit_of(collective(count=(0, None)))
    assert diff(unknown, audit_of(collective(count=(0, None)))).same
    larger = audit_of(collective(count=(0, None), payload_bytes=2048))
    assert what(unknown, larger) == ["bytes"]
    more = audit_of(*unknown.collectives, *unknown.collectives)
    assert not diff(unknown, more).same
    assert only(unknown, audit_of(collective(count=0))).what == ("count",)


def test_a_moved_operation_is_found_among_others_on_its_new_axis():
    stays = collective(axis="data", count=1, dtype="f32", phase="unknown", scope="")
    before = audit_of(collective(phase="unknown", scope=""), stays)
    after = audit_of(stays, collective(axis="data", phase="unknown", scope=""))
    change = only(before, after)
    assert (change.what, change.before.axes, change.after.axes) == (("axis",), "tensor", "data")
    # Also where only a signature is known.
    (change,) = compared(signature(before), signature(after)).changes
    assert (change.what, change.after.count.exact) == (("axis",), 4)


def test_what_only_changed_its_scope_is_not_in_the_way_of_what_changed():
    before = audit_of(collective(scope="a"), collective(scope="b", payload_bytes=2048))
    after = audit_of(collective(scope="c"), collective(scope="b", payload_bytes=2048, count=7))
    change = only(before, after)
    assert (change.what, change.before.count.exact, change.after.count.exact) == (("count",), 4, 7)


def test_what_has_nothing_in_common_is_not_paired():
    one = collective(scope="", phase="unknown")
    other = collective(axis="data", scope="", phase="unknown", payload_bytes=77)
    assert sorted(what(audit_of(one), audit_of(other))) == ["appeared", "vanished"]


def test_two_jax_versions_and_a_double_buffered_loop_are_the_same():
    assert diff(real("fsdp.cpu_jax0102"), real("fsdp.cpu")).same
    assert diff(real("fsdp.gpu_1x1x8"), real("fsdp.gpu_opt_dblbuf")).same


def test_two_backends_differ_in_dtype_and_bytes():
    mesh = {"data": 2, "tensor": 4}
    cpu, gpu = real("tp.cpu", mesh), real("tp.gpu_1x1x8", mesh)
    (first, *_) = diff(cpu, gpu).changes
    assert (first.what, first.before.dtype, first.after.dtype) == (
        ("dtype", "bytes"),
        "f32",
        "bf16",
    )
    assert first.before.payload_bytes.exact == 2 * first.after.payload_bytes.exact
    assert diff(gpu, real("tp.tpu_v5e_2x4", mesh)).same


def test_sequence_parallelism_splits_all_reduces_in_two():
    mesh = {"data": 2, "tensor": 4}
    changes = diff(real("tp.cpu", mesh), real("tpsp.cpu", mesh)).changes
    (split, *_) = [change for change in changes if "kind" in change.what]
    assert (split.before.kind, split.after.kind) == ("all-reduce", "all-gather+reduce-scatter")
    assert split.before.wire_bytes == split.after.wire_bytes


def test_a_diff_is_plain_data():
    data = diff(audit_of(collective()), audit_of(collective(count=(0, None)))).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["same"] is False
    (change,) = data["changes"]
    assert change["what"] == ["count"] and change["before"]["count"] == 4
    assert (change["after"]["count"], change["after"]["count_max"]) == (None, None)
    assert data["totals"][0]["axes"] == "tensor"
