"""Model shapes: one frozen dataclass, the presets, and the list of every parameter.

Dim letters, used in all shape suffixes of the project: B batch, S sequence, D embed, N query
heads, K key/value heads, H head dim, F mlp hidden, V vocabulary, E experts, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import (
    MAX_SIZE,
    ConfigError,
    did_you_mean,
    nearest_divisors,
    nearest_multiples,
    nearest_whole,
    require_choice,
    require_positive,
    require_whole,
    shown,
)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model, as its closed forms see it.

    `dims` names the dims of one layer's parameter; a stacked one has L of them in front. One that
    is not `is_trained` has no gradient: the step sets it by a rule of its own.
    """

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    num_stacked: int | None = None
    is_trained: bool = True

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return self.shape if self.num_stacked is None else (self.num_stacked, *self.shape)

    @property
    def stacked_dims(self) -> tuple[str, ...]:
        return self.dims if self.num_stacked is None else ("layers", *self.dims)

    @property
    def size(self) -> int:
        """Number of elements, over all layers."""
        return math.prod(self.stacked_shape)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes of a pre-norm decoder transformer with RoPE and grouped-query attention.

    Raises ConfigError for shapes that cannot exist. With `num_experts` > 0, layers after the first
    `num_dense_layers` route each token to `num_experts_per_token` experts of hidden size
    `expert_hidden`, beside an MLP as large as `num_shared_experts` of them, and:

    router: how a token's scores come from its logits.
    router_normalized: weights of the chosen experts sum to 1, where there are several.
    router_scale: what those weights are multiplied with.
    balance: whether the balance loss looks at each sequence, or at the whole batch as one.
    balance_weight, router_z_weight: of the balance loss and the router z-loss; 0 leaves them out.
    bias_rate: step of the bias that balances experts without a loss; 0 for no bias.

    In training, `dropout` is the part of what attention, MLP and experts add to the residual stream
    that is dropped; 0 for none.
    """

    name: str
    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden: int
    vocab: int
    max_seq_len: int
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    tied_embedding: bool = False
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    expert_hidden: int = 0
    num_dense_layers: int = 0  # leading layers that keep the plain mlp in an expert model
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_normalized: bool = True
    router_scale: float = 1.0
    balance: Literal["sequence", "batch"] = "sequence"
    balance_weight: float = 0.0
    router_z_weight: float = 0.0
    bias_rate: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; every key/value head serves the same number of "
                f"query heads. Nearest num_kv_heads: "
                f"{nearest_divisors(self.num_heads, self.num_kv_heads)}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"{self.name}: head_dim={self.head_dim} is odd; RoPE rotates pairs. "
                f"Nearest head_dim: {nearest_multiples(self.head_dim, 2)}."
            )
        self._check_experts()

        # As floats: JAX takes no whole number above int32.
        for field in ("rope_theta", "norm_epsilon", "dropout", *ROUTER_NUMBERS):
            object.__setattr__(self, field, float(getattr(self, field)))

    def _check_types(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name={shown(self.name)} must be a word or two, such as 'tiny'.")
        for field in ("num_layers", "embed", "num_heads", "num_kv_heads", "head_dim", "mlp_hidden",
                      "vocab", "max_seq_len"):  # fmt: skip
            require_whole(ConfigError, f"{self.name}: {field}", getattr(self, field))
        for field in ("num_experts", "num_experts_per_token", "num_shared_experts",
                      "expert_hidden", "num_dense_layers"):  # fmt: skip
            require_whole(ConfigError, f"{self.name}: {field}", getattr(self, field), at_least=0)
        for field, example in (("rope_theta", 10_000.0), ("norm_epsilon", 1e-5)):
            require_positive(ConfigError, f"{self.name}: {field}", getattr(self, field), example)
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"{self.name}: dropout={shown(self.dropout)} must be a number from 0 to below 1, "
                f"such as 0.1; 0 drops nothing."
            )
        require_choice(ConfigError, f"{self.name}: mlp", self.mlp, ("swiglu", "gelu"))
        require_choice(
            ConfigError, f"{self.name}: tied_embedding", self.tied_embedding, (True, False)
        )
        for field, choices in ROUTER_CHOICES.items():
            require_choice(ConfigError, f"{self.name}: {field}", getattr(self, field), choices)
        for field in ROUTER_NUMBERS:
            value = getattr(self, field)
            if field == "router_scale" or type(value) not in (int, float) or value != 0:
                note = "" if field == "router_scale" else "; 0 leaves it out"
                require_positive(ConfigError, f"{self.name}: {field}", value, 0.01, note)

    def _check_experts(self) -> None:
        """Each field of expert layers in its range, which without experts is 0 alone."""
        E = self.num_experts
        for field, smallest, largest in (
            ("num_experts_per_token", 1, E),
            ("num_shared_experts", 0, MAX_SIZE),
            ("expert_hidden", 1, MAX_SIZE),
            ("num_dense_layers", 0, self.num_layers - 1),
        ):
            value = getattr(self, field)
            low, high = (smallest, largest) if E else (0, 0)
            if not low <= value <= high:
                raise ConfigError(
                    f"{self.name}: {field}={value} must be between {low} and {high} with "
                    f"num_experts={E} and num_layers={self.num_layers}. Nearest {field}: "
                    f"{nearest_whole(value, low, high)}."
                )
        for field in (*ROUTER_CHOICES, *ROUTER_NUMBERS):
            default = type(self).__dataclass_fields__[field].default
            if not E and getattr(self, field) != default:
                raise ConfigError(
                    f"{self.name}: {field}={shown(getattr(self, field))} is for expert layers, and "
                    f"num_experts=0. Leave {field} at {default!r}, or give the model experts."
                )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, in the order of the model's own tree (sorted paths)."""
        found = [
            Parameter(path="embedding/table", shape=(self.vocab, self.embed), dims=VOCAB_EMBED)
        ]
        num_dense = self.num_dense_layers if self.num_experts else self.num_layers
        blocks = [("layers", num_dense, False)]
        if self.num_experts:
            blocks = [("dense_layers", num_dense, False)] if num_dense else []
            blocks.append(("layers", self.num_layers - num_dense, True))
        for prefix, num_layers, has_experts in blocks:
            for path, shape, dims in self._layer(has_experts=has_experts):
                found.append(
                    Parameter(
                        path=f"{prefix}/{path}",
                        shape=shape,
                        dims=dims,
                        num_stacked=num_layers,
                        is_trained=path != "moe/bias",
                    )
                )
        found.append(Parameter(path="norm/scale", shape=(self.embed,), dims=("norm",)))
        if not self.tied_embedding:
            found.append(
                Parameter(
                    path="unembedding/table", shape=(self.vocab, self.embed), dims=VOCAB_EMBED
                )
            )
        return tuple(sorted(found, key=lambda p: p.path.split("/")))

    def _layer(self, *, has_experts: bool) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
        D, N, K, H, F = (
            self.embed, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_hidden,
        )  # fmt: skip
        layer: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
            ("attention/key", (D, K, H), ("embed", "kv_heads", "head")),
            ("attention/output", (N, H, D), ("heads", "head", "embed")),
            ("attention/query", (D, N, H), ("embed", "heads", "head")),
            ("attention/value", (D, K, H), ("embed", "kv_heads", "head")),
            ("attention_norm/scale", (D,), ("norm",)),
            ("mlp_norm/scale", (D,), ("norm",)),
        ]
        inputs = ("gate", "up") if self.mlp == "swiglu" else ("up",)
        if has_experts:
            E, F = self.num_experts, self.expert_hidden
            layer += [("moe/router", (D, E), ("embed", "experts"))]
            layer += [(f"moe/{w}", (E, D, F), ("experts", "embed", "mlp")) for w in inputs]
            layer += [("moe/down", (E, F, D), ("experts", "mlp", "embed"))]
            if self.bias_rate:
                layer += [("moe/bias", (E,), ("experts",))]
            F = F * self.num_shared_experts
        if F:
            layer += [(f"mlp/{w}", (D, F), ("embed", "mlp")) for w in inputs]
            layer += [("mlp/down", (F, D), ("mlp", "embed"))]
        return layer

    @property
    def num_statistics(self) -> dict[str, int]:
        """Numbers that all layers count beside their output, by name; empty without experts."""
        L, E = self.num_layers - self.num_dense_layers, self.num_experts
        if not E:
            return {}
        counted = {"tokens_per_expert": L * E, "num_dropped": L}
        losses = {"balance_loss": self.balance_weight, "router_z_loss": self.router_z_weight}
        counted |= {name: L for name, weight in losses.items() if weight}
        return counted | ({"objective": L} if any(losses.values()) else {})

    @property
    def num_parameters(self) -> int:
        return sum(p.size for p in self.parameters)


VOCAB_EMBED = ("vocab", "embed")

LAYER_NUMBER = "layers/number"
"""What goes with a layer's parameters wherever a loop takes them, and is none of them."""

ROUTER_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "router": ("softmax", "sigmoid"),
    "router_normalized": (True, False),
    "balance": ("sequence", "batch"),
}
ROUTER_NUMBERS = ("router_scale", "balance_weight", "router_z_weight", "bias_rate")

PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        # What the tour trains: real shapes in miniature, divisible by 8 wherever a mesh may cut.
        ModelConfig(
            name="tiny", num_layers=2, embed=64, num_heads=8, num_kv_heads=4, head_dim=8,
            mlp_hidden=128, vocab=256, max_seq_len=256,
        ),
        # With enough layers for one to be gathered while another one computes.
        ModelConfig(
            name="tiny-deep", num_layers=4, embed=64, num_heads=8, num_kv_heads=4, head_dim=8,
            mlp_hidden=128, vocab=256, max_seq_len=256,
        ),
        # Experts in miniature: two of eight for each token, beside one that every token uses.
        ModelConfig(
            name="tiny-moe", num_layers=2, embed=64, num_heads=8, num_kv_heads=4, head_dim=8,
            mlp_hidden=128, vocab=256, max_seq_len=256, num_experts=8, num_experts_per_token=2,
            num_shared_experts=1, expert_hidden=64, balance_weight=0.01, router_z_weight=0.001,
        ),
        # Brown et al. 2020, table 2.1; vocabulary padded to 51200 as in Narayanan et al. 2021 §5.
        # RoPE stands in for the learned positions (0.03 B parameters fewer).
        ModelConfig(
            name="gpt3-175b", num_layers=96, embed=12288, num_heads=96, num_kv_heads=96,
            head_dim=128, mlp_hidden=49152, vocab=51200, max_seq_len=2048, mlp="gelu",
            tied_embedding=True,
        ),
        # Llama Team 2024, "The Llama 3 herd of models", table 3.
        ModelConfig(
            name="llama-3-8b", num_layers=32, embed=4096, num_heads=32, num_kv_heads=8,
            head_dim=128, mlp_hidden=14336, vocab=128256, max_seq_len=8192, rope_theta=500_000.0,
        ),
        ModelConfig(
            name="llama-3-70b", num_layers=80, embed=8192, num_heads=64, num_kv_heads=8,
            head_dim=128, mlp_hidden=28672, vocab=128256, max_seq_len=8192, rope_theta=500_000.0,
        ),
        ModelConfig(
            name="llama-3-405b", num_layers=126, embed=16384, num_heads=128, num_kv_heads=8,
            head_dim=128, mlp_hidden=53248, vocab=128256, max_seq_len=8192, rope_theta=500_000.0,
        ),
        # Jiang et al. 2024, table 1.
        ModelConfig(
            name="mixtral-8x7b", num_layers=32, embed=4096, num_heads=32, num_kv_heads=8,
            head_dim=128, mlp_hidden=14336, vocab=32000, max_seq_len=32768, rope_theta=1e6,
            num_experts=8, num_experts_per_token=2, expert_hidden=14336,
        ),
        # DeepSeek-AI 2024 (V3) §4.2. Its latent attention is replaced by grouped-query attention
        # with 8 key/value heads, which has about as many parameters; the experts and their
        # routing (§2.1.2, but for groups of experts) are its own.
        ModelConfig(
            name="deepseek-v3-like", num_layers=61, embed=7168, num_heads=128, num_kv_heads=8,
            head_dim=128, mlp_hidden=18432, vocab=129280, max_seq_len=4096, num_experts=256,
            num_experts_per_token=8, num_shared_experts=1, expert_hidden=2048, num_dense_layers=3,
            router="sigmoid", router_scale=2.5, balance_weight=1e-4, bias_rate=1e-3,
        ),
    )
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The shipped configuration called `name`; ConfigError names the closest one otherwise."""
    if name not in PRESETS:
        raise ConfigError(f"There is no model preset {name!r}. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
