"""Elimination orders: every variable that may go goes, none through a table above the cap."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.eliminate import elimination_order


@pytest.mark.parametrize("length", [3, 10])
def test_a_chain_is_eliminated_from_its_ends_with_small_tables(length: int) -> None:
    scopes = [(v, v + 1) for v in range(length - 1)]
    assert len(elimination_order(scopes, (5,) * length, frozenset(), 25)) == length
    assert elimination_order(scopes, (5,) * length, frozenset(), 24) == ()


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
    order = elimination_order([tuple(scope) for scope in scopes], tuple(sizes), kept, table_cap)
    assert not set(order) & kept
    for v in order:
        clique = joined.pop(v)
        assert prod(sizes[u] for u in clique) <= table_cap
        for u in clique - {v}:
            joined[u] = (joined[u] | clique) - {v}
    for v, clique in joined.items():
        assert v in kept or not clique or prod(sizes[u] for u in clique) > table_cap
