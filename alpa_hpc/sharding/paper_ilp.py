"""ShardingProblem -> the optimum by the paper's own ILP (section 4.2, Eq. 1), unreduced: the reference of tests and benchmarks.

With s_v one-hot over the k_v strategies of node v and e_vu over the k_v k_u pairs of edge (v, u), all binary:

    minimise  sum_v s_v . c_v + sum_(v,u) e_vu . vec(R_vu)
    sum_i s_v[i] = 1                                       one strategy a node            (`_add_choices`)
    sum_ij e_vu[i, j] = 1                                  one pair an edge               (`_add_pairs`)
    sum_j e_vu[i, j] <= s_v[i],  sum_i e_vu[i, j] <= s_u[j]  it is the pair that is chosen  (`_add_pairs`)

The paper leaves the linearisation of e_vu = s_v s_u^T to "standard techniques"; these are the rows of its published implementation. Three
things are ours: what costs +inf has upper bound 0 (there: a cost of 1e13), seconds are scaled by a power of two so that solver tolerances
mean something, and a problem with a memory limit gets its row (`_add_limit`); the paper's model has none, its implementation an optional
one. Nothing is merged, reduced or tightened here, and an answer counts only after `evaluate` has confirmed it.
"""

import time
from dataclasses import dataclass, field
from math import inf, log2

import numpy as np
import pulp
from numpy.typing import NDArray

from alpa_hpc.errors import InfeasibleError, SolverError
from alpa_hpc.sharding.evaluate import evaluate, name_of
from alpa_hpc.sharding.mip import AbstractMipSolver, Cbc
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem

# Integers of a MIP solver are that exact; objectives, summed in another order, that much relative to their terms.
INTEGRALITY = 1e-5
TOLERANCE = 1e-6

Bits = list[pulp.LpVariable]
Term = tuple[pulp.LpVariable, float]


@dataclass(frozen=True, slots=True)
class PaperOptions:
    """The solver (the paper's is CBC) and its time limit (the published implementation's), without model building."""

    time_limit_seconds: float = 600.0
    solver: AbstractMipSolver = field(default_factory=Cbc)


@dataclass(frozen=True, slots=True)
class PaperSolution:
    """One strategy a node and their seconds an iteration; not proven optimal where the time limit struck.

    `build_seconds` went into the model, `solver_seconds` into the solver alone; variables (all binary) and rows as the solver got them.
    """

    choices: tuple[int, ...]
    objective: float
    is_proven: bool
    build_seconds: float
    solver_seconds: float
    num_variables: int
    num_rows: int


class NothingFoundError(SolverError):
    """The time limit struck before any assignment was found."""


def solve_paper_ilp(problem: ShardingProblem, options: PaperOptions | None = None) -> PaperSolution:
    """Solve the paper's model as it stands.

    Raises InfeasibleError if no assignment is allowed and fits, NothingFoundError if none was found in time, SolverError if the solver
    fails or its answer does not survive the re-check.
    """
    settings = options or PaperOptions()
    started = time.monotonic()
    model = _build(problem)
    build_seconds = time.monotonic() - started
    solver_seconds = settings.solver.run(model.problem, settings.time_limit_seconds)
    _check_status(model.problem, settings)
    choices = _read_choices(model, problem)
    return PaperSolution(
        choices=choices,
        objective=_confirmed(problem, choices, model),
        is_proven=model.problem.sol_status == pulp.LpSolutionOptimal,
        build_seconds=build_seconds,
        solver_seconds=solver_seconds,
        num_variables=len(model.objective),
        num_rows=model.problem.numConstraints(),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """`choices[v][i]` = s_v[i], `pairs[e]` = e_vu in row order; `objective` in units of `unit_seconds`, forbidden bits at cost 0."""

    problem: pulp.LpProblem
    choices: list[Bits]
    pairs: list[Bits]
    objective: list[Term]
    unit_seconds: float


def _build(problem: ShardingProblem) -> _Model:
    model = _Model(pulp.LpProblem("paper", pulp.LpMinimize), [], [], [], _unit_of(problem))
    for v, costs in enumerate(problem.node_costs):
        model.choices.append(_add_choices(model, f"s_{v}", costs))
    for index, edge in enumerate(problem.edges):
        model.pairs.append(_add_pairs(model, f"e_{index}", edge))
    if problem.memory_limit < inf:
        _add_limit(model, problem)
    model.problem.setObjective(pulp.LpAffineExpression(model.objective))
    return model


def _unit_of(problem: ShardingProblem) -> float:
    """About the median positive cost, rounded to a power of two: scaling is exact."""
    costs = np.concatenate([*problem.node_costs, *(edge.costs.ravel() for edge in problem.edges)])
    positive = costs[(costs > 0) & (costs < inf)]
    return 2.0 ** round(log2(float(np.median(positive)))) if positive.size else 1.0


def _add_choices(model: _Model, name: str, costs: Costs) -> Bits:
    """One-hot bits that cost `costs`."""
    bits: Bits = []
    for index, cost in enumerate(costs.tolist()):
        bit = model.problem.add_variable(f"{name}_{index}", 0, 1 if cost < inf else 0, pulp.LpInteger)
        bits.append(bit)
        model.objective.append((bit, cost / model.unit_seconds if cost < inf else 0.0))
    _add_row(model, [(bit, 1.0) for bit in bits], pulp.LpConstraintEQ, 1.0)
    return bits


def _add_pairs(model: _Model, name: str, edge: Edge) -> Bits:
    pairs = _add_choices(model, name, edge.costs.ravel())
    num_rows, num_columns = edge.costs.shape
    for i, bit in enumerate(model.choices[edge.source]):
        row = pairs[i * num_columns : (i + 1) * num_columns]
        _add_row(model, [*((pair, 1.0) for pair in row), (bit, -1.0)], pulp.LpConstraintLE, 0.0)
    for j, bit in enumerate(model.choices[edge.target]):
        column = pairs[j::num_columns]
        assert len(column) == num_rows, "one pair for each strategy of the source"
        _add_row(model, [*((pair, 1.0) for pair in column), (bit, -1.0)], pulp.LpConstraintLE, 0.0)
    return pairs


def _add_limit(model: _Model, problem: ShardingProblem) -> None:
    """The memory row of the problem, in units of its limit."""
    unit = max(problem.memory_limit, 1.0)
    terms: list[Term] = []
    for bits, fixed, inflight in zip(model.choices, problem.fixed_bytes, problem.inflight_bytes, strict=True):
        held = (fixed + problem.inflight * inflight) / unit
        terms += zip(bits, held.tolist(), strict=True)
    _add_row(model, terms, pulp.LpConstraintLE, problem.memory_limit / unit)


def _add_row(model: _Model, terms: list[Term], sense: int, bound: float) -> None:
    model.problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=bound))


def _check_status(model: pulp.LpProblem, settings: PaperOptions) -> None:
    # PuLP has only `status` say so where CBC finds the relaxation feasible but no integers.
    if model.status == pulp.LpStatusInfeasible or model.sol_status == pulp.LpSolutionInfeasible:
        raise InfeasibleError("the paper's ILP has no solution: no assignment is allowed and fits")
    if model.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
        raise NothingFoundError(f"the paper's ILP found no assignment in {settings.time_limit_seconds:g} s; raise the limit")


def _read_choices(model: _Model, problem: ShardingProblem) -> tuple[int, ...]:
    """The strategies of an integral answer; its pairs must be theirs."""
    choices = tuple(_one_hot(bits, name_of(problem, v)) for v, bits in enumerate(model.choices))
    for edge, pairs in zip(problem.edges, model.pairs, strict=True):
        names = f"{name_of(problem, edge.source)} -> {name_of(problem, edge.target)}"
        pair = divmod(_one_hot(pairs, names), edge.costs.shape[1])
        expected = (choices[edge.source], choices[edge.target])
        if pair != expected:
            raise SolverError(f"the ILP solver's answer pays for strategies {pair} of {names}, but chooses {expected}; it is refused")
    return choices


def _one_hot(bits: Bits, name: str) -> int:
    values: NDArray[np.float64] = np.array([np.nan if bit.varValue is None else bit.varValue for bit in bits])
    choice = int(np.argmax(values))
    if not np.allclose(values, np.arange(len(bits)) == choice, rtol=0.0, atol=INTEGRALITY):
        raise SolverError(f"the ILP solver's answer does not choose one strategy for {name}; it is refused")
    return choice


def _confirmed(problem: ShardingProblem, choices: tuple[int, ...], model: _Model) -> float:
    """Seconds of the choices by the evaluator. Raises SolverError where a rule is broken or the solver's own objective is another."""
    checked = evaluate(problem, choices)
    if checked.violations:
        raise SolverError(f"the ILP solver's answer is refused: {'; '.join(checked.violations[:3])}")
    claimed = model.unit_seconds * sum(cost * float(bit.varValue or 0.0) for bit, cost in model.objective)
    if abs(claimed - checked.seconds) > TOLERANCE * max(abs(checked.seconds), model.unit_seconds):
        raise SolverError(f"the ILP solver claims {claimed:.9g} s, its choices cost {checked.seconds:.9g} s: its answer is refused")
    return checked.seconds
