"""A stage by itself -> the tasks that are timed, and arguments for them on the whole mesh: what a profiling task measures."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from alpa_hpc.ir.work import LayeredStep, ReductionKind
from alpa_hpc.runtime.compute_tasks import backward_task, forward_task
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.pipeline import PipelineIO
from alpa_hpc.runtime.stage import Stage, describe_stage
from alpa_hpc.runtime.tasks import Argument, StageTask, border_struct, reused_inputs
from alpa_hpc.runtime.update_tasks import partials_tasks, update_task


def tasks_alone(step: LayeredStep, stage: Stage) -> tuple[StageTask, ...]:
    """Forward, backward and what the update consists of, as if no other mesh had a share in its parameters."""
    io = describe_stage(step, (stage,), 0, {})
    loss_kinds = tuple(ReductionKind.SUM for _ in step.loss_outputs)
    rounds = tuple(one.kinds for one in step.update.rounds)
    pipeline = PipelineIO((io,), step.num_microbatches, loss_kinds, rounds, len(step.metric_names), {})
    tasks = [forward_task(step, stage, io), backward_task(step, stage, io), update_task(step, stage, io, pipeline)]
    return (*tasks, *partials_tasks(step, stage, io, pipeline))


def mesh_arguments(task: StageTask, mesh: Mesh) -> Callable[[], tuple[object, ...]]:
    """A function that gives a task's arguments as they lie on `mesh`, anew those that a run consumes. Each process makes its own tiles."""
    structs = [_structs(one, mesh) for one in task.inputs]
    consumed = reused_inputs(task)
    kept = _maker([one for position, one in enumerate(structs) if position not in consumed])()
    make = _maker([structs[position] for position in consumed])

    def fresh() -> tuple[object, ...]:
        new, old = iter(make()), iter(kept)
        return tuple(next(new) if position in consumed else next(old) for position in range(len(structs)))

    return fresh


def _structs(argument: Argument, mesh: Mesh) -> object:
    return border_struct(argument, mesh) if isinstance(argument, Layout) else tuple(border_struct(one, mesh) for one in argument)


def _maker(structs: list[object]) -> Callable[[], list[object]]:
    """A compiled function that fills new arrays of these shapes and shardings; it needs no message between devices."""
    shardings = jax.tree.map(lambda one: one.sharding, structs)
    return jax.jit(lambda: jax.tree.map(filled, structs), out_shardings=shardings)


def filled(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of small numbers, so that no arithmetic is slow for being denormal or infinite."""
    return jnp.full(struct.shape, 0.01 if jnp.issubdtype(struct.dtype, jnp.inexact) else 0, struct.dtype)
