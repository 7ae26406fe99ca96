"""The one place that knows how JAX versions differ and what only private modules tell."""

from __future__ import annotations

import hashlib
import importlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_TABLE_ELEMENTS = 1 << 16
"""Largest integer constant that is printed where XLA writes `{...}`."""

MAX_CONSTANT_ELEMENTS = 1 << 22
"""Of all such constants of a module: with more, printing them to find the tables costs too much."""

_CONSTANT = r"^\s*(?:ROOT )?%?(\S+) = ([a-z]\w*)\[([\d,]*)\]\S* constant\("
_ELIDED = re.compile(_CONSTANT, re.MULTILINE)
_PRINTED = re.compile(_CONSTANT + r"(?=\{)([^()]*)(?=\))", re.MULTILINE)
_LEFT_OUT = "{...}"
_INTEGER = re.compile(r"[su]\d+|pred")


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, inside `shard_map`."""
    import jax  # here, because `hlo_text` runs in processes that do not need it

    aval = jax.typeof(x)
    if hasattr(aval, "mat"):  # JAX ≥ 0.12
        return frozenset(aval.mat.varying)
    return frozenset(aval.vma)


def scan_inputs(params: Any) -> tuple[int, int]:
    """How many inputs of a `scan` equation with these parameters stay, and how many are carried."""
    if "ft_in" in params:  # JAX ≥ 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def backends_are_up() -> bool:
    """Whether JAX has started a backend, after which the number of CPU devices is fixed."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def process_id() -> int:
    """Of this process among those JAX has joined, 0 in a run of one; starts no backend."""
    from jax._src import distributed

    return int(distributed.global_state.process_id)


def detected_cluster() -> str | None:
    """The name of the cluster that `jax.distributed.initialize()` would join; None for none."""
    from jax._src import clusters

    for cluster in clusters.ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return f"{cluster.name or cluster.__name__} cluster that JAX detects"
    return None


def hlo_text(serialized: bytes) -> str:
    """HLO text of a serialized HloModuleProto, small integer tables in full.

    XLA trusts what it parses and ends the process where it should not have: call this on anybody's
    file in a child process only. RuntimeError for what it does refuse. Imports no JAX.
    """
    module = _hlo().HloModule.from_serialized_hlo_module_proto(serialized)
    text = module.to_string()
    return _with_tables(text, _tables_of(text), module)


def compiled_text(compiled: Any) -> str | None:
    """What `compiled.as_text()` says, small integer tables in full; None where it says nothing."""
    text: str | None = compiled.as_text()
    tables = _tables_of(text or "")
    if not text or not tables:
        return text
    try:
        (module,) = compiled.runtime_executable().hlo_modules()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return text  # a backend that keeps no modules, or several programs
    return _with_tables(text, tables, module)


def portable_module(lowered: Any) -> bytes:
    """StableHLO bytecode of a `Lowered`, source locations and all: what a compiler is given."""
    data = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(data)
    return data.getvalue()


def fingerprint(lowered: Any) -> bytes:
    """Of the program without where it was written and who called it: the same for the same one."""
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(text.encode()).digest()


def compile_only(module: bytes, devices: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """An executable of `portable_module` for devices of a topology, in the order of its mesh.

    As `lowered.compile(options)` does where the devices are in its shardings. What the compiler
    does with a bad module or option is its own affair: call this in a child process only.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    told = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array(devices, dtype=object)[None],
        env_options_overrides=dict(options),
    )
    # Where the program does not say how a result is sharded, as jit does.
    told.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    with mlir.make_ir_context():
        return devices[0].client.compile(
            ir.Module.parse(module),
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=told,
        )


def executable_text(executable: Any) -> str:
    """HLO text of what `compile_only` returns, small integer tables in full."""
    (module,) = executable.hlo_modules()
    text: str = module.to_string()
    return _with_tables(text, _tables_of(text), module)


def _hlo() -> Any:
    return importlib.import_module("jaxlib._hlo")  # has no types


def _tables_of(text: str) -> set[str]:
    """Names of the small integer constants whose values XLA left out."""
    names: set[str] = set()
    total = 0
    for found in _elided(text):
        elements = math.prod(int(size) for size in found[3].split(",") if size)
        total += elements
        if elements <= MAX_TABLE_ELEMENTS and _INTEGER.fullmatch(found[2]):
            names.add(found[1])
    return names if total <= MAX_CONSTANT_ELEMENTS else set()


def _elided(text: str) -> Iterator[re.Match[str]]:
    """The beginnings of constants without values: name, type, dimensions."""
    at = text.find(f"constant({_LEFT_OUT})")
    while at >= 0:
        found = _ELIDED.match(text, text.rfind("\n", 0, at) + 1)
        if found:
            yield found
        at = text.find(f"constant({_LEFT_OUT})", at + 1)


def _with_tables(text: str, names: set[str], module: Any) -> str:
    """`text` of an `HloModule` with the values of the constants `names`."""
    if not names:
        return text
    options = _hlo().HloPrintOptions()
    options.print_large_constants = True
    values = {
        found[1]: found[4]
        for found in _PRINTED.finditer(module.to_string(options))
        if found[1] in names
    }
    pieces = []
    end = 0
    for found in _elided(text):
        if found[1] in values:
            pieces += [text[end : found.end()], values[found[1]]]
            end = found.end() + len(_LEFT_OUT)
    return "".join([*pieces, text[end:]])
