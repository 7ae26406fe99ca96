"""Which part of a training step asked for an operation, read from its `op_name`.

Shared by the HLO auditor and the jaxpr counter, so that both columns of a table use one rule.
An `op_name` is a path that JAX builds while tracing, for instance
`jit(step)/shard_map/transpose(jvp(tensor))/while/body/checkpoint/attention/psum_invariant`.
Operations that XLA merged print their common prefix once, `prefix/(a/psum:b/psum)`, or print
whole paths one after the other with `;` between.
"""

from __future__ import annotations

import functools
import re

PHASES = ("forward", "backward", "recompute", "update")
"""Also the scope names by which a program can say its phase itself."""

MERGED = " + "
"""Between the scopes of operations that were merged into one."""

_CONTROL = {"while", "body", "cond", "checkpoint", "remat", "remat2", "rematted_computation"}
_CALLED = {"closed_call", "core_call", "eval_jaxpr", "shard_map", "pjit", "pmap"}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_NOISE = frozenset(_CONTROL | _CALLED | _CUSTOM | set(PHASES))
_BRANCH = re.compile(r"branch_\d+_fun")
_CALLS = frozenset({"jit", "pjit", "pmap", "xla_call", "custom_jvp", "custom_vjp"})
_TOKEN = re.compile(r"[()/]|[^()/]+")
_INSIDE = re.compile(r"[():]")
_LIST = re.compile(r"(?:^|/)\(")
_SEPARATOR = re.compile(r"[/:;()]")
_REMEMBERED = 1 << 12  # few names, many times each
_MAX_LENGTH = 4096  # of an op_name; what is longer is a merge of so many that no scope helps


@functools.lru_cache(maxsize=_REMEMBERED)
def phase_of(op_name: str, differentiated: bool) -> str:
    """forward, backward, recompute, update or unknown.

    `differentiated` says whether anything in the program was transposed: only then is what carries
    no mark of differentiation the update; otherwise the whole program is a forward pass.
    """
    if not op_name:
        return "unknown"
    components = _SEPARATOR.split(op_name)
    if "rematted_computation" in components:
        return "recompute"
    if "transpose(" in op_name:
        return "backward"
    if "recompute" in components:  # the program says so: a forward that is run again, for its vjp
        return "recompute"
    if "jvp(" in op_name:
        return "forward"
    for component in reversed(components):
        if component in PHASES:
            return component
    return "update" if differentiated else "forward"


@functools.lru_cache(maxsize=_REMEMBERED)
def scope_of(op_name: str) -> str:
    """The `jax.named_scope`s the user wrote, outermost first, joined by "/"; "" when none.

    Calls (`jit(f)`), transformations (`jvp(...)` keeps what it holds), control flow, the phase
    words, einsum specifications and the primitive at the end are removed. Merged operations give
    their different scopes, in order, joined by `MERGED`.
    """
    scopes: dict[str, None] = {}
    for name in unmerged(op_name):
        kept: list[str] = []
        for word in _components(name)[:-1]:
            noise = word in _NOISE or "->" in word or _BRANCH.fullmatch(word)
            # A transposed checkpoint names its scope twice: transpose(jvp(a))/jvp(a)/checkpoint.
            if word and not noise and kept[-1:] != [word]:
                kept.append(word)
        scopes["/".join(kept)] = None
    return MERGED.join(scope for scope in scopes if scope)


def unmerged(op_name: str) -> list[str]:
    """The `op_name` of each operation that was merged into one, in the order of its operands."""
    names = []
    for name in op_name[:_MAX_LENGTH].split(";"):
        opening = _LIST.search(name)
        if opening is None:
            names.append(name)
            continue
        prefix, start, depth = name[: opening.end() - 1], opening.end(), 1
        for token in _INSIDE.finditer(name, start):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth == 0 or (depth == 1 and token[0] == ":"):
                names.append(prefix + name[start : token.start()])
                start = token.end()
            if depth == 0:
                break
        else:
            names.append(prefix + name[start:])
    return names


def _components(name: str) -> list[str]:
    """The parts of one path: called functions emptied, transformations opened."""
    path: list[str] = []
    opened: list[tuple[bool, int]] = []  # whether a call, and len(path) where it opened
    word = ""
    for token in _TOKEN.findall(name):
        if token == "(":
            opened.append((word in _CALLS, len(path)))
            word = ""
        elif token == ")" and opened:
            path.append(word)
            call, start = opened.pop()
            if call:
                path[start:] = [""]
            word = ""
        elif token == "/":
            path.append(word)
            word = ""
        else:
            word += token
    return [*path, word] if word else path
