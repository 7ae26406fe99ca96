"""Any plan is one device's equal, in numbers and in what it communicates, or is refused by name.

`experiments/random_plans.py` draws as many as you like; these are the same, fewer.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import jax
import pytest

import jaxpar.train
from jaxpar.mesh import MeshSpec
from tests.helpers import SMALL
from tests.random_plans import Drawn, Judge, draw, draw_model, factorings, numbered

NUM_MODELS, NUM_PLANS, NUM_TRAINED = 6, 11, 3
"""Of as many models at least so many plans each, and of these so many that are trained."""


@functools.cache
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("number", range(NUM_MODELS))
def test_random_plans(number):
    """Drawn by a plain generator: hypothesis likes to repeat itself, and each plan is compiled."""
    config = draw_model(random.Random(number).choice)
    ended: Counter[str] = Counter()
    for i in range(20 * NUM_PLANS):
        if ended["equal"] >= NUM_TRAINED and ended.total() >= NUM_PLANS:
            break
        drawn = draw(random.Random(f"{number} {i}").choice, config)
        outcome = judge()(drawn)
        ended[outcome.kind] += 1
        assert outcome.kind in ("equal", "refused"), f"{drawn}\n{outcome}"
    assert ended["equal"] >= NUM_TRAINED and ended.total() >= NUM_PLANS, ended


def test_every_way_to_spread_the_devices_is_drawn():
    assert [len(factorings(n)) for n in range(1, 9)] == [1, 7, 7, 28, 7, 49, 7, 84]
    axes = [MeshSpec.parse(numbered(seed).mesh).named_axes for seed in range(3000)]
    for n in (2, 4, 8):
        for factoring in factorings(n):
            assert {axis: size for axis, size in factoring.items() if size > 1} in axes


def test_a_plan_that_trains_otherwise_or_breaks_is_told(monkeypatch):
    """The judge's own check: a gradient left unreduced, a collective too many, an exception."""
    drawn = Drawn(
        config=SMALL,
        mesh="data=2",
        fields={"batch_size": 16, "seq_len": 16, "compute_dtype": "float32"},
    )
    assert judge()(drawn).kind == "equal"
    with monkeypatch.context() as patch:
        patch.setattr(jaxpar.train, "clip", lambda gradients, *_: twice(gradients))
        assert "parameters differ" in judge()(drawn).why
    with monkeypatch.context() as patch:
        patch.setattr(jaxpar.train, "sum_stats", lambda stats: 1 // 0)
        outcome = judge()(drawn)
    assert (outcome.kind, outcome.why[:17]) == ("crashed", "ZeroDivisionError")
    refused = judge()(dataclasses.replace(drawn, mesh="data=3"))
    assert refused.kind == "refused" and "batch_size=16" in refused.why


def twice(gradients):
    return jax.tree.map(lambda g: 2 * g, gradients)
