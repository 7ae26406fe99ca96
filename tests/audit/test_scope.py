import pytest

from jaxpar.audit.scope import phase_of, scope_of, unmerged

PREFIX = "jit(step)/shard_map/"


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("transpose(jvp(tensor))/while/body/checkpoint/attention/psum", "tensor/attention", "b"),
        ("jvp(tensor)/mlp/psum", "tensor/mlp", "f"),
        ("jvp()/while/body/closed_call/eval_jaxpr/fsdp_gather/all_gather", "fsdp_gather", "f"),
        ("transpose(jvp())/checkpoint/rematted_computation/mlp/all_gather", "mlp", "r"),
        ("transpose(jvp(a))/jvp(a)/checkpoint/b/psum", "a/b", "b"),
        ("update/adam/psum", "adam", "u"),
        ("backward/x/forward/y/psum", "x/y", "f"),
        ("backward/jvp(x)/psum", "x", "f"),
        ("recompute/attention/psum", "attention", "r"),
        ("clip/psum", "clip", "u"),
        ("cond/branch_1_fun/loss/psum", "loss", "u"),
        ("transpose(jvp())/jit(_where)/psum", "", "b"),
        ("attn/btd,dchk->cbthk/psum", "attn", "u"),
        ("vmap(jvp(a))/b/psum", "a/b", "f"),
        ("forwarded/psum", "forwarded", "u"),
    ],
)
def test_phase_and_scope(op_name, scope, phase):
    assert scope_of(PREFIX + op_name) == scope
    assert phase_of(PREFIX + op_name, True)[0] == phase


def test_without_differentiation_everything_is_forward():
    assert phase_of("jit(f)/clip/psum", False) == "forward"
    assert phase_of("jit(f)/update/psum", False) == "update"


def test_nothing_is_known_without_a_name():
    assert phase_of("", True) == phase_of("", False) == "unknown"
    assert scope_of("") == ""


def test_a_function_named_like_a_transformation_is_none():
    assert phase_of("jit(transpose)/transpose", True) == "update"
    assert scope_of("jit(jvp)/a/psum") == "a"


def test_merged_operations():
    name = PREFIX + "transpose(jvp())/checkpoint/(attn/norm/psum:mlp/psum:attn/norm/psum)"
    assert unmerged(name) == [
        PREFIX + "transpose(jvp())/checkpoint/" + end
        for end in ("attn/norm/psum", "mlp/psum", "attn/norm/psum")
    ]
    assert scope_of(name) == "attn/norm + mlp"
    mixed = PREFIX + "(jvp()/psum:transpose(jvp(norm))/psum)"
    assert [phase_of(part, True) for part in unmerged(mixed)] == ["forward", "backward"]
    assert phase_of(mixed, True) == "backward"
    assert unmerged("jit(f)/a/mul;jit(f)/b/add") == ["jit(f)/a/mul", "jit(f)/b/add"]
    assert scope_of("jit(f)/a/mul;jit(f)/b/add") == "a + b"


@pytest.mark.parametrize(
    "name", ["(", ")", "a/(b", "))((", ":", ";;", "jit(", "(" * 9000, "/:" * 9]
)
def test_damaged_names_are_no_error(name):
    assert isinstance(scope_of(name), str)
    assert isinstance(phase_of(name, True), str)
