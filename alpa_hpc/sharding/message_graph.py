"""FlatProblem -> Graph: neighbours of each node in order, each table in both orientations; what message passing and local search walk over.

Arc a of node v leads to `others[a]`; its table is `tables[offsets[a] + s * size(other) + t]` for v's strategy s and the other's t. The
arc back is `backs[a]`. A message into v along a has v's size and begins at `messages[a]`.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Truth, Whole, inner, kernel
from alpa_hpc.sharding.flat import FlatProblem, starts_of


class Graph(NamedTuple):
    """Arcs of node v are `arc_starts[v]:arc_starts[v + 1]`, ordered by the other node. Costs and spans are those of the FlatProblem."""

    starts: Ints
    costs: Floats
    arc_starts: Ints
    others: Ints
    backs: Ints
    offsets: Ints
    tables: Floats
    messages: Ints
    span_starts: Ints
    times: Ints
    use_starts: Ints
    uses: Floats
    room: Floats


def make_graph(problem: FlatProblem) -> Graph:
    """The graph of a problem; of parallel edges each has its own arcs."""
    number, num_edges = problem.num_nodes, len(problem.ends)
    owners = problem.ends.T.ravel()  # arc e from the source of edge e, arc e + num_edges from its target
    others = problem.ends.T[::-1].ravel()
    order = np.lexsort((others, owners))
    place = np.empty(2 * num_edges, dtype=np.int64)
    place[order] = np.arange(2 * num_edges)
    lengths = np.tile(np.diff(problem.offsets), 2)[order]
    offsets = starts_of(lengths)
    arc_starts = starts_of(np.bincount(owners, minlength=number))
    tables = np.empty(2 * problem.num_entries)
    _fill(tables, offsets, place, problem.sizes, problem.ends, problem.offsets, problem.tables)
    return Graph(
        starts=problem.starts,
        costs=problem.costs,
        arc_starts=arc_starts,
        others=others[order],
        backs=place[(order + num_edges) % (2 * num_edges)] if num_edges else place,
        offsets=offsets,
        tables=tables,
        messages=starts_of(problem.sizes[owners[order]]),
        span_starts=problem.span_starts,
        times=problem.times,
        use_starts=problem.use_starts,
        uses=problem.uses,
        room=problem.room,
    )


@kernel
def _fill(tables: Floats, offsets: Ints, place: Ints, sizes: Ints, ends: Ints, edge_offsets: Ints, edge_tables: Floats) -> None:
    number = len(ends)
    for e in range(number):
        rows, columns = sizes[ends[e, 0]], sizes[ends[e, 1]]
        there, back = offsets[place[e]], offsets[place[e + number]]
        for r in range(rows):
            for c in range(columns):
                entry = edge_tables[edge_offsets[e] + r * columns + c]
                tables[there + r * columns + c] = entry
                tables[back + c * rows + r] = entry


@inner
def fits(g: Graph, held: Floats, node: Whole, old: Whole, new: Whole) -> Truth:
    """Whether `held` stays within the room if the node takes strategy `new` in place of `old` (-1: it holds nothing yet)."""
    for i in range(g.span_starts[node], g.span_starts[node + 1]):
        use = g.use_starts[i]
        more = g.uses[use + new] - (g.uses[use + old] if old >= 0 else 0.0)
        if more > 0.0:
            for t in range(g.times[i, 0], g.times[i, 1]):
                if held[t] + more > g.room[t]:
                    return False
    return True


@inner
def hold(g: Graph, held: Floats, node: Whole, old: Whole, new: Whole) -> None:
    """Update `held` for the node's change from `old` (-1: it holds nothing yet) to `new`."""
    for i in range(g.span_starts[node], g.span_starts[node + 1]):
        use = g.use_starts[i]
        more = g.uses[use + new] - (g.uses[use + old] if old >= 0 else 0.0)
        if more != 0.0:
            for t in range(g.times[i, 0], g.times[i, 1]):
                held[t] += more


@inner
def cost_around(g: Graph, costs: Floats, choices: Ints, node: Whole, totals: Floats) -> None:
    """Into `totals`, for each strategy of the node: its cost and those of its edges, the neighbours as chosen."""
    start, size = g.starts[node], g.starts[node + 1] - g.starts[node]
    for s in range(size):
        totals[s] = costs[start + s]
    for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
        back = g.offsets[g.backs[a]] + choices[g.others[a]] * size
        for s in range(size):
            totals[s] += g.tables[back + s]
