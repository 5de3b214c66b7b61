"""ShardingProblem -> parts that can be solved one by one: they share neither edges nor a memory limit that could bind."""

from collections.abc import Sequence
from math import inf

import numpy as np

from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem

Part = tuple[tuple[int, ...], ShardingProblem]


def split(problem: ShardingProblem) -> tuple[Part, ...]:
    """(nodes, problem of these nodes) for each part; their optima add up to the problem's.

    A component in which every node holds the same bytes whatever it chooses is free of the limit; all others share it and stay one part.
    """
    held = held_bytes(problem)
    is_coupled = [problem.memory_limit < inf and bool(np.ptp(one) > 0) for one in held]
    components = _components(problem)
    free = [nodes for nodes in components if not any(is_coupled[v] for v in nodes)]
    parts = [(nodes, _part(problem, nodes, inf)) for nodes in free]
    shared = tuple(sorted(v for nodes in components if any(is_coupled[u] for u in nodes) for v in nodes))
    if shared:
        taken = sum(float(held[v][0]) for nodes in free for v in nodes)
        parts.append((shared, _part(problem, shared, problem.memory_limit - taken)))
    return tuple(parts)


def held_bytes(problem: ShardingProblem) -> list[Costs]:
    """Bytes a device of each strategy with all microbatches in flight."""
    return [fixed + problem.inflight * inflight for fixed, inflight in zip(problem.fixed_bytes, problem.inflight_bytes, strict=True)]


def _components(problem: ShardingProblem) -> list[tuple[int, ...]]:
    """Nodes joined by edges, each component sorted."""
    neighbours: list[set[int]] = [set() for _ in problem.node_costs]
    for edge in problem.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    unseen = set(range(len(neighbours)))
    components: list[tuple[int, ...]] = []
    while unseen:
        found, frontier = set[int](), {min(unseen)}
        while frontier:
            found |= frontier
            frontier = set[int]().union(*(neighbours[v] for v in frontier)) - found
        unseen -= found
        components.append(tuple(sorted(found)))
    return components


def _part(problem: ShardingProblem, nodes: Sequence[int], memory_limit: float) -> ShardingProblem:
    number = {node: index for index, node in enumerate(nodes)}
    return ShardingProblem(
        node_costs=tuple(problem.node_costs[v] for v in nodes),
        edges=tuple(Edge(number[e.source], number[e.target], e.costs) for e in problem.edges if e.source in number),
        fixed_bytes=tuple(problem.fixed_bytes[v] for v in nodes),
        inflight_bytes=tuple(problem.inflight_bytes[v] for v in nodes),
        memory_limit=memory_limit,
        inflight=problem.inflight,
        names=tuple(problem.names[v] for v in nodes) if problem.names else (),
    )
