"""A decoder block whose MLP is a mixture of experts, as Flax modules on local shards.

Dims: B batch, S sequence (S' where it may be split), D embed, E experts, F expert hidden. What
routing means is in routing.py; where experts are is the business of `Parallel.experts`.

Sources: Shazeer et al. 2017; shared experts, Dai et al. 2024 (DeepSeekMoE) §3.2.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxpar.model import routing
from jaxpar.model.config import ModelConfig
from jaxpar.model.dropout import AFTER_MLP, DropoutFunction, no_dropout
from jaxpar.model.layers import INIT_STD, MLP, AttentionBlock, weight
from jaxpar.model.parallel import Parallel, Stats
from jaxpar.text import Batch


def logits(h_BSD: Array, router_DE: Array) -> Array:
    """A token's affinity to each expert, in float32: [B, S, D], [D, E] -> float32 [B, S, E]."""
    h_BSD, router_DE = h_BSD.astype(jnp.float32), router_DE.astype(jnp.float32)
    return jnp.einsum("bsd,de->bse", h_BSD, router_DE, precision=lax.Precision.HIGHEST)


class MoE(nnx.Module):
    """Router and experts: [B, S', D] -> [B, S', D], and what was counted on the way.

    `bias` is there with `bias_rate` alone. It has no gradient: the step moves it, from the tokens
    of the whole step (`routing.balanced_bias`).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, E, F = config.embed, config.num_experts, config.expert_hidden
        self.router = weight((D, E), ("embed", "experts"), rngs)
        if config.mlp == "swiglu":
            self.gate = weight((E, D, F), ("experts", "embed", "mlp"), rngs)
        self.up = weight((E, D, F), ("experts", "embed", "mlp"), rngs)
        std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.down = weight((E, F, D), ("experts", "mlp", "embed"), rngs, std)
        if config.bias_rate:
            self.bias = nnx.Param(jnp.zeros((E,), jnp.float32), dims=("experts",))
        self.config = config

    def __call__(
        self, x_BSD: Array, mask_BS: Array, shared: MLP | None, parallel: Parallel
    ) -> tuple[Array, Stats]:
        """`shared` is an MLP for every token; both enter and leave split matmuls once, together."""
        h_BSD = parallel.enter(x_BSD)
        with jax.named_scope("router"):
            # Checkpointed, so that float32 copies are not kept for the backward.
            logits_BSE = jax.checkpoint(logits, prevent_cse=False)(h_BSD, self.router[...])
            wanted = self._route(logits_BSE, mask_BS)
            kept = parallel.drop(wanted)
            stats = self._count(logits_BSE, mask_BS, wanted, kept, parallel)
        weights = routing.ExpertWeights(
            self.gate[...].astype(h_BSD.dtype) if self.config.mlp == "swiglu" else None,
            self.up[...].astype(h_BSD.dtype),
            self.down[...].astype(h_BSD.dtype),
        )
        y_BSD = parallel.experts(h_BSD, kept, weights)
        if shared is not None:
            y_BSD = y_BSD + shared(h_BSD, Parallel())
        return parallel.leave(y_BSD), stats

    def _route(self, logits_BSE: Array, mask_BS: Array) -> routing.Routing:
        config = self.config
        return routing.route(
            logits_BSE,
            self.bias[...] if config.bias_rate else None,
            mask_BS,
            kind=config.router,
            num_chosen=config.num_experts_per_token,
            is_normalized=config.router_normalized,
            scale=config.router_scale,
        )

    def _count(
        self,
        logits_BSE: Array,
        mask_BS: Array,
        wanted: routing.Routing,
        kept: routing.Routing,
        parallel: Parallel,
    ) -> Stats:
        """Sums over this device's tokens; what is chosen counts before anything is dropped."""
        config = self.config
        stats = {
            "tokens_per_expert": routing.tokens_per_expert(wanted),
            "num_dropped": jnp.sum(wanted.is_kept_BSK & ~kept.is_kept_BSK, dtype=jnp.float32),
        }
        objective = []
        if config.balance_weight:
            balance = {
                "sequence": routing.balance_by_sequence,
                "batch": routing.balance_by_batch,
            }[config.balance]
            stats["balance_loss"] = balance(wanted, parallel.sum_counts)
            objective.append(config.balance_weight * stats["balance_loss"])
        if config.router_z_weight:
            stats["router_z_loss"] = routing.router_z(logits_BSE, mask_BS)
            objective.append(config.router_z_weight * stats["router_z_loss"])
        if objective:
            stats["objective"] = sum(objective[1:], objective[0])
        return stats


class ExpertBlock(AttentionBlock):
    """Pre-norm attention and mixture of experts around the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.moe = MoE(config, rngs=rngs)
        if config.num_shared_experts:
            hidden = config.expert_hidden * config.num_shared_experts
            self.mlp = MLP(replace(config, mlp_hidden=hidden), rngs=rngs)
        self.has_shared = config.num_shared_experts > 0

    def __call__(
        self,
        x_BSD: Array,
        rotary: tuple[Array, Array],
        batch: Batch,
        parallel: Parallel,
        dropout: DropoutFunction = no_dropout,
    ) -> tuple[Array, Stats]:
        """[B, S', D] -> [B, S', D], and what the layer counted."""
        x_BSD = self.attend(x_BSD, rotary, batch, parallel, dropout)
        with jax.named_scope("moe"):
            shared = self.mlp if self.has_shared else None
            y_BSD, stats = self.moe(self.mlp_norm(x_BSD), batch.mask_BS, shared, parallel)
            return x_BSD + dropout(y_BSD, AFTER_MLP), stats
