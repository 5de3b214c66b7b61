"""A solved problem and one of its nodes -> what each strategy there would have cost at best (why not X here?).

All other nodes are free to change along. Where elimination can, the minima are exact and come from one pass that keeps the node,

    minimum[s] = min over all choices with s_node = s of  seconds + price.fixed * fixed_bytes + price.inflight * inflight_bytes

and the problem is solved again with the node pinned where that is too wide, or where its memory limit refuses what the pass found.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.evaluate import Evaluation, evaluate
from alpa_hpc.sharding.minimise import Minimum, minimise, restore
from alpa_hpc.sharding.problem import ShardingProblem
from alpa_hpc.sharding.solve import SolverOptions, solve
from alpa_hpc.sharding.stage import NEAR, MemoryPrice, problem_tables
from alpa_hpc.sharding.stage_problem import stage_problem

FREE_MEMORY = MemoryPrice(0.0, 0.0)


class Obstacle(enum.Enum):
    """Why a strategy cannot be taken whatever the other nodes do."""

    FORBIDDEN = "it is not allowed"
    NO_RESHARDING = "no choices of its neighbours go with it"
    MEMORY = "nothing fits the memory limit with it"


@dataclass(frozen=True, slots=True)
class Possible:
    """A strategy, and how much more the best choices with it cost than the choices that are explained (less: negative).

    `score` = seconds an iteration and bytes at their price, the thing that is minimised; no choices with it have less than `score_bound`,
    which is `score` where that is proven. The other three are what those best choices need.
    """

    label: str
    is_chosen: bool
    score: float
    score_bound: float
    seconds: float
    fixed_bytes: float
    inflight_bytes: float


@dataclass(frozen=True, slots=True)
class Impossible:
    """A strategy that nothing goes with."""

    label: str
    obstacle: Obstacle


Alternative = Possible | Impossible


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """`price` = what the choices were optimised for; `table_cap` = entries of the largest table, `general` = limits beyond it."""

    price: MemoryPrice = FREE_MEMORY
    table_cap: int = NEAR.message
    general: SolverOptions = field(default_factory=SolverOptions)


def explain_stage(
    step: LayeredStep, chosen: Sequence[ChosenLayer], place: int, node: int, options: ExplainOptions | None = None
) -> tuple[Alternative, ...]:
    """The strategies of `node` of the stage's layer number `place`."""
    problem, numbers = stage_problem(step, [layer.problem for layer in chosen])
    choices = [0] * len(problem.node_costs)
    for layer, local in zip(chosen, numbers, strict=True):
        for inner, outer in local.items():
            choices[outer] = layer.choices[inner]
    return explain(problem, choices, numbers[place][node], chosen[place].problem.labels[node], options)


def explain(
    problem: ShardingProblem, choices: Sequence[int], node: int, labels: Sequence[str], options: ExplainOptions | None = None
) -> tuple[Alternative, ...]:
    """The strategies of `node` in order, named by `labels`.

    Raises SolverError if a problem too wide for elimination is not solved within the limits.
    """
    assert len(labels) == len(problem.node_costs[node]), "one label a strategy"
    asked = _Question(problem, evaluate(problem, choices), node, choices[node], options or ExplainOptions())
    others_best = minimise(problem_tables(problem, asked.options.price), frozenset({node}), asked.options.table_cap)
    return tuple(_alternative(asked, others_best, strategy, label) for strategy, label in enumerate(labels))


@dataclass(frozen=True, slots=True)
class _Question:
    problem: ShardingProblem
    present: Evaluation
    node: int
    chosen: int
    options: ExplainOptions

    def score(self, found: Evaluation) -> float:
        price = self.options.price
        return found.seconds + price.fixed * found.fixed_bytes + price.inflight * found.inflight_bytes


def _alternative(asked: _Question, others_best: Minimum, strategy: int, label: str) -> Alternative:
    if asked.problem.node_costs[asked.node][strategy] == inf:
        return Impossible(label, Obstacle.FORBIDDEN)
    if others_best.left <= {asked.node}:
        return _by_elimination(asked, others_best, strategy, label)
    return _solved_again(asked, strategy, label)


def _by_elimination(asked: _Question, others_best: Minimum, strategy: int, label: str) -> Alternative:
    """The exact minimum without the limit, which is the answer if it fits."""
    pinned = {asked.node: strategy}
    if others_best.tables.column(asked.node, len(asked.problem.node_costs[asked.node]))[strategy] == inf:
        return Impossible(label, Obstacle.NO_RESHARDING)
    states = restore(others_best.undo, pinned)
    found = evaluate(asked.problem, [states.get(v, 0) for v in range(len(asked.problem.node_costs))])
    if found.violations:
        return _solved_again(asked, strategy, label)
    return _possible(asked, strategy, label, found, asked.score(found))


def _solved_again(asked: _Question, strategy: int, label: str) -> Alternative:
    pinned = _pinned(asked, strategy)
    try:
        solution = solve(pinned, asked.options.general)
    except InfeasibleError:
        return Impossible(label, _obstacle(asked, pinned))
    return _possible(asked, strategy, label, evaluate(asked.problem, solution.choices), solution.lower_bound)


def _possible(asked: _Question, strategy: int, label: str, found: Evaluation, score_bound: float) -> Possible:
    present = asked.present
    return Possible(
        label=label,
        is_chosen=strategy == asked.chosen,
        score=asked.score(found) - asked.score(present),
        score_bound=score_bound - asked.score(present),
        seconds=found.seconds - present.seconds,
        fixed_bytes=found.fixed_bytes - present.fixed_bytes,
        inflight_bytes=found.inflight_bytes - present.inflight_bytes,
    )


def _pinned(asked: _Question, strategy: int) -> ShardingProblem:
    """The problem with its score as costs, and one strategy allowed at the node."""
    price, problem = asked.options.price, asked.problem
    columns = zip(problem.node_costs, problem.fixed_bytes, problem.inflight_bytes, strict=True)
    scores = [seconds + price.fixed * fixed + price.inflight * inflight for seconds, fixed, inflight in columns]
    others = np.arange(len(scores[asked.node])) != strategy
    scores[asked.node] = np.where(others, inf, scores[asked.node])
    return replace(problem, node_costs=tuple(scores))


def _obstacle(asked: _Question, pinned: ShardingProblem) -> Obstacle:
    """Whether it is the limit that nothing fits."""
    try:
        solve(replace(pinned, memory_limit=inf), asked.options.general)
    except InfeasibleError:
        return Obstacle.NO_RESHARDING
    return Obstacle.MEMORY
