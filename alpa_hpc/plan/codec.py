"""ParallelPlan <-> JSON text: versioned, readable, diffable; data, never pickle. And its hash: what the plan means, in 64 digits."""

import hashlib
import json
import re
from dataclasses import asdict
from typing import Any

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.plan.plan import PLAN_VERSION, RULES_VERSION, MadeFor, ParallelPlan, Prediction, StagePlan, check_plan

KIND = "alpa_hpc plan"
_NUMBERS = re.compile(r"\[\n([\d\s,]+)\]")  # a text of JSON has no line break inside, so this is a list of whole numbers


def plan_to_json(plan: ParallelPlan) -> str:
    """The plan as indented JSON that `diff` can compare: keys in a fixed order, a line each, and a list of numbers on one line."""
    document = {
        "kind": KIND,
        **meaning_to_json(plan),
        "prediction": {
            "iteration_seconds": plan.prediction.iteration_seconds,
            "stage_bytes": list(plan.prediction.stage_bytes),
        },
        "made_for": asdict(plan.made_for),
    }
    return _NUMBERS.sub(lambda found: f"[{' '.join(found.group(1).split())}]", json.dumps(document, indent=1)) + "\n"


def plan_hash(plan: ParallelPlan) -> str:
    """Equal for plans that mean the same, whatever they predict, were made by, or how their strategies are numbered (64 hex digits)."""
    table = [sorted(row.items()) for row in plan.strategy_table]
    stages = [{**stage_to_json(stage), "strategies": [table[row] for row in stage.strategies]} for stage in plan.stages]
    meaning = {**meaning_to_json(plan), "stages": stages, "strategies": []}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def meaning_to_json(plan: ParallelPlan) -> dict[str, Any]:
    """What ranks act by, as plain data."""
    return {
        "version": PLAN_VERSION,
        "rules_version": RULES_VERSION,
        "model_key": plan.model_key,
        "num_layers": plan.num_layers,
        "num_devices": plan.num_devices,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "stages": [stage_to_json(stage) for stage in plan.stages],
        "strategies": [dict(row) for row in plan.strategy_table],
    }


def stage_to_json(stage: StagePlan) -> dict[str, Any]:
    """One stage as plain data."""
    return {
        "layers": [stage.start, stage.stop],
        "submesh": [stage.submesh.num_nodes, stage.submesh.devices_per_node],
        "shape": [stage.shape.rows, stage.shape.cols],
        "devices": list(stage.devices),
        "remat": stage.remat,
        "strategies": list(stage.strategies),
    }


def plan_from_json(text: str, origin: str) -> ParallelPlan:
    """Read a plan; `origin` names the file in errors.

    Raises:
        PlanError: the text is torn, is no plan of ours, or is of another version.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{origin} is not complete JSON ({error}): it is torn or no plan. Delete it and plan again.") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise PlanError(f"{origin} is no plan of alpa_hpc (no field kind = {KIND!r}). Point to a plan.json of a run folder.")
    found = (document.get("version"), document.get("rules_version"))
    if found != (PLAN_VERSION, RULES_VERSION):
        raise PlanError(
            f"{origin} has plan and rules version {found}, this program reads {(PLAN_VERSION, RULES_VERSION)}: it was written by another "
            "version of alpa_hpc. Plan again, or use the version that wrote it."
        )
    try:
        plan = _plan(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{origin} lacks or garbles a field ({error!r}): it was edited or torn. Plan again.") from error
    return check_plan(plan)


def _plan(document: dict[str, Any]) -> ParallelPlan:
    prediction = document["prediction"]
    return ParallelPlan(
        str(document["model_key"]),
        int(document["num_layers"]),
        int(document["num_devices"]),
        int(document["num_microbatches"]),
        str(document["schedule"]),
        tuple(stage_from_json(stage) for stage in document["stages"]),
        tuple({str(name): str(label) for name, label in row.items()} for row in document["strategies"]),
        Prediction(float(prediction["iteration_seconds"]), tuple(int(b) for b in prediction["stage_bytes"])),
        MadeFor(**{str(part): str(text) for part, text in document["made_for"].items()}),
    )


def stage_from_json(stage: dict[str, Any]) -> StagePlan:
    """One stage from plain data."""
    start, stop = stage["layers"]
    return StagePlan(
        int(start),
        int(stop),
        Submesh(*map(int, stage["submesh"])),
        MeshShape(*map(int, stage["shape"])),
        tuple(int(device) for device in stage["devices"]),
        bool(stage["remat"]),
        tuple(int(row) for row in stage["strategies"]),
    )
