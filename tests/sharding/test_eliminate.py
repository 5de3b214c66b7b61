"""Elimination orders: every variable that may go goes, none through a table above the cap."""

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.eliminate import elimination_order
from alpa_hpc.sharding.flat import starts_of


def order_of(scopes: Sequence[Sequence[int]], sizes: Sequence[int], kept: frozenset[int], table_cap: int) -> list[int]:
    flat = np.array([v for scope in scopes for v in scope], dtype=np.int64)
    flags = np.array([v in kept for v in range(len(sizes))])
    return elimination_order(np.array(sizes), starts_of([len(scope) for scope in scopes]), flat, flags, float(table_cap)).tolist()


@pytest.mark.parametrize("length", [3, 10])
def test_a_chain_is_eliminated_from_its_ends_with_small_tables(length: int) -> None:
    scopes = [(v, v + 1) for v in range(length - 1)]
    assert len(order_of(scopes, (5,) * length, frozenset(), 25)) == length
    assert order_of(scopes, (5,) * length, frozenset(), 24) == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=8),
    st.frozensets(st.integers(0, 5)),
    st.integers(1, 300),
)
def test_no_table_above_the_cap_and_none_left_below_it(
    sizes: list[int], scopes: list[list[int]], kept: frozenset[int], table_cap: int
) -> None:
    joined = {v: {u for scope in scopes if v in scope for u in scope} for v in range(6)}
    order = order_of(scopes, sizes, kept, table_cap)
    assert not set(order) & kept
    for v in order:
        clique = joined.pop(v)
        assert prod(sizes[u] for u in clique) <= table_cap
        for u in clique - {v}:
            joined[u] = (joined[u] | clique) - {v}
    for v, clique in joined.items():
        assert v in kept or not clique or prod(sizes[u] for u in clique) > table_cap


def test_many_variables_around_a_few_leave_in_the_order_of_the_smallest_table() -> None:
    """Against a plain implementation, with neighbourhoods that grow far beyond what they start with."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = [int(size) for size in rng.integers(2, 6, 60)]
        scopes = [[v] for v in range(60)] + [sorted(rng.choice(60, 2, replace=False).tolist()) for _ in range(90)]
        kept = frozenset(rng.choice(60, 5, replace=False).tolist())
        assert order_of(scopes, sizes, kept, 100_000) == plain_order(scopes, sizes, kept, 100_000)


def plain_order(scopes: Sequence[Sequence[int]], sizes: Sequence[int], kept: frozenset[int], table_cap: int) -> list[int]:
    joined = {v: {u for scope in scopes if v in scope for u in scope} for v in range(len(sizes))}
    order: list[int] = []
    while True:
        entries = {v: prod(sizes[u] for u in clique - {v}) for v, clique in joined.items() if v not in kept}
        allowed = [(size, v) for v, size in entries.items() if size * sizes[v] <= table_cap]
        if not allowed:
            return order
        _, v = min(allowed)
        order.append(v)
        clique = joined.pop(v)
        for u in clique - {v}:
            joined[u] = (joined[u] | clique) - {v}
