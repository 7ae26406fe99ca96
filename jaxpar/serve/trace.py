"""Requests as they arrive: made from a seed, so that every comparison serves the same ones.

Arrivals are a Poisson process: times between them are exponential. Lengths of prompts are
log-normal (few long ones, most of the tokens in these), those of answers geometric (each further
token is as likely as the one before); both are cut off where the plan has no place. Prompts are
random tokens. The distributions are this project's choice, not fitted to anybody's traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.errors import RequestError, require_positive, require_whole
from jaxpar.serve.sampling import Sampling
from jaxpar.serve.scheduler import Request

SIGMA = 0.8
"""Of the logarithm of a prompt's length."""


class Arrival(NamedTuple):
    """A request, and when it comes, in seconds from the start."""

    time_s: float
    request: Request


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What comes, and when. Raises RequestError for what cannot be.

    requests_per_s: mean rate. prompt_len, answer_len: means before the longest are cut off.
    max_seq_len: most tokens of prompt and answer together. sampled: part of the requests that draw
    their tokens (temperature 1); the others take the best. vocab: tokens go from 0 to vocab - 1.
    """

    num_requests: int
    requests_per_s: float
    prompt_len: int
    answer_len: int
    max_seq_len: int
    vocab: int
    sampled: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_requests", "prompt_len", "answer_len", "vocab"):
            require_whole(RequestError, field, getattr(self, field))
        require_whole(RequestError, "seed", self.seed, at_least=0)
        require_whole(RequestError, "max_seq_len", self.max_seq_len, at_least=2)
        require_positive(RequestError, "requests_per_s", self.requests_per_s, 10.0)
        if not 0 <= self.sampled <= 1:
            raise RequestError(f"sampled={self.sampled} must be a part of all requests, 0 to 1.")
        if self.prompt_len + self.answer_len > self.max_seq_len:
            room = self.max_seq_len - self.prompt_len
            nearest = f"answer_len: {room}" if room > 0 else f"prompt_len: {self.max_seq_len - 1}"
            raise RequestError(
                f"prompt_len={self.prompt_len} and answer_len={self.answer_len} are means, and "
                f"together more than max_seq_len={self.max_seq_len}. Nearest {nearest}."
            )

    def arrivals(self) -> list[Arrival]:
        """The requests in the order of their times, the same for the same fields."""
        draw = np.random.default_rng(self.seed)
        times = np.cumsum(draw.exponential(1 / self.requests_per_s, self.num_requests))
        mean = np.log(self.prompt_len) - SIGMA**2 / 2
        found = []
        for number, time_s in enumerate(times):
            prompt_len = int(np.clip(draw.lognormal(mean, SIGMA), 1, self.max_seq_len - 1))
            room = self.max_seq_len - prompt_len
            answer_len = min(int(draw.geometric(1 / self.answer_len)), room)
            prompt = tuple(map(int, draw.integers(0, self.vocab, prompt_len)))
            is_sampled = draw.random() < self.sampled
            request = Request(
                prompt=prompt,
                max_new_tokens=answer_len,
                sampling=Sampling(temperature=1.0, seed=number) if is_sampled else Sampling(),
            )
            found.append(Arrival(float(time_s), request))
        return found
