"""FlatProblem -> its optimum by a MIP whose relaxation is tight, memory rows added as they are needed.

    minimise  sum_v cost_v . x_v + sum_e table_e . y_e
    sum_s x[v, s] = 1                                              one strategy a node                    (`_node_rows`)
    sum_C y[e, R, C] = sum_(s in R) x[u, s], and for columns       both marginals of an edge              (`_edge_rows`)
    sum_v use_v[t] . x_v <= room[t]   for some times t             memory, scaled to 1                    (`_memory_rows`)

x is whole, y >= 0 is whole where x is; what costs inf has upper bound 0. Equal rows of a table are one class R, equal columns one class C:
the same bound with fewer y. An answer that holds too much at some times is no solution; these times join the model, which is solved again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from alpa_hpc.errors import SolverError
from alpa_hpc.kernels import Floats, Ints
from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat, held_over_time, starts_of
from alpa_hpc.sharding.lagrangian import local_maxima
from alpa_hpc.sharding.linear import AbstractLinearSolver, LinearModel

NEW_TIMES = 20  # that join the model after an answer that does not fit
MAX_ROUNDS = 60
ANY_GAP = 1e30  # the first solution will do
TOLERANCE = 1e-6  # relative, of a MIP solver's bounds
Triplets = tuple[Ints, Ints, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class TightAnswer:
    """`choices` that fit (empty: none found), and a bound that no assignment undercuts (inf: nothing fits)."""

    choices: Ints
    bound: float


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """The model without memory rows; `classes[e]` = class of each row, class of each column, first y of edge e."""

    model: LinearModel
    classes: tuple[tuple[Ints, Ints, int], ...]
    unit: float


def solve_tight(
    problem: FlatProblem, choices: Ints, times: Ints, solver: AbstractLinearSolver, gap: float, remaining: Callable[[], float]
) -> TightAnswer:
    """The best assignment in the time that `remaining()` says, from `choices` that fit (empty: none known) and memory rows for `times`.

    A proof may leave an absolute gap of `gap`.
    """
    program = _make_program(problem, gap)
    known = set(times.tolist())
    bound, best = -np.inf, choices
    best_cost = evaluate_flat(problem, choices).cost if len(choices) else np.inf
    for _ in range(MAX_ROUNDS):
        if remaining() <= 0:
            break
        model = _with_memory(program.model, problem, sorted(known))
        if len(best):
            model = replace(model, start=_values(program, problem, best))
        answer = solver.solve(model, remaining())
        bound = max(bound, answer.bound * program.unit)
        if bound > best_cost + max(gap, TOLERANCE * abs(best_cost)):
            raise SolverError(
                f"the MIP solver's bound of {bound:.9g} is above the {best_cost:.9g} of an assignment that fits: it is refused"
            )
        if not len(answer.values):
            break
        found = _read_choices(problem, answer.values)
        evaluation = evaluate_flat(problem, found)
        if evaluation.excess <= 0:
            if evaluation.cost < best_cost:
                best, best_cost = found, evaluation.cost
            break
        over = _overuse(problem, found)
        new = set(np.flatnonzero(local_maxima(over, NEW_TIMES)).tolist()) - known
        if not new:
            program = replace(program, model=_forbid(program.model, problem, found, int(np.argmax(over))))
        known |= new
    return TightAnswer(best, bound)


def first_fitting(problem: FlatProblem, solver: AbstractLinearSolver, remaining: Callable[[], float]) -> TightAnswer:
    """Some assignment that is allowed and fits, or a bound of inf if there is none: the MIP without edges that allow everything."""
    allows_all = np.array([bool((table < np.inf).all()) for table in _tables(problem)], dtype=np.bool_)
    kept = np.flatnonzero(~allows_all)
    lengths = np.diff(problem.offsets)
    entries = np.repeat(~allows_all, lengths)
    bare = replace(
        problem,
        ends=problem.ends[kept],
        offsets=starts_of(lengths[kept]),
        tables=np.where(problem.tables[entries] < np.inf, 0.0, np.inf),
    )
    none = np.zeros(0, dtype=np.int64)
    return solve_tight(bare, none, none, solver, ANY_GAP, remaining)


def _overuse(problem: FlatProblem, choices: Ints) -> Floats:
    held = held_over_time(choices, problem.span_starts, problem.times, problem.use_starts, problem.uses, len(problem.room))
    return held - problem.room


def num_grouped(problem: FlatProblem) -> int:
    """Entries of all tables that are left when equal rows and equal columns are one: the size of the MIP."""
    return sum(int((rows.max() + 1) * (columns.max() + 1)) for rows, columns in (_classes(table) for table in _tables(problem)))


def _tables(problem: FlatProblem) -> list[Floats]:
    sizes = problem.sizes
    return [
        problem.tables[problem.offsets[e] : problem.offsets[e + 1]].reshape(sizes[source], sizes[target])
        for e, (source, target) in enumerate(problem.ends.tolist())
    ]


def _classes(table: Floats) -> tuple[Ints, Ints]:
    return tuple(_class_numbers(side) for side in (table, table.T))  # pyright: ignore[reportReturnType] two of them


def _class_numbers(table: Floats) -> Ints:
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in np.ascontiguousarray(table)])


def _make_program(problem: FlatProblem, gap: float) -> _Program:
    classes: list[tuple[Ints, Ints, int]] = []
    costs = [problem.costs]
    parts: list[Triplets] = [_node_rows(problem)]
    num_rows, num_columns = problem.num_nodes, problem.num_strategies
    for (source, target), table in zip(problem.ends.tolist(), _tables(problem), strict=True):
        rows, columns = _classes(table)
        firsts = [np.unique(one, return_index=True)[1] for one in (rows, columns)]
        classes.append((rows, columns, num_columns))
        costs.append(table[np.ix_(*firsts)].ravel())
        parts += _edge_rows(problem, (source, target), classes[-1], num_rows)
        num_rows += len(firsts[0]) + len(firsts[1])
        num_columns += len(costs[-1])
    joined = np.concatenate(costs)
    is_allowed = joined < np.inf
    joined = np.where(is_allowed, joined, 0.0)
    positive = joined[joined > 0]
    unit = 10.0 ** np.floor(np.log10(np.median(positive))) if len(positive) else 1.0
    ones = np.zeros(num_rows)
    ones[: problem.num_nodes] = 1.0
    starts, columns, coefficients = _by_rows(parts, num_rows)
    is_whole = np.arange(num_columns) < problem.num_strategies
    model = LinearModel(
        joined / unit, is_allowed.astype(np.float64), is_whole, starts, columns, coefficients, ones, ones, np.zeros(0), gap / unit
    )
    return _Program(model, tuple(classes), float(unit))


def _node_rows(problem: FlatProblem) -> Triplets:
    number = problem.num_strategies
    return np.repeat(np.arange(problem.num_nodes), problem.sizes), np.arange(number), np.ones(number)


def _edge_rows(problem: FlatProblem, ends: tuple[int, int], classes: tuple[Ints, Ints, int], first_row: int) -> list[Triplets]:
    rows, columns, first = classes
    num_rows, num_columns = int(rows.max()) + 1, int(columns.max()) + 1
    y = first + np.arange(num_rows * num_columns)
    second_row = first_row + num_rows
    return [
        (first_row + np.repeat(np.arange(num_rows), num_columns), y, np.ones(len(y))),
        (first_row + rows, problem.starts[ends[0]] + np.arange(len(rows)), np.full(len(rows), -1.0)),
        (second_row + np.tile(np.arange(num_columns), num_rows), y, np.ones(len(y))),
        (second_row + columns, problem.starts[ends[1]] + np.arange(len(columns)), np.full(len(columns), -1.0)),
    ]


def _by_rows(parts: list[Triplets], num_rows: int) -> tuple[Ints, Ints, Floats]:
    rows, columns, values = (np.concatenate(one) for one in zip(*parts, strict=True))
    order = np.argsort(rows, kind="stable")
    return starts_of(np.bincount(rows, minlength=num_rows)), columns[order], values[order]


def _with_memory(model: LinearModel, problem: FlatProblem, times: list[int]) -> LinearModel:
    rows = [_memory_row(problem, t) for t in times]
    return _add_rows(model, rows, np.full(len(times), -np.inf), np.ones(len(times)))


def _memory_row(problem: FlatProblem, time: int) -> tuple[Ints, Floats]:
    owners = np.repeat(np.arange(problem.num_nodes), np.diff(problem.span_starts))
    columns: list[Ints] = []
    values: list[Floats] = []
    unit = float(problem.room[time]) or 1.0
    for i in np.flatnonzero((problem.times[:, 0] <= time) & (time < problem.times[:, 1])):
        uses = problem.uses[problem.use_starts[i] : problem.use_starts[i + 1]]
        used = np.flatnonzero(uses)
        columns.append(problem.starts[owners[i]] + used)
        values.append(uses[used] / unit)
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns]), np.concatenate([np.zeros(0), *values])


def _add_rows(model: LinearModel, rows: list[tuple[Ints, Floats]], lower: Floats, upper: Floats) -> LinearModel:
    lengths = [len(columns) for columns, _ in rows]
    return replace(
        model,
        row_starts=np.concatenate([model.row_starts, model.row_starts[-1] + starts_of(lengths)[1:]]),
        columns=np.concatenate([model.columns, *(columns for columns, _ in rows)]),
        coefficients=np.concatenate([model.coefficients, *(values for _, values in rows)]),
        row_lower=np.concatenate([model.row_lower, lower]),
        row_upper=np.concatenate([model.row_upper, upper]),
    )


def _forbid(model: LinearModel, problem: FlatProblem, choices: Ints, time: int) -> LinearModel:
    """Forbid an assignment that holds too much at `time` by less than the solver can see, and all that hold as much in every node."""
    columns: list[int] = []
    num_holders = 0
    for v in range(problem.num_nodes):
        for i in range(problem.span_starts[v], problem.span_starts[v + 1]):
            if problem.times[i, 0] <= time < problem.times[i, 1]:
                uses = problem.uses[problem.use_starts[i] : problem.use_starts[i + 1]]
                columns += (problem.starts[v] + np.flatnonzero(uses >= uses[choices[v]])).tolist()
                num_holders += 1
    row = (np.array(columns, dtype=np.int64), np.ones(len(columns)))
    return _add_rows(model, [row], np.array([-np.inf]), np.array([num_holders - 1.0]))


def _values(program: _Program, problem: FlatProblem, choices: Ints) -> Floats:
    """The model's variables for an assignment."""
    values = np.zeros(len(program.model.costs))
    values[problem.starts[:-1] + choices] = 1.0
    for (source, target), (rows, columns, first) in zip(problem.ends.tolist(), program.classes, strict=True):
        values[first + rows[choices[source]] * (columns.max() + 1) + columns[choices[target]]] = 1.0
    return values


def _read_choices(problem: FlatProblem, values: Floats) -> Ints:
    choices = np.zeros(problem.num_nodes, dtype=np.int64)
    for v in range(problem.num_nodes):
        own = values[problem.starts[v] : problem.starts[v + 1]]
        choices[v] = np.argmax(own)
        if not np.allclose(own, np.arange(len(own)) == choices[v], rtol=0.0, atol=1e-5):
            raise SolverError(f"the MIP solver's answer does not choose one strategy for a node, but {own.tolist()}; it is refused")
    return choices
