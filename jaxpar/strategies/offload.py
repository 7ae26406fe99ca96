"""Offload: optimizer state and activations wait in the host's memory until they are needed.

What is split    nothing; what a device holds of the optimizer's moments, or of what layers keep for
                 their backward, moves to its host and back.
Why              host memory is ten times as large. Adam's moments are half of a float32 training
                 state, and activations are what grows with batch and sequence.
What it costs    traffic between device and host, which is no collective: other devices see nothing
                 of it, but it is 10 to 50 times slower than a device's own memory.

P = parameters on this device, k moments of 4 bytes (Adam: 2); A = bytes of what a layer keeps under
`Plan.remat` (predict/activations.py), in arrays; L layers, m micro-batches, per step and device:

| Plan.offload  | to the device  | to the host    | when                                      |
|---------------|----------------|----------------|-------------------------------------------|
| 'optimizer'   | 4kP            | 4kP            | around the update                         |
| 'activations' | m·L·A          | m·L·A          | after a layer forward; before it backward |
| 'both'        | the sum        | the sum        |                                           |

A backend without `pinned_host` memory is refused. A CPU's pinned memory *is* its memory: programs
ask for the transfers and XLA leaves them out, so that a CPU proves the requests and the numbers and
no copy. What a compiled program does copy is told by `audit/host_copies.py`, and `warn_if_ignored`
there is loud where it should be more.

Sources: Rajbhandari et al. 2021 (ZeRO-Infinity) §5.1; Ren et al. 2021 (ZeRO-Offload) §3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.predict.activations import named_arrays
from jaxpar.strategies.plan import Plan
from jaxpar.strategies.strategy import Card, Expected, Layout, Strategy, Variant

CARD = Card(
    name="offload",
    axis="none: it holds on every mesh",
    splits="nothing; moments or activations wait in host memory",
    why="what does not fit on a device fits beside it",
    costs="every offloaded byte crosses to the host and back, once per step or micro-batch",
    source="Rajbhandari et al. 2021, §5.1",
)

HOST = "pinned_host"

Direction = Literal["to host", "to device"]


class Transfer(NamedTuple):
    """One kind of copy between a device and its host: `executions` per step and device.

    num_bytes is of one copy.
    """

    direction: Direction
    executions: int
    num_bytes: int
    why: str


# --- computation on shards -------------------------------------------------------------------


def offloads_optimizer(plan: Plan) -> bool:
    return plan.offload in ("optimizer", "both")


def offloads_activations(plan: Plan) -> bool:
    return plan.offload in ("activations", "both")


def fetch(optimizer: optax.GradientTransformation, opt_state: Any) -> Any:
    """The optimizer's moments on the device, inside `shard_map`; counters always are."""
    move = lambda m: jax.device_put(m, jax.memory.Space.Device)  # noqa: E731
    return optax.tree.map_params(optimizer, move, opt_state)


def put_back(optimizer: optax.GradientTransformation, opt_state: Any) -> Any:
    """The optimizer's moments in host memory."""
    move = lambda m: jax.device_put(m, jax.memory.Space.Host)  # noqa: E731
    return optax.tree.map_params(optimizer, move, opt_state)


def is_moment(optimizer: optax.GradientTransformation, opt_state: Any) -> Any:
    """The tree of an optimizer state, True where a leaf belongs to a parameter."""
    return optax.tree.map_params(
        optimizer, lambda _: True, opt_state, transform_non_params=lambda _: False
    )


def is_on_host(x: Any) -> bool:
    """Whether an array, or the place where one is to be, is in host memory."""
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def policy(names: tuple[str, ...]) -> Callable[..., Any]:
    """Of `jax.checkpoint`: arrays of these names wait in host memory, all others are not kept."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=HOST,
    )


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    """No collective: what is copied is in `transfers`."""
    return []


def transfers(
    config: ModelConfig, plan: Plan, layout: Layout, *, num_moments: int = 2
) -> list[Transfer]:
    """Copies between each device and its host in one step.

    num_moments: arrays that the optimizer keeps for each parameter, in float32; Adam's 2.
    """
    rows: list[Transfer] = []
    both: tuple[Direction, Direction] = "to device", "to host"
    if offloads_optimizer(plan):
        trained = [placed for placed in layout if not plan.is_frozen(placed.parameter.path)]
        rows += [
            Transfer(direction, num_moments, 4 * placed.local_size, placed.parameter.path)
            for placed in trained
            for direction in both
        ]
    if offloads_activations(plan):
        m, L = plan.num_accumulation_steps, config.num_layers
        rows += [
            Transfer(direction, m * L, size, name)
            for name, sizes in named_arrays(config, plan).items()
            for size in sizes
            for direction in both
        ]
    return rows


def asked_transfers(jaxpr: Any) -> list[Transfer]:
    """The same of a traced step, `step.jitted.trace(..).jaxpr`; all that is inside its shards."""
    return list(_asked(getattr(jaxpr, "jaxpr", jaxpr), 1))


def _asked(jaxpr: Jaxpr, count: int) -> Iterator[Transfer]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                old, new = _space(before.aval), _space(after.aval)
                if old != new:
                    direction: Direction = "to host" if new == "Host" else "to device"
                    size = after.aval.size * after.aval.dtype.itemsize  # type: ignore[attr-defined]
                    yield Transfer(direction, count, size, str(eqn.source_info.name_stack))
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jaxprs_in_params(eqn.params):
            yield from _asked(getattr(body, "jaxpr", body), count * turns)


def _space(aval: Any) -> str:
    return str(aval.memory_space.name)


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    if not offloads_activations(plan):
        return
    if plan.remat not in ("dots", "full"):
        raise PlanError(
            f"offload={plan.offload!r} moves what rematerialisation keeps by name, and remat="
            f"{plan.remat!r} keeps whatever the backward uses. Set remat='full' (the input of each "
            f"layer) or 'dots' (also the results of its matmuls), or offload='optimizer'."
        )
    if 1 in (config.num_layers - config.num_dense_layers, config.num_dense_layers):
        raise PlanError(
            f"{config.name}: offload={plan.offload!r} moves what layers keep until their backward, "
            f"and one of num_layers={config.num_layers} with num_dense_layers="
            f"{config.num_dense_layers} is alone in its stack, and its backward next. Use "
            f"offload='optimizer'."
        )
    if plan.size("pipe") > 1:
        raise PlanError(
            f"offload={plan.offload!r} moves what each layer keeps, and a pipeline (pipe="
            f"{plan.size('pipe')}) keeps the inputs of its stages instead. Use offload='optimizer'."
        )
    if config.num_experts and plan.remat == "dots":
        raise PlanError(
            f"{config.name} has num_experts={config.num_experts}, and with remat='dots' what their "
            f"layers keep depends on how tokens travel. Set remat='full', or offload='optimizer'."
        )


def check_memory(plan: Plan, mesh: Mesh | AbstractMesh) -> None:
    """Raise PlanError where the mesh's devices have no host memory to offload to."""
    if isinstance(mesh, AbstractMesh):  # of a target's devices, which all have it
        return
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if plan.offload and HOST not in kinds:
        raise PlanError(
            f"offload={plan.offload!r} needs memory of kind {HOST!r}, and {device.device_kind} "
            f"({device.platform}) has {', '.join(map(repr, kinds)) or 'none'}. Set offload=None."
        )


STRATEGY = Strategy(
    card=CARD,
    axes=(),
    is_active=lambda plan: plan.offload is not None,
    is_partial=lambda parameter: False,
    check=check,
    expected=expected,
    variants=(
        Variant(name="offload-optimizer", mesh="fsdp=4,tensor=2", fields={"offload": "optimizer"}),
        Variant(name="offload-activations", mesh="data=2,tensor=4",
                fields={"offload": "activations", "remat": "full", "sequence": True}),
    ),
)  # fmt: skip
