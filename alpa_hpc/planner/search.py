"""LayeredStep + ClusterSpec -> partitions and their simulated programs: the parts of the paper's Algorithm 1, each pure.

candidates -> cost table -> best partitions (stage DP) -> programs in virtual time -> the fastest that fits
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.assemble import Assembly, assemble
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.schedule import AbstractSchedule, GPipe, OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.breakdown import NO_SECONDS, StageSeconds, layer_seconds
from alpa_hpc.sharding.stage import layer_content
from alpa_hpc.simulate.predict import PricedStage, predict
from alpa_hpc.simulate.timeline import Timeline
from alpa_hpc.stages.candidate import CandidateOptions, StageCandidate, balanced, enumerate_candidates
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import RematChoice, SearchOptions
from alpa_hpc.stages.partition import partition_stages
from alpa_hpc.stages.placement import place
from alpa_hpc.stages.pricing import StagePricer, layer_flop, possible, state_bytes

REMAT = {RematChoice.ALWAYS: (True,), RematChoice.NEVER: (False,), RematChoice.SEARCH: (False, True)}
SCHEDULES: Mapping[ScheduleKind, AbstractSchedule] = {ScheduleKind.ONE_F_ONE_B: OneFOneB(), ScheduleKind.GPIPE: GPipe()}

SecondsOf = Callable[[StageChoice, Stage], StageSeconds]  # what a stage's tasks take: modelled, or measured


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPlan:
    """A partition with its strategies, programs and predicted timeline."""

    partition: StagePartition
    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]
    assembly: Assembly
    timeline: Timeline

    @property
    def stage_bytes(self) -> tuple[int, ...]:
        """Peak bytes a device of each stage."""
        return self.timeline.peak_bytes


def find_candidates(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> tuple[StageCandidate, ...]:
    """Every stage worth pricing. A shape (1, n) is the mirror image of (n, 1) and is left out."""
    options = CandidateOptions(search.submesh_shapes, search.logical_shapes, REMAT[search.remat])
    candidates = enumerate_candidates(len(step.layers), cluster, options)
    distinct = [candidate for candidate in candidates if candidate.shape.rows > 1 or candidate.shape.cols == 1]
    found = balanced(possible(distinct, step, cluster), layer_flop(step), cluster.num_devices, search.balance)
    if not found:
        raise InfeasibleError(_too_large(step, cluster))
    return found


def _too_large(step: LayeredStep, cluster: ClusterSpec) -> str:
    needed = sum(state_bytes(step).values())
    have = float(cluster.device.memory) * cluster.num_devices
    return (
        f"the model's parameters, optimiser state and gradients take {needed / 1e9:.3g} GB, "
        f"the {cluster.num_devices} devices of {cluster.name} have {have / 1e9:.3g} GB: "
        f"{max(needed - have, 0.0) / 1e9:.3g} GB are missing at the least, or no division into stages fits. "
        "Use more devices (cluster.num_nodes) or a smaller model."
    )


def best_partitions(table: CostTable, cluster: ClusterSpec, step: LayeredStep, search: SearchOptions) -> tuple[StagePartition, ...]:
    """The best partitions by the stage DP, best first."""
    return partition_stages(
        table, cluster, num_microbatches=step.num_microbatches, memory_limit=float(cluster.device.memory), num_best=search.num_best
    )


def simulate_partition(pricer: StagePricer, partition: StagePartition, schedule: AbstractSchedule, seconds_of: SecondsOf) -> SimulatedPlan:
    """Run a partition's programs in virtual time."""
    stages = tuple(chosen_stage(pricer, choice) for choice in partition.stages)
    return simulate_stages(pricer, partition, stages, schedule, seconds_of)


def simulate_stages(
    pricer: StagePricer, partition: StagePartition, stages: tuple[Stage, ...], schedule: AbstractSchedule, seconds_of: SecondsOf
) -> SimulatedPlan:
    """The same for strategies that are given: `pricer` prices the meshes."""
    devices = place(partition, pricer.cluster)
    assembly = assemble(pricer.step, stages, schedule)
    priced: list[PricedStage] = []
    for choice, stage, ids in zip(partition.stages, stages, devices, strict=True):
        prices = pricer.solver(choice.submesh, choice.option.shape, remat=choice.option.remat).prices
        priced.append(PricedStage(ids, prices, seconds_of(choice, stage)))
    timeline = predict(assembly, priced, pricer.cluster)
    return SimulatedPlan(partition, stages, devices, assembly, timeline)


def analytic_seconds(pricer: StagePricer) -> SecondsOf:
    """Task seconds by the cost model; layers of equal content and choices are priced once."""
    known: dict[tuple[object, ...], StageSeconds] = {}

    def seconds_of(choice: StageChoice, stage: Stage) -> StageSeconds:
        solver = pricer.solver(choice.submesh, choice.option.shape, remat=choice.option.remat)

        def layer(chosen: ChosenLayer) -> StageSeconds:
            content = layer_content(pricer.step, chosen.problem.layer.index)
            key = (choice.submesh, choice.option.shape, choice.option.remat, content, chosen.choices)
            if key not in known:
                known[key] = layer_seconds(chosen, solver.prices)
            return known[key]

        return sum(map(layer, stage.layers), NO_SECONDS)

    return seconds_of


def chosen_stage(pricer: StagePricer, choice: StageChoice) -> Stage:
    """The strategies behind a stage of a partition."""
    option = choice.option
    candidate = StageCandidate(choice.start, choice.stop, choice.submesh, option.shape, option.remat)
    return Stage(option.shape, pricer.choose(candidate, option.variant))


def pick(plans: Sequence[SimulatedPlan], cluster: ClusterSpec) -> SimulatedPlan:
    """The fastest plan in virtual time among those whose peak fits a device."""
    fitting = [plan for plan in plans if max(plan.stage_bytes) <= cluster.device.memory]
    if not fitting:
        least = min(max(plan.stage_bytes) for plan in plans)
        raise InfeasibleError(
            f"none of the {len(plans)} best partitions fits once its temporary arrays are counted: "
            f"the smallest needs {least / 1e9:.3g} GB a device, {cluster.name} has {cluster.device.memory / 1e9:.3g} GB. "
            "Use more microbatches, search.remat=always, or search.num_best higher."
        )
    return min(fitting, key=lambda plan: plan.timeline.seconds)
