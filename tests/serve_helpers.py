"""What tests of serving share: small models, plans, requests, and their answers alone."""

import functools
from dataclasses import replace

import numpy as np

from jaxpar import MeshSpec, ModelConfig
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.reference import Reference
from jaxpar.serve.sampling import Sampling
from jaxpar.serve.scheduler import Request
from jaxpar.serve.step import ServeStep

MAX_SEQ_LEN = 32

DENSE = ModelConfig(
    name="dense", num_layers=2, embed=16, num_heads=4, num_kv_heads=2, head_dim=4,
    mlp_hidden=32, vocab=64, max_seq_len=MAX_SEQ_LEN,
)  # fmt: skip
TIED = replace(DENSE, name="tied", tied_embedding=True, mlp="gelu")
EXPERTS = ModelConfig(
    name="experts", num_layers=3, embed=16, num_heads=4, num_kv_heads=2, head_dim=4,
    mlp_hidden=32, vocab=64, max_seq_len=MAX_SEQ_LEN, num_experts=4, num_experts_per_token=2,
    num_shared_experts=1, expert_hidden=16, num_dense_layers=1, balance_weight=0.01,
)  # fmt: skip


def plan(mesh: str, **fields) -> ServePlan:
    defaults = {
        "num_slots": 4, "max_seq_len": MAX_SEQ_LEN, "block_len": 4, "chunk_len": 8,
        "max_top_k": 4, "compute_dtype": "float32",
    }  # fmt: skip
    return ServePlan(mesh=MeshSpec.parse(mesh), **{**defaults, **fields})


@functools.cache
def served(mesh: str, config: ModelConfig = DENSE, **fields) -> ServeStep:
    """One step per plan for the whole session: its programs are compiled once."""
    return ServeStep(config=config, plan=plan(mesh, **fields))


@functools.cache
def some_params(config: ModelConfig):
    """Whole, and larger than a fresh model's, so that different prompts have different answers.

    Of a NumPy generator: JAX's takes longer to compile than all that is done with them.
    """
    draw, params = np.random.default_rng(0), {}
    for parameter in config.parameters:
        *folders, leaf = parameter.path.split("/")
        node = functools.reduce(lambda node, name: node.setdefault(name, {}), folders, params)
        is_norm = parameter.dims == ("norm",)
        value = np.ones if is_norm else lambda shape: 0.12 * draw.normal(size=shape)
        node[leaf] = value(parameter.stacked_shape).astype(np.float32)
    return params


def requests(num: int, seed: int, longest: int = 20) -> list[tuple[int, Request]]:
    """Requests with the steps before which they come; every other one is sampled."""
    draw = np.random.default_rng(seed)
    found = []
    for i in range(num):
        length = int(draw.integers(1, longest))
        top_k = int(draw.choice([0, 3]))
        sampled = Sampling(
            temperature=1.5, top_k=top_k, top_p=0.9 if top_k and i % 4 == 1 else 1.0, seed=i
        )
        request = Request(
            prompt=tuple(map(int, draw.integers(0, DENSE.vocab, length))),
            max_new_tokens=int(draw.integers(1, 11)),
            sampling=sampled if i % 2 else Sampling(),
            stop_tokens=(5,),
        )
        found.append((int(draw.integers(0, 6)), request))
    return found


@functools.cache
def alone(config: ModelConfig) -> Reference:
    return Reference(config, some_params(config), MAX_SEQ_LEN)
