"""FlatProblem -> Work: the problem while it shrinks, as arrays that change in place, and the moves on it that keep them consistent.

Each edge is two half-edges, 2e for its source and 2e + 1 for its target, in doubly linked lists a node: an edge is found, moved to another
node or taken away in a few steps. A table shrinks in place; a new one goes to the end of `tables`. Where an array has no place left, the
rule that needs it does nothing and the driver (`shrink.py`) makes it longer.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Flags, Floats, Ints, Whole, inner, kernel

# Places in Work.counters.
TABLES, SPANS, USES, TRACE, TIMES, QUEUE_HEAD, QUEUE_LENGTH, BAD = range(8)
OK, NO_SPACE, NOT_ALLOWED, NO_ROOM, TOO_LARGE = range(5)


class Work(NamedTuple):
    """`sizes[v]` living strategies (0 = gone); `states` their numbers in the original; half-edge h has node `ends[h]` and partner h ^ 1.

    `trace` has one record a removed node: node, number of parents, (parent, number of its states, these states) a parent, the node's best
    state for each combination of the parents' states, length of the record. `counters` = how much of each array is used;
    `offset[0]` = costs of nodes that are gone;
    `pending[v]` = spans of v that may overlap others of v (`shrink_spans.py`).
    """

    starts: Ints
    sizes: Ints
    costs: Floats
    states: Ints
    heads: Ints
    degrees: Ints
    nexts: Ints
    previous: Ints
    ends: Ints
    offsets: Ints
    tables: Floats
    span_firsts: Ints
    span_counts: Ints
    span_begins: Ints
    span_ends: Ints
    span_uses: Ints
    pending: Ints
    uses: Floats
    room: Floats
    labels: Ints
    trace: Ints
    queue: Ints
    queued: Flags
    offset: Floats
    counters: Ints


@inner
def link(w: Work, half: Whole, node: Whole) -> None:
    """Give a half-edge to a node."""
    first = w.heads[node]
    w.ends[half] = node
    w.nexts[half] = first
    w.previous[half] = -1
    if first >= 0:
        w.previous[first] = half
    w.heads[node] = half
    w.degrees[node] += 1


@inner
def unlink(w: Work, half: Whole) -> None:
    """Take a half-edge from its node."""
    before, after = w.previous[half], w.nexts[half]
    if before >= 0:
        w.nexts[before] = after
    else:
        w.heads[w.ends[half]] = after
    if after >= 0:
        w.previous[after] = before
    w.degrees[w.ends[half]] -= 1


@inner
def find_half(w: Work, node: Whole, other: Whole) -> Whole:
    """`node`'s half of its edge with `other`, -1 if there is none."""
    if w.degrees[node] <= w.degrees[other]:
        half = w.heads[node]
        while half >= 0:
            if w.ends[half ^ 1] == other:
                return half
            half = w.nexts[half]
        return -1
    half = w.heads[other]
    while half >= 0:
        if w.ends[half ^ 1] == node:
            return half ^ 1
        half = w.nexts[half]
    return -1


@inner
def stride(w: Work, half: Whole) -> Whole:
    """Distance in the table between entries of neighbouring strategies of the half-edge's node."""
    return 1 if half & 1 else w.sizes[w.ends[half ^ 1]]


@inner
def enqueue(w: Work, node: Whole) -> None:
    """Have a node looked at again."""
    if not w.queued[node]:
        w.queued[node] = True
        capacity = len(w.queue)
        w.queue[(w.counters[QUEUE_HEAD] + w.counters[QUEUE_LENGTH]) % capacity] = node
        w.counters[QUEUE_LENGTH] += 1


@inner
def enqueue_around(w: Work, node: Whole) -> None:
    """Have all neighbours looked at again."""
    half = w.heads[node]
    while half >= 0:
        enqueue(w, w.ends[half ^ 1])
        half = w.nexts[half]


@inner
def keep(w: Work, node: Whole, alive: Flags) -> None:
    """Drop the strategies that are not alive from the node, its tables and its spans."""
    size = w.sizes[node]
    half = w.heads[node]
    while half >= 0:
        _keep_in_table(w.tables, w.offsets[half >> 1], size, w.sizes[w.ends[half ^ 1]], half & 1, alive)
        half = w.nexts[half]
    for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
        _keep_in_table(w.uses, w.span_uses[i], size, 1, 0, alive)
    left = 0
    start = w.starts[node]
    for s in range(size):
        if alive[s]:
            w.costs[start + left] = w.costs[start + s]
            w.states[start + left] = w.states[start + s]
            left += 1
    w.sizes[node] = left
    settle(w, node)


@inner
def _keep_in_table(tables: Floats, offset: Whole, size: Whole, other: Whole, is_column: Whole, alive: Flags) -> None:
    to = offset
    rows, columns = (other, size) if is_column else (size, other)
    for r in range(rows):
        for c in range(columns):
            if alive[c if is_column else r]:
                tables[to] = tables[offset + r * columns + c]
                to += 1


@inner
def settle(w: Work, node: Whole) -> None:
    """Take from the room what every strategy of the node uses, and drop spans that hold nothing beyond that."""
    first, size = w.span_firsts[node], w.sizes[node]
    left = 0
    for i in range(first, first + w.span_counts[node]):
        use = w.span_uses[i]
        least, most = w.uses[use], w.uses[use]
        for s in range(1, size):
            least, most = min(least, w.uses[use + s]), max(most, w.uses[use + s])
        if least != 0.0:
            for s in range(size):
                w.uses[use + s] -= least
            for t in range(w.span_begins[i], w.span_ends[i]):
                w.room[t] -= least
        if most > least and w.span_begins[i] < w.span_ends[i]:
            to = first + left
            w.span_begins[to], w.span_ends[to], w.span_uses[to] = w.span_begins[i], w.span_ends[i], use
            left += 1
    w.span_counts[node] = left


@inner
def start_record(w: Work, node: Whole, num_parents: Whole) -> Whole:
    """Begin the record of a node that goes; the place in `trace` after its head."""
    at = w.counters[TRACE]
    w.trace[at], w.trace[at + 1] = node, num_parents
    return at + 2


@inner
def record_parent(w: Work, at: Whole, parent: Whole) -> Whole:
    """Write down a parent and its living states; the place after them."""
    size = w.sizes[parent]
    w.trace[at], w.trace[at + 1] = parent, size
    for s in range(size):
        w.trace[at + 2 + s] = w.states[w.starts[parent] + s]
    return at + 2 + size


@inner
def end_record(w: Work, at: Whole) -> None:
    """Close the record whose last answer is before `at`."""
    w.trace[at] = at + 1 - w.counters[TRACE]
    w.counters[TRACE] = at + 1


@kernel
def load(w: Work, ends: Ints, offsets: Ints, tables: Floats) -> None:
    """Link the edges, parallel ones added up."""
    for e in range(len(ends)):
        source, target = ends[e, 0], ends[e, 1]
        known = find_half(w, source, target)
        if known < 0:
            link(w, 2 * e, source)
            link(w, 2 * e + 1, target)
            continue
        rows, columns = w.sizes[source], w.sizes[target]
        down, across = stride(w, known), stride(w, known ^ 1)
        for r in range(rows):
            for c in range(columns):
                w.tables[w.offsets[known >> 1] + r * down + c * across] += tables[offsets[e] + r * columns + c]


@kernel
def replay(trace: Ints, length: Whole, choices: Ints) -> None:
    """Complete `choices` (original strategy numbers, -1 = not decided) by the records, last one first."""
    end = length
    while end > 0:
        at = end - trace[end - 1]
        end = at
        node, parents = trace[at], trace[at + 1]
        at += 2
        place = 0
        for _ in range(parents):
            parent, size = trace[at], trace[at + 1]
            at += 2
            found = 0
            while trace[at + found] != choices[parent]:
                found += 1
            place = place * size + found
            at += size
        choices[node] = trace[at + place]


@kernel
def settle_all(w: Work) -> None:
    """`settle` for every node."""
    for node in range(len(w.sizes)):
        settle(w, node)


@kernel
def unload_tables(w: Work) -> tuple[Ints, Ints, Floats]:
    """Ends, offsets and tables of the edges that are left, laid end to end."""
    number, entries = 0, 0
    for node in range(len(w.sizes)):
        half = w.heads[node]
        while half >= 0:
            if not half & 1:
                number += 1
                entries += w.sizes[node] * w.sizes[w.ends[half ^ 1]]
            half = w.nexts[half]
    ends, offsets, tables = np.empty((number, 2), dtype=np.int64), np.zeros(number + 1, dtype=np.int64), np.empty(entries)
    at = 0
    for node in range(len(w.sizes)):
        half = w.heads[node]
        while half >= 0:
            if not half & 1:
                other = w.ends[half ^ 1]
                size = w.sizes[node] * w.sizes[other]
                offset = w.offsets[half >> 1]
                ends[at, 0], ends[at, 1] = node, other
                offsets[at + 1] = offsets[at] + size
                tables[offsets[at] : offsets[at + 1]] = w.tables[offset : offset + size]
                at += 1
            half = w.nexts[half]
    return ends, offsets, tables


@kernel
def pack_tables(w: Work) -> Floats:
    """Living tables end to end in an array that is to replace the work's."""
    number = w.counters[TABLES]
    tables = np.empty(number)
    top = 0
    for node in range(len(w.sizes)):
        half = w.heads[node]
        while half >= 0:
            if not half & 1:
                offset, size = w.offsets[half >> 1], w.sizes[node] * w.sizes[w.ends[half ^ 1]]
                tables[top : top + size] = w.tables[offset : offset + size]
                w.offsets[half >> 1] = top
                top += size
            half = w.nexts[half]
    w.counters[TABLES] = top
    return tables[:top]


@kernel
def pack_spans(w: Work) -> tuple[Ints, Ints, Ints, Floats]:
    """Begins, ends, places of uses and uses of living spans, end to end in arrays that are to replace the work's."""
    number = w.counters[SPANS]
    begins, ends, places = np.empty(number, dtype=np.int64), np.empty(number, dtype=np.int64), np.empty(number, dtype=np.int64)
    uses = np.empty(w.counters[USES])
    at, top = 0, 0
    for node in range(len(w.sizes)):
        first, size = w.span_firsts[node], w.sizes[node]
        w.span_firsts[node] = at
        for i in range(first, first + w.span_counts[node]):
            use = w.span_uses[i]
            begins[at], ends[at], places[at] = w.span_begins[i], w.span_ends[i], top
            uses[top : top + size] = w.uses[use : use + size]
            at += 1
            top += size
    w.counters[SPANS], w.counters[USES] = at, top
    return begins[:at], ends[:at], places[:at], uses[:top]


def new_queue(number: int) -> tuple[Ints, Flags]:
    """A queue with all nodes in it."""
    return np.arange(number), np.ones(number, dtype=np.bool_)
