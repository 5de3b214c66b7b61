"""ManualStages -> StagePartition with strategies: stages, meshes and what axes may split are given, the rest is solved as for our own.

Same cost model, same solver, same memory rule; only the search for stages is left out, and each stage's sharding problem is restricted.
Of a stage's options (`StagePricer.options`) the fastest that fits is taken, or the fastest of all where none fits: the caller looks at the
bytes of the simulated plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alpa_hpc.baselines.dim_kinds import microbatch_rows
from alpa_hpc.baselines.restrict import restrict_to
from alpa_hpc.baselines.restriction import FREE, AxisUse, Restriction
from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import StageChoice, StagePartition, iteration_seconds, one_forward_one_backward
from alpa_hpc.stages.placement import place_submeshes
from alpa_hpc.stages.pricing import StagePricer, boundary_bytes


@dataclass(frozen=True, slots=True)
class ManualStage:
    """Layers [start, stop) on `submesh` seen as `shape`, its strategies under `restriction`."""

    start: int
    stop: int
    submesh: Submesh
    shape: MeshShape
    remat: bool
    restriction: Restriction = FREE


@dataclass(frozen=True, slots=True, eq=False)
class ManualPlan:
    """A partition and the strategies of its stages, as `planner.search.simulate_stages` takes them."""

    partition: StagePartition
    stages: tuple[Stage, ...]


@dataclass(slots=True, eq=False)
class Pricers:
    """The pricers of one step on one cluster, one a restriction; they are kept, so equal stages of several plans are solved once."""

    step: LayeredStep
    cluster: ClusterSpec
    made: dict[Restriction, StagePricer] = field(default_factory=dict[Restriction, StagePricer])

    def under(self, restriction: Restriction) -> StagePricer:
        """The pricer of problems under `restriction`."""
        if restriction not in self.made:
            self.made[restriction] = StagePricer(self.step, self.cluster, restrict_to(restriction, self.step))
        return self.made[restriction]


def manual_partition(pricers: Pricers, stages: Sequence[ManualStage], memory_limit: float) -> ManualPlan:
    """The best strategies for given stages, preferably within `memory_limit` bytes a device.

    Raises PlanError if the stages do not cover layers and devices in order, or an axis for the batch does not divide a microbatch.
    """
    step, cluster = pricers.step, pricers.cluster
    check_manual(stages, step, cluster)
    choices: list[StageChoice] = []
    chosen: list[Stage] = []
    for position, stage in enumerate(stages):
        held = one_forward_one_backward(len(stages) - position, step.num_microbatches)
        option, strategies = _best(pricers.under(stage.restriction), stage, held, memory_limit)
        choices.append(StageChoice(stage.start, stage.stop, stage.submesh, option))
        chosen.append(strategies)
    cells = {(choice.start, choice.stop, choice.submesh): (choice.option,) for choice in choices}
    table = CostTable(len(step.layers), cells, boundary_bytes(step))
    seconds = iteration_seconds(choices, table, cluster, step.num_microbatches)
    return ManualPlan(StagePartition(tuple(choices), seconds, seconds), tuple(chosen))


def check_manual(stages: Sequence[ManualStage], step: LayeredStep, cluster: ClusterSpec) -> None:
    """PlanError unless the stages cover all layers in order and all devices, and the batch divides over the axes that are for it."""
    expected, rows = 0, microbatch_rows(step)
    for position, stage in enumerate(stages):
        if stage.start != expected or stage.stop <= stage.start:
            raise PlanError(
                f"stage {position} has {_layers_words(stage.start, stage.stop)}, expected layer {expected} to be its first: the model has "
                f"{_layers_words(0, len(step.layers))}, and each is in one stage, in their order"
            )
        if stage.shape.num_devices != stage.submesh.num_devices:
            raise PlanError(
                f"stage {position} sees {stage.submesh.num_devices} devices as {stage.shape.rows} x {stage.shape.cols}: "
                "make them equal in number"
            )
        for axis, (size, use) in enumerate(zip(stage.shape.sizes, stage.restriction.axes, strict=True)):
            if use is AxisUse.BATCH and rows % size:
                raise PlanError(
                    f"stage {position} splits a microbatch of {rows} rows over {size} devices of axis {axis}: use a divisor of {rows}"
                )
        expected = stage.stop
    if expected != len(step.layers):
        raise PlanError(
            f"the last stage ends with layer {expected - 1}, expected {len(step.layers) - 1}: the model has "
            f"{_layers_words(0, len(step.layers))} (layers.num_layers), and each is in one stage"
        )
    place_submeshes([stage.submesh for stage in stages], cluster)


def _layers_words(start: int, stop: int) -> str:
    """`layer 3`, `layers 0-2`; `no layer` where they end before they start."""
    if stop <= start:
        return "no layer"
    return f"layer {start}" if stop - start == 1 else f"layers {start}-{stop - 1}"


def _best(pricer: StagePricer, stage: ManualStage, held: int, memory_limit: float) -> tuple[StageOption, Stage]:
    """The fastest option within the limit, else the fastest; its temporary arrays counted as the chosen strategies need them."""
    candidate = StageCandidate(stage.start, stage.stop, stage.submesh, stage.shape, stage.remat)
    found: list[tuple[StageOption, Stage]] = []
    for option in pricer.options(candidate):
        layers = pricer.choose(candidate, option.variant)
        exact = replace(option, workspace_bytes=chosen_workspace(layers, stage.shape, hiding=pricer.cluster.device.hides_collectives))
        found.append((exact, Stage(stage.shape, layers)))
    if not found:
        raise PlanError(
            f"layers [{stage.start}, {stage.stop}) have no strategies on {stage.shape.rows} x {stage.shape.cols} "
            f"under {stage.restriction.name!r}: use another shape"
        )
    fitting = [pair for pair in found if pair[0].peak_bytes(held) <= memory_limit]
    return min(fitting or found, key=lambda pair: pair[0].seconds)
