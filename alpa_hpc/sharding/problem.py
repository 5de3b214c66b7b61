"""The intra-operator problem as plain numbers (paper, Eq. 1): pick one strategy a node, pay node and edge costs.

minimise  sum_v node_costs[v][s_v] + sum_(u,v) edge_costs[u,v][s_u, s_v]
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Resharding between two nodes: `costs[s_source, s_target]` in seconds an iteration; several edges a pair are allowed."""

    source: int
    target: int
    costs: Costs


@dataclass(frozen=True, slots=True, eq=False)
class ShardingProblem:
    """Nodes 0..n-1 with at least one strategy each. Costs in seconds an iteration, +inf = not allowed; never NaN.

    `fixed_bytes[v]` are held all iteration (weights, accumulators, optimiser state), `inflight_bytes[v]` once a microbatch in flight
    (residuals), both a device. `inflight` is how many microbatches the limit is tested for; `memory_limit` = inf leaves memory free:

        sum_v fixed_bytes[v][s_v] + inflight * sum_v inflight_bytes[v][s_v] <= memory_limit
    """

    node_costs: tuple[Costs, ...]
    edges: tuple[Edge, ...]
    fixed_bytes: tuple[Costs, ...]
    inflight_bytes: tuple[Costs, ...]
    memory_limit: float = float("inf")
    inflight: int = 1
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(costs) for costs in self.node_costs]
        assert [len(b) for b in self.fixed_bytes] == sizes, "fixed_bytes must have a number for each strategy"
        assert [len(b) for b in self.inflight_bytes] == sizes, "inflight_bytes must have a number for each strategy"
        for edge in self.edges:
            assert edge.source != edge.target, "an edge joins two different nodes"
            assert edge.costs.shape == (sizes[edge.source], sizes[edge.target]), f"edge {edge.source}->{edge.target} has a wrong shape"
