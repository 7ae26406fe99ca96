"""What a user of a server feels, and what its owner pays for: times of tokens, and their rates.

ttft      time to first token: from a request's arrival to its first token, waiting included.
tpot      time per output token behind the first: (last token - first token) / (tokens - 1), of each
          request with at least two. The first token is excluded; it is ttft's.
gap       between one token of a request and its next: tpot's means hide a stall, its p99 does not.
latency   from a request's arrival to its last token.

Percentiles are by nearest rank: the smallest value that at least so many percent do not exceed. So
each is a value that somebody had, and the p99 of fewer than 100 is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and percentiles of some times, in seconds; None where there was nothing to measure."""

    num: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(num=0, mean=None, p50=None, p90=None, p99=None)
        ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES}
        return cls(num=len(ordered), mean=math.fsum(ordered) / len(ordered), **ranks)


@dataclass(kw_only=True)
class Times:
    """Of one request: when it came, and when each of its tokens was there."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        num = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (num - 1) if num > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def latency_s(self) -> float:
        return self.token_s[-1] - self.arrival_s


class Level:
    """A quantity that changes at moments, and its mean and peak over the time between them."""

    def __init__(self) -> None:
        self._value = self._since = self._area = 0.0
        self.peak = 0.0

    def set(self, time_s: float, value: float) -> None:
        """`value` holds from `time_s` on; times do not go back."""
        self._area += self._value * (time_s - self._since)
        self._value, self._since = value, time_s
        self.peak = max(self.peak, value)

    def mean(self, until_s: float) -> float:
        total = self._area + self._value * (until_s - self._since)
        return total / until_s if until_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerUse:
    """Of one worker: parts of the time it computed and of its blocks that somebody had, steps."""

    name: str
    busy: float
    cache_mean: float
    cache_peak: float
    num_prefills: int
    num_decodes: int


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of a whole trace. Rates are over the time from its start to the last token."""

    num_requests: int
    num_tokens: int
    duration_s: float
    ttft_s: Spread
    tpot_s: Spread
    gap_s: Spread
    latency_s: Spread
    workers: tuple[WorkerUse, ...]
    num_preempted: int
    handover_bytes: int

    @classmethod
    def of(
        cls,
        requests: Sequence[Times],
        workers: Sequence[WorkerUse],
        num_preempted: int,
        handover_bytes: int,
    ) -> Measures:
        """requests: those that ended, each with a token at least."""
        return cls(
            num_requests=len(requests),
            num_tokens=sum(len(times.token_s) for times in requests),
            duration_s=max((times.token_s[-1] for times in requests), default=0.0),
            ttft_s=Spread.of([times.ttft_s for times in requests]),
            tpot_s=Spread.of([t for times in requests if (t := times.tpot_s) is not None]),
            gap_s=Spread.of([gap for times in requests for gap in times.gaps_s]),
            latency_s=Spread.of([times.latency_s for times in requests]),
            workers=tuple(workers),
            num_preempted=num_preempted,
            handover_bytes=handover_bytes,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers; those of prompts are no output."""
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> dict[str, Any]:
        rates = {"tokens_per_s": self.tokens_per_s, "requests_per_s": self.requests_per_s}
        return {**asdict(self), "workers": [asdict(one) for one in self.workers], **rates}
