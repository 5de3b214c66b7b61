"""The stage DP against exhaustive enumeration that shares no code with it, its lower bound, its alternatives and its error."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.stages.cost_table import CostTable, StageOption, pareto
from alpa_hpc.stages.objective import check_stages, iteration_seconds
from alpa_hpc.stages.partition import partition_stages
from alpa_hpc.stages.placement import place

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)
Signature = tuple[tuple[int, int, Submesh], ...]


@dataclass(frozen=True)
class Case:
    table: CostTable
    cluster: ClusterSpec
    num_microbatches: int
    memory_limit: float


def cluster_of(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    return ClusterSpec("test", num_nodes, devices_per_node, DEVICE, Link(4.0, 0.01), Link(1.0, 0.1))


def submeshes_of(cluster: ClusterSpec) -> list[Submesh]:
    width = cluster.devices_per_node
    return [Submesh(1, size) for size in range(1, width + 1) if width % size == 0] + [
        Submesh(n, width) for n in range(2, cluster.num_nodes + 1)
    ]


def random_case(seed: int, num_layers: int, cluster: ClusterSpec, num_microbatches: int) -> Case:
    """Stages that grow faster than their layers and scale worse than their devices, so that pipelines are often best.

    Costs have ties, infinities and missing cells; limits go from hopeless to loose.
    """
    rng = np.random.default_rng(seed)
    digits = int(rng.integers(0, 4))  # 0: whole seconds, so many ties
    growth, scaling, noise = rng.uniform(1.0, 2.0), rng.uniform(0.3, 1.0), rng.uniform(0.0, 0.5)
    layers, gaps = rng.uniform(1, 4, num_layers), rng.choice([0.0, 0.1])
    cells: dict[tuple[int, int, Submesh], tuple[StageOption, ...]] = {}
    for start, stop in itertools.combinations(range(num_layers + 1), 2):
        for submesh in submeshes_of(cluster):
            if rng.random() < gaps:
                continue
            options: list[StageOption] = []
            for variant in range(int(rng.integers(0 if gaps else 1, 3))):
                base = layers[start:stop].sum() ** growth / submesh.num_devices**scaling
                factors = rng.uniform(1 - noise, 1 + noise, 2) * (1.0, rng.uniform(0, 2))
                work, once = map(float, np.round(base * factors, digits))
                fixed, inflight, workspace = map(float, np.round(rng.uniform(0, 4, 3) * (stop - start) / submesh.num_devices, digits))
                seconds = float("inf") if rng.random() < gaps / 2 else work
                shape = MeshShape(1, submesh.num_devices)
                options.append(StageOption(shape, False, variant, seconds, once, fixed, inflight, workspace, False))
            cells[start, stop, submesh] = tuple(options)
    boundaries = (0.0, *map(float, np.round(rng.uniform(0, rng.choice([0.5, 4.0]), num_layers - 1), digits)))
    limit = float(rng.choice([3, 6, 10, 15, 1000, 1000, 1000]))
    return Case(CostTable(num_layers, cells, boundaries), cluster, num_microbatches, limit)


def every_partition(case: Case) -> Iterator[tuple[Signature, tuple[StageOption, ...]]]:
    """All ways to cover the layers with options on all devices, fitting or not."""

    def extend(start: int, devices: int) -> Iterator[tuple[tuple[tuple[int, int, Submesh], StageOption], ...]]:
        if start == case.table.num_layers:
            if devices == 0:
                yield ()
            return
        for stop in range(start + 1, case.table.num_layers + 1):
            for submesh in submeshes_of(case.cluster):
                if submesh.num_devices <= devices:
                    for option in case.table.options.get((start, stop, submesh), ()):
                        for rest in extend(stop, devices - submesh.num_devices):
                            yield (((start, stop, submesh), option), *rest)

    for stages in extend(0, case.cluster.num_devices):
        yield tuple(cell for cell, _ in stages), tuple(option for _, option in stages)


def seconds_of(case: Case, cells: Signature, options: tuple[StageOption, ...]) -> float:
    """The objective written out again; infinite where a stage does not fit."""
    cluster, num_microbatches = case.cluster, case.num_microbatches
    offset, times = 0, list[float]()
    for index, ((start, _, submesh), option) in enumerate(zip(cells, options, strict=True)):
        held = min(len(cells) - index, num_microbatches)
        if option.fixed_bytes + held * option.inflight_bytes + option.workspace_bytes > case.memory_limit:
            return float("inf")
        moved = case.table.boundary_bytes[start]
        own = cluster.intra_node.bandwidth * submesh.num_devices
        first_node, last_node = (device // cluster.devices_per_node for device in (offset - 1, offset + submesh.num_devices - 1))
        if moved == 0:
            transfer = 0.0
        elif first_node == last_node:
            transfer = 2 * (moved / own + cluster.intra_node.latency)
        else:
            transfer = 2 * (moved / min(own, cluster.inter_node.bandwidth * submesh.num_nodes) + cluster.inter_node.latency)
        times.append(option.seconds + option.seconds_once / num_microbatches + transfer)
        offset += submesh.num_devices
    return sum(times) + (num_microbatches - 1) * max(times)


def enumerate_best(case: Case) -> dict[Signature, float]:
    """The least seconds of each partition that fits."""
    best: dict[Signature, float] = defaultdict(lambda: float("inf"))
    for cells, options in every_partition(case):
        best[cells] = min(best[cells], seconds_of(case, cells, options))
    return {cells: seconds for cells, seconds in best.items() if seconds < float("inf")}


CLUSTERS = [(2, 4), (2, 2), (1, 4), (3, 2), (2, 3), (2, 4), (2, 2), (3, 1), (1, 2), (1, 3), (2, 1), (1, 1)]
cases = st.builds(
    random_case,
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 4, 5, 3, 5, 4, 2, 1]),
    st.sampled_from(CLUSTERS).map(lambda sizes: cluster_of(*sizes)),
    st.sampled_from([1, 2, 3, 4, 8, 64]),
)


@settings(max_examples=500, deadline=None)
@given(case=cases, num_best=st.integers(1, 6))
def test_equals_exhaustive_enumeration(case: Case, num_best: int) -> None:
    expected = enumerate_best(case)
    if not expected:
        with pytest.raises(InfeasibleError):
            partition_stages(
                case.table, case.cluster, num_microbatches=case.num_microbatches, memory_limit=case.memory_limit, num_best=num_best
            )
        return
    found = partition_stages(
        case.table, case.cluster, num_microbatches=case.num_microbatches, memory_limit=case.memory_limit, num_best=num_best
    )
    optimum = min(expected.values())
    assert found[0].objective_seconds == pytest.approx(optimum, rel=1.1e-6)
    assert 0.999 * optimum <= found[0].lower_bound <= optimum * (1 + 1e-12)
    signatures = [tuple((stage.start, stage.stop, stage.submesh) for stage in partition.stages) for partition in found]
    assert len(set(signatures)) == len(found) == min(num_best, len(expected))
    for signature, partition in zip(signatures, found, strict=True):
        check_stages(partition.stages, case.table, case.cluster, case.num_microbatches, case.memory_limit)
        assert partition.objective_seconds == pytest.approx(expected[signature])
        assert iteration_seconds(partition.stages, case.table, case.cluster, case.num_microbatches) == pytest.approx(expected[signature])
        assert sorted(sum(place(partition, case.cluster), ())) == list(range(case.cluster.num_devices))
    assert [partition.objective_seconds for partition in found] == sorted(partition.objective_seconds for partition in found)


@settings(max_examples=150, deadline=None)
@given(case=cases)
def test_the_best_for_each_number_of_stages_comes_first(case: Case) -> None:
    best_by_count: dict[int, float] = {}
    for cells, seconds in enumerate_best(case).items():
        best_by_count[len(cells)] = min(seconds, best_by_count.get(len(cells), float("inf")))
    if best_by_count:
        found = partition_stages(
            case.table,
            case.cluster,
            num_microbatches=case.num_microbatches,
            memory_limit=case.memory_limit,
            num_best=len(best_by_count),
        )
        assert sorted(p.objective_seconds for p in found) == pytest.approx(sorted(best_by_count.values()), rel=1.1e-6)


@settings(max_examples=150, deadline=None)
@given(case=cases)
def test_the_missing_bytes_are_the_least_that_help(case: Case) -> None:
    if enumerate_best(case):
        return
    needs = [
        max(option.peak_bytes(min(len(cells) - index, case.num_microbatches)) for index, option in enumerate(options))
        for cells, options in every_partition(case)
        if all(option.seconds < float("inf") for option in options)
    ]
    with pytest.raises(InfeasibleError) as raised:
        partition_stages(case.table, case.cluster, num_microbatches=case.num_microbatches, memory_limit=case.memory_limit, num_best=1)
    if needs:
        assert f"{min(needs) - case.memory_limit:.0f} bytes" in str(raised.value)
    else:
        assert "do not cover" in str(raised.value)


@settings(max_examples=100, deadline=None)
@given(case=cases)
def test_pruning_to_pareto_points_keeps_the_optimum(case: Case) -> None:
    expected = enumerate_best(case)
    if expected:
        pruned = case.table.updated({cell: pareto(options) for cell, options in case.table.options.items()})
        found = partition_stages(pruned, case.cluster, num_microbatches=case.num_microbatches, memory_limit=case.memory_limit, num_best=1)
        assert found[0].objective_seconds == pytest.approx(min(expected.values()), rel=1.1e-6)


def even_table(num_layers: int, cluster: ClusterSpec, inflight_bytes: float) -> CostTable:
    """Equal layers; every device of a stage after the first adds a tenth of a second."""
    cells = {
        (start, stop, submesh): (
            StageOption(
                MeshShape(1, submesh.num_devices),
                False,
                0,
                (stop - start) / submesh.num_devices + 0.1 * (submesh.num_devices - 1),
                0.0,
                0.0,
                inflight_bytes * (stop - start) / submesh.num_devices,
                0.0,
                False,
            ),
        )
        for start, stop in itertools.combinations(range(num_layers + 1), 2)
        for submesh in submeshes_of(cluster)
    }
    return CostTable(num_layers, cells, (0.0,) * num_layers)


def test_many_microbatches_of_even_layers_make_a_pipeline_of_single_devices() -> None:
    cluster = cluster_of(2, 4)
    (best,) = partition_stages(even_table(8, cluster, 1.0), cluster, num_microbatches=64, memory_limit=100, num_best=1)
    assert [stage.submesh for stage in best.stages] == [Submesh(1, 1)] * 8
    (single,) = partition_stages(even_table(8, cluster, 1.0), cluster, num_microbatches=1, memory_limit=100, num_best=1)
    assert [stage.submesh for stage in single.stages] == [Submesh(2, 4)]


def test_microbatches_in_flight_forbid_early_stages_on_one_device() -> None:
    cluster = cluster_of(2, 4)
    (best,) = partition_stages(even_table(8, cluster, 1.0), cluster, num_microbatches=64, memory_limit=4.0, num_best=1)
    peaks = [stage.option.peak_bytes(len(best.stages) - index) for index, stage in enumerate(best.stages)]
    assert max(peaks) <= 4.0
    assert len(best.stages) < 8
    (again,) = partition_stages(
        even_table(8, cluster, 1.0), cluster, num_microbatches=64, memory_limit=4.0, num_best=1, in_flight=lambda stages, microbatches: 1
    )
    assert len(again.stages) == 8


def test_the_error_names_bytes_and_layers() -> None:
    cluster = cluster_of(1, 2)
    with pytest.raises(InfeasibleError, match=r"no partition fits: 3 bytes a device .* 1 stage; its layers 0 to 1 on 1 x 2 devices"):
        partition_stages(even_table(2, cluster, 4.0), cluster, num_microbatches=1, memory_limit=1.0, num_best=1)


def test_the_error_says_when_the_table_covers_nothing() -> None:
    with pytest.raises(InfeasibleError, match="do not cover the layers"):
        partition_stages(CostTable(2, {}, (0.0, 1.0)), cluster_of(1, 2), num_microbatches=1, memory_limit=1.0, num_best=1)
