"""No solution without a certificate that holds on the unreduced problem."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from alpa_hpc.errors import SolverError
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.solution import Claim, ShardingSolution, SolveMethod, SolveStatus, certify, size_of

PROBLEM = ShardingProblem(
    node_costs=(np.array([1.0, 2.0]), np.array([1.0, inf])),
    edges=(Edge(0, 1, np.array([[0.5, 0.0], [0.0, 0.0]])),),
    fixed_bytes=(np.array([4.0, 1.0]), np.array([1.0, 1.0])),
    inflight_bytes=(np.zeros(2), np.zeros(2)),
    memory_limit=5.0,
)


def _certify(problem: ShardingProblem, choices: tuple[int, ...], claim: Claim) -> ShardingSolution:
    return certify(problem, choices, claim, SolveMethod.ILP, 0.1, size_of(problem))


def test_objective_bound_and_gap_are_of_the_unreduced_problem() -> None:
    proven = _certify(PROBLEM, (0, 0), Claim(2.5, 2.5))
    assert (proven.objective, proven.lower_bound, proven.gap, proven.status) == (2.5, 2.5, 0.0, SolveStatus.PROVEN)
    assert (proven.size.nodes, proven.size.strategies, proven.size.edge_costs) == (2, 4, 4)
    stopped = _certify(PROBLEM, (1, 0), Claim(3.0, 2.4))
    assert (stopped.objective, stopped.status) == (3.0, SolveStatus.TIME_LIMIT)
    assert stopped.gap == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("choices", "claim", "reason"),
    [
        ((0, 1), Claim(2.5, 2.5), "node 1 chooses strategy 1, which is not allowed"),
        ((0, 0), Claim(2.4, 2.4), "claims 2.4 s, its choices cost 2.5 s"),
        ((0, 0), Claim(2.5, 2.6), "bound of 2.6 s is above the 2.5 s of its own answer"),
    ],
)
def test_a_false_claim_is_refused(choices: tuple[int, ...], claim: Claim, reason: str) -> None:
    with pytest.raises(SolverError, match=reason):
        _certify(PROBLEM, choices, claim)


def test_choices_above_the_limit_are_refused() -> None:
    with pytest.raises(SolverError, match="5 bytes a device .* the limit is 4"):
        _certify(replace(PROBLEM, memory_limit=4.0), (0, 0), Claim(2.5, 2.5))
