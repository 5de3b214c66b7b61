"""A stage = the chosen layers of one mesh -> StageIO: which arrays its tasks read and write, and how they lie (DESIGN 7.1, 7.9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.core import ShapedArray

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import LayeredStep, ReductionKind
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.pipeline import PipelineIO, SharedParam, StageIO
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import UpdateProgram
from alpa_hpc.sharding.spec import Spec, common_spec, replicated


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Consecutive layers on a mesh of `shape`, each with its strategies."""

    shape: MeshShape
    layers: tuple[ChosenLayer, ...]

    def readers(self, param: int) -> tuple[ChosenLayer, ...]:
        """The layers that read a parameter; the first one's spec is how it is stored."""
        return tuple(layer for layer in self.layers if param in layer.problem.layer.params)

    def param_spec(self, param: int) -> Spec:
        """How a parameter is stored here."""
        return param_spec(self.readers(param)[0], param)

    def batch_spec(self, batch_input: int) -> Spec:
        """How a batch input is fed: split no further than all its readers want it, so that each cuts its tile and nobody must gather."""
        return common_spec([batch_spec(layer, batch_input) for layer in self.layers if batch_input in layer.problem.layer.batch])

    def update_of(self, param: int) -> tuple[ChosenLayer, UpdateProgram]:
        """The update of an owned parameter and the layer it was planned with."""
        for layer in self.layers:
            for program in layer.problem.updates:
                if program.work.param == param:
                    return layer, program
        raise AssertionError(f"parameter {param} is not owned by this stage")

    def inner_values(self) -> tuple[int, ...]:
        """Values made by one layer of the stage and read by another: kept for the backward like residuals."""
        made = [v for layer in self.layers for v in layer.problem.layer.outputs]
        read = {v for layer in self.layers for v in layer.problem.layer.inputs}
        return tuple(v for v in made if v in read)

    def port_spec(self, kind: str, value: int) -> Spec:
        """How a value ("value") or its cotangent ("cotangent") lies at layer borders of this stage."""
        for layer in self.layers:
            problem = layer.problem
            groups = (*problem.inputs, *problem.outputs) if kind == "value" else (*problem.cotangent_inputs, *problem.cotangent_outputs)
            for port in groups:
                if port.value == value:
                    return layer.spec(port.tensor)
        raise AssertionError(f"{kind} {value} does not touch this stage")


def param_spec(layer: ChosenLayer, param: int) -> Spec:
    """How a layer reads a parameter."""
    return layer.spec(layer.problem.params[layer.problem.layer.params.index(param)])


def gradient_spec(layer: ChosenLayer, param: int) -> Spec:
    """How a layer's gradient of a parameter lies, partial axes included."""
    return layer.spec(layer.problem.gradients[layer.problem.layer.params.index(param)])


def batch_spec(layer: ChosenLayer, batch_input: int) -> Spec:
    """How a layer reads a batch input."""
    return layer.spec(layer.problem.batch[layer.problem.layer.batch.index(batch_input)])


def whole_layout(aval: ShapedArray, shape: MeshShape) -> Layout:
    """The layout of an array that every device holds whole."""
    return layout_of(aval, replicated(len(aval.shape)), shape)


def layout_of(aval: ShapedArray, spec: Spec, shape: MeshShape) -> Layout:
    """The layout of an array of `aval`."""
    return Layout(tuple(aval.shape), str(aval.dtype), spec, shape)


def describe_pipeline(step: LayeredStep, stages: Sequence[Stage]) -> PipelineIO:
    """What the emission of programs needs to know of the stages."""
    shared = shared_params(stages)
    return PipelineIO(
        tuple(describe_stage(step, stages, index, shared) for index in range(len(stages))),
        step.num_microbatches,
        tuple(ReductionKind.SUM for _ in step.loss_outputs),
        tuple(one.kinds for one in step.update.rounds),
        len(step.metric_names),
        shared,
    )


def shared_params(stages: Sequence[Stage]) -> Mapping[int, SharedParam]:
    """Parameters that several stages read; the first of them owns it."""
    places: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        for param in dict.fromkeys(p for layer in stage.layers for p in layer.problem.layer.params):
            places.setdefault(param, []).append(index)
    return {param: SharedParam(at[0], tuple(at[1:])) for param, at in sorted(places.items()) if len(at) > 1}


def describe_stage(step: LayeredStep, stages: Sequence[Stage], index: int, shared: Mapping[int, SharedParam]) -> StageIO:
    """The arrays of one stage's tasks."""
    stage = stages[index]
    layers = [chosen.problem.layer for chosen in stage.layers]
    params = tuple(dict.fromkeys(p for layer in layers for p in layer.params))
    owned = tuple(program.work.param for chosen in stage.layers for program in chosen.problem.updates)
    made = {v for layer in layers for v in layer.outputs}
    behind = step.layers[layers[-1].index + 1 :]
    later = {v for layer in behind for v in layer.inputs}
    wanted = {v for layer in behind for v in layer.cotangent_inputs}
    inputs = tuple(dict.fromkeys(v for layer in layers for v in layer.inputs if v not in made))
    outputs = tuple(v for layer in layers for v in layer.outputs if v in later)
    cotangent_inputs = tuple(v for v in inputs if any(v in layer.cotangent_inputs for layer in layers))
    cotangent_outputs = tuple(v for v in outputs if v in wanted)
    leaves = (*(leaf for p in owned for leaf in stage.update_of(p)[1].work.leaves), *step.update.shared_leaves)
    replicas = tuple(p for p in params if p not in owned)
    return StageIO(
        shape=stage.shape,
        batch=tuple(dict.fromkeys(b for layer in layers for b in layer.batch)),
        inputs=inputs,
        outputs=outputs,
        cotangent_inputs=cotangent_inputs,
        cotangent_outputs=cotangent_outputs,
        num_residuals=sum(len(chosen.problem.residuals) for chosen in stage.layers) + len(stage.inner_values()),
        params=params,
        gradients=params,
        leaves=(*leaves, *replicas),
        owned=owned,
        loss_outputs=tuple(k for k, output in enumerate(step.loss_outputs) if output.value in made),
        value_layouts=_layouts(step, stage, "value", (*inputs, *outputs)),
        cotangent_layouts=_layouts(step, stage, "cotangent", (*cotangent_inputs, *cotangent_outputs)),
        param_layouts={p: layout_of(step.state_avals[p], stage.param_spec(p), stage.shape) for p in params if p in shared},
        partial_layouts={p: layout_of(step.state_avals[p], partial_spec(stage, p), stage.shape) for p in params if p in shared},
    )


def _layouts(step: LayeredStep, stage: Stage, kind: str, values: Sequence[int]) -> Mapping[int, Layout]:
    return {v: layout_of(step.values[v], stage.port_spec(kind, v), stage.shape) for v in values}


def partial_spec(stage: Stage, param: int) -> Spec:
    """How a shared parameter's gradient lies once it is summed over this mesh: as the update wants it, or as the replica's node chose."""
    for layer in stage.readers(param):
        for program in layer.problem.updates:
            if program.work.param == param:
                return layer.spec(program.gradient)
    first = stage.readers(param)[0]
    return first.spec(dict(first.problem.replicas)[param])
