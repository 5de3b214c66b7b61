"""A stage by itself -> its tasks as one lone device runs them: what is timed where devices share cores (DESIGN 7.12)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.alone import filled, tasks_alone
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import Local, StageTask, lone_structs
from alpa_hpc.sharding.collectives import LoneCollectives
from alpa_hpc.sharding.place import Place


@dataclass(frozen=True, slots=True, eq=False)
class LoneTask:
    """A task's work on one device of its mesh: collectives keep their shapes and talk to nobody. `arguments` = shapes of its tiles."""

    name: str
    function: Callable[..., tuple[Local, ...]]
    arguments: tuple[object, ...]


def lone_tasks(step: LayeredStep, stage: Stage) -> tuple[LoneTask, ...]:
    """Forward, backward and what the update consists of."""
    place = Place(stage.shape, LoneCollectives(stage.shape))
    return tuple(_lone(task, place) for task in tasks_alone(step, stage))


def _lone(task: StageTask, place: Place) -> LoneTask:
    return LoneTask(task.name, task.function(place), lone_structs(task))


def example(struct: object) -> object:
    """Arrays for shapes."""
    return jax.tree.map(filled, struct)
