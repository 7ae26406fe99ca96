"""Dropout: noise by the data alone, the same on every mesh, and what depends on that."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxpar.train
from jaxpar import asked, audit, expected
from jaxpar.audit.compare import agree, compare
from jaxpar.errors import ConfigError, PlanError
from jaxpar.model import dropout, transformer
from jaxpar.model.attention import rotary_angles
from jaxpar.model.parallel import Parallel
from jaxpar.model.transformer import abstract_model, init_params
from jaxpar.numerics import first_difference, relative_error
from jaxpar.predict.activations import kept, layer_bytes
from jaxpar.reference import plain_step
from jaxpar.strategies import compose, context, sequence
from jaxpar.strategies.pipeline import stage
from jaxpar.tour import LOSS_TOLERANCE, PARAMETER_TOLERANCE, Trained, default_optimizer, train
from jaxpar.train import TrainState, TrainStep, token_loss
from tests import serve_helpers
from tests.context_helpers import QUICK
from tests.helpers import BATCH_SIZE, SEQ_LEN, SMALL, batches, corpus, plan, step

RATE = 0.25
DROP = dataclasses.replace(SMALL, name="drop", num_layers=6, dropout=RATE)
LONE = dataclasses.replace(SMALL, name="lone", num_layers=1, dropout=RATE)
TINY = dataclasses.replace(
    DROP, name="tiny", num_layers=3, embed=6, num_heads=2, head_dim=2, mlp_hidden=8,
    num_dense_layers=1, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
    expert_hidden=4, balance_weight=0.01,
)  # fmt: skip
NUM_STEPS, OPTIMIZER = 4, default_optimizer()


@functools.cache
def first_state(config: Any) -> TrainState:
    """Not the model's own, which takes a compiler longer than all that is done with it."""
    params = serve_helpers.some_params(config)
    return TrainState(params, jax.device_get(OPTIMIZER.init(params)))


@functools.cache
def one_device(config: Any) -> Trained:
    return train(first_state(config), jax.jit(plain_step(config, OPTIMIZER)), batches(NUM_STEPS))


def start(explicit: TrainStep) -> TrainState:
    return explicit.init_from(first_state(explicit.config).params)


# --- the noise -----------------------------------------------------------------------------------


def threefry(key: Any, counter: Any) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 of 20 rounds, as Salmon et al. 2011 §3.3 write it."""
    k0, k1 = (np.uint32(k) for k in key)
    keys = k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = (np.asarray(c, np.uint32) for c in counter)
    with np.errstate(over="ignore"):
        x0, x1 = x0 + k0, x1 + k1
        for i in range(20):
            turn = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))) ^ x0
            if i % 4 == 3:
                n = i // 4 + 1
                x0, x1 = x0 + keys[n % 3], x1 + keys[(n + 1) % 3] + np.uint32(n)
    return x0, x1


def wanted(numbers_BS: np.ndarray, layer: int, place: int, embed: int) -> np.ndarray:
    """What `dropout.noise` has to be, in NumPy."""
    half = -(-embed // 2)
    counter = np.broadcast_arrays(numbers_BS[..., None], np.arange(half, dtype=np.uint32))
    return np.concatenate(threefry((layer, place), counter), axis=-1)[..., :embed]


def numbers(step_number: int = 0, seed: int = 0) -> np.ndarray:
    sizes = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
    return corpus().batch(step_number, seed=seed, **sizes).numbers_BS


def test_generator_is_threefry():
    """By the known answers of its authors' Random123, and the model's noise by this one's."""
    for key, counter, answer in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        assert tuple(map(int, threefry(key, counter))) == answer
    for embed in (6, 7):
        got = dropout.noise(jnp.asarray(numbers()), jnp.int32(3), dropout.AFTER_MLP, embed)
        assert (np.asarray(got) == wanted(numbers(), 3, dropout.AFTER_MLP, embed)).all()


def test_as_much_is_dropped_as_is_said_and_independently():
    """All within 5 standard deviations: each part, and each pair of parts dropping the same."""
    parts = {
        (seed, number, layer, place): wanted(numbers(number, seed), layer, place, 64)
        for seed, number, layer, place in ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0),
                                           (1, 0, 0, 0))
    }  # fmt: skip
    for rate in (0.1, 0.5):
        is_dropped = {
            name: ~np.asarray(is_kept(jnp.asarray(bits), rate)) for name, bits in parts.items()
        }
        for one, mine in is_dropped.items():
            assert_share(mine, rate)
            for other, theirs in is_dropped.items():
                if one < other:
                    assert_share(mine & theirs, rate**2)
        (first, *_) = is_dropped.values()
        assert_share(first[:, 1:] & first[:, :-1], rate**2)
        assert_share(first[..., 1:] & first[..., :-1], rate**2)
        assert_share(first[..., :32] & first[..., 32:], rate**2)


def assert_share(is_dropped: np.ndarray, rate: float) -> None:
    sigma = (rate * (1 - rate) * is_dropped.size) ** 0.5
    assert abs(is_dropped.sum() - rate * is_dropped.size) <= 5 * sigma


def is_kept(bits: jax.Array, rate: float) -> jax.Array:
    """What `Dropout` makes of these bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "noise", lambda *_: bits)
        layer = dropout.Dropout(rate=rate, numbers_BS=jnp.uint32(0), layer=jnp.int32(0))
        dropped = layer(jnp.ones(bits.shape), 0)
    assert set(np.unique(dropped)) <= {0.0, np.float32(1 / (1 - rate))}
    return dropped > 0


def test_numbers_are_of_the_data_alone():
    """No token of a run has another one's; rows and steps count on, whatever the mesh."""
    steps = np.stack([numbers(i) for i in range(8)])
    assert len(np.unique(steps)) == steps.size
    assert (numbers(5) == numbers(5)).all() and numbers(0)[0, 0] != numbers(0, seed=1)[0, 0]
    late = corpus().batch(2**33, batch_size=2, seq_len=2).numbers_BS  # counts modulo 2³²
    assert (late == corpus().batch(0, batch_size=2, seq_len=2).numbers_BS).all()


# --- the noise on a mesh -------------------------------------------------------------------------

STREAMS = {
    "replicated": ("data=2,tensor=2", {}, 2),
    "sequence": ("data=2,tensor=2", {"sequence": True}, 4),
    "zigzag": ("context=2,tensor=2", {}, 2),
    "zigzag, sequence": ("data=2,context=2,tensor=2", {"sequence": True}, 8),
    "ulysses": ("context=2,ulysses=2", {}, 4),
}
"""Meshes, and how many different parts of the residual stream their devices have."""


def streams(mesh: str, fields: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Noise of layer 1 in the order of tokens, and each device's own."""
    explicit = step(mesh, DROP, **fields)
    parallel = compose.parallel(DROP, explicit.plan, explicit.layout)
    spec = explicit.batch_spec
    if fields.get("sequence"):
        rows, tokens = (*spec, ())[:2]
        spec = PartitionSpec(rows, (*((tokens,) if isinstance(tokens, str) else tokens), "tensor"))

    def local(numbers_BS: jax.Array) -> jax.Array:
        mine_BS = parallel.own_tokens(numbers_BS)
        return dropout.noise(mine_BS, jnp.int32(1), dropout.AFTER_ATTENTION, 4)

    mapped = jax.shard_map(
        local, mesh=explicit.mesh, in_specs=explicit.batch_spec, out_specs=spec, check_vma=True
    )
    order = context.token_order(explicit.plan)
    found = jax.jit(mapped)(explicit.place(batches(1)[0]).numbers_BS)
    back = slice(None) if order is None else np.argsort(order)
    return np.asarray(found)[:, back], [np.asarray(s.data) for s in found.addressable_shards]


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_equal_where_values_are_replicated_and_different_elsewhere(name):
    mesh, fields, num_different = STREAMS[name]
    found, on_devices = streams(mesh, fields)
    assert (found == wanted(numbers(), 1, dropout.AFTER_ATTENTION, 4)).all()
    assert len({part.tobytes() for part in on_devices}) == num_different


def by_place_on_the_device(noise):
    def local(numbers_BS, *rest):
        count = jnp.arange(numbers_BS.size, dtype=jnp.uint32).reshape(numbers_BS.shape)
        return noise(count + 0 * numbers_BS, *rest)

    return local


STREAM_FAULTS: dict[str, tuple[str, Callable[..., None]]] = {
    "noise by the place on the device": ("replicated", lambda patch: patch.setattr(
        dropout, "noise", by_place_on_the_device(dropout.noise))),
    "the first part of the sequence everywhere": ("sequence", lambda patch: patch.setattr(
        sequence, "own_tokens", lambda tokens: sequence.lax.pcast(
            tokens[:, : tokens.shape[1] // 2], "tensor", to="varying"))),
    "numbers in the order of the sequence": ("zigzag", lambda patch: patch.setattr(
        TrainStep, "place", lambda step, batch: batch)),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_fault_in_a_stream_is_seen(name, monkeypatch):
    case, plant = STREAM_FAULTS[name]
    plant(monkeypatch)
    mesh, fields, _ = STREAMS[case]
    found, _ = streams(mesh, fields)
    assert not (found == wanted(numbers(), 1, dropout.AFTER_ATTENTION, 4)).all()


# --- the model -----------------------------------------------------------------------------------


def losses_two_ways() -> tuple[float, float]:
    """Of a model with dense layers and experts: as it is, and layer by layer with NumPy's noise."""
    batch = corpus().batch(0, batch_size=2, seq_len=8)
    params = serve_helpers.some_params(TINY)
    graphdef, _ = abstract_model(TINY)
    parallel = Parallel()

    def drop(y_BSD: jax.Array, layer: int, place: int) -> jax.Array:
        bits = wanted(batch.numbers_BS, layer, place, TINY.embed)
        return jnp.where(bits >= RATE * 2**32, y_BSD / (1 - RATE), 0.0)

    def in_plain_words(params: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        rotary = rotary_angles(jnp.arange(8), TINY.head_dim, TINY.rope_theta)
        x_BSD = model.embed(model.embedding, batch.tokens_BS, parallel, jnp.dtype("float32"))
        objective = 0.0
        for layer in range(TINY.num_layers):
            dense = TINY.num_dense_layers
            stack, i = (
                (model.dense_layers, layer) if layer < dense else (model.layers, layer - dense)
            )
            graph, stacked = nnx.split(stack)
            block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            h_BSD = block.attention_norm(x_BSD)
            x_BSD += drop(block.attention(h_BSD, rotary, None, parallel), layer, 0)
            h_BSD = block.mlp_norm(x_BSD)
            if layer < dense:
                y_BSD = block.mlp(h_BSD, parallel)
            else:
                y_BSD, stats = block.moe(h_BSD, batch.mask_BS, block.mlp, parallel)
                objective += stats["objective"]
            x_BSD += drop(y_BSD, layer, 1)
        loss_BS = model.score(model.embedding, x_BSD, batch.labels_BS, parallel)
        return jnp.sum(loss_BS * batch.mask_BS) + jnp.sum(objective)

    def as_it_is(params: Any) -> jax.Array:
        return token_loss(TINY, params, batch, parallel, jnp.dtype("float32"))[0]

    ways = jax.jit(lambda params: (in_plain_words(params), as_it_is(params)))
    want, got = ways(params)
    return float(want), float(got)


def test_each_place_of_each_layer_has_noise_of_its_own():
    want, got = losses_two_ways()
    assert got == pytest.approx(want, rel=1e-6)


class SameInEachLayer(dropout.Dropout):
    def __call__(self, y_BSD, place):
        return dataclasses.replace(self, layer=0 * self.layer)._plain(y_BSD, place)

    _plain = dropout.Dropout.__call__


class SameInBothPlaces(dropout.Dropout):
    def __call__(self, y_BSD, place):
        return super().__call__(y_BSD, 0)


@pytest.mark.parametrize("fault", [SameInEachLayer, SameInBothPlaces])
def test_fault_in_a_layer_is_seen(fault, monkeypatch):
    monkeypatch.setattr(transformer, "Dropout", fault)
    want, got = losses_two_ways()
    assert got != pytest.approx(want, rel=1e-4)


# --- a step --------------------------------------------------------------------------------------

GPIPE = {"schedule": "gpipe", "num_microbatches": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data, tensor": ("data=2,tensor=2", {"num_accumulation_steps": 2}),
    "sequence, zigzag, recompute": (
        "context=2,tensor=2", {"sequence": True, "remat": "full"}),
    "fsdp": ("fsdp=2", {"prefetch": True, "num_layers_per_gather": 2}),
    "zero2": ("data=2,fsdp=2", {"zero": 2, "num_accumulation_steps": 2}),
    "interleaved, padded": (
        "pipe=2,tensor=2",
        {"schedule": "interleaved", "num_virtual_stages": 2, "num_microbatches": 2}),
}  # fmt: skip
"""With experts, and a pipeline with ZeRO-1: test_truths.py."""


class Built(NamedTuple):
    step: TrainStep
    compiled: Any
    lines: list[Any]

    def __call__(self, state, batch):
        return self.compiled(state, self.step.place(batch))


@functools.cache
def built(name: str) -> Built:
    mesh, fields = CASES[name]
    explicit = step(mesh, DROP, **fields)
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    compiled = traced.lower().compile(compiler_options=QUICK)
    found = audit(compiled, mesh=explicit.plan.mesh.all_axes)
    lines = compare(expected(DROP, explicit.plan), asked(traced.jaxpr), found)
    return Built(explicit, compiled, lines)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_and_communicates_nothing_more(name):
    run = built(name)
    assert agree(run.lines), [line for line in run.lines if not line.agrees]
    without = dataclasses.replace(DROP, dropout=0.0)
    assert expected(DROP, run.step.plan) == expected(without, run.step.plan)
    want = one_device(DROP)
    have = train(start(run.step), run, batches(NUM_STEPS))
    assert relative_error(have.losses, want.losses) <= LOSS_TOLERANCE
    assert relative_error(have.gradient_norms, want.gradient_norms) <= LOSS_TOLERANCE
    params = run.step.in_layer_order(have.params)
    assert relative_error(params, want.params) <= PARAMETER_TOLERANCE


def test_a_resumed_run_sees_the_noise_it_would_have_seen():
    run = built("data, tensor")
    through = train(start(run.step), run, batches(NUM_STEPS))
    state = start(run.step)
    for batch in batches(2):
        state, _ = run(state, batch)
    saved = jax.device_get(jax.tree.map(jnp.copy, state))
    resumed = train(jax.device_put(saved, run.step.shardings), run, batches(NUM_STEPS)[2:])
    assert first_difference(resumed.params, through.params) is None
    assert first_difference(resumed.losses, through.losses[2:]) is None


def test_noise_is_of_the_seed():
    run, batch = built("data, tensor"), batches(1)[0]
    other = batch._replace(numbers_BS=numbers(seed=1))
    losses = [float(run(start(run.step), b)[1].loss) for b in (batch, batch, other)]
    assert losses[0] == losses[1] != pytest.approx(losses[2], rel=1e-5)


def by_micro_batch(accumulate):
    def faulty(loss, params, batch, num_steps, dtype):
        size = batch.numbers_BS.shape[0] // num_steps
        of_first = jnp.concatenate([batch.numbers_BS[:size]] * num_steps)
        return accumulate(loss, params, batch._replace(numbers_BS=of_first), num_steps, dtype)

    return faulty


def other_when_repeated(model_stage):
    def faulty(*args):
        run = model_stage(*args)

        def of_chunk(shared, layers, x, batch, chunk):
            if chunk.is_repeated:
                batch = batch._replace(numbers_BS=batch.numbers_BS + jnp.uint32(1))
            return run(shared, layers, x, batch, chunk)

        return of_chunk

    return faulty


STEP_FAULTS = {
    "noise by the number in a micro-batch": (
        jaxpar.train, "accumulate", by_micro_batch,
        ("data=2", {"num_accumulation_steps": 2})),
    "other noise when a stage computes again": (
        stage, "model_stage", other_when_repeated, ("pipe=2", GPIPE)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_fault_in_a_step_is_seen(name, monkeypatch):
    module, function, fault, (mesh, fields) = STEP_FAULTS[name]
    monkeypatch.setattr(module, function, fault(getattr(module, function)))
    explicit = step(mesh, DROP, **fields)
    lowered = explicit.jitted.lower(*explicit.abstract_inputs)
    run = lowered.compile(compiler_options=QUICK)
    _, metrics = run(start(explicit), explicit.place(batches(1)[0]))
    want = one_device(DROP).losses[0]
    assert metrics.loss != pytest.approx(want, rel=2 * LOSS_TOLERANCE)


# --- without -------------------------------------------------------------------------------------


def test_without_dropout_the_program_has_nothing_of_it():
    for rate in (0.0, RATE):
        explicit = step("data=2", dataclasses.replace(LONE, dropout=rate))
        state, batch = explicit.abstract_inputs
        assert (batch.numbers_BS is None) == (rate == 0)
        assert (explicit.place(batches(1)[0]).numbers_BS is None) == (rate == 0)
        assert ("threefry" in explicit.jitted.lower(state, batch).as_text()) == (rate > 0)


def test_tokens_without_numbers_are_not_trained_on():
    """So evaluation and serving of a model with dropout are those of a model without."""
    batch = batches(1)[0]._replace(numbers_BS=None)

    def lowered(config: Any) -> str:
        def loss(params: Any) -> jax.Array:
            return token_loss(config, params, batch, Parallel(), jnp.dtype("float32"))[0]

        return jax.jit(loss).lower(jax.eval_shape(lambda: init_params(config, 0))).as_text()

    def served(config: Any) -> str:
        one_step = serve_helpers.served("tensor=2", config)
        return one_step.jitted["decode"].lower(*one_step.abstract_inputs("decode")).as_text()

    assert lowered(LONE) == lowered(dataclasses.replace(LONE, dropout=0.0))
    model = serve_helpers.DENSE
    assert served(dataclasses.replace(model, dropout=RATE)) == served(model)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_keeps_its_two_masks_unless_it_runs_again(remat):
    def kept_bytes(config: Any) -> int:
        explicit = step("data=2", config, remat=remat)
        traced = explicit.jitted.trace(*explicit.abstract_inputs)
        return sum(array.num_bytes for array in kept(traced.jaxpr, config.num_layers))

    without = dataclasses.replace(DROP, dropout=0.0)
    masks = 2 * (BATCH_SIZE // 2) * SEQ_LEN * SMALL.embed if remat == "none" else 0
    assert kept_bytes(DROP) - kept_bytes(without) == masks
    two = (layer_bytes(config, plan("data=2", remat=remat)) for config in (DROP, without))
    assert [sum(found.values()) for found in two] == [
        kept_bytes(without) + masks, kept_bytes(without)]  # fmt: skip


# --- refused by name -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), True, "0.1", None])
def test_a_rate_is_a_number_from_0_to_below_1(rate):
    with pytest.raises(ConfigError, match=r"dropout=.* must be a number from 0 to below 1"):
        dataclasses.replace(SMALL, dropout=rate)


def test_a_batch_has_numbers_where_noise_needs_them():
    explicit, batch = step("data=2", LONE), batches(1)[0]
    missing = batch._replace(numbers_BS=None)
    with pytest.raises(PlanError, match=r"dropout=0.25.*numbers_BS is missing"):
        explicit.place(missing)
    with pytest.raises(PlanError, match=r"numbers_BS is int32.* has to be uint32"):
        explicit.place(batch._replace(numbers_BS=batch.tokens_BS))
    with pytest.raises(PlanError, match=r"dropout=0.25.*numbers_BS is missing"):
        plain_step(LONE, OPTIMIZER)(first_state(LONE), missing)
