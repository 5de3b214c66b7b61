"""Work -> less Work by memory over time, exactly: strategies that cannot fit, spans that cannot bind, times that another time implies.

`room[t]` is what the limit leaves beyond the least use of every node. A strategy dies that uses more than the room at some time even beside
the least of all others. A time at which the most of every node fits never binds; spans shrink to the times that may. Of neighbouring times
one goes if the nodes that hold something then all hold it at the other too, where there is no more room.
"""

import numpy as np

from alpa_hpc.kernels import Flags, Floats, Ints, Truth, Whole, inner, kernel
from alpa_hpc.sharding.shrink_state import BAD, NO_ROOM, OK, TIMES, TOO_LARGE, Work, enqueue, enqueue_around, keep


@kernel
def prune_memory(w: Work) -> Whole:
    """One round of all three; nodes that changed are in the queue then."""
    for t in range(w.counters[TIMES]):
        if w.room[t] < 0.0:
            w.counters[BAD] = t
            return NO_ROOM
    for node in range(len(w.sizes)):
        if w.sizes[node] > 0 and w.span_counts[node] > 0 and not _drop_large(w, node):
            w.counters[BAD] = node
            return TOO_LARGE
    binding = _binding_times(w)
    for node in range(len(w.sizes)):
        if w.sizes[node] > 0 and w.span_counts[node] > 0:
            _trim_spans(w, node, binding)
    _compress(w, _chosen_times(w))
    return OK


@inner
def _drop_large(w: Work, node: Whole) -> Truth:
    size = w.sizes[node]
    alive = np.ones(size, dtype=np.bool_)
    for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
        least = np.inf
        for t in range(w.span_begins[i], w.span_ends[i]):
            least = min(least, w.room[t])
        for s in range(size):
            if w.uses[w.span_uses[i] + s] > least:
                alive[s] = False
    left = alive.sum()
    if 0 < left < size:
        keep(w, node, alive)
        enqueue(w, node)
        enqueue_around(w, node)
    return left > 0


@inner
def _binding_times(w: Work) -> Flags:
    """Times at which not everything fits."""
    number = w.counters[TIMES]
    change = np.zeros(number + 1)
    for node in range(len(w.sizes)):
        for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
            use = w.span_uses[i]
            most = w.uses[use : use + w.sizes[node]].max()
            change[w.span_begins[i]] += most
            change[w.span_ends[i]] -= most
    return np.cumsum(change)[:number] > w.room[:number]


@inner
def _trim_spans(w: Work, node: Whole, binding: Flags) -> None:
    first = w.span_firsts[node]
    left = first
    changed = False
    for i in range(first, first + w.span_counts[node]):
        begin, end = w.span_begins[i], w.span_ends[i]
        while begin < end and not binding[begin]:
            begin += 1
        while begin < end and not binding[end - 1]:
            end -= 1
        changed = changed or begin == end
        if begin < end:
            w.span_begins[left], w.span_ends[left], w.span_uses[left] = begin, end, w.span_uses[i]
            left += 1
    w.span_counts[node] = left - first
    if changed:
        enqueue(w, node)


@inner
def _chosen_times(w: Work) -> Flags:
    """Times that no neighbouring time implies."""
    number = w.counters[TIMES]
    begins, ends = np.zeros(number + 1, dtype=np.int64), np.zeros(number + 1, dtype=np.int64)
    covered = np.zeros(number + 1, dtype=np.int64)
    for node in range(len(w.sizes)):
        for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
            begins[w.span_begins[i]] += 1
            ends[w.span_ends[i]] += 1
            covered[w.span_begins[i]] += 1
            covered[w.span_ends[i]] -= 1
    chosen = np.zeros(number, dtype=np.bool_)
    last = -1
    num_begun, num_ended, level = 0, 0, 0
    for t in range(number):
        level += covered[t]
        num_begun += begins[t]
        num_ended += ends[t]
        if level == 0:
            last = -1
            continue
        if last >= 0 and num_begun == 0 and w.room[last] <= w.room[t]:
            continue
        if last >= 0 and num_ended == 0 and w.room[t] <= w.room[last]:
            chosen[last] = False
        chosen[t] = True
        last = t
        num_begun = num_ended = 0
    return chosen


@inner
def _compress(w: Work, chosen: Flags) -> None:
    """Number the chosen times anew."""
    number = w.counters[TIMES]
    places = np.zeros(number + 1, dtype=np.int64)
    left = 0
    for t in range(number):
        places[t] = left
        if chosen[t]:
            w.room[left] = w.room[t]
            w.labels[left] = w.labels[t]
            left += 1
    places[number] = left
    w.counters[TIMES] = left
    if left == number:
        return
    for node in range(len(w.sizes)):
        first, to = w.span_firsts[node], w.span_firsts[node]
        for i in range(first, first + w.span_counts[node]):
            begin, end = places[w.span_begins[i]], places[w.span_ends[i]]
            if begin < end:
                w.span_begins[to], w.span_ends[to], w.span_uses[to] = begin, end, w.span_uses[i]
                to += 1
        w.span_counts[node] = to - first


@kernel
def unload_spans(w: Work, kept: Ints) -> tuple[Ints, Ints, Ints, Floats]:
    """Spans of the kept nodes laid end to end: number a node, times, number of uses a span, uses."""
    counts = np.zeros(len(kept), dtype=np.int64)
    total, entries = 0, 0
    for index in range(len(kept)):
        counts[index] = w.span_counts[kept[index]]
        total += counts[index]
        entries += counts[index] * w.sizes[kept[index]]
    times, lengths, uses = np.empty((total, 2), dtype=np.int64), np.empty(total, dtype=np.int64), np.empty(entries)
    at, use = 0, 0
    for node in kept:
        size = w.sizes[node]
        for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
            times[at, 0], times[at, 1], lengths[at] = w.span_begins[i], w.span_ends[i], size
            uses[use : use + size] = w.uses[w.span_uses[i] : w.span_uses[i] + size]
            at += 1
            use += size
    return counts, times, lengths, uses
