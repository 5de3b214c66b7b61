"""Forward equations as patterns -> the block that the model repeats, found as the distance at which most of the FLOP comes again."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_hpc.kernels import Ints

_HELD = 0.5  # share of the FLOP that the repeated block must hold


@dataclass(frozen=True, slots=True)
class RepeatedBlock:
    """Equations [start, stop) repeat a block of `length` equations; where none does, start = stop and the length is 1.

    The first block counts by its FLOP, since it reads what no other block reads.
    """

    start: int
    stop: int
    length: int

    @property
    def times(self) -> int:
        """How many blocks there are; 1 where none is repeated."""
        return max(1, round((self.stop - self.start) / self.length))

    def places(self, num_equations: int) -> Ints:
        """For each position, how many equations lie between it and the next end of a block (as if there were blocks everywhere)."""
        return (self.stop - np.arange(num_equations)) % self.length


def find_block(flops: Sequence[float], patterns: Sequence[object]) -> RepeatedBlock:
    """The block with most FLOP, if its repeats hold at least half of the model's; `patterns` are equal for equations that repeat."""
    last: dict[object, int] = {}
    repeated: dict[int, float] = defaultdict(float)
    for position, (pattern, flop) in enumerate(zip(patterns, flops, strict=True)):
        if pattern in last:
            repeated[position - last[pattern]] += flop
        last[pattern] = position
    if repeated:
        length = max(repeated, key=lambda distance: (repeated[distance], -distance))
        start, stop = _longest_run(patterns, length)
        while start > 0 and flops[start - 1] == flops[start - 1 + length]:
            start -= 1
        if sum(flops[start:stop]) >= _HELD * sum(flops):
            return RepeatedBlock(start, stop, length)
    return RepeatedBlock(0, 0, 1)


def _longest_run(patterns: Sequence[object], length: int) -> tuple[int, int]:
    """The longest [start, stop) in which each equation equals the one `length` further."""
    same = np.array([first == second for first, second in zip(patterns, patterns[length:], strict=False)])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    longest = int((stops - starts).argmax())
    return int(starts[longest]), int(stops[longest]) + length
