"""The search finds plans of the whole model on the whole cluster, and what the cluster is decides which."""

from dataclasses import replace
from functools import cache

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import make_plan
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, analytic_seconds, chosen_stage, find_candidates, pick, simulate_partition
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.sharding.shared_params import shared_seconds
from tests.planning import CLUSTER, DEVICE, NUM_MICROBATCHES, SEARCH, Planned, planned, prepared, with_bandwidth, with_memory

KIND = ScheduleKind.ONE_F_ONE_B
HALF = with_memory(DEVICE.memory / 2)
FAST = with_bandwidth(100)


def simulated(one: Planned) -> list[SimulatedPlan]:
    """The best partitions as simulated programs."""
    refinement = one.refinement()
    return [simulate_partition(one.pricer, p, SCHEDULES[KIND], refinement.seconds_of(one.pricer)) for p in refinement.partitions]


@cache
def compared(cluster: ClusterSpec = CLUSTER) -> list[SimulatedPlan]:
    return simulated(planned(cluster))


def plan_of(plans: list[SimulatedPlan], cluster: ClusterSpec) -> ParallelPlan:
    return make_plan(prepared().step, pick(plans, cluster), cluster, KIND)


def test_at_least_three_distinct_plans_are_compared_and_each_covers_layers_and_devices():
    plans = compared()
    step = prepared().step
    assert len({tuple((one.start, one.stop, one.submesh) for one in plan.partition.stages) for plan in plans}) >= 3
    for plan in plans:
        layers = [index for one in plan.partition.stages for index in range(one.start, one.stop)]
        assert layers == list(range(len(step.layers)))
        assert sorted(device for devices in plan.devices for device in devices) == list(range(8))
        assert [one.submesh.num_devices for one in plan.partition.stages] == [len(devices) for devices in plan.devices]


def test_the_plan_chosen_is_the_fastest_that_fits():
    plans = compared()
    chosen = pick(plans, CLUSTER)
    assert chosen.timeline.seconds == min(plan.timeline.seconds for plan in plans)
    crowded = [of_size(plan, 10**9) if plan is chosen else plan for plan in plans]
    assert pick(crowded, CLUSTER).timeline.seconds == sorted(plan.timeline.seconds for plan in plans)[1]
    with pytest.raises(InfeasibleError, match=r"needs 1 GB a device, two nodes has 600 kB"):
        pick([of_size(plan, 10**9) for plan in plans], CLUSTER)


def of_size(plan: SimulatedPlan, num_bytes: int) -> SimulatedPlan:
    meshes = tuple(replace(mesh, peak_bytes=num_bytes) for mesh in plan.timeline.meshes)
    return replace(plan, timeline=replace(plan.timeline, meshes=meshes))


def test_the_dps_seconds_of_a_stage_are_those_of_its_strategies():
    """But for the update of parameters that several of its layers read, which the DP counts for each of them."""
    one = planned()
    for partition in one.refinement().partitions:
        for choice in partition.stages:
            stage, option = chosen_stage(one.pricer, choice), choice.option
            seconds = analytic_seconds(one.pricer)(choice, stage)
            shared = shared_seconds(stage.layers, one.pricer.solver(choice.submesh, option.shape, remat=option.remat).prices)
            assert shared.microbatch == 0 and shared.update.total <= 0
            by_layers = seconds.microbatch + (seconds.update.total - shared.update.total) / NUM_MICROBATCHES
            assert option.seconds == pytest.approx(by_layers)


def test_the_same_inputs_give_the_same_plan():
    assert plan_of(simulated(planned.__wrapped__()), CLUSTER) == plan_of(compared(), CLUSTER)


def test_a_network_a_hundred_times_as_fast_changes_the_plan():
    slow, fast = plan_of(compared(), CLUSTER), plan_of(compared(FAST), FAST)
    assert slow != fast
    assert fast.prediction.iteration_seconds < slow.prediction.iteration_seconds
    assert slow.stages[0].strategies and slow.strategy_table != fast.strategy_table


def test_half_the_memory_changes_the_plan_to_one_that_fits():
    roomy, tight = plan_of(compared(), CLUSTER), plan_of(compared(HALF), HALF)
    assert max(roomy.prediction.stage_bytes) > HALF.device.memory >= max(tight.prediction.stage_bytes)
    assert tight != roomy
    assert tight.prediction.iteration_seconds > roomy.prediction.iteration_seconds


def test_a_model_whose_state_fits_nowhere_is_refused_before_anything_is_priced():
    with pytest.raises(InfeasibleError, match=r"take [\d.]+ kB, the 8 devices of two nodes have 80 kB: [\d.]+ [kM]B are missing"):
        find_candidates(prepared().step, with_memory(10_000), SEARCH)


def test_a_model_whose_activations_fit_nowhere_is_refused_with_what_is_missing():
    with pytest.raises(InfeasibleError, match=r"no partition fits: [\d.]+ kB a device are missing at least"):
        planned(with_memory(80_000)).refinement()
