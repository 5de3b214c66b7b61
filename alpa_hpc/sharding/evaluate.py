"""An assignment of strategies -> its cost, its bytes and every rule it breaks (paper, Eq. 1).

Knows no solver, so that what a solver claims can be checked here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_hpc.sharding.problem import ShardingProblem


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Seconds an iteration (`seconds` = nodes + edges), bytes a device (all iteration; a microbatch in flight), broken rules in words."""

    seconds: float
    node_seconds: float
    edge_seconds: float
    fixed_bytes: float
    inflight_bytes: float
    violations: tuple[str, ...]


def evaluate(problem: ShardingProblem, choices: Sequence[int]) -> Evaluation:
    """Cost and bytes of `choices` (one strategy index a node), and the rules they break: none if they are allowed and fit."""
    assert len(choices) == len(problem.node_costs), "one choice a node"
    assert all(0 <= s < len(costs) for s, costs in zip(choices, problem.node_costs, strict=True)), "choices are strategy indices"
    nodes = [float(costs[s]) for costs, s in zip(problem.node_costs, choices, strict=True)]
    edges = [float(edge.costs[choices[edge.source], choices[edge.target]]) for edge in problem.edges]
    fixed = sum(float(held[s]) for held, s in zip(problem.fixed_bytes, choices, strict=True))
    inflight = sum(float(held[s]) for held, s in zip(problem.inflight_bytes, choices, strict=True))
    violations = [
        f"{name_of(problem, v)} chooses strategy {choices[v]}, which is not allowed" for v, cost in enumerate(nodes) if cost == np.inf
    ]
    for edge, cost in zip(problem.edges, edges, strict=True):
        if cost == np.inf:
            pair = f"{choices[edge.source]} of {name_of(problem, edge.source)} -> {choices[edge.target]} of {name_of(problem, edge.target)}"
            violations.append(f"there is no resharding from strategy {pair}")
    total = fixed + problem.inflight * inflight
    if total > problem.memory_limit:
        limit = f"the limit is {problem.memory_limit:.0f}"
        violations.append(f"{total:.0f} bytes a device with {problem.inflight} microbatches in flight, {limit}")
    return Evaluation(sum(nodes) + sum(edges), sum(nodes), sum(edges), fixed, inflight, tuple(violations))


def explain(problem: ShardingProblem, choices: Sequence[int], node: int) -> tuple[tuple[int, float], ...]:
    """Why not another strategy here: (strategy, seconds of the whole if only `node` changed to it); inf = not allowed."""
    others = sum(float(costs[s]) for v, (costs, s) in enumerate(zip(problem.node_costs, choices, strict=True)) if v != node)
    seconds = problem.node_costs[node] + others
    for edge in problem.edges:
        if edge.source == node:
            seconds = seconds + edge.costs[:, choices[edge.target]]
        elif edge.target == node:
            seconds = seconds + edge.costs[choices[edge.source]]
        else:
            seconds = seconds + edge.costs[choices[edge.source], choices[edge.target]]
    return tuple((strategy, float(total)) for strategy, total in enumerate(seconds))


def name_of(problem: ShardingProblem, node: int) -> str:
    """The node's name, or its number where the problem has no names."""
    return problem.names[node] if problem.names else f"node {node}"
