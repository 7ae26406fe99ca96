"""FLOPs of a training step, and what part of the chips' peak they are (MFU).

*Model FLOPs*: multiply-adds of the matmuls that the model asks for, two each, whatever a strategy
computes twice (rematerialisation, a pipeline's second forward), pads or copies; a backward is two
matmuls for each of the forward. With B sequences of S tokens, N heads of H, k of E experts:

    forward    B·S·(2·A + L·4·N·H·c)     A = active matmul parameters
    step       3 · forward

A counts an embedding table once if it scores (a lookup is no matmul), and of the experts the k that
a token uses. c is the number of tokens that a token attends to: S with *full* attention FLOPs, and
(S + 1)/2, on average, with *causal* ones, which are those reported here. Rows are counted as full,
padding included; in packed rows tokens attend to less.

Source: Chowdhery et al. 2022 (PaLM), appendix B, whose attention is full; Narayanan et al. 2021,
§5.1, whose count includes a recompute (that is HFU). Causal: Dao 2023 (FlashAttention-2), §4.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxpar.hardware import chip, chip_of
from jaxpar.model.config import ModelConfig, Parameter
from jaxpar.strategies.plan import DTYPES, Plan

KIND = "causal FLOPs, without recompute"
"""What every MFU of this project is of."""


def step_flops(config: ModelConfig, plan: Plan, *, causal: bool = True) -> float:
    """Model FLOPs of one step over all devices, forward and backward."""
    S = plan.seq_len
    context = (S + 1) / 2 if causal else S
    attention = config.num_layers * 4 * config.num_heads * config.head_dim * context
    return 3 * plan.batch_size * S * (2 * active_matmul_parameters(config) + attention)


def active_matmul_parameters(config: ModelConfig) -> int:
    """Parameters that one token is multiplied with."""
    return round(sum(_share(p, config) * p.size for p in config.parameters))


def _share(parameter: Parameter, config: ModelConfig) -> float:
    """How much of a parameter a token meets in matmuls."""
    if len(parameter.shape) == 1:  # norms, and the bias of a router
        return 0.0
    if parameter.path == "embedding/table" and not config.tied_embedding:
        return 0.0
    if "experts" in parameter.dims and "mlp" in parameter.dims:
        return config.num_experts_per_token / config.num_experts
    return 1.0


def peak_flops_per_s(devices: Iterable[Any], compute_dtype: str) -> float | None:
    """What these JAX devices can do together at best; None where one of them is not in the table.

    compute_dtype: a Plan's, such as "bfloat16".
    """
    total = 0.0
    for device in devices:
        name = chip_of(device.device_kind) if device.platform != "cpu" else None
        if name is None:
            return None
        total += chip(name).flops_per_s(DTYPES[compute_dtype])
    return total
