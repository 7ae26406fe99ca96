"""Replicas: each answers as the reference does, and no program of one reaches another."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import MeshSpec, audit
from jaxpar.errors import IndependenceError, LostError, PlanError, RequestError
from jaxpar.serve.independence import Compiled, crossings, prove, replicas_along
from jaxpar.serve.replicas import Replicas
from jaxpar.serve.router import Router
from jaxpar.serve.scheduler import Request
from jaxpar.serve.workers import StepOn, cut
from tests.serve_helpers import DENSE, plan, requests, some_params
from tests.serving_helpers import answers_alone, two_replicas


@pytest.fixture
def replicas():
    fleet = two_replicas()
    fleet.start()
    return fleet


# --- answers ---------------------------------------------------------------------------------


def test_every_replica_answers_as_the_reference_does(replicas):
    given = requests(14, seed=3)
    assert replicas.run(given) == answers_alone(given)
    assert set(replicas.router.num_given) == {"replica 0", "replica 1"}
    assert all(worker.scheduler.used_blocks == 0 for worker in replicas.workers)


def test_what_a_lost_replica_had_goes_on_elsewhere(replicas):
    given = [(0, request) for _, request in requests(10, seed=4)]
    numbers = [replicas.submit(request) for _, request in given]
    for _ in range(4):
        replicas.step()
    begun = replicas.begin(replicas.workers[0])
    replicas.lose("replica 0")
    assert replicas.finish(replicas.workers[0], begun) == []
    before = [replicas.answer(number) for number in numbers]
    assert any(before) and not replicas.is_idle
    while not replicas.is_idle:
        replicas.step()
    answers = [replicas.answer(number) for number in numbers]
    assert answers == answers_alone(given)
    assert all(answer[: len(b)] == b for answer, b in zip(answers, before, strict=True))


def test_without_a_replica_requests_fail_by_name(replicas):
    long = Request(prompt=(1, 2, 3), max_new_tokens=20)
    number = replicas.submit(long)
    for name in ("replica 0", "replica 1"):
        replicas.lose(name)
    assert replicas.is_idle
    with pytest.raises(LostError, match="Request 0 cannot go on after 0 of at most 20 tokens: all"):
        replicas.answer(number)
    with pytest.raises(LostError, match="all 2 replicas are lost"):
        replicas.submit(long)
    with pytest.raises(RequestError, match="no worker 'replica 0'"):
        replicas.lose("replica 0")
    with pytest.raises(RequestError, match="There is no request 1; 1 were submitted"):
        replicas.answer(1)


# --- routing ---------------------------------------------------------------------------------


def test_requests_go_where_least_is_left_to_do(replicas):
    short = Request(prompt=(1,) * 10, max_new_tokens=1)
    long = Request(prompt=(1,) * 20, max_new_tokens=12)
    for request in (long, short, short, short):
        replicas.submit(request)
    assert [len(worker.sequences) for worker in replicas.workers] == [1, 3]
    assert [worker.load for worker in replicas.workers] == [19 + 12, 3 * (9 + 1)]


def test_router_by_load_and_by_turn():
    by_load, by_turn = Router("load"), Router("turn")
    loads = {"a": 5, "b": 0, "c": 0}
    assert [by_load.choose(loads) for _ in range(3)] == ["b", "c", "b"]
    assert [by_turn.choose(loads) for _ in range(4)] == ["a", "b", "c", "a"]
    with pytest.raises(RequestError, match="'load', 'turn'"):
        Router("random")


# --- independence ----------------------------------------------------------------------------


def test_programs_of_replicas_join_none(replicas):
    found = replicas.require_independence()
    assert found.holds and found.num_programs == 4 and found.num_collectives > 0
    devices = [set(worker.devices) for worker in replicas.workers]
    assert not devices[0] & devices[1]


def program(body):
    """The audit of `body` on the shards of a vector over both axes, its devices and axes."""
    built = MeshSpec.parse("replica=2,tensor=2")
    mesh = built.build()
    spec = P(("replica", "tensor"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, spec))
    found = audit(jax.jit(mapped).lower(like).compile(), mesh=built.all_axes)
    return found, tuple(mesh.devices.flat), built.all_axes


def within(x):
    return x + lax.pcast(lax.psum(x, "tensor"), "tensor", to="varying")


def across(x):
    return within(x) + lax.pcast(lax.psum(x, "replica"), "replica", to="varying")


def to_the_next(x):
    return within(x) + lax.ppermute(x, "replica", [(0, 1)])


@pytest.mark.parametrize(
    ("body", "kinds"),
    [(within, []), (across, ["all-reduce"]), (to_the_next, ["collective-permute"])],
)
def test_a_planted_collective_across_replicas_is_found(body, kinds):
    found, devices, axes = program(body)
    replica_of = replicas_along(axes, "replica")
    assert replica_of == (0, 0, 1, 1)
    crossed = crossings("step", found, replica_of)
    assert [one.collective.kind for one in crossed] == kinds
    assert all(one.replicas == (0, 1) for one in crossed)
    whole = prove([Compiled(name="step", audit=found, devices=devices)], [devices[:2], devices[2:]])
    assert whole.holds == (not kinds) and whole.num_collectives == 1 + len(kinds)


def test_a_replica_whose_program_reaches_further_is_found(replicas, monkeypatch):
    found, devices, _ = program(across)
    far = Compiled(name="replica 0, decode", audit=found, devices=devices)
    monkeypatch.setattr(replicas.workers[0], "compiled", lambda: [far])
    with pytest.raises(IndependenceError, match=r"replica 0, decode: all-reduce .* replicas 0, 1"):
        replicas.require_independence()


def test_what_is_not_known_is_no_proof():
    found, devices, _ = program(within)
    cut_off = dataclasses.replace(found, program=dataclasses.replace(found.program, complete=False))
    silent = dataclasses.replace(
        found, collectives=tuple(dataclasses.replace(c, groups=()) for c in found.collectives)
    )
    for bad, message in ((cut_off, "not read to its end"), (silent, "is not known")):
        with pytest.raises(IndependenceError, match=message):
            crossings("step", bad, (0, 0, 1, 1))
    with pytest.raises(IndependenceError, match="runs on 4 devices, and replicas are given for 2"):
        crossings("step", found, (0, 1))
    one = Compiled(name="step", audit=found, devices=devices)
    with pytest.raises(IndependenceError, match="belongs to no replica"):
        prove([one], [devices[:2], devices[2:3]])
    with pytest.raises(IndependenceError, match="share no device"):
        prove([one], [devices[:3], devices[2:]])


# --- what is refused -------------------------------------------------------------------------


def test_devices_have_to_be_enough_and_different():
    small = plan("tensor=4")
    with pytest.raises(PlanError, match=r"4 \+ 4 \+ 4 = 12 devices, each its own, and 8 are there"):
        cut([small.mesh] * 3, jax.devices("cpu")[:8])
    with pytest.raises(PlanError, match="names 1 different devices, and mesh tensor=4 has 4"):
        StepOn(config=DENSE, plan=small, devices=(jax.devices("cpu")[0],) * 4)
    with pytest.raises(PlanError, match="num_replicas=0"):
        Replicas(DENSE, small, some_params(DENSE), num_replicas=0)
