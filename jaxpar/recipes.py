"""Recipes: how the field combines strategies, as functions from a model and a cluster to a Plan.

Each puts the axes whose collectives are largest and most frequent on the links that are fastest:
tensor and expert inside a node, then context, then fsdp, and data and pipe between nodes. They are
starting points with the usual sizes, no search; any field of a Plan can be given beside, and wins.

| recipe       | for                                  | mesh, slowest links first                  |
|--------------|--------------------------------------|--------------------------------------------|
| small        | a model that trains on one device    | data                                       |
| medium       | states too large for one device      | data (nodes) × fsdp (inside one)           |
| large_dense  | layers too large, or too many tokens | pipe × fsdp or data × tensor + sequence    |
| moe          | experts                              | pipe × fsdp (ZeRO-1) × expert × tensor     |
| long_context | sequences too long for one device    | fsdp × context (ring) × tensor + sequence  |

Sources: Narayanan et al. 2021 §3.5 (tensor up to the node, pipeline between nodes, data for what is
left) and §2.2 (interleaved schedule); Korthikanti et al. 2022 (sequence); Zhao et al. 2023 §3.2
(hybrid sharding); Rajbhandari et al. 2022 §3 and 4 (experts with tensor and data); Llama Team 2024
§3.3.2 (order of the axes, context for long sequences).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxpar.errors import PlanError, did_you_mean, require_whole
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.strategies import compose
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Variant


def small(config: ModelConfig, *, num_devices: int, **fields: Any) -> Plan:
    """Data parallelism: whole replicas, and one all-reduce of the gradients."""
    return _plan(config, num_devices, {"data": num_devices}, fields)


def medium(
    config: ModelConfig, *, num_devices: int, num_devices_per_node: int = 8, **fields: Any
) -> Plan:
    """Hybrid sharding: weights gathered inside a node, shards of gradients summed between nodes."""
    fsdp = min(num_devices, num_devices_per_node)
    return _plan(config, num_devices, {"data": num_devices // fsdp, "fsdp": fsdp}, fields)


def large_dense(
    config: ModelConfig,
    *,
    num_devices: int,
    num_devices_per_node: int = 8,
    tensor: int | None = None,
    pipe: int = 1,
    **fields: Any,
) -> Plan:
    """Tensor and sequence parallelism inside a node, FSDP outside; with `pipe` an interleaved
    pipeline between nodes, and ZeRO-1, which gathers weights once per step however many
    micro-batches there are.

    tensor: as many as a node has where not given, but no more than there are key/value heads.
    """
    tensor = tensor or math.gcd(num_devices_per_node, config.num_kv_heads, num_devices)
    axes = {"pipe": pipe, "fsdp": num_devices // (tensor * pipe), "tensor": tensor}
    usual: dict[str, Any] = {"sequence": tensor > 1}
    if pipe > 1:
        usual |= _pipeline(config.num_layers, pipe) | {"zero": 1}
    return _plan(config, num_devices, axes, usual | fields)


def moe(
    config: ModelConfig,
    *,
    num_devices: int,
    num_devices_per_node: int = 8,
    expert: int | None = None,
    tensor: int = 1,
    pipe: int = 1,
    **fields: Any,
) -> Plan:
    """Experts spread inside a node, the shared parts split by `tensor`, optimizer state by ZeRO-1.

    expert: as many as a node has beside `tensor` where not given, if they divide the experts.
    """
    if not config.num_experts:
        raise PlanError(
            f"recipe moe: {config.name} has num_experts=0. Take large_dense, or a model with "
            f"experts, such as mixtral-8x7b."
        )
    expert = expert or math.gcd(num_devices_per_node // tensor or 1, config.num_experts)
    fsdp = num_devices // (tensor * pipe * expert)
    axes = {"pipe": pipe, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    usual: dict[str, Any] = {"zero": 1} if fsdp > 1 else {}
    if pipe > 1:
        usual |= _pipeline(config.num_layers - config.num_dense_layers, pipe)
    return _plan(config, num_devices, axes, usual | fields)


def long_context(
    config: ModelConfig,
    *,
    num_devices: int,
    num_devices_per_node: int = 8,
    context: int = 2,
    tensor: int | None = None,
    **fields: Any,
) -> Plan:
    """The sequence around a ring of `context` devices, zigzag; tensor inside, FSDP outside."""
    tensor = tensor or math.gcd(num_devices_per_node, config.num_kv_heads, num_devices // context)
    axes = {"fsdp": num_devices // (context * tensor), "context": context, "tensor": tensor}
    usual = {"context": "ring", "sequence": tensor > 1}
    return _plan(config, num_devices, axes, usual | fields)


RECIPES: dict[str, Callable[..., Plan]] = {
    "small": small,
    "medium": medium,
    "large-dense": large_dense,
    "moe": moe,
    "long-context": long_context,
}

VARIANTS = (
    Variant(
        name="large-dense",
        mesh="pipe=2,fsdp=2,tensor=2",
        fields={
            "sequence": True,
            "zero": 1,
            "schedule": "interleaved",
            "num_virtual_stages": 2,
            "num_microbatches": 4,
        },
        model="tiny-deep",
    ),
    Variant(
        name="moe",
        mesh="fsdp=2,expert=2,tensor=2",
        fields={"zero": 1},
        model="tiny-moe",
    ),
    Variant(
        name="long-context",
        mesh="fsdp=2,context=2,tensor=2",
        fields={"context": "ring", "sequence": True},
    ),
)
"""Those on 8 devices, as rows of the tour, but for small and medium, which rows `data` and `hsdp`
are."""


def recipe(name: str) -> Callable[..., Plan]:
    """The recipe called `name`; PlanError names the closest one otherwise."""
    if name not in RECIPES:
        raise PlanError(f"There is no recipe {name!r}. {did_you_mean(name, RECIPES)}")
    return RECIPES[name]


def _pipeline(num_layers: int, pipe: int) -> dict[str, Any]:
    """Interleaved with two chunks of layers on each stage where there are enough, and twice as many
    micro-batches as stages."""
    if num_layers >= 2 * pipe:
        schedule: dict[str, Any] = {"schedule": "interleaved", "num_virtual_stages": 2}
    else:
        schedule = {"schedule": "1f1b"}
    return schedule | {"num_microbatches": 2 * pipe}


def _plan(
    config: ModelConfig, num_devices: int, axes: dict[str, int], fields: dict[str, Any]
) -> Plan:
    """A plan on these axes, without those of one device; PlanError where they do not fit."""
    require_whole(PlanError, "num_devices", num_devices)
    if 0 in axes.values():
        inner = math.prod(size for size in axes.values() if size)
        raise PlanError(
            f"num_devices={num_devices} are too few for "
            f"{' × '.join(f'{axis}={size}' for axis, size in axes.items() if size > 1)}: these "
            f"axes take {inner}. Give more devices, or smaller axes."
        )
    if math.prod(axes.values()) != num_devices:
        told = " × ".join(f"{axis}={size}" for axis, size in axes.items())
        raise PlanError(
            f"num_devices={num_devices} cannot be spread over {told}, which is "
            f"{math.prod(axes.values())}. Take a multiple of the inner axes, or give their sizes."
        )
    used = {axis: size for axis, size in axes.items() if size > 1} or {"data": 1}
    plan = Plan(mesh=MeshSpec.parse(",".join(f"{a}={s}" for a, s in used.items())), **fields)
    compose.check(config, plan)
    return plan
