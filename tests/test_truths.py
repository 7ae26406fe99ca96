"""What training has to keep true on every mesh, of one model that has everything a mesh can split.

It has experts, a dense layer before them, a tied embedding, losses that balance experts, and
dropout. Where a truth has a strategy of its own its tests are with that strategy.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import ModelConfig, TrainStep, asked, audit, expected
from jaxpar.audit.compare import Line, agree, compare
from jaxpar.numerics import first_difference, relative_error
from jaxpar.reference import plain_step
from jaxpar.text import Batch
from jaxpar.train import Metrics, TrainState
from tests.context_helpers import QUICK
from tests.helpers import BATCH_SIZE, SEQ_LEN, SMALL, TIED, batches, corpus, plan
from tests.serve_helpers import some_params

EVERYTHING = dataclasses.replace(
    TIED, name="everything", num_layers=3, num_dense_layers=1, num_experts=4,
    num_experts_per_token=2, expert_hidden=16, balance_weight=0.1, router_z_weight=0.01,
    dropout=0.1,
)  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data, context, tensor, accumulation": (
        "data=2,context=2,tensor=2", {"sequence": True, "num_accumulation_steps": 2}),
    "pipeline, expert, zero1, micro-batches": (
        "pipe=2,fsdp=2,expert=2", {"zero": 1, "num_microbatches": 2}),
}  # fmt: skip

GRADIENT = optax.sgd(lambda count: jnp.where(count == 0, 1.0, 0.01), momentum=0.9)
"""Its first step, without clipping, moves parameters by their gradients."""

# --- loss, gradients, norm and statistics --------------------------------------------------------


class Taken(NamedTuple):
    """A step from given parameters: those after it, in layer order, and what it measured."""

    params: Any
    metrics: Metrics


class Run(NamedTuple):
    """A step that is compiled, from the same parameters on every mesh."""

    step: TrainStep
    compiled: Any
    lines: list[Line]

    def __call__(self, batches: Sequence[Batch]) -> tuple[TrainState, list[Metrics]]:
        state, found = self.step.init_from(some_params(self.step.config)), []
        for batch in batches:
            state, metrics = self.compiled(state, self.step.place(batch))
            found.append(jax.device_get(metrics))
        return state, found


@functools.cache
def built(config: ModelConfig, mesh: str, **fields: Any) -> Run:
    explicit = TrainStep(
        config=config, plan=plan(mesh, **fields), optimizer=GRADIENT, clip_norm=math.inf
    )
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    compiled = traced.lower().compile(compiler_options=QUICK)
    found = audit(compiled, mesh=explicit.plan.mesh.all_axes)
    lines = compare(expected(config, explicit.plan), asked(traced.jaxpr), found)
    return Run(explicit, compiled, lines)


@functools.cache
def one_device() -> Taken:
    params = some_params(EVERYTHING)
    take = jax.jit(plain_step(EVERYTHING, GRADIENT, clip_norm=math.inf))
    state, metrics = take(TrainState(params, GRADIENT.init(params)), batches(1)[0])
    return Taken(jax.device_get(state.params), jax.device_get(metrics))


def gradients(taken: Taken) -> dict[str, np.ndarray]:
    moved = jax.tree.map(np.subtract, some_params(EVERYTHING), taken.params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(moved)}


def worst(taken: Taken) -> dict[str, float]:
    """The largest error of anything that should be as on one device."""
    got, want = gradients(taken), gradients(one_device())
    have, need = taken.metrics, one_device().metrics
    return {path: relative_error(got[path], want[path]) for path in want} | {
        "loss": relative_error(have.loss, need.loss),
        "norm": relative_error(have.gradient_norm, need.gradient_norm),
        **{name: relative_error(have.stats[name], need.stats[name]) for name in need.stats},
    }


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_norm_and_statistics_do_not_depend_on_the_mesh(name):
    (mesh, fields), (batch,) = CASES[name], batches(1)
    run = built(EVERYTHING, mesh, **fields)
    assert agree(run.lines), [line for line in run.lines if not line.agrees]
    mask = run.step.place(batch).mask_BS
    num_valid = {str(shard.index): int(shard.data.sum()) for shard in mask.addressable_shards}
    assert len(set(num_valid.values())) == len(num_valid) > 3, "each device has another number"
    state, (metrics,) = run([batch])
    errors = worst(Taken(run.step.in_layer_order(jax.device_get(state.params)), metrics))
    assert {"balance_loss", "router_z_loss", "['embedding']['table']"} <= errors.keys()
    assert max(errors.values()) <= 1e-4, errors
    assert max(errors["loss"], errors["norm"]) <= 1e-5, errors
    table = gradients(one_device())["['embedding']['table']"]
    assert np.count_nonzero(np.abs(table).sum(axis=1)) == EVERYTHING.vocab, "it also scores"


# --- documents of one row ------------------------------------------------------------------------


def documents(batch: Batch, which: int, *, changed: int | None = None) -> Batch:
    """The loss of document `which` of each row alone; other tokens in the document `changed`."""
    is_other = batch.segments_BS == changed
    return batch._replace(
        tokens_BS=np.where(is_other, 255 - batch.tokens_BS, batch.tokens_BS),
        mask_BS=(batch.segments_BS == which).astype(np.float32),
    )


def test_documents_of_a_row_do_not_see_each_other():
    """To the bit: loss, gradient norm and gradients of one, whatever stands in those before it."""
    run = built(SMALL, "pipe=2,context=2", packed=True, num_microbatches=2)
    batch = corpus().batch(0, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, packed=True)
    assert (batch.segments_BS == 3).any(axis=1).sum() > BATCH_SIZE // 2

    def taken(batch: Batch) -> Any:
        return jax.device_get(run([batch]))

    want = taken(documents(batch, 2))
    for other in (1, 3):
        assert first_difference(taken(documents(batch, 2, changed=other)), want) is None
    # It would be seen: by themselves documents are not blind, nor are rows of one document.
    assert taken(documents(batch, 2, changed=2))[1][0].loss != want[1][0].loss
    as_one = {"segments_BS": np.ones_like(batch.segments_BS)}
    one, other = (documents(batch, 2, changed=number)._replace(**as_one) for number in (None, 1))
    assert taken(one)[1][0].loss != taken(other)[1][0].loss


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_copies_are_equal_to_the_bit_after_ten_steps(name):
    """Of whole parameters and their moments, tied tables and layers' parts, on all devices."""
    mesh, fields = CASES[name]
    state, found = built(EVERYTHING, mesh, **fields)(batches(10))
    assert np.isfinite([metrics.loss for metrics in found]).all()
    num_copies = 0
    for leaf in jax.tree.leaves(state):
        copies: dict[str, Any] = {}
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)
            assert first_difference(value, copies.setdefault(str(shard.index), value)) is None
        num_copies += len(leaf.addressable_shards) - len(copies)
    assert num_copies > 50
