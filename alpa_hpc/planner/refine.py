"""Analytic CostTable -> the same, corrected where it matters: exact temporary memory, measured seconds of the best few (DESIGN, "Costs").

The stage DP proposes; what it proposes is looked at closely and written back into the table; again, until nothing it proposes is new.
A look makes no option better than it stood in the table (but for moves that several readers share, which the table counts for each of
them), so what the DP proposes last is the best there is.
Looks hold for every cell whose layers and strategies are the same, so equal stages are looked at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.planner.search import SecondsOf, analytic_seconds, best_partitions, chosen_stage
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds
from alpa_hpc.sharding.stage import LayerWiring, wire
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer

MOST_LOOKS = 60  # proposals that are looked at before the last one is taken as it is


@dataclass(frozen=True, slots=True)
class Signature:
    """What an option is, wherever its layers stand in the model."""

    wiring: tuple[LayerWiring, ...]
    submesh: Submesh
    shape: MeshShape
    remat: bool
    variant: int


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """Measured seconds of a lone device's own work: forward and backward of one microbatch, and one update."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True, slots=True)
class Look:
    """An option looked at closely: modelled seconds of its tasks, and the bytes a device of its temporary arrays."""

    seconds: StageSeconds
    workspace_bytes: float


Profiler = Callable[[Sequence[ProfileRequest]], Mapping[str, ComputeSeconds]]
Describe = Callable[[StageChoice, Stage], ProfileRequest]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What is known beyond the analytic table: looks at options, and measured seconds of some of them (communication as modelled).

    `compute_ratio` is how much longer a device's own work takes than modelled, by the measurements; 1 where there are none.
    """

    looks: Mapping[Signature, Look]
    measured: Mapping[Signature, StageSeconds]
    compute_ratio: float

    def correct(self, one: Signature, option: StageOption) -> StageOption:
        """An option as it stands by this evidence; one not looked at yet has the least seconds that it may turn out to take."""
        look = self.looks.get(one)
        if look is None:
            return replace(option, seconds=option.seconds * min(self.compute_ratio, 1.0))
        looked = replace(option, workspace_bytes=look.workspace_bytes)
        if not self.measured:
            return looked
        seconds = self.seconds(one, look.seconds)
        return replace(looked, seconds=seconds.microbatch, seconds_once=seconds.update.total, measured=one in self.measured)

    def seconds(self, one: Signature, modelled: StageSeconds) -> StageSeconds:
        """Measured seconds, else modelled ones whose work (not communication) is scaled by the ratio seen in the measured ones."""
        found = self.measured.get(one)
        return with_compute(modelled, scaled_compute(modelled, self.compute_ratio)) if found is None else found


NO_EVIDENCE = Evidence({}, {}, 1.0)


def compute_ratio(looks: Mapping[Signature, Look], measured: Mapping[Signature, StageSeconds], num_microbatches: int) -> float:
    """The median ratio of measured to modelled work of a device in an iteration."""

    def work(seconds: StageSeconds) -> float:
        return num_microbatches * (seconds.forward.compute + seconds.backward.compute) + seconds.update.compute

    return median(work(seconds) / work(looks[one].seconds) for one, seconds in measured.items())


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
    """The table with every option as it stands by the evidence, and its best partitions."""
    current = corrected(pricer, table, evidence)
    return Refinement(current, best_partitions(current, cluster, pricer.step, search), evidence, 0)


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
    """The table with every option as it stands by the evidence."""
    options = {
        (start, stop, submesh): tuple(evidence.correct(option_signature(pricer, start, stop, submesh, one), one) for one in cell)
        for (start, stop, submesh), cell in table.options.items()
    }
    return table.updated(options)


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

    A round times at most `tasks_per_round` stages, those of the best partition first.
    """
    current = settle(pricer, table, cluster, search, NO_EVIDENCE)
    for round_number in range(max_rounds):
        known = current.evidence.measured
        if not _choices_missing(pricer, current.partitions[:1], known):
            return replace(current, num_rounds=round_number)
        wanted = dict(islice(_choices_missing(pricer, current.partitions, known).items(), tasks_per_round))
        evidence = measure(pricer, wanted, looked_at(pricer, wanted, current.evidence), profiler, describe)
        current = settle(pricer, table, cluster, search, evidence)
    return replace(current, num_rounds=max_rounds)


def measure(
    pricer: StagePricer, wanted: Mapping[Signature, StageChoice], evidence: Evidence, profiler: Profiler, describe: Describe
) -> Evidence:
    """The evidence with measured seconds of options that were looked at."""
    requests = {one: describe(choice, chosen_stage(pricer, choice)) for one, choice in wanted.items()}
    answers = profiler(list(requests.values()))
    found = {one: with_compute(evidence.looks[one].seconds, answers[request.key]) for one, request in requests.items()}
    measured = {**evidence.measured, **found}
    return Evidence(evidence.looks, measured, compute_ratio(evidence.looks, measured, pricer.step.num_microbatches))


def with_compute(modelled: StageSeconds, compute: ComputeSeconds) -> StageSeconds:
    """Modelled seconds with the device's own work replaced by `compute`."""
    return StageSeconds(
        TaskSeconds(compute.forward, modelled.forward.communication),
        TaskSeconds(compute.backward, modelled.backward.communication),
        TaskSeconds(compute.update, modelled.update.communication),
    )


def scaled_compute(modelled: StageSeconds, ratio: float) -> ComputeSeconds:
    """The device's own work at another pace."""
    return ComputeSeconds(modelled.forward.compute * ratio, modelled.backward.compute * ratio, modelled.update.compute * ratio)
