"""PipelineIO -> one program a mesh that only scores: forward of every microbatch, losses joined over meshes, nothing updated."""

from alpa_hpc.runtime.emit import named
from alpa_hpc.runtime.instructions import AllMeshReduce, Buffer, Feed, Instruction, MeshProgram, Run
from alpa_hpc.runtime.liveness import free_after_last_use
from alpa_hpc.runtime.pipeline import PipelineIO
from alpa_hpc.runtime.routes import ReceiveLayout, Routes, plan_routes


def emit_evaluation(pipeline: PipelineIO, receive_layout: ReceiveLayout) -> tuple[MeshProgram, ...]:
    """Programs whose results are the loss outputs gathered over microbatches, `total.K`, the same on every mesh."""
    routes = plan_routes(pipeline, receive_layout)
    return tuple(_program(pipeline, routes, mesh) for mesh in range(len(pipeline.stages)))


def _program(pipeline: PipelineIO, routes: Routes, mesh: int) -> MeshProgram:
    stage = pipeline.stages[mesh]
    losses = range(pipeline.num_loss_outputs)
    resident, extras, totals = named("state", stage.leaves), named("extra", losses), named("total", losses)
    steps: list[Instruction] = [Run("zero_losses", (), extras)]
    for microbatch in range(pipeline.num_microbatches):
        steps += _score(pipeline, routes, mesh, microbatch)
    steps.append(AllMeshReduce(extras, totals, pipeline.loss_kinds))
    return MeshProgram(mesh, free_after_last_use(tuple(steps), resident, (*resident, *totals)), resident, totals)


def _score(pipeline: PipelineIO, routes: Routes, mesh: int, microbatch: int) -> list[Instruction]:
    stage, shift = pipeline.stages[mesh], microbatch * routes.tag_stride
    extras = named("extra", stage.loss_outputs)
    steps: list[Instruction] = [Feed(Buffer(f"batch.{number}", microbatch), number) for number in stage.batch]
    for route in routes.arriving(mesh).values:
        steps += route.at(shift).receive(microbatch)
    read = named("state", stage.params) + named("batch", stage.batch, microbatch) + named("value", stage.inputs, microbatch)
    steps.append(Run("score", read + extras, named("value", stage.outputs, microbatch) + extras, extras))
    steps += [route.at(shift).send(microbatch) for route in routes.leaving(mesh).values]
    return steps
