"""What a solver must not say: bounds that do not hold, answers where nothing is allowed; and that its limits hold."""

import time
from itertools import product
from math import inf

import numpy as np
import pytest

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.sharding import search
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.solution import SolveMethod, SolveStatus
from alpa_hpc.sharding.solve import SolverOptions, solve
from tests.oracles import best_by_enumeration


def without_memory(node_costs: tuple[Costs, ...], edges: tuple[Edge, ...], limit: float = inf) -> ShardingProblem:
    held = tuple(np.ones(len(costs)) for costs in node_costs)
    return ShardingProblem(node_costs, edges, held, tuple(np.zeros(len(costs)) for costs in node_costs), limit)


@pytest.mark.parametrize(("num_strategies", "limit"), list(product((3, 4, 8), (inf, 100.0))))
def test_where_nothing_is_allowed_that_is_said(num_strategies: int, limit: float) -> None:
    """One node more than there are strategies, and neighbours must differ: no rule about one node or edge finds it."""
    differ = np.where(np.eye(num_strategies) > 0, inf, 0.0)
    nodes = tuple(np.zeros(num_strategies) for _ in range(num_strategies + 1))
    edges = tuple(Edge(i, j, differ) for i in range(len(nodes)) for j in range(i))
    with pytest.raises(InfeasibleError, match="avoids forbidden strategies and missing reshardings") as raised:
        solve(without_memory(nodes, edges, limit), SolverOptions(time_limit_seconds=10.0))
    assert "bytes" not in str(raised.value), "memory is not what is missing"


@pytest.mark.parametrize("penalty", [1e6, 1e9, 1e12])
def test_costs_that_nobody_pays_loosen_no_proof(penalty: float) -> None:
    for seed in range(60):
        problem = penalised(seed, penalty)
        found = solve(problem)
        assert found.status is SolveStatus.PROVEN
        assert found.objective == pytest.approx(best_by_enumeration(problem), rel=1e-9)


def penalised(seed: int, penalty: float) -> ShardingProblem:
    """Three nodes with all edges, one entry of each the penalty, and a limit that binds."""
    rng = np.random.default_rng(seed)
    size = 2 + seed % 2
    tables = rng.integers(0, 10, (3, size, size)) / 10
    for table in tables:
        table[rng.integers(size), rng.integers(size)] = penalty
    edges = tuple(Edge(*ends, table) for ends, table in zip(((0, 1), (0, 2), (1, 2)), tables, strict=True))
    held = tuple(rng.integers(1, 5, size).astype(float) for _ in range(3))
    limit = sum(float(one.min()) for one in held) + int(rng.integers(1, 4))
    return ShardingProblem(
        tuple(rng.integers(0, 10, size) / 10 for _ in range(3)), edges, held, tuple(np.zeros(size) for _ in range(3)), limit
    )


def band(num_nodes: int) -> ShardingProblem:
    """Each node joined to the four before it: narrow enough to be eliminated."""
    rng = np.random.default_rng(0)
    nodes = tuple(rng.random(8) for _ in range(num_nodes))
    return without_memory(nodes, tuple(Edge(v - d, v, rng.random((8, 8))) for v in range(num_nodes) for d in range(1, 5) if v >= d))


def test_elimination_that_would_take_too_long_or_too_much_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = band(100)
    assert solve(problem).method is SolveMethod.ELIMINATION
    monkeypatch.setattr(search, "SUMS_A_SECOND", 1e5)
    began = time.monotonic()
    found = solve(problem, SolverOptions(time_limit_seconds=1.0))
    assert found.method is not SolveMethod.ELIMINATION
    assert found.lower_bound <= solve(problem, SolverOptions(time_limit_seconds=600.0)).objective <= found.objective
    assert time.monotonic() - began < 30.0
    monkeypatch.undo()
    monkeypatch.setattr(search, "MOST_ENTRIES", 1000)
    assert solve(problem, SolverOptions(time_limit_seconds=1.0)).method is not SolveMethod.ELIMINATION
