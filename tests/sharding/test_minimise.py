"""Elimination = brute force: the kept tables are conditional minima, and the way back reaches them; equal structures share a plan."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.eliminate import Table
from alpa_hpc.sharding.minimise import minimise, restore

WIDE = 1_000_000


@st.composite
def networks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Table], frozenset[int]]:
    """Sizes of up to six variables, tables of up to three of them (a table a variable at the least), and the variables to keep."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = [random_table(rng, (v,), sizes) for v in range(len(sizes))]
    for _ in range(draw(st.integers(0, 6))):
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(0, 4)])
        tables.append(random_table(rng, scope, sizes))
    return sizes, tables, draw(st.frozensets(st.sampled_from(range(len(sizes)))))


def random_table(rng: np.random.Generator, scope: tuple[int, ...], sizes: tuple[int, ...]) -> Table:
    shape = tuple(sizes[v] for v in scope)
    return Table(scope, np.where(rng.random(shape) < 0.15, np.inf, rng.integers(0, 4, shape).astype(float)))


def entry(tables: Sequence[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.score[tuple(states[v] for v in table.scope)] for table in tables))


@settings(max_examples=200, deadline=None)
@given(networks())
def test_kept_tables_are_the_conditional_minima_and_the_way_back_reaches_them(
    network: tuple[tuple[int, ...], list[Table], frozenset[int]],
) -> None:
    sizes, tables, keep = network
    gone = [v for v in range(len(sizes)) if v not in keep]
    least = minimise(tables, keep, WIDE)
    assert least.left <= keep
    for states in product(*(range(sizes[v]) for v in sorted(keep))):
        kept = dict(zip(sorted(keep), states, strict=True))
        costs = [entry(tables, kept | dict(zip(gone, rest, strict=True))) for rest in product(*(range(sizes[v]) for v in gone))]
        assert entry(least.tables, kept) == min(costs)
        complete = restore(least.undo, kept)
        assert set(complete) == set(range(len(sizes)))
        assert {v: complete[v] for v in kept} == kept
        assert entry(tables, complete) == min(costs)


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(1, 60))
def test_a_cap_leaves_wide_variables_and_loses_nothing(
    network: tuple[tuple[int, ...], list[Table], frozenset[int]], table_cap: int
) -> None:
    sizes, tables, keep = network
    least = minimise(tables, keep, table_cap)
    rest = minimise(least.tables, frozenset(), WIDE)
    best = minimise(tables, frozenset(), WIDE)
    assert entry(rest.tables, {}) == entry(best.tables, {})
    complete = restore(least.undo, restore(rest.undo, {}))
    assert len(complete) == len(sizes)
    assert entry(tables, complete) == entry(best.tables, {})


def test_no_table_above_the_cap_is_made() -> None:
    tables = [Table((v, v + 1), np.ones((5, 5))) for v in range(4)]
    assert minimise(tables, frozenset(), 25).left == frozenset()
    assert minimise(tables, frozenset(), 24).left == frozenset(range(5))


def test_equal_structures_with_other_names_give_the_same_tables() -> None:
    rng = np.random.default_rng(0)
    tables = [random_table(rng, scope, (3, 4, 2, 3)) for scope in ((0, 1), (2, 1), (1, 3), (3, 2))]
    moved = [Table(tuple(v + 100 for v in table.scope), table.score) for table in tables]
    here, there = minimise(tables, frozenset({1}), WIDE), minimise(moved, frozenset({101}), WIDE)
    assert here.undo.plan is there.undo.plan
    assert there.undo.variables == tuple(v + 100 for v in here.undo.variables)
    for one, other in zip(here.tables, there.tables, strict=True):
        np.testing.assert_array_equal(one.score, other.score)
    assert restore(there.undo, {101: 2}) == {v + 100: state for v, state in restore(here.undo, {1: 2}).items()}


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_of_equal_states_the_lowest_wins(scale: float) -> None:
    least = minimise([Table((7,), scale * np.array([2.0, 1.0, 1.0])), Table((7,), scale * np.array([0.3, 0.1, 0.1]))], frozenset(), WIDE)
    assert restore(least.undo, {}) == {7: 1}
