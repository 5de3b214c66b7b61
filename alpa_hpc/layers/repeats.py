"""Cuts as good as the best whose middle layers repeat one pattern, so that a block of the model is cut at one place (after Eq. 6).

A candidate is (start, length): the first layer ends at `start`, then `times` layers of `length` equations with equal codes, then the last.
Which place of the block is cut must not depend on the depth of the model, so that a deeper one has the same middle layers: it is the place
of the candidate that had the smallest variance of FLOP if the first layer lost the blocks that are too many for equal layers (or got those
that are missing). Among the candidates at that place the one with the smallest variance as it is is taken.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Whole, inner, kernel
from alpa_hpc.layers.blocks import RepeatedBlock
from alpa_hpc.layers.bottleneck import Limits
from alpa_hpc.layers.received import Reads, received_one_further

_EQUAL = 1e-9  # of deviations, which are sums of squared shares
_ANYWHERE = -1


class Repeats(NamedTuple):
    """Where layers may start and stop; of each equation its code, its place in a block, and the FLOP before it in averages."""

    reads: Reads
    limits: Limits
    stops: Ints
    codes: Ints
    places: Ints
    work: Floats


class _Wanted(NamedTuple):
    """Which candidates: those that receive at most so much together and start at `place`.

    `evened`, if not 0, is how many equations all blocks have: what they are more than equal layers would take is left out of the first.
    """

    most_sum: float
    place: int
    evened: int


def equal_middle(r: Repeats, times: int, most_sum: float, block: RepeatedBlock) -> tuple[int, ...]:
    """The cuts of the best candidate whose layers receive at most `most_sum` together; none if there is no candidate."""
    start, length = _best_candidate(r, times, _Wanted(most_sum, _ANYWHERE, block.times * block.length))
    if length == 0:
        return ()
    start, length = map(int, _best_candidate(r, times, _Wanted(most_sum, int(r.places[start]), 0)))
    return tuple(range(start, start + times * length + 1, length))


@kernel
def _best_candidate(r: Repeats, times: Whole, wanted: _Wanted) -> tuple[Whole, Whole]:
    """The (start, length) with the smallest deviation; (0, 0) if there is none."""
    end = len(r.codes)
    best, best_start, best_length = np.inf, 0, 0
    tails, band = _tails(r.reads, end), np.empty(end, np.int64)
    for length in range(1, (end - 2) // times + 1):
        start, deviation = _best_start(r, times, length, wanted, best - _EQUAL, tails, band)
        if start > 0:
            best, best_start, best_length = deviation, start, length
    return best_start, best_length


@inner
def _best_start(  # noqa: PLR0913 - a kernel sees arrays alone
    r: Repeats, times: Whole, length: Whole, wanted: _Wanted, below: Real, tails: Ints, band: Ints
) -> tuple[Whole, Real]:
    """The best start for one length, the first of equals, with its deviation, which is at most `below`; 0 if there is none."""
    end, span = len(r.codes), length * (times - 1)
    low = max(r.limits.lows[1], r.limits.lows[times + 1] - times * length)
    high = min(r.limits.highs[1], r.stops[0], min(r.limits.highs[times + 1], end - 1) - times * length)
    found, matches, is_filled = 0, 0, False
    position = high + span - 1
    while position >= low:
        if r.codes[position] == r.codes[position + length]:
            matches += 1
        else:
            matches = 0
            if high <= position < low + span:
                break  # in the run of every start
        is_candidate = position <= high and matches >= span and wanted.place in (_ANYWHERE, r.places[position])
        if is_candidate and _deviation_at_least(r, times, length, position, wanted.evened) <= below:
            if not is_filled:
                _fill(r, length, band)
                is_filled = True
            deviation = _deviation(r, times, length, position, wanted.evened)
            if deviation <= below and tails[position + times * length] + _middle(r, times, length, position, band) <= wanted.most_sum:
                found, below = position, deviation
        position -= 1
    return found, below


@inner
def _evened(r: Repeats, times: Whole, length: Whole, start: Whole, evened: Whole) -> tuple[Real, Real]:
    """FLOP of the first layer without the blocks that are too many, and the average that is left; both in averages of the whole."""
    if evened == 0:
        return r.work[start], 1.0
    middle = (r.work[start + times * length] - r.work[start]) / times
    surplus = (evened / length - (times + 2)) * middle
    return r.work[start] - surplus, 1.0 - surplus / (times + 2)


@inner
def _deviation_at_least(r: Repeats, times: Whole, length: Whole, start: Whole, evened: Whole) -> Real:
    """A bound of `_deviation`: the same if all middle layers had equal FLOP; less what rounding may add."""
    stop, end = start + times * length, len(r.codes)
    first, average = _evened(r, times, length, start, evened)
    if average < _EQUAL:
        return np.inf  # the blocks left out hold all FLOP: they are no blocks of these layers
    middle = (r.work[stop] - r.work[start]) / times
    total = (first - average) ** 2 + (r.work[end] - r.work[stop] - average) ** 2 + times * (middle - average) ** 2
    return total / average**2 - _EQUAL


@inner
def _deviation(r: Repeats, times: Whole, length: Whole, start: Whole, evened: Whole) -> Real:
    """The sum over layers of the squared distance of FLOP from the average, in averages."""
    stop, end = start + times * length, len(r.codes)
    first, average = _evened(r, times, length, start, evened)
    if average < _EQUAL:
        return np.inf
    total = (first - average) ** 2 + (r.work[end] - r.work[stop] - average) ** 2
    for number in range(times):
        total += (r.work[start + (number + 1) * length] - r.work[start + number * length] - average) ** 2
    return total / average**2


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
