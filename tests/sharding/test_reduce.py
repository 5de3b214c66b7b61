"""A reduced problem has the same optimum, under the same limit, and its choices can be brought back."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.reduce import expand, reduce
from tests.oracles import all_choices, best_by_enumeration, total_bytes, total_seconds
from tests.sharding.problems import problems


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_optimum_is_kept_and_every_choice_comes_back_at_its_cost(problem: ShardingProblem) -> None:
    try:
        reduction = reduce(problem)
    except InfeasibleError:
        assert best_by_enumeration(problem) == inf
        return
    reduced = reduction.problem
    assert best_by_enumeration(reduced) + reduction.offset_seconds == best_by_enumeration(problem)
    for choices in all_choices(reduced):
        original = expand(reduction.trace, choices)
        assert total_seconds(reduced, choices) + reduction.offset_seconds == total_seconds(problem, original)
        if total_bytes(reduced, choices) <= reduced.memory_limit:
            assert total_bytes(problem, original) <= problem.memory_limit


@settings(max_examples=150, deadline=None)
@given(problems())
def test_what_is_left_is_normal(problem: ShardingProblem) -> None:
    try:
        reduced = reduce(problem).problem
    except InfeasibleError:
        return
    assert all(len(costs) > 1 for costs in reduced.node_costs)
    assert all(np.isfinite(costs).all() for costs in reduced.node_costs)
    pairs = [frozenset((edge.source, edge.target)) for edge in reduced.edges]
    assert len(pairs) == len(set(pairs))
    for edge in reduced.edges:
        assert edge.costs.any()
        assert (edge.costs.min(0) == 0).all()
        assert (edge.costs.min(1) == 0).all()


def _problem(limit: float) -> ShardingProblem:
    """Strategy 1 of the first node is slower and smaller than 0; 2 is slower and no smaller; the second node is indifferent."""
    return ShardingProblem(
        node_costs=(np.array([1.0, 3.0, 3.0]), np.array([0.0, 0.0])),
        edges=(Edge(0, 1, np.ones((3, 2))),),
        fixed_bytes=(np.array([8.0, 2.0, 2.0]), np.array([1.0, 1.0])),
        inflight_bytes=(np.zeros(3), np.zeros(2)),
        memory_limit=limit,
        names=("dot", "add"),
    )


def test_dominance_spares_slower_strategies_that_hold_less_where_memory_binds() -> None:
    assert reduce(_problem(inf)).trace.decided == ((0, 0), (1, 0))
    assert reduce(_problem(9.5)).trace.decided == ((0, 0), (1, 0))  # a limit that cannot bind
    assert reduce(_problem(8.0)).trace.decided == ((0, 1), (1, 0))  # 0 does not fit beside anything
    beside = ShardingProblem((np.array([0.0, 9.0]),), (), (np.array([5.0, 0.0]),), (np.zeros(2),))
    joint = replace(
        _problem(9.0),
        node_costs=(*_problem(9.0).node_costs, *beside.node_costs),
        fixed_bytes=(*_problem(9.0).fixed_bytes, *beside.fixed_bytes),
        inflight_bytes=(*_problem(9.0).inflight_bytes, *beside.inflight_bytes),
        names=(),
    )
    kept = {node: states.tolist() for node, states in reduce(joint).trace.kept}
    assert kept == {0: [0, 1], 2: [0, 1]}


def test_a_node_without_strategies_is_named() -> None:
    edge = Edge(0, 1, np.full((3, 2), inf))
    with pytest.raises(InfeasibleError, match="none of the 3 strategies of dot can be used"):
        reduce(replace(_problem(inf), edges=(edge,)))
    with pytest.raises(InfeasibleError, match="at least 3 bytes a device are needed, the limit is 2"):
        reduce(_problem(2.0))
