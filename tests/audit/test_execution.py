"""How often computations run: real loops of all backends, and small texts made for the corners."""

import gzip
from pathlib import Path

import pytest

from jaxpar.audit import audit
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.execution import Count, execution, trip_count
from jaxpar.audit.reader import read_hlo
from jaxpar.errors import AuditError

HLO = Path(__file__).parent / "hlo"

SHAPE = "f32[8]{0}"
REDUCE = (
    "f32[8]{0} all-reduce(%v), channel_id=1, replica_groups={{0,1}}, "
    "use_global_device_ids=true, to_apply=%add"
)
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module_of(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        return read_hlo(file)


def without_trip_counts(name):
    with gzip.open(HLO / f"{name}.txt.gz", "rt") as file:
        return read_hlo(line.replace('"known_trip_count"', '"forgotten"') for line in file)


def trips(module):
    flow = Dataflow(module)
    return {
        found.name: trip_count(found, computation, flow)
        for computation in module.computations.values()
        for found in computation.instructions.values()
        if found.opcode == "while"
    }


KNOWN = [
    ("trip_fori_nonzero.cpu", [9]),
    ("trip_fori_static.cpu", [6]),
    ("trip_map_.cpu", [256]),
    ("trip_nested.cpu", [3, 4]),
    ("trip_scan1.cpu", [5]),
    ("trip_scan_len1.cpu", []),
    ("trip_scan_len2.cpu", [2]),
    ("trip_scan_rev.cpu", [5]),
    ("trip_scan_unroll2.cpu", [3]),
    ("trip_while_step3.cpu", [3]),
    ("trip_fori_dyn.cpu", [None]),
    ("trip_while_cond.cpu", [None]),
    ("trip_nested.tpu_v5e_2x4", [3, 4]),
    ("trip_while_step3.tpu_v5e_2x4", [3]),
    ("trip_fori_dyn.tpu_v5e_2x4", [None]),
]


@pytest.mark.parametrize(("name", "expected"), KNOWN)
def test_trip_counts(name, expected):
    assert sorted(trips(module_of(name)).values(), key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(("name", "expected"), KNOWN)
def test_deduction_agrees_with_what_xla_prints(name, expected):
    """As if the backend printed no trip counts, which TPU does not."""
    assert sorted(trips(without_trip_counts(name)).values(), key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("name", ["fsdp.cpu", "fsdp.gpu_1x1x8", "cp.cpu", "pp.cpu", "pp.gpu_1x1x8"])
def test_deduction_agrees_in_whole_steps(name):
    assert trips(without_trip_counts(name)) == trips(module_of(name))


def loop(test, *, first="constant(0)", step="constant(1)", update="add(%i, %step)", bound="7"):
    return f"""HloModule jit_f, is_scheduled=true, num_partitions=2
{ADD}
%body (s: (s32[], {SHAPE})) -> (s32[], {SHAPE}) {{
  %s = (s32[], {SHAPE}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = {SHAPE} get-tuple-element(%s), index=1
  %step = s32[] {step}
  %next = s32[] {update}
  %r = {REDUCE}
  ROOT %out = (s32[], {SHAPE}) tuple(%next, %r)
}}

%condition (s: (s32[], {SHAPE})) -> pred[] {{
  %s = (s32[], {SHAPE}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant({bound})
  ROOT %more = pred[] {test}
}}

ENTRY %main (p: {SHAPE}) -> {SHAPE} {{
  %p = {SHAPE} parameter(0)
  %z = s32[] {first}
  %copied = s32[] copy(%z)
  %init = (s32[], {SHAPE}) tuple(%copied, %p)
  %w = (s32[], {SHAPE}) while(%init), condition=%condition, body=%body
  ROOT %v = {SHAPE} get-tuple-element(%w), index=1
}}
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"test": "compare(%i, %n), direction=LT"}, 7),
        ({"test": "compare(%i, %n), direction=LE"}, 8),
        ({"test": "compare(%i, %n), direction=NE"}, 7),
        ({"test": "compare(%n, %i), direction=GT"}, 7),
        ({"test": "compare(%n, %i), direction=GE"}, 8),
        ({"test": "compare(%i, %n), direction=LT", "first": "constant(2)"}, 5),
        ({"test": "compare(%i, %n), direction=LT", "first": "constant(9)"}, 0),
        ({"test": "compare(%i, %n), direction=LT", "step": "constant(3)"}, 3),
        ({"test": "compare(%i, %n), direction=NE", "step": "constant(3)"}, None),
        ({"test": "compare(%i, %n), direction=LT", "step": "constant(0)"}, None),
        ({"test": "compare(%i, %n), direction=LT", "step": "constant(-1)"}, None),
        ({"test": "compare(%i, %n), direction=LT", "update": "add(%step, %i)"}, 7),
        ({"test": "compare(%i, %n), direction=LT", "update": "subtract(%step, %i)"}, None),
        ({"test": "compare(%i, %n), direction=LT", "update": "multiply(%i, %step)"}, None),
        (
            {
                "test": "compare(%i, %n), direction=GT",
                "first": "constant(7)",
                "bound": "0",
                "update": "subtract(%i, %step)",
            },
            7,
        ),
        ({"test": "compare(%i, %n), direction=GE", "first": "constant(7)", "bound": "0",
              "step": "constant(-2)"}, 4),
        ({"test": "custom-call(%i, %n)"}, None),
        ({"test": "compare(%i, %n), direction=LT", "step": "partition-id()"}, None),
        ({"test": "compare(%i, %n), direction=LT", "bound": "{...}"}, None),
    ],
)  # fmt: skip
def test_deduced_trips(given, expected):
    text = loop(**given)
    assert trips(read_hlo(text.split("\n"))) == {"w": expected}
    result = audit(text)
    if expected == 0:
        assert result.collectives == ()
        return
    (found,) = result.collectives
    assert found.count == expected
    assert found.count_max == expected
    assert [finding.rule for finding in result.findings] == (
        [] if expected else ["unknown-trip-count"]
    )
    assert result.program.complete


@pytest.mark.parametrize("test", ["compare(%i, %n), direction=EQ", "compare(%i, %i), direction=LT"])
def test_a_loop_that_does_not_begin(test):
    text = loop(test=test)
    assert trips(read_hlo(text)) == {"w": None}
    assert audit(text).collectives == ()


def test_a_loop_that_runs_differently_on_each_device():
    text = loop(test="compare(%i, %n), direction=LT", first="partition-id()")
    (found,) = audit(text).collectives
    assert (found.count, found.count_min, found.count_max) == (None, 6, 7)
    assert found.device_counts == (7, 6)


def test_a_condition_runs_once_more_than_its_body():
    text = loop(test="compare(%i, %n), direction=LT")
    asked = text.replace("  %n = s32[]", f"  %v = {SHAPE} get-tuple-element(%s), index=1\n"
                         f"  %q = {REDUCE}\n  %n = s32[]")  # fmt: skip
    assert sorted(found.count for found in audit(asked).collectives) == [7, 8]


PAIR = "(s32[], s32[])"


def two_counters(first, second, bound="%j"):
    """A loop over (i, j), from (0, 5), while i < bound."""
    return f"""HloModule f, num_partitions=2

%body (s: {PAIR}) -> {PAIR} {{
  %s = {PAIR} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %j = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %other = s32[] add(%j, %one)
  ROOT %out = {PAIR} tuple({first}, {second})
}}

%condition (s: {PAIR}) -> pred[] {{
  %s = {PAIR} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %j = s32[] get-tuple-element(%s), index=1
  %n = s32[] constant(9)
  ROOT %more = pred[] compare(%i, {bound}), direction=LT
}}

ENTRY %main () -> {PAIR} {{
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %init = {PAIR} tuple(%zero, %five)
  ROOT %w = {PAIR} while(%init), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("%next", "%j"), 5),  # a bound that the loop carries along
        (("%next", "%j", "%n"), 9),
        (("%other", "%j", "%n"), None),  # steps from another counter
        (("%next", "%i"), None),  # a bound that moves
        (("%j", "%i"), None),
        (("%next", "%other"), None),
        (("%next", "%other", "%n"), 9),
    ],
)
def test_only_what_a_loop_leaves_alone_is_a_bound(given, expected):
    assert trips(read_hlo(two_counters(*given).split("\n"))) == {"w": expected}


def test_branches_give_bounds():
    text = f"""HloModule jit_f, is_scheduled=true, num_partitions=2
{ADD}
%yes (v: {SHAPE}) -> {SHAPE} {{
  %v = {SHAPE} parameter(0)
  ROOT %r = {REDUCE}
}}

%no (v: {SHAPE}) -> {SHAPE} {{
  ROOT %v = {SHAPE} parameter(0)
}}

ENTRY %main (v: {SHAPE}, b: s32[]) -> {SHAPE} {{
  %v = {SHAPE} parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = {SHAPE} conditional(%b, %v, %v), branch_computations={{%yes, %no}}
}}
"""
    (found,) = audit(text).collectives
    assert (found.count, found.count_min, found.count_max) == (None, 0, 1)
    (total,) = audit(text).totals
    assert (total.count, total.payload_bytes, total.count_max) == (None, None, 1)
    both = text.replace("{%yes, %no}", "{%yes, %yes}")
    assert audit(both).collectives[0].count == 1


def test_real_branches():
    for name, number in [("cond_cond.cpu", 1), ("cond_switch.gpu_1x1x8", 2)]:
        found = audit(HLO / f"{name}.txt.gz").collectives
        assert [(one.count_min, one.count_max) for one in found] == [(0, 1)] * number


def chain(depth, calls):
    parts = [f"%f{depth} (v: {SHAPE}) -> {SHAPE} {{\n  ROOT %v = {SHAPE} parameter(0)\n}}"]
    for i in reversed(range(depth)):
        called = "\n".join(f"  %c{n} = {SHAPE} call(%v), to_apply=%f{i + 1}" for n in range(calls))
        head = "ENTRY " if i == 0 else ""
        parts.append(
            f"{head}%f{i} (v: {SHAPE}) -> {SHAPE} {{\n  %v = {SHAPE} parameter(0)\n{called}\n}}"
        )
    return "HloModule x, num_partitions=2\n\n" + "\n\n".join(parts) + "\n"


def test_deep_calls_need_no_recursion():
    module = read_hlo(chain(5000, 1).split("\n"))
    assert execution(module, Dataflow(module)).counts["f5000"] == Count(low=1, high=1)


def test_counts_add_up_and_do_not_explode():
    module = read_hlo(chain(10, 2).split("\n"))
    assert execution(module, Dataflow(module)).counts["f10"].exact == 1024
    with pytest.raises(AuditError, match="times per step"):
        audit(chain(200, 2))


@pytest.mark.parametrize("target", ["%f0", "%f1", "%f5"])
def test_circles_are_refused(target):
    with pytest.raises(AuditError, match="calls itself"):
        audit(chain(6, 1).replace("to_apply=%f6", f"to_apply={target}"))


def test_loops_nested_without_end():
    """Invariance is asked through thousands of loops; no recursion, no explosion."""
    parts, depth = [], 2000
    state = "(s32[], s32[])"
    for i in range(depth):
        inner = "%s" if i == 0 else f"%w{i}"
        line = "" if i == 0 else f"  %w{i} = {state} while(%s), condition=%c, body=%b{i - 1}\n"
        parts.append(
            f"%b{i} (s: {state}) -> {state} {{\n  %s = {state} parameter(0)\n{line}"
            f"  %x = s32[] get-tuple-element({inner}), index=0\n"
            f"  %y = s32[] get-tuple-element({inner}), index=1\n"
            f"  ROOT %t = {state} tuple(%x, %y)\n}}\n"
        )
    condition = (
        f"%c (s: {state}) -> pred[] {{\n  %s = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n  %n = s32[] get-tuple-element(%s), index=1\n"
        "  ROOT %p = pred[] compare(%i, %n), direction=LT\n}\n"
    )
    entry = (
        f"ENTRY %m (s: {state}) -> {state} {{\n  %s = {state} parameter(0)\n"
        f"  ROOT %w = {state} while(%s), condition=%c, body=%b{depth - 1}\n}}\n"
    )
    text = "HloModule x, num_partitions=2\n\n" + condition + "\n".join(parts) + "\n" + entry
    assert audit(text).collectives == ()
