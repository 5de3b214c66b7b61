"""The paper's own ILP = brute force on random problems, and = our planner on small stages of real GPTs; a wrong answer is refused."""

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.errors import InfeasibleError, SolverError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.mip import AbstractMipSolver, Cbc, Highs
from alpa_hpc.sharding.paper_ilp import NothingFoundError, PaperOptions, solve_paper_ilp
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.stage_problem import stage_problem
from alpa_hpc.training.prepare import prepare
from tests.oracles import best_by_enumeration
from tests.planning import CLUSTER, TRAINING
from tests.sharding.problems import problems

BY_CBC, BY_HIGHS = PaperOptions(60.0, Cbc()), PaperOptions(60.0, Highs())


def check_optimal(problem: ShardingProblem, options: PaperOptions) -> None:
    best = best_by_enumeration(problem)
    if best == inf:
        with pytest.raises(InfeasibleError):
            solve_paper_ilp(problem, options)
        return
    solution = solve_paper_ilp(problem, options)
    assert solution.is_proven
    assert solution.objective == best
    checked = evaluate(problem, solution.choices)
    assert (checked.violations, checked.seconds) == ((), best)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_with_highs_it_equals_brute_force(problem: ShardingProblem) -> None:
    check_optimal(problem, BY_HIGHS)


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=5))
def test_with_cbc_it_equals_brute_force(problem: ShardingProblem) -> None:
    check_optimal(problem, BY_CBC)


@cache
def gpt_step(num_microbatches: int) -> LayeredStep:
    """Two blocks in three layers; the embedding of the first is the head of the last."""
    model = GPT(num_layers=2, hidden=16, num_heads=2, vocab=32, sequence=8)
    return prepare(model, TRAINING, LayerOptions(num_layers=3, imbalance=1.0), num_microbatches).step


STAGES = [
    # mesh, microbatches, layers, remat
    ((2, 1), 1, (0, 3), False),
    ((2, 1), 8, (0, 3), True),
    ((4, 1), 4, (0, 3), False),
    ((2, 2), 1, (0, 1), True),
    ((2, 2), 4, (1, 2), False),
    ((2, 2), 8, (2, 3), True),
    ((2, 2), 2, (1, 3), False),
    ((2, 4), 4, (0, 2), True),
]


@pytest.mark.parametrize(("shape", "num_microbatches", "layers", "remat"), STAGES, ids=str)
def test_the_planner_finds_the_papers_optimum(shape: tuple[int, int], num_microbatches: int, layers: tuple[int, int], remat: bool) -> None:
    rows, cols = shape
    step, submesh = gpt_step(num_microbatches), Submesh(2, 4) if rows * cols == 8 else Submesh(1, rows * cols)
    assert len(step.layers) == 3
    solver = StageSolver(step, MeshPrices(logical_mesh(CLUSTER, submesh, MeshShape(rows, cols))), remat)
    value = solver.value(*layers, MemoryPrice(0.0, 0.0))
    problem, _ = stage_problem(step, [solver.problem(index) for index in range(*layers)])
    paper = solve_paper_ilp(problem, BY_CBC)
    assert paper.is_proven
    assert value.seconds == pytest.approx(paper.objective, rel=1e-6)
    assert paper.num_variables == sum(map(len, problem.node_costs)) + sum(edge.costs.size for edge in problem.edges)


def dense(nodes: int) -> ShardingProblem:
    """Every node joined to every other at random costs: a weak relaxation, and long to prove."""
    rng = np.random.default_rng(0)
    zeros = (np.zeros(6),) * nodes
    edges = tuple(Edge(u, v, rng.random((6, 6))) for u in range(nodes) for v in range(u))
    return ShardingProblem(tuple(rng.random(6) for _ in range(nodes)), edges, zeros, zeros)


@pytest.mark.parametrize("solver", [Cbc(), Highs()], ids=["cbc", "highs"])
def test_a_time_limit_gives_a_checked_answer_that_is_not_called_proven(solver: AbstractMipSolver) -> None:
    """PuLP's status is "Optimal" here too."""
    problem = dense(14)
    solution = solve_paper_ilp(problem, PaperOptions(4.0, solver))
    assert not solution.is_proven
    assert evaluate(problem, solution.choices).violations == ()
    assert solution.solver_seconds < 12.0


@pytest.mark.parametrize("solver", [Cbc(), Highs()], ids=["cbc", "highs"])
def test_no_time_at_all_gives_no_made_up_answer(solver: AbstractMipSolver) -> None:
    """CBC leaves fractional values behind when it is stopped this early."""
    try:
        solution = solve_paper_ilp(dense(20), PaperOptions(0.01, solver))
    except NothingFoundError as error:
        assert "0.01 s" in str(error)
    else:
        assert evaluate(dense(20), solution.choices).violations == ()


SMALL = ShardingProblem(
    (np.array([1.0, 2.0]), np.array([3.0, 1.0, inf])),
    (Edge(0, 1, np.array([[5.0, 4.0, 0.0], [0.0, 9.0, 1.0]])),),
    (np.ones(2), np.ones(3)),
    (np.zeros(2), np.zeros(3)),
)


def test_cbc_works_in_a_folder_with_spaces_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    assert solve_paper_ilp(SMALL).objective == 5.0
    assert list(folder.iterdir()) == []


def test_a_cbc_that_dies_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SolverError, match="exit code 1 and no answer"):
        solve_paper_ilp(SMALL, PaperOptions(solver=Cbc("/bin/false")))
    with pytest.raises(SolverError, match="cannot be run"):
        solve_paper_ilp(SMALL, PaperOptions(solver=Cbc(str(tmp_path / "absent"))))
    assert list(tmp_path.iterdir()) == []


def test_a_cbc_that_does_not_stop_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("alpa_hpc.sharding.mip.GRACE_SECONDS", 0.2)
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\nexec sleep 60\n")
    stubborn.chmod(0o700)
    with pytest.raises(NothingFoundError, match="no assignment in 0.1 s"):
        solve_paper_ilp(SMALL, PaperOptions(0.1, Cbc(str(stubborn))))
    assert list(tmp_path.iterdir()) == [stubborn]


@pytest.mark.parametrize(("limit", "error"), [(0.1, NothingFoundError), (30.0, InfeasibleError)])
def test_infeasible_is_believed_only_before_time_is_over(limit: float, error: type[Exception], tmp_path: Path) -> None:
    denying = tmp_path / "denying"
    denying.write_text("#!/bin/sh\nsleep 0.3\necho 'Infeasible - objective value 0.0' > model.sol\n")
    denying.chmod(0o700)
    with pytest.raises(error):
        solve_paper_ilp(SMALL, PaperOptions(limit, Cbc(str(denying))))


def test_no_room_for_the_solvers_files_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # where nobody may write
    with pytest.raises(SolverError, match="temporary folder"):
        solve_paper_ilp(SMALL)


def test_without_highspy_highs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpa_hpc.sharding.mip.find_spec", lambda name: None)
    with pytest.raises(SolverError, match="highspy"):
        solve_paper_ilp(SMALL, BY_HIGHS)


Tamper = Callable[[dict[str, pulp.LpVariable], pulp.LpProblem], None]


class Tampering(AbstractMipSolver):
    """Solves honestly, then changes the answer."""

    def __init__(self, tamper: Tamper) -> None:
        self.tamper = tamper

    def run(self, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        seconds = Highs().run(model, time_limit_seconds)
        self.tamper(model.variablesDict(), model)
        return seconds


def put(bits: dict[str, pulp.LpVariable], values: dict[str, float]) -> None:
    for name, value in values.items():
        bits[name].varValue = value


def halve(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    put(bits, {"s_0_0": 0.5, "s_0_1": 0.5})


def move_node_alone(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    put(bits, {"s_0_0": 1.0, "s_0_1": 0.0})


def take_forbidden(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    put(bits, {"s_1_0": 0.0, "s_1_2": 1.0, "e_0_3": 0.0, "e_0_5": 1.0})


def forget(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    for bit in bits.values():
        bit.varValue = None


def call_unsolved(bits: dict[str, pulp.LpVariable], model: pulp.LpProblem) -> None:
    model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionNoSolutionFound)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (halve, "does not choose one strategy"),
        (move_node_alone, "pays for strategies .* but chooses"),
        (take_forbidden, "not allowed"),
        (forget, "does not choose one strategy"),
        (call_unsolved, "found no assignment"),
    ],
)
def test_a_wrong_answer_is_refused(tamper: Tamper, reason: str) -> None:
    with pytest.raises(SolverError, match=reason):
        solve_paper_ilp(SMALL, PaperOptions(solver=Tampering(tamper)))


def test_cbc_is_stopped_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while CBC runs ends it and removes its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running: list[subprocess.Popen[Any]] = []
    original = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[Any], *arguments: Sequence[object], **options: object) -> tuple[Any, Any]:
        running.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve_paper_ilp(dense(20), PaperOptions(60.0))
    monkeypatch.setattr(subprocess.Popen, "communicate", original)
    assert running[0].poll() is not None
    assert list(tmp_path.iterdir()) == []
