"""Analytic CostTable -> the same, corrected where it matters: exact temporary memory, measured seconds of the best few (DESIGN, "Costs").

The stage DP proposes; what it proposes is looked at closely and written back into the table; again, until nothing it proposes is new.
A look makes no option better than it stood in the table (but for moves that several readers share, which the table counts for each of
them), so what the DP proposes last is the best there is.
Looks hold for every cell whose layers and strategies are the same, so equal stages are looked at once.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import assert_never

from alpa_hpc.cluster.hardware import ClusterSpec, Submesh
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.planner.evidence import NO_EVIDENCE, Evidence, Look, NotMeasured, Signature, measured_seconds, pace_of
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.planner.search import SecondsOf, analytic_seconds, best_partitions, chosen_stage, find_candidates
from alpa_hpc.profiling.outcome import Failed, MeasuredTasks, MeasuredWork, Outcome, Unmeasured
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.breakdown import StageSeconds
from alpa_hpc.sharding.wiring import wire
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.cost_table import Cell, CostTable, StageOption, pareto
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer

MOST_LOOKS = 60  # proposals that are looked at before the last one is taken as it is


Profiler = Callable[[Sequence[ProfileRequest]], Mapping[str, Outcome]]  # one outcome for each key
Describe = Callable[[StageChoice, Stage], ProfileRequest]


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """The corrected table, the partitions it gives, and the evidence behind it."""

    table: CostTable
    partitions: tuple[StagePartition, ...]
    evidence: Evidence
    num_rounds: int

    def seconds_of(self, pricer: StagePricer) -> SecondsOf:
        """Measured task seconds where there are some, else modelled ones at the measured pace."""
        modelled = analytic_seconds(pricer)

        def seconds(choice: StageChoice, stage: Stage) -> StageSeconds:
            return self.evidence.seconds(signature(pricer, choice), modelled(choice, stage))

        return seconds


def signature(pricer: StagePricer, choice: StageChoice) -> Signature:
    """The signature of a chosen stage."""
    return option_signature(pricer, choice.start, choice.stop, choice.submesh, choice.option)


def option_signature(pricer: StagePricer, start: int, stop: int, submesh: Submesh, option: StageOption) -> Signature:
    """The signature of an option of a cell."""
    return Signature(wire(pricer.step, start, stop), submesh, option.shape, option.remat, option.variant)


def with_exact_memory(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions) -> CostTable:
    """Count the temporary arrays of proposed stages exactly, until what the DP proposes is counted so."""
    return settle(pricer, table, cluster, search, NO_EVIDENCE).table


def unmeasured(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions) -> Refinement:
    """The table as it is, and the best partitions by it."""
    return propose(pricer, table, cluster, search, NO_EVIDENCE)


def settle(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions, evidence: Evidence) -> Refinement:
    """Look at what the DP proposes, until it proposes nothing that has not been looked at. `table` is the analytic one."""
    current = propose(pricer, table, cluster, search, evidence)
    for _ in range(MOST_LOOKS):
        new = _choices_missing(pricer, current.partitions, current.evidence.looks)
        if not new:
            break
        current = propose(pricer, table, cluster, search, looked_at(pricer, new, current.evidence))
    return current


def propose(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions, evidence: Evidence) -> Refinement:
    """The table with every option as it stands by the evidence, and its best partitions.

    Raises InfeasibleError where there is none; it says what failed, where that may be why.
    """
    current = corrected(pricer, table, evidence)
    try:
        return Refinement(current, best_partitions(current, cluster, pricer.step, search), evidence, 0)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{_what_failed(evidence)}", error.missing_bytes) from error


def _what_failed(evidence: Evidence) -> str:
    """The reasons of all failures, one a line; empty where nothing failed."""
    blanks = [evidence.not_measured[one] for one in evidence.failed]
    failures = {f"  {blank.request.label}: {blank.outcome.reason}" for blank in blanks}
    return "\n".join(("\nLeft out, since they failed when they were to be measured:", *sorted(failures))) if failures else ""


def _choices_missing(
    pricer: StagePricer, proposed: Sequence[StagePartition], known: Mapping[Signature, object]
) -> dict[Signature, StageChoice]:
    """The stages of partitions whose signatures are not in `known`, each once, those of the best partition first."""
    missing: dict[Signature, StageChoice] = {}
    for partition in proposed:
        for choice in partition.stages:
            one = signature(pricer, choice)
            if one not in known:
                missing.setdefault(one, choice)
    return missing


def looked_at(pricer: StagePricer, choices: Mapping[Signature, StageChoice], evidence: Evidence) -> Evidence:
    """The evidence with looks at those of `choices` that it lacks: their strategies are found, and counted."""
    modelled = analytic_seconds(pricer)
    looks = dict(evidence.looks)
    for one, choice in choices.items():
        if one not in looks:
            stage = chosen_stage(pricer, choice)
            looks[one] = Look(modelled(choice, stage), chosen_workspace(stage.layers, stage.shape))
    return replace(evidence, looks=looks)


def corrected(pricer: StagePricer, table: CostTable, evidence: Evidence) -> CostTable:
    """The table with every option as it stands by the evidence; those that failed are gone."""
    failed = evidence.failed

    def stand(cell: Cell, options: Sequence[StageOption]) -> tuple[StageOption, ...]:
        named = ((option_signature(pricer, *cell, one), one) for one in options)
        return tuple(evidence.correct(name, one) for name, one in named if name not in failed)

    return table.updated({cell: stand(cell, options) for cell, options in table.options.items()})


def reopened(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions, failed: Set[Signature]) -> CostTable:
    """The analytic table with further options in cells that lost some: those that were left out as never better than the failed ones."""
    poorer = {
        cell: options for cell, options in table.options.items() if any(option_signature(pricer, *cell, one) in failed for one in options)
    }
    found: dict[Cell, list[StageOption]] = {cell: [] for cell in poorer}
    for candidate in find_candidates(pricer.step, cluster, search):
        cell = (candidate.start, candidate.stop, candidate.submesh)
        if cell in found:
            found[cell] += [one for one in pricer.options(candidate) if option_signature(pricer, *cell, one) not in failed]
    return table.updated({cell: (*options, *_others(options, found[cell])) for cell, options in poorer.items()})


def _others(options: Sequence[StageOption], found: Sequence[StageOption]) -> tuple[StageOption, ...]:
    """Those of `found` that can be best and are not among `options`, whatever these are corrected to."""
    known = {(one.shape, one.remat, one.variant) for one in options}
    return tuple(one for one in pareto(found) if (one.shape, one.remat, one.variant) not in known)


def with_measurements(
    pricer: StagePricer,
    table: CostTable,
    cluster: ClusterSpec,
    search: SearchOptions,
    profiler: Profiler,
    describe: Describe,
    *,
    max_rounds: int,
    tasks_per_round: int,
) -> Refinement:
    """Measure what the DP proposes until its best partition is measured throughout, or `max_rounds` are over.

    A round times at most `tasks_per_round` stages, those of the best partition first. A stage that cannot run is out from then on; one
    that nobody could measure keeps its modelled seconds, and is not asked for again. Raises InfeasibleError where too much has failed.
    """
    current = settle(pricer, table, cluster, search, NO_EVIDENCE)
    for round_number in range(max_rounds):
        asked = {**current.evidence.measured, **current.evidence.not_measured}
        if not _choices_missing(pricer, current.partitions[:1], asked):
            return replace(current, num_rounds=round_number)
        wanted = dict(islice(_choices_missing(pricer, current.partitions, asked).items(), tasks_per_round))
        evidence = measure(pricer, wanted, looked_at(pricer, wanted, current.evidence), profiler, describe)
        if evidence.failed != current.evidence.failed:
            table = reopened(pricer, table, cluster, search, evidence.failed)
        current = settle(pricer, table, cluster, search, evidence)
    return replace(current, num_rounds=max_rounds)


def measure(
    pricer: StagePricer, wanted: Mapping[Signature, StageChoice], evidence: Evidence, profiler: Profiler, describe: Describe
) -> Evidence:
    """The evidence with measured seconds of options that were looked at, or with why there are none."""
    requests = {one: describe(choice, chosen_stage(pricer, choice)) for one, choice in wanted.items()}
    known: dict[str, Outcome] = {found.request.key: found.outcome for found in evidence.not_measured.values()}
    distinct = {request.key: request for request in requests.values() if request.key not in known}
    outcomes = known | dict(profiler(list(distinct.values())) if distinct else {})
    measured, not_measured = dict(evidence.measured), dict(evidence.not_measured)
    for one, request in requests.items():
        match outcomes[request.key]:
            case MeasuredWork() | MeasuredTasks() as seconds:
                measured[one] = measured_seconds(evidence.looks[one].seconds, seconds)
            case Failed() | Unmeasured() as outcome:
                not_measured[one] = NotMeasured(request, outcome)
            case other:
                assert_never(other)
    return Evidence(evidence.looks, measured, not_measured, pace_of(evidence.looks, measured, pricer.step.num_microbatches))
