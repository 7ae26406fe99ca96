"""Expert parallelism: each device keeps some of the experts, and tokens travel to them.

What is split    the experts of every MoE layer, over `expert`; outside MoE layers the axis splits
                 the batch like `data`. Router and shared experts are whole on every device.
Why              experts are most of an MoE's parameters, and each token uses only a few of them.
What it costs    two all-to-alls of the chosen tokens per MoE layer forward and two backward, all
                 waited for. Experts' gradients need no reduction over `expert`: the tokens of all
                 its devices have been there.

L MoE layers, m micro-batches, B·S tokens of one micro-batch on one device, n devices on the axis,
R = B·S·min(K, E/n), C = ceil(factor·K·S/E); c bytes per element of the compute dtype:

| collective        | phase             | count    | payload_bytes   | why                         |
|-------------------|-------------------|----------|-----------------|-----------------------------|
| all-to-all        | forward, backward | 2mL each | E·B·C·D·c       | experts='capacity'          |
| all-to-all        | forward, backward | 2mL each | n·R·D·c         | 'dropless', padded          |
| ragged-all-to-all | forward, backward | mL each  | B·S·K·D·c       | 'dropless', ragged: one way |
| ragged-all-to-all | forward, backward | mL each  | n·R·D·c         | the other way: its *buffer* |
| all-to-all        | forward           | mL       | 4(E+n)          | dropless: how many rows come|
| all-reduce        | forward           | 1 each   | 4·L·E, 4·L      | statistics, for the metrics |
| all-reduce        | forward           | mL       | 4·E or 4·B·E    | counts for the balance loss |

with everything but the statistics again as `recompute` under remat='dots' or 'full'. The last row
is asked for when a batch is balanced as one (4·E, over all token axes), or a sequence that is
spread over several devices (4·B·E, over those). In chunks (expert_chunks.py) token vectors travel
in as many parts, counts of all at once. B·S·K·D·c is what has to move; capacity moves
`factor` times it, padding n·min(K, E/n)/K times.

Source: Lepikhin et al. 2020 (GShard) §2.2, §3; Fedus et al. 2021 (Switch) §2-3; DeepSeek-AI 2024
(V3) §2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from jaxpar.collectives import all_reduce
from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import PRESETS, ModelConfig, Parameter
from jaxpar.model.routing import capacity, drop_over_capacity
from jaxpar.strategies.expert_dispatch import with_capacity, without_limit
from jaxpar.strategies.expert_exchange import AXIS
from jaxpar.strategies.plan import DTYPES, LOSS_AXES, TOKEN_AXES, Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Strategy, Variant

SEQUENCE_AXES = ("context", "ulysses")
"""Axes over which the tokens of one sequence are spread when experts see them."""

CARD = Card(
    name="expert",
    axis=AXIS,
    splits="the experts of every MoE layer; outside of them, the batch",
    why="most parameters of an MoE are experts, and a token uses only a few of them",
    costs="2 all-to-alls of B·S·K·D per MoE layer forward, 2 backward, none of them hidden",
    source="Lepikhin et al. 2020, §2.2",
)

# --- communication (token vectors: see expert_dispatch.py) -----------------------------------


def sum_counts(count: Array, axes: tuple[str, ...]) -> Array:
    """Tokens per expert of all devices along `axes`, of any shape; what the balance loss needs."""
    return all_reduce(count, axes, scope="sum_counts")


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    if not config.num_experts:
        return []
    n, E, Q = plan.size(AXIS), config.num_experts, plan.num_expert_chunks
    rows = token_vectors(config, plan) if Q == 1 else []  # else they are expert_chunks.py's
    for phase, layers in executions(config, plan).items():
        if plan.experts == "dropless" and phase != "backward":
            size, why = 4 * Q * (E + n), "rows that will come"
            rows += _row(plan, "all-to-all", (AXIS,), phase, layers, size, "s32", why)
        # A pipeline counts in the second of its forwards, which ends in the loss.
        is_counted = phase == "recompute" or (phase == "forward" and plan.size("pipe") == 1)
        if config.balance_weight and is_counted:
            axes, size = balance_axes(config), 4 * E
            size *= plan.local_batch_size if config.balance == "sequence" else 1
            why = "counts for the balance loss"
            rows += _row(plan, "all-reduce", axes, phase, layers, size, "f32", why)
    for name, num in config.num_statistics.items():
        why = f"{name}, for the metrics"
        rows += _row(plan, "all-reduce", LOSS_AXES, "forward", 1, 4 * num, "f32", why)
    return rows


def token_vectors(config: ModelConfig, plan: Plan) -> list[Expected]:
    """Their way to experts and back, each of which goes in `num_expert_chunks` parts."""
    n, E, K = plan.size(AXIS), config.num_experts, config.num_experts_per_token
    B, S, Q = plan.local_batch_size, plan.local_seq_len, plan.num_expert_chunks
    num_sent, num_slots = B * S * K, n * B * S * min(K, E // n)
    is_ragged = plan.experts == "dropless" and plan.expert_exchange == "ragged"
    if plan.experts == "capacity":
        num_slots = E * B * capacity(S, E, K, plan.capacity_factor)
    if not is_ragged:
        num_sent = num_slots
    kind = "ragged-all-to-all" if is_ragged else "all-to-all"
    part = " of a chunk" if Q > 1 else ""
    rows = []
    for phase, layers in executions(config, plan).items():
        for way, num_rows in (("to experts", num_sent), ("back to tokens", num_slots)):
            size = num_rows // Q * config.embed * plan.compute_bytes
            dtype, why = DTYPES[plan.compute_dtype], f"token vectors{part} {way}"
            rows += _row(plan, kind, (AXIS,), phase, layers * Q, size, dtype, why)
    return rows


def executions(config: ModelConfig, plan: Plan) -> dict[Phase, int]:
    """How many layers with experts one device runs in each phase of a step."""
    runs = runs_of(plan, config, only_experts=True)
    # Selective checkpointing repeats attention alone, any other repeats the way to the experts.
    again = runs.repeated_layers + runs.remat_layers * (plan.remat in ("dots", "full"))
    found: dict[Phase, int] = {"forward": runs.forward_layers}
    return found | ({"recompute": again} if again else {}) | {"backward": runs.backward_layers}


def _row(
    plan: Plan,
    kind: str,
    axes: tuple[str, ...],
    phase: Phase,
    count: int,
    payload_bytes: int,
    dtype: str,
    why: str,
) -> list[Expected]:
    """One line, if the mesh has any of `axes`."""
    axes = plan.in_mesh_order(axes)
    if not axes:
        return []
    return [
        Expected(
            kind=kind,
            axes=axes,
            count=count,
            payload_bytes=payload_bytes,
            dtype=dtype,
            phase=phase,
            why=why,
        )
    ]


def balance_axes(config: ModelConfig) -> tuple[str, ...]:
    """The axes over which the balance loss adds up counts."""
    return TOKEN_AXES if config.balance == "batch" else SEQUENCE_AXES


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    n, E = plan.size(AXIS), config.num_experts
    if n > 1 and not E:
        raise PlanError(
            f"The mesh has expert={n}, and {config.name} has no experts to spread over it "
            f"(num_experts=0). Presets that have: "
            f"{', '.join(name for name, c in PRESETS.items() if c.num_experts)}. "
            f"Axes that train: data or fsdp in its place."
        )
    if not E:
        return
    if E % n:
        rest = plan.num_batch_shards // n * plan.num_accumulation_steps * plan.num_microbatches
        sizes = nearest_divisors(E, n, lambda d: plan.batch_size % (rest * d) == 0)
        raise PlanError(
            f"{config.name}: num_experts={E} cannot be spread over expert={n}: it is not a "
            f"multiple. Nearest sizes of axis expert: {sizes}."
        )
    spread = plan.in_mesh_order(SEQUENCE_AXES)
    if plan.experts == "capacity" and spread:
        axes = " and ".join(f"{axis}={plan.size(axis)}" for axis in spread)
        raise PlanError(
            f"experts='capacity' counts an expert's places within a whole sequence, and the mesh "
            f"spreads each over {axes}. Set experts='dropless'."
        )
    for field in ("num_accumulation_steps", "num_microbatches"):
        if config.balance_weight and config.balance == "batch" and getattr(plan, field) > 1:
            raise PlanError(
                f"{config.name}: balance='batch' needs the whole batch at once, and "
                f"{field}={getattr(plan, field)} shows it in parts, which ones depends on the "
                f"mesh. Set {field}=1, or balance='sequence'."
            )
    is_ragged = plan.experts == "dropless" and plan.expert_exchange == "ragged"
    if is_ragged and n > 1 and plan.mesh.platform == "cpu":
        raise PlanError(
            f"expert_exchange='ragged' uses ragged_all_to_all over expert={n}, which CPUs do not "
            f"have (platform='cpu'). Set expert_exchange='padded', or a mesh on tpu or gpu."
        )


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    is_stack = parameter.dims[0] == "experts" and "mlp" in parameter.dims
    return {"experts": AXIS} if is_stack and plan.size(AXIS) > 1 else {}


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    Q = plan.num_expert_chunks
    mine: dict[str, Callable[..., Any]] = {
        "sum_counts": partial(sum_counts, axes=balance_axes(config)),
    }
    if plan.experts == "capacity":
        factor = plan.capacity_factor
        mine["drop"] = partial(drop_over_capacity, factor=factor, policy=plan.drop_policy)
        mine["experts"] = partial(with_capacity, factor=factor, num_chunks=Q)
    else:
        mine["experts"] = partial(without_limit, exchange=plan.expert_exchange, num_chunks=Q)
    return mine


MODEL = "tiny-moe"

STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    # Always: on one device and on any mesh, an MoE's tokens go to their experts by this code.
    is_active=lambda plan: True,
    is_partial=lambda parameter: True,
    check=check,
    splits=splits,
    hooks=hooks,
    expected=expected,
    variants=(
        Variant(
            name="expert-capacity",
            mesh="expert=8",
            fields={"experts": "capacity"},
            model=MODEL,
        ),
        Variant(name="expert-dropless", mesh="expert=8", model=MODEL),
        Variant(name="data+expert", mesh="data=2,expert=4", model=MODEL),
        Variant(name="expert+tensor", mesh="expert=4,tensor=2", model=MODEL),
        Variant(name="fsdp+expert", mesh="fsdp=2,expert=4", model=MODEL),
    ),
)
