"""ShardingProblem -> ShardingSolution with its certificate (paper, Eq. 1): reduce, eliminate what is narrow, an ILP for the rest.

1. Without the limit: `reduce`, then `eliminate` if no table exceeds the cap. If that optimum fits the limit, it is the answer.
2. Else `reduce` with the limit and split into parts that share neither edges nor memory; eliminate where memory cannot bind, and give the
   rest to PuLP (`_build_model`). x is binary, y >= 0 continuous:

    minimise  sum_v costs_v . x_v + sum_e costs_e . y_e
    sum_s x[v, s] = 1                                        one strategy a node        (`_add_choices`)
    sum_t y[e, s, t] = x[u, s],  sum_s y[e, s, t] = x[v, t]  both marginals of an edge  (`_add_edge`)
    sum_v held_v . x_v <= memory_limit                       bytes a device             (`_add_limit`)

With both marginals as equalities the relaxation is tight and y is integral where x is, unlike the paper's form (y binary, row sums <= x).
Every answer is re-checked by `evaluate` on the unreduced problem. Same input, same choices (unless the time limit strikes).
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import inf, log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pulp

from alpa_hpc.errors import AlpaError, InfeasibleError, SolverError
from alpa_hpc.sharding.eliminate import back_substitute, can_eliminate, eliminate, make_factor
from alpa_hpc.sharding.evaluate import evaluate, name_of
from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem
from alpa_hpc.sharding.reduce import expand, reduce
from alpa_hpc.sharding.solution import TOLERANCE, Claim, ProblemSize, ShardingSolution, SolveMethod, certify, size_of
from alpa_hpc.sharding.split import held_bytes, split

MAX_COVER_CUTS = 20

Term = tuple[pulp.LpVariable, float]
Bits = list[list[pulp.LpVariable]]


class AbstractIlpBackend(ABC):
    """A MIP solver behind PuLP."""

    @abstractmethod
    def run(self, model: pulp.LpProblem, time_limit_seconds: float, folder: Path) -> float:
        """Solve `model` in place, with files in `folder` only; a proven lower bound of its objective, -inf if there is none."""


class HighsBackend(AbstractIlpBackend):
    """HiGHS through its Python wheel: no files, no child process."""

    def run(self, model: pulp.LpProblem, time_limit_seconds: float, folder: Path) -> float:
        """See base class; `folder` stays empty."""
        solver = pulp.HiGHS(
            msg=False,
            threads=1,
            timeLimit=time_limit_seconds,
            gapRel=0.0,
            gapAbs=0.0,
            mip_feasibility_tolerance=1e-9,
            primal_feasibility_tolerance=1e-9,
        )
        model.solve(solver)
        highs: Any = model.solverModel
        return float(highs.getInfo().mip_dual_bound)


class CbcBackend(AbstractIlpBackend):
    """CBC, the binary that PuLP brings along; used where highspy is absent."""

    def run(self, model: pulp.LpProblem, time_limit_seconds: float, folder: Path) -> float:
        """See base class."""
        log = folder / "cbc.log"
        solver = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            msg=False,
            threads=1,
            timeLimit=time_limit_seconds,
            gapRel=0.0,
            gapAbs=0.0,
            logPath=str(log),
        )
        with _path_without_spaces(folder) as solver.tmpDir:
            model.solve(solver)
        bound = re.search(r"^Lower bound:\s+(\S+)", log.read_text(), re.MULTILINE)
        # CBC prints three decimals.
        return float(bound[1]) - 1e-3 if bound else -inf


@contextmanager
def _path_without_spaces(folder: Path) -> Generator[str]:
    """A name of `folder` that survives PuLP, which cuts CBC's command line at spaces."""
    if len(str(folder).split()) == 1:
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def installed_backend() -> AbstractIlpBackend:
    """HiGHS where highspy is installed, else CBC."""
    return HighsBackend() if find_spec("highspy") else CbcBackend()


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """`table_cap` = entries of the largest table that elimination may make; the time limit is for the whole solve."""

    time_limit_seconds: float = 60.0
    table_cap: int = 20_000_000
    backend: AbstractIlpBackend = field(default_factory=installed_backend)


def solve(problem: ShardingProblem, options: SolverOptions | None = None) -> ShardingSolution:
    """The cheapest choices that are allowed and fit.

    Raises InfeasibleError (with the bytes that are missing) if there are none, SolverError if a solver fails, finds nothing in time or
    gives an answer that does not survive the re-check.
    """
    search = _Search(options or SolverOptions(), time.monotonic())
    answer = _answer(replace(problem, memory_limit=inf), search, _eliminate)
    if answer is None or evaluate(problem, answer.choices).violations:
        try:
            answer = _answer(problem, search, _eliminate_or_ilp)
        except InfeasibleError as error:
            raise _why_infeasible(problem, search, error) from error
    assert answer is not None, "an ILP can be made of any part"
    return certify(problem, answer.choices, answer.claim, answer.method, search.elapsed_seconds(), answer.size_left)


@dataclass(frozen=True, slots=True)
class _Search:
    options: SolverOptions
    started: float

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def remaining_seconds(self) -> float:
        return self.options.time_limit_seconds - self.elapsed_seconds()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Choices of a problem or of a part of it, and what the method claims for them."""

    choices: tuple[int, ...]
    claim: Claim
    method: SolveMethod
    size_left: ProblemSize


PartSolver = Callable[[ShardingProblem, _Search], _Answer | None]


def _answer(problem: ShardingProblem, search: _Search, solve_part: PartSolver) -> _Answer | None:
    """Reduce, solve each part by `solve_part`, put together; None if `solve_part` gives up on one."""
    reduction = reduce(problem)
    choices = np.zeros(len(reduction.problem.node_costs), dtype=int)
    seconds = lower_bound = reduction.offset_seconds
    method = SolveMethod.REDUCTION
    for nodes, part in split(reduction.problem):
        answer = solve_part(part, search)
        if answer is None:
            return None
        choices[list(nodes)] = answer.choices
        seconds, lower_bound = seconds + answer.claim.seconds, lower_bound + answer.claim.lower_bound
        method = max(method, answer.method, key=lambda one: one.value)
    complete = expand(reduction.trace, choices.tolist())
    return _Answer(complete, Claim(seconds, lower_bound), method, size_of(reduction.problem))


def _eliminate_or_ilp(part: ShardingProblem, search: _Search) -> _Answer:
    answer = _eliminate(part, search) if part.memory_limit == inf else None
    return _solve_ilp(part, search) if answer is None else answer


def _eliminate(part: ShardingProblem, search: _Search) -> _Answer | None:
    """Optimum of a part without a limit; None if a table would exceed the cap. Raises InfeasibleError if nothing is allowed."""
    factors = [make_factor((v,), costs, 0.0, 0.0, costs) for v, costs in enumerate(part.node_costs)]
    factors += [make_factor((edge.source, edge.target), edge.costs, 0.0, 0.0, edge.costs) for edge in part.edges]
    if not can_eliminate(factors, frozenset(), search.options.table_cap):
        return None
    left = eliminate(factors, frozenset(), search.options.table_cap)
    objective = float(sum(factor.score for factor in left.factors))
    if objective == inf:
        raise InfeasibleError(f"no choice of strategies for {_named(part)} avoids forbidden strategies and missing reshardings")
    states = back_substitute(left.trace, {})
    choices = tuple(states[v] for v in range(len(part.node_costs)))
    return _Answer(choices, Claim(objective, objective), SolveMethod.ELIMINATION, size_of(part))


def _named(part: ShardingProblem) -> str:
    nodes = [name_of(part, v) for v in range(len(part.node_costs))]
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _solve_ilp(part: ShardingProblem, search: _Search) -> _Answer:
    """Optimum of a part by PuLP, or the best assignment in time with its bound."""
    model = _build_model(part)
    held = held_bytes(part)
    with TemporaryDirectory(prefix="sharding-ilp-") as folder:
        for _ in range(MAX_COVER_CUTS):
            bound = _run(model.problem, search, Path(folder))
            choices = _read_choices(model, part)
            excess = sum(float(one[s]) for one, s in zip(held, choices, strict=True)) - part.memory_limit
            if excess <= 0:
                return _ilp_answer(model, part, choices, bound)
            if excess > TOLERANCE * part.memory_limit:
                raise SolverError(
                    f"the ILP solver's answer exceeds the limit of {part.memory_limit:.0f} bytes by {excess:.0f}; it is refused"
                )
            _add_cover_cut(model, held, choices)
    raise SolverError(
        f"{MAX_COVER_CUTS} answers of the ILP solver exceed the memory limit by a rounding error; change the limit by a few bytes"
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """`choices[v][s]` = x[v, s]; `objective` has the costs in units of `unit_seconds`."""

    problem: pulp.LpProblem
    choices: Bits
    objective: list[Term]
    unit_seconds: float


def _build_model(part: ShardingProblem) -> _Model:
    unit = _unit_of(part)
    model = pulp.LpProblem("sharding", pulp.LpMinimize)
    objective: list[Term] = []
    choices = _add_choices(model, part, objective, unit)
    for index, edge in enumerate(part.edges):
        _add_edge(model, choices, index, edge, objective, unit)
    if part.memory_limit < inf:
        _add_limit(model, choices, part)
    model.setObjective(pulp.LpAffineExpression(objective))
    return _Model(model, choices, objective, unit)


def _unit_of(part: ShardingProblem) -> float:
    """About the median positive cost, so that solver tolerances mean something; a power of two, so that scaling is exact."""
    costs = np.concatenate([*part.node_costs, *(edge.costs.ravel() for edge in part.edges)])
    positive = costs[(costs > 0) & (costs < inf)]
    return 2.0 ** round(log2(float(np.median(positive)))) if positive.size else 1.0


def _add_choices(model: pulp.LpProblem, part: ShardingProblem, objective: list[Term], unit: float) -> Bits:
    choices: Bits = []
    for v, costs in enumerate(part.node_costs):
        bits = [model.add_variable(f"x_{v}_{s}", 0, 1 if cost < inf else 0, pulp.LpInteger) for s, cost in enumerate(costs)]
        objective.extend((bit, cost / unit) for bit, cost in zip(bits, costs.tolist(), strict=True) if cost < inf)
        _add_row(model, [(bit, 1.0) for bit in bits], pulp.LpConstraintEQ, 1.0)
        choices.append(bits)
    return choices


def _add_edge(
    model: pulp.LpProblem,
    choices: Bits,
    index: int,
    edge: Edge,
    objective: list[Term],
    unit: float,
) -> None:
    rows = [[(bit, -1.0)] for bit in choices[edge.source]]
    columns = [[(bit, -1.0)] for bit in choices[edge.target]]
    for s, t in zip(*np.nonzero(edge.costs < inf), strict=True):
        pair = model.add_variable(f"y_{index}_{s}_{t}", 0)
        objective.append((pair, float(edge.costs[s, t]) / unit))
        rows[s].append((pair, 1.0))
        columns[t].append((pair, 1.0))
    for terms in (*rows, *columns):
        _add_row(model, terms, pulp.LpConstraintEQ, 0.0)


def _add_limit(model: pulp.LpProblem, choices: Bits, part: ShardingProblem) -> None:
    """The limit beyond the least bytes of each node, scaled to 1: sums of bytes are too long for a solver's absolute tolerance."""
    held = held_bytes(part)
    slack = part.memory_limit - sum(float(one.min()) for one in held)
    unit = slack if slack > 0 else 1.0
    terms = [
        (bit, excess / unit)
        for bits, one in zip(choices, held, strict=True)
        for bit, excess in zip(bits, (one - one.min()).tolist(), strict=True)
        if excess > 0
    ]
    _add_row(model, terms, pulp.LpConstraintLE, slack / unit)


def _add_cover_cut(model: _Model, held: Sequence[Costs], choices: Sequence[int]) -> None:
    """Forbid an assignment that exceeds the limit by less than the solver can see, and all that hold as much in every node."""
    terms = [
        (bit, 1.0)
        for bits, one, choice in zip(model.choices, held, choices, strict=True)
        for bit, size in zip(bits, one, strict=True)
        if size >= one[choice]
    ]
    _add_row(model.problem, terms, pulp.LpConstraintLE, len(choices) - 1.0)


def _add_row(model: pulp.LpProblem, terms: list[Term], sense: int, bound: float) -> None:
    model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=bound))


def _run(model: pulp.LpProblem, search: _Search, folder: Path) -> float:
    """Run the backend for the time that is left; its lower bound. Raises InfeasibleError or SolverError unless there is an assignment."""
    limit = f"the time limit of {search.options.time_limit_seconds:g} s"
    remaining = search.remaining_seconds()
    if remaining <= 0:
        raise SolverError(f"{limit} was over before the ILP could start; raise it")
    try:
        bound = search.options.backend.run(model, remaining, folder)
    except pulp.PulpSolverError as error:
        raise SolverError(f"the ILP solver failed: {error}") from error
    # PuLP has only the status say so where CBC finds the relaxation feasible but no integers.
    if model.status == pulp.LpStatusInfeasible or model.sol_status == pulp.LpSolutionInfeasible:
        raise InfeasibleError("the ILP has no solution")
    if model.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
        state = pulp.LpSolution.get(model.sol_status, str(model.sol_status))
        raise SolverError(f"the ILP solver found no assignment within {limit} ({state}); raise the limit")
    return bound


def _read_choices(model: _Model, part: ShardingProblem) -> tuple[int, ...]:
    chosen: list[int] = []
    for v, bits in enumerate(model.choices):
        values = np.array([np.nan if bit.varValue is None else bit.varValue for bit in bits])
        choice = int(np.argmax(values))
        if not np.allclose(values, np.arange(len(bits)) == choice, rtol=0.0, atol=1e-5):
            raise SolverError(
                f"the ILP solver's answer does not choose one strategy for {name_of(part, v)}, but {values.tolist()}; it is refused"
            )
        chosen.append(choice)
    return tuple(chosen)


def _ilp_answer(model: _Model, part: ShardingProblem, choices: tuple[int, ...], bound: float) -> _Answer:
    seconds = sum(cost * float(variable.varValue or 0.0) for variable, cost in model.objective) * model.unit_seconds
    if model.problem.sol_status == pulp.LpSolutionOptimal:
        lower_bound = seconds
    else:
        least = float(sum(costs.min() for costs in part.node_costs) + sum(edge.costs.min() for edge in part.edges))
        lower_bound = max(bound * model.unit_seconds, least)
    return _Answer(choices, Claim(seconds, lower_bound), SolveMethod.ILP, size_of(part))


def _why_infeasible(problem: ShardingProblem, search: _Search, error: InfeasibleError) -> AlpaError:
    """What to tell the user where nothing fits: the least bytes any allowed choice needs."""
    if problem.memory_limit == inf:
        return error
    needs = replace(
        problem,
        node_costs=tuple(np.where(costs < inf, one, inf) for costs, one in zip(problem.node_costs, held_bytes(problem), strict=True)),
        edges=tuple(Edge(edge.source, edge.target, np.where(edge.costs < inf, 0.0, inf)) for edge in problem.edges),
        memory_limit=inf,
    )
    least = _answer(needs, search, _eliminate_or_ilp)
    assert least is not None, "an ILP can be made of any part"
    missing = least.claim.lower_bound - problem.memory_limit
    if missing <= 0:
        return SolverError(f"the solver says that nothing fits ({error}), but {least.claim.seconds:.0f} bytes do: its answer is refused")
    return InfeasibleError(
        f"at least {least.claim.lower_bound:.0f} bytes a device are needed with {problem.inflight} microbatches in flight, the limit is "
        f"{problem.memory_limit:.0f}: {missing:.0f} are missing. Use more devices, more stages or a smaller microbatch."
    )
