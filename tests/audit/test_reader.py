import subprocess
import sys
import time

import pytest

from jaxpar.audit.reader import Operand, read_hlo, split_top
from jaxpar.audit.shape import DTYPE_BITS, Array, close, leaves, nbytes, parse_shape
from jaxpar.errors import AuditError


def read(text):
    return read_hlo(text.split("\n"))


def test_importing_the_reader_imports_no_jax():
    code = "import sys, jaxpar.audit; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("f32[8,128]{1,0}", 4096),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("pred[]{:T(512)}", 1),
        ("s4[3]{0:E(4)}", 2),
        ("f4e2m1fn[8]", 4),
        ("f8e4m3fn[8]", 8),
        ("c128[2]", 32),
        ("token[]", 0),
        ("()", 0),
        ("f32[<=8]", 32),
        ("b(f32[2])", 8),
        ("(f32[2]{0}, (s32[], u8[3]), /*index=5*/bf16[1,0,4])", 15),
    ],
)
def test_types(text, bytes_):
    assert nbytes(parse_shape(text)) == bytes_


def test_type_structure():
    inner = Array(dtype="s32", dims=())
    assert parse_shape("(f32[2], (s32[]))") == (Array(dtype="f32", dims=(2,)), (inner,))
    assert list(leaves(((inner,), inner))) == [inner, inner]
    assert DTYPE_BITS["bf16"] == 16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f32",
        "f32[",
        "f32[a]",
        "f32[?]",
        "(f32[2]",
        "f32[2] f32[2]",
        "(" * 100,
        "f32[" + "9" * 50,
    ],
)
def test_damaged_types(text):
    with pytest.raises(AuditError):
        parse_shape(text)


def test_unknown_element_type():
    with pytest.raises(AuditError, match="f7e1m5"):
        nbytes(parse_shape("f7e1m5[4]"))


MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8, alias={ {1}: (0, {}, may) }

FileNames
1 "model.py"
2 "/lib/jaxpar/collectives.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=1}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}, execution_thread="main"

ENTRY %main (p: f32[8], q: (f32[8], s32[])) -> (f32[8], token[]) {
  %p = f32[8]{0:T(8,128)(2,1)} parameter(0), metadata={op_name="p"}
  q = (f32[8]{0}, /*index=1*/s32[]) parameter(1)
  %c = f32[2]{0} constant({1, 2})
  %s = s8[3]{0} constant("(\\"{[")
  %ar = f32[8]{0} all-reduce(f32[8]{0} %p), channel_id=1, replica_groups={{0,1},{2,3}}, \
use_global_device_ids=true, to_apply=%add, frontend_attributes={a="}",b={"x":{}}}, \
metadata={op_name="jit(f)/a, to_apply=%fake/psum" stack_frame_id=2}, \
backend_config={"deep":{"n":[1,{"m":"}"}]},"is_sync":true}
  %old = f32[8]{0} add(%ar, %q#0), metadata={op_name="x" source_file="old.py" source_line=3}
  %own = f32[8]{0} add(%ar, %old), metadata={op_name="x" stack_frame_id=3}
  ROOT %t = (f32[8]{0}, token[]) tuple(/*index=0*/%own, %tok)
}
"""


def test_instructions():
    module = read(MODULE)
    assert module.problems == ()
    assert (module.name, module.partitions, module.replicas) == ("jit_f", 8, 1)
    assert module.scheduled
    main = module.entry
    assert list(main.instructions) == ["p", "q", "c", "s", "ar", "old", "own", "t"]
    reduce = main.instructions["ar"]
    assert reduce.opcode == "all-reduce"
    assert reduce.operands == (Operand(name="p"),)
    assert reduce.called == (("to_apply", "add"),)
    assert reduce.attributes["replica_groups"] == "{{0,1},{2,3}}"
    assert reduce.attributes["backend_config"].endswith('"is_sync":true}')
    assert reduce.op_name == "jit(f)/a, to_apply=%fake/psum"
    assert main.instructions["old"].operands[1] == Operand(name="q", path=(0,))
    assert main.root.name == "t"
    assert main.root.operands[0].name == "own"
    assert main.parameters[1].name == "q"
    assert module.undefined() == ["tok (read on line 33)"]


def test_sources():
    module = read(MODULE)
    source = {name: module.source_of(it) for name, it in module.entry.instructions.items()}
    assert source["ar"] == "model.py:42"  # the caller of jaxpar's own collectives
    assert source["own"] == "/lib/jaxpar/collectives.py:7"
    assert source["old"] == "old.py:3"
    assert source["c"] is None


def test_a_mesh_with_device_ids_is_one_attribute():
    groups = "mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}"
    module = read(MODULE.replace("{{0,1},{2,3}}", groups))
    attributes = module.entry.instructions["ar"].attributes
    assert attributes["replica_groups"] == groups
    assert attributes["use_global_device_ids"] == "true"


def test_split_top():
    assert split_top(', a={1,2}, b="x,y", c[3,4] {5,6}') == [
        " a={1,2}",
        ' b="x,y"',
        " c[3,4] {5,6}",
    ]
    assert close("((a)[b])c", 0) == 8
    assert close("((a)", 0) == -1


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('}, execution_thread="main"', "", "is no instruction"),
        (
            "  %c = f32[2]{0} constant({1, 2})",
            "  %c = f32[2]{0} constant({1, 2}",
            "is no instruction",
        ),
        ("%add (x: f32[], y: f32[]) -> f32[] {", "", "outside any computation"),
        ("ENTRY %main", "%main", "no ENTRY"),
        ("  %c = f32[2]{0} constant({1, 2})", "  what is this", "is no instruction"),
        ("%c = f32[2]{0} constant", "%q = f32[2]{0} constant", "a second time"),
    ],
)
def test_damage_is_a_problem(before, after, problem):
    assert before in MODULE
    problems = read(MODULE.replace(before, after, 1)).problems
    assert any(problem in found for found in problems), problems


def test_the_end_is_missing():
    assert "ends inside computation 'main'" in read(MODULE[:-3]).problems[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no HLO computation"),
        ("hello\nworld", "no HLO computation"),
        ("HloModule x", "no HLO computation"),
        ("module @jit_f attributes {}\n", "StableHLO"),
        (MODULE + MODULE, "second HloModule"),
    ],
)
def test_not_one_module(text, message):
    with pytest.raises(AuditError, match=message):
        read(text)


@pytest.mark.parametrize(
    "line",
    [
        "  %a = " + "(" * 300_000,
        "  %a = f32[8] add(" + "{" * 300_000,
        "  %a = f32[8] add(%x), metadata={op_name=" + '\\"' * 300_000,
        "  %a = f32[8] add(%x), metadata={" + 'op_name="' * 100_000,
        "  %a = f32[8] add(%x), metadata={" + "a" * 1_000_000 + "}",
        "  %a = f32[8] add(" + "%x, " * 200_000 + ")",
        "  " + "a" * 1_000_000,
        "  %a = f32[" + "1," * 300_000,
        "  %a = f32[8]" + " " * 1_000_000,
        "1 " + '"' * 1_000_000,
    ],
    ids=range(10),
)
def test_long_lines_take_linear_time(line):
    start = time.process_time()
    module = read("HloModule x\n\nFileNames\n" + line.strip() + "\nENTRY %e {\n" + line + "\n}\n")
    for found in module.entry.instructions.values():
        assert len(found.attributes) >= 0
        assert isinstance(found.op_name, str)
        assert module.source_of(found) is None
        assert len(found.operands) >= 0
    assert time.process_time() - start < 5


def test_time_grows_linearly():
    def seconds(computations):
        text = MODULE.replace(
            "ENTRY", MODULE[MODULE.index("%add") :].split("\n\n")[0] + "\n\nENTRY"
        )
        body = text[text.index("%add") : text.index("\n\n", text.index("%add"))]
        many = "\n\n".join(body.replace("%add", f"%add{i}") for i in range(computations))
        lines = f"HloModule x\n\n{many}\n".split("\n")
        start = time.process_time()
        read_hlo(lines)
        return time.process_time() - start

    small = min(seconds(1000) for _ in range(3))
    assert min(seconds(10_000) for _ in range(3)) < 30 * small


INERT = """%fused (p.1: f32[8], p.2: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %p.2 = f32[8]{0} parameter(1)
  %x = f32[8]{0} add(%p.1, %p.2), metadata={op_name="%p.2 = ROOT parameter(7)"}
  %x.1 = f32[8]{0} multiply(%x, %x)
  ROOT %y = f32[8]{0} add(%x.1, %x)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%fused
}
"""
WHOLE = [("  %p.1", "  p.1"), ("ROOT %y", "%y"), ("  %x.1", "\t%x.1")]


@pytest.mark.parametrize(("before", "after"), [("", ""), *WHOLE])
def test_single_lines_are_those_of_the_whole(before, after):
    """A fusion's body is read line by line, and gives what reading all of it gives."""
    text = INERT.replace(before, after, 1)
    for ask in (
        lambda it: it.root.line,
        lambda it: sorted((number, found.line) for number, found in it.parameters.items()),
        lambda it: [found.line for found in (it.get("x"), it.get("p.2"), it.get("y")) if found],
        lambda it: [[user.line for user in it.users(name)] for name in ("x", "p.1", "x.1", "z")],
        lambda it: it.get("z"),
    ):
        parts, whole = (read_hlo(text).computations["fused"] for _ in range(2))
        assert parts.inert
        assert whole.instructions
        assert ask(parts) == ask(whole)


def test_a_line_is_read_once():
    body = read_hlo(INERT).computations["fused"]
    root, (first, second) = body.root, body.users("x")
    assert body.get("y") is root is second is body.users("x.1")[0]
    assert body.instructions["y"] is root
    assert body.instructions["x.1"] is first
    body.forget()
    assert body.root is not root
