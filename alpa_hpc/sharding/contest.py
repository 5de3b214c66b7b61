"""A file of the ASPLOS 2025 contest on intra-operator parallelism (JSON, plain or gzip) -> ContestProblem: FlatProblem and exact integers.

{"problem": {"nodes": {"intervals": [[begin, end], ..], "costs": [[..], ..], "usages": [[..], ..]},
             "edges": {"nodes": [[u, v], ..], "costs": [[row-major], ..]}, "usage_limit": bytes}}
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from alpa_hpc.errors import StoreError
from alpa_hpc.kernels import Ints
from alpa_hpc.sharding.flat import FlatProblem, starts_of

INFINITE = 10**18  # a cost from here on means "not allowed"
LARGEST = 2**53  # whole numbers up to here are exact in float64
Rows = list[list[int]]


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
    """Read one file. Raises StoreError where it cannot be read or is none of this format; it says what was found and expected."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Expected a file of the contest, JSON, plain or gzip") from error
    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        return _parse(path.name.split(".")[0], json.loads(text))
    except (EOFError, zlib.error, gzip.BadGzipFile, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} is not a problem in the contest's format: no whole JSON document ({error}). Fetch it again") from error
    except _FormatError as error:
        raise StoreError(f"{path} is not a problem in the contest's format: {error}") from error


class _FormatError(Exception):
    """What a document says that no problem says."""


def _expect(is_so: object, otherwise: str) -> None:
    if not is_so:
        raise _FormatError(otherwise)


def _parse(name: str, document: object) -> ContestProblem:
    node_costs, node_usages, node_times = (_rows(document, "nodes", key) for key in ("costs", "usages", "intervals"))
    edge_nodes, edge_costs = (_rows(document, "edges", key) for key in ("nodes", "costs"))
    limit = cast(int, _field(document, "problem", "usage_limit"))
    _expect(type(limit) is int and 0 <= limit <= LARGEST, f"usage_limit is {limit!r}, expected a whole number of bytes from 0 to 2^53")
    _check_nodes(node_costs, node_usages, node_times)
    _check_edges(edge_nodes, edge_costs, list(map(len, node_costs)))
    costs, usages, tables = map(_joined, (node_costs, node_usages, edge_costs))
    ends = np.array(edge_nodes, dtype=np.int64).reshape(-1, 2)
    intervals = np.array(node_times, dtype=np.int64)
    return ContestProblem(
        name,
        _flat(starts_of(list(map(len, node_costs))), costs, ends, starts_of(list(map(len, edge_costs))), tables, intervals, usages, limit),
        costs,
        tables,
        usages,
        intervals,
        limit,
    )


def _flat(starts: Ints, costs: Ints, ends: Ints, offsets: Ints, tables: Ints, intervals: Ints, usages: Ints, limit: int) -> FlatProblem:
    """The problem for the solver; of time it keeps where something begins or ends, whatever the numbers between."""
    is_held, sizes = intervals[:, 1] > intervals[:, 0], np.diff(starts)
    changes = np.unique(intervals[is_held])
    return FlatProblem(
        starts=starts,
        costs=_allowed(costs),
        ends=ends,
        offsets=offsets,
        tables=_allowed(tables),
        span_starts=starts_of(is_held.astype(np.int64)),
        times=np.searchsorted(changes, intervals[is_held]),
        use_starts=starts_of(sizes[is_held]),
        uses=usages[np.repeat(is_held, sizes)].astype(np.float64),
        room=np.full(max(len(changes) - 1, 0), float(limit)),
        labels=changes[:-1],
    )


def _field(document: object, *keys: str) -> object:
    for depth, key in enumerate(keys):
        found = cast(dict[str, object], document).get(key) if isinstance(document, dict) else None
        _expect(found is not None, f"it has no {'.'.join(keys[: depth + 1])}")
        document = found
    return document


def _rows(document: object, part: str, key: str) -> Rows:
    """A list of lists of whole numbers, and nothing that would only be taken for one."""
    name, rows = f"{part}.{key}", _field(document, "problem", part, key)
    _expect(isinstance(rows, list) and set(map(type, cast(list[object], rows))) <= {list}, f"{name} is no list of lists")
    found = cast(Rows, rows)
    others = {kind.__name__ for kind in set(map(type, chain.from_iterable(found))) - {int}}
    _expect(not others, f"{name} holds values of type {', '.join(sorted(others))}, expected whole numbers alone")
    return found


def _check_nodes(costs: Rows, usages: Rows, times: Rows) -> None:
    _expect(costs, "it has no nodes")
    counts = f"nodes has {len(costs)} costs, {len(usages)} usages and {len(times)} intervals, expected one of each a node"
    _expect(len(costs) == len(usages) == len(times), counts)
    for node, (row, held, time) in enumerate(zip(costs, usages, times, strict=True)):
        lengths = f"node {node} has {len(row)} costs and {len(held)} usages, expected as many of both, at least one"
        _expect(row and len(row) == len(held), lengths)
        _expect(min(held) >= 0 and max(held) <= LARGEST, f"node {node} has usages from {min(held)} to {max(held)}, expected 0 to 2^53")
        in_order = len(time) == 2 and 0 <= time[0] <= time[1] < 2**62
        _expect(in_order, f"node {node} has the interval {time}, expected [begin, end], 0 <= begin <= end")
        _check_costs(row, f"node {node}")


def _check_edges(ends: Rows, costs: Rows, sizes: list[int]) -> None:
    _expect(len(ends) == len(costs), f"edges has {len(ends)} pairs of nodes and {len(costs)} tables, expected one of each an edge")
    for edge, (pair, table) in enumerate(zip(ends, costs, strict=True)):
        are_nodes = len(pair) == 2 and pair[0] != pair[1] and 0 <= min(pair) and max(pair) < len(sizes)
        _expect(are_nodes, f"edge {edge} has the ends {pair}, expected two different nodes of 0 to {len(sizes) - 1}")
        expected = sizes[pair[0]] * sizes[pair[1]]
        lengths = f"edge {edge} has {len(table)} costs, expected {expected}: the lengths do not fit together"
        _expect(len(table) == expected, lengths)
        _check_costs(table, f"edge {edge}")


def _check_costs(row: Sequence[int], name: str) -> None:
    if -LARGEST <= min(row) and max(row) <= LARGEST:
        return
    wrong = [cost for cost in row if cost < -LARGEST or LARGEST < cost < INFINITE or cost >= 2**63]
    _expect(not wrong, f"{name} costs {wrong[:1]}: beyond 2^53 no sum is exact (10^18 or more, within 63 bits, says: not allowed)")


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
    is_held = problem.intervals[:, 1] > problem.intervals[:, 0]
    begins, ends = problem.intervals[is_held].T
    times = np.unique(problem.intervals[is_held])
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, np.searchsorted(times, begins), problem.usages[chosen][is_held])
    np.subtract.at(change, np.searchsorted(times, ends), problem.usages[chosen][is_held])
    return cost, int(np.cumsum(change).max(initial=0))
