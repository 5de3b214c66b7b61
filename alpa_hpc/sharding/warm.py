"""Nothing -> compiled kernels: each is called once on a tiny problem, so that what is timed afterwards is the search itself."""

import numpy as np

from alpa_hpc.sharding.descent import repair, total_cost
from alpa_hpc.sharding.flat import evaluate_flat, flatten, part_of, parts_of
from alpa_hpc.sharding.lagrangian import relax
from alpa_hpc.sharding.message_graph import make_graph
from alpa_hpc.sharding.minimise import minimise, restore
from alpa_hpc.sharding.neighbourhood import extract, grow
from alpa_hpc.sharding.problem import Edge, ShardingProblem
from alpa_hpc.sharding.shrink import expand, shrink
from alpa_hpc.sharding.tables import flat_tables

NUM_NODES, NUM_STRATEGIES = 5, 3


def warm_up() -> None:
    """Compile every kernel, or read it from disk."""
    flat = flatten(_dense_problem())
    reduction = shrink(flat)
    rest = part_of(reduction.problem, parts_of(reduction.problem)[0])
    graph = make_graph(rest)
    steps = iter((False, False))
    choices = relax(graph, np.zeros(0, dtype=np.int64), np.inf, lambda bound, cost: False, lambda: next(steps, True)).choices
    assert len(choices), "the tiny problem has an assignment that rounding finds"
    total_cost(graph, graph.costs, choices)
    repair(graph, choices)
    extract(graph, choices, grow(graph, choices, 10, 2, 0))
    evaluate_flat(flat, expand(reduction, choices))
    restore(minimise(flat_tables(rest), frozenset(), NUM_STRATEGIES**NUM_NODES).undo, {})


def _dense_problem() -> ShardingProblem:
    """Every node joined to every other, with a limit that binds: shrinking leaves it as it is."""
    rng = np.random.default_rng(0)
    held = tuple(np.arange(NUM_STRATEGIES, 0.0, -1.0) for _ in range(NUM_NODES))
    pairs = [(u, v) for u in range(NUM_NODES) for v in range(u)]
    return ShardingProblem(
        node_costs=tuple(np.arange(NUM_STRATEGIES) + rng.random(NUM_STRATEGIES) for _ in range(NUM_NODES)),
        edges=tuple(Edge(u, v, 10.0 * rng.random((NUM_STRATEGIES, NUM_STRATEGIES))) for u, v in pairs),
        fixed_bytes=held,
        inflight_bytes=tuple(np.zeros(NUM_STRATEGIES) for _ in range(NUM_NODES)),
        memory_limit=float(2 * NUM_NODES),
    )
