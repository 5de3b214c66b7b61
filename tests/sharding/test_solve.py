"""The solver equals brute force and the paper's ILP; what does not survive the re-check is refused."""

import tempfile
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import given, settings

from alpa_hpc.errors import InfeasibleError, SolverError
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.linear import AbstractLinearSolver, CbcSolver, HighsSolver, LinearAnswer, LinearModel
from alpa_hpc.sharding.mip import Cbc
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.solution import SolveMethod, SolveStatus
from alpa_hpc.sharding.solve import SolverOptions, solve
from tests.oracles import best_by_enumeration, solve_paper_ilp
from tests.sharding.problems import problems

ELIMINATE = SolverOptions()
NO_TABLES = SolverOptions(table_cap=1, solver=HighsSolver())
NO_HIGHS = SolverOptions(table_cap=1, solver=CbcSolver())


def _check_optimal(problem: ShardingProblem, options: SolverOptions) -> None:
    best = best_by_enumeration(problem)
    if best == inf:
        with pytest.raises(InfeasibleError):
            solve(problem, options)
        return
    solution = solve(problem, options)
    assert solution.objective == best
    assert solution.lower_bound == pytest.approx(best)
    assert solution.status is SolveStatus.PROVEN
    checked = evaluate(problem, solution.choices)
    assert checked.violations == ()
    assert checked.seconds == solution.objective
    assert checked.fixed_bytes + problem.inflight * checked.inflight_bytes == solution.peak_bytes
    assert solve(problem, options).choices == solution.choices


@settings(max_examples=300, deadline=None)
@given(problems())
def test_solve_equals_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, ELIMINATE)


@settings(max_examples=150, deadline=None)
@given(problems(max_nodes=7))
def test_bounds_and_a_mip_equal_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, NO_TABLES)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_cbc_equals_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, NO_HIGHS)


@settings(max_examples=80, deadline=None)
@given(problems(max_nodes=5))
def test_the_papers_ilp_has_the_same_optimum(problem: ShardingProblem) -> None:
    expected = solve_paper_ilp(problem, pulp.HiGHS(msg=False, threads=1, gapRel=0.0))
    try:
        assert solve(problem, NO_TABLES).objective == pytest.approx(expected)
    except InfeasibleError:
        assert expected == inf


def dense(seed: int, nodes: int, strategies: int, share: float = 0.3) -> ShardingProblem:
    """Every node joined to every other: too wide to eliminate under a small cap, with a limit that binds."""
    rng = np.random.default_rng(seed)
    fixed = tuple(rng.integers(1, 100, strategies).astype(float) for _ in range(nodes))
    limit = sum(float(one.min() + share * (one.max() - one.min())) for one in fixed)
    return ShardingProblem(
        node_costs=tuple(rng.random(strategies) * 1e-3 for _ in range(nodes)),
        edges=tuple(Edge(u, v, rng.random((strategies, strategies)) * 1e-3) for u in range(nodes) for v in range(u)),
        fixed_bytes=fixed,
        inflight_bytes=tuple(np.zeros(strategies) for _ in range(nodes)),
        memory_limit=float(np.floor(limit)),
    )


def test_a_binding_limit_is_kept_at_real_costs_and_both_solvers_agree() -> None:
    problem = dense(0, 5, 4)
    free = solve(replace(problem, memory_limit=inf))
    assert evaluate(problem, free.choices).violations != ()
    solution = solve(problem)
    assert solution.objective == pytest.approx(best_by_enumeration(problem), rel=1e-12)
    assert solve(problem, NO_HIGHS).objective == pytest.approx(solution.objective, rel=1e-12)


@pytest.mark.parametrize("options", [ELIMINATE, NO_HIGHS])
def test_one_byte_too_many_of_a_terabyte_is_too_many(options: SolverOptions) -> None:
    """No solver's tolerance sees a byte; both large strategies together would be cheapest, and exceed the limit by one."""
    sizes = (np.array([0.0, 1e12]), np.array([1e12 + 1, 0.0]))
    problem = ShardingProblem((np.array([3.0, 0.0]), np.array([0.0, 5.0])), (), sizes, (np.zeros(2), np.zeros(2)), memory_limit=2e12)
    solution = solve(problem, options)
    assert (solution.choices, solution.objective) == ((0, 0), 3.0)


def test_methods_are_named_and_sizes_counted() -> None:
    problem = dense(1, 5, 3, share=1.0)
    assert solve(problem).method is SolveMethod.ELIMINATION
    assert solve(dense(0, 6, 6), NO_TABLES).method in {SolveMethod.RELAXATION, SolveMethod.ILP}
    lonely = ShardingProblem(problem.node_costs, (), problem.fixed_bytes, problem.inflight_bytes)
    solution = solve(lonely)
    assert solution.method is SolveMethod.REDUCTION
    assert solution.choices == tuple(int(costs.argmin()) for costs in lonely.node_costs)
    assert (solution.size.nodes, solution.size.strategies, solution.size_left.nodes) == (5, 15, 0)


def test_missing_bytes_are_named() -> None:
    """The least bytes alone would fit, but the two smallest strategies cannot be joined."""
    edge = Edge(0, 1, np.array([[inf, 0.0], [0.0, 0.0]]))
    held = np.array([10.0, 25.0])
    bare = (np.zeros(2), np.zeros(2))
    problem = ShardingProblem((np.zeros(2), np.zeros(2)), (edge,), (held, held), bare, memory_limit=30.0, names=("weights", "state"))
    for options in (ELIMINATE, NO_TABLES, NO_HIGHS):
        with pytest.raises(InfeasibleError, match=r"at least 35 bytes .* the limit is 30: 5 are missing.* (weights|state) \(25\)"):
            solve(problem, options)


def test_what_no_strategies_allow_is_infeasible_without_a_limit() -> None:
    """An odd cycle of nodes that must differ in pairs has no two colours."""
    differ = np.array([[inf, 0.0], [0.0, inf]])
    zeros = (np.zeros(2),) * 3
    problem = ShardingProblem(zeros, tuple(Edge(u, v, differ) for u, v in ((0, 1), (1, 2), (0, 2))), zeros, zeros)
    for options in (ELIMINATE, NO_TABLES, NO_HIGHS):
        with pytest.raises(InfeasibleError):
            solve(problem, options)


@dataclass(frozen=True)
class _Tampering(AbstractLinearSolver):
    """Solves honestly, then changes the answer."""

    share: float
    bound: float = 0.0

    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        answer = HighsSolver().solve(model, seconds)
        values = answer.values.copy()
        first, second = np.flatnonzero(model.is_whole)[:2]
        values[first], values[second] = (self.share, 1 - self.share)
        return LinearAnswer(values, self.bound or answer.bound)


class _Silent(AbstractLinearSolver):
    """Finds nothing in time."""

    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        return LinearAnswer(np.zeros(0), -inf)


class _Denying(AbstractLinearSolver):
    """Says that nothing fits."""

    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        return LinearAnswer(np.zeros(0), inf)


def test_a_fractional_answer_is_refused() -> None:
    with pytest.raises(SolverError, match="does not choose one strategy"):
        solve(dense(0, 10, 8), SolverOptions(table_cap=1, solver=_Tampering(0.5)))


def test_an_absurd_bound_is_refused() -> None:
    with pytest.raises(SolverError, match="bound of .* is above"):
        solve(dense(0, 10, 8), SolverOptions(table_cap=1, solver=_Denying()))


def test_a_silent_solver_leaves_what_was_found_and_its_gap() -> None:
    problem = dense(0, 10, 8)
    solution = solve(problem, SolverOptions(table_cap=1, solver=_Silent()))
    assert solution.status is SolveStatus.TIME_LIMIT
    assert evaluate(problem, solution.choices).violations == ()
    best = solve(problem, NO_TABLES)
    assert solution.lower_bound <= best.objective <= solution.objective
    assert 0 < solution.gap == pytest.approx((solution.objective - solution.lower_bound) / solution.objective)


@pytest.mark.parametrize("solver", [HighsSolver(), CbcSolver()])
def test_time_runs_out_with_a_result_or_an_error_but_no_made_up_plan(solver: AbstractLinearSolver) -> None:
    problem = dense(3, 12, 8)
    for limit in (0.0, 0.05, 0.7):
        try:
            solution = solve(problem, SolverOptions(time_limit_seconds=limit, table_cap=100, solver=solver))
        except SolverError:
            continue
        else:
            assert evaluate(problem, solution.choices).violations == ()
            assert solution.lower_bound <= solution.objective


def test_cbc_works_in_a_folder_with_spaces_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    assert solve(dense(0, 9, 6), NO_HIGHS).status is SolveStatus.PROVEN
    assert list(folder.iterdir()) == []


def _killed_solver(folder: Path) -> CbcSolver:
    script = folder / "cbc"
    script.write_text("#!/bin/sh\necho reading\nkill -9 $$\n")
    script.chmod(0o755)
    return CbcSolver(Cbc(str(script)))


def test_a_killed_solver_and_a_folder_that_takes_nothing_are_errors_that_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, temporary = dense(0, 10, 8), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(SolverError, match="exit code -9"):
        solve(problem, SolverOptions(table_cap=1, solver=_killed_solver(tmp_path)))
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(SolverError, match="cannot be run"):
        solve(problem, SolverOptions(table_cap=1, solver=CbcSolver()))


def test_a_chain_of_any_length_is_reduced_away() -> None:
    for length in (50, 2000):
        rng = np.random.default_rng(length)
        costs = tuple(rng.random(5) for _ in range(length))
        edges = tuple(Edge(v, v + 1, rng.random((5, 5))) for v in range(length - 1))
        problem = ShardingProblem(costs, edges, costs, costs)
        solution = solve(problem)
        assert (solution.method, solution.size_left.nodes) == (SolveMethod.REDUCTION, 0)
        best = costs[0]
        for edge, own in zip(edges, costs[1:], strict=True):
            best = (best[:, None] + edge.costs).min(0) + own
        assert solution.objective == pytest.approx(best.min(), rel=1e-12)
