"""Work: spans of nodes that are folded into another one become spans of that one.

`append_spans` puts them behind the node's own, out of order and overlapping; `join_spans` goes through time once, adds up what is held
together and leaves disjoint spans in order. Until then rules compare span by span, which is safe, if weaker. A node that swallows
thousands of others is joined whenever its spans have doubled, and at last before memory is pruned.
"""

import numpy as np

from alpa_hpc.kernels import Ints, Truth, Whole, inner, kernel
from alpa_hpc.sharding.shrink_state import NO_SPACE, OK, SPANS, USES, Work, enqueue


@inner
def have_place_to_join(w: Work, node: Whole, gone: Whole) -> Truth:
    """Whether `append_spans` and a `join_spans` after it find place."""
    number, size = w.span_counts[node] + w.span_counts[gone], w.sizes[node]
    return w.counters[SPANS] + 4 * number <= len(w.span_begins) and w.counters[USES] + 3 * number * size <= len(w.uses)


@inner
def append_spans(w: Work, node: Whole, gone: Whole, follows: Ints) -> None:
    """Spans of `gone`, whose strategy is `follows[s]` where the node's is s, behind the node's own."""
    if w.span_counts[gone] == 0:
        return
    first, count, top = w.span_firsts[node], w.span_counts[node], w.counters[SPANS]
    if first + count != top:
        for i in range(count):
            _put_span(w, top + i, w.span_begins[first + i], w.span_ends[first + i], w.span_uses[first + i])
        w.span_firsts[node] = top
        top += count
    for i in range(w.span_firsts[gone], w.span_firsts[gone] + w.span_counts[gone]):
        use = w.counters[USES]
        for s in range(w.sizes[node]):
            w.uses[use + s] = w.uses[w.span_uses[i] + follows[s]]
        w.counters[USES] = use + w.sizes[node]
        _put_span(w, top, w.span_begins[i], w.span_ends[i], use)
        top += 1
    w.span_counts[node] = top - w.span_firsts[node]
    w.counters[SPANS] = top
    w.pending[node] += w.span_counts[gone]


@inner
def _put_span(w: Work, at: Whole, begin: Whole, end: Whole, use: Whole) -> None:
    w.span_begins[at], w.span_ends[at], w.span_uses[at] = begin, end, use


@inner
def join_if_doubled(w: Work, node: Whole) -> None:
    """Join the node's spans once half of them are pending."""
    if w.pending[node] > 0 and 2 * w.pending[node] >= w.span_counts[node]:
        join_spans(w, node)


@kernel
def join_pending(w: Work) -> Whole:
    """Join the spans of all nodes that have pending ones; they are in the queue then."""
    for node in range(len(w.sizes)):
        if w.pending[node] > 0 and w.sizes[node] > 0:
            if not have_place_to_join(w, node, node):
                return NO_SPACE
            join_spans(w, node)
            enqueue(w, node)
    return OK


@inner
def join_spans(w: Work, node: Whole) -> None:
    """Make the node's spans disjoint and ordered, with what all its strategies use taken from the room."""
    w.pending[node] = 0
    first, count, size = w.span_firsts[node], w.span_counts[node], w.sizes[node]
    begin_order = np.argsort(w.span_begins[first : first + count])
    end_order = np.argsort(w.span_ends[first : first + count])
    level = np.zeros(size)
    w.span_firsts[node] = w.counters[SPANS]
    begun, ended = 0, 0
    while ended < count:
        now = w.span_ends[first + end_order[ended]]
        if begun < count:
            now = min(now, w.span_begins[first + begin_order[begun]])
        while ended < count and w.span_ends[first + end_order[ended]] == now:
            use = w.span_uses[first + end_order[ended]]
            level -= w.uses[use : use + size]
            ended += 1
        while begun < count and w.span_begins[first + begin_order[begun]] == now:
            use = w.span_uses[first + begin_order[begun]]
            level += w.uses[use : use + size]
            begun += 1
        if ended < count:
            until = w.span_ends[first + end_order[ended]]
            if begun < count:
                until = min(until, w.span_begins[first + begin_order[begun]])
            _add_level(w, node, now, until, level)
    w.span_counts[node] = w.counters[SPANS] - w.span_firsts[node]


@inner
def _add_level(w: Work, node: Whole, begin: Whole, end: Whole, level: np.ndarray) -> None:
    """One more span at the end of the node's, joined with the last one where that holds the same."""
    least = level.min()
    if least != 0.0:
        for t in range(begin, end):
            w.room[t] -= least
    if level.max() == least:
        return
    size, last, use = len(level), w.counters[SPANS] - 1, w.counters[USES]
    if last >= w.span_firsts[node] and w.span_ends[last] == begin:
        same = True
        for s in range(size):
            same = same and w.uses[w.span_uses[last] + s] == level[s] - least
        if same:
            w.span_ends[last] = end
            return
    for s in range(size):
        w.uses[use + s] = level[s] - least
    _put_span(w, last + 1, begin, end, use)
    w.counters[SPANS] += 1
    w.counters[USES] += size
