"""Scopes of tables and sizes of their variables -> the order in which variables are eliminated (`minimise.py` does it).

The variable that leaves the smallest table goes first, never one whose own table exceeds a cap. The order depends on scopes and sizes
alone.
"""

import numpy as np

from alpa_hpc.kernels import Flags, Floats, Ints, Real, Whole, copy_into, inner, kernel


@kernel
def elimination_order(sizes: Ints, scope_starts: Ints, scopes: Ints, kept: Flags, table_cap: float) -> Ints:
    """Variables that are not `kept`, the one that leaves the smallest table first, none whose joint table exceeds `table_cap` entries.

    Table t is over `scopes[scope_starts[t]:scope_starts[t + 1]]`. The joint table has the variable's own states as one more axis. Variables
    without a table stay.
    """
    num_variables = len(sizes)
    starts, lengths, pool = _neighbours(num_variables, scope_starts, scopes)
    rooms, used = lengths.copy(), len(pool)
    tree = _tree(num_variables)
    for v in scopes:
        if not kept[v]:
            _set(tree, v, _entries(sizes, pool[starts[v] : starts[v] + lengths[v]]))
    order = np.empty(num_variables, np.int64)
    count = 0
    while tree[1] < np.inf:
        size, v = tree[1], _first(tree)
        _set(tree, v, np.inf)
        if size * sizes[v] > table_cap:
            continue
        order[count] = v
        count += 1
        clique = pool[starts[v] : starts[v] + lengths[v]].copy()
        for u in clique:
            merged = _union(pool[starts[u] : starts[u] + lengths[u]], clique, u, v)
            if len(merged) > rooms[u]:
                starts[u], rooms[u] = used, 2 * len(merged)
                used += rooms[u]
                pool = _with_room(pool, used)
            lengths[u] = len(merged)
            copy_into(pool[starts[u] : starts[u] + lengths[u]], merged)
            if not kept[u]:
                _set(tree, u, _entries(sizes, merged))
    return order[:count]


@inner
def _tree(num_leaves: int) -> Floats:
    """A binary tree of minima, node i above 2 i and 2 i + 1, with infinity everywhere: leaves are its second half."""
    size = 1
    while size < num_leaves:
        size *= 2
    return np.full(2 * size, np.inf)


@inner
def _set(tree: Floats, leaf: Whole, key: Real) -> None:
    at = leaf + len(tree) // 2
    tree[at] = key
    while at > 1:
        at //= 2
        tree[at] = min(tree[2 * at], tree[2 * at + 1])


@inner
def _first(tree: Floats) -> Whole:
    """The lowest leaf with the least key."""
    at = 1
    while at < len(tree) // 2:
        at = 2 * at if tree[2 * at] == tree[1] else 2 * at + 1
    return at - len(tree) // 2


@inner
def _neighbours(num_variables: int, scope_starts: Ints, scopes: Ints) -> tuple[Ints, Ints, Ints]:
    """The variables that share a table with each one, ascending: where they start, how many they are, and all of them."""
    starts = np.zeros(num_variables + 1, np.int64)
    for t in range(len(scope_starts) - 1):
        width = scope_starts[t + 1] - scope_starts[t]
        for i in range(scope_starts[t], scope_starts[t + 1]):
            starts[scopes[i] + 1] += width - 1
    for v in range(num_variables):
        starts[v + 1] += starts[v]
    pool = np.empty(starts[num_variables], np.int64)
    lengths = np.zeros(num_variables, np.int64)
    for t in range(len(scope_starts) - 1):
        scope = scopes[scope_starts[t] : scope_starts[t + 1]]
        for v in scope:
            for u in scope:
                if u != v:
                    lengths[v] += _insert(pool, starts[v], lengths[v], u)
    return starts[:num_variables], lengths, pool


@inner
def _insert(pool: Ints, start: Whole, length: Whole, new: Whole) -> int:
    """Put a number into an ascending list in which it is at most once; by how much the list grew."""
    end = start + length
    at = end
    while at > start and pool[at - 1] >= new:
        at -= 1
    if at < end and pool[at] == new:
        return 0
    for i in range(end, at, -1):
        pool[i] = pool[i - 1]
    pool[at] = new
    return 1


@inner
def _entries(sizes: Ints, others: Ints) -> float:
    product = 1.0
    for u in others:
        product *= float(sizes[u])
    return product


@inner
def _union(ones: Ints, others: Ints, without: Whole, nor: Whole) -> Ints:
    """Two ascending lists as one, two numbers left out."""
    merged = np.empty(len(ones) + len(others), np.int64)
    count, i, j = 0, 0, 0
    while i < len(ones) or j < len(others):
        if j == len(others) or (i < len(ones) and ones[i] <= others[j]):
            new = ones[i]
            j += j < len(others) and others[j] == new
            i += 1
        else:
            new = others[j]
            j += 1
        if new != without and new != nor:  # noqa: PLR1714 (two numbers cost less than a tuple)
            merged[count] = new
            count += 1
    return merged[:count]


@inner
def _with_room(pool: Ints, used: Whole) -> Ints:
    if used <= len(pool):
        return pool
    longer = np.empty(2 * used, np.int64)
    copy_into(longer[: len(pool)], pool)
    return longer
