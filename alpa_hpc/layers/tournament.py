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
_ADDED, _BEST, _WINNER, _PENDING = range(4)


class Tournament(NamedTuple):
    """A tree of `counts[0]` leaves; node 1 is the root, 2 n and 2 n + 1 are below node n, so that both lie in one line of the cache.

    nodes:     by node, the columns _ADDED (bytes added at its leaves, so to all leaves right of them as well), _BEST (the smallest bytes of
               its leaves, without what is added left of it) and _WINNER (the leaf that has them); and in column _PENDING a list, of the
               `counts[1]` leaves that have changed, or of nodes in the order in which they are found
    until:     by node, up to which x its winner holds
    parabolas: by leaf, (its own deviation so far + target^2, target)
    """

    counts: Ints
    nodes: Ints
    until: Floats
    parabolas: Floats


@inner
def tournament(most_leaves: Whole) -> Tournament:
    """Room for that many leaves; `clear` makes it ready."""
    size = _leaves_for(most_leaves)
    return Tournament(np.zeros(2, np.int64), np.empty((2 * size, 4), np.int64), np.empty(2 * size), np.empty((size, 2)))


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
    t.until[: 2 * size] = np.inf
    t.parabolas[:size] = 0.0
    for node in range(2 * size):
        t.nodes[node, _ADDED], t.nodes[node, _BEST], t.nodes[node, _WINNER] = 0, ABSENT, node - size


@inner
def place(t: Tournament, leaf: Whole, num_bytes: Whole, deviation: Real, target: Real) -> None:
    """Give a leaf the bytes it has from now on (ABSENT: it takes no part), to which later ones are added."""
    node = t.counts[0] + leaf
    t.nodes[node, _BEST] = num_bytes
    while node > 1:
        if node & 1 == 1:
            t.nodes[t.counts[0] + leaf, _BEST] -= t.nodes[node - 1, _ADDED]
        node >>= 1
    t.parabolas[leaf, 0], t.parabolas[leaf, 1] = deviation + target * target, target
    _touch(t, leaf)


@inner
def add_from(t: Tournament, leaf: Whole, num_bytes: Whole) -> None:
    """Add bytes to the leaf and all right of it."""
    node = t.counts[0] + leaf
    t.nodes[node, _BEST] += num_bytes
    while node > 0:
        t.nodes[node, _ADDED] += num_bytes
        node >>= 1
    _touch(t, leaf)


@inner
def _touch(t: Tournament, leaf: Whole) -> None:
    if t.counts[1] < t.counts[0]:
        t.nodes[t.counts[1], _PENDING] = leaf
        t.counts[1] += 1


@inner
def settle(t: Tournament, x: Real) -> None:
    """Find the winners after changes, at an `x` that is no smaller than before: along the paths of changed leaves, or everywhere."""
    size, touched = t.counts
    if touched < size:
        for at in range(touched):
            node = (size + t.nodes[at, _PENDING]) >> 1
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
    t.nodes[0, _PENDING] = 1
    at, count = 0, 1
    while at < count:
        for child in range(2 * t.nodes[at, _PENDING], 2 * t.nodes[at, _PENDING] + 2):
            if t.until[child] < x:
                t.nodes[count, _PENDING] = child
                count += 1
        at += 1
    for at in range(count - 1, -1, -1):
        _settle_node(t, t.nodes[at, _PENDING], x)


@inner
def _settle_node(t: Tournament, node: Whole, x: Real) -> None:
    """The winner of a node from those of its children."""
    left, right = 2 * node, 2 * node + 1
    winner, best, until = t.nodes[left, _WINNER], t.nodes[left, _BEST], min(t.until[left], t.until[right])
    other = t.nodes[left, _ADDED] + t.nodes[right, _BEST]
    if other < best:
        winner, best = t.nodes[right, _WINNER], other
    elif other == best:
        meeting = _meeting(t, winner, t.nodes[right, _WINNER])
        if meeting < x:
            winner = t.nodes[right, _WINNER]
        else:
            until = min(until, meeting)
    t.nodes[node, _WINNER], t.nodes[node, _BEST], t.until[node] = winner, best, until


@inner
def _meeting(t: Tournament, left: Whole, right: Whole) -> Real:
    """The x from which on the right leaf, whose target is no smaller, has the smaller deviation."""
    rise, slope = t.parabolas[right, 0] - t.parabolas[left, 0], 2.0 * (t.parabolas[right, 1] - t.parabolas[left, 1])
    if slope > 0.0:
        return rise / slope
    return -np.inf if rise < 0.0 else np.inf


@inner
def best_of(t: Tournament) -> tuple[Whole, Whole]:
    """The smallest bytes of all leaves, and the leaf that wins; at least ABSENT if none takes part."""
    return t.nodes[1, _BEST], t.nodes[1, _WINNER]
