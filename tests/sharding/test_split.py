"""Parts are solved one by one: their optima add up, their limits leave room for what the others hold anyway."""

import numpy as np
from hypothesis import given, settings

from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.split import held_bytes, split
from tests.oracles import best_by_enumeration
from tests.sharding.problems import problems


@settings(max_examples=200, deadline=None)
@given(problems())
def test_optima_of_the_parts_add_up(problem: ShardingProblem) -> None:
    if sum(float(held.min()) for held in held_bytes(problem)) > problem.memory_limit:
        return
    parts = split(problem)
    assert sorted(v for nodes, _ in parts for v in nodes) == list(range(len(problem.node_costs)))
    assert sum(best_by_enumeration(part) for _, part in parts) == best_by_enumeration(problem)


def test_only_nodes_with_a_choice_of_bytes_share_the_limit() -> None:
    """Nodes 0-1 and 4 can save bytes; 2-3 hold 5 and 6 whatever they choose."""
    varied, five, six = np.array([3.0, 1.0]), np.full(2, 5.0), np.full(2, 6.0)
    problem = ShardingProblem(
        node_costs=(np.arange(2.0),) * 5,
        edges=(Edge(0, 1, np.eye(2)), Edge(3, 2, np.eye(2))),
        fixed_bytes=(varied, five, five, six, varied),
        inflight_bytes=(np.zeros(2),) * 5,
        memory_limit=22.0,
    )
    (free, shared) = split(problem)
    assert (free[0], free[1].memory_limit) == ((2, 3), np.inf)
    assert (shared[0], shared[1].memory_limit) == ((0, 1, 4), 11.0)
    assert [(edge.source, edge.target) for edge in free[1].edges] == [(1, 0)]
