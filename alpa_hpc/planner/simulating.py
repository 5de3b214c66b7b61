"""Refinement -> its partitions as programs in virtual time; where one does not fit by these, its memory is corrected, and others are found.

The stage DP counts a stage's memory as a sum of what it holds and the most that a task needs; a program knows what of it meets.
"""

from collections.abc import Sequence
from dataclasses import replace

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.planner.evidence import Evidence
from alpa_hpc.planner.refine import WHOLE, Interest, Refinement, modelled, settle, signature
from alpa_hpc.planner.search import SimulatedPlan, find_candidates, pick, simulate_partition
from alpa_hpc.runtime.schedule import AbstractSchedule
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer

MOST_ROUNDS = 8  # of corrections, before the plans are taken as they are


def simulated(
    pricer: StagePricer, refinement: Refinement, search: SearchOptions, schedule: AbstractSchedule
) -> tuple[Refinement, tuple[SimulatedPlan, ...]]:
    """The refinement's partitions simulated, and the refinement itself; both corrected until all partitions fit that are still proposed."""
    plans = _simulate_all(pricer, refinement, schedule)
    for _ in range(MOST_ROUNDS):
        evidence = _with_peaks(pricer, refinement.evidence, plans)
        if evidence is refinement.evidence:
            break
        try:
            refinement = settle(pricer, refinement.analytic, search, evidence)
        except InfeasibleError:
            break  # `pick` takes one of these plans, or says what is missing
        plans = _simulate_all(pricer, refinement, schedule)
    return refinement, plans


def fastest_modelled(pricer: StagePricer, search: SearchOptions, schedule: AbstractSchedule, interest: Interest = WHOLE) -> SimulatedPlan:
    """The paper's Algorithm 1 with modelled costs. Raises InfeasibleError where nothing fits, or nothing is of interest."""
    candidates = find_candidates(pricer.step, pricer.cluster, search)
    _, plans = simulated(pricer, modelled(pricer, candidates, search, interest=interest), search, schedule)
    return pick(plans, pricer.cluster)


def _simulate_all(pricer: StagePricer, refinement: Refinement, schedule: AbstractSchedule) -> tuple[SimulatedPlan, ...]:
    seconds_of = refinement.seconds_of(pricer)
    return tuple(simulate_partition(pricer, one, schedule, seconds_of) for one in refinement.partitions)


def _with_peaks(pricer: StagePricer, evidence: Evidence, plans: Sequence[SimulatedPlan]) -> Evidence:
    """The evidence with more workspace for stages that the simulation found too large for a device; the same where there is none."""
    looks = dict(evidence.looks)
    for plan in plans:
        stages = plan.partition.stages
        for place, (choice, peak) in enumerate(zip(stages, plan.stage_bytes, strict=True)):
            held = pricer.in_flight(len(stages) - place, pricer.step.num_microbatches)
            one, missed = signature(pricer, choice), peak - choice.option.peak_bytes(held)  # beyond what the stage DP counts
            if peak > pricer.cluster.device.memory and missed > 0:
                known = looks[one].workspace_bytes
                looks[one] = replace(looks[one], workspace_bytes=max(known, choice.option.workspace_bytes + missed))
    return evidence if looks == evidence.looks else replace(evidence, looks=looks)
