"""Analytic CostTable -> the same, corrected where it matters: exact temporary memory, measured seconds of the best few (DESIGN, "Costs").

The stage DP proposes; what it proposes is looked at closely and written back into the table; again, until nothing it proposes is new.
A look makes no option better than it stood in the table (but for moves that several readers share, which the table counts for each of
them), so what the DP proposes last is the best there is.
Looks hold for every cell whose layers and strategies are the same, so equal stages are looked at once.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import assert_never

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.planner.evidence import NO_EVIDENCE, Evidence, Look, NotMeasured, Signature, measured_seconds, pace_of
from alpa_hpc.planner.opening import all_bounds, bounds_of, first_table, opened
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.planner.search import SecondsOf, analytic_seconds, best_partitions, chosen_stage, find_candidates, no_division
from alpa_hpc.profiling.outcome import Failed, MeasuredTasks, MeasuredWork, Outcome, Unmeasured
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.breakdown import StageSeconds
from alpa_hpc.sharding.wiring import wire
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import Cell, CostTable, StageOption, pareto
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.timed import Timed, untimed

MOST_LOOKS = 60  # proposals that are looked at before the last one is taken as it is


@dataclass(frozen=True, slots=True)
class Interest:
    """What a search is worth: it may end once no plan below `most_seconds` (Eq. 2) is left; `tells_why` = it finds out what is missing."""

    most_seconds: float = float("inf")
    tells_why: bool = True


WHOLE = Interest()
Profiler = Callable[[Sequence[ProfileRequest]], Mapping[str, Outcome]]  # one outcome for each key
Describe = Callable[[StageChoice, Stage], ProfileRequest]


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """The analytic table as far as it was opened, the corrected one, the partitions that this gives, and the evidence behind it."""

    analytic: CostTable
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


def modelled(
    pricer: StagePricer, candidates: Sequence[StageCandidate], search: SearchOptions, timed: Timed = untimed, interest: Interest = WHOLE
) -> Refinement:
    """The best partitions among the candidates by modelled costs, memory counted exactly.

    Raises InfeasibleError where nothing fits, or nothing is of interest.
    """
    table = timed("bounds", lambda: first_table(pricer, candidates, search))
    return settle(pricer, table, search, NO_EVIDENCE, timed, interest)


def settle(
    pricer: StagePricer, table: CostTable, search: SearchOptions, evidence: Evidence, timed: Timed = untimed, interest: Interest = WHOLE
) -> Refinement:
    """Look at what the DP proposes, until it proposes nothing that has not been looked at. `table` is the analytic one."""
    current = propose(pricer, table, search, evidence, timed, interest)
    for _ in range(MOST_LOOKS):
        new = _choices_missing(pricer, current.partitions, current.evidence.looks)
        if not new:
            break
        evidence = timed("looks", partial(looked_at, pricer, new, current.evidence))
        current = propose(pricer, current.analytic, search, evidence, timed, interest)
    return current


def propose(
    pricer: StagePricer, table: CostTable, search: SearchOptions, evidence: Evidence, timed: Timed = untimed, interest: Interest = WHOLE
) -> Refinement:
    """The table with every option as it stands by the evidence, and its best partitions; bounds are opened until these hold none.

    Raises InfeasibleError where there is none, or none of interest; it says what failed, where that may be why.
    """
    while True:
        current = corrected(pricer, table, evidence)
        try:
            partitions = timed("stage_dp", partial(best_partitions, pricer, current, search))
        except InfeasibleError as error:
            asked = all_bounds(current) if interest.tells_why else ()  # what is missing is told by what stages really need
            if not asked:
                raise InfeasibleError(_why_none(pricer, search, evidence, error), error.missing_bytes) from error
        else:
            _check_worth(partitions[0].lower_bound, interest)
            asked = bounds_of(partitions)
            if not asked:
                return Refinement(table, current, partitions, evidence, 0)
        table = timed("solve", partial(opened, pricer, table, asked))


def _check_worth(lower_bound: float, interest: Interest) -> None:
    """Raise InfeasibleError where no plan that is left is of interest: bounds only rise when they are opened."""
    if lower_bound > interest.most_seconds:
        raise InfeasibleError(f"Eq. 2 is at least {lower_bound:.4g} s for every plan")


def _why_none(pricer: StagePricer, search: SearchOptions, evidence: Evidence, error: InfeasibleError) -> str:
    """Why there is no partition, in the words of the search where memory is not what is missing."""
    if error.missing_bytes:
        return f"{error}{_what_failed(evidence)}"
    if evidence.failed:
        return (
            f"what is left of search {search.name!r} cannot run all layers on all devices of {pricer.cluster.name}{_what_failed(evidence)}"
        )
    return no_division(pricer.step, pricer.cluster, search)


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
            looks[one] = Look(
                modelled(choice, stage), chosen_workspace(stage.layers, stage.shape, hiding=pricer.cluster.device.hides_collectives)
            )
    return replace(evidence, looks=looks)


def corrected(pricer: StagePricer, table: CostTable, evidence: Evidence) -> CostTable:
    """The table with every option as it stands by the evidence; those that failed are gone."""
    failed, least = evidence.failed, evidence.pace.least

    def stand(cell: Cell, options: Sequence[StageOption]) -> tuple[StageOption, ...]:
        bounds = (replace(one, seconds=one.seconds * least) for one in options if one.is_bound)
        named = ((option_signature(pricer, *cell, one), one) for one in options if not one.is_bound)
        return (*(evidence.correct(name, one) for name, one in named if name not in failed), *bounds)

    return table.updated({cell: stand(cell, options) for cell, options in table.options.items()})


def reopened(pricer: StagePricer, table: CostTable, search: SearchOptions, failed: Set[Signature]) -> CostTable:
    """The analytic table with further options in cells that lost some: those that were left out as never better than the failed ones."""
    poorer = {
        cell: options for cell, options in table.options.items() if any(option_signature(pricer, *cell, one) in failed for one in options)
    }
    closed = {(cell, one.shape, one.remat) for cell, options in poorer.items() for one in options if one.is_bound}
    found: dict[Cell, list[StageOption]] = {cell: [] for cell in poorer}
    for candidate in find_candidates(pricer.step, pricer.cluster, search):
        cell = (candidate.start, candidate.stop, candidate.submesh)
        if cell in found and (cell, candidate.shape, candidate.remat) not in closed:
            found[cell] += [one for one in pricer.options(candidate) if option_signature(pricer, *cell, one) not in failed]
    return table.updated({cell: (*options, *_others(options, found[cell])) for cell, options in poorer.items()})


def _others(options: Sequence[StageOption], found: Sequence[StageOption]) -> tuple[StageOption, ...]:
    """Those of `found` that can be best and are not among `options`, whatever these are corrected to."""
    known = {(one.shape, one.remat, one.variant) for one in options}
    return tuple(one for one in pareto(found) if (one.shape, one.remat, one.variant) not in known)


def with_measurements(
    pricer: StagePricer,
    first: Refinement,
    search: SearchOptions,
    profiler: Profiler,
    describe: Describe,
    *,
    max_rounds: int,
    tasks_per_round: int,
) -> Refinement:
    """Measure what the DP proposes, `first` to begin with, until its best partition is measured throughout, or `max_rounds` are over.

    A round times at most `tasks_per_round` stages, those of the best partition first. A stage that cannot run is out from then on; one
    that nobody could measure keeps its modelled seconds, and is not asked for again. Raises InfeasibleError where too much has failed.
    """
    current = first
    for round_number in range(max_rounds):
        asked = {**current.evidence.measured, **current.evidence.not_measured}
        if not _choices_missing(pricer, current.partitions[:1], asked):
            return replace(current, num_rounds=round_number)
        wanted = dict(islice(_choices_missing(pricer, current.partitions, asked).items(), tasks_per_round))
        evidence = measure(pricer, wanted, looked_at(pricer, wanted, current.evidence), profiler, describe)
        table = current.analytic
        if evidence.failed != current.evidence.failed:
            table = reopened(pricer, table, search, evidence.failed)
        current = settle(pricer, table, search, evidence)
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
