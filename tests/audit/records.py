"""Audits made by hand, for tests of what is said about them."""

from __future__ import annotations

from typing import Any

from jaxpar.audit.result import Audit, Buffer, Collective, Program
from jaxpar.collectives import wire_bytes

MESH = {"data": 2, "tensor": 4}


def collective(kind: str = "all-reduce", axis: str | None = "tensor", **fields: Any) -> Collective:
    """4 executions of 1024 bytes bf16 over axis tensor; `fields` override.

    `count` may be (least, most) instead of a number, `buffers` (dtype, bytes, phase) of each.
    """
    count = fields.pop("count", 4)
    low, high = count if isinstance(count, tuple) else (count, count)
    size = 2 if axis == "data" else 4
    own = (fields.get("dtype", "bf16"), fields.get("payload_bytes", 1024),
           fields.get("phase", "forward"))  # fmt: skip
    buffers = tuple(
        Buffer(dtype=dtype, payload_bytes=payload, phase=phase)
        for dtype, payload, phase in fields.pop("buffers", [own])
    )
    payload = fields.pop("payload_bytes", sum(buffer.payload_bytes for buffer in buffers))
    dtype = fields.pop("dtype", "+".join(dict.fromkeys(buffer.dtype for buffer in buffers)))
    defaults: dict[str, Any] = {
        "axes": None if axis is None else tuple(axis.split(",")),
        "axes_note": "half of tensor, stride 2" if axis is None else None,
        "group_size": size,
        "num_groups": 8 // size,
        "program_dtype": dtype,
        "wire_bytes": wire_bytes(kind, payload, size),
        "phase": buffers[0].phase,
        "scope": "layers/attention",
        "source": "model.py:42",
        "is_async": False,
        "exposed_fraction": 1.0,
        "name": kind,
        "line": 7,
    }
    return Collective(
        kind=kind,
        dtype=dtype,
        count=low if low == high else None,
        count_min=low,
        count_max=high,
        payload_bytes=payload,
        buffers=buffers,
        **{**defaults, **fields},
    )


def audit_of(*collectives: Collective, **fields: Any) -> Audit:
    """A complete audit of 8 CPU devices, data=2 × tensor=4; `fields` override."""
    program = Program(
        name="jit_step", platform="cpu", num_devices=8, scheduled=True,
        complete=fields.pop("complete", True),
    )  # fmt: skip
    defaults: dict[str, Any] = {"mesh": MESH, "memory": None, "findings": ()}
    return Audit(program=program, collectives=collectives, **{**defaults, **fields})
