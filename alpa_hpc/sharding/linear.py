"""LinearModel (flat arrays) -> LinearAnswer: the door to MIP solvers, HiGHS, or CBC where HiGHS is absent.

An answer is what the solver says; whoever asks checks it. A bound counts in any case, values only if there are any.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pulp

from alpa_hpc.errors import SolverError
from alpa_hpc.kernels import Flags, Floats, Ints
from alpa_hpc.sharding.mip import Cbc
from alpa_hpc.sharding.worker import LateError, Worker


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """minimise costs . x,  row_lower <= A x <= row_upper,  0 <= x <= upper, x whole where `is_whole`; A by rows.

    `start` is a solution to begin with, empty if none is known. A proof may stop at an absolute gap of `gap`.
    """

    costs: Floats
    upper: Floats
    is_whole: Flags
    row_starts: Ints
    columns: Ints
    coefficients: Floats
    row_lower: Floats
    row_upper: Floats
    start: Floats
    gap: float


@dataclass(frozen=True, slots=True, eq=False)
class LinearAnswer:
    """`values` (empty: none found), a bound that no solution undercuts (inf: there is none)."""

    values: Floats
    bound: float


class AbstractLinearSolver(ABC):
    """Solves linear models with whole variables, one thread."""

    @abstractmethod
    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        """The best that is found in `seconds`; SolverError where the solver fails."""


@dataclass(frozen=True, slots=True)
class HighsSolver(AbstractLinearSolver):
    """HiGHS through its Python wheel: no files.

    HiGHS looks at the clock in its search, but not in its presolve, to which it comes back from the root node, and where it was seen to
    stay for many minutes after its time. So a model of `child_size` coefficients or more is solved in a process of its own, which is
    killed `grace_seconds` after its time; what it had found is lost then.
    """

    child_size: int = 2_000
    grace_seconds: float = 5.0

    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        """See base class."""
        if len(model.coefficients) < self.child_size:
            return solve_by_highs(model, seconds)
        try:
            return _highs_process().call(max(seconds, 0.0) + self.grace_seconds, model, seconds)
        except LateError:
            return LinearAnswer(np.zeros(0), -np.inf)


@cache
def _highs_process() -> Worker[LinearAnswer]:
    return Worker(solve_by_highs)


def solve_by_highs(model: LinearModel, seconds: float) -> LinearAnswer:
    """Solve in this process, which may take longer than `seconds`.

    Raises SolverError if HiGHS fails or cannot be loaded.
    """
    highspy = _loaded_highs()
    with _without_stdout():  # HiGHS 1.16 greets on it before it can be told not to
        highs = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(seconds, 0.0),
        "mip_rel_gap": 0.0,
        "mip_abs_gap": model.gap,
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_highs_program(highspy, model))
    if len(model.start):
        start = highspy.HighsSolution()
        start.col_value = model.start.tolist()
        highs.setSolution(start)
    if highs.run() == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS failed: {highs.modelStatusToString(highs.getModelStatus())}")
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}:
        return LinearAnswer(np.zeros(0), np.inf)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if found else np.zeros(0)
    bound = info.mip_dual_bound if model.is_whole.any() else (info.objective_function_value if found else -np.inf)
    return LinearAnswer(values, float(bound))


def _loaded_highs() -> Any:
    """The module `highspy`.

    Raises SolverError if it is absent or broken, which only its import tells: of a broken install the file is there.
    """
    try:
        import highspy
    except (ImportError, OSError) as error:
        raise SolverError(
            f"HiGHS cannot be loaded: {error}. Install it anew (pip install --force-reinstall highspy) or choose CBC"
        ) from error
    return highspy


def _highs_program(highspy: Any, model: LinearModel) -> Any:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(model.costs), len(model.row_lower)
    program.col_cost_ = model.costs
    program.col_lower_, program.col_upper_ = np.zeros(len(model.costs)), model.upper
    program.row_lower_, program.row_upper_ = model.row_lower, model.row_upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.num_col_, program.a_matrix_.num_row_ = len(model.costs), len(model.row_lower)
    program.a_matrix_.start_, program.a_matrix_.index_ = model.row_starts, model.columns
    program.a_matrix_.value_ = model.coefficients
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[whole] for whole in model.is_whole.astype(int).tolist()]
    return program


@contextmanager
def _without_stdout() -> Generator[None]:
    """What C code writes to the standard output meanwhile is dropped."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True, slots=True)
class CbcSolver(AbstractLinearSolver):
    """CBC, the binary that PuLP brings along. It says no bound unless it has finished."""

    cbc: Cbc = Cbc()

    def solve(self, model: LinearModel, seconds: float) -> LinearAnswer:
        """See base class."""
        started = time.monotonic()
        program, variables = _pulp_program(model)
        self.cbc.run(program, max(0.1, seconds - (time.monotonic() - started)))
        if program.sol_status == pulp.LpSolutionInfeasible:
            return LinearAnswer(np.zeros(0), np.inf)
        if program.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
            return LinearAnswer(np.zeros(0), -np.inf)
        values = np.array([variable.varValue or 0.0 for variable in variables])
        is_optimal = program.sol_status == pulp.LpSolutionOptimal
        return LinearAnswer(values, float(model.costs @ values) if is_optimal else -np.inf)


def _pulp_program(model: LinearModel) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    program = pulp.LpProblem("sharding", pulp.LpMinimize)
    variables = [
        program.add_variable(f"x{i}", 0, upper, pulp.LpInteger if whole else pulp.LpContinuous)
        for i, (upper, whole) in enumerate(zip(model.upper.tolist(), model.is_whole.tolist(), strict=True))
    ]
    program.setObjective(pulp.LpAffineExpression(zip(variables, model.costs.tolist(), strict=True)))
    for row, (lower, upper) in enumerate(zip(model.row_lower.tolist(), model.row_upper.tolist(), strict=True)):
        entries = slice(model.row_starts[row], model.row_starts[row + 1])
        terms = zip(model.columns[entries].tolist(), model.coefficients[entries].tolist(), strict=True)
        expression = pulp.LpAffineExpression([(variables[column], value) for column, value in terms])
        for sense, bound in _sides(lower, upper):
            program.addConstraint(pulp.LpConstraint(expression, sense, rhs=bound))
    return program, variables


def _sides(lower: float, upper: float) -> list[tuple[int, float]]:
    """A row of PuLP's has one side."""
    if lower == upper:
        return [(pulp.LpConstraintEQ, upper)]
    sides = ((pulp.LpConstraintGE, lower), (pulp.LpConstraintLE, upper))
    return [(sense, bound) for sense, bound in sides if np.isfinite(bound)]


def installed_solver() -> AbstractLinearSolver:
    """HiGHS where highspy is installed and can be loaded, else CBC."""
    try:
        _loaded_highs()
    except SolverError:
        return CbcSolver()
    return HighsSolver()
