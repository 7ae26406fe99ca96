"""Prefill and decode: predicted = asked = compiled, in place, and every token as on one device."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import asked, audit, compare
from jaxpar.audit.compare import agree
from jaxpar.errors import PlanError, RequestError
from jaxpar.model.config import preset
from jaxpar.serve.cache import idle_rows
from jaxpar.serve.closed_form import expected
from jaxpar.serve.engine import Engine
from jaxpar.serve.plan import ServePlan
from jaxpar.serve.reference import Reference
from tests.serve_helpers import DENSE, EXPERTS, TIED, alone, plan, requests, served, some_params

KINDS = ("prefill", "decode")
PLANS = {
    "data=2,tensor=4": (DENSE, {"num_blocks": 20}),  # fewer key/value heads than devices
    "context=2,tensor=2": (DENSE, {"num_blocks": 12, "chunk_len": 4, "num_prefill_rows": 2}),
    "pipe=2,expert=2": (EXPERTS, {"num_blocks": 20, "num_microbatches": 2}),
}


def step_of(mesh):
    config, fields = PLANS[mesh]
    return served(mesh, config, **fields)


def engine_of(step, **options):
    """An engine whose cache holds NaN wherever nobody has written."""
    engine = Engine(step, step.place(some_params(step.config)), **options)
    nan = jax.tree.map(lambda x: x + jnp.float32(np.nan), engine.cache)
    engine.cache = jax.device_put(nan, jax.tree.map(lambda x: x.sharding, engine.cache))
    return engine


def executions(rows):
    total = Counter()
    for row in rows:
        total[row.kind, row.axes, row.phase, row.dtype, row.payload_bytes] += row.count
    return total


def asked_of(step, kind):
    return asked(step.jitted[kind].trace(*step.abstract_inputs(kind)).jaxpr)


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", PLANS)
def test_every_token_is_that_of_its_request_alone(mesh):
    step = step_of(mesh)
    given = requests(12, seed=1)
    want = [alone(step.config)(request) for _, request in given]
    assert min(answer.margin for answer in want) > 1e-4  # no tie that rounding could decide
    engine = engine_of(step)
    with pytest.raises(RequestError, match="There is no request 0; 0 were submitted"):
        engine.answer(0)
    answers, reports = engine.run(given)
    assert answers == [answer.tokens for answer in want]
    assert sum(report.num_preempted for report in reports) > 0 or step.plan.num_batch_shards > 1
    assert engine.scheduler.used_blocks == 0


# --- predicted = asked = compiled ------------------------------------------------------------


@pytest.mark.parametrize("mesh", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_asked_and_compiled_agree(mesh, kind):
    step = step_of(mesh)
    lines = compare(
        expected(step.config, step.plan, kind),
        asked_of(step, kind),
        audit(step.compiled(kind), mesh=step.plan.mesh.all_axes),
    )
    assert lines and agree(lines), [line for line in lines if not line.agrees]


@pytest.mark.parametrize(
    ("mesh", "config", "fields"),
    [
        ("data=4", DENSE, {}),
        ("data=2,context=2,tensor=2", DENSE, {"max_top_k": 64, "num_widths": 2}),
        ("pipe=2,tensor=2", EXPERTS, {"num_microbatches": 4, "num_prefill_rows": 3}),
        ("expert=2,context=2,tensor=2", EXPERTS, {"num_prefill_rows": 4}),
    ],
)
def test_predicted_is_what_bfloat16_programs_ask_for(mesh, config, fields):
    step = served(mesh, config, compute_dtype="bfloat16", **fields)
    for kind, width in zip(KINDS, step.plan.widths[-2:] * 2, strict=False):
        program = step.jitted[kind].trace(*step.abstract_inputs(kind, width))
        rows = executions(asked(program.jaxpr))
        assert executions(expected(config, step.plan, kind, width)) == rows
        assert bool(rows) == (mesh != "data=4"), "replicas say nothing to each other"


def test_decode_is_two_reductions_of_one_token_per_layer():
    step = step_of("data=2,tensor=4")
    B, L, D, k = 2, DENSE.num_layers, DENSE.embed, step.plan.max_top_k
    assert executions(asked_of(step, "decode")) == {
        ("all-reduce", ("tensor",), "forward", "f32", B * 1 * D * 4): 2 * L + 1,
        ("all-gather", ("tensor",), "forward", "f32", B * 4 * k * 4): 1,
        ("all-gather", ("tensor",), "forward", "s32", B * 4 * k * 4): 1,
    }


# --- the cache -------------------------------------------------------------------------------


def cache_shape(step):
    """Of one device's keys in its stages' layers."""
    shape = step.abstract_inputs("decode")[1]["layers"].k
    return shape.sharding.shard_shape(shape.shape)


IN_PLACE = {
    "parameter",
    "get-tuple-element",
    "scatter",
    "fusion",
    "bitcast",
    "dynamic-update-slice",
}
"""Of a fusion, what it holds counts."""


def copies_of(compiled, shape):
    """Opcodes that make a new array as large as the cache."""
    dims = ",".join(map(str, shape))
    made = re.findall(rf" = \w+\[{dims}\]\S* ([\w-]+)\(", compiled.as_text())
    assert made
    return [opcode for opcode in made if opcode not in IN_PLACE]


@pytest.mark.parametrize("mesh", PLANS)
def test_cache_is_donated_and_written_in_place(mesh):
    step = step_of(mesh)
    num_bytes = step.plan.cache_bytes(step.config)
    arrays = step.abstract_inputs("decode")[1]
    local = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(arrays)]  # fmt: skip
    assert sum(local) == num_bytes
    for kind in KINDS:
        assert copies_of(step.compiled(kind), cache_shape(step)) == []
        assert step.compiled(kind).memory_analysis().alias_size_in_bytes == num_bytes


def test_copies_are_seen():
    """Two ways in which a cache of this kind is easily copied."""
    row = jnp.ones((2, 4), jnp.float32)

    def in_place(cache, index):
        return cache.at[1, index].set(row, mode="drop")

    def in_a_wider_dtype(cache, index):  # what a CPU may make of bfloat16
        return in_place(cache.astype(jnp.float32), index).astype(cache.dtype)

    def sliced_and_stacked(cache, index):
        return jax.lax.scan(lambda _, x: (_, x.at[index].set(row)), 0, cache)[1]

    for write, dtype, seen in (
        (in_place, jnp.float32, set()),
        (in_a_wider_dtype, jnp.bfloat16, {"convert"}),
        (sliced_and_stacked, jnp.float32, {"broadcast"}),
    ):
        cache = jax.ShapeDtypeStruct((3, 8, 4), dtype)
        lowered = jax.jit(write, donate_argnums=0).lower(cache, jnp.arange(2))
        copies = set(copies_of(lowered.compile(), cache.shape))
        assert copies >= seen and bool(copies) == bool(seen)


def test_bytes_of_a_token_are_2_L_K_H():
    large = preset("llama-3-8b")
    one = ServePlan(mesh=plan("tensor=8").mesh, num_slots=1, max_seq_len=8192)
    assert one.bytes_per_token(large) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert one.cache_bytes(large) == 8192 * 131_072 // 8
    wide = ServePlan(mesh=plan("tensor=16").mesh, num_slots=1, max_seq_len=8192)
    assert wide.bytes_per_token(large) == 2 * 131_072, "8 heads, each on two devices"


def test_bfloat16_is_written_in_place_and_chooses_the_same():
    step = served("data=2", TIED, compute_dtype="bfloat16")
    assert copies_of(step.compiled("prefill"), cache_shape(step)) == []
    reference = Reference(TIED, some_params(TIED), 32, "bfloat16")
    params, cache = step.place(some_params(TIED)), step.init_cache()
    num_sure = 0
    for _, request in requests(12, seed=2, longest=8):
        if request.sampling.temperature:
            continue
        rows = idle_rows(step.plan, "prefill")
        num = len(request.prompt)
        rows.tokens[1, :num], rows.num_tokens[1], rows.table[1] = request.prompt, num, np.arange(8)
        cache, token_B = step.prefill(params, cache, rows)
        score_V = reference.scores_after(list(request.prompt))
        best, second = np.sort(score_V)[:-3:-1]
        if best - second > 0.05 * np.abs(score_V).max():
            num_sure += 1
            assert token_B[1] == score_V.argmax()
    assert num_sure >= 3


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        ("fsdp=2", {}, "Axes that serve: pipe, slice, data, expert, context, tensor"),
        ("data=2", {"num_slots": 3}, "Nearest num_slots: 2 or 4"),
        ("data=2", {"num_blocks": 17}, "Nearest num_blocks: 16 or 18"),
        ("data=2", {"num_blocks": 8}, "takes 8 of block_len=4. Nearest num_blocks: 16"),
        ("data=2", {"num_prefill_rows": 3}, "Nearest num_prefill_rows: 2 or 4"),
        ("data=1", {"block_len": 5}, "Nearest max_seq_len: 30 or 35"),
        ("data=1", {"num_microbatches": 2}, "Nearest num_microbatches: 1"),
        ("pipe=2", {"num_microbatches": 3}, "Nearest num_slots: 3 or 6"),
        ("context=8", {}, "Nearest block_len: 8"),
        ("context=2", {"chunk_len": 6}, "Nearest chunk_len: 4 or 8"),
        ("data=1", {"num_slots": 0}, "num_slots=0"),
        ("data=1", {"compute_dtype": "float16"}, "'float32', 'bfloat16'"),
        ("data=1", {"chunk_len": True}, "chunk_len=True"),
    ],
)
def test_plans_are_refused(mesh, fields, message):
    with pytest.raises(PlanError, match=message):
        plan(mesh, **fields)


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        ("data=1", {"max_seq_len": 64}, "Nearest max_seq_len: 32"),
        ("data=1", {"chunk_len": 64}, "Nearest chunk_len: 32"),
        ("data=1", {"max_top_k": 65}, "Nearest max_top_k: 64"),
        ("tensor=8", {}, "num_heads=4 cannot be split over tensor=8"),
        ("expert=2", {}, "has no experts to spread"),
        ("pipe=4", {}, "too few for pipe=4"),
    ],
)
def test_models_are_refused(mesh, fields, message):
    with pytest.raises(PlanError, match=message):
        served(mesh, **fields)


def test_steps_refuse_what_would_be_silently_wrong():
    step = step_of("context=2,tensor=2")
    params, cache = step.place(some_params(DENSE)), step.init_cache()
    rows = idle_rows(step.plan, "prefill")
    rows.start[0] = 6
    with pytest.raises(RequestError, match="at a multiple of block_len=4"):
        step.prefill(params, cache, rows)
    narrow = rows._replace(table=rows.table[:, :3], start=rows.start * 0)
    with pytest.raises(RequestError, match="have 3 columns, and the plan has programs for 8"):
        step.prefill(params, cache, narrow)
    step.decode(params, cache, idle_rows(step.plan, "decode"))
    with pytest.raises(RequestError, match="given to an earlier step"):
        step.decode(params, cache, idle_rows(step.plan, "decode"))


def test_parameters_of_another_model_are_refused():
    with pytest.raises(PlanError, match="tied has"):
        served("data=2", TIED, compute_dtype="bfloat16").place(some_params(EXPERTS))
