"""Cuts as good as the best whose middle layers repeat one pattern, so that a block of the model is cut at one place (after Eq. 6).

A candidate is (start, length): the first layer ends at `start`, then `times` layers of `length` equations with equal codes, then the last.
Candidates that start nearer to the end of a block come first, so that a deeper model is cut at the same place of its blocks; of those at
one place, the one with the smallest deviation of FLOP is best.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Whole, inner, kernel
from alpa_hpc.layers.bottleneck import Limits
from alpa_hpc.layers.received import Reads, received_one_further

_EQUAL = 1e-9  # of deviations, which are sums of squared shares


class Repeats(NamedTuple):
    """Where layers may start and stop; of each equation its code, its distance from a block's end, and the FLOP before it in averages."""

    reads: Reads
    limits: Limits
    stops: Ints
    codes: Ints
    distances: Ints
    work: Floats


@kernel
def equal_middle(r: Repeats, times: Whole, most_sum: Real) -> tuple[Whole, Whole]:
    """The best (start, length) whose layers receive at most `most_sum` together; (0, 0) if there is none."""
    end = len(r.codes)
    best, distance, best_start, best_length = np.inf, end, 0, 0
    tails, band = _tails(r.reads, end), np.empty(end, np.int64)
    for length in range(1, (end - 2) // times + 1):
        start, distance, best = _best_start(r, times, length, most_sum, distance, best, tails, band)
        if start > 0:
            best_start, best_length = start, length
    return best_start, best_length


@inner
def _best_start(  # noqa: PLR0913 - a kernel sees arrays alone
    r: Repeats, times: Whole, length: Whole, most_sum: Real, distance: Whole, best: Real, tails: Ints, band: Ints
) -> tuple[Whole, Whole, Real]:
    """The best start for one length that is better than (distance, best), with its own; 0 and these if there is none."""
    end, span = len(r.codes), length * (times - 1)
    low = max(r.limits.lows[1], r.limits.lows[times + 1] - times * length)
    high = min(r.limits.highs[1], r.stops[0], min(r.limits.highs[times + 1], end - 1) - times * length)
    found, matches, is_filled, below = 0, 0, False, best - _EQUAL
    position = high + span - 1
    while position >= low:
        if r.codes[position] == r.codes[position + length]:
            matches += 1
        else:
            matches = 0
            if high <= position < low + span:
                break  # in the run of every start
        if position <= high and matches >= span and r.distances[position] <= distance:
            limit = below if r.distances[position] == distance else np.inf
            if _deviation_at_least(r, times, length, position) <= limit:
                if not is_filled:
                    _fill(r, length, band)
                    is_filled = True
                deviation = _deviation(r, times, length, position)
                if deviation <= limit and tails[position + times * length] + _middle(r, times, length, position, band) <= most_sum:
                    found, distance, below, best = position, r.distances[position], deviation, deviation
        position -= 1
    return found, distance, best


@inner
def _deviation_at_least(r: Repeats, times: Whole, length: Whole, start: Whole) -> Real:
    """A bound of `_deviation`: the same if all middle layers had equal FLOP; less what rounding may add."""
    stop, end = start + times * length, len(r.codes)
    middle = (r.work[stop] - r.work[start]) / times - 1.0
    return (r.work[start] - 1.0) ** 2 + (r.work[end] - r.work[stop] - 1.0) ** 2 + times * middle**2 - _EQUAL


@inner
def _deviation(r: Repeats, times: Whole, length: Whole, start: Whole) -> Real:
    """The sum over layers of the squared distance of FLOP from the average, in averages."""
    stop, end = start + times * length, len(r.codes)
    total = (r.work[start] - 1.0) ** 2 + (r.work[end] - r.work[stop] - 1.0) ** 2
    for number in range(times):
        total += (r.work[start + (number + 1) * length] - r.work[start + number * length] - 1.0) ** 2
    return total


@inner
def _tails(reads: Reads, end: Whole) -> Ints:
    """tails[i] = C(i, end)."""
    tails = np.zeros(end + 1, np.int64)
    for start in range(end):
        tails[start + 1] = tails[start]
        for row in range(reads.by_reader[start], reads.by_reader[start + 1]):
            tails[start + 1] -= reads.sizes[row]
        for row in range(reads.by_first[start + 1], reads.by_first[start + 2]):
            tails[start + 1] += reads.first_sizes[row]
    return tails


@inner
def _fill(r: Repeats, length: Whole, band: Ints) -> None:
    """band[i] = C(i, i + length)."""
    band[0] = 0
    for start in range(len(r.codes) - length):
        band[start + 1] = received_one_further(r.reads, start, start + length, band[start])


@inner
def _middle(r: Repeats, times: Whole, length: Whole, start: Whole, band: Ints) -> Real:
    """What the middle layers receive together; infinity if a layer breaks its limits."""
    stop, end = start + times * length, len(r.codes)
    if not (r.limits.first[stop] <= end <= r.stops[stop]):
        return np.inf
    total = 0.0
    for at in range(start, stop, length):
        if not (r.limits.first[at] <= at + length <= r.stops[at]):
            return np.inf
        total += band[at]
    return total
