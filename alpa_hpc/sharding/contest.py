"""A file of the ASPLOS 2025 contest on intra-operator parallelism (JSON, plain or gzip) -> ContestProblem: FlatProblem and exact integers.

{"problem": {"nodes": {"intervals": [[begin, end], ..], "costs": [[..], ..], "usages": [[..], ..]},
             "edges": {"nodes": [[u, v], ..], "costs": [[row-major], ..]}, "usage_limit": bytes}}
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from alpa_hpc.errors import StoreError
from alpa_hpc.kernels import Ints
from alpa_hpc.sharding.flat import FlatProblem, starts_of

INFINITE = 10**17  # a cost from here on means "not allowed"; sums of smaller ones stay exact in float64


@dataclass(frozen=True, slots=True, eq=False)
class ContestProblem:
    """`flat` for the solver, the file's own integers for the check."""

    name: str
    flat: FlatProblem
    costs: Ints
    tables: Ints
    usages: Ints
    intervals: Ints
    usage_limit: int


def read_contest(path: Path) -> ContestProblem:
    """Read one file. Raises StoreError where it is none of this format."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        problem = json.loads(text)["problem"]
        return _parse(path.name.split(".")[0], problem)
    except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise StoreError(f"{path} is not a problem in the contest's format: {error!r}") from error


def _parse(name: str, problem: dict[str, Any]) -> ContestProblem:
    nodes, edges = problem["nodes"], problem["edges"]
    costs, usages, tables = (_joined(rows) for rows in (nodes["costs"], nodes["usages"], edges["costs"]))
    starts = starts_of([len(row) for row in nodes["costs"]])
    offsets = starts_of([len(row) for row in edges["costs"]])
    ends = np.array(edges["nodes"], dtype=np.int64).reshape(-1, 2)
    intervals = np.array(nodes["intervals"], dtype=np.int64).reshape(-1, 2)
    sizes = np.diff(starts)
    if len(usages) != len(costs) or len(intervals) != len(sizes) or (sizes[ends].prod(axis=1) != np.diff(offsets)).any():
        raise ValueError("the lengths of its lists do not fit together")
    holding = np.flatnonzero(intervals[:, 1] > intervals[:, 0])
    num_times = int(intervals[:, 1].max(initial=0))
    own = np.repeat(intervals[:, 1] > intervals[:, 0], sizes)
    flat = FlatProblem(
        starts=starts,
        costs=_allowed(costs),
        ends=ends,
        offsets=offsets,
        tables=_allowed(tables),
        span_starts=starts_of((intervals[:, 1] > intervals[:, 0]).astype(np.int64)),
        times=intervals[holding],
        use_starts=starts_of(sizes[holding]),
        uses=usages[own].astype(np.float64),
        room=np.full(num_times, float(problem["usage_limit"])),
        labels=np.arange(num_times),
    )
    return ContestProblem(name, flat, costs, tables, usages, intervals, int(problem["usage_limit"]))


def _joined(rows: Sequence[Sequence[int]]) -> Ints:
    lengths = sum(map(len, rows))
    joined = np.empty(lengths, dtype=np.int64)
    for end, row in zip(accumulate(map(len, rows)), rows, strict=True):
        joined[end - len(row) : end] = row
    return joined


def _allowed(costs: Ints) -> Any:
    return np.where(costs >= INFINITE, np.inf, costs.astype(np.float64))


def exact_cost_and_peak(problem: ContestProblem, choices: Ints) -> tuple[int, int]:
    """Cost of an assignment and the most bytes it holds at any time, in whole numbers, from the file's own integers."""
    flat = problem.flat
    chosen = flat.starts[:-1] + choices
    cost = sum(problem.costs[chosen].tolist())
    columns = flat.sizes[flat.ends[:, 1]] if len(flat.ends) else np.zeros(0, dtype=np.int64)
    pairs = flat.offsets[:-1] + choices[flat.ends[:, 0]] * columns + choices[flat.ends[:, 1]]
    cost += sum(problem.tables[pairs].tolist())
    change = np.zeros(int(problem.intervals[:, 1].max(initial=0)) + 1, dtype=np.int64)
    holding = problem.intervals[:, 1] > problem.intervals[:, 0]
    np.add.at(change, problem.intervals[holding, 0], problem.usages[chosen][holding])
    np.subtract.at(change, problem.intervals[holding, 1], problem.usages[chosen][holding])
    return cost, int(np.cumsum(change).max())
