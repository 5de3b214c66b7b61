"""Graph and a price of memory -> a lower bound and an assignment, by sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006).

One sweep visits the nodes in order, one back. Node v adds up its costs and messages, splits the sum over its arcs of one direction (the
larger number of its arcs forward and backward), and sends along each  m[t] = min_s share[s] - received[s] + table[s, t]. On the way back
the minima that are taken out are the bound: what remains is nowhere negative. Messages are where the next call goes on.
"""

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Truth, Whole, inner, kernel
from alpa_hpc.sharding.message_graph import Graph, fits, hold


@kernel
def priced_costs(g: Graph, prices: Floats) -> Floats:
    """Costs of strategies with the bytes they hold at `prices` a byte and time."""
    costs = g.costs.copy()
    upto = np.zeros(len(prices) + 1)
    upto[1:] = np.cumsum(prices)
    for node in range(len(g.starts) - 1):
        for i in range(g.span_starts[node], g.span_starts[node + 1]):
            price = upto[g.times[i, 1]] - upto[g.times[i, 0]]
            if price > 0.0:
                for s in range(g.starts[node + 1] - g.starts[node]):
                    costs[g.starts[node] + s] += price * g.uses[g.use_starts[i] + s]
    return costs


@inner
def gather(g: Graph, costs: Floats, messages: Floats, node: Whole, total: Floats) -> None:
    """Costs and messages of a node, into `total`."""
    start, size = g.starts[node], g.starts[node + 1] - g.starts[node]
    for s in range(size):
        total[s] = costs[start + s]
    for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
        at = g.messages[a]
        for s in range(size):
            total[s] += messages[at + s]


@inner
def share_of(g: Graph, node: Whole) -> tuple[Real, Whole]:
    """The share that each arc gets, and the first arc that leads to a later node."""
    first, last = g.arc_starts[node], g.arc_starts[node + 1]
    split = first
    while split < last and g.others[split] < node:
        split += 1
    most = max(split - first, last - split)
    return 1.0 / max(most, 1), split


@inner
def send(g: Graph, arc: Whole, share: Floats, size: Whole, messages: Floats) -> Real:
    """Send along an arc; the message's minimum, which is taken out of it."""
    other, back = g.others[arc], g.backs[arc]
    others = g.starts[other + 1] - g.starts[other]
    at, received, offset = g.messages[back], g.messages[arc], g.offsets[arc]
    message = messages[at : at + others]
    message[:] = np.inf
    for s in range(size):
        given = share[s] - messages[received + s]
        row = g.tables[offset + s * others : offset + (s + 1) * others]
        for t in range(others):
            cost = given + row[t]
            message[t] = cost if cost < message[t] else message[t]
    least = message.min()
    message -= least
    return least


@kernel
def sweep(g: Graph, costs: Floats, messages: Floats, number: Whole) -> Real:
    """`number` times there and back; the last bound."""
    num_nodes = len(g.starts) - 1
    total = np.empty(np.diff(g.starts).max())
    bound = 0.0
    for _ in range(number):
        for node in range(num_nodes):
            gather(g, costs, messages, node, total)
            size = g.starts[node + 1] - g.starts[node]
            share, split = share_of(g, node)
            total[:size] *= share
            for a in range(split, g.arc_starts[node + 1]):
                send(g, a, total, size, messages)
        bound = 0.0
        for node in range(num_nodes - 1, -1, -1):
            gather(g, costs, messages, node, total)
            size = g.starts[node + 1] - g.starts[node]
            least = total[:size].min()
            bound += least
            share, split = share_of(g, node)
            for s in range(size):
                total[s] = (total[s] - least) * share
            for a in range(g.arc_starts[node], split):
                bound += send(g, a, total, size, messages)
    return bound


@kernel
def least_excess(g: Graph, costs: Floats, messages: Floats) -> Floats:
    """For each strategy, how much above the bound of the last sweep any assignment that takes it costs at least."""
    excess = np.zeros(len(costs))
    total = np.empty(np.diff(g.starts).max())
    for node in range(len(g.starts) - 1):
        gather(g, costs, messages, node, total)
        start, size = g.starts[node], g.starts[node + 1] - g.starts[node]
        least = total[:size].min()
        share, split = share_of(g, node)
        given = share * (split - g.arc_starts[node])
        for s in range(size):
            excess[start + s] += (total[s] - least) * (1.0 - given)
        for a in range(g.arc_starts[node], split):
            _add_excess(g, a, total, least, share, messages, excess)
    return excess


@inner
def _add_excess(g: Graph, arc: Whole, total: Floats, least: Real, share: Real, messages: Floats, excess: Floats) -> None:
    """What the arc to an earlier node leaves of its table beyond its minimum, to both ends: its least over the other end's strategies."""
    other, back = g.others[arc], g.backs[arc]
    others = g.starts[other + 1] - g.starts[other]
    size = g.offsets[arc + 1] - g.offsets[arc]
    size //= others
    node = g.others[back]
    rows, columns = np.full(size, np.inf), np.full(others, np.inf)
    for s in range(size):
        given = (total[s] - least) * share - messages[g.messages[arc] + s]
        for t in range(others):
            rest = given + g.tables[g.offsets[arc] + s * others + t] - messages[g.messages[back] + t]
            rows[s], columns[t] = min(rows[s], rest), min(columns[t], rest)
    base = rows.min()
    excess[g.starts[node] : g.starts[node] + size] += rows - base
    excess[g.starts[other] : g.starts[other] + others] += columns - base


@kernel
def round_free(g: Graph, costs: Floats, messages: Floats) -> Ints:
    """One strategy a node, in order: the best for the earlier nodes as chosen and the messages of the later ones."""
    choices = np.zeros(len(g.starts) - 1, dtype=np.int64)
    total = np.empty(np.diff(g.starts).max())
    for node in range(len(choices)):
        size = _score(g, costs, messages, choices, node, total)
        choices[node] = np.argmin(total[:size])
    return choices


@kernel
def round_fitting(g: Graph, costs: Floats, messages: Floats) -> tuple[Ints, Truth]:
    """As `round_free`, of the strategies that fit beside those chosen; False where none did somewhere."""
    choices = np.zeros(len(g.starts) - 1, dtype=np.int64)
    held = np.zeros(len(g.room))
    total = np.empty(np.diff(g.starts).max())
    all_fit = True
    for node in range(len(choices)):
        size = _score(g, costs, messages, choices, node, total)
        order = np.argsort(total[:size])
        chosen = order[0]
        found = False
        for s in order:
            if fits(g, held, node, -1, s):
                chosen, found = s, True
                break
        all_fit = all_fit and found
        choices[node] = chosen
        hold(g, held, node, -1, chosen)
    return choices, all_fit


@inner
def _score(g: Graph, costs: Floats, messages: Floats, choices: Ints, node: Whole, total: Floats) -> Whole:
    start, size = g.starts[node], g.starts[node + 1] - g.starts[node]
    for s in range(size):
        total[s] = costs[start + s]
    for a in range(g.arc_starts[node], g.arc_starts[node + 1]):
        if g.others[a] < node:
            back = g.offsets[g.backs[a]] + choices[g.others[a]] * size
            for s in range(size):
                total[s] += g.tables[back + s]
        else:
            for s in range(size):
                total[s] += messages[g.messages[a] + s]
    return size
