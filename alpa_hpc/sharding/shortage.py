"""FlatProblem in which nothing fits -> Shortage: when, how many bytes are missing at the least, and which nodes hold the most then."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from alpa_hpc.kernels import Floats
from alpa_hpc.sharding.flat import FlatProblem, starts_of
from alpa_hpc.sharding.search import Deadline, SearchOptions, search

MOST_TIMES = 8  # that are looked at, those with the least room beside the least of every node
NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Shortage:
    """At time `time` (the original's number) every allowed assignment holds at least `least_bytes`, `missing_bytes` above the room.

    `largest` = (node, bytes) of the nodes that hold the most of it. Nothing is missing (<= 0) where no single time is short.
    """

    time: int
    least_bytes: float
    missing_bytes: float
    largest: tuple[tuple[int, float], ...]


def find_shortage(problem: FlatProblem, options: SearchOptions, deadline: Deadline) -> Shortage:
    """The time with the most bytes missing; NotAllowedError where nothing is allowed even without memory."""
    slack = problem.room - _least_over_time(problem)
    found = [_at(problem, int(t), options, deadline) for t in slack.argsort()[:MOST_TIMES]]
    return max(found, key=lambda one: one.missing_bytes)


def _least_over_time(problem: FlatProblem) -> Floats:
    change = np.zeros(len(problem.room) + 1)
    if len(problem.times):
        least = np.minimum.reduceat(problem.uses, problem.use_starts[:-1])
        np.add.at(change, problem.times[:, 0], least)
        np.subtract.at(change, problem.times[:, 1], least)
    return np.cumsum(change)[:-1]


def _at(problem: FlatProblem, time: int, options: SearchOptions, deadline: Deadline) -> Shortage:
    """The least bytes at one time: the same problem with these bytes as costs."""
    uses = np.zeros(problem.num_strategies)
    owners = np.repeat(np.arange(problem.num_nodes), np.diff(problem.span_starts))
    for i in np.flatnonzero((problem.times[:, 0] <= time) & (time < problem.times[:, 1])):
        first = problem.starts[owners[i]]
        uses[first : first + problem.sizes[owners[i]]] = problem.uses[problem.use_starts[i] : problem.use_starts[i + 1]]
    free = replace(
        problem,
        costs=np.where(problem.costs < inf, uses, inf),
        tables=np.where(problem.tables < inf, 0.0, inf),
        span_starts=np.zeros(problem.num_nodes + 1, dtype=np.int64),
        times=np.zeros((0, 2), dtype=np.int64),
        use_starts=starts_of([]),
        uses=np.zeros(0),
        room=np.zeros(0),
        labels=np.zeros(0, dtype=np.int64),
    )
    answer = search(free, options, deadline)
    room = float(problem.room[time])
    least = np.minimum.reduceat(np.where(problem.costs < inf, uses, inf), problem.starts[:-1])
    chosen = uses[problem.starts[:-1] + answer.choices] if len(answer.choices) else least
    largest = tuple((int(v), float(chosen[v])) for v in np.argsort(-chosen, kind="stable")[:NUM_NAMED])
    return Shortage(int(problem.labels[time]), answer.bound, answer.bound - room, largest)
