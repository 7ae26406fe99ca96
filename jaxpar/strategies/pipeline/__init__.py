"""Pipeline parallelism: the layers are split, and micro-batches go through the devices in turn.

What is split    the layers, in p·v equal chunks, v of them on each of p stages: stage r holds the
                 chunks r, r + p, ... Embedding, last norm and output are whole on every stage.
Why              a model too large for one device, over links that are slow: only activations at
                 the cuts are sent, and every layer's weights stay where they are.
What it costs    stages wait while the pipeline fills and drains: of the time of m micro-batches a
                 part of (p-1)/(vm+p-1), if every slot is as long. And memory for the inputs of
                 chunks that wait for their backward, which computes the chunk again.

V = B·S·D·bytes of one micro-batch on one device, F = slots from the first to the last forward of
the table, G = from the first to the last backward (in 1F1B and interleaved vm + p - 1 each):

| collective         | axis | phase    | count | payload_bytes | why                             |
|--------------------|------|----------|-------|---------------|---------------------------------|
| collective-permute | pipe | forward  | F     | V             | activations, to the stage behind|
| collective-permute | pipe | backward | G     | V             | gradients, to the stage before  |

vm of each are of use where every stage sends in a permute: while the pipeline fills and drains, the
others send what nobody reads. Gradients of what is whole on all stages are summed over `pipe` once
per step (data.py), since only the first stage embeds and only the last one scores. Everything that
layers communicate themselves is counted by runs.py: in a pipeline every device runs one chunk in
each of the F slots, and one twice, forward and backward, in each of the G slots.

`schedule.py` says what a table is and checks it, `builders.py` makes the published ones,
`tables.py` reads and writes them as CSV, `stash.py` says where values wait, `simulate.py` what a
table costs, `drawing.py` draws it: these need no JAX. `choice.py` is what a plan asks for,
`program.py` that as integers, `executor.py` runs it, `stage.py` makes a model run by it.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021, §2.2; Qi et al. 2023 (zero bubble).
"""

from __future__ import annotations

from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.strategies.pipeline.builders import BUILDERS
from jaxpar.strategies.pipeline.choice import AXIS, schedule_of
from jaxpar.strategies.pipeline.program import phases
from jaxpar.strategies.pipeline.schedule import Schedule
from jaxpar.strategies.pipeline.stage import STACK as STACK
from jaxpar.strategies.pipeline.stage import in_layer_order as in_layer_order
from jaxpar.strategies.pipeline.stage import in_stage_order as in_stage_order
from jaxpar.strategies.pipeline.stage import loss_and_gradients as loss_and_gradients
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant

CARD = Card(
    name="pipeline",
    axis=AXIS,
    splits="the layers, in chunks; micro-batches go from stage to stage",
    why="a model too large for one device, over links too slow for anything else",
    costs="idle stages while it fills and drains: (p-1)/(vm+p-1) of the time",
    source="Huang et al. 2019; Narayanan et al. 2021, §2.2; Qi et al. 2023",
)

# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    forwards, backwards = (len(slots) for slots in phases(schedule_of(plan)))
    local_seq_len = plan.local_seq_len // (plan.size("tensor") if plan.sequence else 1)

    def row(phase: Phase, count: int, why: str) -> Expected:
        return Expected(
            kind="collective-permute",
            axes=(AXIS,),
            count=count,
            payload_bytes=plan.local_batch_size * local_seq_len * config.embed * plan.compute_bytes,
            dtype=DTYPES[plan.compute_dtype],
            phase=phase,
            why=why,
        )

    return [
        row("forward", forwards, "activations to the stage behind, in every slot with forwards"),
        row("backward", backwards, "gradients to the stage before, in every slot with backwards"),
    ]


# --- rules -----------------------------------------------------------------------------------

WITHOUT = {"fsdp": "data", "expert": "data"}
"""Axes that no stage can use yet, and which can take their devices."""


def check(config: ModelConfig, plan: Plan) -> None:
    p, v = plan.size(AXIS), plan.num_virtual_stages
    if p == 1:
        name = plan.schedule.name if isinstance(plan.schedule, Schedule) else plan.schedule
        raise PlanError(
            f"schedule={name!r}, num_microbatches={plan.num_microbatches} and num_virtual_stages="
            f"{v} say how a pipeline runs over axis pipe, and this mesh has pipe=1 ({plan.mesh}). "
            f"Give the mesh a pipe axis, or leave these fields out."
        )
    for axis, other in WITHOUT.items():
        if plan.size(axis) > 1:
            raise PlanError(
                f"The mesh has pipe={p} and {axis}={plan.size(axis)}, and no stage of a pipeline "
                f"works over axis {axis} here. Use axis {other} in its place. Nearest sizes of "
                f"axis {axis}: 1."
            )
    _check_fields(config, plan)
    if config.num_layers < p * v:
        sizes = nearest_divisors(config.num_layers, p, lambda d: d <= config.num_layers)
        right = f"num_virtual_stages: {config.num_layers // p}"
        raise PlanError(
            f"{config.name}: num_layers={config.num_layers} are too few for pipe={p} stages with "
            f"num_virtual_stages={v} chunks on each: every chunk has a layer. Nearest "
            f"{right if config.num_layers >= p else f'sizes of axis pipe: {sizes}'}."
        )
    schedule = schedule_of(plan)
    for field, have, want in (
        ("sizes of axis pipe", p, schedule.num_stages),
        ("num_microbatches", plan.num_microbatches, schedule.num_microbatches),
        ("num_virtual_stages", v, schedule.num_virtual_stages),
    ):
        if have != want:
            raise PlanError(
                f"The table {schedule.name!r} is for pipe={schedule.num_stages}, num_microbatches="
                f"{schedule.num_microbatches} and num_virtual_stages={schedule.num_virtual_stages},"
                f" and the plan has pipe={p}, num_microbatches={plan.num_microbatches} and "
                f"num_virtual_stages={v}. Nearest {field}: {want}."
            )


def _check_fields(config: ModelConfig, plan: Plan) -> None:
    if plan.num_accumulation_steps > 1:
        raise PlanError(
            f"num_accumulation_steps={plan.num_accumulation_steps} with pipe={plan.size(AXIS)}: "
            f"the micro-batches of a pipeline are num_microbatches={plan.num_microbatches}. "
            f"Nearest num_accumulation_steps: 1."
        )
    if plan.num_virtual_stages > 1 and plan.schedule in set(BUILDERS) - {"interleaved"}:
        raise PlanError(
            f"num_virtual_stages={plan.num_virtual_stages} with schedule={plan.schedule!r}, which "
            f"has one chunk of layers on each stage. Use schedule='interleaved'. Nearest "
            f"num_virtual_stages: 1."
        )
    for field, default in (("frozen", ()), ("overlap_gradients", False)):
        if getattr(plan, field) != default:
            raise PlanError(
                f"{field}={getattr(plan, field)!r} with pipe={plan.size(AXIS)}: no stage of a "
                f"pipeline does that here. Leave it at {default!r}, or leave out axis pipe."
            )
    if config.num_experts:
        raise PlanError(
            f"{config.name} has num_experts={config.num_experts} and pipe={plan.size(AXIS)}: no "
            f"stage of a pipeline has experts here. Nearest sizes of axis pipe: 1."
        )


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    return {"layers": AXIS} if parameter.num_stacked else {}


def _variant(schedule: str, mesh: str, model: str | None = None, **fields: int) -> Variant:
    return Variant(
        name=f"pipeline-{schedule}",
        mesh=mesh,
        fields={"schedule": schedule, "num_microbatches": 8, **fields},
        model=model,
    )


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: (
        plan.size(AXIS) > 1
        or plan.schedule != "1f1b"
        or plan.num_microbatches > 1
        or plan.num_virtual_stages > 1
    ),
    # Only the first stage embeds and only the last one scores; layers are split.
    is_partial=lambda parameter: True,
    check=check,
    splits=splits,
    expected=expected,
    variants=(
        _variant("gpipe", "pipe=4", "tiny-deep"),
        _variant("1f1b", "pipe=4,data=2", "tiny-deep"),
        _variant("interleaved", "pipe=2,tensor=2", "tiny-deep", num_virtual_stages=2),
        _variant("zb-h1", "pipe=4", "tiny-deep"),
    ),
)
