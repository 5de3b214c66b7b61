"""Slow and obvious answers that the package's algorithms are compared with."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pulp

from alpa_hpc.sharding.problem import ShardingProblem


def all_choices(problem: ShardingProblem) -> Iterator[tuple[int, ...]]:
    """Every assignment of strategies to nodes, in lexicographic order."""
    return product(*(range(len(costs)) for costs in problem.node_costs))


def total_seconds(problem: ShardingProblem, choices: Sequence[int]) -> float:
    """Objective of Eq. 1."""
    nodes = sum(costs[choice] for costs, choice in zip(problem.node_costs, choices, strict=True))
    return float(nodes + sum(edge.costs[choices[edge.source], choices[edge.target]] for edge in problem.edges))


def total_bytes(problem: ShardingProblem, choices: Sequence[int]) -> float:
    """Left side of the memory limit."""
    fixed = sum(held[choice] for held, choice in zip(problem.fixed_bytes, choices, strict=True))
    return float(fixed + problem.inflight * sum(held[choice] for held, choice in zip(problem.inflight_bytes, choices, strict=True)))


def best_by_enumeration(problem: ShardingProblem) -> float:
    """The optimum; inf where nothing fits or is allowed."""
    fitting = (choices for choices in all_choices(problem) if total_bytes(problem, choices) <= problem.memory_limit)
    return min((total_seconds(problem, choices) for choices in fitting), default=float("inf"))


def solve_paper_ilp(problem: ShardingProblem, solver: pulp.LpSolver) -> float:
    """The paper's own ILP (section 4.2), as first implemented: s and e binary, row and column sums of e <= s; inf if infeasible.

    minimise sum_v s_v.c_v + sum_(u,v) e_uv.R_uv   with sum s_v = 1, sum e_uv = 1, and the memory row.
    """
    model = pulp.LpProblem("paper", pulp.LpMinimize)
    cost: list[tuple[pulp.LpVariable, float]] = []
    strategies: list[list[pulp.LpVariable]] = []

    def binaries(name: str, costs: np.ndarray) -> list[pulp.LpVariable]:
        bits = [model.add_variable(f"{name}_{index}", 0, 1 if one < np.inf else 0, pulp.LpInteger) for index, one in enumerate(costs)]
        cost.extend((bit, one) for bit, one in zip(bits, costs.tolist(), strict=True) if one < np.inf)
        model.addConstraint(pulp.lpSum(bits) == 1)
        return bits

    for v, costs in enumerate(problem.node_costs):
        strategies.append(binaries(f"s_{v}", costs))
    for index, edge in enumerate(problem.edges):
        pairs = np.array(binaries(f"e_{index}", edge.costs.ravel()), dtype=object).reshape(edge.costs.shape)
        for row, strategy in zip(pairs, strategies[edge.source], strict=True):
            model.addConstraint(pulp.lpSum(list(row)) <= strategy)
        for column, strategy in zip(pairs.T, strategies[edge.target], strict=True):
            model.addConstraint(pulp.lpSum(list(column)) <= strategy)
    if problem.memory_limit < np.inf:
        held = [fixed + problem.inflight * inflight for fixed, inflight in zip(problem.fixed_bytes, problem.inflight_bytes, strict=True)]
        total = [(bit, float(size)) for bits, one in zip(strategies, held, strict=True) for bit, size in zip(bits, one, strict=True)]
        model.addConstraint(pulp.LpAffineExpression(total) <= problem.memory_limit)
    model.setObjective(pulp.LpAffineExpression(cost))
    model.solve(solver)
    if model.sol_status == pulp.LpSolutionInfeasible:
        return float("inf")
    assert model.sol_status == pulp.LpSolutionOptimal, model.sol_status
    return sum(one * round(bit.varValue or 0.0) for bit, one in cost)
