"""FLOP limits and C -> the smallest T for which layers of at most T received bytes cover the model (the first objective of Eq. 6).

From a start, the stops within the FLOP limits are an interval, and those within T bytes too, since C grows with the stop. So for a given
T the reachable cuts follow from intervals, layer by layer, and T is found by bisection over whole bytes.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Truth, Whole, inner, kernel
from alpa_hpc.layers.received import Reads


class Limits(NamedTuple):
    """Where layers may stop: one that starts at i from `first[i]` to `last[i]`; the l-th cut lies from `lows[l]` to `highs[l]`.

    Cut 0 is position 0, cut L is the end. The windows of cuts follow from FLOP alone: outside of them a cut cannot be completed.
    """

    first: Ints
    last: Ints
    lows: Ints
    highs: Ints


def flop_limits(before: Floats, num_layers: int, least: float, most: float) -> Limits:
    """Limits for layers of `least` to `most` FLOP; `before[p]` is the FLOP of all equations before p."""
    first, last = flop_stops(before, least, most, 1e-9 * float(before[-1]))
    end = len(first)
    lows, highs = np.zeros(num_layers + 1, np.int64), np.zeros(num_layers + 1, np.int64)
    for cut in range(num_layers):
        lows[cut + 1] = min(first[min(lows[cut], end - 1)], end)
        highs[cut + 1] = last[min(highs[cut], end - 1)]
    low = high = end
    for cut in reversed(range(num_layers + 1)):
        lows[cut], highs[cut] = max(lows[cut], low), min(highs[cut], high)
        low, high = int(np.searchsorted(last, low)), int(np.searchsorted(first, high, side="right")) - 1
    return Limits(first, last, lows, highs)


@kernel
def flop_stops(before: Floats, least: Real, most: Real, slack: Real) -> tuple[Ints, Ints]:
    """For each start the first and the last stop whose layer has `least` to `most` FLOP (none where the last comes before the first)."""
    end = len(before) - 1
    firsts, lasts = np.empty(end, np.int64), np.empty(end, np.int64)
    first = last = 0
    for start in range(end):
        first, last = max(first, start + 1), max(last, start)
        while first <= end and before[first] - before[start] < least - slack:
            first += 1
        while last < end and before[last + 1] - before[start] <= most + slack:
            last += 1
        firsts[start], lasts[start] = first, last
    return firsts, lasts


@kernel
def smallest_bottleneck(reads: Reads, limits: Limits) -> Whole:
    """The smallest T in bytes, or -1 if the FLOP limits alone cannot be kept."""
    high = reads.before[-1]
    if not _completes(limits, limits.last):
        return -1
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        if _completes(limits, _stops_within(reads, limits, middle)):
            high = middle
        else:
            low = middle
    return high


@kernel
def stops_within(reads: Reads, limits: Limits, most_bytes: Whole) -> Ints:
    """For each start the last stop whose layer keeps the FLOP limits and receives at most `most_bytes`."""
    return _stops_within(reads, limits, most_bytes)


@inner
def _stops_within(reads: Reads, limits: Limits, most_bytes: Whole) -> Ints:
    """By a tree of partial sums (Fenwick 1994) over the readers, which holds the rows with first <= start."""
    end = len(limits.last)
    tree, stops = np.zeros(end + 1, np.int64), np.empty(end, np.int64)
    top = 1
    while 2 * top <= end:
        top *= 2
    for start in range(end):
        for row in range(reads.by_first[start], reads.by_first[start + 1]):
            node = reads.readers[row] + 1
            while node <= end:
                tree[node] += reads.first_sizes[row]
                node += node & -node
        room, node = most_bytes, start
        while node > 0:
            room += tree[node]
            node &= node - 1
        stop, step = 0, top
        while step > 0:
            if stop + step <= end and tree[stop + step] <= room:
                stop += step
                room -= tree[stop]
            step >>= 1
        stops[start] = min(stop, limits.last[start])
    return stops


@inner
def _completes(limits: Limits, stops: Ints) -> Truth:
    """Whether as many layers as there are windows lead from 0 to the end, with stops from `limits.first` to `stops`."""
    end = len(stops)
    reached, opened = np.zeros(end + 2, np.bool_), np.zeros(end + 2, np.int64)
    reached[0] = True
    for cut in range(len(limits.lows) - 1):
        low, high = limits.lows[cut + 1], limits.highs[cut + 1]
        opened[low : high + 2] = 0
        for start in range(limits.lows[cut], min(limits.highs[cut], end - 1) + 1):
            first, last = max(limits.first[start], low), min(stops[start], high)
            if reached[start] and first <= last:
                opened[first] += 1
                opened[last + 1] -= 1
        count = 0
        for stop in range(low, high + 1):
            count += opened[stop]
            reached[stop] = count > 0
    return reached[end]
