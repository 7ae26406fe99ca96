"""Which blocks of the cache are free. On the host, in plain Python.

Source: Kwon et al. 2023 (PagedAttention) §4.2.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """The blocks of one part of the batch, numbered from 0: each is free, or somebody's."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num: int) -> list[int] | None:
        """`num` blocks that nobody has; None, and nothing changed, where there are too few."""
        assert num >= 0
        if num > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks that were taken, each once. What they hold stays until somebody overwrites it."""
        for block in blocks:
            assert block in self._taken, f"block {block} is given back, and nobody has it"
            self._taken.remove(block)
            self._free.append(block)


def blocks_of(num_tokens: int, block_len: int) -> int:
    """Blocks that so many tokens of one sequence take."""
    return -(-num_tokens // block_len)
