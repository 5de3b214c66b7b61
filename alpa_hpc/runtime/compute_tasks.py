"""The tasks that run once a microbatch: forward, backward, sums of cotangents, and the local all-gathers after a transfer."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import jax
from jax import lax

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.instructions import Layout, Recv, Run
from alpa_hpc.runtime.outline import AbstractProgram, distinct
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage, batch_spec, gradient_spec, layout_of, param_spec, whole_layout
from alpa_hpc.runtime.tasks import (
    Argument,
    Local,
    LocalFunction,
    StageTask,
    accumulate,
    accumulators,
    arrays,
    one_array,
    split_arguments,
    tile_zeros,
)
from alpa_hpc.sharding.apply import ChosenLayer, reshard, run_program
from alpa_hpc.sharding.place import Place

Arrays = dict[int, jax.Array]


def gradient_layouts(step: LayeredStep, stage: Stage, param: int) -> tuple[Layout, ...]:
    """The accumulators of a parameter: one for each layer that reads it, as that layer's gradient lies."""
    aval = step.state_avals[param]
    return tuple(layout_of(aval, gradient_spec(layer, param), stage.shape) for layer in stage.readers(param))


def residual_layouts(step: LayeredStep, stage: Stage) -> tuple[Layout, ...]:
    """What forward keeps for backward: the residuals of each layer, then the values that went from layer to layer."""
    layouts: list[Layout] = []
    for chosen in stage.layers:
        layer = chosen.problem.layer
        variables = layer.forward.jaxpr.outvars[len(layer.outputs) :]
        for tensor, var in zip(chosen.problem.residuals, variables, strict=False):
            layouts.append(layout_of(aval_of(var), chosen.spec(tensor), stage.shape))
    inner = [layout_of(step.values[v], stage.port_spec("value", v), stage.shape) for v in stage.inner_values()]
    return (*layouts, *inner)


def read_layouts(step: LayeredStep, stage: Stage, io: StageIO) -> tuple[Layout, ...]:
    """Parameters, batch inputs and values that forward and backward both read."""
    params = [layout_of(step.state_avals[p], stage.param_spec(p), stage.shape) for p in io.params]
    batch = [layout_of(step.batch_avals[b], stage.batch_spec(b), stage.shape) for b in io.batch]
    return (*params, *batch, *(io.value_layouts[v] for v in io.inputs))


def loss_layouts(step: LayeredStep, stage: Stage, loss_outputs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Loss outputs, whole on every device."""
    avals = [step.values[step.loss_outputs[k].value] for k in loss_outputs]
    return tuple(whole_layout(aval, stage.shape) for aval in avals)


def zeros_task(step: LayeredStep, stage: Stage, io: StageIO) -> StageTask:
    """[] -> gradient accumulators and loss accumulators, all zero."""
    outputs: tuple[Argument, ...] = (
        *(gradient_layouts(step, stage, p) for p in io.gradients),
        *loss_layouts(step, stage, tuple(range(len(step.loss_outputs)))),
    )

    def function(place: Place) -> LocalFunction:
        del place
        return lambda: tuple(tile_zeros(one) if isinstance(one, Layout) else tuple(map(tile_zeros, one)) for one in outputs)

    return StageTask("zeros", function, (), outputs)


def forward_task(step: LayeredStep, stage: Stage, io: StageIO) -> StageTask:
    """[params, batch, inputs, extras] -> [outputs, residuals, extras]."""
    reads = read_layouts(step, stage, io)
    extras = loss_layouts(step, stage, io.loss_outputs)
    outputs = (*(io.value_layouts[v] for v in io.outputs), *residual_layouts(step, stage), *extras)

    def function(place: Place) -> LocalFunction:
        def run(*arguments: Local) -> tuple[Local, ...]:
            groups = split_arguments(arguments, (len(io.params), len(io.batch), len(io.inputs), len(extras)))
            state, batch, values = _named(io, groups)
            residuals: list[jax.Array] = []
            for chosen in stage.layers:
                residuals += _forward_layer(stage, chosen, state, batch, values, place)
            totals = [
                accumulate(step, k, total, values[step.loss_outputs[k].value])
                for k, total in zip(io.loss_outputs, arrays(groups[3]), strict=True)
            ]
            inner = [values[v] for v in stage.inner_values()]
            return (*(values[v] for v in io.outputs), *residuals, *inner, *totals)

        return run

    donated = tuple(range(len(reads), len(reads) + len(extras)))
    return StageTask("forward", function, (*reads, *extras), outputs, donated)


def score_task(step: LayeredStep, stage: Stage, io: StageIO) -> StageTask:
    """[params, batch, inputs, extras] -> [outputs, extras]: the forward that keeps nothing for a backward."""
    forward = forward_task(step, stage, io)
    first, last = len(io.outputs), len(io.outputs) + io.num_residuals
    kept = forward.outputs[:first] + forward.outputs[last:]

    def function(place: Place) -> LocalFunction:
        run = forward.function(place)

        def score(*arguments: Local) -> tuple[Local, ...]:
            results = run(*arguments)
            return results[:first] + results[last:]

        return score

    return StageTask("score", function, forward.inputs, kept, forward.donated)


def zero_losses_task(step: LayeredStep, stage: Stage) -> StageTask:
    """[] -> loss accumulators, all zero."""
    outputs = loss_layouts(step, stage, tuple(range(len(step.loss_outputs))))

    def function(place: Place) -> LocalFunction:
        del place
        return lambda: tuple(map(tile_zeros, outputs))

    return StageTask("zero_losses", function, (), outputs)


def _named(io: StageIO, groups: Sequence[Sequence[Local]]) -> tuple[Arrays, Arrays, Arrays]:
    """Parameters, batch inputs and values by their numbers."""
    state = dict(zip(io.params, arrays(groups[0]), strict=True))
    batch = dict(zip(io.batch, arrays(groups[1]), strict=True))
    return state, batch, dict(zip(io.inputs, arrays(groups[2]), strict=True))


def _forward_layer(stage: Stage, chosen: ChosenLayer, state: Arrays, batch: Arrays, values: Arrays, place: Place) -> list[jax.Array]:
    """Put the layer's outputs into `values`; what comes back are its residuals."""
    problem = chosen.problem
    results = run_program(problem.forward, chosen, _layer_reads(stage, chosen, state, batch, values, place), place)
    for port, tensor, x in zip(problem.outputs, problem.forward.outputs, results, strict=False):
        values[port.value] = reshard(x, chosen.spec(tensor), chosen.spec(port.tensor), place)
    return [] if problem.remat else results[len(problem.outputs) :]


def _layer_reads(stage: Stage, chosen: ChosenLayer, state: Arrays, batch: Arrays, values: Arrays, place: Place) -> tuple[jax.Array, ...]:
    """What a layer reads, as it wants it."""
    layer = chosen.problem.layer
    params = [reshard(state[p], stage.param_spec(p), param_spec(chosen, p), place) for p in layer.params]
    inputs = [reshard(batch[b], stage.batch_spec(b), batch_spec(chosen, b), place) for b in layer.batch]
    return (*params, *inputs, *(values[v] for v in layer.inputs))


def backward_task(step: LayeredStep, stage: Stage, io: StageIO) -> StageTask:
    """[params, batch, inputs, residuals, cotangents, gradients] -> [cotangents of inputs, gradients]."""
    reads = read_layouts(step, stage, io)
    residuals = residual_layouts(step, stage)
    cotangents = tuple(io.cotangent_layouts[v] for v in io.cotangent_outputs)
    gradients = tuple(gradient_layouts(step, stage, p) for p in io.gradients)
    counts = (len(io.params), len(io.batch), len(io.inputs), len(residuals), len(cotangents), len(gradients))

    def function(place: Place) -> LocalFunction:
        def run(*arguments: Local) -> tuple[Local, ...]:
            groups = split_arguments(arguments, counts)
            state, batch, values = _named(io, groups)
            kept = _kept(stage, arrays(groups[3]), values)
            flowing = dict(zip(io.cotangent_outputs, arrays(groups[4]), strict=True))
            sums = {p: list(accumulators(x)) for p, x in zip(io.gradients, groups[5], strict=True)}
            for chosen, own in reversed(list(zip(stage.layers, kept, strict=True))):
                reads = _layer_reads(stage, chosen, state, batch, values, place)
                _backward_layer(stage, chosen, (*reads, *own), flowing, sums, place)
            return (*(flowing[v] for v in io.cotangent_inputs), *(tuple(sums[p]) for p in io.gradients))

        return run

    first = len(reads) + len(residuals) + len(cotangents)
    inputs: tuple[Argument, ...] = (*reads, *residuals, *cotangents, *gradients)
    outputs: tuple[Argument, ...] = (*(io.cotangent_layouts[v] for v in io.cotangent_inputs), *gradients)
    return StageTask("backward", function, inputs, outputs, tuple(range(first, first + len(gradients))))


def _kept(stage: Stage, residuals: Sequence[jax.Array], values: Arrays) -> list[Sequence[jax.Array]]:
    """The residuals of each layer; the values that went from layer to layer, which stand behind them, are put into `values`."""
    kept: list[Sequence[jax.Array]] = []
    start = 0
    for chosen in stage.layers:
        stop = start + len(chosen.problem.residuals)
        kept.append(residuals[start:stop])
        start = stop
    values.update(zip(stage.inner_values(), residuals[start:], strict=True))
    return kept


def _backward_layer(
    stage: Stage, chosen: ChosenLayer, reads: Sequence[jax.Array], flowing: Arrays, sums: dict[int, list[jax.Array]], place: Place
) -> None:
    """Add the layer's cotangents to `flowing` and its gradients to `sums`."""
    problem = chosen.problem
    missing = [port.value for port in problem.cotangent_outputs if port.value not in flowing]
    assert not missing, f"no cotangents of values {missing} arrive at layer {problem.layer.index}"
    arriving = [flowing[port.value] for port in problem.cotangent_outputs]
    if problem.remat:  # the barrier keeps XLA from recomputing a layer before its cotangents are there
        reads, arriving = lax.optimization_barrier((tuple(reads), arriving))
        reads = (*reads, *run_program(problem.forward, chosen, reads, place)[len(problem.outputs) :])
    results = run_program(problem.backward, chosen, [*reads, *arriving], place)
    for port, tensor, x in zip(problem.cotangent_inputs, problem.backward.outputs, results, strict=False):
        piece = reshard(x, chosen.spec(tensor), chosen.spec(port.tensor), place)
        flowing[port.value] = flowing[port.value] + piece if port.value in flowing else piece
    gradients = results[len(problem.cotangent_inputs) :]
    for param, gradient in zip(problem.layer.params, gradients, strict=True):
        slot = stage.readers(param).index(chosen)
        sums[param][slot] = sums[param][slot] + gradient


def sum_task(io: StageIO, value: int, num_parts: int) -> StageTask:
    """The cotangents of a value that several meshes read, added up."""
    layout = io.cotangent_layouts[value]

    def function(place: Place) -> LocalFunction:
        del place
        return lambda *parts: (reduce(add, arrays(parts)),)

    return StageTask(f"sum:{value}", function, (layout,) * num_parts, (layout,))


def gather_task(name: str, wire: Layout, wanted: Layout) -> StageTask:
    """From the layout in which an array crosses meshes to the one its reader wants."""

    def function(place: Place) -> LocalFunction:
        return lambda x: (reshard(one_array(x), wire.spec, wanted.spec, place),)

    return StageTask(name, function, (wire,), (wanted,))


def arriving_tasks(program: AbstractProgram, io: StageIO) -> tuple[StageTask, ...]:
    """The gather and sum tasks that a program runs."""
    wires = {one.buffer.name: one.target for one in distinct(program) if isinstance(one, Recv)}
    tasks: dict[str, StageTask] = {}
    for one in distinct(program):
        if isinstance(one, Run) and one.task not in tasks:
            kind, _, name = one.task.partition(":")
            if kind == "gather":
                tasks[one.task] = gather_task(one.task, wires[f"{name}.tile"], _wanted(io, name))
            elif kind == "sum":
                tasks[one.task] = sum_task(io, int(name), len(one.inputs))
    return tuple(tasks.values())


def _wanted(io: StageIO, name: str) -> Layout:
    kind, number, *_ = name.split(".")
    tables = {"value": io.value_layouts, "cotangent": io.cotangent_layouts, "state": io.param_layouts, "partial": io.partial_layouts}
    return tables[kind][int(number)]
