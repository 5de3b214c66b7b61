"""Analytic cost table -> the same, corrected where it matters: exact temporary memory, and measured seconds of the best few (DESIGN, "Costs").

The stage DP proposes; what it proposes is looked at closely and written back into the table; again, until nothing it proposes is new. A correction holds
for every cell whose layers and strategies are the same, so equal stages are looked at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.planner.lookup import strategies_of
from alpa_hpc.planner.search import SecondsOf, best_partitions, chosen_stage
from alpa_hpc.plan.plan import StagePlan, Strategies
from alpa_hpc.profiling.keys import measure_key
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds, stage_seconds
from alpa_hpc.sharding.stage import LayerWiring, wire
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer

MOST_LOOKS = 60  # proposals whose memory is made exact before the last one is taken as it is


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
class ProfileRequest:
    """A stage to be timed: its content key, words for people, and all that is needed to rebuild it."""

    key: str
    label: str
    stage: StagePlan
    strategies: tuple[Strategies, ...]


Profiler = Callable[[Sequence[ProfileRequest]], Mapping[str, ComputeSeconds]]


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """The corrected table, the partitions it gives, and the measured seconds behind it."""

    table: CostTable
    partitions: tuple[StagePartition, ...]
    measured: Mapping[Signature, StageSeconds]
    num_rounds: int

    def seconds_of(self, pricer: StagePricer) -> SecondsOf:
        """Measured task seconds where there are some, else modelled ones."""

        def seconds(choice: StageChoice, stage: Stage) -> StageSeconds:
            found = self.measured.get(signature(pricer, choice))
            prices = pricer.solver(choice.submesh, choice.option.shape, remat=choice.option.remat).prices
            return stage_seconds(stage.layers, prices) if found is None else found

        return seconds


def signature(pricer: StagePricer, choice: StageChoice) -> Signature:
    """The signature of a chosen stage."""
    return option_signature(pricer, choice.start, choice.stop, choice.submesh, choice.option)


def option_signature(pricer: StagePricer, start: int, stop: int, submesh: Submesh, option: StageOption) -> Signature:
    """The signature of an option of a cell."""
    return Signature(wire(pricer.step, start, stop), submesh, option.shape, option.remat, option.variant)


def with_exact_memory(pricer: StagePricer, table: CostTable, cluster: ClusterSpec, search: SearchOptions) -> CostTable:
    """Count the temporary arrays of proposed stages exactly, until what the DP proposes is counted so."""
    exact: dict[Signature, float] = {}
    for _ in range(MOST_LOOKS):
        proposed = best_partitions(table, cluster, pricer.step, search)
        new = {signature(pricer, choice): choice for partition in proposed for choice in partition.stages}
        new = {one: choice for one, choice in new.items() if one not in exact}
        if not new:
            return table
        for one, choice in new.items():
            stage = chosen_stage(pricer, choice)
            exact[one] = chosen_workspace(stage.layers, stage.shape)
        table = corrected(pricer, table, lambda one, option: replace(option, workspace_bytes=exact.get(one, option.workspace_bytes)))
    return table


def corrected(pricer: StagePricer, table: CostTable, correct: Callable[[Signature, StageOption], StageOption]) -> CostTable:
    """The table with every option passed through `correct`."""
    options = {
        (start, stop, submesh): tuple(correct(option_signature(pricer, start, stop, submesh, one), one) for one in cell)
        for (start, stop, submesh), cell in table.options.items()
    }
    return table.updated(options)


def with_measurements(
    pricer: StagePricer,
    table: CostTable,
    cluster: ClusterSpec,
    search: SearchOptions,
    profiler: Profiler,
    describe: Callable[[StageChoice, Stage], ProfileRequest],
    *,
    max_rounds: int,
    tasks_per_round: int,
) -> Refinement:
    """Measure what the DP proposes until its best partition is measured throughout, or `max_rounds` are over."""
    measured: dict[Signature, StageSeconds] = {}
    current = table
    for round_number in range(max_rounds):
        proposed = best_partitions(current, cluster, pricer.step, search)
        best_known = all(signature(pricer, choice) in measured for choice in proposed[0].stages)
        if round_number and best_known:
            return Refinement(current, proposed, measured, round_number)
        wanted = _unmeasured(pricer, proposed, measured)[:tasks_per_round]
        if not wanted:
            return Refinement(current, proposed, measured, round_number)
        measured.update(_measure(pricer, wanted, profiler, describe))
        current = apply_measurements(pricer, table, measured)
    return Refinement(current, best_partitions(current, cluster, pricer.step, search), measured, max_rounds)


def _unmeasured(pricer: StagePricer, proposed: Sequence[StagePartition], measured: Mapping[Signature, StageSeconds]) -> list[StageChoice]:
    new: dict[Signature, StageChoice] = {}
    for partition in proposed:
        for choice in partition.stages:
            one = signature(pricer, choice)
            if one not in measured:
                new.setdefault(one, choice)
    return list(new.values())


def _measure(
    pricer: StagePricer,
    wanted: Sequence[StageChoice],
    profiler: Profiler,
    describe: Callable[[StageChoice, Stage], ProfileRequest],
) -> dict[Signature, StageSeconds]:
    stages = [chosen_stage(pricer, choice) for choice in wanted]
    requests = [describe(choice, stage) for choice, stage in zip(wanted, stages, strict=True)]
    answers = profiler(requests)
    found: dict[Signature, StageSeconds] = {}
    for choice, stage, request in zip(wanted, stages, requests, strict=True):
        prices = pricer.solver(choice.submesh, choice.option.shape, remat=choice.option.remat).prices
        found[signature(pricer, choice)] = with_compute(stage_seconds(stage.layers, prices), answers[request.key])
    return found


def with_compute(modelled: StageSeconds, compute: ComputeSeconds) -> StageSeconds:
    """Modelled seconds with the device's own work replaced by what was measured."""
    return StageSeconds(
        TaskSeconds(compute.forward, modelled.forward.communication),
        TaskSeconds(compute.backward, modelled.backward.communication),
        TaskSeconds(compute.update, modelled.update.communication),
    )


def apply_measurements(pricer: StagePricer, table: CostTable, measured: Mapping[Signature, StageSeconds]) -> CostTable:
    """Measured options by their measurements, all others scaled by the median ratio of measured to modelled seconds."""
    known = {one: option for one, option in _options(pricer, table) if one in measured}
    ratio = median(
        (measured[one].microbatch + measured[one].update.total / pricer.step.num_microbatches) / option.seconds for one, option in known.items()
    )

    def correct(one: Signature, option: StageOption) -> StageOption:
        if one in measured:
            return replace(option, seconds=measured[one].microbatch, seconds_once=measured[one].update.total, measured=True)
        return replace(option, seconds=option.seconds * ratio)

    return corrected(pricer, table, correct)


def _options(pricer: StagePricer, table: CostTable) -> list[tuple[Signature, StageOption]]:
    return [
        (option_signature(pricer, start, stop, submesh, option), option)
        for (start, stop, submesh), cell in table.options.items()
        for option in cell
    ]


def describe_request(choice: StageChoice, stage: Stage, *, device_kind: str, versions: str, xla_flags: str) -> ProfileRequest:
    """What a profiling task needs to rebuild and time a stage; the key is its content."""
    rows = tuple(strategies_of(layer) for layer in stage.layers)
    option = choice.option
    plan = StagePlan(choice.start, choice.stop, choice.submesh, stage.shape, (), option.remat, tuple(range(len(rows))))
    content = "|".join(layer.problem.layer.key for layer in stage.layers) + f"|remat={option.remat}"
    specs = repr([sorted(row.items()) for row in rows])
    key = measure_key(content, specs, stage.shape, device_kind, versions, xla_flags)
    label = (
        f"layers {choice.start}-{choice.stop} on {stage.shape.rows}x{stage.shape.cols} of {choice.submesh.num_nodes}x"
        f"{choice.submesh.devices_per_node}{' recomputed' if option.remat else ''}"
    )
    return ProfileRequest(key, label, plan, rows)
