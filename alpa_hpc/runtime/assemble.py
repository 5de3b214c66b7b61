"""Stages -> programs, compiled tasks and placed state: everything a mesh needs to run iterations (both launchers call this)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.compute_tasks import arriving_tasks, score_task, zero_losses_task
from alpa_hpc.runtime.emit import emit_outlines
from alpa_hpc.runtime.emit_evaluation import emit_evaluation
from alpa_hpc.runtime.instructions import Buffer, MeshProgram
from alpa_hpc.runtime.outline import ProgramOutline
from alpa_hpc.runtime.pipeline import PipelineIO, shortened
from alpa_hpc.runtime.schedule import AbstractSchedule
from alpa_hpc.runtime.stage import Stage, describe_pipeline, layout_of
from alpa_hpc.runtime.tasks import StageTask, border_spec, compile_task
from alpa_hpc.runtime.transfer import receive_layout
from alpa_hpc.runtime.update_tasks import leaf_layouts, stage_tasks


@dataclass(frozen=True, eq=False)  # without slots, for the cached property
class Assembly:
    """A plan ready to be compiled: the stages, what they exchange, and what each mesh does in outline."""

    step: LayeredStep
    stages: tuple[Stage, ...]
    pipeline: PipelineIO
    outlines: tuple[ProgramOutline, ...]

    @cached_property
    def programs(self) -> tuple[MeshProgram, ...]:
        """One program a mesh."""
        return tuple(outline.written_out() for outline in self.outlines)

    def evaluation_tasks(self, index: int, program: MeshProgram) -> dict[str, StageTask]:
        """The tasks of mesh `index` that its evaluation `program` runs, by name."""
        stage, io = self.stages[index], self.pipeline.stages[index]
        tasks = (zero_losses_task(self.step, stage), score_task(self.step, stage, io), *arriving_tasks(program, io))
        return {task.name: task for task in tasks}

    def tasks(self, index: int) -> dict[str, StageTask]:
        """The tasks of mesh `index`, by name."""
        stage, io = self.stages[index], self.pipeline.stages[index]
        return stage_tasks(self.step, stage, self.pipeline, index, arriving_tasks(self.outlines[index], io))


def assemble(step: LayeredStep, stages: Sequence[Stage], schedule: AbstractSchedule) -> Assembly:
    """Outline the programs of the stages."""
    pipeline = describe_pipeline(step, stages)
    return Assembly(step, tuple(stages), pipeline, emit_outlines(pipeline, schedule, receive_layout))


def short_programs(assembly: Assembly, schedule: AbstractSchedule) -> tuple[MeshProgram, ...]:
    """Programs that `check_programs` accepts only if it accepts the real ones, which ranks check, too; see `shortened`."""
    return tuple(outline.written_out() for outline in emit_outlines(shortened(assembly.pipeline), schedule, receive_layout))


def evaluation_program(assembly: Assembly, index: int) -> MeshProgram:
    """The program with which mesh `index` scores a batch."""
    return emit_evaluation(assembly.pipeline, receive_layout)[index]


def compile_tasks(assembly: Assembly, index: int, mesh: Mesh) -> dict[str, Compiled]:
    """Compile every task that the training program of mesh `index` runs."""
    return {name: compile_task(task, mesh) for name, task in assembly.tasks(index).items()}


def compile_evaluation(assembly: Assembly, index: int, mesh: Mesh) -> dict[str, Compiled]:
    """Compile every task that the evaluation program of mesh `index` runs."""
    tasks = assembly.evaluation_tasks(index, evaluation_program(assembly, index))
    return {name: compile_task(task, mesh) for name, task in tasks.items()}


def place_state(assembly: Assembly, index: int, mesh: Mesh, leaves: Mapping[int, np.ndarray]) -> dict[Buffer, jax.Array]:
    """Put the resident leaves of mesh `index` where its tasks want them; `leaves` are whole host arrays."""
    layouts = leaf_layouts(assembly.step, assembly.stages[index], assembly.pipeline.stages[index])
    placed: dict[Buffer, jax.Array] = {}
    for leaf, layout in layouts.items():
        sharding = NamedSharding(mesh, border_spec(layout.spec))
        whole = leaves[leaf]
        placed[Buffer(f"state.{leaf}")] = jax.make_array_from_callback(whole.shape, sharding, lambda index, whole=whole: whole[index])
    return placed


def place_batch(assembly: Assembly, index: int, mesh: Mesh, batch_input: int, value: np.ndarray) -> jax.Array:
    """Put one microbatch input on mesh `index`."""
    stage = assembly.stages[index]
    layout = layout_of(assembly.step.batch_avals[batch_input], stage.batch_spec(batch_input), stage.shape)
    sharding = NamedSharding(mesh, border_spec(layout.spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
