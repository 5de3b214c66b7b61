"""The parallel plan: everything ranks need to run, and nothing they can derive (DESIGN, "Plan").

A plan names stages, meshes and, for every layer, the strategy of each node of its sharding problem. Ranks trace the model again, build
the same problems and look the strategies up by name, so a plan made for another model or another version of the rules is refused, not
misread. What it was made for stands beside the plan in words, so that the refusal can say what differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import PlanError

PLAN_VERSION = 2
RULES_VERSION = 1  # raise when the sharding rules or the names of nodes change

Strategies = Mapping[str, str]  # node name -> label of its strategy


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers [start, stop) on global `devices` (row-major in `shape`); `strategies[i]` = row of the plan's table for layer start + i."""

    start: int
    stop: int
    submesh: Submesh
    shape: MeshShape
    devices: tuple[int, ...]
    remat: bool
    strategies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects; not part of what the plan means. Seconds, bytes a device of each stage."""

    iteration_seconds: float
    stage_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MadeFor:
    """What a plan was made for, each part as a text for people that ends in a key of its content; see `plan.fit.made_for`."""

    state: str
    batch: str
    microbatches: str
    layers: str
    update: str
    cluster: str
    software: str


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """A checked plan for one traced step on one cluster. `model_key` is the content of the layered step it was made for."""

    model_key: str
    num_layers: int
    num_devices: int
    num_microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    strategy_table: tuple[Strategies, ...]
    prediction: Prediction = field(compare=False)
    made_for: MadeFor = field(compare=False)

    @property
    def mesh_devices(self) -> tuple[tuple[int, ...], ...]:
        """Global device ids of each mesh."""
        return tuple(stage.devices for stage in self.stages)


def check_plan(plan: ParallelPlan) -> ParallelPlan:
    """Raise PlanError unless layers and devices are covered exactly; returns the plan."""
    check_layers(plan)
    check_devices(plan)
    check_strategies(plan)
    check_prediction(plan)
    return plan


def check_layers(plan: ParallelPlan) -> None:
    """Stages are consecutive runs of layers, from the first to the last."""
    expected = 0
    for index, stage in enumerate(plan.stages):
        if stage.start != expected or stage.stop <= stage.start:
            raise PlanError(f"stage {index} has layers {stage.start} to {stage.stop}, expected a run that starts at {expected}: plan again")
        expected = stage.stop
    if expected != plan.num_layers:
        raise PlanError(f"the stages cover {expected} layers, the model has {plan.num_layers}: plan again")


def check_devices(plan: ParallelPlan) -> None:
    """Every device of the cluster belongs to one stage, and each stage's shape lays out its devices."""
    used = sorted(device for stage in plan.stages for device in stage.devices)
    if used != list(range(plan.num_devices)):
        raise PlanError(f"the stages use devices {used}, expected each of 0..{plan.num_devices - 1} once: plan again")
    for index, stage in enumerate(plan.stages):
        sides = (*stage.shape.sizes, stage.submesh.num_nodes, stage.submesh.devices_per_node)
        if min(sides) < 1 or not len(stage.devices) == stage.shape.num_devices == stage.submesh.num_devices:
            raise PlanError(
                f"stage {index} has {len(stage.devices)} devices, its shape {stage.shape.sizes} and submesh {stage.submesh} disagree: "
                "plan again"
            )


def check_strategies(plan: ParallelPlan) -> None:
    """Each layer has a row of the strategy table."""
    for index, stage in enumerate(plan.stages):
        rows = len(stage.strategies)
        if rows != stage.stop - stage.start or any(not 0 <= row < len(plan.strategy_table) for row in stage.strategies):
            raise PlanError(
                f"stage {index} has {rows} strategy rows {stage.strategies}, expected one of the table for each of its layers: plan again"
            )


def check_prediction(plan: ParallelPlan) -> None:
    """The prediction has the bytes of each stage."""
    found = len(plan.prediction.stage_bytes)
    if found != len(plan.stages):
        raise PlanError(f"the prediction has the bytes of {found} stages, the plan has {len(plan.stages)}: plan again")
