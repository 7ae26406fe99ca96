"""Steps of inference that the tour shows, and `jaxpar explain` knows by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpar.mesh import MeshSpec
from jaxpar.serve.plan import KINDS, Kind, ServePlan

MAX_SEQ_LEN = 48


@dataclass(frozen=True, kw_only=True)
class ServingVariant:
    """One row: a step of inference on a mesh as `MeshSpec.parse` reads it.

    model: a preset, for what the tour's own model has no use for.
    """

    name: str
    kind: Kind
    mesh: str
    fields: dict[str, Any] = field(default_factory=dict)
    model: str | None = None

    def plan(self) -> ServePlan:
        """In float32; with fewer blocks than all slots could fill, so that some have to wait."""
        fields = {"num_slots": 8, "block_len": 8, "chunk_len": 16, "num_blocks": 24, **self.fields}
        mesh = MeshSpec.parse(self.mesh)
        return ServePlan(mesh=mesh, max_seq_len=MAX_SEQ_LEN, compute_dtype="float32", **fields)


_ON: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("", "data=2,tensor=4", {}),
    ("-context", "context=2,tensor=4", {}),
    ("-pipeline", "pipe=2,tensor=4", {"fields": {"num_microbatches": 2}}),
    ("-expert", "expert=4,tensor=2", {"model": "tiny-moe"}),
)
VARIANTS = tuple(
    ServingVariant(name=kind + suffix, kind=kind, mesh=mesh, **other)
    for suffix, mesh, other in _ON
    for kind in KINDS
)
