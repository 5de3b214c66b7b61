"""ShardingProblem -> a smaller ShardingProblem with the same optimum (exact, memory included) + how to undo it.

Until nothing changes:
- parallel edges become one; an edge's row and column minima move into its nodes, an edge of zeros goes;
- a strategy dies that costs inf, that has only inf in an edge, or that no longer fits with the least of all others (`_drop_heavy`);
- strategy b dies if some a holds no more bytes and  c_a - c_b + sum_edges max_s (E[a, s] - E[b, s]) <= 0  (Goldstein; `_drop_dominated`);
- a node with one strategy is folded into its neighbours, its bytes into the limit.

Dominance compares the bytes of `problem.inflight` microbatches; a limit that cannot bind is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.sharding.evaluate import name_of
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.split import held_bytes

# Sums of bytes in another order differ in the last bits: within this margin a limit is neither dropped nor used against a strategy.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class ReductionTrace:
    """Original nodes and strategies of the reduced problem (`kept[i]` = node, its living strategies), and decided nodes."""

    kept: tuple[tuple[int, NDArray[np.intp]], ...]
    decided: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """`problem`'s optimum + `offset_seconds` = the original's optimum; `trace` brings choices back."""

    problem: ShardingProblem
    offset_seconds: float
    trace: ReductionTrace


def reduce(problem: ShardingProblem) -> Reduction:
    """Shrink a problem without changing its optimum. Raises InfeasibleError where a node loses all its strategies."""
    work = _load(problem)
    pending = set(range(len(work.costs)))
    while pending:
        pending = _drop_heavy(work, pending)
        while pending:
            for node in sorted(pending):
                pending.remove(node)
                pending |= _shrink(work, node)
        if work.needs_bytes and _fits_always(work):
            work.needs_bytes = False
            pending = set(work.living)
        elif work.needs_bytes:
            pending = _drop_heavy(work, pending)
    return _unload(work, problem)


def expand(trace: ReductionTrace, choices: Sequence[int]) -> tuple[int, ...]:
    """Choices of the original problem from choices of the reduced one."""
    complete = dict(trace.decided)
    for (node, states), choice in zip(trace.kept, choices, strict=True):
        complete[node] = int(states[choice])
    return tuple(complete[node] for node in range(len(complete)))


@dataclass(slots=True)
class _Work:
    """The problem while it shrinks. `edges[v][u]` has v's strategies as rows, `edges[u][v]` is its transpose (`_set_edge` keeps it so)."""

    problem: ShardingProblem
    costs: list[Costs]
    held: list[Costs]
    states: list[NDArray[np.intp]]
    edges: list[dict[int, Costs]]
    living: set[int]
    room: float
    needs_bytes: bool
    offset_seconds: float


def _load(problem: ShardingProblem) -> _Work:
    sizes = [len(costs) for costs in problem.node_costs]
    work = _Work(
        problem=problem,
        costs=[costs.copy() for costs in problem.node_costs],
        held=held_bytes(problem),
        states=[np.arange(size) for size in sizes],
        edges=[{} for _ in sizes],
        living=set(range(len(sizes))),
        room=problem.memory_limit,
        needs_bytes=problem.memory_limit < np.inf,
        offset_seconds=0.0,
    )
    for edge in problem.edges:
        known = work.edges[edge.source].get(edge.target)
        _set_edge(work, edge.source, edge.target, edge.costs if known is None else known + edge.costs)
    return work


def _set_edge(work: _Work, node: int, other: int, costs: Costs) -> None:
    work.edges[node][other], work.edges[other][node] = costs, costs.T


def _remove_edge(work: _Work, node: int, other: int) -> None:
    del work.edges[node][other], work.edges[other][node]


def _keep(work: _Work, node: int, alive: NDArray[np.bool_], reason: str) -> None:
    if not alive.any():
        number = len(work.problem.node_costs[node])
        raise InfeasibleError(f"none of the {number} strategies of {name_of(work.problem, node)} can be used: {reason}")
    work.costs[node], work.held[node], work.states[node] = work.costs[node][alive], work.held[node][alive], work.states[node][alive]
    for other, costs in tuple(work.edges[node].items()):
        _set_edge(work, node, other, costs[alive])


def _least_bytes(work: _Work) -> float:
    return float(sum(work.held[node].min() for node in work.living))


def _fits_always(work: _Work) -> bool:
    return sum(work.held[node].max() for node in work.living) <= work.room - ROUNDING * abs(work.problem.memory_limit)


def _drop_heavy(work: _Work, pending: set[int]) -> set[int]:
    """Drop strategies that exceed the limit even beside the least bytes of all other nodes; `pending` and the nodes that changed."""
    changed = set(pending)
    if not work.needs_bytes:
        return changed
    slack = work.room - _least_bytes(work) + ROUNDING * abs(work.problem.memory_limit)
    if slack < 0:
        needed = work.problem.memory_limit - slack
        raise InfeasibleError(
            f"at least {needed:.0f} bytes a device are needed, the limit is {work.problem.memory_limit:.0f}: use more devices"
        )
    for node in sorted(work.living):
        alive = work.held[node] - work.held[node].min() <= slack
        if not alive.all():
            _keep(work, node, alive, "memory")
            changed |= {node, *work.edges[node]}
    return changed


def _shrink(work: _Work, node: int) -> set[int]:
    """Apply every rule to one node; the living nodes to look at again."""
    neighbours = set(work.edges[node])
    before = len(work.costs[node])
    _drop_forbidden(work, node)
    moved = _move_minima(work, node)
    if len(work.costs[node]) > 1:
        _drop_dominated(work, node)
    if len(work.costs[node]) == 1:
        _fold(work, node)
        return neighbours
    return neighbours if len(work.costs[node]) < before else moved


def _drop_forbidden(work: _Work, node: int) -> None:
    alive = work.costs[node] < np.inf
    for costs in work.edges[node].values():
        alive &= costs.min(1) < np.inf
    if not alive.all():
        _keep(work, node, alive, "each one is forbidden or leaves a neighbour without a resharding")


def _move_minima(work: _Work, node: int) -> set[int]:
    """Move row and column minima of the node's edges into the nodes; the neighbours to look at again (they lost the edge)."""
    lost: set[int] = set()
    for other, costs in tuple(work.edges[node].items()):
        rest = costs
        if (rows := costs.min(1)).any():
            rest = costs - rows[:, None]
            work.costs[node] = work.costs[node] + rows
        columns = rest.min(0)
        # A column of inf kills the neighbour's strategy; it is the neighbour's turn to find out.
        columns[np.isinf(columns)] = 0.0
        if columns.any():
            rest = rest - columns
            work.costs[other] = work.costs[other] + columns
        if not rest.any():
            _remove_edge(work, node, other)
            lost.add(other)
        elif rest is not costs:
            _set_edge(work, node, other, rest)
    return lost


def _drop_dominated(work: _Work, node: int) -> None:
    """Drop strategies that another one replaces at no cost, whatever the neighbours do; of equal ones the lowest index stays."""
    costs, held = work.costs[node], work.held[node]
    candidate = costs[:, None] <= costs[None, :]
    if work.needs_bytes:
        candidate &= held[:, None] <= held[None, :]
    np.fill_diagonal(candidate, val=False)
    better, victims = np.nonzero(candidate)
    excess = costs[better] - costs[victims]
    for edge in work.edges[node].values():
        # Rows have minimum 0 (`_move_minima`), so an edge never lowers the excess, and pairs can be given up early.
        excess = excess + _largest_difference(edge, better, victims)
        better, victims, excess = better[excess <= 0], victims[excess <= 0], excess[excess <= 0]
    alive = np.ones(len(costs), dtype=bool)
    # From the last victim to the first, each against those still alive: of two equal strategies only one dies.
    for index in np.lexsort((better, -victims)):
        if alive[better[index]]:
            alive[victims[index]] = False
    if not alive.all():
        _keep(work, node, alive, "dominance")


def _largest_difference(edge: Costs, better: NDArray[np.intp], victims: NDArray[np.intp]) -> Costs:
    """max_s (E[better, s] - E[victim, s]) of each pair, over the s that the victim allows; inf where `better` forbids one of them."""
    forbidden = np.isinf(edge)
    if not forbidden.any():
        return (edge[better] - edge[victims]).max(1, initial=0.0)
    finite = np.where(forbidden, 0.0, edge)
    difference = finite[better] - finite[victims]
    difference[forbidden[better]] = np.inf
    difference[forbidden[victims]] = -np.inf
    return difference.max(1, initial=0.0)


def _fold(work: _Work, node: int) -> None:
    """Decide a node that has one strategy left: its edges become costs of its neighbours."""
    for other, costs in tuple(work.edges[node].items()):
        work.costs[other] = work.costs[other] + costs[0]
        _remove_edge(work, node, other)
    work.offset_seconds += float(work.costs[node][0])
    work.room -= float(work.held[node][0])
    work.living.remove(node)


def _unload(work: _Work, problem: ShardingProblem) -> Reduction:
    kept = sorted(work.living)
    number = {node: index for index, node in enumerate(kept)}
    edges = [Edge(number[v], number[u], work.edges[v][u]) for v in kept for u in sorted(work.edges[v]) if v < u]
    decided = tuple((v, int(work.states[v][0])) for v in range(len(work.costs)) if v not in work.living)
    reduced = ShardingProblem(
        node_costs=tuple(work.costs[v] for v in kept),
        edges=tuple(edges),
        fixed_bytes=tuple(problem.fixed_bytes[v][work.states[v]] for v in kept),
        inflight_bytes=tuple(problem.inflight_bytes[v][work.states[v]] for v in kept),
        memory_limit=work.room if work.needs_bytes else float("inf"),
        inflight=problem.inflight,
        names=tuple(problem.names[v] for v in kept) if problem.names else (),
    )
    return Reduction(reduced, work.offset_seconds, ReductionTrace(tuple((v, work.states[v]) for v in kept), decided))
