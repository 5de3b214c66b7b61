"""FlatProblem -> FlatAnswer: the best assignment found in time and a bound, by all means in turn.

1. `shrink`; parts that share neither edges nor memory are solved one by one.
2. A narrow part is eliminated, memory left aside: if what comes out fits, it is optimal.
3. `relax` gives a bound and an assignment. Strategies that would lift the bound above the assignment's cost are dropped, and what is left
   is shrunk and relaxed again (reduced-cost fixing).
4. Is that small enough, a tight MIP finishes it. Else large-neighbourhood search: parts of the assignment are solved anew, each by the
   same means, until time is over.
"""

import time
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from alpa_hpc.kernels import Flags, Ints
from alpa_hpc.sharding.descent import descend
from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat, part_of, parts_of
from alpa_hpc.sharding.lagrangian import relax
from alpa_hpc.sharding.linear import AbstractLinearSolver, installed_solver
from alpa_hpc.sharding.message_graph import Graph, make_graph
from alpa_hpc.sharding.minimise import carry_out, prepare, restore
from alpa_hpc.sharding.neighbourhood import improve
from alpa_hpc.sharding.shrink import NoRoomError, NotAllowedError, Reduction, expand, shrink
from alpa_hpc.sharding.solution import ProblemSize, SolveMethod
from alpa_hpc.sharding.tables import flat_tables
from alpa_hpc.sharding.tight import first_fitting, num_grouped, solve_tight

NONE = np.zeros(0, dtype=np.int64)
LARGE = 10**12
CLOSE = 1e-9  # of a cost: a gap that is none
ROUNDING = 1e-13  # of the largest table entry: what sums with it are off by
MOST_ENTRIES = 500_000_000  # of all tables of an elimination: 4 GB
SUMS_A_SECOND = 5e8  # that elimination makes at the least (measured: three times as many)
FEW = 0.95  # of the strategies: with no more left after fixing, shrinking again is worth it


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`table_cap` = entries of the largest table that elimination may make, `mip_cap` = table entries of the largest MIP."""

    table_cap: int = 20_000_000
    mip_cap: int = 60_000
    seed: int = 0
    solver: AbstractLinearSolver = field(default_factory=installed_solver)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point of the monotonic clock."""

    end: float

    def remaining(self) -> float:
        """Seconds until then."""
        return self.end - time.monotonic()

    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.remaining() <= 0

    def later(self, seconds: float) -> "Deadline":
        """One that leaves at least `seconds` from now."""
        return Deadline(max(self.end, time.monotonic() + seconds))

    def within(self, seconds: float) -> "Deadline":
        """The earlier one of this and `seconds` from now."""
        return Deadline(min(self.end, time.monotonic() + seconds))


@dataclass(frozen=True, slots=True, eq=False)
class FlatAnswer:
    """`choices` (empty: none found) of cost `cost`; no assignment costs less than `bound`.

    `size_left` is what shrinking left, `shrink_seconds` the time it took.
    """

    choices: Ints
    cost: float
    bound: float
    method: SolveMethod
    size_left: ProblemSize
    shrink_seconds: float


def search(problem: FlatProblem, options: SearchOptions, deadline: Deadline) -> FlatAnswer:
    """Solve a problem. NotAllowedError or NoRoomError where shrinking finds that nothing is allowed or fits."""
    started = time.monotonic()
    reduction = shrink(problem)
    shrink_seconds = time.monotonic() - started
    rest = reduction.problem
    choices = np.zeros(rest.num_nodes, dtype=np.int64)
    bound, method = reduction.offset, SolveMethod.REDUCTION
    closing = closing_of(problem, reduction.offset)
    for nodes in parts_of(rest):
        part = part_of(rest, nodes)
        found = _by_elimination(part, options, deadline) or _by_bounds(part, inf, closing, options, deadline)
        bound += found.cost if closing.is_closed(found.bound, found.cost) else found.bound
        method = max(method, found.method, key=lambda one: one.value)
        if not len(found.choices):
            return FlatAnswer(NONE, inf, bound, method, flat_size(rest), shrink_seconds)
        choices[nodes] = found.choices
    complete = expand(reduction, choices)
    cost = evaluate_flat(problem, complete).cost
    if is_whole(problem):
        bound = float(np.ceil(bound - 1e-6))
    return FlatAnswer(complete, cost, min(cost, bound), method, flat_size(rest), shrink_seconds)


def optimum_without_memory(free: FlatProblem, limited: FlatProblem, options: SearchOptions, deadline: Deadline) -> FlatAnswer:
    """The optimum of `free`, by shrinking and elimination alone, if it fits `limited`, which is the same with memory; else no choices.

    Its bound is infinite where nothing is allowed.
    """
    reduction = shrink(free)
    rest = reduction.problem
    choices = np.zeros(rest.num_nodes, dtype=np.int64)
    unknown = FlatAnswer(NONE, inf, -inf, SolveMethod.ELIMINATION, flat_size(rest), 0.0)
    for nodes in parts_of(rest):
        found = _by_elimination(part_of(rest, nodes), options, deadline)
        if found is None:
            return unknown
        if found.bound == inf:
            return replace(unknown, bound=inf)
        choices[nodes] = found.choices
    complete = expand(reduction, choices)
    evaluation = evaluate_flat(limited, complete)
    if evaluation.excess > 0:
        return unknown
    method = SolveMethod.ELIMINATION if rest.num_nodes else SolveMethod.REDUCTION
    return FlatAnswer(complete, evaluation.cost, evaluation.cost, method, flat_size(rest), 0.0)


def flat_size(problem: FlatProblem) -> ProblemSize:
    """Count nodes, strategies and table entries."""
    return ProblemSize(problem.num_nodes, problem.num_strategies, problem.num_entries)


def is_whole(problem: FlatProblem) -> bool:
    """Whether all costs are whole numbers, so that the cost of any assignment is."""
    return all(bool((one == np.floor(one)).all()) for one in (problem.costs, problem.tables))


@dataclass(frozen=True, slots=True)
class Closing:
    """The absolute gap, and the one relative to the cost, at either of which a cost counts as optimal."""

    absolute: float
    relative: float

    def gap(self, cost: float) -> float:
        """The absolute gap that is left at a cost; inf = none is found yet."""
        return max(self.absolute, self.relative * abs(cost)) if cost < inf else self.absolute

    def is_closed(self, bound: float, cost: float) -> bool:
        """Whether nothing that counts as cheaper is left."""
        return cost - bound <= self.gap(cost)


def closing_of(problem: FlatProblem, offset: float) -> Closing:
    """Less than one where costs are whole numbers, else a matter of rounding: of what is added up, not of costs that nobody pays."""
    if is_whole(problem):
        return Closing(0.999, 0.0)
    finite = problem.tables[problem.tables < inf]
    return Closing(max(CLOSE * abs(offset), ROUNDING * float(np.abs(finite).max(initial=0.0)), 1e-300), CLOSE)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What is known of a part: `choices` (empty: none cheaper than the cutoff), their cost or the cutoff, a bound."""

    choices: Ints
    cost: float
    bound: float
    method: SolveMethod


def _by_elimination(part: FlatProblem, options: SearchOptions, deadline: Deadline) -> "_Found | None":
    """The optimum with memory left aside, if that fits; nothing where tables or time would exceed their limits, or it does not fit."""
    elimination = prepare(flat_tables(part), frozenset(), options.table_cap)
    if not elimination.is_complete or elimination.num_entries > MOST_ENTRIES:
        return None
    if elimination.num_sums > SUMS_A_SECOND * deadline.remaining():
        return None
    best = carry_out(elimination)
    if best.tables.constant == inf:
        return _Found(NONE, inf, inf, SolveMethod.ELIMINATION)
    states = restore(best.undo, {})
    choices = np.array([states.get(v, 0) for v in range(part.num_nodes)], dtype=np.int64)
    evaluation = evaluate_flat(part, choices)
    if evaluation.excess > 0:
        return None
    return _Found(choices, evaluation.cost, evaluation.cost, SolveMethod.ELIMINATION)


def _by_bounds(part: FlatProblem, cutoff: float, closing: Closing, options: SearchOptions, deadline: Deadline) -> _Found:
    """The best assignment that costs less than `cutoff`."""
    graph = make_graph(part)
    relaxation = relax(graph, NONE, cutoff, closing.is_closed, deadline.is_over)
    known = _Found(relaxation.choices, relaxation.cost, relaxation.bound, SolveMethod.RELAXATION)
    if known.cost == inf:
        known = _first(part, graph, known, options, deadline)
    if known.cost == inf or closing.is_closed(known.bound, known.cost) or deadline.is_over():
        return known
    alive = relaxation.excess <= known.cost - known.bound + 1e-6 * abs(known.cost)
    if alive.mean() <= FEW:
        return _after_fixing(part, alive, known, closing, options, deadline)
    if num_grouped(part) <= options.mip_cap:
        return _by_mip(part, known, np.flatnonzero(relaxation.prices), closing, options, deadline)
    return _by_search(part, known, closing, options, deadline)


def _first(part: FlatProblem, graph: Graph, known: _Found, options: SearchOptions, deadline: Deadline) -> _Found:
    """Some assignment where the relaxation has found none, or the proof that there is none."""
    answer = first_fitting(part, options.solver, deadline.remaining)
    if answer.bound == inf:
        return replace(known, bound=inf)
    if not len(answer.choices):
        return known
    cost = float(descend(graph, answer.choices))
    return replace(known, choices=answer.choices, cost=cost)


def _after_fixing(part: FlatProblem, alive: Flags, known: _Found, closing: Closing, options: SearchOptions, deadline: Deadline) -> _Found:
    """Go on without the strategies that no cheaper assignment takes, if that leaves little enough; else search as it is."""
    inner = _shrunk(replace(part, costs=np.where(alive, part.costs, inf)))
    if inner is None:
        return replace(known, bound=known.cost)
    if num_grouped(inner.problem) > options.mip_cap and len(known.choices):
        return _by_search(part, known, closing, options, deadline)
    found = _solve_reduced(inner, known.cost, closing, options, deadline)
    better = found if len(found.choices) else replace(known, method=found.method)
    return replace(better, bound=min(better.cost, max(known.bound, found.bound)))


def _shrunk(problem: FlatProblem) -> Reduction | None:
    """None where nothing is allowed or fits."""
    try:
        return shrink(problem)
    except (NotAllowedError, NoRoomError):
        return None


def _solve_reduced(reduction: Reduction, cutoff: float, closing: Closing, options: SearchOptions, deadline: Deadline) -> _Found:
    """The best assignment of the original that costs less than `cutoff`."""
    if reduction.problem.num_nodes == 0:
        found = _Found(NONE, 0.0, 0.0, SolveMethod.RELAXATION)
        is_better = reduction.offset < cutoff
    else:
        found = _by_bounds(reduction.problem, cutoff - reduction.offset, closing, options, deadline)
        is_better = len(found.choices) > 0
    choices = expand(reduction, found.choices) if is_better else NONE
    return replace(found, choices=choices, cost=found.cost + reduction.offset, bound=found.bound + reduction.offset)


def _by_mip(part: FlatProblem, known: _Found, times: Ints, closing: Closing, options: SearchOptions, deadline: Deadline) -> _Found:
    """A tight MIP from what is known, with memory rows for `times` to begin with."""
    answer = solve_tight(part, known.choices, times, options.solver, closing.gap(known.cost), deadline.remaining)
    cost = evaluate_flat(part, answer.choices).cost if len(answer.choices) else known.cost
    better = (answer.choices, cost) if cost < known.cost else (known.choices, known.cost)
    return _Found(*better, min(better[1], max(answer.bound, known.bound)), SolveMethod.ILP)


def _by_search(part: FlatProblem, known: _Found, closing: Closing, options: SearchOptions, deadline: Deadline) -> _Found:
    options = replace(options, mip_cap=LARGE)

    def solve_again(sub: FlatProblem, cutoff: float, seconds: float) -> Ints:
        inner = _shrunk(sub)
        return NONE if inner is None else _solve_reduced(inner, cutoff, closing, options, deadline.within(seconds)).choices

    choices, cost = improve(
        make_graph(part), known.choices, known.cost, known.bound + closing.gap(known.cost), solve_again, options.seed, deadline.remaining
    )
    return _Found(choices, cost, known.bound, SolveMethod.SEARCH)
