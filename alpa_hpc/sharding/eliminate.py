"""Scopes of tables and sizes of their variables -> the order in which variables are eliminated (`minimise.py` does it).

The variable that leaves the smallest table goes first, never one whose own table exceeds a cap. The order depends on scopes and shapes
alone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from alpa_hpc.sharding.problem import Costs

Scope = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Costs `score` over the variables of `scope`, axes in scope order; +inf = not allowed, never NaN."""

    scope: Scope
    score: Costs


def elimination_order(scopes: Sequence[Scope], sizes: Shape, kept: frozenset[int], table_cap: int) -> tuple[int, ...]:
    """Variables outside `kept`, the one that leaves the smallest table first; none whose joint table has more than `table_cap` entries.

    The joint table has the variable's own states as one more axis.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)

    def entries(v: int) -> int:
        return prod([sizes[u] for u in neighbours[v]]) // sizes[v]

    current = {v: entries(v) for v in range(len(sizes)) if v not in kept and neighbours[v]}
    heap = [(size, v) for v, size in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        size, v = heapq.heappop(heap)
        if current.get(v) != size or size * sizes[v] > table_cap:
            continue
        del current[v]
        order.append(v)
        clique = neighbours[v] - {v}
        for u in sorted(clique):
            neighbours[u] |= clique
            neighbours[u].discard(v)
            if u in current and (now := entries(u)) != current[u]:
                current[u] = now
                heapq.heappush(heap, (now, u))
    return tuple(order)
