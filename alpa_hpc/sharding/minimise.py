"""Min-sum bucket elimination of tables, states found on the way back: tables over many variables -> tables over the kept ones, and Undo.

A variable v leaves by adding up all tables that hold it and taking the minimum over its states,

    new(rest) = min_v  sum_(tables t that hold v) t(rest, v).

Which state it was is asked only for the one assignment that is wanted in the end: then a single row of the sum is formed again, by the same
additions, and its first minimum is the answer. So the way forwards is nothing but sums and minima over the leading axis, and costs a
quarter of one that keeps states. The order of leaving depends on scopes and shapes alone; plans are kept for equal structures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from alpa_hpc.sharding.eliminate import Scope, Shape, Table, elimination_order
from alpa_hpc.sharding.problem import Costs


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """What finds the states of the variables that left: the names of the plan's variables, and every table of the way forwards."""

    plan: "_Plan"
    variables: tuple[int, ...]
    scores: tuple[Costs, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return sum(score.nbytes for score in self.scores)


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """Tables over the kept variables (and over those that were too wide), not merged; their sum is the minimum over all others."""

    tables: tuple[Table, ...]
    undo: Undo
    left: frozenset[int]
    """the variables that remain"""


def minimise(tables: Sequence[Table], keep: frozenset[int], table_cap: int) -> Minimum:
    """Let every variable outside `keep` leave whose sum of tables has at most `table_cap` entries."""
    numbers: dict[int, int] = {}
    scopes = tuple(tuple([numbers.setdefault(v, len(numbers)) for v in table.scope]) for table in tables)
    sizes = [0] * len(numbers)
    for scope, table in zip(scopes, tables, strict=True):
        for v, size in zip(scope, table.score.shape, strict=True):
            sizes[v] = size
    kept = frozenset(number for v, number in numbers.items() if v in keep)
    plan, names = _make_plan(scopes, tuple(sizes), kept, table_cap), tuple(numbers)
    variables = tuple([names[v] for v in plan.variables])
    scores = [table.score.transpose(axes) for table, axes in zip(tables, plan.axes, strict=True)]
    for step in plan.steps:
        scores.append(np.minimum.reduce(_sum(scores, step), 0))
    left = tuple(Table(tuple(variables[v] for v in scope), np.asarray(scores[slot])) for slot, scope in plan.left)
    remaining = frozenset(variables[v] for _, scope in plan.left for v in scope)
    return Minimum(fold_constants(left), Undo(plan, variables, tuple(scores)), remaining)


def fold_constants(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The same sum with one table without variables: layers leave hundreds of them."""
    constant = sum(float(table.score) for table in tables if not table.scope)
    return (Table((), np.array(constant)), *(table for table in tables if table.scope))


def restore(undo: Undo, choices: Mapping[int, int]) -> dict[int, int]:
    """Complete an assignment of the variables that remained by the best states of the others; of equal states the lowest wins."""
    number = {v: index for index, v in enumerate(undo.variables)}
    states = {number[v]: state for v, state in choices.items() if v in number}
    for step in reversed(undo.plan.steps):
        row: Costs | float = 0.0
        for one in step.inputs:
            row = row + undo.scores[one.slot][(slice(None), *[states[v] for v in one.rest])]
        states[step.variable] = int(np.argmin(row))
    return dict(choices) | {undo.variables[v]: state for v, state in states.items()}


@dataclass(frozen=True, slots=True)
class _Input:
    """One table that holds a step's variable, as its first axis: its slot, its other variables, its shape among the sum's axes."""

    slot: int
    rest: Scope
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Step:
    variable: int
    inputs: tuple[_Input, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do with any tables of these scopes and shapes. Inside, variables have the numbers of their steps, then those that remain.

    `variables[k]` = which variable of the scopes that is; `axes[i]` brings the axes of table i into order of leaving; `left` = slots
    (tables, then steps) that remain.
    """

    variables: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    steps: tuple[_Step, ...]
    left: tuple[tuple[int, Scope], ...]


@lru_cache(maxsize=512)
def _make_plan(scopes: tuple[Scope, ...], sizes: Shape, kept: frozenset[int], table_cap: int) -> _Plan:
    order = elimination_order(scopes, sizes, kept, table_cap)
    variables = (*order, *sorted(set(range(len(sizes))) - set(order)))
    place = [0] * len(sizes)
    for number, v in enumerate(variables):
        place[v] = number
    placed = [[place[v] for v in scope] for scope in scopes]
    axes = tuple([tuple(sorted(range(len(scope)), key=scope.__getitem__)) for scope in placed])
    slots = dict(enumerate([tuple(sorted(scope)) for scope in placed]))
    steps = _steps(slots, [sizes[v] for v in variables], len(order))
    return _Plan(variables, axes, steps, tuple(slots.items()))


def _steps(slots: dict[int, Scope], sizes: Sequence[int], count: int) -> tuple[_Step, ...]:
    """The steps in which the first `count` variables leave; what they use goes from `slots`, what they make comes there."""
    holders: list[set[int]] = [set() for _ in sizes]
    for slot, scope in slots.items():
        for v in scope:
            holders[v].add(slot)
    steps: list[_Step] = []
    num_tables = len(slots)
    for v in range(count):
        used = {slot: slots.pop(slot) for slot in holders[v]}
        joint = tuple(sorted({u for scope in used.values() for u in scope}))
        made = num_tables + v
        for u in joint[1:]:
            holders[u].difference_update(used)
            holders[u].add(made)
        slots[made] = joint[1:]
        steps.append(_Step(v, _inputs(used, joint, sizes)))
    return tuple(steps)


def _inputs(used: Mapping[int, Scope], joint: Scope, sizes: Sequence[int]) -> tuple[_Input, ...]:
    wide = [(slot, scope[1:], tuple([sizes[u] if u in scope else 1 for u in joint])) for slot, scope in used.items()]
    # Small ones first: their sum stays small, and the full table is written once or twice instead of once an input.
    wide.sort(key=lambda one: (prod(one[2]), one[0]))
    return tuple([_Input(slot, rest, shape) for slot, rest, shape in wide])


def _sum(scores: Sequence[Costs], step: _Step) -> Costs:
    first, *others = step.inputs
    joint = scores[first.slot].reshape(first.shape)
    for one in others:
        joint = joint + scores[one.slot].reshape(one.shape)
    return joint
