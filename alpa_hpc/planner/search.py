"""LayeredStep + ClusterSpec -> partitions and their simulated programs: the parts of the paper's Algorithm 1, each pure.

candidates -> cost table -> best partitions (stage DP) -> programs in virtual time -> the fastest that fits
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_hpc.baselines.dim_kinds import microbatch_rows
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.families import equal_lengths, families, of_family, of_length
from alpa_hpc.runtime.assemble import Assembly, assemble
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.schedule import AbstractSchedule, GPipe, OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.breakdown import StageSeconds, layer_seconds
from alpa_hpc.sharding.shared_params import shared_seconds
from alpa_hpc.sharding.wiring import layer_content
from alpa_hpc.simulate.predict import PricedStage, predict
from alpa_hpc.simulate.timeline import Timeline
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.objective import StageChoice, StagePartition
from alpa_hpc.stages.options import Partitions, SearchOptions
from alpa_hpc.stages.partition import partition_stages
from alpa_hpc.stages.placement import place
from alpa_hpc.stages.pricing import StagePricer, by_mesh, possible, state_bytes
from alpa_hpc.units import bytes_words

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
    """Every stage worth pricing: the candidates of all families that the search may choose from, mesh after mesh.

    Raises:
        InfeasibleError: there are none, or the model's state alone is too large for those that there are.
        PlanError: stages are given that do not cover layers and devices, each once and in order.
    """
    found = by_mesh(dict.fromkeys(one for family in families(step, cluster, search) for one in family.candidates))
    if not found:
        raise InfeasibleError(no_division(step, cluster, search))
    if search.partitions is not Partitions.ANY:
        return found  # there are few, and once they are priced the stage DP says what the nearest of them lacks
    fitting = possible(found, step, cluster)
    if _covered(fitting) != _covered(found):
        raise _too_large(step, cluster, max(one.submesh.num_devices for one in found))
    return fitting


def _covered(candidates: Sequence[StageCandidate]) -> frozenset[int]:
    return frozenset(index for one in candidates for index in range(one.start, one.stop))


def no_division(step: LayeredStep, cluster: ClusterSpec, search: SearchOptions) -> str:
    """Why a search has no partition where memory is not what is missing, and nothing has failed."""
    return (
        f"search {search.name!r} has no way to run {len(step.layers)} layers and microbatches of {microbatch_rows(step)} rows on all "
        f"{cluster.num_devices} devices of {cluster.name}. More layers (layers.num_layers) give it more stages to choose from, larger "
        "microbatches (schedule.num_microbatches lower) more devices for each."
    )


def _too_large(step: LayeredStep, cluster: ClusterSpec, most_devices: int) -> InfeasibleError:
    held, memory = state_bytes(step), float(cluster.device.memory)
    needed, have = sum(held.values()), memory * cluster.num_devices
    largest = max(held.values())
    missing = max((needed - have) / cluster.num_devices, largest / most_devices - memory, 0.0)
    return InfeasibleError(
        f"the model's parameters, optimiser state and gradients take {bytes_words(needed)}, "
        f"the {cluster.num_devices} devices of {cluster.name} have {bytes_words(have)}: "
        f"{bytes_words(max(needed - have, 0.0))} are missing at the least, or no division into stages fits. The largest layer's take "
        f"{bytes_words(largest)}, the devices of one stage have up to {bytes_words(memory * most_devices)}. "
        "Use more devices (cluster.num_nodes) or a smaller model.",
        missing,
    )


def best_partitions(pricer: StagePricer, table: CostTable, search: SearchOptions) -> tuple[StagePartition, ...]:
    """The best partitions of all families by the stage DP, best first; none that the search allows goes below their bound.

    Raises InfeasibleError where there is none; of several families it tells what the nearest one lacks.
    """
    outcomes = partitions_by_family(pricer, table, search)
    found = [one for outcome in outcomes.values() if not isinstance(outcome, InfeasibleError) for one in outcome]
    if not found:
        refusals = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, InfeasibleError)}
        name, nearest = min(refusals.items(), key=lambda item: item[1].missing_bytes or float("inf"))
        among = f" (the nearest of {len(refusals)} ways: {name})" if len(refusals) > 1 else ""
        raise InfeasibleError(f"{nearest}{among}", nearest.missing_bytes) from nearest
    bound = min(one.lower_bound for one in found)
    ranked = sorted(found, key=lambda one: one.objective_seconds)[: search.num_best]
    return tuple(replace(one, lower_bound=bound) for one in (*ranked, *_equal_stages(pricer, table, search, ranked)))


def _equal_stages(
    pricer: StagePricer, table: CostTable, search: SearchOptions, ranked: Sequence[StagePartition]
) -> Sequence[StagePartition]:
    """The best partition into stages of as many layers each, where several are compared, any are allowed and this one is not `ranked`.

    Eq. 2 counts the dearest stage for all microbatches, its transfer included; programs overlap and spread that, so what is regular may be
    better than Eq. 2 says, and no search shall be worse than its own restriction to such stages.
    """
    if search.num_best == 1 or search.partitions is not Partitions.ANY:
        return ()
    outcomes = (_partitions(pricer, of_length(table, length), 1) for length in equal_lengths(table.num_layers))
    found = [one for outcome in outcomes if not isinstance(outcome, InfeasibleError) for one in outcome]
    best = min(found, key=lambda one: one.objective_seconds, default=None)
    return () if best is None or best.stages in [one.stages for one in ranked] else (best,)


def partitions_by_family(
    pricer: StagePricer, table: CostTable, search: SearchOptions
) -> Mapping[str, tuple[StagePartition, ...] | InfeasibleError]:
    """For each family, by name, its best partitions, or why it has none."""
    found = families(pricer.step, pricer.cluster, search)
    return {one.name: _partitions(pricer, table if len(found) == 1 else of_family(table, one), search.num_best) for one in found}


def refused_families(pricer: StagePricer, table: CostTable, search: SearchOptions) -> Mapping[str, InfeasibleError]:
    """Of several families, by name, those in which nothing fits, and what they lack."""
    if len(families(pricer.step, pricer.cluster, search)) == 1:
        return {}
    outcomes = partitions_by_family(pricer, table, search)
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, InfeasibleError)}


def _partitions(pricer: StagePricer, table: CostTable, num_best: int) -> tuple[StagePartition, ...] | InfeasibleError:
    cluster, num_microbatches = pricer.cluster, pricer.step.num_microbatches
    try:
        return partition_stages(
            table,
            cluster,
            num_microbatches=num_microbatches,
            memory_limit=float(cluster.device.memory),
            num_best=num_best,
            in_flight=pricer.in_flight,
        )
    except InfeasibleError as error:
        return error


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


def seconds_on(cluster: ClusterSpec, step: LayeredStep, plan: SimulatedPlan, schedule: AbstractSchedule) -> float:
    """Seconds of an iteration of a plan on another cluster with as many nodes and devices, by that one's description alone."""
    pricer = StagePricer(step, cluster)
    return simulate_stages(pricer, plan.partition, plan.stages, schedule, analytic_seconds(pricer)).timeline.seconds


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

        return sum(map(layer, stage.layers), shared_seconds(stage.layers, solver.prices))

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
            f"the smallest needs {bytes_words(least)} a device, {cluster.name} has {bytes_words(cluster.device.memory)}. "
            "Use more microbatches, search.remat=always, or search.num_best higher.",
            least - cluster.device.memory,
        )
    return min(fitting, key=lambda plan: plan.timeline.seconds)
