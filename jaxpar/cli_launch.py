"""What `jaxpar launch` does between its options and its output."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.launch import Result
from jaxpar.launch.supervisor import Ended


def told(result: Result) -> Iterator[str]:
    """What is said after the ranks have ended: nothing at all where all went well.

    Rank 0's lines have been shown as they came; any other's last ones are here.
    """
    report = result.report
    if report.outcome == "stopped":
        yield f"jaxpar launch: stopped after {report.seconds:.0f} s; no process is left."
    first = result.first
    if first is not None:
        others = [rank for rank in report.ranks if rank.how and rank is not first]
        yield (
            f"jaxpar launch: rank {first.rank} failed first: it {first.how}, "
            f"{report.seconds:.0f} s after the start. All {len(report.ranks)} processes are ended."
        )
        yield from _last_lines(first)
        for rank in (report.ranks[index] for index in report.leavers):
            yield f"Before that, rank {rank.rank} had ended or begun to exit."
            yield from _last_lines(rank)
        for rank in others:
            yield f"Then rank {rank.rank} {rank.how}."
    if report.num_left:
        yield f"jaxpar launch: {report.num_left} processes are left that even SIGKILL does not end."


def _last_lines(rank: Ended) -> Iterator[str]:
    if rank.rank == 0:
        yield "Its last lines are above."
        return
    yield f"Its last lines ({len(rank.last_lines)}):" if rank.last_lines else "It printed nothing."
    yield from (f"  {line}" for line in rank.last_lines)
