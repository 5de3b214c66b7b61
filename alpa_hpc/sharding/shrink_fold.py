"""Work -> Work without a node, exactly: the rules that take a node out of the problem and write down how its strategy follows.

- A node with one strategy is folded into its neighbours.
- A node whose strategy follows from a neighbour's (each of these allows just one) is folded into that neighbour, spans included.
- A node without spans and with at most two neighbours is minimised out; its best strategy becomes a table over theirs (PBQP's R0, RI, RII).
"""

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Truth, Whole, inner
from alpa_hpc.sharding.shrink_spans import append_spans, have_place_to_join, join_if_doubled
from alpa_hpc.sharding.shrink_state import (
    NO_SPACE,
    OK,
    TABLES,
    TRACE,
    Work,
    end_record,
    enqueue,
    find_half,
    link,
    record_parent,
    start_record,
    stride,
    unlink,
)

# A folded node's tables may become that much larger, all together; beyond it the node stays.
GROWTH = 2.0


@inner
def fold_single(w: Work, node: Whole) -> Whole:
    """Fold a node with one strategy into its neighbours."""
    if w.counters[TRACE] + 4 > len(w.trace):
        return NO_SPACE
    half = w.heads[node]
    while half >= 0:
        other = w.ends[half ^ 1]
        for t in range(w.sizes[other]):
            w.costs[w.starts[other] + t] += w.tables[w.offsets[half >> 1] + t]
        unlink(w, half ^ 1)
        enqueue(w, other)
        half = w.nexts[half]
    w.offset[0] += w.costs[w.starts[node]]
    at = start_record(w, node, 0)
    w.trace[at] = w.states[w.starts[node]]
    end_record(w, at + 1)
    _remove(w, node)
    return OK


@inner
def _remove(w: Work, node: Whole) -> None:
    w.heads[node] = -1
    w.degrees[node] = 0
    w.span_counts[node] = 0
    w.sizes[node] = 0


@inner
def minimise_out(w: Work, node: Whole) -> Whole:
    """The node's minimum over its strategies, for each pair of its neighbours' (one strategy stands for a neighbour that is not there)."""
    size, start = w.sizes[node], w.starts[node]
    first = w.heads[node]
    second = w.nexts[first] if first >= 0 else -1
    rows = w.sizes[w.ends[first ^ 1]] if first >= 0 else 1
    columns = w.sizes[w.ends[second ^ 1]] if second >= 0 else 1
    if w.counters[TRACE] + 7 + rows + columns + rows * columns > len(w.trace) or w.counters[TABLES] + rows * columns > len(w.tables):
        return NO_SPACE
    at = start_record(w, node, w.degrees[node])
    if first >= 0:
        at = record_parent(w, at, w.ends[first ^ 1])
    if second >= 0:
        at = record_parent(w, at, w.ends[second ^ 1])
    left = _gather(w, first) if first >= 0 else np.zeros((size, 1))
    right = _gather(w, second) if second >= 0 else np.zeros((size, 1))
    for s in range(size):
        left[s] += w.costs[start + s]
    best, states = min_plus(left, right)
    for place in range(rows * columns):
        w.trace[at + place] = w.states[start + states[place]]
    end_record(w, at + rows * columns)
    _replace(w, node, first, second, best)
    return OK


@inner
def _gather(w: Work, half: Whole) -> Floats:
    """The table, rows the strategies of the half-edge's node."""
    rows, columns = w.sizes[w.ends[half]], w.sizes[w.ends[half ^ 1]]
    offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
    table = np.empty((rows, columns))
    for s in range(rows):
        for t in range(columns):
            table[s, t] = w.tables[offset + s * down + t * across]
    return table


@inner
def min_plus(left: Floats, right: Floats) -> tuple[Floats, Ints]:
    """min_s left[s, r] + right[s, c] for all r and c, and the least s that gives it."""
    size, rows, columns = len(left), left.shape[1], right.shape[1]
    best, states = np.full(rows * columns, np.inf), np.zeros(rows * columns, dtype=np.int64)
    for r in range(rows):
        row, chosen = best[r * columns : (r + 1) * columns], states[r * columns : (r + 1) * columns]
        for s in range(size):
            cost = left[s, r]
            for c in range(columns):
                total = cost + right[s, c]
                is_less = total < row[c]
                row[c] = total if is_less else row[c]
                chosen[c] = s if is_less else chosen[c]
    return best, states


@inner
def _replace(w: Work, node: Whole, first: Whole, second: Whole, best: Floats) -> None:
    """Put the node's minimum where its edges were: into a neighbour's costs, or into a table between two neighbours."""
    if first < 0:
        w.offset[0] += best[0]
    elif second < 0:
        other = w.ends[first ^ 1]
        for t in range(len(best)):
            w.costs[w.starts[other] + t] += best[t]
        unlink(w, first ^ 1)
        enqueue(w, other)
    else:
        left, right = w.ends[first ^ 1], w.ends[second ^ 1]
        unlink(w, first ^ 1)
        unlink(w, second ^ 1)
        add_table(w, first >> 1, left, right, best)
        enqueue(w, left)
        enqueue(w, right)
    _remove(w, node)


@inner
def add_table(w: Work, edge: Whole, left: Whole, right: Whole, table: Floats) -> None:
    """Add a table (rows: `left`) to the edge of two nodes; where they have none, `edge`, which is free, becomes theirs."""
    rows, columns = w.sizes[left], w.sizes[right]
    known = find_half(w, left, right)
    if known < 0:
        offset = w.counters[TABLES]
        w.counters[TABLES] += rows * columns
        w.tables[offset : offset + rows * columns] = table
        w.offsets[edge] = offset
        link(w, 2 * edge, left)
        link(w, 2 * edge + 1, right)
        return
    offset, down, across = w.offsets[known >> 1], stride(w, known), stride(w, known ^ 1)
    for r in range(rows):
        for c in range(columns):
            w.tables[offset + r * down + c * across] += table[r * columns + c]


@inner
def fold_followers(w: Work, node: Whole) -> Whole:
    """Fold the node into a neighbour it follows, or else all neighbours that follow it into the node."""
    half = w.heads[node]
    status = OK
    while half >= 0 and status == OK:
        after = w.nexts[half]
        if _follows(w, half) and _grows_little(w, half ^ 1):
            into = w.ends[half ^ 1]
            status = _fold_into(w, half ^ 1)
            join_if_doubled(w, into)
            return status
        if _follows(w, half ^ 1) and _grows_little(w, half):
            status = _fold_into(w, half)
        half = after
    join_if_doubled(w, node)
    return status


@inner
def _follows(w: Work, half: Whole) -> Truth:
    """Whether each strategy of the other node allows just one of the half-edge's node."""
    offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
    for t in range(w.sizes[w.ends[half ^ 1]]):
        allowed = 0
        for s in range(w.sizes[w.ends[half]]):
            if w.tables[offset + s * down + t * across] < np.inf:
                allowed += 1
                if allowed > 1:
                    return False
        if allowed != 1:
            return False
    return True


@inner
def _grows_little(w: Work, half: Whole) -> Truth:
    """Whether folding the other node into the half-edge's node leaves tables of not much more entries."""
    node, gone = w.ends[half], w.ends[half ^ 1]
    before, after = w.sizes[node] * w.sizes[gone], 0
    other = w.heads[gone]
    while other >= 0:
        if other != half ^ 1:
            columns = w.sizes[w.ends[other ^ 1]]
            before += w.sizes[gone] * columns
            after += w.sizes[node] * columns
        other = w.nexts[other]
    return after <= GROWTH * before


@inner
def _fold_into(w: Work, half: Whole) -> Whole:
    """Fold the other node, which follows the half-edge's node, into it."""
    node, gone = w.ends[half], w.ends[half ^ 1]
    size = w.sizes[node]
    if not _has_space(w, node, gone):
        return NO_SPACE
    follows = np.zeros(size, dtype=np.int64)
    offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
    for s in range(size):
        while w.tables[offset + s * down + follows[s] * across] == np.inf:
            follows[s] += 1
        w.costs[w.starts[node] + s] += w.tables[offset + s * down + follows[s] * across] + w.costs[w.starts[gone] + follows[s]]
    at = record_parent(w, start_record(w, gone, 1), node)
    for s in range(size):
        w.trace[at + s] = w.states[w.starts[gone] + follows[s]]
    end_record(w, at + size)
    unlink(w, half)
    unlink(w, half ^ 1)
    _move_edges(w, node, gone, follows)
    append_spans(w, node, gone, follows)
    _remove(w, gone)
    enqueue(w, node)
    return OK


@inner
def _has_space(w: Work, node: Whole, gone: Whole) -> Truth:
    size, entries = w.sizes[node], 0
    half = w.heads[gone]
    while half >= 0:
        entries += size * w.sizes[w.ends[half ^ 1]]
        half = w.nexts[half]
    return (
        w.counters[TRACE] + 5 + 2 * size <= len(w.trace)
        and w.counters[TABLES] + entries <= len(w.tables)
        and have_place_to_join(w, node, gone)
    )


@inner
def _move_edges(w: Work, node: Whole, gone: Whole, follows: Ints) -> None:
    size = w.sizes[node]
    half = w.heads[gone]
    while half >= 0:
        after = w.nexts[half]
        other = w.ends[half ^ 1]
        columns = w.sizes[other]
        offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
        table = np.empty(size * columns)
        for s in range(size):
            for t in range(columns):
                table[s * columns + t] = w.tables[offset + follows[s] * down + t * across]
        unlink(w, half)
        unlink(w, half ^ 1)
        add_table(w, half >> 1, node, other, table)
        enqueue(w, other)
        half = after
