"""The stage DP alone: ours against a plain implementation of the paper's (its Algorithm 1, Eq. 3), on tables as large as real ones.

    python benchmarks/stage_dp.py [--seconds 60] [--seed 0] [POINT ...]

A point is layers x nodes x devices a node x microbatches, such as 16x8x8x1024 (gpt39b). Its table is drawn: a stage takes its layers' FLOP
by the speed of its devices, less what splitting it further loses, with noise, and its memory decides which stages fit. The plain one scans
t_max over all stage costs from small to large, stops once B t_max is no better than what is known, and fills F[s, k, d] in loops. Where it
does not end in time it is printed as "> N s". Both sides see the same tables, and must find the same optimum; the last line is JSON.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isclose

import numpy as np

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.stages.candidate import submesh_shapes
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import one_forward_one_backward, option_seconds
from alpa_hpc.stages.options import SubmeshShapes
from alpa_hpc.stages.partition import partition_stages

POINTS = ("8x1x4x64", "8x2x8x256", "16x4x8x512", "16x8x8x1024", "32x8x8x1024", "16x128x8x96", "16x384x8x512")
MEMORY = 80e9  # bytes a device
SAME = 1e-5  # relative; ours stops within 1e-6 of the optimum

Fastest = Mapping[tuple[int, int, int, Submesh], float]  # (stages from this one to the end, start, stop, submesh) -> seconds


@dataclass(frozen=True, slots=True)
class Row:
    """A point: cells of its table, seconds of both sides, iteration seconds of what they found; infinity = did not end in time."""

    point: str
    cells: int
    distinct_costs: int
    ours_seconds: float
    plain_seconds: float
    ours: float
    plain: float

    @property
    def is_same(self) -> bool:
        """Whether both found the same, where both ended."""
        return self.plain == inf or isclose(self.ours, self.plain, rel_tol=SAME)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Our stage DP against a plain one.")
    parser.add_argument("points", nargs="*", default=POINTS, metavar="POINT")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the plain side for each point")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    run_point("4x1x2x4", 10.0, 0)  # what the first call of a process takes more is not the DP's
    print(f"{'layers x nodes x devices x B':30}{'cells':>8}{'costs':>8}{'ours':>12}{'plain':>12}{'ratio':>10}   iteration (s): ours, plain")
    rows = [shown(run_point(point, options.seconds, options.seed)) for point in options.points]
    print(json.dumps([asdict(row) | {"plain": row.plain if row.plain < inf else None, "same": row.is_same} for row in rows]))
    return 0 if all(row.is_same for row in rows) else 1


def shown(row: Row) -> Row:
    more = "> " if row.plain == inf else ""
    ratio = f"{more}{row.plain_seconds / row.ours_seconds:.0f}"
    plain = f"{row.plain:.6g}" if row.plain < inf else "none"
    print(
        f"{row.point:30}{row.cells:8}{row.distinct_costs:8}{row.ours_seconds:10.3f} s{more + f'{row.plain_seconds:.2f}':>10} s{ratio:>10}"
        f"   {row.ours:.6g}  {plain}{'' if row.is_same else '  DIFFERENT'}",
        flush=True,
    )
    return row


def run_point(point: str, limit_seconds: float, seed: int) -> Row:
    num_layers, num_nodes, devices, num_microbatches = map(int, point.split("x"))
    device = DeviceSpec("drawn", int(MEMORY), 1e14, 2e14, 1e12, 0.5)
    cluster = ClusterSpec(point, num_nodes, devices, device, Link(2e11, 0.0), Link(2e10, 0.0))
    table = drawn_table(cluster, num_layers, seed)
    started = time.monotonic()
    best = partition_stages(table, cluster, num_microbatches=num_microbatches, memory_limit=MEMORY, num_best=1)[0]
    ours_seconds = time.monotonic() - started
    started = time.monotonic()
    plain = plain_optimum(table, cluster.num_devices, num_microbatches, started + limit_seconds)
    costs = {option.seconds for cell in table.options.values() for option in cell}
    return Row(point, len(table.options), len(costs), ours_seconds, time.monotonic() - started, best.objective_seconds, plain)


def drawn_table(cluster: ClusterSpec, num_layers: int, seed: int) -> CostTable:
    """A table with three options a cell, from fast and large to slow and lean; nothing has to be sent between stages."""
    draw = np.random.default_rng(seed)
    layers = draw.uniform(0.8, 1.2, num_layers)
    total = 0.4 * cluster.num_devices * MEMORY  # bytes of the model's state
    cells: dict[tuple[int, int, Submesh], tuple[StageOption, ...]] = {}
    for start, stop in itertools.combinations(range(num_layers + 1), 2):
        work = float(layers[start:stop].sum())
        for submesh in submesh_shapes(cluster, SubmeshShapes.POWER_OF_TWO):
            count = submesh.num_devices
            shape = MeshShape(submesh.num_nodes, submesh.devices_per_node)
            state = total * work / layers.sum() / count
            options: list[StageOption] = []
            for variant, (slower, leaner) in enumerate(((1.0, 1.0), (1.1, 0.8), (1.3, 0.6))):
                seconds = slower * work / count**0.93 * draw.uniform(0.97, 1.03)
                held = state * leaner
                options.append(
                    StageOption(
                        shape,
                        remat=True,
                        variant=variant,
                        seconds=seconds,
                        seconds_once=0.0,
                        fixed_bytes=held,
                        inflight_bytes=0.02 * held,
                        workspace_bytes=0.0,
                        measured=False,
                    )
                )
            cells[start, stop, submesh] = tuple(options)
    return CostTable(num_layers, cells, (0.0,) * num_layers)


def plain_optimum(table: CostTable, num_devices: int, num_microbatches: int, deadline: float) -> float:
    """The paper's Algorithm 1 in loops; infinity where time ran out."""
    fastest = fastest_fitting(table, min(table.num_layers, num_devices), num_microbatches)
    best = inf
    for bound in sorted(set(fastest.values())):
        if num_microbatches * bound >= best:
            return best
        if time.monotonic() > deadline:
            return inf
        total = least_sum(fastest, table.num_layers, num_devices, bound, deadline)
        best = min(best, total + (num_microbatches - 1) * bound)
    return best


def fastest_fitting(table: CostTable, max_stages: int, num_microbatches: int) -> Fastest:
    """Seconds of each cell's fastest option that fits with so many stages to the end."""
    found: dict[tuple[int, int, int, Submesh], float] = {}
    for left in range(1, max_stages + 1):
        held = one_forward_one_backward(left, num_microbatches)
        for (start, stop, submesh), options in table.options.items():
            fitting = [option_seconds(one, num_microbatches) for one in options if one.peak_bytes(held) <= MEMORY]
            if fitting:
                found[left, start, stop, submesh] = min(fitting)
    return found


def least_sum(fastest: Fastest, num_layers: int, num_devices: int, bound: float, deadline: float) -> float:
    """Eq. 3: F[s, k, d] of stages of at most `bound` seconds that run layers k.. on d devices in s stages."""
    by_place: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for (left, start, stop, submesh), seconds in fastest.items():
        if seconds <= bound:
            by_place.setdefault((left, start), []).append((stop, submesh.num_devices, seconds))
    values: dict[tuple[int, int, int], float] = {(0, num_layers, 0): 0.0}
    for left in range(1, min(num_layers, num_devices) + 1):
        if time.monotonic() > deadline:
            return inf
        for start in range(num_layers):
            for stop, count, seconds in by_place.get((left, start), ()):
                for devices in range(count, num_devices + 1):
                    rest = values.get((left - 1, stop, devices - count), inf)
                    if rest + seconds < values.get((left, start, devices), inf):
                        values[left, start, devices] = rest + seconds
    return min((values.get((left, 0, num_devices), inf) for left in range(1, num_layers + 1)), default=inf)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
