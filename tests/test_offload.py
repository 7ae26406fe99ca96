"""Offload: copies predicted and asked for, where state lies, on disk too, and the same numbers."""

import collections
import dataclasses
import sys

import jax
import numpy as np
import optax
import pytest

from jaxpar import preset
from jaxpar.audit.compare import agree
from jaxpar.audit.host_copies import OffloadIgnoredWarning, host_copies, warn_if_ignored
from jaxpar.disk import OptimizerOnDisk
from jaxpar.errors import PlanError
from jaxpar.numerics import first_difference
from jaxpar.strategies import offload
from jaxpar.tour import take_row, train
from jaxpar.train import TrainStep
from tests.helpers import SMALL, TIED, batches, plan, reference, start, step

MOE = preset("tiny-moe")
OPTIMIZER = {"offload": "optimizer"}


def copies(transfers):
    total = collections.Counter()
    for one in transfers:
        total[one.direction, one.num_bytes] += one.executions
    return total


def asked_copies(explicit):
    traced = explicit.jitted.trace(*explicit.abstract_inputs)
    return copies(offload.asked_transfers(traced.jaxpr))


def memory_of(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


# --- predicted = asked -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "config", "fields"),
    [
        ("data=2", SMALL, OPTIMIZER),
        ("fsdp=2", TIED, OPTIMIZER | {"frozen": ("embedding/*",)}),
        ("tensor=4", SMALL, {"offload": "activations", "remat": "dots"}),
        ("tensor=2", TIED, {"offload": "both", "remat": "full", "num_accumulation_steps": 2}),
        ("data=2,tensor=2", SMALL, {"offload": "activations", "remat": "dots", "sequence": True,
                                    "compute_dtype": "bfloat16", "overlap": "bidirectional"}),
        ("fsdp=2", SMALL, {"offload": "both", "remat": "dots"}),
        ("context=2", SMALL, {"offload": "activations", "remat": "full"}),
        ("expert=2", MOE, {"offload": "both", "remat": "full"}),
    ],
)  # fmt: skip
def test_predicted_copies_are_what_the_program_asks_for(mesh, config, fields):
    explicit = step(mesh, config, **fields)
    want = copies(offload.transfers(config, explicit.plan, explicit.layout))
    assert asked_copies(explicit) == want
    assert {direction for direction, _ in want} == {"to host", "to device"}


def test_copies_by_hand():
    """Adam's two moments, 8 bytes of each parameter each way; and the inputs of the layers."""
    explicit = step("data=1", offload="both", remat="full", num_accumulation_steps=2)
    totals = collections.Counter()
    for (direction, size), count in asked_copies(explicit).items():
        totals[direction] += size * count
    inputs = SMALL.num_layers * 16 * 16 * SMALL.embed * 4
    assert totals["to host"] == totals["to device"] == 8 * SMALL.num_parameters + inputs


def test_an_optimizer_with_one_moment():
    sgd = TrainStep(
        config=SMALL, plan=plan("data=2", **OPTIMIZER), optimizer=optax.sgd(0.1, momentum=0.9)
    )
    want = offload.transfers(SMALL, sgd.plan, sgd.layout, num_moments=1)
    assert asked_copies(sgd) == copies(want)


def test_nothing_is_copied_without():
    assert not asked_copies(step("fsdp=2"))
    assert not offload.transfers(SMALL, plan("fsdp=2"), ())


# --- compiled = executed -----------------------------------------------------------------------


def test_whole_step():
    fields = {"offload": "both", "remat": "dots", "sequence": True}
    row = take_row("both", step("data=2,tensor=2", **fields), batches(10), reference(SMALL, 10))
    assert agree(row.lines), [line for line in row.lines if not line.agrees]
    assert row.numbers_agree, row


@pytest.fixture(scope="module")
def offloaded():
    """A step with its optimizer in host memory, and the state after two of them."""
    explicit = step("data=2", **OPTIMIZER)
    state = start(explicit)
    assert memory_of(state.opt_state[0].mu) == memory_of(state.opt_state[0].nu) == {offload.HOST}
    for batch in batches(2):
        state, _ = explicit(state, batch)
    return explicit, state


def test_state_lies_in_host_memory_between_steps(offloaded):
    explicit, state = offloaded
    assert memory_of(state.opt_state[0].mu) == memory_of(state.opt_state[0].nu) == {offload.HOST}
    assert memory_of(state.params) == {"device"}
    assert explicit.jitted._cache_size() == 1, "what comes back has to fit in again"


def test_state_in_another_memory_is_refused(offloaded):
    explicit, state = offloaded
    batch = batches(1)[0]
    with pytest.raises(PlanError, match=r"mu.* is not in host memory.*offload='optimizer'"):
        explicit(step("data=2").init(), batch)
    plain = step("data=2")
    with pytest.raises(PlanError, match=r"mu.* is in host memory.*offload=None.*step\.shardings"):
        plain(state, batch)
    plain._check_state(jax.device_put(jax.tree.map(np.array, state), plain.shardings))


# --- on disk -----------------------------------------------------------------------------------


def test_moments_on_disk_train_the_same(tmp_path):
    explicit = step("fsdp=2")
    on_disk = OptimizerOnDisk(explicit, tmp_path / "moments")
    state = on_disk.init()
    assert {x.size for x in jax.tree.leaves(state.opt_state)} == {1}, "the counter alone"
    losses = []
    for batch in batches(3):
        state, metrics = on_disk(state, batch)
        losses.append(metrics.loss)
    want = train(start(explicit), explicit, batches(3))
    assert first_difference(np.array(losses), want.losses) is None
    assert first_difference(jax.device_get(state.params), want.params) is None

    size = 2 * 4 * SMALL.num_parameters
    assert on_disk.num_bytes_written == (3 + 1) * size
    assert on_disk.num_bytes_read == 3 * size

    # Another object, as of another process, goes on from the same folder.
    resumed = OptimizerOnDisk(explicit, tmp_path / "moments").loaded(state)
    assert memory_of(resumed) == {"device"}
    assert max(float(np.abs(m).max()) for m in jax.tree.leaves(resumed.opt_state[0].mu)) > 0
    explicit(resumed, batches(1)[0])


def test_folder_of_something_else_is_refused(tmp_path):
    OptimizerOnDisk(step("data=1"), tmp_path / "moments").init()
    wider = step("data=1", dataclasses.replace(SMALL, mlp_hidden=64))
    for explicit, folder in ((wider, "moments"), (step("data=1"), "empty")):
        with pytest.raises(PlanError, match=r"does not hold the moment .*mu.* of this model and"):
            OptimizerOnDisk(explicit, tmp_path / folder).loaded(explicit.abstract_inputs[0])
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"is a file"):
        OptimizerOnDisk(step("data=1"), tmp_path / "file")


def test_missing_tensorstore_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(PlanError, match=r"needs tensorstore .*jaxpar\[disk\]"):
        OptimizerOnDisk(step("data=1"), tmp_path)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "config", "fields", "words"),
    [
        ("data=1", SMALL, {"offload": "disk"}, r"offload='disk'.*'optimizer', 'activations'"),
        ("data=1", SMALL, {"offload": "activations"}, r"remat='none'.*remat='full'.*'dots'"),
        ("data=1", SMALL, {"offload": "both", "remat": "selective"}, r"'both'.*remat='selective'"),
        ("pipe=2", SMALL, {"offload": "activations", "remat": "full"}, r"pipe=2.*'optimizer'"),
        ("data=1", MOE, {"offload": "both", "remat": "dots"}, r"num_experts=8.*remat='full'"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(mesh, config, fields, words):
    with pytest.raises(PlanError, match=words):
        step(mesh, config, **fields)


def test_devices_without_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(offload, "HOST", "pinned_somewhere")
    with pytest.raises(PlanError, match=r"offload='optimizer' needs.*'pinned_somewhere'.*'device'"):
        step("data=1", **OPTIMIZER)
    step("data=1")


# --- planted faults ----------------------------------------------------------------------------


def not_put_back(optimizer, opt_state):
    return opt_state


def one_moment_only(optimizer, opt_state):
    adam, *rest = opt_state
    mu = jax.tree.map(lambda m: jax.device_put(m, jax.memory.Space.Host), adam.mu)
    return (adam._replace(mu=mu), *rest)


def misspelt(names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["layer"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip


def kept_on_device(names):
    return jax.checkpoint_policies.save_only_these_names(*names)


# name: (other fields of the plan, where, what is replaced, by what)
FAULTS = {
    "moments not put back": (OPTIMIZER, offload, "put_back", not_put_back),
    "one of two moments put back": (OPTIMIZER, offload, "put_back", one_moment_only),
    "activations offloaded under a name nothing has": (
        {"offload": "activations", "remat": "full"}, offload, "policy", misspelt),
    "activations kept where they were": (
        {"offload": "activations", "remat": "dots"}, offload, "policy", kept_on_device),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    fields, home, attribute, wrong = FAULTS[name]
    monkeypatch.setattr(home, attribute, wrong)
    explicit = step("data=1", **fields)
    want = copies(offload.transfers(SMALL, explicit.plan, explicit.layout))
    assert asked_copies(explicit) != want


def test_state_that_does_not_come_back_is_refused_when_it_runs(monkeypatch):
    """The step says where its results lie; were it not to, the next one would not take them."""
    monkeypatch.setattr(offload, "fetch", lambda optimizer, opt_state: opt_state)
    explicit = step("data=1", **OPTIMIZER)
    with pytest.raises((TypeError, ValueError), match="memory"):
        explicit(start(explicit), batches(1)[0])


# --- what a backend makes of it ----------------------------------------------------------------

# Types as libtpu 0.0.52 prints them for v5e: moments, and activations in a loop over layers.
TPU = """HloModule jit_step, is_scheduled=true

%body (p: f32[]) -> f32[] {
  %dynamic-update-slice-start = ((bf16[4,1,1024,512]{2,3,1,0:T(8,128)(2,1)S(5)}, bf16[1,1,1024,512]{2,3,1,0:T(8,128)(2,1)}, s32[]{:T(128)}, s32[]{:T(128)}, /*index=5*/s32[]{:T(128)}), bf16[4,1,1024,512]{2,3,1,0:T(8,128)(2,1)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%a, %b, %c)
  %dynamic-slice-start = ((bf16[4,1,1024,512]{2,3,1,0:T(8,128)(2,1)S(5)}, s32[]{:T(128)}, s32[]), bf16[1,1,1024,512]{2,3,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) dynamic-slice-start(%a, %i)
}

ENTRY %main (p: f32[]) -> f32[] {
  %copy-start.22 = (f32[2048,128]{1,0:T(8,128)}, f32[2048,128]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%param.80)
  %copy-start.23 = (f32[2048,128]{1,0:T(8,128)S(5)}, f32[2048,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%fusion)
  %copy-start.24 = (f32[512]{0:T(512)S(1)}, f32[512]{0:T(512)}, u32[]{:S(2)}) copy-start(%param.79)
}
"""  # noqa: E501


def test_copies_of_a_compiled_program():
    layer, moment = 1024 * 512 * 2, 2048 * 128 * 4
    assert host_copies(TPU) == [
        ("to host", None, layer), ("to device", None, layer),
        ("to device", 1, moment), ("to host", 1, moment),
    ]  # fmt: skip


def test_a_backend_that_ignores_offload_is_told_on(offloaded):
    explicit, _ = offloaded
    asked = offload.asked_transfers(explicit.jitted.trace(*explicit.abstract_inputs).jaxpr)
    warn_if_ignored(asked, TPU, "tpu")
    warn_if_ignored(asked, "", "cpu")
    with pytest.warns(OffloadIgnoredWarning, match=r"copies to device memory .*cuda compiled"):
        warn_if_ignored([one for one in asked if one.direction == "to device"], "", "cuda")
    one_way = TPU.replace("copy-start.23", "other").replace("dynamic-update-slice-start(", "x(")
    one_way = one_way.replace(" copy-start(%fusion)", " copy(%fusion)")
    with pytest.warns(OffloadIgnoredWarning, match=r"copies to host memory"):
        warn_if_ignored(asked, one_way, "tpu")
