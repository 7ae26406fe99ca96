"""Budgets: what is over, what is not known, and what no budget file may say."""

import json
from pathlib import Path

import pytest

from jaxpar.audit import audit
from jaxpar.audit.budget import Budget, BudgetError, Limit, check
from jaxpar.errors import JaxparError
from tests.audit.records import audit_of, collective

HLO = Path(__file__).parent / "hlo"


def load(text):
    Path("budget.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Budget.load("budget.toml")


def broken(result, **limits):
    """(what, key, at least, at most, unknown) of each violation."""
    return [
        (v.what, v.key, v.actual_min, v.actual_max, v.is_unknown)
        for v in check(Budget(**limits), result)
    ]


def test_a_budget_file_reads_as_it_is_written():
    budget = load("""
        max_wire_bytes = "64 MiB"
        forbidden = ["all-to-all"]
        max_exposed_fraction = 0.2
        [[limit]]
        kind = "all-reduce"
        axis = "tensor"
        phase = "forward"
        max_count = 64
        max_payload_bytes = "1.5 GB"
        [[limit]]
        axis = "data, tensor"
        max_count = 0
    """)
    assert budget.forbidden == ("all-to-all",)
    step, first, second = budget.limits
    assert step.allowed == {"max_wire_bytes": 64 << 20, "max_exposed_fraction": 0.2}
    assert first == Limit(
        kind="all-reduce", axis="tensor", phase="forward", max_count=64,
        max_payload_bytes=1_500_000_000,
    )  # fmt: skip
    assert (str(first), str(second)) == (
        "all-reduce over tensor, forward", "all collectives over data, tensor",
    )  # fmt: skip
    assert second.axes == ("data", "tensor") and second.allowed == {"max_count": 0}


def test_a_real_program_is_within_its_own_numbers_and_over_one_less():
    result = audit(HLO / "tp.gpu_1x1x8.txt.gz", mesh="data=2,tensor=4")
    want = {(t.kind, t.axes): t for t in result.totals}["all-reduce", ("tensor",)]
    for key in ("count", "payload_bytes", "wire_bytes"):
        actual = getattr(want, key)
        where = {"kind": "all-reduce", "axis": "tensor"}
        assert check(Budget(limit=[Limit(**where, **{f"max_{key}": actual})]), result) == ()
        (over,) = check(Budget(limit=[Limit(**where, **{f"max_{key}": actual - 1})]), result)
        assert (over.allowed, over.actual_min, over.actual_max) == (actual - 1, actual, actual)
        assert sum(p.collective.count for p in over.portions) == want.count
        assert all(p.collective.source for p in over.portions)


def test_a_limit_is_about_its_kind_axis_and_phase():
    result = audit_of(
        collective(count=4),
        collective("all-gather", count=8, phase="backward"),
        collective(axis="data,tensor", count=16),
        collective(axis="data", count=32),
    )
    counts = {}
    for where in ({}, {"kind": "all-reduce"}, {"axis": "tensor"}, {"axis": "tensor,data"},
                  {"phase": "backward"}, {"kind": "all-to-all"}):  # fmt: skip
        found = broken(result, limit=[Limit(**where, max_count=0)])
        counts[str(where)] = found[0][2] if found else 0
    assert list(counts.values()) == [60, 52, 28, 16, 8, 0]


def test_of_what_was_merged_only_the_part_in_that_phase_counts():
    merged = collective(
        axis="data", buffers=[("f32", 4, "forward"), ("f32", 996, "backward")], count=1
    )
    limit = Limit(phase="forward", max_payload_bytes=4)
    assert broken(audit_of(merged), limit=[limit]) == []
    limit = Limit(phase="backward", max_payload_bytes=995)
    assert broken(audit_of(merged), limit=[limit]) == [
        ("all collectives, backward", "max_payload_bytes", 996, 996, False)
    ]


def test_what_is_not_known_passes_no_limit():
    unknown = audit_of(collective(count=(0, None)))
    assert broken(unknown, max_count=1000) == [("all collectives", "max_count", 0, None, True)]
    assert broken(unknown, max_wire_bytes=1) == [
        ("all collectives", "max_wire_bytes", 0, None, True)
    ]
    branch = audit_of(collective(count=(0, 2)))
    assert broken(branch, max_count=2) == []
    assert broken(branch, max_count=1) == [("all collectives", "max_count", 0, 2, True)]
    assert broken(audit_of(collective(count=(3, 4))), max_count=2)[0][4] is False
    # Devices that are no axis may be on it, and a phase that nobody tells may be the one.
    lost = audit_of(collective(axis=None, phase="unknown"))
    limit = Limit(axis="data", phase="update", max_count=3)
    assert broken(lost, limit=[limit]) == [
        ("all collectives over data, update", "max_count", 4, 4, False)
    ]


def test_a_forbidden_kind_may_not_occur_even_in_a_branch():
    result = audit_of(collective("all-to-all", count=(0, 1)), collective())
    assert broken(result, forbidden=["all-to-all", "all-gather"]) == [
        ("all-to-all", "forbidden", 0, 1, True)
    ]


def test_exposure_is_of_all_bytes_on_the_wire_and_has_to_be_known():
    hidden = collective(is_async=True, exposed_fraction=0.0, payload_bytes=3072)
    shown = collective()
    unknown = collective(is_async=True, exposed_fraction=None)
    what = "all collectives"
    key = "max_exposed_fraction"
    assert broken(audit_of(hidden, shown), max_exposed_fraction=0.25) == []
    assert broken(audit_of(hidden, shown), max_exposed_fraction=0.2) == [
        (what, key, 0.25, 0.25, False)
    ]
    assert broken(audit_of(hidden, unknown), max_exposed_fraction=0.2) == [
        (what, key, 0.0, 0.25, True)
    ]
    assert broken(audit_of(collective(count=(0, 1))), max_exposed_fraction=0.5) == [
        (what, key, 0.0, 1.0, True)
    ]
    assert broken(audit_of(), max_exposed_fraction=0) == []


def test_the_offenders_come_largest_first_and_unknown_ones_before_all():
    result = audit_of(
        collective(name="small"),
        collective(name="large", payload_bytes=1 << 20),
        collective(name="unknown", count=(0, None)),
    )
    (violation,) = check(Budget(max_count=0), result)
    names = [portion.collective.name for portion in violation.portions]
    assert names == ["unknown", "large", "small"]
    data = json.loads(json.dumps(violation.to_json()))
    assert data["key"] == "max_count" and data["actual_max"] is None and data["unknown"] is False
    assert data["collectives"][1]["source"] == "model.py:42"


def test_an_axis_that_the_program_does_not_have_is_told():
    budget = Budget(limit=[Limit(axis="tensr", max_count=1)])
    with pytest.raises(
        BudgetError, match=r"no axis 'tensr' in this program.* Did you mean 'tensor'\?$"
    ):
        check(budget, audit_of(collective()))
    with pytest.raises(BudgetError, match=r"Known: size4stride1\. Name the axes with --mesh"):
        check(budget, audit_of(collective(axis="size4stride1"), mesh=None))
    assert check(budget, audit_of(mesh=None)) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it limits nothing; write max_wire_bytes"),
        ("forbidden = []", "it limits nothing"),
        ("max_cuont = 1", "unknown key 'max_cuont'. Did you mean 'max_count'?"),
        ("kind = 'all-reduce'", "unknown key 'kind'. It belongs into a table of its own"),
        ("[[limit]]\nmax_cuont = 1", "'max_cuont' in a [[limit]]. Did you mean 'max_count'?"),
        ("[[limit]]\nmax_count = 1\nforbidden = []", "It belongs above the first [[limit]]."),
        ("[[limit]]\nkind = 'all-reduce'", "the limit of all-reduce has no max_…"),
        ("[limit]\nmax_count = 1", "limit is no list of tables"),
        ("limit = [1]", "limit is no list of tables"),
        ("[[limit]]\nkind = 'allreduce'\nmax_count = 1", "no collective 'allreduce'. Did you mean"),
        ("[[limit]]\nkind = 3\nmax_count = 1", "no collective 3."),
        ("[[limit]]\naxis = ''\nmax_count = 1", "axis = '' names no axis"),
        ("[[limit]]\naxis = 'a,,b'\nmax_count = 1", "axis = 'a,,b' names no axis"),
        ("[[limit]]\naxis = ['a']\nmax_count = 1", "axis = ['a'] names no axis"),
        ("[[limit]]\nphase = 'fwd'\nmax_count = 1", "phase='fwd' (str) must be one of: 'forward'"),
        ("forbidden = 'all-to-all'", "forbidden = 'all-to-all' is no list"),
        ("forbidden = [1]", "no collective 1."),
        ("max_count = -1", "max_count = -1 (int) must be a whole number, from 0"),
        ("max_count = true", "max_count = True (bool) must be a whole number"),
        ("max_count = '5 B'", "max_count = '5 B' (str) must be a whole number"),
        ("max_count = 1.0", "max_count = 1.0 (float) must be a whole number"),
        ("max_wire_bytes = '64 Mib'", "max_wire_bytes = '64 Mib': Did you mean 'MiB'?"),
        ("max_wire_bytes = '64'", "must be bytes as a whole number or a text such as"),
        ("max_wire_bytes = '9999999999 PiB'", "from 0 to 2^62."),
        (f"max_wire_bytes = {'9' * 40}", "from 0 to 2^62."),
        ("max_exposed_fraction = nan", "max_exposed_fraction = nan is no number from 0 to 1"),
        ("max_exposed_fraction = 20", "max_exposed_fraction = 20 is no number from 0 to 1"),
        ("max_exposed_fraction = true", "is no number from 0 to 1"),
        ("max_count 1", "not TOML: "),
        ("x = " + "[" * 30_000, "not TOML: "),
        (f"x = {'9' * 20_000}", "not TOML: "),
        ("#" * 70_000, "more than 65,536 bytes"),
        (b"\xff", "not UTF-8 text (byte 0)"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_is_told_with_its_file(text, message):
    with pytest.raises(BudgetError) as caught:
        load(text)
    assert str(caught.value).startswith("Budget file 'budget.toml': ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["nosuch.toml", ".", "x" * 300, "a\0b"])
def test_a_file_that_cannot_be_read_is_told(path):
    with pytest.raises(JaxparError, match="cannot be read"):
        Budget.load(path)


def test_a_budget_in_python_is_checked_the_same():
    with pytest.raises(BudgetError, match=r"every part is a Limit"):
        Budget(limit=[{"max_count": 1}])
    with pytest.raises(BudgetError, match="limits nothing"):
        Budget()
