"""Experts in chunks: one chunk's tokens travel while another chunk's are computed.

What is split    an MoE layer's tokens on each device, into Q chunks that follow one another through
                 dispatch, experts and combine. Who is dropped is settled before, by sequence.
Why              all-to-all, experts, all-to-all take the sum of their times; in chunks all but the
                 first dispatch and the last combine can run beside a chunk's experts.
What it costs    the same bytes, as Q all-to-alls of a Q-th in place of each; and Q grouped matmuls
                 of a Q-th of the rows, each of which reads all of the experts' weights.

L MoE layers, m micro-batches; V is the payload of the one all-to-all without chunks (expert.py):

| collective          | phase                          | count | payload_bytes | why            |
|---------------------|--------------------------------|-------|---------------|----------------|
| (ragged-)all-to-all | forward, (recompute,) backward | mLQ   | V/Q           | to experts     |
| (ragged-)all-to-all | forward, (recompute,) backward | mLQ   | V/Q           | back to tokens |

Chunks are cut so that V stays what it is: capacity, the places of each expert (B·C of them, so that
a sequence's places may be in two chunks); dropless, the tokens (B·S). Experts themselves could be
cut instead, with the rows of each matmul left whole, but there may be only one on a device, and the
padded exchange would send more: Q·min(K, e/Q) > min(K, e) where a token uses fewer experts than a
device has. The numbers are those of one chunk up to rounding: a weight's gradient is the sum of Q
gradients in `compute_dtype`.

Source: Hwang et al. 2023, "Tutel", MLSys (adaptive pipelining: places cut, as here); He et al.
2022, "FasterMoE", PPoPP (smart scheduling: a chunk is computed beside its neighbours' exchanges).
"""

from __future__ import annotations

from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import ModelConfig
from jaxpar.model.routing import capacity
from jaxpar.strategies.expert import MODEL, token_vectors
from jaxpar.strategies.expert_exchange import AXIS
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="expert-chunks",
    axis=AXIS,
    splits="the tokens of an MoE layer on each device, into chunks that follow one another",
    why="a chunk travels while another one is computed: the longer of both times, not their sum",
    costs="the same bytes in more all-to-alls, and grouped matmuls of fewer rows",
    source="Hwang et al. 2023 (Tutel), adaptive pipelining",
)

# --- communication: see `in_chunks` in expert_dispatch.py --------------------------------------

# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    return token_vectors(config, plan)


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    B, S, Q = plan.local_batch_size, plan.local_seq_len, plan.num_expert_chunks
    E, K = config.num_experts, config.num_experts_per_token
    if not E:
        raise PlanError(
            f"num_expert_chunks={Q} cuts what goes to experts, and {config.name} has none "
            f"(num_experts=0). Leave num_expert_chunks at 1."
        )
    if plan.size(AXIS) == 1:
        raise PlanError(
            f"num_expert_chunks={Q} hides the all-to-alls of axis expert behind the experts, and "
            f"this mesh has expert=1 ({plan.mesh}). Give the mesh an axis expert, or leave "
            f"num_expert_chunks at 1."
        )
    rows, what = B * S, f"{B} × {S} tokens"
    if plan.experts == "capacity":
        C = capacity(S, E, K, plan.capacity_factor)
        rows, what = B * C, f"{B} × {C} places of each expert"
    if rows % Q:
        raise PlanError(
            f"num_expert_chunks={Q} does not divide the {what} that a micro-batch has on a "
            f"device with experts='{plan.experts}', {rows} in all. Nearest num_expert_chunks: "
            f"{nearest_divisors(rows, Q)}."
        )


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.num_expert_chunks > 1,
    is_partial=lambda parameter: False,
    check=check,
    expected=expected,
    refines="expert",
    variants=(
        Variant(
            name="expert-chunks",
            mesh="expert=8",
            fields={"experts": "capacity", "num_expert_chunks": 4},
            model=MODEL,
        ),
    ),
)
