"""How parameters move: the optimizer's step on whatever shards a device holds, and its limits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params

from jaxpar.errors import PlanError
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Stats
from jaxpar.model.routing import balanced_bias
from jaxpar.model.transformer import Params

EXPERT_BIAS = "layers/moe/bias"
"""The parameter that no gradient moves."""


class TrainState(NamedTuple):
    """What a step turns into the next one. `params` are float32 and sharded as the plan says."""

    params: Params
    opt_state: optax.OptState


def fill(params: Params, others: Params) -> Params:
    """`params` with those of `others` where it has None."""
    return jax.tree.map(
        lambda p, other: other if p is None else p, params, others, is_leaf=lambda p: p is None
    )


def check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Raise PlanError for an optimizer that looks beyond single elements.

    Clipping by a norm, LAMB's trust ratio or Adafactor's means would be those of one device's
    shards: different on every device, and wrong on all of them. Noise would repeat.
    """
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)  # large enough for Adafactor to factor
    params = {"a": matrix, "b": matrix}

    def update(params: Params, gradients: Params) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(gradients, optimizer.init(params), params)

    mixing = sorted(_mixing_primitives(jax.make_jaxpr(update)(params, params).jaxpr))
    if mixing:
        raise PlanError(
            f"The optimizer looks beyond single elements ({', '.join(mixing)}), and under this "
            f"plan it would see one device's shards only. Use one that works element by element, "
            f"such as optax.adamw(1e-3); for clipping, give clip_norm."
        )


def _mixing_primitives(jaxpr: Any) -> set[str]:
    mixes = ("reduce_", "dot_general", "cum", "sort", "arg", "conv_general", "random_bits")
    found = {
        eqn.primitive.name
        for eqn in jaxpr.eqns
        if eqn.primitive.name.startswith(mixes)
        and any(v.aval.size > 1 for v in (*eqn.invars, *eqn.outvars))
    } - {"reduce_precision"}
    for eqn in jaxpr.eqns:
        for body in jaxprs_in_params(eqn.params):
            found |= _mixing_primitives(getattr(body, "jaxpr", body))
    return found


def balance_experts(
    config: ModelConfig, before: TrainState, after: TrainState, stats: Stats
) -> TrainState:
    """`after` with the experts' bias moved by its own rule, whatever the optimizer did to it.

    `stats` are those of the whole step. Other models come back as they are.
    """
    if not config.bias_rate:
        return after
    bias_LE = before.params["layers"]["moe"]["bias"]
    bias_LE = balanced_bias(bias_LE, stats["tokens_per_expert"], config.bias_rate)
    layers = after.params["layers"]
    layers = {**layers, "moe": {**layers["moe"], "bias": bias_LE}}
    return after._replace(params={**after.params, "layers": layers})


def apply_gradients(
    state: TrainState, gradients: Params, optimizer: optax.GradientTransformation
) -> TrainState:
    """The optimizer's step, leaf by leaf on whatever shards are held; none where there is None."""
    params = jax.tree.map(
        lambda g, p: None if g is None else p, gradients, state.params, is_leaf=lambda g: g is None
    )
    # optax mixes Python floats with integer counters, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, params)
    return TrainState(fill(optax.apply_updates(params, updates), state.params), opt_state)
