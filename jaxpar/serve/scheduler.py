"""Who runs in which step: continuous batching with chunked prefill, on the host, without devices.

Requests wait in the order of their arrival. One is admitted when a slot and blocks for what it has
are free; from then on its prompt goes through prefill steps, chunk by chunk, and behind the last of
them a decode step extends it by one token, beside all others that are as far. It leaves when it is
done, and the next one takes its slot in the step after. So a step's batch changes all the time, and
a long prompt holds up nobody for longer than a chunk.

When the cache is full there are two ways, and neither loses a token:

preempt   a sequence takes blocks as it grows. Where none is free, the one that was admitted last
          gives its blocks back and waits, first in line, to be computed again from its prompt and
          what was answered so far.
queue     a sequence is admitted with all blocks it can ever fill, and nobody is ever preempted.

A request fits an empty cache, or is refused when it is submitted; so the one admitted first always
gets on, and everybody ends.

Sources: Yu et al. 2022 (Orca) §3; Kwon et al. 2023 (PagedAttention) §4.5; Agrawal et al. 2023
(SARATHI) §4 for chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpar.errors import RequestError, is_whole, require_choice, require_whole, shown
from jaxpar.model.config import ModelConfig
from jaxpar.serve.cache import Rows, idle_rows, narrowed
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.serve.pool import BlockPool, blocks_of
from jaxpar.serve.sampling import Sampling

Admission = Literal["preempt", "queue"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued. Raises RequestError for what no plan could serve.

    max_new_tokens: most tokens of the answer.
    stop_tokens: tokens after which an answer ends; the one it ends with belongs to it.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "stop_tokens"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(is_whole(token) for token in value):
                raise RequestError(
                    f"{name}={shown(value)} ({type(value).__name__}) must be a tuple of whole "
                    f"numbers, such as (1, 2, 3); of an array, tuple(map(int, array))."
                )
        if not self.prompt:
            raise RequestError("prompt=() is empty, and there is nothing to continue.")
        require_whole(RequestError, "max_new_tokens", self.max_new_tokens)
        if not isinstance(self.sampling, Sampling):
            raise RequestError(
                f"sampling={shown(self.sampling)} must be a Sampling, such as "
                f"Sampling(temperature=0.8, top_k=32, seed=1)."
            )

    @property
    def max_len(self) -> int:
        """Tokens that are ever in the cache: the last one of the answer never gets there."""
        return len(self.prompt) + self.max_new_tokens - 1

    def check(self, config: ModelConfig, plan: ServePlan) -> None:
        """Raise RequestError for what this model, or this plan's cache, has no place for."""
        for token in (*self.prompt, *self.stop_tokens):
            if not 0 <= token < config.vocab:
                raise RequestError(
                    f"The request has a token {shown(token)}, and {config.name} has vocab="
                    f"{config.vocab}: tokens go from 0 to {config.vocab - 1}."
                )
        if len(self.prompt) + self.max_new_tokens > plan.max_seq_len:
            room = plan.max_seq_len - len(self.prompt)
            raise RequestError(
                f"A prompt of {len(self.prompt)} tokens and max_new_tokens={self.max_new_tokens} "
                f"are more than the plan's max_seq_len={plan.max_seq_len}. "
                + (f"Nearest max_new_tokens: {room}." if room > 0 else "Shorten the prompt.")
            )
        self.sampling.check(plan.max_top_k)


@dataclass(kw_only=True)
class Sequence:
    """A request on its way.

    tokens: prompt and answer so far. num_cached: of these, those whose keys and values are there.
    shard, slot: its part of the batch and its slot in there; -1 while it waits. blocks: its own,
    in order. admitted: how many were admitted before it. num_preempted: how often it was.
    """

    id: int
    request: Request
    tokens: list[int]
    num_cached: int = 0
    shard: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    admitted: int = -1
    num_preempted: int = 0

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def num_left(self) -> int:
        """Tokens that have to go through the model before the next one can be chosen."""
        return len(self.tokens) - self.num_cached

    @property
    def is_done(self) -> bool:
        answer = self.answer
        return bool(answer) and (
            len(answer) >= self.request.max_new_tokens or answer[-1] in self.request.stop_tokens
        )

    def without_place(self) -> Sequence:
        """The same before it was admitted anywhere: all its tokens have to be computed."""
        return Sequence(
            id=self.id,
            request=self.request,
            tokens=list(self.tokens),
            num_preempted=self.num_preempted,
        )


class Arrivals:
    """Requests, each with the number of the step before which it comes, in any order.

    Raises RequestError for a number that is none.
    """

    def __init__(self, given: Iterable[tuple[int, Request]]) -> None:
        self.given = list(given)
        for step, _ in self.given:
            require_whole(RequestError, "a request's step of arrival", step, at_least=0)
        order = sorted(range(len(self.given)), key=lambda i: self.given[i][0])
        self._coming = deque(order)

    def due(self, step: int) -> Iterator[tuple[int, Request]]:
        """Those that come before this step and have not come yet: (place in `given`, request)."""
        while self._coming and self.given[self._coming[0]][0] <= step:
            i = self._coming.popleft()
            yield i, self.given[i][1]

    def __bool__(self) -> bool:
        """Whether some are still to come."""
        return bool(self._coming)


class Part(NamedTuple):
    """A row of a step: whose next `num_tokens` tokens it holds."""

    row: int
    sequence: Sequence
    num_tokens: int


class Work(NamedTuple):
    """A step to be run: `rows` for its program, and what they are."""

    kind: Kind
    rows: Rows
    parts: tuple[Part, ...]


class NewToken(NamedTuple):
    """A token of an answer, and whether it is the last one."""

    id: int
    token: int
    is_last: bool


class Scheduler:
    """All sequences of one engine: those that wait, those that run, and the blocks they have.

    For each step: `prefill()`, run what it returns, `finish()` with its tokens; then the same with
    `decode()`. Either may return None where there is nothing to do.
    """

    def __init__(
        self, config: ModelConfig, plan: ServePlan, *, admission: Admission = "preempt"
    ) -> None:
        require_choice(RequestError, "admission", admission, ("preempt", "queue"))
        self.config, self.plan, self.admission = config, plan, admission
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pools = [BlockPool(plan.blocks_per_shard) for _ in range(plan.num_batch_shards)]
        slots = plan.num_slots // plan.num_batch_shards
        self._free_slots = [set(range(slots)) for _ in self.pools]
        self.num_preempted = self._num_submitted = self._num_admitted = 0

    @property
    def num_slots(self) -> int:
        """Of one part of the batch."""
        return self.plan.num_slots // self.plan.num_batch_shards

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def used_blocks(self) -> int:
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def submit(self, request: Request) -> Sequence:
        """Take a request. Raises RequestError for one that could never be served."""
        request.check(self.config, self.plan)
        sequence = Sequence(id=self._num_submitted, request=request, tokens=list(request.prompt))
        self._num_submitted += 1
        self.waiting.append(sequence)
        return sequence

    # --- coming and going --------------------------------------------------------------------

    def admit(self) -> None:
        """Let those who wait in, in order, as long as there is a slot and room for the first."""
        while self.waiting:
            sequence = self.waiting[0]
            most = sequence.request.max_len if self.admission == "queue" else len(sequence.tokens)
            need = blocks_of(most, self.plan.block_len)
            shards = [i for i, slots in enumerate(self._free_slots) if slots]
            if not shards:
                return
            shard = max(shards, key=lambda i: self.pools[i].num_free)
            blocks = self.pools[shard].take(need)
            if blocks is None:
                return
            self.waiting.popleft()
            slot = min(self._free_slots[shard])
            self._free_slots[shard].remove(slot)
            sequence.shard, sequence.slot, sequence.blocks = shard, slot, blocks
            sequence.admitted = self._num_admitted
            self._num_admitted += 1
            self.running.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pools[sequence.shard].give_back(sequence.blocks)
        self._free_slots[sequence.shard].add(sequence.slot)
        sequence.shard = sequence.slot = -1
        sequence.blocks = []

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's slot and blocks away; it waits first in line."""
        self._leave(sequence)
        sequence.num_cached = 0
        sequence.num_preempted += 1
        self.num_preempted += 1
        self.waiting.appendleft(sequence)

    # --- steps -------------------------------------------------------------------------------

    def prefill(self) -> Work | None:
        """The next chunks of those with more than a token left, admitted first, first.

        A prompt may have several chunks in one step, if others leave rows free: each row's keys
        are written before any row attends, or in an earlier turn of a pipeline.
        """
        self.admit()
        rows, parts = idle_rows(self.plan, "prefill"), list[Part]()
        num_rows = self.plan.num_rows("prefill") // len(self.pools)
        for shard in range(len(self.pools)):
            free = list(range(shard * num_rows, (shard + 1) * num_rows))
            for sequence in self._of(shard):
                start = sequence.num_cached
                fewest = 2  # a single token is a decode step's, unless its others are here
                while free and len(sequence.tokens) - start >= fewest:
                    fewest = 1
                    num = min(self.plan.chunk_len, len(sequence.tokens) - start)
                    parts.append(Part(free.pop(0), sequence, num))
                    self._fill(rows, parts[-1], start)
                    start += num
        return Work("prefill", narrowed(rows, self.plan), tuple(parts)) if parts else None

    def decode(self) -> Work | None:
        """The last token of everybody whose others are all in the cache."""
        self.admit()
        for shard, pool in enumerate(self.pools):
            for sequence in self._of(shard):
                if sequence.shard < 0 or sequence.num_left != 1:  # preempted meanwhile
                    continue
                while sequence.num_cached >= len(sequence.blocks) * self.plan.block_len:
                    if block := pool.take(1):
                        sequence.blocks += block
                        continue
                    last = self._of(shard)[-1]
                    self.preempt(last)
                    if last is sequence:
                        break
        rows = idle_rows(self.plan, "decode")
        parts = [
            Part(sequence.shard * self.num_slots + sequence.slot, sequence, 1)
            for sequence in self.running
            if sequence.num_left == 1
        ]
        for part in parts:
            self._fill(rows, part, part.sequence.num_cached)
        return Work("decode", narrowed(rows, self.plan), tuple(parts)) if parts else None

    def finish(self, work: Work, token_B: Listed[int] | np.ndarray[Any, Any]) -> list[NewToken]:
        """What a step has done: `token_B` are the tokens it chose, of each row."""
        found = []
        for row, sequence, num_tokens in work.parts:
            sequence.num_cached += num_tokens
            if sequence.num_left:
                continue
            token = int(token_B[row])
            sequence.tokens.append(token)
            found.append(NewToken(sequence.id, token, sequence.is_done))
            if sequence.is_done:
                self._leave(sequence)
        return found

    def _of(self, shard: int) -> list[Sequence]:
        """Running sequences of a part of the batch, admitted first, first."""
        mine = [sequence for sequence in self.running if sequence.shard == shard]
        return sorted(mine, key=lambda sequence: sequence.admitted)

    def _fill(self, rows: Rows, part: Part, start: int) -> None:
        row, sequence, num = part
        sampling = sequence.request.sampling
        for name, value in (
            ("start", start),
            ("num_tokens", num),
            ("seed", sampling.seed),
            ("temperature", sampling.temperature),
            ("top_k", sampling.top_k),
            ("top_p", sampling.top_p),
        ):
            getattr(rows, name)[row] = value
        tokens, table = np.asarray(rows.tokens), np.asarray(rows.table)
        tokens[row, :num] = sequence.tokens[start : start + num]
        table[row, : len(sequence.blocks)] = sequence.blocks
