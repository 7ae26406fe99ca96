"""Text and files that nobody compiled: huge, endless, nested, circular, or no text at all."""

import gzip
import os
import time
import zipfile

import pytest

from jaxpar.audit import audit
from jaxpar.errors import AuditError

GUARD_S = 20  # wall time; each takes well under a second on an idle machine
HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""
MAIN = """ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  ROOT %psum.1 = f32[256]{0} all-reduce(%x), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/shard_map/psum"}
}
"""
TEXT = HEADER + ADD + MAIN
NESTED = 100_000
OUTCOMES = ("refused", "incomplete", "complete")
MANY = 100_000


@pytest.fixture(autouse=True)
def in_time():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < GUARD_S


def outcome(thing):
    """The project's own error, short enough to print, or an audit that JSON can say.

    A complete one has to have all that TEXT communicates.
    """
    try:
        result = audit(thing)
    except AuditError as error:
        assert 0 < len(str(error)) < 1000
        return "refused"
    assert result.to_json()["program"]["complete"] is result.program.complete
    if not result.program.complete:
        return "incomplete"
    assert sum(total.payload_bytes for total in result.totals) >= 1024
    return "complete"


def test_the_text_that_the_others_damage_is_fine():
    assert outcome(TEXT) == "complete"
    assert audit(TEXT).totals[0].payload_bytes == 1024


LONG = "x" * 10_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LONG, "refused"),
        ("HloModule " + LONG, "refused"),
        (HEADER + LONG + "\n" + ADD + MAIN, "complete"),
        (HEADER + ADD + MAIN.replace("  %x", f"  %{LONG}\n  %x"), "incomplete"),
        (TEXT.replace("jit(f)/shard_map", LONG), "complete"),
        (TEXT.replace("jit(f)/shard_map", "%= " * 3_000_000), "complete"),
        (TEXT.replace("}\n}", "}, " + "a=1, " * 2_000_000 + "\n}"), "complete"),
    ],
    ids=["line", "header", "between", "inside", "name", "quoted", "attributes"],
)
def test_a_line_of_ten_megabytes(text, expected):
    assert outcome("\n" + text) == expected


@pytest.mark.parametrize("opening", ["(", "{", "[", "({[", '"', "/*", "a={"])
@pytest.mark.parametrize(
    "place",
    ["f32[256]{0} all-reduce", "(%x)", "[1,8]<=[8]", "jit(f)", "(x: f32[256])"],
)
def test_brackets_a_hundred_thousand_deep(place, opening):
    for text in (opening * NESTED, opening * NESTED + ")" * NESTED, "(" * NESTED + ")" * NESTED):
        damaged = TEXT.replace(place, text + place, 1)
        assert damaged != TEXT
        assert outcome(damaged) in OUTCOMES


@pytest.mark.parametrize(
    "groups",
    [
        "[1000000,1000000]<=[1000000000000]",
        "[1000000000000,1]<=[1000000000000]",
        "[8]<=[" + "2," * 1000 + "2]",
        "[" + "1," * 500_000 + "8]<=[8]",
        "[2,4]<=[8]T(0,0)",
        "[2,4]<=[8]T(" + "0," * 500_000 + "1)",
        "[" + "9" * 1_000_000 + "]<=[8]",
        "{{0,1,2,3,4,5,6," + "7" * 1_000_000 + "}}",
        "{{" + ",".join(map(str, range(200_000))) + "}}",
        "{" + "{0}," * 300_000 + "{1}}",
        "{{0,1},{2,3},{4,5},{6,-7}}",
        "{{0,1},{2,3},{4,5},{6}",
        "mesh['a'=1000000,'b'=1000000] {'a'}",
        "mesh[" + ",".join(f"'a{i}'=1" for i in range(50_000)) + "] {'a0'}",
        "mesh['a'=8] {" + ",".join(["'a':(1)2"] * 50_000) + "}",
        "mesh['a'=8], device_ids=([1000000]<=[1000000]) {'a'}",
    ],
    ids=range(16),
)
def test_groups_of_more_devices_than_there_are(groups):
    assert outcome(TEXT.replace("[1,8]<=[8]", groups)) in ("refused", "incomplete")


@pytest.mark.parametrize(
    "dims",
    ["9" * 1_000_000, "-1", "1e9", "0x10", "٣", "256" + ",1" * 300_000, "?", "2 2"],
    ids=range(8),
)
def test_dims_that_no_array_has(dims):
    assert outcome(TEXT.replace("f32[256]{0} all-reduce", f"f32[{dims}]{{0}} all-reduce")) in (
        "refused",
        "incomplete",
        *(["complete"] if dims.startswith("256,1") else []),  # the same size
    )


def circle(length):
    """`length` computations, each of which calls the next and the last the first."""
    parts = [
        f"%c{i} (p{i}: f32[256]) -> f32[256] {{\n  %p{i} = f32[256]{{0}} parameter(0)\n"
        f"  %g{i} = f32[256]{{0}} all-gather(%p{i}), replica_groups={{{{0}}}}, dimensions={{0}}\n"
        f"  ROOT %r{i} = f32[256]{{0}} call(%g{i}), to_apply=%c{(i + 1) % length}\n}}\n\n"
        for i in range(length)
    ]
    called = MAIN.replace("%x)", "%y)").replace(
        "  ROOT", "  %y = f32[256]{0} call(%x), to_apply=%c0\n  ROOT"
    )
    return HEADER + ADD + "".join(parts) + called


@pytest.mark.parametrize("length", [1, 2, 1000])
def test_computations_that_call_each_other_in_a_circle(length):
    with pytest.raises(AuditError, match="calls itself"):
        audit(circle(length))


@pytest.mark.parametrize(
    "call",
    [
        "while(%x), condition=%main, body=%main",
        "conditional(%x, %x, %x), branch_computations={%main, %add}",
        "fusion(%x), kind=kLoop, calls=%main",
        "async-start(%x), calls=%main",
    ],
)
def test_an_entry_that_runs_itself(call):
    text = TEXT.replace("  ROOT %psum", f"  %y = f32[256]{{0}} {call}\n  ROOT %psum")
    assert outcome(text) in ("refused", "incomplete")


def chain(length, kind="call"):
    """An entry that calls a computation that calls …, `length` deep; the last communicates."""
    attributes = {"call": "to_apply", "fusion": "kind=kLoop, calls", "async-start": "calls"}[kind]
    parts = [
        f"%c{i} (p{i}: f32[256]) -> f32[256] {{\n  %p{i} = f32[256]{{0}} parameter(0)\n"
        f"  ROOT %r{i} = f32[256]{{0}} {kind}(%p{i}), {attributes}=%c{i - 1}\n}}\n\n"
        for i in range(1, length)
    ]
    first = MAIN.replace("ENTRY %main (x:", "%c0 (x:") + "\n"
    last = (
        "ENTRY %main (y: f32[256]) -> f32[256] {\n  %y = f32[256]{0} parameter(0)\n"
        f"  ROOT %z = f32[256]{{0}} {kind}(%y), {attributes}=%c{length - 1}\n}}\n"
    )
    return HEADER + ADD + first + "".join(parts) + last


def test_a_chain_of_calls_is_followed_without_recursion():
    result = audit(chain(20_000))
    assert [(found.count, found.payload_bytes) for found in result.collectives] == [(1, 1024)]
    assert result.program.complete


@pytest.mark.parametrize("kind", ["fusion", "async-start"])
def test_a_chain_of_wrappers_is_followed_or_said_to_be_too_long(kind):
    assert outcome(chain(20_000, kind)) in OUTCOMES


def test_values_passed_on_a_hundred_thousand_times():
    lines = "".join(f"  %y{i} = f32[256]{{0}} copy(%y{i - 1})\n" for i in range(1, MANY))
    text = TEXT.replace("(%x)", f"(%y{MANY - 1})").replace(
        "  ROOT %psum", f"  %y0 = f32[256]{{0}} negate(%x)\n{lines}  ROOT %psum"
    )
    assert outcome(text) == "complete"
    assert audit(text).totals[0].payload_bytes == 1024


def test_values_that_make_each_other():
    text = TEXT.replace(
        "  ROOT %psum",
        "  %y = f32[256]{0} copy(%z)\n  %z = f32[256]{0} copy(%y)\n"
        "  %t = (f32[256]{0}, f32[256]{0}) tuple(%u, %t)\n"
        "  %u = f32[256]{0} get-tuple-element(%t), index=0\n  ROOT %psum",
    )
    for value in ("%y", "%u"):
        assert outcome(text.replace("all-reduce(%x)", f"all-reduce({value})")) in OUTCOMES


def test_many_computations():
    parts = "".join(
        f"%f{i} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %n = f32[8]{{0}} negate(%p)\n}}\n\n"
        for i in range(MANY // 2)
    )
    assert outcome(HEADER + ADD + parts + MAIN) == "complete"


def test_a_conditional_with_many_branches():
    branch = MAIN.replace("ENTRY %main (x:", "%b (x:") + "\n"
    names = ", ".join(["%b"] * MANY)
    operands = ", ".join(["%x"] * MANY)
    entry = (
        "ENTRY %main (x: f32[256], i: s32[]) -> f32[256] {\n  %x = f32[256]{0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        f"  ROOT %c = f32[256]{{0}} conditional(%i, {operands}), "
        f"branch_computations={{{names}}}\n}}\n"
    )
    (found,) = audit(HEADER + ADD + branch + entry).collectives
    assert (found.count, found.payload_bytes) == (1, 1024)


@pytest.mark.parametrize(
    "repeated",
    [ADD, MAIN.replace("ENTRY ", ""), MAIN, "  %x = f32[256]{0} parameter(0)\n"],
    ids=["function", "computation", "entry", "line"],
)
def test_the_same_name_a_thousand_times(repeated):
    text = TEXT.replace(repeated.replace("%main", "ENTRY %main", 1), "")
    assert outcome(HEADER + repeated * 1000 + text.removeprefix(HEADER)) in (
        "refused",
        "incomplete",
    )


@pytest.mark.parametrize("times", [10**14, 10**18 - 1])
def test_loops_that_no_step_ends(times):
    body = MAIN.replace("ENTRY %main (x:", "%body (x:") + "\n"
    condition = (
        "%cond (s: f32[256]) -> pred[] {\n  %s = f32[256]{0} parameter(0)\n"
        "  ROOT %t = pred[] constant(true)\n}\n\n"
    )
    entry = (
        "ENTRY %main (y: f32[256]) -> f32[256] {\n  %y = f32[256]{0} parameter(0)\n"
        "  %w = f32[256]{0} while(%y), condition=%cond, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}\n'
        "  ROOT %v = f32[256]{0} while(%w), condition=%cond, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}\n}}\n'
    )
    text = HEADER + ADD + body + condition + entry
    if times * 2 > 10**15:
        with pytest.raises(AuditError, match="times per step"):
            audit(text)
    else:
        assert audit(text).totals[0].count == 2 * times


def test_a_zip_or_a_gz_of_zeros(tmp_path):
    with gzip.open(tmp_path / "zeros.txt.gz", "wb", 9) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with zipfile.ZipFile(tmp_path / "zeros.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(1 << 20))
    (tmp_path / "zeros.txt").write_bytes(bytes(1 << 20))
    for name in ("zeros.txt.gz", "zeros.zip", "zeros.txt"):
        with pytest.raises(AuditError, match=name):
            audit(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "cp500"])
def test_text_in_another_encoding(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes(TEXT.encode(encoding))
    assert outcome(tmp_path / "a.txt") == "refused"


def test_bytes_that_are_no_text_spoil_only_what_they_hit(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode().replace(b"jit(f)", b"\xff\xfe\xc3\x28\xed\xa0\x80"))
    assert outcome(path) == "complete"
    path.write_bytes(TEXT.encode().replace(b"all-reduce", b"all-\xffreduce"))
    assert outcome(path) in ("refused", "incomplete")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_devices(device):
    assert outcome(device) == "refused"


def test_what_is_no_file(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "none.txt", tmp_path / "loop"):
        assert outcome(path) == "refused"
    if os.geteuid():  # nothing is unreadable for root
        (tmp_path / "secret.txt").write_text(TEXT)
        (tmp_path / "secret.txt").chmod(0)
        assert outcome(tmp_path / "secret.txt") == "refused"
