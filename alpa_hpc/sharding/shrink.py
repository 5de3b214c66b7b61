"""FlatProblem -> a smaller FlatProblem with the same optimum (exact, memory included) + how to undo it.

The rules are in `shrink_rules.py` (nodes and tables) and `shrink_memory.py` (memory over time); here they take turns until nothing changes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.kernels import Ints
from alpa_hpc.sharding.flat import FlatProblem, starts_of
from alpa_hpc.sharding.shrink_memory import prune_memory, unload_spans
from alpa_hpc.sharding.shrink_rules import drain
from alpa_hpc.sharding.shrink_spans import join_pending
from alpa_hpc.sharding.shrink_state import (
    BAD,
    NO_ROOM,
    NO_SPACE,
    NOT_ALLOWED,
    OK,
    QUEUE_LENGTH,
    SPANS,
    TABLES,
    TIMES,
    TRACE,
    USES,
    Work,
    load,
    new_queue,
    pack_spans,
    pack_tables,
    replay,
    settle_all,
    unload_tables,
)


class NotAllowedError(InfeasibleError):
    """Node `node` has no strategy left that costs less than inf."""

    def __init__(self, node: int) -> None:
        super().__init__(f"none of the strategies of node {node} can be used: each is forbidden or leaves a neighbour without one")
        self.node = node


class NoRoomError(InfeasibleError):
    """At time `time` nothing fits."""

    def __init__(self, time: int) -> None:
        super().__init__(f"nothing fits at time {time}")
        self.time = time


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """`problem`'s optimum + `offset` = the original's optimum; `expand` brings choices back.

    `nodes[i]` = original number of the reduced problem's node i, `states` the original numbers of its strategies, laid end to end.
    """

    problem: FlatProblem
    offset: float
    nodes: Ints
    states: Ints
    trace: Ints
    num_original: int


def shrink(problem: FlatProblem) -> Reduction:
    """Shrink a problem without changing its optimum; NotAllowedError or NoRoomError where there is no solution."""
    work = _load(problem)
    status = prune_memory(work)
    while status in {OK, NO_SPACE}:
        if work.counters[QUEUE_LENGTH] == 0:
            break
        status = drain(work)
        if status == OK:
            status = join_pending(work)
        if status == NO_SPACE:
            work = _longer(work)
        elif status == OK:
            status = prune_memory(work)
    if status == NOT_ALLOWED:
        raise NotAllowedError(int(work.counters[BAD]))
    if status == NO_ROOM:
        raise NoRoomError(int(work.labels[work.counters[BAD]]))
    if status != OK:
        raise NotAllowedError(int(work.counters[BAD]))
    return _unload(work, problem.num_nodes)


def expand(reduction: Reduction, choices: Ints) -> Ints:
    """Choices of the original problem from choices of the reduced one."""
    complete = np.full(reduction.num_original, -1, dtype=np.int64)
    complete[reduction.nodes] = reduction.states[reduction.problem.starts[:-1] + choices]
    replay(reduction.trace, len(reduction.trace), complete)
    return complete


def _load(problem: FlatProblem) -> Work:
    number, sizes = problem.num_nodes, problem.sizes
    queue, queued = new_queue(number)
    work = Work(
        starts=problem.starts,
        sizes=sizes.copy(),
        costs=problem.costs.copy(),
        states=np.arange(problem.num_strategies) - np.repeat(problem.starts[:-1], sizes),
        heads=np.full(number, -1),
        degrees=np.zeros(number, dtype=np.int64),
        nexts=np.full(2 * len(problem.ends), -1),
        previous=np.full(2 * len(problem.ends), -1),
        ends=np.zeros(2 * len(problem.ends), dtype=np.int64),
        offsets=problem.offsets[:-1].copy(),
        tables=_with_place(problem.tables),
        span_firsts=problem.span_starts[:-1].copy(),
        span_counts=np.diff(problem.span_starts),
        span_begins=_with_place(problem.times[:, 0]),
        span_ends=_with_place(problem.times[:, 1]),
        span_uses=_with_place(problem.use_starts[:-1]),
        pending=np.zeros(number, dtype=np.int64),
        uses=_with_place(problem.uses),
        room=problem.room.copy(),
        labels=problem.labels.copy(),
        trace=np.zeros(8 * number + 4 * problem.num_strategies, dtype=np.int64),
        queue=queue,
        queued=queued,
        offset=np.zeros(1),
        counters=np.zeros(8, dtype=np.int64),
    )
    work.counters[TABLES] = problem.num_entries
    work.counters[SPANS] = len(problem.times)
    work.counters[USES] = len(problem.uses)
    work.counters[TIMES] = len(problem.room)
    work.counters[QUEUE_LENGTH] = number
    load(work, problem.ends, problem.offsets, problem.tables)
    settle_all(work)
    return work


def _with_place(array: NDArray[Any]) -> NDArray[Any]:
    """The array with some place behind it."""
    return _copied(array, 2 * len(array) + 2**20)


def _copied(array: NDArray[Any], length: int) -> NDArray[Any]:
    longer = np.empty(length, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def _longer(work: Work) -> Work:
    """The same work, what is left of tables and spans moved together, in arrays twice as long where they may fill up."""
    begins, ends, places, uses = pack_spans(work)
    packed = {
        "tables": pack_tables(work),
        "span_begins": begins,
        "span_ends": ends,
        "span_uses": places,
        "uses": uses,
        "trace": work.trace[: work.counters[TRACE]],
    }
    return work._replace(**{name: _copied(array, 2 * len(getattr(work, name))) for name, array in packed.items()})


def _unload(work: Work, num_original: int) -> Reduction:
    kept = np.flatnonzero(work.sizes > 0)
    sizes = work.sizes[kept]
    living = np.repeat(work.starts[kept] - starts_of(sizes)[:-1], sizes) + np.arange(sizes.sum())
    ends, offsets, tables = unload_tables(work)
    places = np.full(num_original, -1)
    places[kept] = np.arange(len(kept))
    counts, times, lengths, uses = unload_spans(work, kept)
    num_times = int(work.counters[TIMES])
    reduced = FlatProblem(
        starts=starts_of(sizes),
        costs=work.costs[living],
        ends=places[ends],
        offsets=offsets,
        tables=tables,
        span_starts=starts_of(counts),
        times=times,
        use_starts=starts_of(lengths),
        uses=uses,
        room=work.room[:num_times].copy(),
        labels=work.labels[:num_times].copy(),
    )
    return Reduction(reduced, float(work.offset[0]), kept, work.states[living], work.trace[: work.counters[TRACE]].copy(), num_original)
