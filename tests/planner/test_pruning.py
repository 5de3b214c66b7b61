"""What the search leaves out by default never holds the best partition; heuristics that may are off; equal stages are solved once."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import alpa_hpc.sharding.stage
from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.planner.search import find_candidates
from alpa_hpc.sharding.build import SpecSpace
from alpa_hpc.sharding.stage import MemoryPrice
from alpa_hpc.stages.candidate import LogicalShapes, StageCandidate, SubmeshShapes, mesh_shapes, submesh_shapes
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.objective import StageChoice, iteration_seconds, one_forward_one_backward
from alpa_hpc.stages.options import RematChoice
from alpa_hpc.stages.partition import partition_stages
from alpa_hpc.stages.pricing import StagePricer, layer_flop, possible, state_bytes
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, MODEL, NUM_MICROBATCHES, SEARCH, TRAINING, prepared

EVERYTHING = replace(SEARCH, remat=RematChoice.SEARCH)


def every_candidate(num_layers: int, cluster: ClusterSpec) -> list[StageCandidate]:
    """All runs of layers on all submeshes in all shapes, with remat and without."""
    return [
        StageCandidate(start, stop, submesh, shape, remat)
        for start, stop in itertools.combinations(range(num_layers + 1), 2)
        for submesh in submesh_shapes(cluster, SubmeshShapes.ALL)
        for shape in mesh_shapes(submesh, LogicalShapes.ALL)
        for remat in (False, True)
    ]


def every_partition(table: CostTable, start: int, devices: int) -> Iterator[tuple[StageChoice, ...]]:
    """All ways to run layers from `start` on `devices` devices."""
    if start == table.num_layers and devices == 0:
        yield ()
    for (first, stop, submesh), options in table.options.items():
        if first == start and submesh.num_devices <= devices:
            for rest in every_partition(table, stop, devices - submesh.num_devices):
                for option in options:
                    yield (StageChoice(first, stop, submesh, option), *rest)


def best_seconds(table: CostTable, cluster: ClusterSpec) -> float:
    """The fastest of all partitions that fit, by trying each."""
    best = math.inf
    for stages in every_partition(table, 0, cluster.num_devices):
        held = [one_forward_one_backward(len(stages) - position, NUM_MICROBATCHES) for position in range(len(stages))]
        if all(stage.option.peak_bytes(count) <= cluster.device.memory for stage, count in zip(stages, held, strict=True)):
            best = min(best, iteration_seconds(stages, table, cluster, NUM_MICROBATCHES))
    return best


def cluster_of(num_nodes: int, devices_per_node: int, memory: float) -> ClusterSpec:
    device = replace(CLUSTER.device, memory=memory)
    return replace(CLUSTER, num_nodes=num_nodes, devices_per_node=devices_per_node, device=device)


def tight(step: LayeredStep, num_devices: int) -> int:
    """Memory for some more than twice the state: one device cannot hold what most runs of layers need."""
    return int(2.2 * sum(state_bytes(step).values()) / num_devices)


@pytest.mark.parametrize(("num_nodes", "devices_per_node", "is_tight"), [(1, 3, False), (1, 3, True), (2, 2, True)])
def test_the_best_of_all_partitions_is_among_the_candidates(num_nodes: int, devices_per_node: int, is_tight: bool) -> None:
    step = prepared().step
    memory = tight(step, num_nodes * devices_per_node) if is_tight else CLUSTER.device.memory
    cluster = cluster_of(num_nodes, devices_per_node, memory)
    candidates = every_candidate(len(step.layers), cluster)
    pricer = StagePricer(step, cluster)
    kept = find_candidates(step, cluster, EVERYTHING)
    left_out = set(candidates) - set(kept)
    kinds = Counter(
        mirrored=sum(one.shape.rows == 1 and one.shape.cols > 1 for one in left_out),
        too_large=len(candidates) - len(possible(candidates, step, cluster)),
        incomplete=sum(one.stop - one.start == len(step.layers) and one.submesh.num_devices < cluster.num_devices for one in left_out),
    )
    assert kinds["mirrored"] and kinds["incomplete"] and (kinds["too_large"] or not is_tight), kinds
    best = best_seconds(pricer.price(candidates), cluster)
    found = partition_stages(
        pricer.price(kept), cluster, num_microbatches=NUM_MICROBATCHES, memory_limit=float(cluster.device.memory), num_best=1
    )
    assert math.isfinite(best)
    assert found[0].objective_seconds == pytest.approx(best, rel=1e-9)


def test_heuristics_are_off_by_default_and_leave_out_what_they_say() -> None:
    step, cluster = prepared().step, cluster_of(1, 4, CLUSTER.device.memory)
    everything = find_candidates(step, cluster, EVERYTHING)
    assert find_candidates(step, cluster, replace(EVERYTHING, balance=1e9)) == everything
    balanced = find_candidates(step, cluster, replace(EVERYTHING, balance=0.5))
    flop = layer_flop(step)

    def devices_for_flop(one: StageCandidate) -> float:
        return (one.submesh.num_devices / cluster.num_devices) / (sum(flop[one.start : one.stop]) / sum(flop))

    assert list(balanced) == [one for one in everything if 1 / 1.5 <= devices_for_flop(one) <= 1.5]
    assert 0 < len(balanced) < len(everything)


def test_equal_stages_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        function = getattr(alpa_hpc.sharding.stage, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(alpa_hpc.sharding.stage, name, call)

    for name in ("build_layer", "carry_out", "solve"):
        counted(name)
    step = prepare(replace(MODEL, num_layers=8), TRAINING, LayerOptions(num_layers=8, imbalance=0.5), NUM_MICROBATCHES).step
    assert len({layer.key for layer in step.layers}) == 3
    solver = StagePricer(step, CLUSTER).solver(Submesh(1, 4), MeshShape(2, 2), remat=False)
    assert solver.space in SpecSpace
    calls.clear()  # what it took to settle the space, by a solve of the whole model that is not kept

    def solved(start: int, stop: int) -> int:
        before = calls["carry_out"] + calls["solve"]
        solver.value(start, stop, MemoryPrice(0.0, 0.0))
        return calls["carry_out"] + calls["solve"] - before

    assert solved(1, 3) > 0
    assert [solved(start, start + 2) for start in range(1, 6)] == [0] * 5, "two middle layers, wherever they stand"
    assert solved(0, 8) > 0 and solved(0, 8) == 0
    assert calls["build_layer"] == 3
