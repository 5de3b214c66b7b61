"""What the emission of programs reads: for every stage the arrays its tasks read and write, and their layouts (DESIGN, "Programs").

Stage i runs on mesh i. A *value* goes from the one stage that makes it straight to every stage that reads it; its cotangents go back the
same ways and are summed where it was made. A *shared param* is read by several stages: its owner (the first) updates it, the others hold
replicas. Numbers are positions as in `ir.work`: params and leaves in the flattened state, values by id, loss outputs and metrics by place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.instructions import Layout


@dataclass(frozen=True, slots=True)
class SharedParam:
    """Who holds a param that several stages read: `owner` updates it, `replicas` (all behind the owner) get the new value."""

    owner: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StageIO:
    """What one stage's tasks read and write. The order of every tuple is the order of the tasks' arguments.

    inputs / outputs:  values read from earlier stages / made here and read by later ones
    cotangent_inputs / cotangent_outputs: the inputs / outputs through which gradients flow
    gradients:         params with an accumulator here: all `owned`, and shared params this stage adds to
    leaves:            resident state leaves: owned params with their optimiser state, leaves repeated on every mesh, replicas
    loss_outputs:      positions of the loss outputs made here
    value_layouts:     layout of each input (as wanted) and of each output (as made)
    cotangent_layouts: layout of each cotangent output (as wanted) and of each cotangent input (as made)
    param_layouts / partial_layouts: for shared params, layout of state.P / of the gradient summed over the mesh
    """

    shape: MeshShape
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangent_inputs: tuple[int, ...]
    cotangent_outputs: tuple[int, ...]
    num_residuals: int
    params: tuple[int, ...]
    gradients: tuple[int, ...]
    leaves: tuple[int, ...]
    owned: tuple[int, ...]
    loss_outputs: tuple[int, ...]
    value_layouts: Mapping[int, Layout]
    cotangent_layouts: Mapping[int, Layout]
    param_layouts: Mapping[int, Layout]
    partial_layouts: Mapping[int, Layout]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineIO:
    """All stages, and what the meshes do together. `loss_kinds` has one kind a loss output, `rounds` those of `UpdateStep`."""

    stages: tuple[StageIO, ...]
    num_microbatches: int
    loss_kinds: tuple[ReductionKind, ...]
    rounds: tuple[tuple[ReductionKind, ...], ...]
    num_metrics: int
    shared_params: Mapping[int, SharedParam]

    @property
    def num_loss_outputs(self) -> int:
        """Loss outputs, of which every mesh has an accumulator."""
        return len(self.loss_kinds)

    @property
    def num_reductions(self) -> int:
        """Reductions over parameters, of all rounds."""
        return sum(map(len, self.rounds))

    def replicas_on(self, stage: int) -> tuple[int, ...]:
        """Params of which `stage` holds a replica, ascending."""
        return tuple(sorted(param for param, shared in self.shared_params.items() if stage in shared.replicas))


def partials_name(number: int) -> str:
    """The task that makes the scalars of a round of reductions."""
    return f"partials:{number}" if number else "partials"


def producer_of(pipeline: PipelineIO, value: int) -> int:
    """The stage that makes a value."""
    makers = [index for index, stage in enumerate(pipeline.stages) if value in stage.outputs]
    assert len(makers) == 1, f"value {value} is made by stages {makers}, expected exactly one"
    return makers[0]


def check_pipeline(pipeline: PipelineIO) -> PipelineIO:
    """Assert the rules across stages (each function below states one) and return the pipeline."""
    assert pipeline.stages, "a pipeline has at least one stage"
    assert pipeline.num_microbatches >= 1, f"{pipeline.num_microbatches} microbatches: expected at least 1"
    for index in range(len(pipeline.stages)):
        check_values(pipeline, index)
        check_params(pipeline, index)
        check_layouts(pipeline, index)
    check_shared(pipeline)
    made = {loss for stage in pipeline.stages for loss in stage.loss_outputs}
    assert made == set(range(pipeline.num_loss_outputs)), (
        f"loss outputs {sorted(made)} are made, expected 0..{pipeline.num_loss_outputs - 1}"
    )
    return pipeline


def check_values(pipeline: PipelineIO, index: int) -> None:
    """Inputs come from an earlier stage, outputs are read by a later one, and cotangents go both ways or neither."""
    stage = pipeline.stages[index]
    for value in stage.inputs:
        assert producer_of(pipeline, value) < index, f"stage {index} reads value {value}, which is not made by an earlier stage"
    later = pipeline.stages[index + 1 :]
    for value in stage.outputs:
        assert any(value in reader.inputs for reader in later), f"stage {index} gives out value {value}, which no later stage reads"
    assert set(stage.cotangent_inputs) <= set(stage.inputs), f"stage {index} makes cotangents of values it does not read"
    wanted = {value for value in stage.outputs if any(value in reader.cotangent_inputs for reader in later)}
    assert set(stage.cotangent_outputs) == wanted, (
        f"stage {index} wants cotangents of {sorted(stage.cotangent_outputs)}, later stages make those of {sorted(wanted)}"
    )


def check_params(pipeline: PipelineIO, index: int) -> None:
    """What is read is resident; what is owned has an accumulator and no other owner; what has one is owned or a replica."""
    stage = pipeline.stages[index]
    assert set(stage.params) | set(stage.owned) <= set(stage.leaves), f"stage {index} uses params that are not among its leaves"
    expected = set(stage.owned) | set(pipeline.replicas_on(index))
    assert set(stage.owned) <= set(stage.gradients) <= expected, (
        f"stage {index} accumulates {sorted(stage.gradients)}, expected all owned {sorted(stage.owned)} and perhaps its replicas"
    )
    for other in pipeline.stages[index + 1 :]:
        assert not set(stage.owned) & set(other.owned), f"a param of stage {index} has another owner"


def check_layouts(pipeline: PipelineIO, index: int) -> None:
    """Every array that crosses meshes has a layout, on the mesh of its stage."""
    stage = pipeline.stages[index]
    cotangents = (*stage.cotangent_inputs, *stage.cotangent_outputs)
    shared = tuple(param for param, place in pipeline.shared_params.items() if index in (place.owner, *place.replicas))
    summed = tuple(param for param in shared if param in stage.gradients)
    needs = (
        ("value", (*stage.inputs, *stage.outputs), stage.value_layouts),
        ("cotangent", cotangents, stage.cotangent_layouts),
        ("param", shared, stage.param_layouts),
        ("partial", summed, stage.partial_layouts),
    )
    for kind, wanted, layouts in needs:
        missing = sorted(set(wanted) - set(layouts))
        assert not missing, f"stage {index} has no {kind} layout of {missing}"
        foreign = [item for item in wanted if layouts[item].mesh != stage.shape]
        assert not foreign, f"stage {index} has {kind} layouts of {foreign} on another mesh than its own, {stage.shape}"


def check_shared(pipeline: PipelineIO) -> None:
    """The owner of a shared param owns it and stands before its replicas, which hold it as a leaf and do not own it."""
    for param, shared in pipeline.shared_params.items():
        assert param in pipeline.stages[shared.owner].owned, f"stage {shared.owner} does not own its shared param {param}"
        for replica in shared.replicas:
            assert replica > shared.owner, f"replica of param {param} on stage {replica}, not behind its owner {shared.owner}"
            assert param in pipeline.stages[replica].leaves, f"stage {replica} lacks its replica of param {param}"


def shortened(pipeline: PipelineIO) -> PipelineIO:
    """The pipeline with no more microbatches than it takes to see all that happens in it.

    Microbatches differ in their number alone, and a schedule repeats itself between filling and draining, which take S microbatches each:
    2 S + 2 have the filling, two repetitions and the draining.
    """
    return replace(pipeline, num_microbatches=min(pipeline.num_microbatches, 2 * len(pipeline.stages) + 2))
