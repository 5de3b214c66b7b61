"""A profiling task runs a stage's tasks on one device: the tiles, and the work, of one device of the real mesh."""

from functools import cache

import jax
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.profiling.measure import time_function
from alpa_hpc.runtime.assemble import Assembly, assemble
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.lone import LoneTask, example, lone_tasks
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import Argument
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from tests.planning import CLUSTER, prepared

SHAPE = MeshShape(2, 2)


@cache
def stage(start: int, stop: int) -> Stage:
    solver = StageSolver(prepared().step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), SHAPE)), remat=False)
    return Stage(SHAPE, solver.choose(start, stop, MemoryPrice(1.0, 1.0)))


@cache
def assembly() -> Assembly:
    """The whole model as one stage, so that the real tasks are those of that stage alone."""
    return assemble(prepared().step, (stage(0, 3),), OneFOneB())


@cache
def whole() -> dict[str, LoneTask]:
    return {task.name: task for task in lone_tasks(prepared().step, stage(0, 3))}


def tiles(argument: Argument) -> object:
    if isinstance(argument, Layout):
        return argument.spec.local_shape(argument.shape, argument.mesh), argument.dtype
    return tuple(tiles(one) for one in argument)


def found(struct: object) -> object:
    if isinstance(struct, tuple):
        return tuple(found(one) for one in struct)
    assert isinstance(struct, jax.ShapeDtypeStruct)
    return struct.shape, str(struct.dtype)


@pytest.mark.parametrize("name", ["forward", "backward", "update", "partials"])
def test_lone_tasks_take_and_give_the_tiles_of_the_real_task(name: str):
    task, real = whole()[name], assembly().tasks(0)[name]
    assert [found(one) for one in task.arguments] == [tiles(one) for one in real.inputs]
    results = jax.eval_shape(task.function, *task.arguments)
    assert [found(one) for one in results] == [tiles(one) for one in real.outputs]
    assert any(one.spec != type(one.spec)(((),) * len(one.shape)) for one in real.inputs if isinstance(one, Layout)), "nothing is split"


@pytest.mark.parametrize("name", ["forward", "backward", "update"])
def test_a_task_of_a_stage_in_the_middle_runs_on_one_device(name: str):
    task = {one.name: one for one in lone_tasks(prepared().step, stage(1, 2))}[name]
    arguments = tuple(example(one) for one in task.arguments)
    timing = time_function(task.function, arguments, 3)
    assert len(timing.seconds) == 3 and min(timing.seconds) > 0
    results = jax.jit(task.function)(*arguments)
    devices = {device for leaf in jax.tree.leaves(results) for device in leaf.devices()}
    assert devices == {jax.devices()[0]}


def test_examples_have_the_shapes_asked_for_and_no_slow_numbers():
    made = example((jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((4,), "int32")))
    assert isinstance(made, tuple)
    assert [(one.shape, str(one.dtype)) for one in made] == [((2, 3), "float32"), ((4,), "int32")]
    assert float(made[0].min()) == pytest.approx(0.01) and int(made[1].max()) == 0
