"""Random flat problems, small enough to enumerate, memory over several times; few distinct numbers, so that ties are common."""

from collections.abc import Iterator
from itertools import product

import numpy as np
from hypothesis import strategies as st

from alpa_hpc.kernels import Floats, Ints
from alpa_hpc.sharding.flat import FlatProblem, evaluate_flat, starts_of


@st.composite
def flat_problems(draw: st.DrawFn, max_nodes: int = 6, max_size: int = 4, max_edges: int = 9) -> FlatProblem:
    """1 to `max_nodes` nodes, any edges (parallel, either way, none; some one-to-one), some infinities, up to five times, tight or free."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.array(draw(st.lists(st.integers(1, max_size), min_size=1, max_size=max_nodes)))
    forbidden = draw(st.sampled_from((0.0, 0.1, 0.3)))
    number = len(sizes)
    pairs = [rng.permutation(number)[:2].tolist() for _ in range(draw(st.integers(0, max_edges)) if number > 1 else 0)]
    tables = [_table(rng, int(sizes[u]), int(sizes[v]), forbidden) for u, v in pairs]
    num_times = draw(st.integers(0, 5))
    spans = [_spans(rng, num_times) for _ in range(number)]
    span_sizes = np.array([sizes[v] for v in range(number) for _ in spans[v]], dtype=np.int64)
    return FlatProblem(
        starts=starts_of(sizes),
        costs=_numbers(rng, int(sizes.sum()), forbidden),
        ends=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        offsets=starts_of([table.size for table in tables]),
        tables=np.concatenate([np.zeros(0), *tables]),
        span_starts=starts_of([len(one) for one in spans]),
        times=np.array([span for one in spans for span in one], dtype=np.int64).reshape(-1, 2),
        use_starts=starts_of(span_sizes),
        uses=rng.integers(0, 9, int(span_sizes.sum())).astype(float),
        room=np.floor(rng.integers(0, 5 * number + 3, num_times).astype(float) * draw(st.sampled_from((0.5, 1.0, 2.0)))),
        labels=np.arange(num_times),
    )


@st.composite
def hard_problems(draw: st.DrawFn) -> FlatProblem:
    """4 to 6 nodes with 2 to 3 strategies, nearly all joined, no infinities, memory of middling tightness: shrinking leaves most of it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    number = draw(st.integers(4, 6))
    sizes = rng.integers(2, 4, number)
    pairs = [[u, v] for u in range(number) for v in range(u) if rng.random() < 0.9]
    tables = [rng.integers(0, 30, int(sizes[u] * sizes[v])).astype(float) for u, v in pairs]
    num_times = draw(st.integers(0, 4))
    spans = [_spans(rng, num_times) for _ in range(number)]
    span_sizes = np.array([sizes[v] for v in range(number) for _ in spans[v]], dtype=np.int64)
    return FlatProblem(
        starts=starts_of(sizes),
        costs=rng.integers(0, 9, int(sizes.sum())).astype(float),
        ends=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        offsets=starts_of([table.size for table in tables]),
        tables=np.concatenate([np.zeros(0), *tables]),
        span_starts=starts_of([len(one) for one in spans]),
        times=np.array([span for one in spans for span in one], dtype=np.int64).reshape(-1, 2),
        use_starts=starts_of(span_sizes),
        uses=rng.integers(0, 9, int(span_sizes.sum())).astype(float),
        room=rng.integers(1, 4 * number, num_times).astype(float),
        labels=np.arange(num_times),
    )


def _numbers(rng: np.random.Generator, number: int, forbidden: float) -> Floats:
    return np.where(rng.random(number) < forbidden, np.inf, rng.integers(0, 5, number).astype(float))


def _table(rng: np.random.Generator, rows: int, columns: int, forbidden: float) -> Floats:
    if rng.random() < 0.25:
        follows = rng.integers(0, rows, columns)
        return np.where(np.arange(rows)[:, None] == follows, rng.integers(0, 5, (rows, columns)), np.inf).ravel()
    return _numbers(rng, int(rows * columns), forbidden)


def _spans(rng: np.random.Generator, num_times: int) -> list[list[int]]:
    """Up to two disjoint spans in order."""
    cuts = sorted(set(rng.integers(0, num_times + 1, 4).tolist()))
    return [[cuts[i], cuts[i + 1]] for i in range(0, len(cuts) - 1, 2)] if rng.random() < 0.8 else []


def all_flat_choices(problem: FlatProblem) -> Iterator[Ints]:
    """Every assignment."""
    return (np.array(choices, dtype=np.int64) for choices in product(*(range(size) for size in problem.sizes)))


def flat_optimum(problem: FlatProblem) -> float:
    """By enumeration; inf where nothing is allowed or fits."""
    found = (evaluate_flat(problem, choices) for choices in all_flat_choices(problem))
    return min((one.cost for one in found if one.excess <= 0), default=float("inf"))


def slow_cost_and_excess(problem: FlatProblem, choices: Ints) -> tuple[float, float]:
    """What `evaluate_flat` says, one term at a time."""
    cost = sum(float(problem.costs[problem.starts[v] + s]) for v, s in enumerate(choices))
    for (u, v), offset in zip(problem.ends, problem.offsets, strict=False):
        cost += float(problem.tables[offset + choices[u] * problem.sizes[v] + choices[v]])
    excess = []
    for time, room in enumerate(problem.room):
        held = 0.0
        for v, choice in enumerate(choices):
            for i in range(problem.span_starts[v], problem.span_starts[v + 1]):
                if problem.times[i, 0] <= time < problem.times[i, 1]:
                    held += float(problem.uses[problem.use_starts[i] + choice])
        excess.append(held - float(room))
    return cost, max(excess, default=0.0)
