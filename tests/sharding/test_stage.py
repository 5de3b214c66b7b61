"""A stage's optimum by messages = the whole stage as one problem, solved and evaluated independently; equal layers are solved once."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.config import compose_experiment
from alpa_hpc.experiment import prepared
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.solve import solve
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.stage_problem import stage_problem
from alpa_hpc.sharding.wiring import port_names
from tests.random_plans import CLUSTER, NUM_LAYERS, Family, mlp_batch, mlp_loss, mlp_params, sgd_step

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)]
FREE, DEAR = MemoryPrice(0.0, 0.0), MemoryPrice(1e-9, 3e-9)


@cache
def layered() -> LayeredStep:
    return Family(sgd_step(mlp_loss), {"params": mlp_params()}, mlp_batch).work(2).layered


def solver_on(rows: int, cols: int, *, remat: bool = False) -> StageSolver:
    submesh = Submesh(2, 4) if rows * cols == 8 else Submesh(1, rows * cols)
    return StageSolver(layered(), MeshPrices(logical_mesh(CLUSTER, submesh, MeshShape(rows, cols))), remat)


def priced(problem: ShardingProblem, price: MemoryPrice) -> ShardingProblem:
    """The same problem with bytes as seconds."""
    rows = zip(problem.node_costs, problem.fixed_bytes, problem.inflight_bytes, strict=True)
    return replace(problem, node_costs=tuple(costs + price.fixed * fixed + price.inflight * inflight for costs, fixed, inflight in rows))


@pytest.mark.parametrize("price", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_value_is_what_choose_costs_and_what_solve_finds(rows: int, cols: int, price: MemoryPrice) -> None:
    solver = solver_on(rows, cols, remat=cols == 2)
    for start, stop in [(0, NUM_LAYERS), (0, 2), (1, 3), (3, 4)]:
        value, chosen = solver.value(start, stop, price), solver.choose(start, stop, price)
        problem, numbers = stage_problem(layered(), [one.problem for one in chosen])
        choices = [0] * len(problem.node_costs)
        for one, local in zip(chosen, numbers, strict=True):
            for node, number in local.items():
                choices[number] = one.choices[node]
        evaluation = evaluate(problem, choices)
        assert not evaluation.violations
        np.testing.assert_allclose(evaluation.seconds, value.seconds, rtol=1e-9)
        np.testing.assert_allclose(
            (evaluation.fixed_bytes, evaluation.inflight_bytes), (value.fixed_bytes, value.inflight_bytes), rtol=1e-9
        )
        score = value.seconds + price.fixed * value.fixed_bytes + price.inflight * value.inflight_bytes
        np.testing.assert_allclose(score, solve(priced(problem, price)).objective, rtol=1e-6)


def test_ports_agree_between_neighbours():
    for rows, cols in SHAPES:
        chosen = solver_on(rows, cols).choose(0, NUM_LAYERS, FREE)
        specs: dict[tuple[str, int], object] = {}
        for one in chosen:
            for name, node in zip(port_names(one.problem.layer, one.problem.shared), one.problem.ports, strict=True):
                seen = (one.problem.labels[node], one.choices[node])
                assert specs.setdefault(name, seen) == seen


def test_dear_memory_is_saved():
    solver = solver_on(4, 1)
    free, dear = (solver.value(0, NUM_LAYERS, price) for price in (FREE, MemoryPrice(1.0, 1.0)))
    assert dear.fixed_bytes + dear.inflight_bytes < free.fixed_bytes + free.inflight_bytes
    assert dear.seconds > free.seconds


def test_equal_layers_are_one_problem_and_equal_runs_one_message():
    solver = solver_on(2, 2)
    kinds = {(layer.key, layer.index == 0, layer.index == NUM_LAYERS - 1) for layer in layered().layers}
    for start in range(NUM_LAYERS):
        for stop in range(start + 1, NUM_LAYERS + 1):
            solver.value(start, stop, FREE)
    assert solver.num_problems == len(kinds) < NUM_LAYERS
    assert solver.value(1, 2, FREE) is solver.value(2, 3, FREE)
    assert solver.num_runs < NUM_LAYERS * (NUM_LAYERS + 1) // 2


def test_large_tables_find_what_the_general_solver_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    step = prepared(compose_experiment("quickstart")).step
    mesh = MeshPrices(logical_mesh(CLUSTER, Submesh(2, 4), MeshShape(2, 4)))
    soon, far = StageSolver(step, mesh, remat=False), StageSolver(step, mesh, remat=False)
    proven = soon.value(0, 1, DEAR)
    assert soon.num_wide == 1, "small tables do it, so that this shows nothing"
    monkeypatch.setattr(StageSolver, "_solve_soon", lambda *_: None)
    found = far.value(0, 1, DEAR)
    assert far.num_wide == 0
    scores = [one.seconds + DEAR.fixed * one.fixed_bytes + DEAR.inflight * one.inflight_bytes for one in (proven, found)]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-9)
    problem, numbers = stage_problem(step, [one.problem for one in far.choose(0, 1, DEAR)])
    chosen = dict(zip(numbers[0].values(), far.choose(0, 1, DEAR)[0].choices, strict=True))
    evaluation = evaluate(problem, [chosen[node] for node in range(len(problem.node_costs))])
    np.testing.assert_allclose((evaluation.seconds, evaluation.fixed_bytes), (found.seconds, found.fixed_bytes), rtol=1e-9)
