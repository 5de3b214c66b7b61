"""A reduced problem has the same optimum, memory included, and each of its choices comes back at its cost and fits if it fitted."""

import numpy as np
import pytest
from hypothesis import given, settings

from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat, flatten
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.shrink import NoRoomError, NotAllowedError, expand, shrink
from tests.oracles import best_by_enumeration
from tests.sharding.flat_problems import all_flat_choices, flat_optimum, flat_problems, slow_cost_and_excess
from tests.sharding.problems import problems


@settings(max_examples=600, deadline=None)
@given(flat_problems())
def test_the_optimum_is_kept_and_every_choice_comes_back_at_its_cost(problem: FlatProblem) -> None:
    try:
        reduction = shrink(problem)
    except (NotAllowedError, NoRoomError):
        assert flat_optimum(problem) == np.inf
        return
    reduced = reduction.problem
    assert flat_optimum(reduced) + reduction.offset == flat_optimum(problem)
    for choices in all_flat_choices(reduced):
        here, there = evaluate_flat(reduced, choices), evaluate_flat(problem, expand(reduction, choices))
        assert here.cost + reduction.offset == there.cost
        if here.excess <= 0:
            assert there.excess <= 0


@settings(max_examples=100, deadline=None)
@given(flat_problems())
def test_the_evaluation_is_the_sum_of_its_terms(problem: FlatProblem) -> None:
    for choices in all_flat_choices(problem):
        found = evaluate_flat(problem, choices)
        assert (found.cost, found.excess) == slow_cost_and_excess(problem, choices)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_a_flat_problem_has_the_same_optimum(problem: ShardingProblem) -> None:
    assert flat_optimum(flatten(problem)) == best_by_enumeration(problem)


@settings(max_examples=150, deadline=None)
@given(flat_problems())
def test_what_is_left_is_normal(problem: FlatProblem) -> None:
    try:
        reduced = shrink(problem).problem
    except (NotAllowedError, NoRoomError):
        return
    assert (reduced.sizes > 1).all()
    assert np.isfinite(reduced.costs).all()
    assert len({frozenset(pair) for pair in reduced.ends.tolist()}) == len(reduced.ends)
    for e, (source, target) in enumerate(reduced.ends):
        table = reduced.tables[reduced.offsets[e] : reduced.offsets[e + 1]].reshape(reduced.sizes[source], reduced.sizes[target])
        assert table.any()
        assert (table.min(0) == 0).all() and (table.min(1) == 0).all()
    for i, (begin, end) in enumerate(reduced.times):
        uses = reduced.uses[reduced.use_starts[i] : reduced.use_starts[i + 1]]
        assert begin < end
        assert uses.min() == 0 < uses.max()
        assert uses.max() <= reduced.room[begin:end].min()


def test_uses_are_rounded_up_and_the_limit_down() -> None:
    problem = ShardingProblem((np.zeros(1),), (), (np.array([0.1]),), (np.zeros(1),), memory_limit=0.1)
    flat = flatten(problem)
    assert 0.1 <= flat.uses[0] < 0.102
    assert 0.098 < flat.room[0] <= 0.1


def test_what_has_no_solution_is_named() -> None:
    costs, bare = (np.zeros(2), np.zeros(2)), (np.zeros(2), np.zeros(2))
    blocked = ShardingProblem(costs, (Edge(0, 1, np.full((2, 2), np.inf)),), bare, bare)
    with pytest.raises(NotAllowedError):
        shrink(flatten(blocked))
    with pytest.raises(NoRoomError) as caught:
        shrink(flatten(ShardingProblem(costs, (), (np.ones(2), np.ones(2)), bare, memory_limit=1.0)))
    assert caught.value.time == 0


def test_a_small_problem_with_large_tables_finds_the_place_it_needs() -> None:
    """A node between two with 400 strategies each becomes a table over both: far more than the problem itself has."""
    rng = np.random.default_rng(0)
    sizes = (400, 30, 400)
    problem = ShardingProblem(
        node_costs=tuple(rng.random(size) for size in sizes),
        edges=(Edge(0, 1, rng.random((400, 30))), Edge(2, 1, rng.random((400, 30)))),
        fixed_bytes=tuple(rng.random(size) for size in sizes),
        inflight_bytes=tuple(np.zeros(size) for size in sizes),
    )
    reduction = shrink(flatten(problem))
    assert reduction.problem.num_nodes == 0
    through = problem.edges[0].costs + problem.node_costs[1]
    least = (through[:, None] + problem.edges[1].costs).min(2) + problem.node_costs[0][:, None] + problem.node_costs[2]
    assert reduction.offset == pytest.approx(least.min(), rel=1e-12)
