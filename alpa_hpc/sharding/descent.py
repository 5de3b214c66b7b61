"""Graph and an assignment that fits -> a cheaper one that fits, by single-node changes.

Memory is a hard limit: a change is looked at for its cost first, and only one that would be taken is tried against every time it touches.
Simulated annealing on the same changes gained 1 % in the time in which neighbourhoods (`neighbourhood.py`) gained 6 %, and is not here.
"""

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Truth, Whole, inner, kernel
from alpa_hpc.sharding.message_graph import Graph, cost_around, fits, hold


@kernel
def total_cost(g: Graph, costs: Floats, choices: Ints) -> Real:
    """Cost of an assignment."""
    total = 0.0
    for node in range(len(choices)):
        total += costs[g.starts[node] + choices[node]]
        for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
            other = g.others[a]
            if other > node:
                total += g.tables[g.offsets[a] + choices[node] * (g.starts[other + 1] - g.starts[other]) + choices[other]]
    return total


@inner
def held_by(g: Graph, choices: Ints) -> Floats:
    """Bytes held at each time."""
    held = np.zeros(len(g.room))
    for node in range(len(choices)):
        hold(g, held, node, -1, choices[node])
    return held


@kernel
def descend(g: Graph, choices: Ints) -> Real:
    """Change `choices`, which fit, in place until no single node can do better; their cost."""
    held = held_by(g, choices)
    totals = np.empty(np.diff(g.starts).max())
    changed = True
    while changed:
        changed = False
        for node in range(len(choices)):
            size = g.starts[node + 1] - g.starts[node]
            cost_around(g, g.costs, choices, node, totals)
            best = choices[node]
            for s in range(size):
                if totals[s] < totals[best] and fits(g, held, node, choices[node], s):
                    best = s
            if best != choices[node]:
                hold(g, held, node, choices[node], best)
                choices[node] = best
                changed = True
    return total_cost(g, g.costs, choices)


@kernel
def repair(g: Graph, choices: Ints) -> Truth:
    """Change `choices` in place, node by node, while that lowers what they hold above the room, added up over time; True: they fit."""
    held = held_by(g, choices)
    changed = True
    while changed:
        changed = False
        for node in range(len(choices)):
            best, least = choices[node], 0.0
            for s in range(g.starts[node + 1] - g.starts[node]):
                more = _more_excess(g, held, node, choices[node], s)
                if more < least:
                    best, least = s, more
            if best != choices[node]:
                hold(g, held, node, choices[node], best)
                choices[node] = best
                changed = True
    return (held <= g.room).all()


@inner
def _more_excess(g: Graph, held: Floats, node: Whole, old: Whole, new: Whole) -> Real:
    total = 0.0
    for i in range(g.span_starts[node], g.span_starts[node + 1]):
        use = g.use_starts[i]
        more = g.uses[use + new] - g.uses[use + old]
        if more != 0.0:
            for t in range(g.times[i, 0], g.times[i, 1]):
                total += max(held[t] + more - g.room[t], 0.0) - max(held[t] - g.room[t], 0.0)
    return total
