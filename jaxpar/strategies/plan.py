"""The Plan: one frozen dataclass that says how a model is trained on a mesh."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import (
    PlanError,
    did_you_mean,
    nearest_multiples,
    require_choice,
    require_kind,
    require_positive,
    require_whole,
    shown,
)
from jaxpar.mesh import MeshSpec

if TYPE_CHECKING:
    from jaxpar.strategies.pipeline.schedule import Schedule

BATCH_AXES = ("slice", "data", "fsdp", "expert")
"""Axes over which the sequences of a batch are spread."""

TOKEN_AXES = (*BATCH_AXES, "context", "ulysses")
"""Axes over which the tokens of a batch are spread, by sequences or within them."""

LOSS_AXES = (*TOKEN_AXES, "pipe")
"""Axes along which devices hold different summands of the loss."""

DTYPES = {"float32": "f32", "bfloat16": "bf16"}
"""Dtypes a plan may name, with their HLO names."""


class OnMesh:
    """What plans of any kind say of their mesh; a base for dataclasses that have these fields."""

    mesh: MeshSpec
    compute_dtype: Literal["float32", "bfloat16"]

    def check_mesh(self) -> None:
        """Raise PlanError unless there is one."""
        example = "MeshSpec.parse('data=2,tensor=4')"
        require_kind(PlanError, "mesh", self.mesh, MeshSpec, example)

    def size(self, axis: str) -> int:
        """Devices along `axis`; 1 where the mesh does not have it."""
        return self.mesh.size(axis)

    def in_mesh_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device, slowest links first."""
        wanted = set(axes)
        return tuple(a for a in self.mesh.named_axes if a in wanted and self.size(a) > 1)

    @property
    def num_batch_shards(self) -> int:
        """Parts of the batch, each on devices of its own."""
        return math.prod(self.size(axis) for axis in BATCH_AXES)

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[DTYPES[self.compute_dtype]]


@dataclass(frozen=True, kw_only=True)
class Plan(OnMesh):
    """How to train on `mesh`. Raises PlanError for what no model could satisfy.

    mesh: which axes there are, and so which strategies run (each lives on the axis of its name).
    batch_size, seq_len: sequences per step over all devices, and tokens in each.
    num_accumulation_steps: micro-batches per step, run one after the other; gradients add up.
    zero: what axis fsdp splits: 1 the optimizer state, 2 gradients as well, 3 weights too (FSDP).
    reshard_after_forward: drop a layer's gathered weights after its forward; zero=3.
    prefetch: gather a layer's weights while the one before it computes; zero=3.
    num_layers_per_gather: layers whose weights are gathered together; zero=3.
    gather_dtype: in which weights go over the wire; None for `compute_dtype`.
    overlap_gradients: reduce each layer's gradients inside the backward, once per micro-batch,
        instead of all of them behind it, once per step.
    frozen: patterns of paths, such as 'embedding/*', of parameters that are not trained.
    sequence: split the residual stream along the sequence over `tensor` (sequence parallelism).
    context: how attention runs over axis context: 'ring', 'allgather' or 'ulysses'.
    context_layout: 'zigzag' gives each rank an early and a late chunk, so that causal work is even.
    packed: rows hold several documents, told apart by the batch's `segments_BS`.
    experts: 'capacity' gives each expert as many places in every sequence, and drops the tokens
        that find none; 'dropless' drops none.
    capacity_factor: those places, in even shares of the sequence's tokens.
    drop_policy: who finds one: the first tokens ('position') or those of most 'weight'.
    expert_exchange: how dropless tokens travel: 'padded' to the most that can come, by all-to-all,
        or 'ragged', as many as there are, where the backend can.
    num_expert_chunks: chunks of an MoE layer's tokens, of which the next one travels, and the last
        one's outputs, while experts compute one.
    compute_dtype: of activations and of the weights in matmuls; master weights are float32.
    reduce_dtype: in which gradients are summed between devices.
    remat: 'none' keeps what the backward needs; 'full' keeps only the input of each layer, 'dots'
        also the results of its matmuls with weights, 'selective' all but attention's scores.
    overlap: hide the gathers and scatters of `sequence` behind their matmuls, piece by piece, with
        pieces sent to the next device or, 'bidirectional', to both neighbours.
    offload: what waits in host memory: the 'optimizer' state, the 'activations' that `remat` keeps
        by name, or 'both'.
    """

    mesh: MeshSpec
    batch_size: int
    seq_len: int
    num_accumulation_steps: int = 1
    schedule: str | Schedule = "1f1b"
    num_microbatches: int = 1
    num_virtual_stages: int = 1
    zero: Literal[1, 2, 3] = 3
    reshard_after_forward: bool = True
    prefetch: bool = False
    num_layers_per_gather: int = 1
    gather_dtype: Literal["float32", "bfloat16"] | None = None
    overlap_gradients: bool = False
    frozen: tuple[str, ...] = ()
    sequence: bool = False
    context: Literal["ring", "allgather", "ulysses"] = "ring"
    context_layout: Literal["zigzag", "contiguous"] = "zigzag"
    packed: bool = False
    experts: Literal["capacity", "dropless"] = "dropless"
    capacity_factor: float = 1.25
    drop_policy: Literal["position", "weight"] = "position"
    expert_exchange: Literal["padded", "ragged"] = "padded"
    num_expert_chunks: int = 1
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "selective", "dots", "full"] = "none"
    overlap: Literal["none", "unidirectional", "bidirectional"] = "none"
    offload: Literal["optimizer", "activations", "both"] | None = None

    def __post_init__(self) -> None:
        self.check_mesh()
        for field in (
            "batch_size", "seq_len", "num_accumulation_steps", "num_layers_per_gather",
            "num_microbatches", "num_virtual_stages", "num_expert_chunks",
        ):  # fmt: skip
            require_whole(PlanError, field, getattr(self, field))
        for field, choices in (
            ("compute_dtype", DTYPES),
            ("reduce_dtype", DTYPES),
            ("gather_dtype", (*DTYPES, None)),
            ("zero", (1, 2, 3)),
            ("reshard_after_forward", (True, False)),
            ("prefetch", (True, False)),
            ("overlap_gradients", (True, False)),
            ("remat", ("none", "selective", "dots", "full")),
            ("overlap", ("none", "unidirectional", "bidirectional")),
            ("offload", (None, "optimizer", "activations", "both")),
            ("sequence", (True, False)),
            ("context", ("ring", "allgather", "ulysses")),
            ("context_layout", ("zigzag", "contiguous")),
            ("packed", (True, False)),
            ("experts", ("capacity", "dropless")),
            ("drop_policy", ("position", "weight")),
            ("expert_exchange", ("padded", "ragged")),
        ):
            require_choice(PlanError, field, getattr(self, field), choices)
        require_positive(PlanError, "capacity_factor", self.capacity_factor, 1.25)
        if not isinstance(self.frozen, tuple) or not all(isinstance(p, str) for p in self.frozen):
            raise PlanError(
                f"frozen={shown(self.frozen)} must be a tuple of patterns of paths, such as "
                f"('embedding/*', 'layers/mlp/*')."
            )
        self._read_schedule()
        step = self.num_batch_shards * self.num_accumulation_steps * self.num_microbatches
        if self.batch_size % step:
            parts = "num_accumulation_steps" if self.num_microbatches == 1 else "num_microbatches"
            axes = " × ".join(f"{a}={self.size(a)}" for a in self.in_mesh_order(BATCH_AXES))
            raise PlanError(
                f"batch_size={self.batch_size} does not divide into {step} equal parts: the mesh "
                f"spreads it over {axes or 'one device'} and {parts}="
                f"{getattr(self, parts)}. Nearest batch_size: "
                f"{nearest_multiples(self.batch_size, step) or 'none; accumulate fewer steps'}."
            )

    def _read_schedule(self) -> None:
        """A path becomes the table in its file, so that nothing is read after this."""
        from jaxpar.strategies.pipeline import builders, schedule, tables  # they need a Plan

        given = self.schedule
        if isinstance(given, str) and given not in builders.BUILDERS:
            if not given.endswith(".csv"):
                raise PlanError(
                    f"schedule={shown(given)} is no schedule. "
                    f"{did_you_mean(given, builders.BUILDERS)} A table of your own is a file that "
                    f"ends in .csv, or a Schedule."
                )
            object.__setattr__(self, "schedule", tables.read_csv(given))
        elif not isinstance(given, str | schedule.Schedule):
            raise PlanError(
                f"schedule={shown(given)} ({type(given).__name__}) must be one of "
                f"{', '.join(map(repr, builders.BUILDERS))}, the path of a table, or a Schedule."
            )

    def is_frozen(self, path: str) -> bool:
        """Whether the parameter at `path` has no gradient and no optimizer state."""
        return any(fnmatchcase(path, pattern) for pattern in self.frozen)

    @property
    def local_batch_size(self) -> int:
        """Sequences of one micro-batch on one device (B in the closed forms)."""
        num_microbatches = self.num_accumulation_steps * self.num_microbatches
        return self.batch_size // self.num_batch_shards // num_microbatches

    def num_local_layers(self, num_layers: int) -> int:
        """Layers of a stack that one device holds, all of one length, the last ones padding."""
        num_chunks = self.size("pipe") * self.num_virtual_stages
        return -(-num_layers // num_chunks) * self.num_virtual_stages

    @property
    def local_seq_len(self) -> int:
        """Tokens of each sequence on one device (S in the closed forms)."""
        return self.seq_len // (self.size("context") * self.size("ulysses"))

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[DTYPES[self.reduce_dtype]]


DTYPE_BYTES = {"f32": 4, "bf16": 2, "s32": 4}
"""Bytes per element of the dtypes that appear in closed forms."""


def plan_json(plan: Plan) -> dict[str, Any]:
    """All fields of a plan, as JSON has them."""
    from jaxpar.strategies.pipeline.schedule import Schedule  # which needs a Plan

    told = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    told |= {"mesh": dict(plan.mesh.named_axes), "frozen": list(plan.frozen)}
    if isinstance(plan.schedule, Schedule):
        told["schedule"] = plan.schedule.name
    return told


def plan_in_words(plan: Plan) -> str:
    """The mesh, whose axes are the strategies, and what is not as usual: 'fsdp=4 × tensor=2,
    zero=1'."""
    usual = {f.name: f.default for f in fields(Plan)} | {"mesh": None, "frozen": []}
    told = plan_json(plan)
    for name in ("mesh", "batch_size", "seq_len"):
        del told[name]
    unusual = [f"{name}={value}" for name, value in told.items() if value != usual[name]]
    return ", ".join([str(plan.mesh), *unusual])


def plan_fields(
    assignments: Iterable[str], kind: Any = Plan, *, example: str = "num_accumulation_steps=2"
) -> dict[str, Any]:
    """Fields of a Plan (or another `kind`) from 'name=value' each; values as in TOML, or a word.

    Raises PlanError for what is no field, naming the closest one.
    """
    known = [field.name for field in fields(kind) if field.name != "mesh"]
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name in known and not text:
            raise PlanError(f"{assignment!r} gives {name} no value: write {name}=…")
        if name not in known:
            raise PlanError(
                f"{assignment!r} sets no field of a {kind.__name__}: write name=value, such as "
                f"{example}. {did_you_mean(name, known)}"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        given[name] = tuple(value) if isinstance(value, list) else value
    return given
