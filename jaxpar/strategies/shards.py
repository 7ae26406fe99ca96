"""Parameters sharded over `fsdp`: which dim is split, how a weight gets whole, its gradient home.

What ZeRO-1, ZeRO-2 and FSDP share. All three keep the same state: float32 master weights and
moments split over the axis, with the same PartitionSpecs, so that checkpoints are the same, too.

A matrix is split along its embed dim; where that does not divide, along the largest dim that does
and that no other axis splits; where none does, it stays whole, as vectors always do (norm scales
are a few thousandths of a percent of the bytes, and gathering them would cost more than it saves).
What is whole is used as it is, and its gradient all-reduced with those of data parallelism.

Source: Rajbhandari et al. 2020 (ZeRO) §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.collectives import all_gather, all_reduce, reduce_scatter, vary
from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import LAYER_NUMBER, ModelConfig, Parameter
from jaxpar.model.transformer import Params
from jaxpar.strategies import tensor
from jaxpar.strategies.pipeline import choice as pipeline
from jaxpar.strategies.plan import DTYPE_BYTES, DTYPES, Plan
from jaxpar.strategies.strategy import Expected, Layout, Phase, Placed

AXIS = "fsdp"
PREFERRED_DIM = "embed"


@dataclass(frozen=True, kw_only=True)
class Weight:
    """How one parameter is brought together for its use, and its gradient back to its owners.

    dim: the dim of one layer's array that is split over `fsdp`; None for what is whole.
    compute_dtype: what a gathered weight is cast to, after going over the wire in `gather_dtype`.
    inner_axes: axes over which its gradient is all-reduced in the backward, layer by layer.
    is_stacked: whether there is one for each layer.
    is_trained: whether it has a gradient at all.
    num_kv_heads: how many, if devices of `tensor` share them; each uses one, cut out here, for what
        is cut out later would be kept for the backward.
    is_held: whether it is gathered once per step and kept, so that its gradient is whole until it
        is scattered, once, behind the last micro-batch.
    """

    dim: int | None
    gather_dtype: jnp.dtype
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    inner_axes: tuple[str, ...] = ()
    is_stacked: bool = False
    is_trained: bool = True
    is_held: bool = False
    num_kv_heads: int | None = None

    def gather(self, shard: Array, *, again: bool = False) -> Array:
        """[.., d/n, ..] float32 -> [.., d, ..] in compute_dtype; what is whole stays float32.

        again: it was gathered before, and dropped, see `all_gather`.
        """
        shard = vary(shard, self.inner_axes)
        if self.dim is None:
            return shard
        shard = shard.astype(self.gather_dtype)
        whole = all_gather(shard, AXIS, dim=self.dim, again=again, scope="gather_weight")
        whole = whole.astype(self.compute_dtype)
        return whole if self.num_kv_heads is None else tensor.kv_weight(whole, self.num_kv_heads)

    def scatter(self, gradient: Array) -> Array:
        """The gradient of what `gather` returned, [.., d, ..] -> [.., d/n, ..] in reduce_dtype.

        What is neither scattered nor reduced here keeps its dtype.
        """
        if self.dim is None and not self.inner_axes:
            return gradient
        gradient = gradient.astype(self.reduce_dtype)
        if self.num_kv_heads is not None:
            gradient = tensor.kv_gradient(gradient, self.num_kv_heads)
        if self.dim is not None:
            gradient = reduce_scatter(gradient, AXIS, dim=self.dim, scope="scatter_gradient")
        return all_reduce(gradient, self.inner_axes, scope="reduce_layer")

    def stacked(self) -> Weight:
        """The same for several layers' arrays at once, stacked on a leading dim."""
        return self if self.dim is None else replace(self, dim=self.dim + 1)


_INT = jnp.dtype(jnp.int32)
NUMBER = Weight(
    dim=None, gather_dtype=_INT, compute_dtype=_INT, reduce_dtype=_INT,
    is_stacked=True, is_trained=False,
)  # fmt: skip
"""A layer's number, which loops over layers take along with its weights."""

# --- a weight and its gradient ---------------------------------------------------------------


def use(shard: Array, weight: Weight) -> Array:
    """`weight.gather`, whose gradient is `weight.scatter`; a number is what it is."""
    return shard if weight == NUMBER else _use(shard, weight)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _use(shard: Array, weight: Weight) -> Array:
    """By hand for one reason: the transpose of a cast and a gather would sum the gradient in the
    compute dtype, and in which dtype gradients are summed is the plan's choice.
    """
    return weight.gather(shard)


def _use_forward(shard: Array, weight: Weight) -> tuple[Array, None]:
    return weight.gather(shard), None


def _use_backward(weight: Weight, _: None, gradient: Array) -> tuple[Array]:
    return (weight.scatter(gradient).astype(jnp.float32),)


_use.defvjp(_use_forward, _use_backward)


def used(state: nnx.State, weights: Mapping[str, Weight]) -> nnx.State:
    """A module's state with every weight whole for its use."""

    def whole(param: nnx.Variable[Array]) -> nnx.Variable[Array]:
        weight = weights[path_of(param)]
        return param if weight.is_held else param.replace(use(param[...], weight))

    return jax.tree.map(whole, state, is_leaf=is_param)


def is_param(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def path_of(param: nnx.Variable[Array]) -> str:
    """Where in the whole model a parameter is, as `ModelConfig.parameters` has it."""
    path: str = param.get_metadata("path")
    return path


def by_path(params: Params) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths; what is None is left out."""
    return {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(params)
    }


def map_paths(function: Callable[[str, Any], Any], params: Params) -> Params:
    """The same tree with `function(path, leaf)` in place of each leaf."""
    flat = by_path(params)
    values = [function(path, leaf) for path, leaf in flat.items()]
    tree: Params = jax.tree.unflatten(jax.tree.structure(params), values)
    return tree


def weights(plan: Plan, layout: Layout) -> dict[str, Weight]:
    """How each parameter of a model is gathered, by path; a layer's number is whole everywhere."""
    found = {placed.parameter.path: weight(plan, placed) for placed in layout}
    return found | {LAYER_NUMBER: NUMBER}


def weight(plan: Plan, placed: Placed) -> Weight:
    parameter, shared = placed.parameter, tensor.shared_kv_heads(placed, plan)
    name = split_dim(parameter, plan)
    # What is whole on all stages one or two of them use, and all would gather it in every slot.
    is_whole = pipeline.AXIS not in placed.split_axes
    is_held = plan.zero == 1 or (
        plan.size(pipeline.AXIS) > 1 and (is_whole or pipeline.holds_weights(plan))
    )
    return Weight(
        dim=None if name is None else parameter.dims.index(name),
        gather_dtype=jnp.dtype(plan.gather_dtype or plan.compute_dtype),
        compute_dtype=jnp.dtype(plan.compute_dtype),
        reduce_dtype=jnp.dtype(plan.reduce_dtype),
        inner_axes=placed.inner_axes,
        is_stacked=parameter.num_stacked is not None,
        is_trained=not plan.is_frozen(parameter.path),
        is_held=is_held and name is not None,
        num_kv_heads=shared if plan.zero == 3 and not is_held else None,
    )


# --- closed form -----------------------------------------------------------------------------


def row(
    kind: str, phase: Phase, placed: Placed, plan: Plan, *, count: int, of: int, why: str
) -> Expected:
    """`count` gathers or scatters of a split parameter, `of` layers at once where it is stacked."""
    gathers = kind == "all-gather"
    dtype = DTYPES[(plan.gather_dtype or plan.compute_dtype) if gathers else plan.reduce_dtype]
    size = placed.local_size * plan.size(AXIS) // num_layers(placed)
    return Expected(
        kind=kind,
        axes=(AXIS,),
        count=count,
        payload_bytes=size * of * DTYPE_BYTES[dtype],
        dtype=dtype,
        phase=phase,
        why=f"{why} {placed.parameter.path}",
    )


def held(plan: Plan, layout: Layout) -> list[Expected]:
    """Closed form of the weights that are gathered once per step, all layers at once."""
    rows = []
    for placed in layout:
        if (of := weight(plan, placed)).is_held:
            L = num_layers(placed)
            rows.append(row("all-gather", "forward", placed, plan, count=1, of=L, why="use"))
            if of.is_trained:
                why = "gradient of"
                rows.append(row("reduce-scatter", "backward", placed, plan, count=1, of=L, why=why))
    return rows


def passing(plan: Plan, layout: Layout) -> list[Placed]:
    """The split parameters that are not held."""
    weights_ = ((placed, weight(plan, placed)) for placed in layout)
    return [placed for placed, w in weights_ if w.dim is not None and not w.is_held]


def num_layers(placed: Placed) -> int:
    """Layers of a stacked parameter on one device; 1 for others."""
    return placed.local_shape[0] if placed.parameter.num_stacked else 1


def layers_per_run(placed: Placed, plan: Plan) -> int:
    """Those of them that run at a time: of one chunk, where stages of a pipeline hold several."""
    is_cut = pipeline.AXIS in placed.split_axes
    return num_layers(placed) // (plan.num_virtual_stages if is_cut else 1)


# --- rules -----------------------------------------------------------------------------------


def split_dim(parameter: Parameter, plan: Plan) -> str | None:
    """The dim of a parameter that is split over `fsdp`; None where it stays whole."""
    n = plan.size(AXIS)
    if n == 1 or len(parameter.dims) < 2:
        return None
    taken = {"experts", *(tensor.SPLIT_DIMS if plan.size(tensor.AXIS) > 1 else ())}
    sizes = {
        dim: size
        for dim, size in zip(parameter.dims, parameter.shape, strict=True)
        if size % n == 0 and dim not in taken
    }
    if PREFERRED_DIM in sizes:
        return PREFERRED_DIM
    return max(sizes, key=lambda dim: sizes[dim]) if sizes else None


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    dim = split_dim(parameter, plan)
    return {} if dim is None else {dim: AXIS}


def layers_at_once(plan: Plan) -> int:
    """Layers whose weights, and gradients, go over the wire together."""
    return plan.num_layers_per_gather if plan.size(AXIS) > 1 and plan.zero == 3 else 1


def check_fields(plan: Plan) -> None:
    """Raises PlanError for fields that say something of shards where there are none, or others."""
    defaults = {f.name: f.default for f in fields(Plan)}
    of_stage = ("reshard_after_forward", "prefetch", "num_layers_per_gather")
    for field in ("zero", "gather_dtype", *of_stage):
        value, default = getattr(plan, field), defaults[field]
        if value != default and plan.size(AXIS) == 1:
            raise PlanError(
                f"{field}={value!r} is about axis fsdp, and this mesh has fsdp=1 ({plan.mesh}). "
                f"Give the mesh an fsdp axis, or leave {field} at {default!r}."
            )
        if value != default and field in of_stage and plan.zero != 3:
            raise PlanError(
                f"{field}={value!r} is about weights gathered layer by layer, and zero={plan.zero} "
                f"gathers all of them once per step. Set zero=3, or leave {field} at {default!r}."
            )


def check(config: ModelConfig, plan: Plan) -> None:
    """Raises PlanError where nothing at all could be split."""
    n = plan.size(AXIS)
    if all(split_dim(parameter, plan) is None for parameter in config.parameters):
        rest = plan.num_batch_shards // n * plan.num_accumulation_steps * plan.num_microbatches
        sizes = nearest_divisors(config.embed, n, lambda d: plan.batch_size % (rest * d) == 0)
        raise PlanError(
            f"{config.name}: embed={config.embed} cannot be split over fsdp={n}: it is not a "
            f"multiple, and neither is any other dim that no other axis splits. Nearest sizes of "
            f"axis fsdp: {sizes}."
        )
