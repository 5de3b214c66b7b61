"""All means together, and each alone, give the optimum or say what is missing to it; no bound is ever above the optimum."""

import time
from collections.abc import Callable
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_hpc.kernels import Ints
from alpa_hpc.sharding.descent import descend, repair, total_cost
from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat, flatten, held_over_time, part_of, parts_of
from alpa_hpc.sharding.lagrangian import relax
from alpa_hpc.sharding.linear import HighsSolver
from alpa_hpc.sharding.message_graph import Graph, make_graph
from alpa_hpc.sharding.neighbourhood import extract, grow
from alpa_hpc.sharding.search import Deadline, SearchOptions, search
from alpa_hpc.sharding.shortage import find_shortage
from alpa_hpc.sharding.shrink import NoRoomError, NotAllowedError
from alpa_hpc.sharding.solution import SolveMethod
from alpa_hpc.sharding.tight import num_grouped, solve_tight
from tests.sharding.flat_problems import all_flat_choices, flat_optimum, flat_problems, hard_problems
from tests.sharding.test_solve import dense

NONE = np.zeros(0, dtype=np.int64)
ALL_MEANS = SearchOptions()
NO_TABLES = SearchOptions(table_cap=1)
NO_MIP = SearchOptions(table_cap=1, mip_cap=0)
LARGE = st.one_of(flat_problems(max_nodes=7, max_size=4, max_edges=24), hard_problems())


def _later(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds)


def _check(problem: FlatProblem, options: SearchOptions, seconds: float) -> float:
    """Everything an answer must keep to whatever the time; its gap (inf: no assignment)."""
    best = flat_optimum(problem)
    try:
        answer = search(problem, options, _later(seconds))
    except (NotAllowedError, NoRoomError):
        assert best == inf
        return 0.0
    assert answer.bound <= best
    if not len(answer.choices):
        return 0.0 if best == inf == answer.bound else inf
    evaluation = evaluate_flat(problem, answer.choices)
    assert evaluation.excess <= 0
    assert evaluation.cost == answer.cost >= best
    return answer.cost - answer.bound


@settings(max_examples=300, deadline=None)
@given(LARGE)
def test_all_means_together_equal_brute_force(problem: FlatProblem) -> None:
    assert _check(problem, ALL_MEANS, 60.0) == 0


@settings(max_examples=200, deadline=None)
@given(LARGE)
def test_bounds_and_mip_equal_brute_force(problem: FlatProblem) -> None:
    assert _check(problem, NO_TABLES, 60.0) == 0


@pytest.mark.parametrize("seconds", [0.0, 0.02])
@settings(max_examples=40, deadline=None)
@given(problem=LARGE)
def test_out_of_time_there_is_a_valid_answer_or_none(problem: FlatProblem, seconds: float) -> None:
    assert _check(problem, NO_MIP, seconds) >= 0


def _after(number: int) -> Callable[[], bool]:
    left = iter([False] * number)
    return lambda: next(left, True)


@settings(max_examples=150, deadline=None)
@given(hard_problems())
def test_the_relaxation_bounds_every_assignment_and_every_strategy(rest: FlatProblem) -> None:
    found = relax(make_graph(rest), NONE, inf, lambda bound, cost: False, _after(15))
    fitting = [(choices, one.cost) for choices in all_flat_choices(rest) if (one := evaluate_flat(rest, choices)).excess <= 0]
    least = np.full(rest.num_strategies, inf)
    for choices, cost in fitting:
        places = rest.starts[:-1] + choices
        least[places] = np.minimum(least[places], cost)
    assert found.bound <= min((cost for _, cost in fitting), default=inf) + 1e-9
    assert (found.bound + found.excess <= least + 1e-9).all()
    if len(found.choices):
        checked = evaluate_flat(rest, found.choices)
        assert (checked.excess <= 0, checked.cost) == (True, pytest.approx(found.cost))


@settings(max_examples=60, deadline=None)
@given(hard_problems())
def test_the_tight_mip_equals_brute_force(rest: FlatProblem) -> None:
    best = flat_optimum(rest)
    answer = solve_tight(rest, NONE, NONE, HighsSolver(), 0.5, lambda: 60.0)
    assert num_grouped(rest) <= rest.num_entries
    if best == inf:
        assert (len(answer.choices), answer.bound) == (0, inf)
    else:
        assert evaluate_flat(rest, answer.choices).cost == best
        assert answer.bound <= best + 1e-6


def _fitting(rest: FlatProblem) -> Ints:
    for choices in all_flat_choices(rest):
        if evaluate_flat(rest, choices).excess <= 0:
            return choices
    assume(False)
    return NONE


@settings(max_examples=60, deadline=None)
@given(hard_problems())
def test_descent_stays_within_memory_and_gets_cheaper(rest: FlatProblem) -> None:
    graph, start = make_graph(rest), _fitting(rest)
    before = evaluate_flat(rest, start).cost
    assert total_cost(graph, graph.costs, start) == before
    low = start.copy()
    cost = descend(graph, low)
    checked = evaluate_flat(rest, low)
    assert checked.excess <= 0
    assert checked.cost == cost <= before
    for node, size in enumerate(rest.sizes):
        for strategy in range(size):
            changed = low.copy()
            changed[node] = strategy
            other = evaluate_flat(rest, changed)
            assert other.excess > 0 or other.cost >= cost


@settings(max_examples=60, deadline=None)
@given(hard_problems())
def test_repair_ends_where_no_node_can_hold_less_too_much(rest: FlatProblem) -> None:
    choices = rest.sizes - 1
    fits = repair(make_graph(rest), choices)
    assert fits == (evaluate_flat(rest, choices).excess <= 0)
    left = _total_excess(rest, choices)
    for node, size in enumerate(rest.sizes):
        for strategy in range(size):
            changed = choices.copy()
            changed[node] = strategy
            assert _total_excess(rest, changed) >= left


def _total_excess(rest: FlatProblem, choices: Ints) -> float:
    held = held_over_time(choices, rest.span_starts, rest.times, rest.use_starts, rest.uses, len(rest.room))
    return float(np.maximum(held - rest.room, 0.0).sum())


@settings(max_examples=100, deadline=None)
@given(hard_problems())
def test_a_neighbourhood_is_the_problem_with_all_others_as_they_are(rest: FlatProblem) -> None:
    graph, start = make_graph(rest), _fitting(rest)
    nodes = grow(graph, start, 20, 2, 3)
    sub = extract(graph, start, nodes)
    base = _offset(rest, graph, start, nodes, sub)
    for choices in all_flat_choices(sub):
        whole = start.copy()
        whole[nodes] = choices
        here, there = evaluate_flat(sub, choices), evaluate_flat(rest, whole)
        assert here.cost + base == there.cost
        assert (here.excess <= 0) == (there.excess <= 0)


def _offset(rest: FlatProblem, graph: Graph, start: Ints, nodes: Ints, sub: FlatProblem) -> float:
    """Cost of what is outside."""
    assert len(graph.room) == len(sub.room)
    return evaluate_flat(rest, start).cost - evaluate_flat(sub, start[nodes]).cost


@settings(max_examples=100, deadline=None)
@given(LARGE)
def test_parts_add_up(problem: FlatProblem) -> None:
    parts = parts_of(problem)
    assert sorted(v for nodes in parts for v in nodes) == list(range(problem.num_nodes))
    total = sum(flat_optimum(part_of(problem, nodes)) for nodes in parts)
    assert total == flat_optimum(problem) or not len(problem.times) and (problem.room < 0).any()


def test_search_without_a_mip_improves_until_time_is_over() -> None:
    problem = flatten(dense(0, 30, 8))
    short, long = (search(problem, NO_MIP, _later(seconds)) for seconds in (0.0, 3.0))
    assert long.method is SolveMethod.SEARCH
    assert long.cost <= short.cost
    assert long.bound < long.cost
    assert evaluate_flat(problem, long.choices).excess <= 0


def test_a_shortage_names_time_bytes_and_nodes() -> None:
    problem = FlatProblem(
        starts=np.array([0, 2, 4]),
        costs=np.zeros(4),
        ends=np.array([[0, 1]]),
        offsets=np.array([0, 4]),
        tables=np.array([inf, 0.0, 0.0, 0.0]),
        span_starts=np.array([0, 1, 2]),
        times=np.array([[0, 3], [2, 4]]),
        use_starts=np.array([0, 2, 4]),
        uses=np.array([3.0, 8.0, 4.0, 6.0]),
        room=np.full(4, 8.0),
        labels=np.arange(4),
    )
    assert flat_optimum(problem) == inf
    short = find_shortage(problem, ALL_MEANS, _later(10.0))
    assert (short.time, short.least_bytes, short.missing_bytes) == (2, 9.0, 1.0)
    assert short.largest == ((1, 6.0), (0, 3.0))
