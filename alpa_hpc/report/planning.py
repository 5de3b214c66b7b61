"""What planning did and found -> planning.json: seconds of steps, counts, the plans that were compared, predictions."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.plan.plan import StagePlan
from alpa_hpc.planner.microbatches import TriedNumber, best_number
from alpa_hpc.planner.opening import all_bounds
from alpa_hpc.planner.refine import Refinement
from alpa_hpc.planner.search import SecondsOf, SimulatedPlan, refused_families
from alpa_hpc.profiling.outcome import Failed, Unmeasured
from alpa_hpc.runtime.instructions import Run
from alpa_hpc.sharding.replicated import replicated_share, replicated_work
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.objective import StagePartition
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.verify.check import TaskCheck
from alpa_hpc.verify.plan import PlanCheck


@dataclass(frozen=True, slots=True, eq=False)
class PlanningRecord:
    """Everything the planning job has to say."""

    search: SearchOptions
    candidates: Sequence[StageCandidate]
    pricer: StagePricer
    refinement: Refinement
    simulated: Sequence[SimulatedPlan]
    chosen: SimulatedPlan
    seconds_of: SecondsOf
    num_profiled: int
    num_reused: int
    checked: PlanCheck


class Basis(enum.Enum):
    """What a prediction for the machine that a plan runs on is based on."""

    CALIBRATION = "calibration"
    """devices and links as they were measured, communication included"""
    WORK_ALONE = "work alone"
    """all devices take turns on this machine's cores, and talking takes no time"""


@dataclass(frozen=True, slots=True)
class MachinePrediction:
    """Seconds of an iteration of the chosen plan on the machine as it is, beside those on the cluster as it is described (DESIGN 7.12)."""

    step_seconds: float
    basis: Basis


def planning_document(record: PlanningRecord, step: LayeredStep, flop: float, here: MachinePrediction) -> dict[str, Any]:
    """The document as plain data, but for how long it took."""
    chosen, cluster = record.chosen, record.pricer.cluster
    iteration, objective, bound = chosen.timeline.seconds, chosen.partition.objective_seconds, chosen.partition.lower_bound
    return {
        "search": record.search.name,
        "counts": counts(record, step),
        "num_microbatches": step.num_microbatches,
        "objective_seconds": objective,
        "lower_bound_seconds": bound,
        "gap": objective / bound - 1,
        "predicted_step_seconds": iteration,
        "predicted_step_seconds_this_machine": here.step_seconds,
        "prediction_for_this_machine": here.basis.value,
        "predicted_tflops_per_device": flop / iteration / cluster.num_devices / 1e12,
        "predicted_pflops": flop / iteration / 1e15,
        "iteration_flop": flop,
        "stage_bytes": list(chosen.stage_bytes),
        "memory_bytes": cluster.device.memory,
        "device_kind": cluster.device.kind,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "bubble_fractions": list(chosen.timeline.bubble_fractions),
        "replicated": replicated_report(chosen),
        "not_measured": not_measured_rows(record.refinement),
        "check": check_report(record.checked),
        "infeasible": infeasible_rows(record),
        "plans": [{"chosen": plan is chosen, **plan_row(plan)} for plan in record.simulated],
    }


def microbatches_document(tried: Sequence[TriedNumber]) -> dict[str, Any]:
    """The number of microbatches that was chosen, and what each gives: its best plan's simulated seconds, or why it has none."""
    rows = [
        {"num_microbatches": one.num_microbatches, "simulated_seconds": None if one.reason else one.seconds, "reason": one.reason}
        for one in tried
    ]
    return {"chosen": best_number(tried), "tried": rows}


def counts(record: PlanningRecord, step: LayeredStep) -> dict[str, int]:
    """How much there was, and how much of it was really worked on."""
    return {
        "operators": sum(len(layer.forward.jaxpr.eqns) + len(layer.backward.jaxpr.eqns) for layer in step.layers),
        "layers": len(step.layers),
        "distinct_layers": len({layer.key for layer in step.layers}),
        "candidates": len(record.candidates),
        "candidates_priced": len(record.candidates) - len(all_bounds(record.refinement.analytic)),
        "distinct_problems": record.pricer.num_problems,
        "distinct_runs_solved": record.pricer.num_runs,
        "distinct_runs_known": record.pricer.num_known,
        "solved_by_elimination_alone": record.pricer.num_runs - record.pricer.num_wide,
        "profile_tasks_new": record.num_profiled,
        "profile_tasks_reused": record.num_reused,
        "profile_rounds": record.refinement.num_rounds,
    }


def not_measured_rows(refinement: Refinement) -> list[dict[str, str]]:
    """What was to be measured and was not, each request once: "failed" is in no plan, "unmeasured" keeps its modelled cost."""
    found = {(one.request.label, _outcome_word(one.outcome), one.outcome.reason) for one in refinement.evidence.not_measured.values()}
    return [{"label": label, "outcome": outcome, "reason": reason} for label, outcome, reason in sorted(found)]


def infeasible_rows(record: PlanningRecord) -> list[dict[str, Any]]:
    """The ways of a search that ties stages to each other (points of Megatron's grid, say) in which nothing fits, and what they lack."""
    outcomes = refused_families(record.pricer, record.refinement.table, record.search)
    return [{"way": name, "reason": str(error), "missing_bytes": error.missing_bytes} for name, error in outcomes.items()]


def _outcome_word(outcome: Failed | Unmeasured) -> str:
    match outcome:
        case Failed():
            return "failed"
        case Unmeasured():
            return "unmeasured"


def plan_row(plan: SimulatedPlan) -> dict[str, Any]:
    """One compared plan."""
    return {
        "simulated_seconds": plan.timeline.seconds,
        "objective_seconds": plan.partition.objective_seconds,
        "stages": stage_rows(plan.partition),
        "devices": [list(devices) for devices in plan.devices],
        "stage_bytes": list(plan.stage_bytes),
    }


def stage_rows(partition: StagePartition) -> list[dict[str, Any]]:
    """The stages of a partition for people."""
    return [
        {
            "layers": [choice.start, choice.stop],
            "submesh": [choice.submesh.num_nodes, choice.submesh.devices_per_node],
            "shape": [choice.option.shape.rows, choice.option.shape.cols],
            "remat": choice.option.remat,
            "variant": choice.option.variant,
            "seconds_a_microbatch": choice.option.seconds,
            "measured": choice.option.measured,
        }
        for choice in partition.stages
    ]


def replicated_report(plan: SimulatedPlan) -> dict[str, Any]:
    """Operators that run whole on every device for want of a sharding rule, and their share of FLOP and bytes."""
    problems = [layer.problem for stage in plan.stages if stage.shape.num_devices > 1 for layer in stage.layers]
    share = replicated_share(problems)
    operators = {work.primitive: work.count for work in replicated_work(problems)}
    return {"operators": operators, "flop_share": share.flop, "bytes_share": share.num_bytes}


def check_report(checked: PlanCheck) -> dict[str, Any]:
    """The compiled code of a plan's distinct tasks against the plan: bytes a device of each collective and at the peak.

    `not_compiled`: tasks that the compiler failed on, of which nothing is known.
    """
    rows = [{"stage": stage.stage, **_task_row(task)} for stage in checked.stages for task in stage.tasks]
    failures = [{"stage": one.stage, "task": task.task, "reason": task.reason} for one in checked.stages for task in one.not_compiled]
    return {"target": checked.target.value, "tasks": rows, "mismatches": list(checked.mismatches), "not_compiled": failures}


def _task_row(task: TaskCheck) -> dict[str, Any]:
    collectives = [
        {
            "kind": one.lane.kind.value,
            "axes": list(one.lane.axes),
            "num_devices": one.num_devices,
            "planned_bytes": one.planned_bytes,
            "compiled_bytes": one.compiled_bytes,
        }
        for one in task.lanes
    ]
    peaks = {"planned_peak_bytes": task.memory.planned_peak, "compiled_peak_bytes": task.memory.compiled_peak}
    return {"task": task.task, **peaks, "collectives": collectives}


def shared_cores_seconds(plan: SimulatedPlan, seconds_of: SecondsOf, num_cores: int) -> float:
    """Seconds of an iteration if all devices took turns on `num_cores` cores and talking took no time."""
    busy = 0.0
    for choice, stage, outline in zip(plan.partition.stages, plan.stages, plan.assembly.outlines, strict=True):
        seconds = seconds_of(choice, stage)
        table = {"forward": seconds.forward.compute, "backward": seconds.backward.compute, "update": seconds.update.compute}
        parts = [sum(table.get(one.task, 0.0) for one in part if isinstance(one, Run)) for part in outline.parts]
        runs = sum(parts[part] for part, _ in outline.order)
        busy += runs * stage.shape.num_devices
    return busy / num_cores


def iteration_flop(model: object, step: LayeredStep, batch_size: int, *, recomputed: float, count: Callable[[LayeredStep], float]) -> float:
    """FLOP of an iteration: by the model's published convention where it states one, else by counting operators.

    `recomputed` is the part of the forward pass, by FLOP, that a plan runs once more in its backward pass; counting leaves that out.
    """
    stated = getattr(model, "iteration_flops", None)
    if stated is None:
        return count(step)
    once, again = float(stated(batch_size, False)), float(stated(batch_size, True))  # noqa: FBT003 - the switch of the model's formula
    return (1 - recomputed) * once + recomputed * again


def recomputed_share(stages: Sequence[StagePlan], layer_flop: Sequence[float]) -> float:
    """The part of the layers' forward FLOP that lies in stages with recomputation: 0 where none has it, 1 where all have."""
    shares = [sum(layer_flop[stage.start : stage.stop]) for stage in stages if stage.remat]
    return sum(shares) / max(sum(layer_flop), 1)
