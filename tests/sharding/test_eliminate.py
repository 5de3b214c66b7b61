"""Elimination gives the minimum over all states of the variables it removes, and the parts of that minimum."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.sharding.eliminate import Factor, Table, back_substitute, combine, eliminate, eliminate_costs, elimination_order, make_factor
from tests.oracles import factor_entry

WIDE = 10**6


@st.composite
def networks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Factor], frozenset[int]]:
    """Sizes, factors of any scope and a set to keep; few distinct costs, so ties and infinities are common."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [_random_factor(rng, (v,), sizes) for v in range(len(sizes))]
    for _ in range(draw(st.integers(0, 6))):
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(0, 4)])
        factors.append(_random_factor(rng, scope, sizes))
    return sizes, factors, draw(st.frozensets(st.sampled_from(range(len(sizes)))))


def _random_factor(rng: np.random.Generator, scope: tuple[int, ...], sizes: tuple[int, ...]) -> Factor:
    shape = tuple(sizes[v] for v in scope)
    seconds = rng.integers(0, 4, shape).astype(float)
    seconds = np.where(rng.random(shape) < 0.15, np.inf, seconds)
    fixed, inflight = rng.integers(0, 4, (2, *shape)).astype(float)
    return make_factor(scope, seconds + 0.5 * fixed + 0.25 * inflight, fixed, inflight, seconds)


@settings(max_examples=200, deadline=None)
@given(networks())
def test_kept_tables_are_the_conditional_minima(network: tuple[tuple[int, ...], list[Factor], frozenset[int]]) -> None:
    sizes, factors, keep = network
    gone = [v for v in range(len(sizes)) if v not in keep]
    left = eliminate(factors, keep, WIDE)
    tables = eliminate_costs([Table(factor.scope, factor.score) for factor in factors], keep, WIDE)
    assert {v for factor in left.factors for v in factor.scope} <= keep
    for states in product(*(range(sizes[v]) for v in sorted(keep))):
        kept = dict(zip(sorted(keep), states, strict=True))
        entries = [factor_entry(factors, kept | dict(zip(gone, rest, strict=True))) for rest in product(*(range(sizes[v]) for v in gone))]
        score, *parts = factor_entry(left.factors, kept)
        assert score == min(entry[0] for entry in entries)
        assert sum(table.score[tuple(kept[v] for v in table.scope)] for table in tables) == score
        complete = back_substitute(left.trace, kept)
        assert set(complete) == set(range(len(sizes)))
        np.testing.assert_array_equal(factor_entry(factors, complete), [score, *parts])


@given(networks(), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_no_table_above_the_cap_is_made(network: tuple[tuple[int, ...], list[Factor], frozenset[int]], table_cap: int) -> None:
    sizes, factors, keep = network
    left = eliminate(factors, keep, table_cap)
    for decision in left.trace:
        assert decision.states.size * sizes[decision.variable] <= table_cap
    remaining = {v for factor in left.factors for v in factor.scope} - keep
    assert remaining == set(range(len(sizes))) - keep - {decision.variable for decision in left.trace}
    rest = eliminate(left.factors, keep, WIDE)
    np.testing.assert_array_equal(
        combine(rest.factors, tuple(keep), tuple(sizes[v] for v in keep)).score,
        combine(eliminate(factors, keep, WIDE).factors, tuple(keep), tuple(sizes[v] for v in keep)).score,
    )


@given(networks())
@settings(max_examples=100, deadline=None)
def test_a_combined_factor_has_every_entry_of_its_factors(network: tuple[tuple[int, ...], list[Factor], frozenset[int]]) -> None:
    sizes, factors, _ = network
    one = combine(factors, tuple(range(len(sizes))), sizes)
    for states in product(*map(range, sizes)):
        np.testing.assert_array_equal(factor_entry([one], dict(enumerate(states))), factor_entry(factors, dict(enumerate(states))))


def test_equal_structures_with_other_numbers_give_the_same_tables() -> None:
    rng = np.random.default_rng(0)
    factors = [_random_factor(rng, scope, (3, 4, 2, 3)) for scope in ((0, 1), (2, 1), (1, 3), (3, 2))]
    moved = [Factor(tuple(v + 100 for v in factor.scope), factor.score, factor.parts) for factor in factors]
    here, there = eliminate(factors, frozenset({1}), WIDE), eliminate(moved, frozenset({101}), WIDE)
    for one, other in zip(here.factors, there.factors, strict=True):
        assert tuple(v + 100 for v in one.scope) == other.scope
        np.testing.assert_array_equal(one.score, other.score)
    assert [decision.variable + 100 for decision in here.trace] == [decision.variable for decision in there.trace]


def test_an_impossible_network_has_infinite_score_and_no_nan() -> None:
    blocked = make_factor((0, 1), np.full((3, 2), np.inf), 1.0, 0.0, np.inf)
    (left,) = eliminate([blocked], frozenset(), WIDE).factors
    assert left.score == np.inf
    assert left.seconds == np.inf
    assert left.fixed == 1.0


def test_of_equal_states_the_lowest_index_wins() -> None:
    (decision,) = eliminate([make_factor((7,), np.array([2.0, 1.0, 1.0]), 0.0, 0.0, 0.0)], frozenset(), WIDE).trace
    assert decision.states == 1


@pytest.mark.parametrize("length", [3, 10])
def test_a_chain_is_eliminated_from_its_ends_with_small_tables(length: int) -> None:
    scopes = [(v, v + 1) for v in range(length - 1)]
    assert len(elimination_order(scopes, (5,) * length, frozenset(), 25)) == length
    assert elimination_order(scopes, (5,) * length, frozenset(), 24) == ()
