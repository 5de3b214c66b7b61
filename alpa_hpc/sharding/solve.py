"""ShardingProblem -> ShardingSolution with its certificate (paper, Eq. 1): reductions, elimination, bounds, a MIP, search (`search.py`).

1. Without the limit: shrink, then eliminate if no table exceeds the cap. If that optimum fits the limit, it is the answer.
2. Else all means in turn, with the limit.

Every answer is re-checked by `evaluate` on the unreduced problem. Same input, same choices (unless the time limit strikes).
"""

import time
from dataclasses import dataclass, field, replace
from math import inf

from alpa_hpc.errors import AlpaError, InfeasibleError, SolverError
from alpa_hpc.sharding.evaluate import name_of
from alpa_hpc.sharding.flat import flatten
from alpa_hpc.sharding.linear import AbstractLinearSolver, installed_solver
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.search import Deadline, FlatAnswer, SearchOptions, optimum_without_memory, search
from alpa_hpc.sharding.shortage import Shortage, find_shortage
from alpa_hpc.sharding.shrink import NoRoomError, NotAllowedError
from alpa_hpc.sharding.solution import Claim, ShardingSolution, certify


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """`table_cap` = entries of the largest table that elimination may make; the time limit is for the whole solve."""

    time_limit_seconds: float = 60.0
    table_cap: int = 20_000_000
    solver: AbstractLinearSolver = field(default_factory=installed_solver)
    seed: int = 0


def solve(problem: ShardingProblem, options: SolverOptions | None = None) -> ShardingSolution:
    """The cheapest choices that are allowed and fit.

    Raises InfeasibleError (with the bytes that are missing) if there are none, SolverError if a solver fails, finds nothing in time or
    gives an answer that does not survive the re-check.
    """
    options = options or SolverOptions()
    started = time.monotonic()
    deadline = Deadline(started + options.time_limit_seconds)
    means = SearchOptions(table_cap=options.table_cap, seed=options.seed, solver=options.solver)
    try:
        answer = _answer(problem, means, deadline)
    except NotAllowedError as error:
        if problem.memory_limit < inf:
            raise _why_infeasible(problem, means, deadline) from error
        raise InfeasibleError(
            f"none of the {len(problem.node_costs[error.node])} strategies of {name_of(problem, error.node)} can be used: "
            "each is forbidden or leaves a neighbour without a resharding"
        ) from error
    except NoRoomError as error:
        raise _why_infeasible(problem, means, deadline) from error
    if not len(answer.choices):
        if answer.bound == inf:
            raise _why_infeasible(problem, means, deadline)
        raise SolverError(f"no assignment was found within the time limit of {options.time_limit_seconds:g} s; raise it")
    choices = tuple(answer.choices.tolist())
    seconds = time.monotonic() - started
    return certify(problem, choices, Claim(answer.cost, answer.bound), answer.method, seconds, answer.size_left)


def _answer(problem: ShardingProblem, means: SearchOptions, deadline: Deadline) -> FlatAnswer:
    flat = flatten(problem)
    if problem.memory_limit < inf:
        free = optimum_without_memory(flatten(replace(problem, memory_limit=inf)), flat, means, deadline)
        if len(free.choices) or free.bound == inf:
            return free
    return search(flat, means, deadline)


def _why_infeasible(problem: ShardingProblem, means: SearchOptions, deadline: Deadline) -> AlpaError:
    """What to tell the user where nothing fits: the least bytes any allowed choice needs, and who needs them."""
    flat = flatten(problem)
    nodes = f"the {flat.num_nodes} nodes, {name_of(problem, 0)} to {name_of(problem, flat.num_nodes - 1)},"
    not_allowed = f"no choice of strategies for {nodes} avoids forbidden strategies and missing reshardings"
    if problem.memory_limit == inf:
        return InfeasibleError(not_allowed)
    try:
        shortage = find_shortage(flat, means, deadline.within(10.0).later(10.0))
    except NotAllowedError as error:
        return InfeasibleError(f"{not_allowed}, not even without a limit: {error}")
    if shortage.least_bytes == inf:
        return InfeasibleError(f"{not_allowed}, not even without a limit")
    if shortage.missing_bytes <= 0:
        return SolverError("the solver says that nothing fits, but something does: its answer is refused")
    return InfeasibleError(
        f"at least {shortage.least_bytes:.0f} bytes a device are needed with {problem.inflight} microbatches in flight, the limit is "
        f"{problem.memory_limit:.0f}: {shortage.missing_bytes:.0f} are missing. {_largest(problem, shortage)} "
        "Use more devices, more stages or a smaller microbatch."
    )


def _largest(problem: ShardingProblem, shortage: Shortage) -> str:
    held = ", ".join(f"{name_of(problem, node)} ({num_bytes:.0f})" for node, num_bytes in shortage.largest)
    return f"The largest of them: {held}."
