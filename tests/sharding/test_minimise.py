"""Elimination = brute force: the kept tables are conditional minima, and the way back reaches them."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.minimise import Undo, minimise, prepare, restore
from alpa_hpc.sharding.tables import joined
from tests.sharding.networks import Table, entry, random_table, separate, tables_of, whole

WIDE = 1_000_000
Network = tuple[tuple[int, ...], list[Table], frozenset[int]]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Sizes of up to six variables, tables of up to three of them (a table a variable at the least), and the variables to keep."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = [random_table(rng, (v,), sizes) for v in range(len(sizes))]
    for _ in range(draw(st.integers(0, 6))):
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(0, 4)])
        tables.append(random_table(rng, scope, sizes))
    return sizes, tables, draw(st.frozensets(st.sampled_from(range(len(sizes)))))


@settings(max_examples=200, deadline=None)
@given(networks())
def test_kept_tables_are_the_conditional_minima_and_the_way_back_reaches_them(network: Network) -> None:
    sizes, tables, keep = network
    gone = [v for v in range(len(sizes)) if v not in keep]
    least = minimise(tables_of(tables), keep, WIDE)
    assert least.left == {v for v in keep if sizes[v] > 1}
    for states in product(*(range(sizes[v]) for v in sorted(keep))):
        kept = dict(zip(sorted(keep), states, strict=True))
        costs = [entry(tables, kept | dict(zip(gone, rest, strict=True))) for rest in product(*(range(sizes[v]) for v in gone))]
        assert entry(separate(least.tables), kept) == min(costs)
        complete = dict.fromkeys(range(len(sizes)), 0) | restore(least.undo, kept)
        assert {v: complete[v] for v in kept} == kept
        assert entry(tables, complete) == min(costs)


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(1, 60))
def test_a_cap_leaves_wide_variables_and_loses_nothing(network: Network, table_cap: int) -> None:
    sizes, tables, keep = network
    least = minimise(tables_of(tables), keep, table_cap)
    rest = minimise(least.tables, frozenset(), WIDE)
    best = minimise(tables_of(tables), frozenset(), WIDE)
    assert rest.tables.constant == best.tables.constant
    assert prepare(tables_of(tables), frozenset(), table_cap).is_complete != bool(minimise(tables_of(tables), frozenset(), table_cap).left)
    complete = dict.fromkeys(range(len(sizes)), 0) | restore(least.undo, restore(rest.undo, {}))
    assert entry(tables, complete) == best.tables.constant


def test_wide_joint_tables_are_conditional_minima_too() -> None:
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for _ in range(150):
        sizes = [int(size) for size in rng.integers(2, 12, 5)]
        scopes = [rng.permutation(5)[: rng.integers(1, 5)].tolist() for _ in range(rng.integers(3, 9))]
        tables = [random_table(rng, scope, sizes) for scope in [*scopes, *([v] for v in range(5))]]
        keep = frozenset(rng.permutation(5)[: rng.integers(0, 4)].tolist())
        least = minimise(tables_of(tables), keep, WIDE)
        kept = sorted(keep)
        dense = whole(tables, range(5), sizes)
        np.testing.assert_array_equal(whole(separate(least.tables), kept, sizes), dense.min(tuple(v for v in range(5) if v not in keep)))
        states = {v: int(rng.integers(sizes[v])) for v in kept}
        assert entry(tables, restore(least.undo, states)) == dense[tuple(states.get(v, slice(None)) for v in range(5))].min()
        seen.update(kinds(least.undo))
    assert min(seen[kind] for kind in ("one group", "two groups", "shared axes", "own axes of both")) >= 25, seen


def kinds(undo: Undo) -> list[str]:
    """How the steps formed their joint tables."""
    steps = undo.steps
    found: list[str] = []
    for k, split in enumerate(steps.splits.tolist()):
        axes = [
            {int(axis) for t in part for axis in steps.axes[steps.axis_starts[t] + 1 : steps.axis_starts[t + 1]]}
            for part in (steps.inputs[steps.input_starts[k] : split], steps.inputs[split : steps.input_starts[k + 1]])
        ]
        found.append("two groups" if axes[0] and axes[1] else "one group")
        found += ["shared axes"] if axes[0] & axes[1] else []
        found += ["own axes of both"] if axes[0] - axes[1] and axes[1] - axes[0] else []
    return found


def test_no_table_above_the_cap_is_made() -> None:
    tables = tables_of([Table((v, v + 1), np.ones((5, 5))) for v in range(4)])
    assert minimise(tables, frozenset(), 25).left == frozenset()
    assert minimise(tables, frozenset(), 24).left == frozenset(range(5))


def test_entries_and_sums_are_known_beforehand() -> None:
    tables = tables_of([Table((v, v + 1), np.ones((5, 5))) for v in range(4)])
    elimination = prepare(tables, frozenset(), 25)
    assert elimination.num_entries == 4 * 25 + 4 * 5 + 1
    assert elimination.num_sums == 4 * 25 + 5


def test_other_names_give_the_same_tables() -> None:
    rng = np.random.default_rng(0)
    tables = tables_of([random_table(rng, scope, (3, 4, 2, 3)) for scope in ((0, 1), (2, 1), (1, 3), (3, 2))])
    moved = tables.renamed(tables.names + 100)
    here, there = minimise(tables, frozenset({1}), WIDE), minimise(moved, frozenset({101}), WIDE)
    np.testing.assert_array_equal(here.tables.column(1, 4), there.tables.column(101, 4))
    assert restore(there.undo, {101: 2}) == {v + 100: state for v, state in restore(here.undo, {1: 2}).items()}


@settings(max_examples=100, deadline=None)
@given(networks(), networks())
def test_sums_are_joined_by_name(network: Network, other: Network) -> None:
    sizes, tables, _ = network
    rng = np.random.default_rng(0)
    more = [random_table(rng, [v for v in table.scope if v < len(sizes)], sizes) for table in other[1]]
    both, together = joined([tables_of(tables), tables_of(more)]), tables_of([*tables, *more])
    np.testing.assert_array_equal(whole(separate(both), range(len(sizes)), sizes), whole(separate(together), range(len(sizes)), sizes))
    assert both.variables == together.variables


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_of_equal_states_the_lowest_wins(scale: float) -> None:
    tables = [Table((7,), scale * np.array([2.0, 1.0, 1.0])), Table((7,), scale * np.array([0.3, 0.1, 0.1]))]
    assert restore(minimise(tables_of(tables), frozenset(), WIDE).undo, {}) == {7: 1}
