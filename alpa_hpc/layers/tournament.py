"""Starts of a layer -> the best one for each stop, as stops go up: the smallest (bytes, deviation), in logarithmic time a change.

A start has bytes, which change as the layer grows, and a deviation that is a parabola in the FLOP before the stop:

    deviation(start, x) = its own so far + (x - target)^2,    target = FLOP before the start + one average layer

Two such parabolas differ by a line, so between starts of equal bytes the later one wins once x has passed the point where they meet.
A binary tree holds the winner of each node, and until which x no winner below it changes (a kinetic tournament: Basch, Guibas and
Hershberger 1999). Bytes are added to all starts from one on, and kept as differences.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Whole, inner

ABSENT = 2**60  # bytes of a start that cannot be taken


class Tournament(NamedTuple):
    """A tree of `counts[0]` leaves; node 1 is the root, 2 n and 2 n + 1 are below node n.

    added:   by node, bytes added at its leaves, so to all leaves right of them as well
    best:    by node, the smallest bytes of its leaves, without what is added left of it
    winner:  by node, the leaf that has them
    until:   by node, up to which x that holds
    own:     by leaf, its own deviation so far + target^2
    target:  by leaf
    pending: the `counts[1]` leaves that have changed; then nodes, in the order in which they are found
    """

    counts: Ints
    added: Ints
    best: Ints
    winner: Ints
    until: Floats
    own: Floats
    target: Floats
    pending: Ints


@inner
def tournament(most_leaves: Whole) -> Tournament:
    """Room for that many leaves; `clear` makes it ready."""
    size = _leaves_for(most_leaves)
    return Tournament(
        np.zeros(2, np.int64),
        np.empty(2 * size, np.int64),
        np.empty(2 * size, np.int64),
        np.empty(2 * size, np.int64),
        np.empty(2 * size, np.float64),
        np.empty(size, np.float64),
        np.empty(size, np.float64),
        np.empty(2 * size, np.int64),
    )


@inner
def _leaves_for(number: Whole) -> Whole:
    size = 1
    while size < number:
        size *= 2
    return size


@inner
def clear(t: Tournament, num_leaves: Whole) -> None:
    """Make `num_leaves` leaves absent, and all nodes to be settled."""
    size = _leaves_for(num_leaves)
    t.counts[0], t.counts[1] = size, size
    t.added[: 2 * size] = 0
    t.best[: 2 * size] = ABSENT
    t.until[: 2 * size] = np.inf
    t.own[:size] = 0.0
    t.target[:size] = 0.0
    for leaf in range(size):
        t.winner[size + leaf] = leaf


@inner
def place(t: Tournament, leaf: Whole, num_bytes: Whole, deviation: Real, target: Real) -> None:
    """Give a leaf the bytes it has from now on (ABSENT: it takes no part), to which later ones are added."""
    node = t.counts[0] + leaf
    t.best[node] = num_bytes
    while node > 1:
        if node & 1 == 1:
            t.best[t.counts[0] + leaf] -= t.added[node - 1]
        node >>= 1
    t.own[leaf], t.target[leaf] = deviation + target * target, target
    _touch(t, leaf)


@inner
def add_from(t: Tournament, leaf: Whole, num_bytes: Whole) -> None:
    """Add bytes to the leaf and all right of it."""
    node = t.counts[0] + leaf
    t.best[node] += num_bytes
    while node > 0:
        t.added[node] += num_bytes
        node >>= 1
    _touch(t, leaf)


@inner
def _touch(t: Tournament, leaf: Whole) -> None:
    if t.counts[1] < t.counts[0]:
        t.pending[t.counts[1]] = leaf
        t.counts[1] += 1


@inner
def settle(t: Tournament, x: Real) -> None:
    """Find the winners after changes, at an `x` that is no smaller than before: along the paths of changed leaves, or everywhere."""
    size, touched = t.counts
    if touched < size:
        for at in range(touched):
            node = (size + t.pending[at]) >> 1
            while node > 0:
                _settle_node(t, node, x)
                node >>= 1
    else:
        for node in range(size - 1, 0, -1):
            _settle_node(t, node, x)
    t.counts[1] = 0
    if t.until[1] < x:
        _settle_expired(t, x)


@inner
def _settle_expired(t: Tournament, x: Real) -> None:
    """Settle the nodes whose winner may have changed by now, children first."""
    t.pending[0] = 1
    at, count = 0, 1
    while at < count:
        for child in range(2 * t.pending[at], 2 * t.pending[at] + 2):
            if t.until[child] < x:
                t.pending[count] = child
                count += 1
        at += 1
    for at in range(count - 1, -1, -1):
        _settle_node(t, t.pending[at], x)


@inner
def _settle_node(t: Tournament, node: Whole, x: Real) -> None:
    """The winner of a node from those of its children."""
    left, right = 2 * node, 2 * node + 1
    winner, best, until = t.winner[left], t.best[left], min(t.until[left], t.until[right])
    other = t.added[left] + t.best[right]
    if other < best:
        winner, best = t.winner[right], other
    elif other == best:
        meeting = _meeting(t, winner, t.winner[right])
        if meeting < x:
            winner = t.winner[right]
        else:
            until = min(until, meeting)
    t.winner[node], t.best[node], t.until[node] = winner, best, until


@inner
def _meeting(t: Tournament, left: Whole, right: Whole) -> Real:
    """The x from which on the right leaf, whose target is no smaller, has the smaller deviation."""
    rise, slope = t.own[right] - t.own[left], 2.0 * (t.target[right] - t.target[left])
    if slope > 0.0:
        return rise / slope
    return -np.inf if rise < 0.0 else np.inf
