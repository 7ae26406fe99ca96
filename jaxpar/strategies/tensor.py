"""Tensor parallelism: every matrix is split between devices, and so is every matmul.

What is split    attention by heads, the MLP by its hidden dim, embedding and output by vocabulary.
                 The first matmul of a pair is split by columns, the second by rows, so that nothing
                 is exchanged between them.
Why              a layer too large, or too slow, for one device.
What it costs    two all-reduces of the residual stream per layer forward and two backward, all of
                 them waited for: keep `tensor` on the fastest links.

V = B·S·D·bytes of one micro-batch on one device, L layers, m micro-batches:

| collective | phase     | count    | payload_bytes | why                                       |
|------------|-----------|----------|---------------|-------------------------------------------|
| all-reduce | forward   | m(2L+1)  | V             | leave attention, MLP and the embedding    |
| all-reduce | forward   | 3m       | 4·B·S         | cross-entropy: maximum, sum, label        |
| all-reduce | backward  | m(2L+1)  | V             | enter attention, MLP and the output       |
| all-reduce | recompute | mL       | V             | leave attention again, with remat='full'  |

Key/value projections are whole on every device when there are fewer heads than devices; each uses
the heads of its own queries, and the gradient reduction adds the pieces up (see data.py).

Source: Shoeybi et al. 2019 (Megatron-LM) §3; Narayanan et al. 2021 §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from jaxpar.collectives import all_reduce, all_reduce_max, vary
from jaxpar.compat import varying_axes
from jaxpar.errors import PlanError, nearest_divisors
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.model.parallel import Stats
from jaxpar.strategies import remat
from jaxpar.strategies.plan import DTYPES, Plan
from jaxpar.strategies.runs import runs_of
from jaxpar.strategies.strategy import Card, Expected, Layout, Phase, Placed, Strategy, Variant

AXIS = "tensor"

SPLIT_DIMS = ("heads", "kv_heads", "mlp", "vocab")
"""The dims that mark a parameter as part of a split matmul."""

CARD = Card(
    name="tensor",
    axis=AXIS,
    splits="attention heads, MLP hidden dim and vocabulary; the residual stream is whole",
    why="a layer too large or too slow for one device",
    costs="2 all-reduces of B·S·D per layer forward, 2 backward, none of them hidden",
    source="Shoeybi et al. 2019, §3",
)

# --- communication ---------------------------------------------------------------------------


def enter(x_BSD: Array) -> Array:
    """Before column-parallel matmuls: nothing forward, one all-reduce of the gradient backward."""
    with jax.named_scope("enter"):
        return vary(x_BSD, AXIS)


def leave(y_BSD: Array) -> Array:
    """After a row-parallel matmul: one all-reduce forward, nothing backward."""
    return all_reduce(y_BSD, AXIS, scope="leave")


def count_once(stats: Stats) -> Stats:
    """Statistics that each device has taken of the same tokens -> the first one's, for all of them.

    As a sum, so that what of them is part of the loss has its gradient once as well.
    """
    if not stats:
        return stats
    # Only that part has a gradient; others would bring reductions of zeros.
    stats = {k: v if k == "objective" else lax.stop_gradient(v) for k, v in stats.items()}
    flat, unravel = ravel_pytree(stats)
    own = jnp.where(lax.axis_index(AXIS) == 0, flat, 0.0)
    counted: Stats = unravel(all_reduce(own, AXIS, scope="count_once"))
    return counted


# --- computation on shards -------------------------------------------------------------------


def partial_lookup(table_VD: Array, tokens_BS: Array, dtype: jnp.dtype) -> Array:
    """Rows of this device's part of the table, zero for other devices' tokens: [B, S, D]."""
    local_BS, is_here_BS = _local_token(tokens_BS, table_VD.shape[0])
    rows_BSD = jnp.take(table_VD, local_BS, axis=0)
    return jnp.where(is_here_BS[..., None], rows_BSD, 0).astype(dtype)


def embed(table_VD: Array, tokens_BS: Array, dtype: jnp.dtype) -> Array:
    """Vocabulary-parallel lookup: [V/n, D], int [B, S] -> [B, S, D], the same on all devices."""
    return leave(partial_lookup(table_VD, tokens_BS, dtype))


def cross_entropy(logits_BSV: Array, labels_BS: Array) -> Array:
    """Loss per token from each device's scores, which are never gathered.

    float32 [B, S, V/n], int [B, S] -> float32 [B, S]. Three reductions of [B, S] forward; their
    transposes move nothing. Source: Shoeybi et al. 2019 §3, last paragraph.
    """
    max_BS = all_reduce_max(logits_BSV.max(axis=-1), AXIS, scope="cross_entropy/max")
    shifted_BSV = logits_BSV - max_BS[..., None]
    sum_BS = all_reduce(jnp.exp(shifted_BSV).sum(axis=-1), AXIS, scope="cross_entropy/sum")
    local_BS, is_here_BS = _local_token(labels_BS, logits_BSV.shape[-1])
    label_BS = jnp.take_along_axis(shifted_BSV, local_BS[..., None], axis=-1)[..., 0]
    label_BS = jnp.where(is_here_BS, label_BS, 0)
    label_BS = all_reduce(label_BS, AXIS, scope="cross_entropy/label")
    return jnp.log(sum_BS) - label_BS


def _local_token(tokens_BS: Array, local_vocab: int) -> tuple[Array, Array]:
    """Each token's row in this device's part of the vocabulary, and whether it is there at all."""
    local_BS = tokens_BS - lax.axis_index(AXIS) * local_vocab
    is_here_BS = (local_BS >= 0) & (local_BS < local_vocab)
    return jnp.where(is_here_BS, local_BS, 0), is_here_BS


def kv_weight(w_DKH: Array, num_kv_heads: int) -> Array:
    """The key/value heads of this device's queries: [D, K, H] -> [D, max(K/n, 1), H]."""
    num_devices = lax.axis_size(AXIS)
    # Split by the PartitionSpec already, or by who gathered it.
    if num_kv_heads % num_devices == 0 or w_DKH.shape[-2] == 1:
        return w_DKH
    return lax.dynamic_slice_in_dim(w_DKH, _own_kv_head(num_kv_heads), 1, axis=-2)


def shared_kv_heads(placed: Placed, plan: Plan) -> int | None:
    """How many heads a parameter of keys or values has, if there are more devices to share them."""
    dims = placed.parameter.dims
    if "kv_heads" not in dims or plan.size(AXIS) == 1 or AXIS in placed.split_axes:
        return None
    return placed.parameter.shape[dims.index("kv_heads")]


def kv_gradient(d_DH: Array, num_kv_heads: int) -> Array:
    """The transpose where devices share heads: [.., 1, H] -> [.., K, H], zeros for other heads."""
    shape = *d_DH.shape[:-2], num_kv_heads, d_DH.shape[-1]
    nothing = vary(jnp.zeros(shape, d_DH.dtype), tuple(varying_axes(d_DH) | {AXIS}))
    head = _own_kv_head(num_kv_heads)
    return lax.dynamic_update_slice_in_dim(nothing, d_DH, head, axis=-2)


def _own_kv_head(num_kv_heads: int) -> Array:
    return lax.axis_index(AXIS) // (lax.axis_size(AXIS) // num_kv_heads)


# --- closed form -----------------------------------------------------------------------------


def expected(config: ModelConfig, plan: Plan, layout: Layout) -> list[Expected]:
    runs = runs_of(plan, config)
    num_tokens = plan.local_batch_size * plan.local_seq_len

    def row(phase: Phase, count: int, why: str) -> Expected:
        return Expected(
            kind="all-reduce",
            axes=(AXIS,),
            count=count,
            payload_bytes=num_tokens * config.embed * plan.compute_bytes,
            dtype=DTYPES[plan.compute_dtype],
            phase=phase,
            why=why,
        )

    rows = []
    if not plan.sequence:
        forward = 2 * runs.forward_layers + runs.embeddings
        backward = 2 * runs.backward_layers + runs.ends
        again = 2 * runs.repeated_layers + runs.repeated_embeddings
        rows += [
            row("forward", forward, "leave attention and MLP of each layer, and embedding"),
            row("backward", backward, "enter attention and MLP of each layer, and output"),
        ]
        if again:
            rows.append(row("recompute", again, "leave them again, to compute a stage again"))
        if (count := runs.remat_layers) and remat.repeats_leave(plan):
            rows.append(row("recompute", count, "leave attention again, to recompute the MLP"))
    rows.append(
        Expected(
            kind="all-reduce",
            axes=(AXIS,),
            count=3 * runs.ends,
            payload_bytes=num_tokens * 4,
            dtype="f32",
            phase="forward",
            why="cross-entropy over a split vocabulary: maximum, sum and label",
        )
    )
    if config.num_experts:
        num_layers = config.num_layers - config.num_dense_layers
        per_layer = sum(config.num_statistics.values()) // num_layers
        rows.append(
            Expected(
                kind="all-reduce",
                axes=(AXIS,),
                count=runs.ends,
                payload_bytes=4 * per_layer * (runs.num_layers - config.num_dense_layers),
                dtype="f32",
                phase="recompute" if runs.repeats else "forward",
                why="what layers with experts counted, once for all devices",
            )
        )
    return rows


# --- rules -----------------------------------------------------------------------------------


def check(config: ModelConfig, plan: Plan) -> None:
    n, K = plan.size(AXIS), config.num_kv_heads
    hidden = ("mlp_hidden", "expert_hidden") if config.num_experts else ("mlp_hidden",)
    split = {field: getattr(config, field) for field in ("num_heads", *hidden, "vocab")}

    def fits(n: int) -> bool:
        return (K % n == 0 or n % K == 0) and not (plan.sequence and plan.seq_len % n)

    # One choice for all of them, so that whoever follows it does not meet the next error.
    sizes = nearest_divisors(math.gcd(*split.values()), n, fits)
    for field, value in split.items():
        if value % n:
            raise PlanError(
                f"{config.name}: {field}={value} cannot be split over tensor={n}: it is not a "
                f"multiple. Nearest sizes of axis tensor: {sizes}."
            )
    if K % n and n % K:
        raise PlanError(
            f"{config.name}: num_kv_heads={K} and tensor={n}: neither is a multiple of the other, "
            f"so heads can be neither split nor replicated evenly. Nearest sizes of axis tensor: "
            f"{sizes}."
        )


def splits(parameter: Parameter, plan: Plan) -> dict[str, str]:
    n = plan.size(AXIS)
    sizes = dict(zip(parameter.dims, parameter.shape, strict=True))
    return {dim: AXIS for dim in SPLIT_DIMS if dim in sizes and sizes[dim] % n == 0}


def hooks(config: ModelConfig, plan: Plan, layout: Layout) -> dict[str, Callable[..., Any]]:
    return {
        "enter": enter,
        "leave": leave,
        "embed": embed,
        "cross_entropy": cross_entropy,
        "kv_weight": lambda w_DKH: kv_weight(w_DKH, config.num_kv_heads),
        "count_once": count_once,
    }


STRATEGY = Strategy(
    card=CARD,
    axes=(AXIS,),
    is_active=lambda plan: plan.size(AXIS) > 1,
    # A router sees what each device's part of the experts makes of its choices.
    is_partial=lambda parameter: any(dim in (*SPLIT_DIMS, "experts") for dim in parameter.dims),
    check=check,
    splits=splits,
    hooks=hooks,
    expected=expected,
    variants=(
        Variant(name="tensor", mesh="tensor=8"),
        Variant(name="data+tensor", mesh="data=2,tensor=4"),
    ),
)
