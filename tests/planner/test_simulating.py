"""Partitions whose programs need more memory than the stage DP thought: its count is corrected, and others take their place."""

from dataclasses import replace

import pytest

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.planner.evidence import NO_EVIDENCE
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.refine import settle
from alpa_hpc.planner.search import SCHEDULES
from alpa_hpc.planner.simulating import simulated
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.schedule import AbstractSchedule
from tests.planning import NUM_MICROBATCHES, SEARCH, planned

GPIPE = SCHEDULES[ScheduleKind.GPIPE]  # holds every microbatch, where the stage DP of `planned` counts those of 1F1B


def test_where_everything_fits_nothing_is_corrected() -> None:
    one = planned()
    found = settle(one.pricer, one.table, SEARCH, NO_EVIDENCE)
    same, plans = simulated(one.pricer, found, SEARCH, SCHEDULES[ScheduleKind.ONE_F_ONE_B])
    assert same is found
    assert [plan.partition for plan in plans] == list(found.partitions)
    assert all(max(plan.stage_bytes) <= one.cluster.device.memory for plan in plans)


def test_what_is_too_large_as_a_program_gives_way_to_what_fits() -> None:
    roomy = planned()
    found = settle(roomy.pricer, roomy.table, SEARCH, NO_EVIDENCE)
    _, plans = simulated(roomy.pricer, found, SEARCH, GPIPE)
    memory = min(max(plan.stage_bytes) for plan in plans) - 1  # all that is proposed at first is too large
    one = planned(replace(roomy.cluster, device=replace(roomy.cluster.device, memory=memory)))
    first = settle(one.pricer, one.table, SEARCH, NO_EVIDENCE)
    corrected, fitting = simulated(one.pricer, first, SEARCH, GPIPE)
    assert corrected.evidence.looks != first.evidence.looks
    assert all(max(plan.stage_bytes) <= memory for plan in fitting)
    for name, look in first.evidence.looks.items():
        assert corrected.evidence.looks[name].workspace_bytes >= look.workspace_bytes


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_stage_dp_counts_what_the_schedule_holds(kind: ScheduleKind) -> None:
    """Else it proposes what no program fits, or tells too little of what is missing."""
    schedule, wide = SCHEDULES[kind], planned()
    cluster = replace(
        wide.cluster, device=replace(wide.cluster.device, memory=230_000)
    )  # too little for all layers on all devices under GPipe
    pricer = pricer_for(wide.pricer.step, cluster, SEARCH, schedule)
    found = settle(pricer, wide.table, SEARCH, NO_EVIDENCE)
    for partition in found.partitions:
        stages = partition.stages
        assert len(stages) > 1 or schedule is not GPIPE
        for place, choice in enumerate(stages):
            held = schedule.max_in_flight(place, len(stages), NUM_MICROBATCHES)
            assert choice.option.peak_bytes(held) <= cluster.device.memory


def test_what_is_missing_is_told_by_what_the_schedule_holds() -> None:
    wide = planned()

    def missing(schedule: AbstractSchedule) -> float:
        cluster = replace(wide.cluster, device=replace(wide.cluster.device, memory=70_000))
        pricer = pricer_for(wide.pricer.step, cluster, SEARCH, schedule)
        with pytest.raises(InfeasibleError, match="are missing at least") as refused:
            settle(pricer, wide.table, SEARCH, NO_EVIDENCE)
        return refused.value.missing_bytes

    assert missing(GPIPE) > 1.5 * missing(SCHEDULES[ScheduleKind.ONE_F_ONE_B])
