"""Graph -> lower bound, prices of memory and a first assignment: the Lagrangian of the memory rows over message passing.

    L(prices) = min_s [cost(s) + sum_t prices[t] (held[t](s) - room[t])]  <=  optimum,     prices >= 0

The inner minimum is bounded by `messages.sweep`, which is valid at any prices. Prices follow a smoothed Polyak step along the overuse of a
rounded assignment; only times that were overused most (local maxima) ever get a price. Roundings that fit are improved one node at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alpa_hpc.kernels import Flags, Floats, Ints
from alpa_hpc.sharding.descent import descend, repair
from alpa_hpc.sharding.flat import held_over_time
from alpa_hpc.sharding.message_graph import Graph
from alpa_hpc.sharding.messages import least_excess, priced_costs, round_fitting, round_free, sweep

FEWEST_SWEEPS, MOST_SWEEPS = 3, 12  # a step: few while prices move far, more as steps get shorter
LAST_SWEEPS, LAST_ROUNDS, WORTH = 20, 5, 1e-5  # at the best prices, as long as a round lifts the bound by that share
NEW_TIMES = 10  # that get a price in one step
PATIENCE = 20  # steps without a better bound until the step length is halved
SHORTEST = 1 / 128  # step length, in Polyak's, at which the bound is as good as it gets


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """`bound` <= optimum; `excess[i]` = how much more than the bound any assignment with strategy i costs at least.

    `choices` is the best assignment found that fits, of cost `cost` (inf and meaningless choices where none was found).
    """

    bound: float
    prices: Floats
    messages: Floats
    excess: Floats
    choices: Ints
    cost: float


def relax(graph: Graph, choices: Ints, cost: float, closes: Callable[[float, float], bool], is_over: Callable[[], bool]) -> Relaxation:
    """Raise the bound until it meets the best cost (`closes(bound, cost)`), stalls or time is over; start from `choices` of `cost`.

    One step is made in any case.
    """
    state = _State(graph, choices, cost)
    state.step()
    while not (closes(state.bound, state.cost) or state.length < SHORTEST or is_over()):
        state.step()
    costs = state.converge(is_over)
    excess = least_excess(graph, costs, state.best_messages)
    return Relaxation(state.bound, state.best_prices, state.best_messages, excess, state.choices, state.cost)


class _State:
    """Prices and messages as they change, and the best of everything so far."""

    def __init__(self, graph: Graph, choices: Ints, cost: float) -> None:
        self.graph = graph
        self.choices, self.cost = choices, cost
        self.bound = -np.inf
        self.prices = np.zeros(len(graph.room))
        self.messages = np.zeros(graph.messages[-1])
        self.best_prices, self.best_messages = self.prices, self.messages
        self.direction = np.zeros(len(graph.room))
        self.length = 1.0
        self.stalled = 0
        self.num_steps = 0

    def step(self) -> None:
        """Sweep, round, and move the prices."""
        costs = priced_costs(self.graph, self.prices)
        bound = float(sweep(self.graph, costs, self.messages, self._num_sweeps())) - float(self.prices @ self.graph.room)
        self._note_bound(bound)
        over = self._overuse(round_free(self.graph, costs, self.messages))
        if self.num_steps % 4 == 0 or not (over > 0).any():
            self._try_fitting(costs)
        self._move(over, bound)
        self.num_steps += 1

    def _num_sweeps(self) -> int:
        return int(min(FEWEST_SWEEPS / self.length, MOST_SWEEPS))

    def converge(self, is_over: Callable[[], bool]) -> Floats:
        """Sweep on at the best prices, which the steps left before messages had settled; the priced costs there."""
        costs = priced_costs(self.graph, self.best_prices)
        messages = self.best_messages.copy()
        rent = float(self.best_prices @ self.graph.room)
        for _ in range(LAST_ROUNDS):
            bound = float(sweep(self.graph, costs, messages, LAST_SWEEPS)) - rent
            gained = bound - self.bound
            if gained > 0:
                self.bound, self.best_messages = bound, messages.copy()
            if gained <= WORTH * abs(bound) or is_over():
                break
        return costs

    def _note_bound(self, bound: float) -> None:
        gained = bound - self.bound
        if gained > 0:
            self.bound = bound
            self.best_prices, self.best_messages = self.prices.copy(), self.messages.copy()
        self.stalled = 0 if gained > 1e-4 * abs(bound) else self.stalled + 1
        if self.stalled >= PATIENCE:
            self.length /= 2
            self.stalled = 0
            if len(self.graph.room):
                self.prices = self.best_prices.copy()

    def _overuse(self, choices: Ints) -> Floats:
        graph = self.graph
        return held_over_time(choices, graph.span_starts, graph.times, graph.use_starts, graph.uses, len(graph.room)) - graph.room

    def _try_fitting(self, costs: Floats) -> None:
        choices, fits = round_fitting(self.graph, costs, self.messages)
        if fits or (self.cost == np.inf and repair(self.graph, choices)):
            cost = float(descend(self.graph, choices))
            if cost < self.cost:
                self.choices, self.cost = choices, cost

    def _move(self, over: Floats, bound: float) -> None:
        priced = (self.prices > 0) | local_maxima(over, NEW_TIMES)
        self.direction = np.where(priced, 0.7 * over + 0.3 * self.direction, 0.0)
        usable = np.where((self.prices > 0) | (self.direction > 0), self.direction, 0.0)
        norm = float(usable @ usable)
        if norm > 0:
            target = min(self.cost, bound + 0.2 * abs(bound) + 1.0)
            self.prices = np.maximum(0.0, self.prices + self.length * max(target - bound, 0.0) / norm * usable)


def local_maxima(over: Floats, number: int) -> Flags:
    """The `number` largest overused times, at most one of each run of neighbouring overused times."""
    chosen = np.zeros(len(over), dtype=np.bool_)
    is_over = over > 0
    if not is_over.any():
        return chosen
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_over, [False]]).astype(np.int8)))
    peaks = [begin + int(np.argmax(over[begin:end])) for begin, end in edges.reshape(-1, 2).tolist()]
    chosen[sorted(peaks, key=lambda t: -over[t])[:number]] = True
    return chosen
