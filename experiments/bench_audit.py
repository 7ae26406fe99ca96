"""How fast a program is audited: unrolled, over devices, over layers, and against XLA's own parser.

    .venv/bin/python experiments/bench_audit.py

The large text is a training step of unrolled transformer layers (FSDP × TP, bf16) compiled for 8
virtual CPU devices, and then repeated: step after step in one module, each taking the parameters
that the one before returned, until the file is as large as asked for. `×XLA` divides the time that
XLA's C++ text parser takes for the same file, in the same run, by that of the whole audit; each
runs in a process of its own, whose peak memory above that of an imported JAX is given as a multiple
of the file. Times are CPU times, so that a busy machine does not decide. Nothing is run on the
devices, so that thousands of them are no matter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AUDIT = """
import json, resource, sys, time
from jaxpar import audit
import jax
seconds = []
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    result = audit(sys.argv[1])
    seconds.append(time.process_time() - start)
print(json.dumps({"seconds": min(seconds), "complete": result.program.complete,
    "operations": len(result.collectives),
    "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
"""
XLA = """
import json, resource, sys, time
from jaxlib import _hlo
start = time.process_time()
_hlo.hlo_module_from_text(open(sys.argv[1]).read())
print(json.dumps({"seconds": time.process_time() - start,
    "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
"""
COMPILE = """
import runpy, sys
runpy.run_path(sys.argv[1])["compile_text"](sys.argv[2], *map(int, sys.argv[3:]))
"""
IDLE = """
import resource, jax, jaxpar.collectives
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

_NAME = re.compile(r"%[^\s,(){}=\"]+")
_PARAMETER = re.compile(r"  (%\S+) = (\S+) parameter\((\d+)\).*")


def compile_text(path: str, num_layers: int, num_devices: int, unrolled: int) -> None:
    """Write the compiled step of a small transformer on `num_devices` virtual CPU devices."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_platforms", "cpu")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((num_devices // 2, 2), ("fsdp", "tensor"), axis_types=auto)
    B, S, D, H, F = max(8, num_devices), 16, num_devices * 4, 8, num_devices * 8
    shapes = {"qkv": (D, 3, H, 8), "out": (H, 8, D), "up": (D, F), "down": (F, D)}
    specs = {
        "qkv": jax.P(None, "fsdp", None, "tensor"),
        "out": jax.P(None, "tensor", None, "fsdp"),
        "up": jax.P(None, "fsdp", "tensor"),
        "down": jax.P(None, "tensor", "fsdp"),
    }

    def gathered(w: Any, dim: int) -> Any:
        return lax.all_gather(w.astype(jnp.bfloat16), "fsdp", axis=dim, tiled=True)

    def normed(x: Any) -> Any:
        x = lax.pcast(x, "tensor", to="varying")
        scale = lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
        return (x * scale).astype(jnp.bfloat16)

    def layer(x: Any, w: dict[str, Any]) -> tuple[Any, None]:
        with jax.named_scope("attention"):
            qkv = jnp.einsum("bsd,dchk->cbshk", normed(x), gathered(w["qkv"], 0))
            scores = jnp.einsum("bshk,bthk->bhst", qkv[0], qkv[1]).astype(jnp.float32)
            mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(x.dtype), qkv[2])
            x = x + lax.psum(jnp.einsum("bshk,hkd->bsd", mixed, gathered(w["out"], 2)), "tensor")
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(normed(x) @ gathered(w["up"], 0))
            x = x + lax.psum(hidden @ gathered(w["down"], 1), "tensor")
        return x, None

    def loss(ws: dict[str, Any], x: Any) -> Any:
        step = jax.checkpoint(layer)
        x, _ = lax.scan(step, x, ws, unroll=bool(unrolled))
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def train(ws: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, ws, gradients), lax.psum(value, "fsdp")

    data = jax.P("fsdp")
    step = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, data), out_specs=(specs, jax.P()))
    )
    ws = {k: jax.ShapeDtypeStruct((num_layers, *v), jnp.float32) for k, v in shapes.items()}
    compiled = step.lower(ws, jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16)).compile()
    Path(path).write_text(compiled.as_text())


def repeated(text: str, num_bytes: int) -> str:
    """The module with its entry run again and again, results of one copy feeding the next."""
    start = text.rindex("\nENTRY ") + 1
    head_end = re.search(r"^(?:%|ENTRY)", text, re.MULTILINE)
    assert head_end is not None
    head, others, entry = text[: head_end.start()], text[head_end.start() : start], text[start:]
    signature, *body, _ = entry.rstrip().split("\n")
    root = next(line for line in body if line.startswith("  ROOT "))
    results = _NAME.findall(root[root.index(" tuple(") : root.index(")", root.index(" tuple("))])
    pieces, lines = [head, others], []
    num_copies = max(1, -(-(num_bytes - len(head)) // (len(others) + len(entry))))
    for copy in range(num_copies):
        last = copy == num_copies - 1
        if copy:
            pieces.append(_NAME.sub(lambda found: f"{found[0]}.u{copy}", others))  # noqa: B023
        for line in body:
            given = _PARAMETER.match(line)
            if given and copy:
                number = int(given[3])
                before = f".u{copy - 1}" if copy > 1 else ""
                source = results[number] + before if number < len(results) - 1 else given[1]
                lines.append(f"  {given[1]}.u{copy} = {given[2]} copy({source})")
                continue
            line = line if last else line.replace("  ROOT ", "  ", 1)
            lines.append(_NAME.sub(lambda f: f"{f[0]}.u{copy}", line) if copy else line)  # noqa: B023
    return "".join([*pieces, "\n".join([signature, *lines, "}", ""])])


def child(code: str, *args: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout or "null")


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the unrolled text.")] = 100,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Three tables: throughput, devices, layers."""
    console = Console()
    here = Path(__file__)
    idle = child(IDLE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.txt"
        child(COMPILE, here, path, 24, 8, 1)
        large = Path(folder) / "large.txt"
        large.write_text(repeated(path.read_text(), megabytes * 10**6))
        size = large.stat().st_size
        ours = child(AUDIT, large, 1)
        xla = child(XLA, large)
        assert ours["complete"]
        rows: dict[str, Any] = {
            "unrolled": {
                "bytes": size,
                "operations": ours["operations"],
                "audit_mb_per_s": size / 1e6 / ours["seconds"],
                "xla_mb_per_s": size / 1e6 / xla["seconds"],
                "xla_over_audit": xla["seconds"] / ours["seconds"],
                "audit_memory_per_byte": (ours["kib"] - idle) * 1024 / size,
                "xla_memory_per_byte": (xla["kib"] - idle) * 1024 / size,
            },
            "devices": {},
            "layers": {},
        }
        for devices in (8, 128, 2048):
            child(COMPILE, here, path, 4, devices, 0)
            rows["devices"][devices] = {
                "bytes": path.stat().st_size,
                "seconds": child(AUDIT, path, 5)["seconds"],
            }
        for layers in (4, 32, 256):
            child(COMPILE, here, path, layers, 8, 0)
            rows["layers"][layers] = {
                "bytes": path.stat().st_size,
                "seconds": child(AUDIT, path, 5)["seconds"],
            }
    table = Table("unrolled", "MB", "operations", "audit MB/s", "XLA parser MB/s", "×XLA",
                  "memory ÷ file", "XLA's")  # fmt: skip
    at = rows["unrolled"]
    table.add_row(
        "",
        f"{at['bytes'] / 1e6:.0f}",
        str(at["operations"]),
        f"{at['audit_mb_per_s']:.1f}",
        f"{at['xla_mb_per_s']:.1f}",
        f"{at['xla_over_audit']:.2f}",
        f"{at['audit_memory_per_byte']:.1f}",
        f"{at['xla_memory_per_byte']:.1f}",
    )
    console.print(table)
    for what in ("devices", "layers"):
        table = Table(what, "KB", "audit ms")
        for number, row in rows[what].items():
            table.add_row(str(number), f"{row['bytes'] / 1e3:.0f}", f"{row['seconds'] * 1e3:.1f}")
        console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
