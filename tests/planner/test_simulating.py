"""Partitions whose programs need more memory than the stage DP thought: its count is corrected, and others take their place."""

from dataclasses import replace

from alpa_hpc.planner.evidence import NO_EVIDENCE
from alpa_hpc.planner.refine import settle
from alpa_hpc.planner.search import SCHEDULES
from alpa_hpc.planner.simulating import simulated
from alpa_hpc.runtime.options import ScheduleKind
from tests.planning import SEARCH, planned

GPIPE = SCHEDULES[ScheduleKind.GPIPE]  # holds every microbatch, where the stage DP counts those of 1F1B


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
