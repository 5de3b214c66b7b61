"""Choices and what a solver claims for them -> ShardingSolution, the certificate, after a re-check that knows no solver."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

import numpy as np

from alpa_hpc.errors import SolverError
from alpa_hpc.sharding.evaluate import evaluate
from alpa_hpc.sharding.problem import ShardingProblem

TOLERANCE = 1e-6  # of the objective: what a solver's arithmetic may be off by
ROUNDING = 1e-13  # of the largest cost, which need not be paid: what sums in another order are off by


class SolveStatus(Enum):
    """Whether the choices are proven optimal, or the best that was found in time."""

    PROVEN = auto()
    TIME_LIMIT = auto()


class SolveMethod(Enum):
    """The last means that was needed: reductions alone, elimination, a Lagrangian bound, an ILP, or a search without a proof."""

    REDUCTION = auto()
    ELIMINATION = auto()
    RELAXATION = auto()
    ILP = auto()
    SEARCH = auto()


@dataclass(frozen=True, slots=True)
class ProblemSize:
    """Nodes, strategies of all nodes, entries of all edge tables."""

    nodes: int
    strategies: int
    edge_costs: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a solver says: seconds of its choices, and seconds that no allowed choices can undercut."""

    seconds: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class ShardingSolution:
    """One strategy a node, with `lower_bound` <= optimum <= `objective` in seconds an iteration and the gap relative to the objective.

    `seconds` is how long the solve took, `peak_bytes` what the choices hold a device; `size` the problem's size, `size_left` what
    reductions left of it.
    """

    choices: tuple[int, ...]
    objective: float
    lower_bound: float
    gap: float
    status: SolveStatus
    method: SolveMethod
    seconds: float
    peak_bytes: float
    size: ProblemSize
    size_left: ProblemSize


def size_of(problem: ShardingProblem) -> ProblemSize:
    """Count nodes, strategies and edge costs."""
    return ProblemSize(len(problem.node_costs), sum(map(len, problem.node_costs)), sum(edge.costs.size for edge in problem.edges))


def certify(
    problem: ShardingProblem, choices: Sequence[int], claim: Claim, method: SolveMethod, seconds: float, size_left: ProblemSize
) -> ShardingSolution:
    """The solution, or SolverError if the choices break a rule of `problem` or cost something else than claimed."""
    checked = evaluate(problem, choices)
    if checked.violations:
        raise SolverError(f"the solver's answer is refused: {'; '.join(checked.violations[:3])}")
    tolerance = max(TOLERANCE * abs(checked.seconds), ROUNDING * _largest_cost(problem))
    if abs(checked.seconds - claim.seconds) > tolerance:
        raise SolverError(f"the solver claims {claim.seconds:.9g} s, its choices cost {checked.seconds:.9g} s: its answer is refused")
    if claim.lower_bound > checked.seconds + tolerance:
        raise SolverError(f"the solver's bound of {claim.lower_bound:.9g} s is above the {checked.seconds:.9g} s of its own answer")
    difference = max(0.0, checked.seconds - claim.lower_bound)
    return ShardingSolution(
        choices=tuple(choices),
        objective=checked.seconds,
        lower_bound=checked.seconds - difference,
        gap=difference / abs(checked.seconds) if difference > 0 else 0.0,
        status=SolveStatus.PROVEN if difference <= tolerance else SolveStatus.TIME_LIMIT,
        method=method,
        seconds=seconds,
        peak_bytes=checked.fixed_bytes + problem.inflight * checked.inflight_bytes,
        size=size_of(problem),
        size_left=size_left,
    )


def _largest_cost(problem: ShardingProblem) -> float:
    tables = (*problem.node_costs, *(edge.costs for edge in problem.edges))
    return max((float(np.abs(table[table < inf]).max(initial=0.0)) for table in tables), default=0.0)
