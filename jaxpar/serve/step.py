"""The two programs of inference, prefill and decode, each one `shard_map` under one `jit`.

Both do the same with other shapes: some rows of new tokens go through the model, their keys and
values into the cache, and each row's last token gets a successor. In a prefill step a row is a
chunk of a prompt, in a decode step the one token that was chosen last. Read `_local_step` first.

With `pipe`, rows are cut into micro-batches that follow each other through the stages: in turn t
stage s works on micro-batch t - s, and passes what it has to the stage behind. m micro-batches take
m + p - 1 turns, in all of which every stage computes; what is no micro-batch is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.collectives import all_reduce, permute, vary
from jaxpar.errors import PlanError, RequestError, require_kind, shown
from jaxpar.model.attention import rotary_angles
from jaxpar.model.config import ModelConfig
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import Params, Transformer, abstract_model, init_params
from jaxpar.serve.cache import (
    AXIS,
    KV,
    Cache,
    CachedAttention,
    Placement,
    Rows,
    cache_shapes,
    cache_spec,
    idle_rows,
    own_tokens,
    stored_dtype,
)
from jaxpar.serve.plan import KINDS, Kind, ServePlan
from jaxpar.serve.sampling import choose
from jaxpar.strategies import compose, pipeline
from jaxpar.strategies.plan import BATCH_AXES
from jaxpar.strategies.shards import map_paths
from jaxpar.text import Batch
from jaxpar.train import check_params, run_once

PIPE = pipeline.AXIS

FULL_PRECISION = ("norm/scale", "moe/router", "moe/bias")
"""Ends of the paths of parameters that are used in float32 whatever the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class ServeStep:
    """`config` served under `plan`: programs compiled on first use, and where things live.

    Raises PlanError (or ConfigError) when made, for anything the model or the mesh does not allow;
    tracing does not fail afterwards.
    """

    config: ModelConfig
    plan: ServePlan

    def __post_init__(self) -> None:
        for field, kind, example in (
            ("config", ModelConfig, "preset('tiny')"),
            ("plan", ServePlan, "ServePlan(mesh=..., num_slots=..., max_seq_len=...)"),
        ):
            require_kind(PlanError, field, getattr(self, field), kind, example)
        self.plan.check(self.config)

    # --- where things live -------------------------------------------------------------------

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return self.plan.mesh.build()

    @cached_property
    def param_specs(self) -> Params:
        layout = compose.layout(self.config, self.plan.training)
        return compose.tree(layout, lambda placed: placed.spec)

    @cached_property
    def cache_specs(self) -> dict[str, KV]:
        specs = {name: cache_spec(self.plan, name) for name in self._cache_shapes}
        return {name: KV(spec, spec) for name, spec in specs.items()}  # type: ignore[arg-type]

    @cached_property
    def rows_spec(self) -> PartitionSpec:
        return PartitionSpec(self.plan.in_mesh_order(BATCH_AXES) or None)

    def _sharding(self, specs: Any) -> Any:
        return jax.tree.map(
            partial(NamedSharding, self.mesh),
            specs,
            is_leaf=lambda spec: isinstance(spec, PartitionSpec),
        )

    @cached_property
    def _cache_shapes(self) -> dict[str, tuple[int, ...]]:
        return cache_shapes(self.config, self.plan)

    # --- using it ----------------------------------------------------------------------------

    def init_params(self, seed: int = 0) -> Params:
        """Parameters of this seed, as TrainStep.init makes them, born where they are used."""
        return run_once(
            lambda: self._ready(init_params(self.config, seed)), self._sharding(self.param_specs)
        )

    def place(self, params: Params) -> Params:
        """Whole float32 parameters, layers in their order [L, ..], where they are used.

        Those of a trained state are `step.in_layer_order(jax.device_get(state.params))`. Matrices
        become the compute dtype. Raises PlanError for those of another model.
        """
        check_params(self.config, params)
        return run_once(self._ready, self._sharding(self.param_specs), params)

    def init_cache(self) -> Cache:
        """An empty cache."""
        return run_once(
            lambda: jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), self._cache_like),
            self._sharding(self.cache_specs),
        )

    def prefill(self, params: Params, cache: Cache, rows: Rows) -> tuple[Cache, Array]:
        """Chunks of prompts into the cache; a next token for each row, int32 [num_prefill_rows].

        The cache is donated: keep the returned one. A row's token means something where its chunk
        is the prompt's last. Raises RequestError for a cache that was given away, and for chunks
        that begin within a block over `context`.
        """
        n, block_len, start = self.plan.size(AXIS), self.plan.block_len, np.asarray(rows.start)
        if n > 1 and (start % block_len).any():
            raise RequestError(
                f"start={shown(start.tolist())}: over context={n} a chunk begins with a block, at "
                f"a multiple of block_len={block_len}."
            )
        return self._run("prefill", params, cache, rows)

    def decode(self, params: Params, cache: Cache, rows: Rows) -> tuple[Cache, Array]:
        """One token of each sequence into the cache, and its next one: int32 [num_slots]."""
        return self._run("decode", params, cache, rows)

    def _run(self, kind: Kind, params: Params, cache: Cache, rows: Rows) -> tuple[Cache, Array]:
        # JAX would crash the process, not raise, when it finds out for itself.
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
            raise RequestError(
                "This cache was given to an earlier step, which reuses its memory. Go on with the "
                "one that step returned: cache, tokens = step.decode(params, cache, rows)."
            )
        width = rows.table.shape[1]
        if width not in self.plan.widths:
            raise RequestError(
                f"The block tables have {width} columns, and the plan has programs for "
                f"{' or '.join(map(str, self.plan.widths))}: num_widths={self.plan.num_widths} of "
                f"max_seq_len={self.plan.max_seq_len} and block_len={self.plan.block_len}."
            )
        result: tuple[Cache, Array] = self.compiled(kind, width)(params, cache, rows)
        return result

    def compiled(self, kind: Kind, width: int | None = None) -> Any:
        """The compiled program, which the first step of its kind makes; what an audit reads.

        width: columns of its block tables, one of `plan.widths`; None for the most.
        """
        width = width or self.plan.blocks_per_sequence
        if (kind, width) not in self._compiled:
            lowered = self.jitted[kind].lower(*self.abstract_inputs(kind, width))
            self._compiled[kind, width] = lowered.compile()
        return self._compiled[kind, width]

    @cached_property
    def _compiled(self) -> dict[tuple[Kind, int], Any]:
        return {}

    @cached_property
    def jitted(self) -> Mapping[Kind, Any]:
        """The programs as jitted functions of (params, cache, rows), for tracing and auditing."""
        return {kind: self._jit(kind) for kind in KINDS}

    def abstract_inputs(self, kind: Kind, width: int | None = None) -> tuple[Params, Cache, Rows]:
        """ShapeDtypeStructs with shardings: what `jitted[kind]` can be traced and compiled with."""

        def sharded(like: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

        rows = idle_rows(self.plan, kind, width)
        rows_sharding = self._sharding(self.rows_spec)
        return (
            jax.tree.map(sharded, self._params_like, self._sharding(self.param_specs)),
            jax.tree.map(sharded, self._cache_like, self._sharding(self.cache_specs)),
            jax.tree.map(lambda row: sharded(row, rows_sharding), rows),
        )

    @cached_property
    def _params_like(self) -> Params:
        params: Params = jax.eval_shape(lambda: self._ready(init_params(self.config, 0)))
        return params

    @cached_property
    def _cache_like(self) -> Cache:
        dtype = stored_dtype(self.plan)
        like = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in self._cache_shapes.items()}
        return {name: KV(one, one) for name, one in like.items()}  # type: ignore[arg-type]

    def _ready(self, params: Params) -> Params:
        """In the order of stages, matrices in the compute dtype."""
        dtype = jnp.dtype(self.plan.compute_dtype)

        def cast(path: str, p: Array) -> Array:
            return p if path.endswith(FULL_PRECISION) else p.astype(dtype)

        staged = pipeline.in_stage_order(params, self.config, self.plan.training)
        return map_paths(cast, staged)

    def _jit(self, kind: Kind) -> Any:
        in_specs = self.param_specs, self.cache_specs, self.rows_spec
        out_specs = self.cache_specs, self.rows_spec

        def step(params: Params, cache: Cache, rows: Rows) -> tuple[Cache, Array]:
            return jax.shard_map(
                partial(self._local_step, kind),
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=True,
            )(params, cache, rows)

        step.__name__ = f"{kind}_step"
        return jax.jit(
            step,
            donate_argnums=1,
            in_shardings=self._sharding(in_specs),
            out_shardings=self._sharding(out_specs),
        )

    # --- what one device does ----------------------------------------------------------------

    @cached_property
    def _parallel(self) -> Parallel:
        """The hooks of training's strategies, without what only a loss asks for."""
        training = self.plan.training
        hooks = compose.parallel(self.config, training, compose.layout(self.config, training))
        return replace(hooks, sum_counts=lambda count: count, count_once=lambda stats: {})

    def _local_step(
        self, kind: Kind, params: Params, cache: Cache, rows: Rows
    ) -> tuple[Cache, Array]:
        """All shapes are per shard."""
        parallel, p = self._parallel, self.plan.size(PIPE)
        graphdef, _ = abstract_model(self.config)
        model: Transformer = nnx.merge(graphdef, params)
        tokens_BT = own_tokens(rows.tokens, kind, self.plan, dim=1)

        embedding = model.gathered_embedding(parallel)
        dtype = jnp.dtype(self.plan.compute_dtype)
        x_BTD = model.embed(embedding, tokens_BT, parallel, dtype)
        new_cache = dict(cache)
        if "dense_layers" in cache:
            with jax.named_scope("dense_layers"):
                x_BTD, new_cache["dense_layers"] = self._apply(
                    model.dense_layers, kind, x_BTD, cache["dense_layers"], rows
                )
        with jax.named_scope("layers"):
            stages = self._apply if p == 1 else self._through_stages
            x_BTD, new_cache["layers"] = stages(model.layers, kind, x_BTD, cache["layers"], rows)

        with jax.named_scope("head"):
            last_B1D = self._last_token(kind, x_BTD, rows)[:, None]
            h_B1D = parallel.enter(model.norm(last_B1D))
            scorer = embedding if self.config.tied_embedding else model.unembedding
            token_B = choose(scorer.logits(h_B1D)[:, 0], rows, self.plan.max_top_k)
            if p > 1:  # only the last stage has scored what came out of the last layer
                token_B = jnp.where(lax.axis_index(PIPE) == p - 1, token_B, 0)
                token_B = all_reduce(token_B, PIPE, scope="from_last_stage")
        return new_cache, token_B

    def _apply(self, layers: Any, kind: Kind, x_BTD: Array, kv: KV, rows: Rows) -> tuple[Array, KV]:
        """This device's layers on its tokens of the rows: [B, T', D] -> [B, T', D]."""
        where = Placement.of(rows, kind, self.plan)
        rotary = rotary_angles(where.position_BT, self.config.head_dim, self.config.rope_theta)
        batch = Batch(None, None, where.is_valid_BT.astype(jnp.float32))
        graphdef, stacked = nnx.split(layers)

        def layer(carry: tuple[Array, KV], each: Any) -> tuple[tuple[Array, KV], None]:
            x_BTD, kv = carry
            state, index = each
            attention = CachedAttention(kv, index, where)
            block = nnx.merge(graphdef, state)
            x_BTD, _ = block(x_BTD, rotary, batch, replace(self._parallel, attention=attention))
            return (x_BTD, attention.kv), None

        # The cache is carried, never sliced and stacked again: only so is it updated in place.
        numbers = jnp.arange(kv.k.shape[0], dtype=jnp.int32)
        (x_BTD, kv), _ = lax.scan(layer, (x_BTD, kv), (stacked, numbers))
        return x_BTD, kv

    def _through_stages(
        self, layers: Any, kind: Kind, x_BTD: Array, kv: KV, rows: Rows
    ) -> tuple[Array, KV]:
        """All stages' layers, in turns: the last stage returns what has passed all of them."""
        p, m, stage = self.plan.size(PIPE), self.plan.num_parts(kind), lax.axis_index(PIPE)
        x_BTD, rows = jax.tree.map(lambda x: vary(x, PIPE), (x_BTD, rows))
        parts = jax.tree.map(lambda x: x.reshape(m, -1, *x.shape[1:]), (x_BTD, rows))
        behind = [(s, s + 1) for s in range(p - 1)]

        def turn(carry: tuple[Array, KV], t: Array) -> tuple[tuple[Array, KV], Array]:
            arrived_BTD, kv = carry
            number = t - stage
            is_part = (number >= 0) & (number < m)
            mine = jnp.clip(number, 0, m - 1)
            own_BTD, own_rows = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, mine, keepdims=False), parts
            )
            own_rows = own_rows._replace(num_tokens=jnp.where(is_part, own_rows.num_tokens, 0))
            own_BTD = jnp.where(stage == 0, own_BTD, arrived_BTD)
            y_BTD, kv = self._apply(layers, kind, own_BTD, kv, own_rows)
            return (permute(y_BTD, PIPE, behind, scope="to_next_stage"), kv), y_BTD

        nothing = jnp.zeros_like(parts[0][0])
        (_, kv), y = lax.scan(turn, (nothing, kv), jnp.arange(m + p - 1))
        return y[p - 1 :].reshape(x_BTD.shape), kv

    def _last_token(self, kind: Kind, x_BTD: Array, rows: Rows) -> Array:
        """Of each row the residual stream of its last token: [B, T', D] -> [B, D]."""
        index_B = jnp.maximum(rows.num_tokens - 1, 0)
        n, block_len = self.plan.size(AXIS), self.plan.block_len
        if kind == "decode" or n == 1:
            return jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)[:, 0]
        Q = block_len // n
        offset_B = index_B % block_len
        local_B = index_B // block_len * Q + offset_B % Q
        last_BD = jnp.take_along_axis(x_BTD, local_B[:, None, None], axis=1)[:, 0]
        is_mine_B = offset_B // Q == lax.axis_index(AXIS)
        return all_reduce(jnp.where(is_mine_B[:, None], last_BD, 0), AXIS, scope="last_token")
