"""The solver equals brute force and the paper's ILP; what does not survive the re-check is refused."""

import tempfile
from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import given, settings

from alpa_hpc.errors import InfeasibleError, SolverError
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.solution import SolveMethod, SolveStatus
from alpa_hpc.sharding.solve import AbstractIlpBackend, CbcBackend, HighsBackend, SolverOptions, installed_backend, solve
from tests.oracles import best_by_enumeration, solve_paper_ilp
from tests.sharding.problems import problems

ELIMINATE = SolverOptions()
ONLY_ILP = SolverOptions(table_cap=1, backend=HighsBackend())
ONLY_CBC = SolverOptions(table_cap=1, backend=CbcBackend())


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
    assert solve(problem, options).choices == solution.choices


@settings(max_examples=300, deadline=None)
@given(problems())
def test_solve_equals_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, ELIMINATE)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_ilp_equals_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, ONLY_ILP)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_cbc_equals_brute_force(problem: ShardingProblem) -> None:
    _check_optimal(problem, ONLY_CBC)


@settings(max_examples=80, deadline=None)
@given(problems(max_nodes=5))
def test_the_papers_ilp_has_the_same_optimum(problem: ShardingProblem) -> None:
    expected = solve_paper_ilp(problem, pulp.HiGHS(msg=False, threads=1, gapRel=0.0))
    try:
        assert solve(problem, ONLY_ILP).objective == pytest.approx(expected)
    except InfeasibleError:
        assert expected == inf


def _dense(seed: int, nodes: int, strategies: int, share: float = 0.3) -> ShardingProblem:
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
    problem = _dense(0, 5, 4)
    free = solve(ShardingProblem(problem.node_costs, problem.edges, problem.fixed_bytes, problem.inflight_bytes))
    assert evaluate(problem, free.choices).violations != ()
    solution = solve(problem)
    assert solution.method is SolveMethod.ILP
    assert solution.objective == pytest.approx(best_by_enumeration(problem), rel=1e-12)
    assert solve(problem, ONLY_CBC).objective == pytest.approx(solution.objective, rel=1e-12)


@pytest.mark.parametrize("options", [ELIMINATE, ONLY_CBC])
def test_one_byte_too_many_of_a_terabyte_is_too_many(options: SolverOptions) -> None:
    """No solver's tolerance sees a byte; both large strategies together would be cheapest, and exceed the limit by one."""
    sizes = (np.array([0.0, 1e12]), np.array([1e12 + 1, 0.0]))
    problem = ShardingProblem((np.array([3.0, 0.0]), np.array([0.0, 5.0])), (), sizes, (np.zeros(2), np.zeros(2)), memory_limit=2e12)
    solution = solve(problem, options)
    assert (solution.choices, solution.objective, solution.method) == ((0, 0), 3.0, SolveMethod.ILP)


def test_methods_are_named_and_sizes_counted() -> None:
    free = _dense(1, 5, 3, share=1.0)
    assert solve(free).method is SolveMethod.ELIMINATION
    assert solve(free, ONLY_ILP).method is SolveMethod.ILP
    lonely = ShardingProblem(free.node_costs, (), free.fixed_bytes, free.inflight_bytes)
    solution = solve(lonely)
    assert solution.method is SolveMethod.REDUCTION
    assert solution.choices == tuple(int(costs.argmin()) for costs in lonely.node_costs)
    assert (solution.size.nodes, solution.size.strategies, solution.size_left.nodes) == (5, 15, 0)


def test_missing_bytes_are_named() -> None:
    """The least bytes alone would fit, but the two smallest strategies cannot be joined."""
    edge = Edge(0, 1, np.array([[inf, 0.0], [0.0, 0.0]]))
    held = np.array([10.0, 25.0])
    problem = ShardingProblem((np.zeros(2), np.zeros(2)), (edge,), (held, held), (np.zeros(2), np.zeros(2)), memory_limit=30.0)
    for options in (ELIMINATE, ONLY_ILP, ONLY_CBC):
        with pytest.raises(InfeasibleError, match=r"at least 35 bytes .* the limit is 30: 5 are missing"):
            solve(problem, options)


def test_what_no_strategies_allow_is_infeasible_without_a_limit() -> None:
    """An odd cycle of nodes that must differ in pairs has no two colours."""
    differ = np.array([[inf, 0.0], [0.0, inf]])
    zeros = (np.zeros(2),) * 3
    problem = ShardingProblem(zeros, tuple(Edge(u, v, differ) for u, v in ((0, 1), (1, 2), (0, 2))), zeros, zeros)
    for options in (ELIMINATE, ONLY_ILP, ONLY_CBC):
        with pytest.raises(InfeasibleError):
            solve(problem, options)


class _Tampering(AbstractIlpBackend):
    """Solves honestly, then changes the answer."""

    def __init__(self, tamper: Callable[[dict[str, pulp.LpVariable], pulp.LpProblem], None]) -> None:
        self.tamper = tamper

    def run(self, model: pulp.LpProblem, time_limit_seconds: float, folder: Path) -> float:
        bound = HighsBackend().run(model, time_limit_seconds, folder)
        self.tamper(model.variablesDict(), model)
        return bound


def _move(bits: dict[str, pulp.LpVariable], share: float) -> None:
    """Move node 0 by `share` from its strategy to another one."""
    chosen = next(s for s in range(4) if (bits[f"x_0_{s}"].varValue or 0) > 0.5)
    bits[f"x_0_{chosen}"].varValue = 1 - share
    bits[f"x_0_{(chosen + 1) % 4}"].varValue = share


def _halve(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    _move(bits, 0.5)


def _swap(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    _move(bits, 1.0)


def _forget(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    for bit in bits.values():
        bit.varValue = None


def _overfill(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    """Choose the largest strategy everywhere; the memory row comes last."""
    sizes = {bit.name: size for bit, size in model.constraints()[-1].items()}
    for node in {name.split("_")[1] for name in bits if name.startswith("x")}:
        names = [name for name in bits if name.startswith(f"x_{node}_")]
        largest = max(names, key=lambda name: sizes.get(name, 0.0))
        for name in names:
            bits[name].varValue = float(name == largest)


def _give_up(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)


def _call_infeasible(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    model.assignStatus(pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible)


@pytest.mark.parametrize(
    ("share", "tamper", "reason"),
    [
        (1.0, _halve, "does not choose one strategy"),
        (1.0, _swap, "claims .* its choices cost"),
        (1.0, _forget, "does not choose one strategy"),
        (0.3, _overfill, "exceeds the limit"),
        (1.0, _give_up, "found no assignment within the time limit"),
        (0.3, _call_infeasible, "says that nothing fits"),
    ],
)
def test_a_wrong_answer_is_refused(share: float, tamper: Callable[[dict[str, pulp.LpVariable], pulp.LpProblem], None], reason: str) -> None:
    problem = _dense(0, 5, 4, share)
    options = SolverOptions(table_cap=1 if share == 1.0 else 20_000_000, backend=_Tampering(tamper))
    with pytest.raises(SolverError, match=reason):
        solve(problem, options)


class _Stopped(AbstractIlpBackend):
    """Has an assignment when time is over, and a bound 10 % below it."""

    def run(self, model: pulp.LpProblem, time_limit_seconds: float, folder: Path) -> float:
        bound = HighsBackend().run(model, time_limit_seconds, folder)
        model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return 0.9 * bound


def test_an_assignment_at_the_time_limit_is_a_result_with_its_gap() -> None:
    solution = solve(_dense(0, 5, 4), SolverOptions(backend=_Stopped()))
    assert solution.status is SolveStatus.TIME_LIMIT
    assert solution.gap == pytest.approx(0.1)
    assert solution.lower_bound == pytest.approx(0.9 * solution.objective)


@pytest.mark.parametrize("backend", [HighsBackend(), CbcBackend()])
def test_time_runs_out_with_a_result_or_an_error_but_no_made_up_plan(backend: AbstractIlpBackend) -> None:
    problem = _dense(3, 12, 8)
    for limit in (0.05, 0.7):
        try:
            solution = solve(problem, SolverOptions(time_limit_seconds=limit, table_cap=100, backend=backend))
        except SolverError:
            continue
        else:
            assert evaluate(problem, solution.choices).violations == ()
            assert solution.lower_bound <= solution.objective
            assert solution.gap > 0


def test_cbc_works_in_a_folder_with_spaces_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    assert solve(_dense(0, 5, 4), ONLY_CBC).status is SolveStatus.PROVEN
    assert list(folder.iterdir()) == []


def test_cbc_is_taken_where_highs_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(installed_backend(), HighsBackend)
    monkeypatch.setattr("alpa_hpc.sharding.solve.find_spec", lambda name: None)
    assert isinstance(installed_backend(), CbcBackend)
