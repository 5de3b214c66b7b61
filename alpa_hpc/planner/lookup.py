"""Chosen stages <-> ParallelPlan: strategies are written by name and looked up by name, so a foreign plan is refused, not misread."""

from collections.abc import Sequence

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.errors import PlanError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.plan.fit import check_made_for, made_for
from alpa_hpc.plan.plan import ParallelPlan, Prediction, StagePlan, Strategies, check_plan
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan
from alpa_hpc.runtime.assemble import short_programs
from alpa_hpc.runtime.check import check_programs
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.schedule import AbstractSchedule
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem, SpecSpace
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.stage import layer_problem

SPACE = "space"


def make_plan(step: LayeredStep, chosen: SimulatedPlan, cluster: ClusterSpec, schedule: ScheduleKind) -> ParallelPlan:
    """The plan as data: strategies by name, equal layers sharing a row; its programs are proved to run (see `short_programs`).

    Raises:
        ProgramError: they cannot, which is a fault of ours.
    """
    check_programs(short_programs(chosen.assembly, SCHEDULES[schedule]), SCHEDULES[schedule])
    table: list[Strategies] = []
    stages: list[StagePlan] = []
    for choice, stage, devices in zip(chosen.partition.stages, chosen.stages, chosen.devices, strict=True):
        rows: list[int] = []
        for layer in stage.layers:
            strategies = strategies_of(layer)
            if strategies not in table:
                table.append(strategies)
            rows.append(table.index(strategies))
        stages.append(StagePlan(choice.start, choice.stop, choice.submesh, stage.shape, devices, choice.option.remat, tuple(rows)))
    seconds = float(f"{chosen.timeline.seconds:.6g}")  # the digits behind differ between machines that add up differently
    prediction = Prediction(seconds, chosen.stage_bytes)
    return check_plan(
        ParallelPlan(
            model_key=step.key,
            num_layers=len(step.layers),
            num_devices=cluster.num_devices,
            num_microbatches=step.num_microbatches,
            schedule=schedule.value,
            stages=tuple(stages),
            strategy_table=tuple(table),
            prediction=prediction,
            made_for=made_for(step, cluster),
        )
    )


def strategies_of(layer: ChosenLayer) -> Strategies:
    """Node name -> label of the chosen strategy; nodes without a choice are left out. SPACE says among which specs they were chosen."""
    problem = layer.problem
    rows = zip(problem.problem.names, problem.labels, layer.choices, strict=True)
    return {SPACE: problem.space.value} | {name: labels[choice] for name, labels, choice in rows if len(labels) > 1}


def check_plan_fits(plan: ParallelPlan, step: LayeredStep, cluster: ClusterSpec, schedule: ScheduleKind) -> ParallelPlan:
    """Refuse a plan before anything is started for it: everything that ranks would refuse, and another schedule than is asked for.

    Raises:
        PlanError: what was found, and what was expected. Returns the plan.
    """
    if schedule_of(plan) is not SCHEDULES[schedule]:
        raise PlanError(
            f"the plan was made for the schedule {plan.schedule}, this run asks for {schedule.value}: plan again, or ask for that schedule."
        )
    stages_of_plan(plan, step, cluster)
    return plan


def schedule_of(plan: ParallelPlan) -> AbstractSchedule:
    """The schedule that a plan names. Raises PlanError where there is none of that name."""
    try:
        return SCHEDULES[ScheduleKind(plan.schedule)]
    except ValueError as error:
        known = ", ".join(kind.value for kind in SCHEDULES)
        raise PlanError(f"the plan names the schedule {plan.schedule!r}, expected one of {known}: it was edited. Plan again.") from error


def stages_of_plan(plan: ParallelPlan, step: LayeredStep, cluster: ClusterSpec) -> tuple[Stage, ...]:
    """The stages of a plan, strategies looked up by name.

    Raises:
        PlanError: the plan was made for another model, batch, cluster or version of the rules, or it was edited.
    """
    check_made_for(plan, step, cluster)
    return tuple(stage_of_plan(stage, plan.strategy_table, step, cluster) for stage in plan.stages)


def stage_of_plan(stage: StagePlan, table: Sequence[Strategies], step: LayeredStep, cluster: ClusterSpec) -> Stage:
    """One stage of a plan."""
    prices = MeshPrices(logical_mesh(cluster, stage.submesh, stage.shape))
    layers: list[ChosenLayer] = []
    for index, row in zip(range(stage.start, stage.stop), stage.strategies, strict=True):
        problem = layer_problem(step, index, prices, remat=stage.remat, space=space_of(table[row]))
        layers.append(chosen_by_name(problem, table[row]))
    return Stage(stage.shape, tuple(layers))


def space_of(strategies: Strategies) -> SpecSpace:
    """Among which specs strategies were chosen. Raises PlanError where they do not say."""
    try:
        return SpecSpace(strategies.get(SPACE))
    except ValueError as error:
        raise PlanError(f"the plan's strategies name the space {strategies.get(SPACE)!r}, expected full or narrow: plan again.") from error


def chosen_by_name(problem: LayerProblem, strategies: Strategies) -> ChosenLayer:
    """Look up a layer's strategies. Raises PlanError where a name or label is unknown."""
    unknown = strategies.keys() - {SPACE, *problem.problem.names}
    if unknown:
        raise PlanError(
            f"the plan gives a strategy to {', '.join(sorted(unknown)[:6])}, which the layer does not have: "
            "it was made by another version of the sharding rules, or edited. Plan again."
        )
    choices: list[int] = []
    for name, labels in zip(problem.problem.names, problem.labels, strict=True):
        label = strategies.get(name, labels[0] if len(labels) == 1 else "")
        if label not in labels:
            known = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
            raise PlanError(
                f"the plan gives node {name} the strategy {label!r}, expected one of {known}: "
                "it was made by another version of the sharding rules, or edited. Plan again."
            )
        choices.append(labels.index(label))
    return ChosenLayer(problem, tuple(choices))
