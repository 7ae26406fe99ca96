"""One training step out of a Plan: explicit collectives inside one `shard_map`, one `jit` around.

Read `_local_step` first: it is the whole composition, in the order things happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import processes
from jaxpar.collectives import vary
from jaxpar.compat import varying_axes
from jaxpar.errors import PlanError, require_kind, require_positive, require_whole, shown
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.model.transformer import Params, abstract_model, init_params
from jaxpar.strategies import compose, context, offload, pipeline
from jaxpar.strategies.clip import clip, global_norm
from jaxpar.strategies.data import (
    count_tokens,
    reduce_gradients,
    start_gradients,
    sum_loss,
    sum_stats,
)
from jaxpar.strategies.plan import BATCH_AXES, Plan
from jaxpar.strategies.shards import map_paths
from jaxpar.strategies.strategy import Placed
from jaxpar.text import Batch
from jaxpar.update import (
    EXPERT_BIAS,
    TrainState,
    apply_gradients,
    balance_experts,
    check_elementwise,
    fill,
)


class Metrics(NamedTuple):
    """What one step measured, the same on every device, and so on every process.

    loss, gradient_norm, num_tokens: scalars; the tokens are the valid ones.
    stats: what layers counted, summed over all tokens, [L, ..] each; dense layers count nothing.

    Of the layers with experts, on the host, float32 [L] each, [0] where there are none:
    imbalance: tokens of the busiest expert over the mean, before any is dropped; 1 is even.
    dropped_fraction: of the choices of all tokens, those that found no place.
    """

    loss: Array
    gradient_norm: Array
    num_tokens: Array
    stats: Stats

    @property
    def imbalance(self) -> np.ndarray:
        if not self.stats:
            return np.zeros(0, np.float32)
        tokens_LE = np.asarray(self.stats["tokens_per_expert"], np.float32)
        return tokens_LE.max(axis=-1) / tokens_LE.mean(axis=-1)

    @property
    def dropped_fraction(self) -> np.ndarray:
        if not self.stats:
            return np.zeros(0, np.float32)
        tokens_LE = np.asarray(self.stats["tokens_per_expert"], np.float32)
        return np.asarray(self.stats["num_dropped"], np.float32) / tokens_LE.sum(axis=-1)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A compiled-on-first-use training step of `config` under `plan`.

    Raises PlanError (or ConfigError) when made, for anything the model or the mesh does not allow;
    tracing does not fail afterwards.

    optimizer: any optax transformation, and where parameters are split one that works element by
        element (Adam, SGD, Lion ...), since it sees one device's shards.
    clip_norm: largest global norm of the gradients; infinity never clips.
    """

    config: ModelConfig
    plan: Plan
    optimizer: optax.GradientTransformation
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for field, kind, example in (
            ("config", ModelConfig, "preset('tiny')"),
            ("plan", Plan, "Plan(mesh=..., batch_size=..., seq_len=...)"),
            ("optimizer", optax.GradientTransformation, "optax.adamw(1e-3)"),
        ):
            require_kind(PlanError, field, getattr(self, field), kind, example)
        if not isinstance(self.clip_norm, float) or self.clip_norm != math.inf:
            require_positive(PlanError, "clip_norm", self.clip_norm, 1.0, "; inf never clips")
        compose.check(self.config, self.plan)
        # Before anything else makes JAX choose how many CPU devices there are.
        assert self.mesh.size == self.plan.mesh.num_devices
        offload.check_memory(self.plan, self.mesh)
        if any(placed.split_axes for placed in self.layout):
            check_elementwise(self.optimizer)

    # --- where things live -------------------------------------------------------------------

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return self.plan.mesh.build()

    @cached_property
    def layout(self) -> compose.Layout:
        return compose.layout(self.config, self.plan)

    @cached_property
    def _abstract_state(self) -> TrainState:
        """Shapes and dtypes alone; tracing the whole model for them is worth doing once."""
        state: TrainState = jax.eval_shape(partial(self._init, 0))
        return state

    @cached_property
    def specs(self) -> TrainState:
        """PartitionSpecs of the state: moments live where their parameters do."""
        specs = compose.tree(self.layout, lambda placed: placed.spec)
        opt_specs = optax.tree.map_params(
            self.optimizer,
            lambda _, spec: spec,
            self._abstract_state.opt_state,
            self._trained(specs),
            transform_non_params=lambda _: PartitionSpec(),
        )
        return TrainState(specs, opt_specs)

    @cached_property
    def shardings(self) -> TrainState:
        """Where the state is between steps: an offloaded optimizer's moments in host memory."""
        is_moment = offload.is_moment(self.optimizer, self._abstract_state.opt_state)
        offloads = offload.offloads_optimizer(self.plan)

        def sharding(spec: PartitionSpec, is_moment: bool) -> NamedSharding:
            kind = offload.HOST if is_moment and offloads else None
            return NamedSharding(self.mesh, spec, memory_kind=kind)

        params = jax.tree.map(partial(NamedSharding, self.mesh), self.specs.params)
        return TrainState(params, jax.tree.map(sharding, self.specs.opt_state, is_moment))

    @cached_property
    def batch_spec(self) -> PartitionSpec:
        """Of tokens, labels and mask, global [B, S], once they are in the order of `place`."""
        rows = self.plan.in_mesh_order(BATCH_AXES) or None
        tokens = tuple(axis for axis in context.AXES if self.plan.size(axis) > 1)
        return PartitionSpec(rows, tokens) if tokens else PartitionSpec(rows)

    @cached_property
    def batch_specs(self) -> Batch:
        """Of a whole batch. Documents are told of all of a row's tokens: attention asks for it."""
        spec = self.batch_spec
        documents = PartitionSpec(spec[0]) if self.plan.packed else None
        return Batch(spec, spec, spec, documents, spec if self.config.dropout else None)

    # --- using it ----------------------------------------------------------------------------

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, born sharded. Its values depend on the seed alone, not on the mesh."""
        require_whole(PlanError, "seed", seed, at_least=0)
        return run_once(partial(self._init, seed), self.shardings)

    def init_from(self, params: Params) -> TrainState:
        """A fresh state of given parameters: whole float32 arrays, layers in their order [L, ..].

        That is how `in_layer_order` returns them, and one device has them. Raises PlanError for
        those of another model.
        """
        check_params(self.config, params)
        return run_once(self._start, self.shardings, params)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step on a global batch (tokens, labels, mask: [batch_size, seq_len] each).

        The state is donated: keep the returned one. Raises PlanError for a state that is not this
        step's, or that an earlier step has used up, and for what `place` refuses.
        """
        placed = self.place(batch)
        self._check_state(state)
        return self.jitted(state, placed)

    def in_layer_order(self, params: Params) -> Params:
        """Parameters of this step as every model has them: [L, ..] each, layers in their order.

        A pipeline holds them in the order of its stages, padded where they do not divide. `params`
        are whole arrays, such as `jax.device_get(state.params)`.
        """
        return pipeline.in_layer_order(params, self.config, self.plan)

    def _check_state(self, state: TrainState) -> None:
        want = self.abstract_inputs[0]
        trees: list[Any] = [jax.tree.structure(state), jax.tree.structure(want)]
        if trees[0] != trees[1]:
            raise PlanError(
                f"The state (a {type(state).__name__}) is not one of this model and optimizer. "
                f"Start from step.init(seed=0), and go on with the state each step returns."
            )
        for (path, have), wanted in zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(want), strict=True
        ):
            shape, dtype = np.shape(have), getattr(have, "dtype", type(have).__name__)
            if (shape, dtype) != (wanted.shape, wanted.dtype):
                raise PlanError(
                    f"state{jax.tree_util.keystr(path)} is {dtype}{list(shape)}, and has to be "
                    f"{wanted.dtype}{list(wanted.shape)}. Start from step.init(seed=0)."
                )
            if offload.is_on_host(have) != offload.is_on_host(wanted):
                raise PlanError(
                    f"state{jax.tree_util.keystr(path)} is "
                    f"{'' if offload.is_on_host(have) else 'not '}in host memory, and the plan has "
                    f"offload={self.plan.offload!r}. Start from step.init(seed=0), or move it: "
                    f"jax.device_put(state, step.shardings)."
                )
            if isinstance(have, Array) and not processes.is_everywhere(have, self.mesh):
                raise PlanError(
                    f"state{jax.tree_util.keystr(path)} is on this process's devices alone, and "
                    f"the mesh has those of several. Start from step.init(seed=0), or restore a "
                    f"checkpoint in all of them."
                )
            # JAX would crash the process, not raise, when it finds out for itself.
            if isinstance(have, Array) and have.is_deleted():
                raise PlanError(
                    "This state was given to an earlier step, which reuses its memory. "
                    "Go on with the one that step returned: state, metrics = step(state, batch)."
                )

    def place(self, batch: Batch) -> Batch:
        """A global batch spread over the mesh, tokens in the order of the plan's context layout.

        A batch whose tokens lie on the mesh that way already is taken for placed. Raises PlanError
        for another shape or dtype, and for NumPy arrays with tokens outside the vocabulary or
        without any valid token (what is on a device already is not read back). Where there are
        several processes each has the whole batch, and keeps what its devices need of it.
        """
        if not isinstance(batch, Batch):
            raise PlanError(
                f"The batch is a {type(batch).__name__}, and has to be a "
                f"Batch({', '.join(Batch._fields)}), as Corpus.batch makes it."
            )
        if not self.config.dropout:
            batch = batch._replace(numbers_BS=None)
        want = self.plan.batch_size, self.plan.seq_len
        for name, array in batch._asdict().items():
            if name == "segments_BS" and not self.plan.packed and array is None:
                continue
            if name == "segments_BS" and (array is None or not self.plan.packed):
                raise PlanError(
                    f"packed={self.plan.packed}, and segments_BS is "
                    f"{'missing' if array is None else 'there'}: rows of several documents need "
                    f"both. Corpus.batch(packed=True) makes such rows."
                )
            if name == "numbers_BS" and not self.config.dropout:
                continue
            if name == "numbers_BS" and array is None:
                raise PlanError(
                    f"dropout={self.config.dropout}, and numbers_BS is missing: noise is a "
                    f"function of each token's number in the data. Corpus.batch numbers them."
                )
            dtype = {"mask_BS": "float32", "numbers_BS": "uint32"}.get(name, "int32")
            if not isinstance(array, np.ndarray | Array):
                raise PlanError(f"{name} is a {type(array).__name__}; it has to be an array.")
            if array.shape != want or array.dtype != dtype:
                raise PlanError(
                    f"{name} is {array.dtype}{list(array.shape)}, and has to be "
                    f"{dtype}{list(want)}: batch_size={want[0]} × seq_len={want[1]}."
                )
            if name in ("tokens_BS", "labels_BS") and isinstance(array, np.ndarray):
                low, high = int(array.min()), int(array.max())
                if low < 0 or high >= self.config.vocab:
                    raise PlanError(
                        f"{name} holds {low} to {high}, and {self.config.name} has vocab="
                        f"{self.config.vocab}: tokens go from 0 to {self.config.vocab - 1}."
                    )
        if isinstance(batch.mask_BS, np.ndarray) and not batch.mask_BS.any():
            raise PlanError(
                "mask_BS is 0 everywhere, so there is no token to divide the loss by. "
                "Leave this batch out."
            )
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), self.batch_specs)
        order = context.token_order(self.plan)
        tokens = batch.tokens_BS
        is_placed = isinstance(tokens, Array) and tokens.sharding == shardings.tokens_BS
        if order is not None and not is_placed:
            batch = jax.tree.map(lambda array: array[:, order], batch)
        return processes.spread(batch, shardings)

    @cached_property
    def jitted(self) -> Any:
        """The step as a jitted function of (state, batch), for tracing, compiling and auditing."""
        specs = self.specs, self.batch_specs

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return jax.shard_map(
                self._local_step,
                mesh=self.mesh,
                in_specs=specs,
                out_specs=(self.specs, PartitionSpec()),
                check_vma=True,
            )(state, batch)

        shardings = (self.shardings, None) if self.plan.offload else None
        return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)

    @cached_property
    def abstract_inputs(self) -> tuple[TrainState, Batch]:
        """ShapeDtypeStructs with shardings: what `jitted` can be traced and compiled with."""

        def sharded(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state = jax.tree.map(sharded, self._abstract_state, self.shardings)
        shape = self.plan.batch_size, self.plan.seq_len
        tokens, mask = (jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.float32))
        numbers = jax.ShapeDtypeStruct(shape, jnp.uint32) if self.config.dropout else None
        batch = Batch(tokens, tokens, mask, tokens if self.plan.packed else None, numbers)
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), self.batch_specs)
        return state, jax.tree.map(sharded, batch, shardings)

    # --- what one device does ----------------------------------------------------------------

    def _init(self, seed: int) -> TrainState:
        return self._start(init_params(self.config, seed))

    def _start(self, params: Params) -> TrainState:
        params = pipeline.in_stage_order(params, self.config, self.plan)
        return TrainState(params, self.optimizer.init(self._trained(params)))

    def _trained(self, params: Params) -> Params:
        """The same tree with None in place of what is frozen."""
        return map_paths(lambda path, p: None if self.plan.is_frozen(path) else p, params)

    def _reduced_axes(self, placed: Placed) -> tuple[str, ...] | None:
        return None if self.plan.is_frozen(placed.parameter.path) else placed.reduced_axes

    def _local_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        reduced_axes = compose.tree(self.layout, self._reduced_axes)
        split_axes = compose.tree(self.layout, lambda placed: placed.split_axes)
        parallel = compose.parallel(self.config, self.plan, self.layout)

        num_tokens = count_tokens(batch.mask_BS)
        trained = start_gradients(self._trained(state.params), reduced_axes)
        params = fill(trained, state.params)
        params, parallel = compose.start(self.plan, self.layout, params, parallel)
        if self.plan.size("pipe") == 1:
            (loss, stats), gradients = accumulate(
                partial(self._loss, others=params, num_tokens=num_tokens, parallel=parallel),
                self._trained(params),
                batch,
                self.plan.num_accumulation_steps,
                jnp.dtype(self.plan.reduce_dtype),
            )
        else:
            (loss, stats), gradients = pipeline.loss_and_gradients(
                self.config, self.plan, self._trained(params), batch,
                others=params, num_tokens=num_tokens, parallel=parallel,
            )  # fmt: skip
        gradients = compose.finish(self.plan, self.layout, gradients)
        loss = sum_loss(loss)
        gradients = reduce_gradients(gradients, reduced_axes, jnp.dtype(self.plan.reduce_dtype))
        norm = global_norm(gradients, split_axes)
        stats = sum_stats(stats)
        new_state = self._update(state, clip(gradients, norm, self.clip_norm), stats)
        return new_state, Metrics(loss, norm, num_tokens, stats)

    def _loss(
        self,
        trained: Params,
        batch: Batch,
        *,
        others: Params,
        num_tokens: Array,
        parallel: Parallel,
    ) -> tuple[Array, Stats]:
        """This device's summand of the mean loss per token, and what its layers counted.

        `others` has the parameters that are None in `trained`.
        """
        params = fill(trained, others)
        dtype = jnp.dtype(self.plan.compute_dtype)
        loss, stats = token_loss(self.config, params, batch, parallel, dtype)
        return loss / num_tokens.astype(jnp.float32), stats

    def _update(self, state: TrainState, gradients: Params, stats: Stats) -> TrainState:
        """The optimizer's step, for which moments in host memory come and go; and the experts'."""
        is_away = offload.offloads_optimizer(self.plan)
        if is_away:
            state = state._replace(opt_state=offload.fetch(self.optimizer, state.opt_state))
        new_state = apply_gradients(state, gradients, self.optimizer)
        if is_away:
            opt_state = offload.put_back(self.optimizer, new_state.opt_state)
            new_state = new_state._replace(opt_state=opt_state)
        if self.plan.is_frozen(EXPERT_BIAS):
            return new_state
        own_stats = pipeline.to_stage(stats, self.config, self.plan)
        return balance_experts(self.config, state, new_state, own_stats)


def check_params(config: ModelConfig, params: Params) -> None:
    """Raise PlanError unless these are whole parameters of the model, [L, ..] each."""
    want, have = (
        {jax.tree_util.keystr(path): np.shape(p) for path, p in jax.tree.leaves_with_path(tree)}
        for tree in (jax.eval_shape(partial(init_params, config, 0)), params)
    )
    for path in want | have:
        if want.get(path) != have.get(path):
            raise PlanError(
                f"params{path} is {shown(have.get(path, 'missing'))}, and {config.name} has "
                f"{shown(want.get(path, 'no such parameter'))} there. Give whole arrays, layers in "
                f"their order, as TrainStep.in_layer_order(jax.device_get(state.params)) returns "
                f"them."
            )


def run_once(make: Callable[..., Any], shardings: Any = None, *args: Any) -> Any:
    """What `make` returns, computed under jit with these output shardings."""
    # Optimising a random number generator takes a CPU several seconds, and running it none.
    on_cpu = jax.default_backend() == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(make, out_shardings=shardings, compiler_options=options)(*args)


def token_loss(
    config: ModelConfig, params: Params, batch: Batch, parallel: Parallel, dtype: jnp.dtype
) -> tuple[Array, Stats]:
    """Sum of the valid tokens' losses, float32 scalar, of whatever part of the batch is given.

    What layers ask to be minimised beside it is part of the sum; what else they counted comes back
    as statistics.
    """
    graphdef, _ = abstract_model(config)
    model = nnx.merge(graphdef, params)
    loss_BS, stats = model.token_losses(batch, parallel, dtype)
    loss = jnp.sum(jnp.where(batch.mask_BS != 0, loss_BS, 0.0))
    if "objective" in stats:
        loss += jnp.sum(stats["objective"])
    return loss, stats


def accumulate(
    loss: Callable[[Params, Batch], tuple[Array, Stats]],
    params: Params,
    batch: Batch,
    num_steps: int,
    dtype: jnp.dtype,
) -> tuple[tuple[Array, Stats], Params]:
    """Loss, statistics and gradients of `batch`, added up over micro-batches run in turn.

    The leading dim of the batch has to be a multiple of `num_steps`. Sums of narrower gradients
    are in `dtype`.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if num_steps == 1:
        return value_and_grad(params, batch)

    def add(total: Any, micro_batch: Batch) -> tuple[Any, None]:
        new = value_and_grad(params, micro_batch)
        return jax.tree.map(lambda t, n: t + n.astype(t.dtype), total, new), None

    def zeros(x: Any, dtype: jnp.dtype) -> Array:
        wider = max(x.dtype, dtype, key=lambda d: d.itemsize)
        return vary(jnp.zeros(x.shape, wider), tuple(varying_axes(x)))

    micro_batches = jax.tree.map(lambda x: x.reshape(num_steps, -1, *x.shape[1:]), batch)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    value, gradients = jax.eval_shape(value_and_grad, params, first)
    nothing = (
        jax.tree.map(lambda x: zeros(x, x.dtype), value),
        jax.tree.map(lambda x: zeros(x, dtype), gradients),
    )
    total, _ = lax.scan(add, nothing, micro_batches)
    return total
