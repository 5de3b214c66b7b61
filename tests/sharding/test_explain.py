"""What each strategy would have cost = brute force with the node pinned, by elimination, by solving again, and on a stage of layers."""

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.explain import FREE_MEMORY, Alternative, ExplainOptions, Impossible, Obstacle, Possible, explain, explain_stage
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.solve import solve
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.stage_problem import stage_problem
from tests.oracles import all_choices, best_by_enumeration, total_bytes, total_seconds
from tests.random_plans import CLUSTER, NUM_LAYERS, Family, mlp_batch, mlp_loss, mlp_params, sgd_step
from tests.sharding.problems import problems

DEAR = MemoryPrice(0.5, 0.25)


def priced(problem: ShardingProblem, price: MemoryPrice) -> ShardingProblem:
    rows = zip(problem.node_costs, problem.fixed_bytes, problem.inflight_bytes, strict=True)
    return replace(problem, node_costs=tuple(costs + price.fixed * fixed + price.inflight * inflight for costs, fixed, inflight in rows))


def pinned(problem: ShardingProblem, node: int, strategy: int) -> ShardingProblem:
    costs = list(problem.node_costs)
    costs[node] = np.where(np.arange(len(costs[node])) == strategy, costs[node], inf)
    return replace(problem, node_costs=tuple(costs))


def fitting_choices(problem: ShardingProblem) -> list[tuple[int, ...]]:
    allowed = (choices for choices in all_choices(problem) if total_bytes(problem, choices) <= problem.memory_limit)
    return [choices for choices in allowed if total_seconds(problem, choices) < inf]


def check_rows(problem: ShardingProblem, choices: tuple[int, ...], node: int, options: ExplainOptions) -> tuple[Alternative, ...]:
    labels = [f"strategy {s}" for s in range(len(problem.node_costs[node]))]
    rows = explain(problem, choices, node, labels, options)
    assert [row.label for row in rows] == labels
    present = total_seconds(priced(problem, options.price), choices)
    for strategy, row in enumerate(rows):
        one = pinned(priced(problem, options.price), node, strategy)
        best = best_by_enumeration(one)
        match row:
            case Possible():
                assert row.score == pytest.approx(best - present)
                assert row.score_bound == pytest.approx(row.score)
                assert row.is_chosen == (strategy == choices[node])
                bytes_ = options.price.fixed * row.fixed_bytes + options.price.inflight * row.inflight_bytes
                assert row.seconds + bytes_ == pytest.approx(row.score)
            case Impossible(obstacle=obstacle):
                assert best == inf
                assert obstacle is expected_obstacle(problem, one, node, strategy)
    return rows


def expected_obstacle(problem: ShardingProblem, one: ShardingProblem, node: int, strategy: int) -> Obstacle:
    if problem.node_costs[node][strategy] == inf:
        return Obstacle.FORBIDDEN
    free = best_by_enumeration(replace(one, memory_limit=inf))
    return Obstacle.NO_RESHARDING if free == inf else Obstacle.MEMORY


@settings(max_examples=150, deadline=None)
@given(problems(max_nodes=5), st.sampled_from((1, 1_000_000)), st.sampled_from((FREE_MEMORY, DEAR)), st.data())
def test_rows_are_the_minima_with_the_node_pinned(
    problem: ShardingProblem, table_cap: int, price: MemoryPrice, data: st.DataObject
) -> None:
    """Whatever choices are explained; with a cap of one entry everything is solved again."""
    possible = fitting_choices(problem)
    assume(possible)
    choices, node = data.draw(st.sampled_from(possible)), data.draw(st.integers(0, len(problem.node_costs) - 1))
    check_rows(problem, choices, node, ExplainOptions(price, table_cap))


@settings(max_examples=50, deadline=None)
@given(problems(max_nodes=5))
def test_the_optimums_own_row_is_zero_and_none_is_below(problem: ShardingProblem) -> None:
    assume(best_by_enumeration(problem) < inf)
    choices = solve(problem).choices
    for node in range(len(choices)):
        rows = check_rows(problem, choices, node, ExplainOptions())
        chosen = rows[choices[node]]
        assert isinstance(chosen, Possible)
        assert chosen.is_chosen
        assert chosen.score == pytest.approx(0.0)
        assert all(row.score >= 0 or row.score == pytest.approx(0.0) for row in rows if isinstance(row, Possible))


@pytest.mark.parametrize("table_cap", [1, 1_000_000])
def test_obstacles_are_told_apart(table_cap: int) -> None:
    """Strategy 1 is forbidden, 2 has no resharding, 3 holds too much, 4 costs seven seconds more."""
    edge = Edge(0, 1, np.array([[0.0, 1.0], [0.0, 0.0], [inf, inf], [0.0, 0.0], [5.0, 9.0]]))
    held = np.array([1.0, 1.0, 1.0, 100.0, 1.0])
    problem = ShardingProblem(
        (np.array([3.0, inf, 0.0, 0.0, 5.0]), np.zeros(2)), (edge,), (held, np.zeros(2)), (np.zeros(5), np.zeros(2)), memory_limit=50.0
    )
    rows = check_rows(problem, (0, 0), 0, ExplainOptions(table_cap=table_cap))
    obstacles = [row.obstacle for row in rows if isinstance(row, Impossible)]
    assert obstacles == [Obstacle.FORBIDDEN, Obstacle.NO_RESHARDING, Obstacle.MEMORY]
    assert isinstance(rows[4], Possible)
    assert (rows[4].score, rows[4].is_chosen) == (7.0, False)


@cache
def layered() -> LayeredStep:
    return Family(sgd_step(mlp_loss), {"params": mlp_params()}, mlp_batch).work(2).layered


def test_a_stages_node_is_explained_as_its_whole_problem_says() -> None:
    prices = MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), MeshShape(2, 2)))
    solver, price = StageSolver(layered(), prices, remat=False), MemoryPrice(1e-9, 3e-9)
    chosen = solver.choose(0, NUM_LAYERS, price)
    problem, numbers = stage_problem(layered(), [one.problem for one in chosen])
    optimum = solve(priced(problem, price)).objective
    options = ExplainOptions(price)
    place = 1
    layer = chosen[place]
    widest = max(range(len(layer.choices)), key=lambda node: len(layer.problem.labels[node]))
    rows = explain_stage(layered(), chosen, place, widest, options)
    assert [row.label for row in rows] == list(layer.problem.labels[widest])
    assert sum(isinstance(row, Possible) and row.is_chosen for row in rows) == 1
    for strategy, row in enumerate(rows):
        again = solve(pinned(priced(problem, price), numbers[place][widest], strategy))
        assert isinstance(row, Possible)
        assert row.score == pytest.approx(again.objective - optimum, rel=1e-6, abs=1e-9 * optimum)
        assert row.is_chosen == (strategy == layer.choices[widest])
        assert evaluate(problem, again.choices).violations == ()
    assert len({round(row.score / optimum, 9) for row in rows if isinstance(row, Possible)}) > 1
