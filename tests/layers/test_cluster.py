"""Eq. 6 by the programme = Eq. 6 by trying every cut."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.errors import TraceError
from alpa_hpc.layers.cluster import Crossing, cluster_equations, received_bytes


@st.composite
def cases(draw):
    count = draw(st.integers(3, 8))
    flops = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    crossings = []
    for producer in range(count - 1):
        readers = draw(st.sets(st.integers(producer + 1, count - 1), max_size=3))
        if readers:
            crossings.append(Crossing(draw(st.integers(1, 20)), producer, tuple(sorted(readers))))
    return flops, crossings, draw(st.integers(1, count)), draw(st.sampled_from([0.0, 0.3, 1.0]))


def received(crossings, first, last):
    return sum(v.size for v in crossings if v.producer < first and any(first <= reader < last for reader in v.readers))


def score(flops, crossings, cuts):
    bounds = [0, *cuts, len(flops)]
    runs = list(itertools.pairwise(bounds))
    costs = [received(crossings, first, last) for first, last in runs]
    work = [sum(flops[first:last]) for first, last in runs]
    average = max(sum(flops) / len(runs), 1.0)
    return max(costs), sum(costs), sum((w / average - 1) ** 2 for w in work)


def brute_force(flops, crossings, num_layers, imbalance):
    average = sum(flops) / num_layers
    most = (1 + imbalance) * max(average, *flops)
    for least in (average / (1 + imbalance), 0.0):
        scores = []
        for cuts in itertools.combinations(range(1, len(flops)), num_layers - 1):
            work = [sum(flops[first:last]) for first, last in itertools.pairwise([0, *cuts, len(flops)])]
            if all(least - 1e-9 <= w <= most + 1e-9 for w in work):
                scores.append(score(flops, crossings, cuts))
        if scores:
            return min(scores)
    return None


@settings(max_examples=120, deadline=None)
@given(cases())
def test_programme_equals_brute_force(case):
    flops, crossings, num_layers, imbalance = case
    expected = brute_force(flops, crossings, num_layers, imbalance)
    patterns = range(len(flops))
    if expected is None:
        with pytest.raises(TraceError, match="no cut into"):
            cluster_equations(flops, crossings, patterns, num_layers=num_layers, imbalance=imbalance)
        return
    cuts = cluster_equations(flops, crossings, patterns, num_layers=num_layers, imbalance=imbalance)
    assert list(cuts) == sorted(set(cuts))
    np.testing.assert_allclose(score(flops, crossings, cuts), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_received_bytes_counts_each_value_once(case):
    flops, crossings, _, _ = case
    table = received_bytes(len(flops), crossings)
    for first, last in itertools.combinations(range(len(flops) + 1), 2):
        assert table[first, last] == received(crossings, first, last)


def test_repeated_blocks_are_cut_at_one_place_of_their_pattern():
    block, repeats = [1, 8, 3, 8, 2], 12
    flops = [5, *block * repeats, 30]
    crossings = [Crossing(10, position, (position + 1,)) for position in range(len(flops) - 1)]
    patterns = ["first", *range(5), *list(range(5)) * (repeats - 1), "last"]
    cuts = cluster_equations(flops, crossings, patterns, num_layers=6, imbalance=0.5)
    lengths = np.diff(cuts)
    assert len(set(lengths)) == 1 and lengths[0] % len(block) == 0


def test_too_many_layers_are_refused():
    with pytest.raises(TraceError, match="3 forward equations cannot be cut into 4 layers"):
        cluster_equations([1, 1, 1], [], range(3), num_layers=4, imbalance=0.5)


def test_2000_equations_take_seconds():
    rng = np.random.default_rng(0)
    crossings = [Crossing(int(rng.integers(1, 100)), p, (p + 1, min(1999, p + 7))) for p in range(1990)]
    start = time.perf_counter()
    cuts = cluster_equations(rng.integers(1, 100, 2000).tolist(), crossings, range(2000), num_layers=16, imbalance=0.5)
    assert len(cuts) == 15
    assert time.perf_counter() - start < 20
