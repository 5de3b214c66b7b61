"""A stage by itself -> its tasks as one lone device runs them: what a profiling task compiles and times (DESIGN 7.12)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from alpa_hpc.ir.work import LayeredStep, ReductionKind
from alpa_hpc.runtime.compute_tasks import backward_task, forward_task
from alpa_hpc.runtime.pipeline import PipelineIO
from alpa_hpc.runtime.stage import Stage, describe_stage
from alpa_hpc.runtime.tasks import Local, StageTask, lone_structs
from alpa_hpc.runtime.update_tasks import partials_task, update_task
from alpa_hpc.sharding.collectives import LoneCollectives
from alpa_hpc.sharding.localise import Place


@dataclass(frozen=True, slots=True, eq=False)
class LoneTask:
    """A task's work on one device of its mesh: collectives keep their shapes and talk to nobody. `arguments` = shapes of its tiles."""

    name: str
    function: Callable[..., tuple[Local, ...]]
    arguments: tuple[object, ...]


def lone_tasks(step: LayeredStep, stage: Stage) -> tuple[LoneTask, ...]:
    """Forward, backward and what the update consists of."""
    io = describe_stage(step, (stage,), 0, {})
    loss_kinds = tuple(ReductionKind.SUM for _ in step.loss_outputs)
    pipeline = PipelineIO((io,), step.num_microbatches, loss_kinds, step.update.reductions, len(step.metric_names), {})
    tasks = [forward_task(step, stage, io), backward_task(step, stage, io), update_task(step, stage, io, pipeline)]
    if step.update.reductions:
        tasks.append(partials_task(step, stage, io, pipeline))
    place = Place(stage.shape, LoneCollectives(stage.shape))
    return tuple(_lone(task, place) for task in tasks)


def _lone(task: StageTask, place: Place) -> LoneTask:
    return LoneTask(task.name, task.function(place), lone_structs(task))


def example(struct: object) -> object:
    """Arrays for shapes: small numbers, so that no arithmetic is slow for being denormal or infinite."""
    return jax.tree.map(_example, struct)


def _example(one: jax.ShapeDtypeStruct) -> jax.Array:
    fill = 0.01 if jnp.issubdtype(one.dtype, jnp.inexact) else 0
    return jnp.full(one.shape, fill, one.dtype)
