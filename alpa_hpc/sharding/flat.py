"""ShardingProblem -> FlatProblem: the same numbers in a few long arrays, with memory over time; what reductions and searches work on.

    minimise    sum_v cost[v, s_v] + sum_e table[e, s_u, s_v]
    subject to  sum over spans of v that cover t  use[span, s_v]  <=  room[t]        for every time t

A node holds memory during *spans* of time, disjoint and in order, each with a number a strategy. A ShardingProblem has one time. Bytes are
rounded to `GRAIN`, uses up and rooms down, so that their sums are exact whatever the order; whole numbers stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, kernel
from alpa_hpc.sharding.problem import Costs, ShardingProblem

GRAIN = 2.0**-10  # bytes; sums stay exact up to 2^43 bytes


@dataclass(frozen=True, slots=True, eq=False)
class FlatProblem:
    """Node v has costs `costs[starts[v]:starts[v + 1]]` and spans `span_starts[v]:span_starts[v + 1]`.

    Edge e joins `ends[e] = (u, v)`; u's strategies are the rows of `tables[offsets[e]:]`. Span i covers `times[i, 0] <= t < times[i, 1]`
    and holds `uses[use_starts[i] + s]`. Costs and tables may be inf, never NaN. `labels[t]` is what time t is called in the original.
    """

    starts: Ints
    costs: Floats
    ends: Ints
    offsets: Ints
    tables: Floats
    span_starts: Ints
    times: Ints
    use_starts: Ints
    uses: Floats
    room: Floats
    labels: Ints

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.starts) - 1

    @property
    def num_strategies(self) -> int:
        """Strategies of all nodes."""
        return int(self.starts[-1])

    @property
    def num_entries(self) -> int:
        """Entries of all tables."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> Ints:
        """Strategies of each node."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class FlatEvaluation:
    """Cost of an assignment (inf where it takes what is not allowed), the most any time holds above its room (<= 0: it fits), and when."""

    cost: float
    excess: float
    time: int


def flatten(problem: ShardingProblem) -> FlatProblem:
    """The problem as flat arrays; its one time is dropped where it has no limit."""
    held = held_bytes(problem)
    limited = problem.memory_limit < np.inf
    number = len(held)
    starts = starts_of([len(costs) for costs in problem.node_costs])
    return FlatProblem(
        starts=starts,
        costs=_joined(problem.node_costs),
        ends=np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2),
        offsets=starts_of([edge.costs.size for edge in problem.edges]),
        tables=_joined([edge.costs.ravel() for edge in problem.edges]),
        span_starts=np.arange(number + 1) if limited else np.zeros(number + 1, dtype=np.int64),
        times=np.tile(np.array([[0, 1]]), (number if limited else 0, 1)),
        use_starts=starts if limited else np.zeros(1, dtype=np.int64),
        uses=np.ceil(_joined(held) / GRAIN) * GRAIN if limited else np.zeros(0),
        room=np.array([np.floor(problem.memory_limit / GRAIN) * GRAIN] if limited else [], dtype=np.float64),
        labels=np.arange(int(limited)),
    )


def held_bytes(problem: ShardingProblem) -> list[Costs]:
    """Bytes a device of each strategy with all microbatches in flight."""
    return [fixed + problem.inflight * inflight for fixed, inflight in zip(problem.fixed_bytes, problem.inflight_bytes, strict=True)]


def starts_of(lengths: Sequence[int] | Ints) -> Ints:
    """First index of each of several arrays laid end to end, and the length of the whole."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


def _joined(arrays: Sequence[Costs]) -> Floats:
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)


def evaluate_flat(problem: FlatProblem, choices: Ints) -> FlatEvaluation:
    """What an assignment costs, and whether it fits."""
    held = held_over_time(choices, problem.span_starts, problem.times, problem.use_starts, problem.uses, len(problem.room))
    excess = held - problem.room
    time = int(np.argmax(excess)) if len(excess) else -1
    cost = _cost(problem.starts, problem.costs, problem.ends, problem.offsets, problem.tables, choices)
    return FlatEvaluation(float(cost), float(excess[time]) if len(excess) else 0.0, time)


@kernel
def _cost(starts: Ints, costs: Floats, ends: Ints, offsets: Ints, tables: Floats, choices: Ints) -> Real:
    total = 0.0
    for v in range(len(starts) - 1):
        total += costs[starts[v] + choices[v]]
    for e in range(len(ends)):
        source, target = ends[e, 0], ends[e, 1]
        total += tables[offsets[e] + choices[source] * (starts[target + 1] - starts[target]) + choices[target]]
    return total


@kernel
def held_over_time(choices: Ints, span_starts: Ints, times: Ints, use_starts: Ints, uses: Floats, num_times: int) -> Floats:
    """Bytes that an assignment holds at each time."""
    change = np.zeros(num_times + 1)
    for v in range(len(span_starts) - 1):
        for i in range(span_starts[v], span_starts[v + 1]):
            use = uses[use_starts[i] + choices[v]]
            change[times[i, 0]] += use
            change[times[i, 1]] -= use
    held = np.zeros(num_times)
    level = 0.0
    for t in range(num_times):
        level += change[t]
        held[t] = level
    return held


def parts_of(problem: FlatProblem) -> tuple[Ints, ...]:
    """Nodes of the parts that share neither edges nor memory; nodes that hold memory are all in one part."""
    parents = np.arange(problem.num_nodes)
    holders = np.flatnonzero(np.diff(problem.span_starts))
    pairs = np.stack([holders[:-1], holders[1:]], 1) if len(holders) else np.zeros((0, 2), dtype=np.int64)
    _unite(parents, np.concatenate([problem.ends, pairs]))
    order = np.argsort(parents, kind="stable")
    return tuple(np.split(order, np.flatnonzero(np.diff(parents[order])) + 1)) if len(order) else ()


@kernel
def _unite(parents: Ints, pairs: Ints) -> None:
    """Give every node the least node it is joined with, directly or not."""
    for i in range(len(pairs)):
        left, right = pairs[i, 0], pairs[i, 1]
        while parents[left] != left:
            left = parents[left]
        while parents[right] != right:
            right = parents[right]
        parents[max(left, right)] = min(left, right)
    for v in range(len(parents)):
        parents[v] = parents[parents[v]]


def part_of(problem: FlatProblem, nodes: Ints) -> FlatProblem:
    """The problem of one of the parts."""
    places = np.full(problem.num_nodes, -1)
    places[nodes] = np.arange(len(nodes))
    edges = np.flatnonzero(places[problem.ends[:, 0]] >= 0)
    spans = np.flatnonzero(np.repeat(places, np.diff(problem.span_starts)) >= 0)
    lengths = np.diff(problem.use_starts)[spans]
    return FlatProblem(
        starts=starts_of(problem.sizes[nodes]),
        costs=problem.costs[_runs(problem.starts, nodes)],
        ends=places[problem.ends[edges]],
        offsets=starts_of(np.diff(problem.offsets)[edges]),
        tables=problem.tables[_runs(problem.offsets, edges)],
        span_starts=starts_of(np.diff(problem.span_starts)[nodes]),
        times=problem.times[spans],
        use_starts=starts_of(lengths),
        uses=problem.uses[_runs(problem.use_starts, spans)],
        room=problem.room if len(spans) else np.zeros(0),
        labels=problem.labels if len(spans) else np.zeros(0, dtype=np.int64),
    )


def _runs(starts: Ints, chosen: Ints) -> Ints:
    """Indices of the chosen runs of an array that is laid out by `starts`."""
    lengths = np.diff(starts)[chosen]
    return np.repeat(starts[chosen] - starts_of(lengths)[:-1], lengths) + np.arange(lengths.sum())
