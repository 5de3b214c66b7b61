"""Property: given stages are priced as our own would be, and stages that are no partition are refused."""

from dataclasses import replace

import pytest

from alpa_hpc.baselines.manual import ManualStage, Pricers, check_manual, manual_partition
from alpa_hpc.baselines.megatron import Degrees, megatron_grid, megatron_stages
from alpa_hpc.baselines.restriction import BATCH_ON_AXIS_0, FREE, MEGATRON, Restriction
from alpa_hpc.cluster.hardware import ClusterSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.planner.search import analytic_seconds, simulate_partition, simulate_stages
from alpa_hpc.runtime.schedule import OneFOneB

NO_LIMIT = float("inf")


def halves(restriction: Restriction) -> tuple[ManualStage, ...]:
    first = ManualStage(0, 2, Submesh(1, 4), MeshShape(2, 2), remat=True, restriction=restriction)
    return first, replace(first, start=2, stop=4)


@pytest.mark.parametrize("restriction", [FREE, BATCH_ON_AXIS_0, MEGATRON])
def test_a_manual_plan_is_simulated_as_a_searched_one(pricers: Pricers, restriction: Restriction) -> None:
    made = manual_partition(pricers, halves(restriction), NO_LIMIT)
    pricer = pricers.under(restriction)
    manual = simulate_stages(pricers.under(FREE), made.partition, made.stages, OneFOneB(), analytic_seconds(pricers.under(FREE)))
    searched = simulate_partition(pricer, made.partition, OneFOneB(), analytic_seconds(pricer))
    assert manual.timeline.seconds == searched.timeline.seconds
    assert manual.stage_bytes == searched.stage_bytes
    assert manual.timeline.seconds == pytest.approx(made.partition.objective_seconds, rel=0.2)


def test_free_stages_are_never_slower_than_restricted_ones(pricers: Pricers) -> None:
    seconds = {
        one.name: manual_partition(pricers, halves(one), NO_LIMIT).partition.objective_seconds for one in (FREE, BATCH_ON_AXIS_0, MEGATRON)
    }
    assert seconds[FREE.name] <= min(seconds.values()) * (1 + 1e-9)


def test_restrictions_may_differ_between_stages(pricers: Pricers) -> None:
    first, second = halves(MEGATRON)
    mixed = manual_partition(pricers, (first, replace(second, restriction=FREE)), NO_LIMIT).partition
    same = manual_partition(pricers, (first, second), NO_LIMIT).partition
    assert mixed.stages[0] == same.stages[0]
    assert mixed.objective_seconds <= same.objective_seconds


def test_a_tight_limit_takes_a_smaller_option(pricers: Pricers) -> None:
    slow = replace(pricers.cluster, intra_node=Link(1e9, 1e-6), device=replace(pricers.cluster.device, memory=1 << 18))
    here = Pricers(pricers.step, slow)
    stages = tuple(replace(stage, shape=MeshShape(4, 1)) for stage in halves(FREE))
    fast = manual_partition(here, stages, NO_LIMIT).partition
    limit = max(choice.option.peak_bytes(2 - position) for position, choice in enumerate(fast.stages)) * 0.8
    tight = manual_partition(here, stages, limit).partition
    assert max(choice.option.peak_bytes(2 - position) for position, choice in enumerate(tight.stages)) <= limit
    assert tight.objective_seconds > fast.objective_seconds
    assert manual_partition(here, stages, 1.0).partition.stages == fast.stages, "nothing fits: the fastest, for the caller to judge"


def spoiled(stages: tuple[ManualStage, ...]) -> dict[str, tuple[tuple[ManualStage, ...], str]]:
    first, second = stages
    thrice = MeshShape(1, 3)
    return {
        "a gap": ((first, replace(second, start=3)), "has layer 3, expected layer 2 to be its first: the model has layers 0-3"),
        "an overlap": ((first, replace(second, start=1)), "has layers 1-3, expected layer 2"),
        "no layer": ((first, replace(second, stop=2)), "has no layer, expected layer 2"),
        "a layer left over": ((first, replace(second, stop=3)), "ends with layer 2, expected 3"),
        "a layer too many": ((first, replace(second, stop=5)), "ends with layer 4, expected 3"),
        "devices left over": ((first, replace(second, submesh=Submesh(1, 2), shape=MeshShape(2, 1))), "use 6 devices"),
        "another number of devices": ((first, replace(second, shape=thrice)), "4 devices as 1 x 3"),
    }


@pytest.mark.parametrize("fault", spoiled(halves(FREE)))
def test_stages_that_are_no_partition_are_refused(pricers: Pricers, fault: str) -> None:
    stages, words = spoiled(halves(FREE))[fault]
    with pytest.raises(PlanError, match=words):
        manual_partition(pricers, stages, NO_LIMIT)


def test_a_microbatch_that_does_not_divide_is_refused(pricers: Pricers) -> None:
    stage = ManualStage(0, 4, Submesh(2, 4), MeshShape(8, 1), remat=True, restriction=MEGATRON)
    with pytest.raises(PlanError, match="4 rows over 8 devices"):
        manual_partition(pricers, (stage,), NO_LIMIT)


def test_the_grid_is_every_triple_of_degrees_that_fits(pricers: Pricers) -> None:
    cluster = pricers.cluster
    found = megatron_grid(4, 4, cluster)
    expected = {
        Degrees(dp, tp, pp)
        for dp in range(1, 9)
        for tp in range(1, 9)
        for pp in range(1, 9)
        if dp * tp * pp == 8 and 4 % pp == 0 and 4 % dp == 0 and 4 % tp == 0
    }
    assert len(found) == len(set(found))
    assert set(found) == expected
    for degrees in found:
        stages = megatron_stages(degrees, 4, cluster)
        assert [stage.stop - stage.start for stage in stages] == [4 // degrees.pipeline] * degrees.pipeline
        assert all(stage.shape == MeshShape(degrees.data, degrees.tensor) for stage in stages)
        check_manual(stages, pricers.step, cluster)


def test_tensor_parallelism_stays_inside_a_node(pricers: Pricers) -> None:
    wide = ClusterSpec("wide", 2, 16, pricers.cluster.device, pricers.cluster.intra_node, pricers.cluster.inter_node)
    assert max(degrees.tensor for degrees in megatron_grid(4, 32, wide)) == 8
    narrow = ClusterSpec("narrow", 8, 2, pricers.cluster.device, pricers.cluster.intra_node, pricers.cluster.inter_node)
    assert max(degrees.tensor for degrees in megatron_grid(4, 32, narrow)) == 2
