"""When a rank that shows no sign of life has stalled, and when it is only busy."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_STALL_S = 20.0
"""Without a sign, where steps are quick; what is slow by nature gets more (see `Watch.limit_s`)."""

FOLLOW_S = 15.0
"""A rank that ends waits for the others, which wait for it if it should not have ended."""

FINISH_S = 60.0
"""The same, where others are through with their steps and may wait for a disk."""

PATIENCE = 5.0
"""Times the longest step so far."""

MIN_BUSY = 0.05
"""CPUs in use by a process, below which it waits for something rather than compiles."""


@dataclass(kw_only=True)
class Watch:
    """The signs of life of one rank; times in seconds on any one clock.

    stall_s: what the user set; None to go by DEFAULT_STALL_S and how long steps take.
    """

    stall_s: float | None = None
    num_beats: int = 0
    last_beat_s: float = 0.0
    is_on: bool = False
    announced_s: float | None = None
    """How long the work after the last beat may take, if the rank said so."""
    is_compiling: bool = False
    """That this work takes CPU time, or it is none."""
    _first_wait_s: float = 0.0
    _longest_wait_s: float = field(default=0.0)

    def beat(self, now_s: float, *, within_s: float | None, compiling: bool) -> None:
        """A step begins, or anything else that counts as progress."""
        if self.is_on:
            waited_s = now_s - self.last_beat_s
            if self.announced_s is None:
                self._longest_wait_s = max(self._longest_wait_s, waited_s)
            self._first_wait_s = self._first_wait_s or waited_s
        self.num_beats += 1
        self.last_beat_s, self.is_on = now_s, True
        self.announced_s, self.is_compiling = within_s, compiling

    def rest(self, now_s: float) -> None:
        """No more beats are to be expected until the next one."""
        self.is_on, self.is_compiling, self.announced_s = False, False, None
        self.last_beat_s = now_s

    def excuse(self, now_s: float) -> None:
        """It could not have beaten: what it prints finds no reader."""
        self.last_beat_s = now_s

    def limit_s(self) -> float:
        """Seconds without a beat that are too many.

        A user's figure counts as it is. Otherwise slow steps get more: the first one, which may
        have compiled, is as long as a step can be; later the longest so far, five times.
        """
        if self.stall_s is not None:
            usual_s = self.stall_s
        elif self._longest_wait_s:
            usual_s = max(DEFAULT_STALL_S, PATIENCE * self._longest_wait_s)
        else:
            usual_s = max(DEFAULT_STALL_S, self._first_wait_s)
        return usual_s if self.announced_s is None else max(usual_s, self.announced_s)

    def is_quiet(self, now_s: float, other_left_s: float, last_busy_s: float) -> bool:
        """Whether it seems to wait for a rank that began to exit, and should not have.

        Who is not watched may have work to finish alone; that takes CPU time, or a disk's.
        """
        limit_s = self.limit_s()
        if limit_s <= DEFAULT_STALL_S:
            limit_s = min(limit_s, FOLLOW_S)
        if self.num_beats and not self.is_on:
            limit_s = max(limit_s, FINISH_S)
        last_sign_s = max(other_left_s, self.last_beat_s, 0.0 if self.is_on else last_busy_s)
        return now_s - last_sign_s > limit_s

    def is_stalled(self, now_s: float, last_busy_s: float) -> bool:
        """`last_busy_s` is when any rank was last seen to use its CPU."""
        if not self.is_on:
            return False
        if now_s - self.last_beat_s > self.limit_s():
            return True
        idle_s = now_s - max(self.last_beat_s, last_busy_s)
        return self.is_compiling and idle_s > (self.stall_s or DEFAULT_STALL_S)
