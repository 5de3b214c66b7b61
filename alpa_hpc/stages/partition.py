"""CostTable -> StagePartitions, best first: the paper's stage DP (section 5.2, Eq. 2-4, Algorithm 1), exact.

For a bound t on the slowest stage, F(t) is the least sum of stage seconds (`suffix_dp`); the optimum is the least F(t) + (B - 1) t over
the stage costs t. Where the paper scans t upwards and stops at B t >= best, this bisects: F never grows with t, so bounds between low
and high hold nothing below F(high) + (B - 1) low. Intervals are taken by that number, and dropped once it reaches the best known, less
`TOLERANCE` (relative: the paper's epsilon); hence the lower bound that partitions carry.

The first results are the best for each number of stages. If those are fewer than asked, they are filled with partitions that share
some first stages with these and then differ, finished as the DP finishes them, under looser and looser t; so as many come back as exist.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.objective import InFlight, StageChoice, StagePartition, one_forward_one_backward
from alpa_hpc.stages.suffix_dp import FloatArray, Path, StageGrid, completions, needed_bytes, stage_costs, stage_grid, suffix_values, trace
from alpa_hpc.units import bytes_words

TOLERANCE = 1e-6
MOST_HALVINGS = 200
LOOSER = (1.0, 1.05, 1.25, float("inf"))  # bounds on the slowest stage, as multiples of the best partition's, for alternatives to it


def partition_stages(
    table: CostTable,
    cluster: ClusterSpec,
    *,
    num_microbatches: int,
    memory_limit: float,
    num_best: int,
    in_flight: InFlight = one_forward_one_backward,
) -> tuple[StagePartition, ...]:
    """The best partition and up to `num_best` - 1 others that differ in stages or submeshes, by seconds of an iteration.

    `memory_limit` is in bytes a device. Every partition uses all devices of `cluster`. Raises InfeasibleError if none fits.
    """
    assert num_microbatches >= 1 and num_best >= 1, f"{num_microbatches} microbatches, {num_best} partitions asked"
    grid = stage_grid(table, cluster, num_microbatches, memory_limit, in_flight)
    found = _best_by_count(grid, num_microbatches, num_best)
    if not found:
        raise _what_is_missing(table, grid, needed_bytes(table, grid, num_microbatches, in_flight), memory_limit)
    for factor in LOOSER:
        if len(found) < num_best:
            found |= _alternatives(grid, num_microbatches, found, factor, num_best)
    ranked = sorted(found, key=lambda path: (found[path], len(path), path))[:num_best]
    lower_bound = min(unpruned_bound(grid, num_microbatches), found[ranked[0]])
    return tuple(StagePartition(_choices(table, grid, path), found[path], lower_bound) for path in ranked)


@dataclass(frozen=True, slots=True, eq=False)
class _Incumbents:
    """The best partition known for each number of stages - 1: its seconds (infinity where none is known) and its path."""

    grid: StageGrid
    num_microbatches: int
    num_best: int
    seconds: FloatArray
    paths: dict[int, Path]

    def reach(self, sums: FloatArray, bound: float) -> FloatArray:
        """Seconds that no partition goes below whose slowest stage takes `bound` or more and whose stages sum to `sums` or more."""
        return sums + (self.num_microbatches - 1) * bound

    def promising(self, reach: FloatArray) -> npt.NDArray[np.intp]:
        """The numbers of stages - 1 where `reach` leaves room for one of the `num_best` best."""
        limit = np.sort(self.seconds)[self.num_best - 1] if self.num_best <= self.seconds.size else np.inf
        return np.flatnonzero(reach < np.minimum(self.seconds, limit)[: reach.size] * (1 - TOLERANCE))

    def take(self, costs: FloatArray, values: FloatArray, counts: Iterable[int]) -> float:
        """Keep the paths behind `values` where they improve; the seconds of the slowest stage among all of them."""
        slowest = -np.inf
        for count in counts:
            path = trace(self.grid, costs, values, np.add, (count + 1, 0, self.grid.num_devices))
            slowest = max(slowest, *stage_costs(self.grid, costs, path))
            seconds = _iteration(self.grid, path, self.num_microbatches)
            if seconds < self.seconds[count]:
                self.seconds[count], self.paths[count] = seconds, path
        return slowest


def _best_by_count(grid: StageGrid, num_microbatches: int, num_best: int) -> dict[Path, float]:
    """The best partition for each of the `num_best` best numbers of stages, with its seconds (and perhaps some for other numbers)."""
    bounds = np.unique(grid.seconds[np.isfinite(grid.seconds)])
    known = _Incumbents(grid, num_microbatches, num_best, np.full(grid.max_stages, np.inf), {})
    values = suffix_values(grid, grid.seconds, np.add, grid.max_stages)
    unbounded = values[1:, 0, -1]
    known.take(grid.seconds, values, map(int, np.flatnonzero(np.isfinite(unbounded))))
    queue: list[tuple[float, int, int, FloatArray]] = [(0.0, 0, bounds.size, unbounded)] if known.paths else []
    while queue:  # (least reach, bounds[low:high], F above them by number of stages - 1)
        _, low, high, above = heapq.heappop(queue)
        counts = known.promising(known.reach(above, bounds[low]))
        if counts.size == 0:
            continue
        middle = (low + high) // 2
        costs = np.where(grid.seconds <= bounds[middle], grid.seconds, np.inf)
        values = suffix_values(grid, costs, np.add, int(counts[-1]) + 1)
        sums = values[1:, 0, -1]
        slowest = known.take(costs, values, map(int, known.promising(known.reach(sums, bounds[low]))))
        same_from = min(middle, int(np.searchsorted(bounds, slowest)))  # F does not change from here to the middle
        for start, stop, least in ((low, same_from, sums), (middle + 1, high, above)):
            if start < stop:
                heapq.heappush(queue, (float(known.reach(least, bounds[start]).min()), start, stop, least))
    return {path: float(known.seconds[count]) for count, path in known.paths.items()}


def unpruned_bound(grid: StageGrid, num_microbatches: int) -> float:
    """Seconds below which no partition goes, told without knowing any: nothing is dropped, so no fault of the search above can hide in it.

    Partitions whose slowest stage takes bounds[low:high] sum to F(bounds[high - 1]) or more. The interval whose reach is least is halved,
    until it is a single bound, where reach is exact, or `MOST_HALVINGS` are over.
    """
    bounds = np.unique(grid.seconds[np.isfinite(grid.seconds)])

    def least_sum(bound: float) -> float:
        costs = np.where(grid.seconds <= bound, grid.seconds, np.inf)
        return float(suffix_values(grid, costs, np.add, grid.max_stages)[1:, 0, -1].min())

    def interval(low: int, high: int, least: float) -> tuple[float, int, int, float]:
        return least + (num_microbatches - 1) * float(bounds[low]), low, high, least

    queue = [interval(0, bounds.size, least_sum(np.inf))]
    for _ in range(MOST_HALVINGS):
        reach, low, high, least = queue[0]
        if high - low == 1 or reach == np.inf:
            break
        middle = (low + high) // 2
        heapq.heapreplace(queue, interval(low, middle, least_sum(bounds[middle - 1])))
        heapq.heappush(queue, interval(middle, high, least))
    return queue[0][0]


def _alternatives(grid: StageGrid, num_microbatches: int, found: Mapping[Path, float], factor: float, num_best: int) -> dict[Path, float]:
    """Partitions until `num_best` are known, with every stage within `factor` of the best partition's slowest; fewer if no more exist."""
    slowest = max(stage_costs(grid, grid.seconds, min(found, key=lambda path: found[path])))
    costs = grid.seconds if factor == np.inf else np.where(grid.seconds <= slowest * factor, grid.seconds, np.inf)
    values = suffix_values(grid, costs, np.add, grid.max_stages)
    known = dict(found)
    queue: list[tuple[float, Path]] = []
    seen: set[Path] = set()

    def push(path: Path) -> None:
        if path not in seen:
            seen.add(path)
            heapq.heappush(queue, (_iteration(grid, path, num_microbatches), path))

    for count in np.flatnonzero(np.isfinite(values[1:, 0, -1])):
        push(trace(grid, costs, values, np.add, (int(count) + 1, 0, grid.num_devices)))
    while queue and len(known) < num_best:
        seconds, path = heapq.heappop(queue)
        known.setdefault(path, seconds)
        for other in _deviations(grid, costs, values, path, num_best):
            push(other)
    return known


def _deviations(grid: StageGrid, costs: FloatArray, values: FloatArray, path: Path, most: int) -> Iterator[Path]:
    """Paths as long as `path` that first differ from it at a stage, then run on at least cost; the `most` cheapest for each stage.

    Different first differences give different paths, so cutting at `most` leaves no fewer than `most` paths where more exist.
    """
    devices = grid.num_devices
    for index, (start, stop, position) in enumerate(path):
        left = len(path) - index
        table = completions(grid, costs, values, np.add, (left, start, devices))
        table[stop - 1 - start, position] = np.inf
        for flat in np.argsort(table, axis=None, kind="stable")[:most]:
            length, other = divmod(int(flat), len(grid.sizes))
            if np.isfinite(table[length, other]):
                first = (start, start + length + 1, other)
                rest = trace(grid, costs, values, np.add, (left - 1, start + length + 1, devices - grid.sizes[other]))
                yield (*path[:index], first, *rest)
        devices -= grid.sizes[position]


def _iteration(grid: StageGrid, path: Path, num_microbatches: int) -> float:
    seconds = stage_costs(grid, grid.seconds, path)
    return sum(seconds) + (num_microbatches - 1) * max(seconds)


def _choices(table: CostTable, grid: StageGrid, path: Path) -> tuple[StageChoice, ...]:
    """The stages of `path` with the options the grid chose for them."""
    stages: list[StageChoice] = []
    for index, (start, stop, position) in enumerate(path):
        submesh = grid.submeshes[position]
        chosen = grid.options[len(path) - index - 1, start, stop - 1, position]
        stages.append(StageChoice(start, stop, submesh, table.options[start, stop, submesh][chosen]))
    return tuple(stages)


def _what_is_missing(table: CostTable, grid: StageGrid, needed: FloatArray, memory_limit: float) -> InfeasibleError:
    """Why no partition exists: the one that needs the least memory a device, its largest stage and what that lacks; or no cover at all."""
    values = suffix_values(grid, needed, np.maximum, grid.max_stages)
    ends = values[1:, 0, -1]
    if not np.isfinite(ends).any():
        return InfeasibleError(
            f"no partition of {table.num_layers} layers uses all devices of the cluster: the cost table has options for "
            f"{len(table.options)} of its cells, and they do not cover the layers. Price more candidates, or more submesh shapes."
        )
    path = trace(grid, needed, values, np.maximum, (int(ends.argmin()) + 1, 0, grid.num_devices))
    peaks = stage_costs(grid, needed, path)
    worst = peaks.index(max(peaks))
    start, stop, position = path[worst]
    submesh = grid.submeshes[position]
    missing = peaks[worst] - memory_limit
    stages = "1 stage" if len(path) == 1 else f"{len(path)} stages"
    return InfeasibleError(
        f"no partition fits: {bytes_words(missing)} a device are missing at least. "
        f"The leanest has {stages}; its layers {start} to {stop - 1} on {submesh.num_nodes} x {submesh.devices_per_node} devices "
        f"need {bytes_words(peaks[worst])} a device, the limit is {bytes_words(memory_limit)}. "
        "Use more devices, smaller microbatches, remat, or smaller layers.",
        missing,
    )
