"""Graph, an assignment that fits and some of its nodes -> the problem of these nodes alone, all others as they are: what LNS solves.

Costs of edges to nodes outside go into the nodes, and what those hold is taken from the room. Which nodes: `grow` collects, up to a budget
of table entries, a connected set around a seed, again and again from a new seed that holds memory at the same tight time, since what
memory couples need not be joined by edges.
"""

from collections.abc import Callable

import numpy as np

from alpa_hpc.kernels import Flags, Floats, Ints, Whole, inner, kernel
from alpa_hpc.sharding.descent import held_by, total_cost
from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat
from alpa_hpc.sharding.message_graph import Graph

FIRST_BUDGET = 10_000.0  # table entries
FIRST_SLOT_SECONDS = 4.0  # for one neighbourhood
PATIENCE = 15  # neighbourhoods without a gain, after which each gets half as much time again

SolveAgain = Callable[[FlatProblem, float, float], Ints]  # (problem, cutoff, seconds) -> cheaper choices than the cutoff, empty: none


def improve(
    g: Graph, choices: Ints, cost: float, enough: float, solve_again: SolveAgain, seed: int, remaining: Callable[[], float]
) -> tuple[Ints, float]:
    """Cheaper choices than `choices` of `cost`, neighbourhood by neighbourhood, until time is over or `enough` is reached.

    Neighbourhoods grow while they are solved in a quarter of their time, and shrink where they need nearly all of it.
    """
    choices = choices.copy()
    budget, slot, failures = FIRST_BUDGET, FIRST_SLOT_SECONDS, 0
    patches = (10, 30, 100, len(choices))
    while (before := remaining()) > 0 and cost > enough:
        seed += 1
        nodes = grow(g, choices, int(budget), patches[seed % len(patches)], seed)
        sub = extract(g, choices, nodes)
        found = solve_again(sub, evaluate_flat(sub, choices[nodes]).cost, slot)
        failures += 1
        if len(found):
            choices[nodes] = found
            cost = float(total_cost(g, g.costs, choices))
            failures = 0
        elif failures % PATIENCE == 0:
            slot *= 1.5
        spent = before - remaining()
        if len(nodes) < len(choices) or spent > slot:
            budget *= 1.15 if spent < slot / 4 else 0.8 if spent > 0.8 * slot else 1.0
    return choices, cost


@kernel
def grow(g: Graph, choices: Ints, budget: Whole, patch: Whole, seed: Whole) -> Ints:
    """Nodes of a random neighbourhood with about `budget` table entries, in patches of up to `patch` nodes."""
    np.random.seed(seed)
    number = len(choices)
    tight = _tight_nodes(g, choices)
    is_in = np.zeros(number, dtype=np.bool_)
    frontier = np.empty(number + len(g.others), dtype=np.int64)
    entries, num_in, left = 0, 0, 0
    waiting = 0
    while entries < budget and num_in < number:
        if waiting == 0 or left == 0:
            waiting, left = 1, patch
            frontier[0] = tight[np.random.randint(len(tight))] if len(tight) and np.random.random() < 0.8 else np.random.randint(number)
        pick = np.random.randint(waiting) if np.random.random() < 0.5 else 0
        node = frontier[pick]
        waiting -= 1
        frontier[pick] = frontier[waiting]
        if is_in[node]:
            left -= 1
            continue
        is_in[node] = True
        num_in += 1
        left -= 1
        for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
            if is_in[g.others[a]]:
                entries += g.offsets[a + 1] - g.offsets[a]
            else:
                frontier[waiting] = g.others[a]
                waiting += 1
        entries += g.starts[node + 1] - g.starts[node]
    return np.flatnonzero(is_in)


@inner
def _tight_nodes(g: Graph, choices: Ints) -> Ints:
    """Nodes with a span at a random one of the tightest times, where another strategy would hold another amount."""
    if len(g.room) == 0:
        return np.zeros(0, dtype=np.int64)
    free = g.room - held_by(g, choices)
    order = np.argsort(free)
    time = order[np.random.randint(min(len(order), 1 + len(order) // 10))]
    found = np.zeros(len(choices), dtype=np.bool_)
    for node in range(len(choices)):
        for i in range(g.span_starts[node], g.span_starts[node + 1]):
            if g.times[i, 0] <= time < g.times[i, 1]:
                found[node] = True
    return np.flatnonzero(found)


def extract(g: Graph, choices: Ints, nodes: Ints) -> FlatProblem:
    """The problem of `nodes` alone, all others as chosen."""
    is_in = np.zeros(len(choices), dtype=np.bool_)
    is_in[nodes] = True
    return FlatProblem(*_extract(g, choices, nodes, is_in), labels=np.arange(len(g.room)))


@kernel
def _extract(
    g: Graph, choices: Ints, nodes: Ints, is_in: Flags
) -> tuple[Ints, Floats, Ints, Ints, Floats, Ints, Ints, Ints, Floats, Floats]:
    number = len(nodes)
    places = np.full(len(choices), -1)
    starts = np.zeros(number + 1, dtype=np.int64)
    num_edges, entries, num_spans, num_uses = 0, 0, 0, 0
    for i in range(number):
        node = nodes[i]
        places[node] = i
        size = g.starts[node + 1] - g.starts[node]
        starts[i + 1] = starts[i] + size
        spans = g.span_starts[node + 1] - g.span_starts[node]
        num_spans += spans
        num_uses += spans * size
        for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
            if g.others[a] > node and is_in[g.others[a]]:
                num_edges += 1
                entries += g.offsets[a + 1] - g.offsets[a]
    costs, tables, uses = np.empty(starts[-1]), np.empty(entries), np.empty(num_uses)
    ends, offsets = np.empty((num_edges, 2), dtype=np.int64), np.zeros(num_edges + 1, dtype=np.int64)
    span_starts, times = np.zeros(number + 1, dtype=np.int64), np.empty((num_spans, 2), dtype=np.int64)
    use_starts = np.zeros(num_spans + 1, dtype=np.int64)
    room = g.room - held_by(g, choices)
    edge, span = 0, 0
    for i in range(number):
        node = nodes[i]
        size = g.starts[node + 1] - g.starts[node]
        own = costs[starts[i] : starts[i + 1]]
        own[:] = g.costs[g.starts[node] : g.starts[node + 1]]
        for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
            other = g.others[a]
            if not is_in[other]:
                row = g.offsets[g.backs[a]] + choices[other] * size
                own += g.tables[row : row + size]
            elif other > node:
                ends[edge, 0], ends[edge, 1] = i, places[other]
                offsets[edge + 1] = offsets[edge] + g.offsets[a + 1] - g.offsets[a]
                tables[offsets[edge] : offsets[edge + 1]] = g.tables[g.offsets[a] : g.offsets[a + 1]]
                edge += 1
        for j in range(g.span_starts[node], g.span_starts[node + 1]):
            use = g.use_starts[j]
            times[span] = g.times[j]
            use_starts[span + 1] = use_starts[span] + size
            uses[use_starts[span] : use_starts[span + 1]] = g.uses[use : use + size]
            room[g.times[j, 0] : g.times[j, 1]] += g.uses[use + choices[node]]
            span += 1
        span_starts[i + 1] = span
    return starts, costs, ends, offsets, tables, span_starts, times, use_starts, uses, room
