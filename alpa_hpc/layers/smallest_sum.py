"""Layers of at most T received bytes -> the cuts with the smallest sum of them, and of those with the smallest deviation of FLOP (Eq. 6).

    best[l, k] = min over i of best[l - 1, i] + (C(i, k), (FLOP(i..k) / average - 1)^2),    lexicographically

Both parts add up, so the programme is exact. For one l the stops k go up, and a tournament of the starts gives the minimum of each. A start
enters at its first stop and leaves after its last; meanwhile a row of C adds its bytes to all starts from `first` on once its reader is in
the layer. Few rows do, since most values are read soon after they are made, and starts that close to the stop have not entered yet.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Whole, inner, kernel
from alpa_hpc.layers.bottleneck import Limits
from alpa_hpc.layers.received import Reads
from alpa_hpc.layers.tournament import ABSENT, Tournament, add_from, best_of, clear, place, settle, tournament

_NOBODY = -1


class _Sweep(NamedTuple):
    """What the programme reads; C(start, its first stop); and by stop the starts that leave there: `head[stop]`, then `after[start]`."""

    reads: Reads
    limits: Limits
    stops: Ints
    work: Floats
    tournament: Tournament
    at_first: Ints
    head: Ints
    after: Ints


class _Best(NamedTuple):
    """By (number of the cut, position): the best sums up to a cut there, and the cut before it."""

    received: Ints
    deviation: Floats
    previous: Ints


@kernel
def smallest_sum(reads: Reads, limits: Limits, stops: Ints, work: Floats) -> tuple[Ints, Whole]:
    """The cuts between layers, and the sum of C. `work[p]` is the FLOP before p in average layers, `stops` the last ones within T."""
    end, num_layers = len(stops), len(limits.lows) - 1
    shape = (num_layers + 1, end + 1)
    best = _Best(np.full(shape, ABSENT), np.zeros(shape), np.zeros(shape, np.int64))
    best.received[0, 0] = 0
    room = tournament(int(np.max(limits.highs - limits.lows)) + 1)
    sweep = _Sweep(
        reads, limits, stops, work, room, _received_at(reads, limits.first), np.full(end + 2, _NOBODY), np.empty(end + 1, np.int64)
    )
    for cut in range(num_layers):
        _next_cut(sweep, best, cut)
    cuts = np.empty(num_layers - 1, np.int64)
    position = end
    for cut in range(num_layers - 1, 0, -1):
        position = best.previous[cut + 1, position]
        cuts[cut - 1] = position
    return cuts, best.received[num_layers, end]


@inner
def _received_at(reads: Reads, stops: Ints) -> Ints:
    """C(start, stop) for stops that never go down."""
    received = np.zeros(len(stops), np.int64)
    stop = total = 0
    for start in range(len(stops)):
        total += _one_start_further(reads, start, stop)
        while stop < min(stops[start], len(stops)):
            total += _receives(reads, stop, start)
            stop += 1
        received[start] = total
    return received


@inner
def _one_start_further(reads: Reads, start: Whole, stop: Whole) -> Whole:
    """C(start, stop) - C(start - 1, stop)."""
    change = 0
    for row in range(reads.by_first[start], reads.by_first[start + 1]):
        if reads.readers[row] < stop:
            change += reads.first_sizes[row]
    return change - (reads.before[start] - reads.before[max(start - 1, 0)])


@inner
def _receives(reads: Reads, reader: Whole, start: Whole) -> Whole:
    """C(start, reader + 1) - C(start, reader)."""
    total = 0
    for row in range(reads.by_reader[reader], reads.by_reader[reader + 1]):
        if reads.firsts[row] <= start:
            total += reads.sizes[row]
    return total


@inner
def _next_cut(s: _Sweep, best: _Best, cut: Whole) -> None:
    """Fill the row `cut + 1` of `best` from the one before."""
    origin, low, t = s.limits.lows[cut], s.limits.lows[cut + 1], s.tournament
    clear(t, s.limits.highs[cut] - origin + 1)
    entering = _enter_first(s, best, cut)
    for stop in range(low, s.limits.highs[cut + 1] + 1):
        if stop > low:
            _receive(s, origin, entering, stop - 1)
            entering = _enter(s, best, cut, entering, stop)
            _leave(s, origin, stop)
        settle(t, s.work[stop])
        received, leaf = best_of(t)
        if received < ABSENT:
            winner = origin + leaf
            best.received[cut + 1, stop] = received
            best.deviation[cut + 1, stop] = best.deviation[cut, winner] + (s.work[stop] - s.work[winner] - 1.0) ** 2
            best.previous[cut + 1, stop] = winner


@inner
def _enter_first(s: _Sweep, best: _Best, cut: Whole) -> Whole:
    """Let all starts enter that may stop at the first stop of the window; gives the first that may not yet."""
    start, stop = s.limits.lows[cut], s.limits.lows[cut + 1]
    total = 0
    for reader in range(start, stop):
        total += _receives(s.reads, reader, start)
    while start <= min(s.limits.highs[cut], len(s.stops) - 1) and s.limits.first[start] <= stop:
        _place(s, best, cut, start, stop, total)
        start += 1
        total += _one_start_further(s.reads, start, stop)
    return start


@inner
def _enter(s: _Sweep, best: _Best, cut: Whole, entering: Whole, stop: Whole) -> Whole:
    """Let starts enter whose first stop has come; gives the first that waits."""
    while entering <= min(s.limits.highs[cut], len(s.stops) - 1) and s.limits.first[entering] == stop:
        _place(s, best, cut, entering, stop, s.at_first[entering])
        entering += 1
    return entering


@inner
def _place(s: _Sweep, best: _Best, cut: Whole, start: Whole, stop: Whole, received: Whole) -> None:
    """Let a start enter whose layer receives so much up to `stop`, if it can be reached, and note where it leaves."""
    if best.received[cut, start] < ABSENT and s.stops[start] >= stop:
        leaf, bytes_ = start - s.limits.lows[cut], best.received[cut, start] + received
        place(s.tournament, leaf, bytes_, best.deviation[cut, start], s.work[start] + 1.0)
        if s.stops[start] < s.limits.highs[cut + 1]:
            s.after[start] = s.head[s.stops[start] + 1]
            s.head[s.stops[start] + 1] = start


@inner
def _receive(s: _Sweep, origin: Whole, entering: Whole, reader: Whole) -> None:
    """Add what an equation receives to the starts after which it does."""
    for row in range(s.reads.by_reader[reader], s.reads.by_reader[reader + 1]):
        first = max(s.reads.firsts[row], origin)
        if first < entering:
            add_from(s.tournament, first - origin, s.reads.sizes[row])


@inner
def _leave(s: _Sweep, origin: Whole, stop: Whole) -> None:
    """Let the starts leave whose last stop has gone."""
    start = s.head[stop]
    while start != _NOBODY:
        place(s.tournament, start - origin, ABSENT, 0.0, 0.0)
        start = s.after[start]
    s.head[stop] = _NOBODY
