"""Work -> less Work with the same optimum: the exact rules, one node at a time (`visit`).

- Strategies die that cost inf or have only inf in a table. Row and column minima of tables move into the nodes; a table of zeros goes.
- Strategy b dies if some a uses no more in any span and  c_a - c_b + sum_tables max_s (E[a, s] - E[b, s]) <= 0  (Goldstein).

Where a node can go altogether, `shrink_fold.py` takes it out.
"""

import numpy as np

from alpa_hpc.kernels import Truth, Whole, inner, kernel
from alpa_hpc.sharding.shrink_fold import fold_followers, fold_single, minimise_out
from alpa_hpc.sharding.shrink_state import (
    BAD,
    NOT_ALLOWED,
    OK,
    QUEUE_HEAD,
    QUEUE_LENGTH,
    Work,
    enqueue,
    enqueue_around,
    keep,
    stride,
    unlink,
)


@kernel
def drain(w: Work) -> Whole:
    """Look at every node of the queue until none has changed."""
    while w.counters[QUEUE_LENGTH] > 0:
        node = w.queue[w.counters[QUEUE_HEAD]]
        w.counters[QUEUE_HEAD] = (w.counters[QUEUE_HEAD] + 1) % len(w.queue)
        w.counters[QUEUE_LENGTH] -= 1
        w.queued[node] = False
        if w.sizes[node] == 0:
            continue
        status = visit(w, node)
        if status != OK:
            w.counters[BAD] = node
            enqueue(w, node)
            return status
    return OK


@inner
def visit(w: Work, node: Whole) -> Whole:
    """Apply every rule to one node."""
    if not _drop_forbidden(w, node):
        return NOT_ALLOWED
    _move_minima(w, node)
    if w.sizes[node] > 1:
        _drop_dominated(w, node)
    if w.sizes[node] == 1:
        return fold_single(w, node)
    if w.span_counts[node] == 0 and w.degrees[node] <= 2:
        return minimise_out(w, node)
    return fold_followers(w, node)


@inner
def _drop_forbidden(w: Work, node: Whole) -> Truth:
    size, start = w.sizes[node], w.starts[node]
    alive = np.ones(size, dtype=np.bool_)
    for s in range(size):
        alive[s] = w.costs[start + s] < np.inf
    half = w.heads[node]
    while half >= 0:
        offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
        others = w.sizes[w.ends[half ^ 1]]
        for s in range(size):
            t = 0
            while t < others and w.tables[offset + s * down + t * across] == np.inf:
                t += 1
            if t == others:
                alive[s] = False
        half = w.nexts[half]
    left = alive.sum()
    if 0 < left < size:
        keep(w, node, alive)
        enqueue_around(w, node)
    return left > 0


@inner
def _move_minima(w: Work, node: Whole) -> None:
    half = w.heads[node]
    while half >= 0:
        after = w.nexts[half]
        _move_side(w, half)
        _move_side(w, half ^ 1)
        offset = w.offsets[half >> 1]
        entries = w.sizes[node] * w.sizes[w.ends[half ^ 1]]
        if not w.tables[offset : offset + entries].any():
            enqueue(w, w.ends[half ^ 1])
            unlink(w, half)
            unlink(w, half ^ 1)
        half = after


@inner
def _move_side(w: Work, half: Whole) -> None:
    """Move the minimum of each row (seen from the half-edge's node) into the node's costs; rows of inf are left to `_drop_forbidden`."""
    node, offset = w.ends[half], w.offsets[half >> 1]
    down, across, others = stride(w, half), stride(w, half ^ 1), w.sizes[w.ends[half ^ 1]]
    for s in range(w.sizes[node]):
        row = offset + s * down
        least = np.inf
        for t in range(others):
            least = min(least, w.tables[row + t * across])
        if least != 0.0 and least < np.inf:
            for t in range(others):
                w.tables[row + t * across] -= least
            w.costs[w.starts[node] + s] += least


@inner
def _drop_dominated(w: Work, node: Whole) -> None:
    """From the last strategy to the first, each against those still alive: of two equal ones the lower number stays."""
    size, start = w.sizes[node], w.starts[node]
    alive = np.ones(size, dtype=np.bool_)
    num_dead = 0
    for b in range(size - 1, -1, -1):
        for a in range(size):
            if a != b and alive[a] and w.costs[start + a] <= w.costs[start + b] and _dominates(w, node, a, b):
                alive[b] = False
                num_dead += 1
                break
    if num_dead > 0:
        keep(w, node, alive)
        enqueue_around(w, node)


@inner
def _dominates(w: Work, node: Whole, a: Whole, b: Whole) -> Truth:
    for i in range(w.span_firsts[node], w.span_firsts[node] + w.span_counts[node]):
        if w.uses[w.span_uses[i] + a] > w.uses[w.span_uses[i] + b]:
            return False
    excess = w.costs[w.starts[node] + a] - w.costs[w.starts[node] + b]
    half = w.heads[node]
    while half >= 0:
        offset, down, across = w.offsets[half >> 1], stride(w, half), stride(w, half ^ 1)
        row_a, row_b = offset + a * down, offset + b * down
        # Rows have minimum 0, so a table never lowers the excess, and the first entry that lifts it above 0 decides.
        worst = 0.0
        for t in range(w.sizes[w.ends[half ^ 1]]):
            victim = w.tables[row_b + t * across]
            if victim < np.inf and w.tables[row_a + t * across] - victim > worst:
                worst = w.tables[row_a + t * across] - victim
                if excess + worst > 0.0:
                    return False
        excess += worst
        half = w.nexts[half]
    return True
