"""Pipeline parallelism: the layers are split, and micro-batches go through the devices in turn.

What is split    the layers, in p·v equal chunks, v of them on each of p stages: stage r holds the
                 chunks r, r + p, ... Embedding, dense layers before layers with experts, last norm
                 and output are whole on every stage.
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
per step (data.py), since only the first stage embeds and only the last one scores; so is what the
layers of all stages counted. Everything that layers communicate themselves is counted by runs.py:
in a pipeline every device runs one chunk in each of the F slots, and one twice, forward, in phase
recompute, and backward, in each of the G slots.

`schedule.py` says what a table is and checks it, `builders.py` makes the published ones,
`tables.py` reads and writes them as CSV, `stash.py` says where values wait, `simulate.py` what a
table costs, `drawing.py` draws it: these need no JAX. `choice.py` is what a plan asks for,
`program.py` that as integers, `executor.py` runs it, `stage.py` makes a model run by it.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021, §2.2; Qi et al. 2023 (zero bubble).
"""

from __future__ import annotations

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.strategies.pipeline.builders import BUILDERS
from jaxpar.strategies.pipeline.choice import AXIS, num_staged, schedule_of
from jaxpar.strategies.pipeline.program import phases
from jaxpar.strategies.pipeline.schedule import Schedule
from jaxpar.strategies.pipeline.stage import STACK as STACK
from jaxpar.strategies.pipeline.stage import from_stage as from_stage
from jaxpar.strategies.pipeline.stage import in_layer_order as in_layer_order
from jaxpar.strategies.pipeline.stage import in_stage_order as in_stage_order
from jaxpar.strategies.pipeline.stage import loss_and_gradients as loss_and_gradients
from jaxpar.strategies.pipeline.stage import to_stage as to_stage
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


def check(config: ModelConfig, plan: Plan) -> None:
    p, v = plan.size(AXIS), plan.num_virtual_stages
    if p == 1:
        name = plan.schedule.name if isinstance(plan.schedule, Schedule) else plan.schedule
        raise PlanError(
            f"schedule={name!r}, num_microbatches={plan.num_microbatches} and num_virtual_stages="
            f"{v} say how a pipeline runs over axis pipe, and this mesh has pipe=1 ({plan.mesh}). "
            f"Give the mesh a pipe axis, or leave these fields out."
        )
    _check_fields(config, plan)
    if (L := num_staged(config)) < p * v:
        dense = config.num_dense_layers
        right = f"num_virtual_stages: {L // p}" if p <= L else f"sizes of axis pipe: {L}"
        raise PlanError(
            f"{config.name}: num_layers={config.num_layers}"
            f"{f' without num_dense_layers={dense}, which go with the embedding,' * bool(dense)} "
            f"are too few for pipe={p} stages with num_virtual_stages={v} chunks on each: every "
            f"chunk has a layer. Nearest {right}."
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
    if plan.overlap_gradients:
        raise PlanError(
            f"overlap_gradients=True with pipe={plan.size(AXIS)} would reduce a layer's gradient "
            f"in every slot with a backward, and a stage, whose gradients add up over all slots, "
            f"reduces it once per step. Leave overlap_gradients at False."
        )


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    return {"layers": AXIS} if parameter.path.startswith(f"{STACK}/") else {}


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
        Variant(
            name="pipeline+expert",
            mesh="pipe=2,data=2,expert=2",
            fields={"num_microbatches": 2},
            model="tiny-moe",
        ),
    ),
)
