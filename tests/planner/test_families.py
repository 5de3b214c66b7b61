"""Each named search chooses the best of what it may choose from, found by enumeration; and none of them beats the whole search."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.search import best_partitions, find_candidates
from alpa_hpc.stages.candidate import LogicalShapes, SubmeshShapes, mesh_shapes, submesh_shapes
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import StageChoice, check_stages, iteration_seconds
from alpa_hpc.stages.options import Partitions, RematChoice, SearchOptions, Strategies
from alpa_hpc.stages.pricing import StagePricer
from tests.planning import DEVICE, SEARCH, prepared

LIMIT = 100
CLUSTERS = tuple(
    ClusterSpec("test", *size, replace(DEVICE, memory=LIMIT), Link(40.0, 0.01), Link(10.0, 0.1)) for size in ((1, 4), (2, 2), (1, 6))
)
ALPA = replace(SEARCH, name="alpa", remat=RematChoice.SEARCH)
SEARCHES: Mapping[str, SearchOptions] = {
    "alpa": ALPA,
    "intra_only": replace(ALPA, partitions=Partitions.ONE_STAGE),
    "inter_only": replace(ALPA, submesh_shapes=SubmeshShapes.ONE_DEVICE),
    "pp_dp": replace(ALPA, strategies=Strategies.DATA_PARALLEL, logical_shapes=LogicalShapes.ROWS),
    "equal_layer": replace(ALPA, partitions=Partitions.EQUAL_LAYERS),
    "megatron": replace(ALPA, partitions=Partitions.GRID, strategies=Strategies.MEGATRON),
}
Stages = tuple[StageChoice, ...]


def step_of(num_layers: int) -> LayeredStep:
    """A step of so many layers, and microbatches of 4 rows."""
    step = prepared().step
    return replace(step, layers=tuple(replace(step.layers[min(index, 1)], index=index) for index in range(num_layers)))


def random_table(rng: np.random.Generator, num_layers: int, cluster: ClusterSpec) -> CostTable:
    """Costs of all shapes and remat choices, of very different stages; some do not fit, some are missing."""
    layers, scaling, noise, tight = rng.uniform(1, 12, num_layers), rng.uniform(0.3, 1.0), rng.uniform(0.0, 0.6), rng.choice([1.0, 6.0])
    cells: dict[tuple[int, int, Submesh], tuple[StageOption, ...]] = {}
    for start, stop in itertools.combinations(range(num_layers + 1), 2):
        for submesh in submesh_shapes(cluster, SubmeshShapes.ALL):
            options: list[StageOption] = []
            for shape, remat in itertools.product(mesh_shapes(submesh, LogicalShapes.ALL), (False, True)):
                work = layers[start:stop].sum() / submesh.num_devices**scaling * rng.uniform(1 - noise, 1 + noise) * (1.3 if remat else 1.0)
                held = 20 * tight * (stop - start) / submesh.num_devices * rng.uniform(0.5, 1.5)
                if rng.random() > 0.05:
                    options.append(StageOption(shape, remat, 0, work, 0.1 * work, held, 0.0 if remat else held / 4, 0.0, measured=False))
            cells[start, stop, submesh] = tuple(options)
    return CostTable(num_layers, cells, (0.0, *map(float, rng.uniform(0, 8, num_layers - 1))))


def every_partition(table: CostTable, cluster: ClusterSpec) -> Iterator[Stages]:
    """All ways to cover the layers with options on all devices."""

    def extend(start: int, devices: int) -> Iterator[Stages]:
        if start == table.num_layers and devices == 0:
            yield ()
        for (first, stop, submesh), options in table.options.items():
            if first == start and submesh.num_devices <= devices:
                for option, rest in itertools.product(options, list(extend(stop, devices - submesh.num_devices))):
                    yield (StageChoice(start, stop, submesh, option), *rest)

    return extend(0, cluster.num_devices)


def allows(name: str, stages: Stages, cluster: ClusterSpec) -> bool:
    """What the searches are, said of a whole partition."""
    shapes = [stage.option.shape for stage in stages]
    equal = len({stage.stop - stage.start for stage in stages}) == 1
    match name:
        case "alpa":
            return all(shape.rows > 1 or shape.cols == 1 for shape in shapes)  # (1, n) is the mirror image of (n, 1)
        case "intra_only":
            return len(stages) == 1 and shapes[0] != MeshShape(1, cluster.num_devices)
        case "inter_only":
            return all(shape == MeshShape(1, 1) for shape in shapes)
        case "pp_dp":
            return all(shape.cols == 1 and 4 % shape.rows == 0 for shape in shapes)
        case "equal_layer":
            return equal and all(shape.rows > 1 or shape.cols == 1 for shape in shapes)
        case _:
            alike = len({(shape, stage.submesh) for shape, stage in zip(shapes, stages, strict=True)}) == 1
            return equal and alike and 4 % shapes[0].rows == 0 and shapes[0].cols <= cluster.devices_per_node


def seconds_of(stages: Stages, table: CostTable, cluster: ClusterSpec, num_microbatches: int) -> float:
    """The objective; infinite where a stage does not fit."""
    held = [min(len(stages) - index, num_microbatches) for index in range(len(stages))]
    if any(stage.option.peak_bytes(count) > LIMIT for stage, count in zip(stages, held, strict=True)):
        return float("inf")
    return iteration_seconds(stages, table, cluster, num_microbatches)


def cut_to(search: SearchOptions, step: LayeredStep, table: CostTable, cluster: ClusterSpec) -> CostTable:
    """What the search prices of a table."""
    here = replace(cluster, device=replace(cluster.device, memory=10**12))  # no candidate is left out for the true step's state
    wanted = {(one.start, one.stop, one.submesh, one.shape, one.remat) for one in find_candidates(step, here, search)}
    priced = {cell: tuple(one for one in some if (*cell, one.shape, one.remat) in wanted) for cell, some in table.options.items()}
    return replace(table, options={cell: options for cell, options in priced.items() if options})


def found_by(search: SearchOptions, step: LayeredStep, table: CostTable, cluster: ClusterSpec) -> tuple[float, float]:
    """Seconds and lower bound of the best partition; infinite where there is none."""
    cut = cut_to(search, step, table, cluster)
    try:
        best = best_partitions(StagePricer(step, cluster), cut, search)
    except InfeasibleError:
        return float("inf"), float("inf")
    ranked = best[: search.num_best]
    assert list(ranked) == sorted(ranked, key=lambda one: one.objective_seconds) and len(best) <= search.num_best + 1
    for one in best:
        check_stages(one.stages, cut, cluster, step.num_microbatches, LIMIT)
        assert one.lower_bound == best[0].lower_bound
    return best[0].objective_seconds, best[0].lower_bound


def test_each_search_finds_the_best_of_what_it_allows_and_none_beats_the_whole_one() -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(90):
        rng = np.random.default_rng(seed)
        cluster, num_layers = CLUSTERS[seed % 3], (4, 4, 3)[seed % 3]
        step, table = step_of(num_layers), random_table(rng, num_layers, cluster)
        all_seconds = [(stages, seconds_of(stages, table, cluster, step.num_microbatches)) for stages in every_partition(table, cluster)]
        whole = found_by(ALPA, step, table, cluster)[0]
        for name, search in SEARCHES.items():
            if name == "inter_only" and num_layers < cluster.num_devices:
                continue
            expected = min((seconds for stages, seconds in all_seconds if allows(name, stages, cluster)), default=float("inf"))
            seconds, bound = found_by(search, step, table, cluster)
            assert seconds == pytest.approx(expected), (seed, name)
            assert bound <= seconds * (1 + 1e-12)
            if name != "megatron":  # whose shapes (1, n) differ from (n, 1), of which the whole search prices one
                assert whole <= seconds * (1 + 1e-9), (seed, name)
            outcomes[name, "none" if seconds == float("inf") else "worse" if seconds > whole * 1.001 else "as good"] += 1
    for name in SEARCHES:
        assert outcomes[name, "worse"] + outcomes[name, "as good"] > 3, f"{name} finds something"
        assert outcomes[name, "worse"] > 0 or name == "alpa", f"{name} restricts something"
    assert outcomes["equal_layer", "as good"] > 0 and outcomes["alpa", "none"] > 0


def test_where_plans_are_compared_the_best_of_equal_stages_is_among_them() -> None:
    added = 0
    for seed in range(150):
        cluster, num_layers = CLUSTERS[seed % 3], 6
        step = step_of(num_layers)
        table = cut_to(ALPA, step, random_table(np.random.default_rng(seed), num_layers, cluster), cluster)
        pricer = StagePricer(step, cluster)
        try:
            [equal, *_] = best_partitions(pricer, table, SEARCHES["equal_layer"])
        except InfeasibleError:
            continue
        compared = best_partitions(pricer, table, replace(ALPA, num_best=2))
        assert equal.stages in [one.stages for one in compared]
        assert len(best_partitions(pricer, table, replace(ALPA, num_best=1))) == 1, "nothing is compared"
        added += len(compared) == 3
    assert added > 5, added
