"""PipelineIO and a schedule -> one MeshProgram a mesh (DESIGN, "Programs"; the paper's static instruction lists, section 6).

One iteration of mesh i, in order:

    zeros                                             accumulators of gradients and of every loss output
    for each step of the schedule:
        Feed batch, Recv values,      forward,  Send values
        Recv cotangents, sum:V,       backward, Send cotangents
    reduce:P and Send partial gradients of replicas; Recv those of owned params and merge:P
    AllMeshReduce extra.K -> total.K;  partials (finishes gradients);  AllMeshReduce scalar.R -> reduced.R;  partials:1, ... where
    what is reduced depends on what has been reduced before
    update;  Send new shared params to their replicas; Recv those of own replicas

Sends follow the Run that makes what they carry, Recvs precede the Run that reads it, Frees follow the last use. Sends do not block, so
a mesh waits only for work that precedes its own in the order of the schedule: no deadlock (`check.check_programs` proves it).
"""

from collections.abc import Iterable, Iterator

from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, Feed, Instruction, Run
from alpa_hpc.runtime.liveness import free_after_last_use, reads
from alpa_hpc.runtime.outline import ProgramOutline
from alpa_hpc.runtime.pipeline import PipelineIO, StageIO, check_pipeline, partials_name
from alpa_hpc.runtime.routes import ReceiveLayout, Route, Routes, plan_routes
from alpa_hpc.runtime.schedule import AbstractSchedule


def emit_outlines(pipeline: PipelineIO, schedule: AbstractSchedule, receive_layout: ReceiveLayout) -> tuple[ProgramOutline, ...]:
    """Programs of all meshes, equal for equal arguments; `receive_layout` gives the layout in which an array is received.

    Tasks and buffers are named "forward", "backward", "update", "value.V", "gradient.P" and so on; the module's header has their order.
    """
    check_pipeline(pipeline)
    routes = plan_routes(pipeline, receive_layout)
    return tuple(emit_outline(pipeline, routes, schedule, mesh) for mesh in range(len(pipeline.stages)))


def emit_outline(pipeline: PipelineIO, routes: Routes, schedule: AbstractSchedule, mesh: int) -> ProgramOutline:
    """The program of one mesh."""
    stage, arriving, leaving = pipeline.stages[mesh], routes.arriving(mesh), routes.leaving(mesh)
    resident, results = named("state", stage.leaves), named("metric", range(pipeline.num_metrics))
    first = zeros(pipeline, stage)
    backward_step = free_after_last_use(backward(stage, arriving, leaving), (), (*resident, *first.outputs))
    needed_later = tuple(buffer for instruction in backward_step for buffer in reads(instruction))
    forward_step = free_after_last_use(forward(stage, arriving, leaving), (), (*resident, *first.outputs, *needed_later))
    steps = schedule.steps(mesh, len(pipeline.stages), pipeline.num_microbatches)
    last = free_after_last_use(finish(pipeline, arriving, leaving, mesh), (*resident, *first.outputs), (*resident, *results))
    return ProgramOutline(mesh, (first,), forward_step, backward_step, last, steps, routes.tag_stride, resident, results)


def finish(pipeline: PipelineIO, arriving: Routes, leaving: Routes, mesh: int) -> tuple[Instruction, ...]:
    """What follows the last backward."""
    gradients, scalars = share_gradients(arriving, leaving), reduce_scalars(pipeline, mesh)
    return (*gradients, *scalars, update(pipeline, mesh), *share_parameters(arriving, leaving))


def zeros(pipeline: PipelineIO, stage: StageIO) -> Run:
    """Make all accumulators; those of loss outputs are on every mesh, which add them up at the end."""
    return Run("zeros", (), named("gradient", stage.gradients) + named("extra", range(pipeline.num_loss_outputs)))


def forward(stage: StageIO, arriving: Routes, leaving: Routes) -> tuple[Instruction, ...]:
    """Microbatch 0: get the batch and the inputs, run the forward, send the outputs."""
    extras = named("extra", stage.loss_outputs)
    feeds = (Feed(Buffer(f"batch.{number}", 0), number) for number in stage.batch)
    receives = (instruction for route in arriving.values for instruction in route.receive(0))
    made = named("value", stage.outputs, 0) + named("residual", range(stage.num_residuals), 0)
    run = Run("forward", forward_reads(stage) + extras, made + extras, extras)
    return (*feeds, *receives, run, *(route.send(0) for route in leaving.values))


def backward(stage: StageIO, arriving: Routes, leaving: Routes) -> tuple[Instruction, ...]:
    """Microbatch 0: get the cotangents of the outputs, run the backward, send the cotangents of the inputs."""
    gradients = named("gradient", stage.gradients)
    receives = (instruction for route in arriving.cotangents for instruction in route.receive(0))
    kept = named("residual", range(stage.num_residuals), 0) + named("cotangent", stage.cotangent_outputs, 0)
    read = forward_reads(stage) + kept + gradients
    run = Run("backward", read, named("cotangent", stage.cotangent_inputs, 0) + gradients, gradients)
    return (*receives, *sum_cotangents(arriving.cotangents), run, *(route.send(0) for route in leaving.cotangents))


def forward_reads(stage: StageIO) -> tuple[Buffer, ...]:
    """What forward and backward both read."""
    return named("state", stage.params) + named("batch", stage.batch, 0) + named("value", stage.inputs, 0)


def sum_cotangents(routes: Iterable[Route]) -> Iterator[Run]:
    """One "sum:V" for each value whose cotangents come from several meshes."""
    for number, meeting in by_number(routes):
        if len(meeting) > 1:
            parts = tuple(Buffer(route.way.received, 0) for route in meeting)
            yield Run(f"sum:{number}", parts, (Buffer(f"cotangent.{number}", 0),))


def share_gradients(arriving: Routes, leaving: Routes) -> Iterator[Instruction]:
    """Finish and send the partial gradients of this mesh's replicas, then merge those that come for its own shared params."""
    for number, to_owner in by_number(leaving.partials):
        gradient, partial = Buffer(f"gradient.{number}"), Buffer(f"partial.{number}")
        yield Run(f"reduce:{number}", (gradient,), (partial,), (gradient,))
        yield from (route.send(ITERATION) for route in to_owner)
    for number, from_replicas in by_number(arriving.partials):
        gradient = Buffer(f"gradient.{number}")
        for route in from_replicas:
            yield from route.receive(ITERATION)
        parts = tuple(Buffer(route.way.received) for route in from_replicas)
        yield Run(f"merge:{number}", (gradient, *parts), (gradient,), (gradient,))


def reduce_scalars(pipeline: PipelineIO, mesh: int) -> Iterator[Instruction]:
    """Add the loss outputs of all meshes, then join what the updates need of all gradients (global norm, all-finite)."""
    stage, totals = pipeline.stages[mesh], named("total", range(pipeline.num_loss_outputs))
    if totals:
        yield AllMeshReduce(named("extra", range(pipeline.num_loss_outputs)), totals, pipeline.loss_kinds)
    gradients = named("gradient", stage.owned)
    first = 0
    for number, kinds in enumerate(pipeline.rounds):
        scalars, reduced = (named(name, range(first, first + len(kinds))) for name in ("scalar", "reduced"))
        summed = gradients if number == 0 else ()  # they come back summed over the mesh, so that nobody need do it again
        read = gradients + updated_state(pipeline, mesh) + totals + named("reduced", range(first))
        yield Run(partials_name(number), read, summed + scalars, summed)
        yield AllMeshReduce(scalars, reduced, kinds)
        first += len(kinds)


def update(pipeline: PipelineIO, mesh: int) -> Run:
    """Consume gradients and state, make the new state and the metrics (the same on every mesh)."""
    state = updated_state(pipeline, mesh)
    consumed = named("gradient", pipeline.stages[mesh].owned) + state
    scalars = named("total", range(pipeline.num_loss_outputs)) + named("reduced", range(pipeline.num_reductions))
    return Run("update", consumed + scalars, state + named("metric", range(pipeline.num_metrics)), consumed)


def updated_state(pipeline: PipelineIO, mesh: int) -> tuple[Buffer, ...]:
    """Resident leaves that change here: all but replicas, whose owners send them."""
    replicas = pipeline.replicas_on(mesh)
    return named("state", (leaf for leaf in pipeline.stages[mesh].leaves if leaf not in replicas))


def share_parameters(arriving: Routes, leaving: Routes) -> Iterator[Instruction]:
    """Send the new value of owned shared params, receive that of replicas (the old one is free since its last backward)."""
    for route in leaving.parameters:
        yield route.send(ITERATION)
    for route in arriving.parameters:
        yield from route.receive(ITERATION)


def by_number(routes: Iterable[Route]) -> Iterator[tuple[int, tuple[Route, ...]]]:
    """Routes of one array together, arrays ascending, the order of routes kept."""
    groups: dict[int, list[Route]] = {}
    for route in routes:
        groups.setdefault(route.way.number, []).append(route)
    for number in sorted(groups):
        yield number, tuple(groups[number])


def named(name: str, numbers: Iterable[int], microbatch: int = ITERATION) -> tuple[Buffer, ...]:
    """Buffers NAME.0, NAME.1, ... of one microbatch, or of the iteration."""
    return tuple(Buffer(f"{name}.{number}", microbatch) for number in numbers)
