"""Rows of inference: requests that come and go on a mesh, held against each one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.audit import audit
from jaxpar.audit.asked import asked
from jaxpar.audit.compare import compare
from jaxpar.model.config import ModelConfig
from jaxpar.model.transformer import Params, init_params
from jaxpar.serve.closed_form import expected
from jaxpar.serve.engine import Engine
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.serve.reference import Reference
from jaxpar.serve.sampling import Sampling
from jaxpar.serve.scheduler import Request
from jaxpar.serve.step import ServeStep
from jaxpar.serve.variants import MAX_SEQ_LEN, ServingVariant
from jaxpar.text import Corpus
from jaxpar.tour.row import Row

NUM_REQUESTS = 12


@dataclass(frozen=True, kw_only=True)
class ServingRow(Row):
    """num_tokens: of all answers, those that steps of this kind chose; num_wrong: those that are
    not what the request alone gets on one device."""

    plan: ServePlan
    num_tokens: int
    num_wrong: int

    @property
    def numbers_agree(self) -> bool:
        return self.num_wrong == 0

    def numbers(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_wrong": self.num_wrong}

    def told(self) -> list[str]:
        return [f"wrong {self.num_wrong} of {self.num_tokens}"]

    def plan_json(self) -> dict[str, Any]:
        return {**asdict(self.plan), "mesh": dict(self.plan.mesh.named_axes)}


class Alone(NamedTuple):
    """A model's whole parameters, and its answers to the requests, each by itself."""

    params: Params
    answers: list[tuple[int, ...]]


class Served(NamedTuple):
    """A step, and of each kind of it (tokens chosen, wrong ones among them)."""

    step: ServeStep
    tokens: dict[Kind, tuple[int, int]]


class Services:
    """Requests of one corpus served under each plan, once for both kinds of step."""

    def __init__(self, corpus: Corpus) -> None:
        self._requests = arrivals(corpus)
        self._served: dict[Any, Served] = {}
        self._alone: dict[ModelConfig, Alone] = {}

    def take_row(self, variant: ServingVariant, config: ModelConfig) -> ServingRow:
        """Serve, audit and compare; nothing is compiled twice."""
        plan, kind = variant.plan(), variant.kind
        if (config, plan) not in self._served:
            self._served[config, plan] = self._serve(config, plan)
        step, tokens = self._served[config, plan]
        lines = compare(
            expected(config, plan, kind),
            asked(step.jitted[kind].trace(*step.abstract_inputs(kind)).jaxpr),
            audit(step.compiled(kind), mesh=plan.mesh.all_axes),
        )
        num_tokens, num_wrong = tokens[kind]
        return ServingRow(
            strategy=variant.name,
            plan=plan,
            lines=lines,
            num_tokens=num_tokens,
            num_wrong=num_wrong,
        )

    def alone(self, config: ModelConfig) -> Alone:
        """What each request gets by itself, on one device."""
        if config not in self._alone:
            params = outspoken_params(config)
            reference = Reference(config, params, MAX_SEQ_LEN)
            answers = [reference(request).tokens for _, request in self._requests]
            self._alone[config] = Alone(params, answers)
        return self._alone[config]

    def _serve(self, config: ModelConfig, plan: ServePlan) -> Served:
        params, wanted = self.alone(config)
        step = ServeStep(config=config, plan=plan)
        engine = Engine(step, step.place(params))
        answers, _ = engine.run(self._requests)
        wrong = [
            [i >= len(got) or i >= len(want) or got[i] != want[i]
             for i in range(max(len(got), len(want)))]
            for got, want in zip(answers, wanted, strict=True)
        ]  # fmt: skip
        first, later = [of[0] for of in wrong], [it for of in wrong for it in of[1:]]
        return Served(
            step=step,
            tokens={"prefill": (len(first), sum(first)), "decode": (len(later), sum(later))},
        )


def arrivals(corpus: Corpus) -> Sequence[tuple[int, Request]]:
    """(step before which it comes, request): pieces of text, every other one sampled."""
    draw = np.random.default_rng(0)
    text_BS = corpus.batch(0, batch_size=NUM_REQUESTS, seq_len=MAX_SEQ_LEN // 2).tokens_BS
    found = []
    for i, tokens_S in enumerate(text_BS):
        sampling = Sampling(temperature=1.0, top_k=8, seed=i) if i % 2 else Sampling()
        request = Request(
            prompt=tuple(map(int, tokens_S[: draw.integers(1, len(tokens_S))])),
            max_new_tokens=int(draw.integers(2, 16)),
            sampling=sampling,
        )
        found.append((int(draw.integers(0, 6)), request))
    return found


def outspoken_params(config: ModelConfig) -> Params:
    """Fresh ones, with matrices six times as large: then each prompt has an answer of its own."""
    params = jax.device_get(jax.jit(lambda: init_params(config, 0))())
    return jax.tree.map(lambda p: p if (p == 1).all() else 6 * p, params)
