"""Min-sum bucket elimination: factors over many variables -> factors over the kept ones (paper, Eq. 1, solved without an ILP).

A variable v is removed by adding up all factors that hold it and minimising over its states,

    new(rest) = min_v  sum_(factors f that hold v) f(rest, v),

the variable that leaves the smallest table first, never one whose own table exceeds a cap. The order depends on scopes and shapes
alone, so it is made once for equal structures (repeated layers) and kept; the arrays are then walked through in a short loop. In each
scope the variable that leaves first stands last: every minimum is over the contiguous axis, and no step has to transpose.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from alpa_hpc.sharding.problem import Costs

Scope = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Costs `score` over the variables of `scope`, axes in scope order; +inf = not allowed, never NaN."""

    scope: Scope
    score: Costs


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table that is minimised (`score`), and what its entries are made of: `parts[0]` seconds, `[1]` fixed bytes, `[2]` inflight bytes.

    `score` has shape S (axes in scope order), `parts` shape (3, *S). Every cost is counted in one factor.
    """

    scope: Scope
    score: Costs
    parts: Costs

    @property
    def seconds(self) -> Costs:
        """Seconds an iteration of each entry, shape of `score`."""
        return self.parts[0]

    @property
    def fixed(self) -> Costs:
        """Bytes held all iteration of each entry, shape of `score`."""
        return self.parts[1]

    @property
    def inflight(self) -> Costs:
        """Bytes a microbatch in flight of each entry, shape of `score`."""
        return self.parts[2]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The best state of an eliminated `variable` for each assignment of the variables in `scope`."""

    variable: int
    scope: Scope
    states: NDArray[np.intp]


Trace = tuple[Decision, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """What is left (`factors`), and how the eliminated variables follow from it (`trace`, in order of elimination)."""

    factors: tuple[Factor, ...]
    trace: Trace


def make_factor(scope: Scope, score: Costs, fixed: Costs | float, inflight: Costs | float, seconds: Costs | float) -> Factor:
    """A factor from its four tables; scalars and shapes of size 1 are broadcast to the shape of `score`."""
    parts = np.empty((3, *score.shape))
    parts[0], parts[1], parts[2] = seconds, fixed, inflight
    return Factor(scope, score, parts)


def eliminate(factors: Sequence[Factor], keep: frozenset[int], table_cap: int) -> Elimination:
    """Eliminate every variable outside `keep` whose table has at most `table_cap` entries, carrying seconds and bytes of the minimum.

    Of equal states the lowest index wins. What is left are the factors over `keep` and over variables that were too wide, unmerged
    (`combine` merges them).
    """
    variables, plan = _plan_for(factors, keep, table_cap)
    scores = [factor.score.transpose(axes) for factor, axes in zip(factors, plan.axes, strict=True)]
    parts = [factor.parts.transpose(0, *(1 + axis for axis in axes)) for factor, axes in zip(factors, plan.axes, strict=True)]
    trace: list[Decision] = []
    for step in plan.steps:
        joint = _add_up(scores, step.inputs)
        states = np.asarray(joint.argmin(-1))
        best = states + _row_starts(step.rest, step.num_states)
        scores.append(joint.reshape(-1).take(best))
        parts.append(_take_parts(parts, step, states, best))
        trace.append(Decision(variables[step.variable], tuple(variables[v] for v in step.scope), states))
    return Elimination(tuple(_left(factors, plan, variables, scores, parts)), tuple(trace))


def can_eliminate(factors: Sequence[Factor] | Sequence[Table], keep: frozenset[int], table_cap: int) -> bool:
    """Whether `eliminate` would leave only variables of `keep`."""
    variables, plan = _plan_for(factors, keep, table_cap)
    return len(plan.steps) == len(set(variables) - keep)


def eliminate_costs(tables: Sequence[Table], keep: frozenset[int], table_cap: int) -> tuple[Table, ...]:
    """The minimum alone, as `eliminate` but faster: no states, no seconds, no bytes."""
    variables, plan = _plan_for(tables, keep, table_cap)
    # Scopes are reversed here: a minimum over the leading axis is up to ten times faster than over the last one.
    scores = [table.score.transpose(axes[::-1]) for table, axes in zip(tables, plan.axes, strict=True)]
    for step in plan.steps:
        scores.append(np.minimum.reduce(_add_up(scores, step.reversed_inputs), 0))
    left: list[Table] = []
    for slot, scope in plan.left:
        is_new = slot >= len(tables)
        left.append(Table(tuple(variables[v] for v in scope[::-1]), np.asarray(scores[slot])) if is_new else tables[slot])
    return tuple(left)


def combine(factors: Sequence[Factor], scope: Scope, shape: Shape) -> Factor:
    """The sum of factors whose scopes lie within `scope`, as one factor of that scope and shape."""
    score, parts = np.zeros(shape), np.zeros((3, *shape))
    for factor in factors:
        axes = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
        view = tuple(size if v in factor.scope else 1 for v, size in zip(scope, shape, strict=True))
        score += factor.score.transpose(axes).reshape(view)
        parts += factor.parts.transpose(0, *(1 + axis for axis in axes)).reshape(3, *view)
    return Factor(scope, score, parts)


def back_substitute(trace: Trace, choices: Mapping[int, int]) -> dict[int, int]:
    """Complete an assignment of the variables that were left over: all choices, the given ones included."""
    complete = dict(choices)
    for decision in reversed(trace):
        complete[decision.variable] = int(decision.states[tuple(complete[v] for v in decision.scope)])
    return complete


@dataclass(frozen=True, slots=True)
class _Input:
    """One factor that holds the step's variable: its slot, its shape among the joint table's axes, its entries without the variable."""

    slot: int
    shape: Shape
    rest: Shape
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Elimination of one variable with `num_states` states; `scope` and `rest` are variables and shape of the table it leaves."""

    variable: int
    num_states: int
    scope: Scope
    rest: Shape
    inputs: tuple[_Input, ...]
    reversed_inputs: tuple[_Input, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do with any factors of these scopes and shapes; variables are numbered in order of appearance.

    `axes[i]` brings the axes of factor i into order of leaving (first to leave = last), `left` = slots (factors, then steps) that remain.
    """

    axes: tuple[tuple[int, ...], ...]
    steps: tuple[_Step, ...]
    left: tuple[tuple[int, Scope], ...]


def _plan_for(factors: Sequence[Factor] | Sequence[Table], keep: frozenset[int], table_cap: int) -> tuple[tuple[int, ...], _Plan]:
    """Global numbers of the plan's variables, and the plan."""
    numbers: dict[int, int] = {}
    scopes = tuple(tuple([numbers.setdefault(v, len(numbers)) for v in factor.scope]) for factor in factors)
    sizes = [0] * len(numbers)
    for scope, factor in zip(scopes, factors, strict=True):
        for v, size in zip(scope, factor.score.shape, strict=True):
            sizes[v] = size
    kept = frozenset(number for v, number in numbers.items() if v in keep)
    return tuple(numbers), _make_plan(scopes, tuple(sizes), kept, table_cap)


@lru_cache(maxsize=512)
def _make_plan(scopes: tuple[Scope, ...], sizes: Shape, kept: frozenset[int], table_cap: int) -> _Plan:
    order = elimination_order(scopes, sizes, kept, table_cap)
    place = dict.fromkeys(range(len(sizes)), len(order)) | {v: step for step, v in enumerate(order)}

    def leaving_last(variables: Sequence[int] | set[int]) -> Scope:
        return tuple(sorted(variables, key=lambda v: (-place[v], v)))

    axes = tuple(tuple(scope.index(v) for v in leaving_last(scope)) for scope in scopes)
    slots = dict(enumerate(leaving_last(scope) for scope in scopes))
    holders: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for slot, scope in slots.items():
        for v in scope:
            holders[v].add(slot)
    steps: list[_Step] = []
    for v in order:
        used = {slot: slots.pop(slot) for slot in sorted(holders[v])}
        joint = leaving_last({u for scope in used.values() for u in scope})
        new_slot = len(scopes) + len(steps)
        for slot, scope in used.items():
            for u in scope:
                holders[u].discard(slot)
        for u in joint[:-1]:
            holders[u].add(new_slot)
        slots[new_slot] = joint[:-1]
        steps.append(_make_step(used, joint, sizes))
    return _Plan(axes, tuple(steps), tuple(slots.items()))


def _make_step(used: Mapping[int, Scope], joint: Scope, sizes: Shape) -> _Step:
    inputs: list[_Input] = []
    for slot, scope in used.items():
        shape = tuple(sizes[u] if u in scope else 1 for u in joint)
        inputs.append(_Input(slot, shape, shape[:-1], prod(shape[:-1])))
    # Small ones first: their sum stays small, and the full table is written once or twice instead of once an input.
    inputs.sort(key=lambda one: (prod(one.shape), one.slot))
    reverse = tuple(_Input(one.slot, one.shape[::-1], (), 0) for one in inputs)
    rest = tuple(sizes[u] for u in joint[:-1])
    return _Step(joint[-1], sizes[joint[-1]], joint[:-1], rest, tuple(inputs), reverse)


def elimination_order(scopes: Sequence[Scope], sizes: Shape, kept: frozenset[int], table_cap: int) -> tuple[int, ...]:
    """Variables outside `kept`, the one that leaves the smallest table first; none whose joint table has more than `table_cap` entries.

    The joint table has the variable's own states as one more axis.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)

    def entries(v: int) -> int:
        return prod(sizes[u] for u in neighbours[v] if u != v)

    current = {v: entries(v) for v in range(len(sizes)) if v not in kept and neighbours[v]}
    heap = [(size, v) for v, size in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        size, v = heapq.heappop(heap)
        if current.get(v) != size or size * sizes[v] > table_cap:
            continue
        del current[v]
        order.append(v)
        clique = neighbours[v] - {v}
        for u in sorted(clique):
            neighbours[u] |= clique
            neighbours[u].discard(v)
            if u in current and (now := entries(u)) != current[u]:
                current[u] = now
                heapq.heappush(heap, (now, u))
    return tuple(order)


def _add_up(tables: Sequence[Costs], inputs: Sequence[_Input]) -> Costs:
    """Sum of the inputs, broadcast to the joint table's axes."""
    total = tables[inputs[0].slot].reshape(inputs[0].shape)
    for one in inputs[1:]:
        total = total + tables[one.slot].reshape(one.shape)
    return total


def _row_starts(rest: Shape, num_states: int) -> NDArray[np.intp]:
    """Flat index of state 0 of each row in a contiguous array of shape (*rest, num_states)."""
    return np.arange(0, prod(rest) * num_states, num_states).reshape(rest)


def _take_parts(parts: Sequence[Costs], step: _Step, states: NDArray[np.intp], best: NDArray[np.intp]) -> Costs:
    """Parts of the chosen states summed over the inputs, shape (3, *rest): gathered from each input, the joint parts are never made."""
    total = np.zeros(())
    for one in step.inputs:
        if one.rest == step.rest:
            index = best
        elif one.num_rows == 1:
            index = states
        else:
            index = states + _row_starts(one.rest, step.num_states)
        taken = parts[one.slot].reshape(3, -1).take(index, 1)
        total = np.add(total, taken, taken)
    return total


def _left(
    factors: Sequence[Factor], plan: _Plan, variables: tuple[int, ...], scores: Sequence[Costs], parts: Sequence[Costs]
) -> list[Factor]:
    left: list[Factor] = []
    for slot, scope in plan.left:
        if slot < len(factors):
            left.append(factors[slot])
        else:
            left.append(Factor(tuple(variables[v] for v in scope), np.asarray(scores[slot]), parts[slot]))
    return left
