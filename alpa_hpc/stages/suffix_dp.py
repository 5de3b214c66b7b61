"""(CostTable, ClusterSpec) -> StageGrid -> values of every suffix of layers: the paper's recurrence (Eq. 3) on numpy arrays.

    F[s, i, d] = min over stop j > i and submesh m of  cost[s, i, j, m] (+) F[s - 1, j, d - devices(m)],    F[0, L, 0] = 0

runs layers i.. in s stages on exactly d devices; (+) is addition for seconds, maximum for bytes. Among the options of a cell that fit
with the microbatches in flight when s stages are left, the fastest is best for every bound on the slowest stage, so options are
reduced to one a (s, i, j, m) before the search. Whether a stage's input crosses nodes follows from d, so `cost` has both cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from alpa_hpc.cluster.hardware import ClusterSpec, Submesh
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import InFlight, crosses_nodes, option_seconds, transfer_seconds

FloatArray = npt.NDArray[np.float64]
Path = tuple[tuple[int, int, int], ...]  # (start, stop, position in StageGrid.submeshes) a stage


@dataclass(frozen=True, slots=True, eq=False)
class StageGrid:
    """Costs by (stages to the end - 1, start, stop - 1, submesh, crosses nodes); infinity where nothing fits.

    Devices are counted in the largest unit that divides all sizes: `sizes` and `num_devices` are so many units. `crossing[m, d]` is 1 if a
    stage on submesh m that has d units from it to the end receives from another node, else 0.
    """

    submeshes: tuple[Submesh, ...]
    sizes: tuple[int, ...]
    num_devices: int
    crossing: npt.NDArray[np.intp]
    seconds: FloatArray
    options: npt.NDArray[np.intp]

    @property
    def max_stages(self) -> int:
        """The most stages a partition can have."""
        return self.seconds.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers to partition."""
        return self.seconds.shape[1]


def stage_grid(table: CostTable, cluster: ClusterSpec, num_microbatches: int, memory_limit: float, in_flight: InFlight) -> StageGrid:
    """The fastest fitting option of each cell for each number of stages left, with its seconds (t_i of `objective`)."""
    submeshes = tuple(sorted({submesh for _, _, submesh in table.options}, key=lambda submesh: (submesh.num_devices, submesh)))
    assert all(submesh.num_devices <= cluster.num_devices for submesh in submeshes), "a submesh of the table is larger than the cluster"
    max_stages = min(table.num_layers, cluster.num_devices)
    held = _held(max_stages, num_microbatches, in_flight)
    cells = (max_stages, table.num_layers, table.num_layers, len(submeshes))
    seconds, chosen = np.full(cells, np.inf), np.zeros(cells, np.intp)
    position = {submesh: index for index, submesh in enumerate(submeshes)}
    for (start, stop, submesh), options in table.options.items():
        if options:
            cell = (slice(None), start, stop - 1, position[submesh])
            seconds[cell], chosen[cell] = _fastest_fitting(options, held, num_microbatches, memory_limit)
    unit = gcd(cluster.num_devices, *(submesh.num_devices for submesh in submeshes))
    return StageGrid(
        submeshes,
        tuple(submesh.num_devices // unit for submesh in submeshes),
        cluster.num_devices // unit,
        _crossing(cluster, submeshes, unit),
        seconds[..., None] + _transfers(table, cluster, submeshes)[:, None],
        chosen,
    )


def needed_bytes(table: CostTable, grid: StageGrid, num_microbatches: int, in_flight: InFlight) -> FloatArray:
    """The least bytes a device of each cell, in the form of `grid.seconds`: what the memory limit would have to be."""
    held = _held(grid.max_stages, num_microbatches, in_flight)
    needed = np.full(grid.seconds.shape, np.inf)
    for (start, stop, submesh), options in table.options.items():
        if options:
            peaks, seconds = _peaks(options, held), np.array([option_seconds(option, num_microbatches) for option in options])
            needed[:, start, stop - 1, grid.submeshes.index(submesh)] = np.where(np.isinf(seconds), np.inf, peaks).min(axis=1)[:, None]
    return needed


def suffix_values(grid: StageGrid, costs: FloatArray, combine: np.ufunc, max_stages: int) -> FloatArray:
    """F[s, i, d] for s <= max_stages, i <= num_layers, d <= num_devices, with `costs` in the form of `grid.seconds`."""
    num_layers, num_devices = grid.num_layers, grid.num_devices
    values = np.full((max_stages + 1, num_layers + 1, num_devices + 1), np.inf)
    values[0, num_layers, 0] = 0.0
    usable = np.any(np.isfinite(costs[:max_stages, ..., 0]), axis=0)
    for start in reversed(range(num_layers)):
        most = min(max_stages, num_layers - start)
        for position, size in enumerate(grid.sizes):
            stops = np.flatnonzero(usable[start, :, position])
            if stops.size == 0:
                continue
            first, stop = stops[0], stops[-1] + 1
            rest = values[:most, first + 1 : stop + 1, : num_devices + 1 - size]
            cost = costs[:most, start, first:stop, position][..., grid.crossing[position, size:]]
            target = values[1 : most + 1, start, size:]
            np.minimum(target, combine(rest, cost).min(axis=1), out=target)
    return values


def completions(grid: StageGrid, costs: FloatArray, values: FloatArray, combine: np.ufunc, state: tuple[int, int, int]) -> FloatArray:
    """Value at `state` = (stages, start, units of devices) of each first choice, by (stop - 1 - start, submesh)."""
    stages, start, devices = state
    table = np.full((grid.num_layers - start, len(grid.sizes)), np.inf)
    for position, size in enumerate(grid.sizes):
        if size <= devices:
            cost = costs[stages - 1, start, start:, position, grid.crossing[position, devices]]
            table[:, position] = combine(values[stages - 1, start + 1 :, devices - size], cost)
    return table


def trace(grid: StageGrid, costs: FloatArray, values: FloatArray, combine: np.ufunc, state: tuple[int, int, int]) -> Path:
    """The stages behind the finite value at `state`; of equals the shortest stage, then the smallest submesh."""
    stages, start, devices = state
    path: list[tuple[int, int, int]] = []
    while stages > 0:
        first = completions(grid, costs, values, combine, (stages, start, devices))
        length, position = divmod(int(first.argmin()), len(grid.sizes))
        path.append((start, start + length + 1, position))
        stages, start, devices = stages - 1, start + length + 1, devices - grid.sizes[position]
    assert start == grid.num_layers and devices == 0, "the trace of a finite value ends at the end"
    return tuple(path)


def stage_costs(grid: StageGrid, costs: FloatArray, path: Path) -> tuple[float, ...]:
    """The cost of each stage of a complete `path`."""
    found: list[float] = []
    devices = grid.num_devices
    for index, (start, stop, position) in enumerate(path):
        found.append(float(costs[len(path) - index - 1, start, stop - 1, position, grid.crossing[position, devices]]))
        devices -= grid.sizes[position]
    return tuple(found)


def _held(max_stages: int, num_microbatches: int, in_flight: InFlight) -> FloatArray:
    """Microbatches in flight by (stages to the end - 1)."""
    return np.array([in_flight(stages, num_microbatches) for stages in range(1, max_stages + 1)], np.float64)


def _crossing(cluster: ClusterSpec, submeshes: Sequence[Submesh], unit: int) -> npt.NDArray[np.intp]:
    before = range(cluster.num_devices, -1, -unit)
    crosses = [[crosses_nodes(cluster, submesh, offset) for offset in before] for submesh in submeshes]
    return np.array(crosses, np.intp).reshape(len(submeshes), len(before))


def _fastest_fitting(
    options: Sequence[StageOption], held: FloatArray, num_microbatches: int, memory_limit: float
) -> tuple[FloatArray, npt.NDArray[np.intp]]:
    seconds = np.array([option_seconds(option, num_microbatches) for option in options])
    fitting = np.where(_peaks(options, held) <= memory_limit, seconds, np.inf)
    return fitting.min(axis=1), fitting.argmin(axis=1)


def _peaks(options: Sequence[StageOption], held: FloatArray) -> FloatArray:
    """Bytes a device by (entry of `held`, option)."""
    fixed, inflight, workspace = np.array([(option.fixed_bytes, option.inflight_bytes, option.workspace_bytes) for option in options]).T
    return fixed + held[:, None] * inflight + workspace


def _transfers(table: CostTable, cluster: ClusterSpec, submeshes: Sequence[Submesh]) -> FloatArray:
    """Transfer seconds by (start, submesh, crosses nodes)."""
    seconds = [
        [[transfer_seconds(cluster, submesh, num_bytes, crosses=crosses) for crosses in (False, True)] for submesh in submeshes]
        for num_bytes in table.boundary_bytes
    ]
    return np.array(seconds).reshape(table.num_layers, len(submeshes), 2)
