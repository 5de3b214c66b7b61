"""What a plan is predicted to take follows from what its tasks take, and what it holds from how its arrays lie."""

from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan, simulate_partition
from alpa_hpc.runtime.instructions import Layout, MeshProgram, Run
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.tasks import StageTask
from alpa_hpc.sharding.breakdown import StageSeconds, TaskSeconds
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import reshard_seconds
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.simulate.predict import PricedStage, buffer_bytes, predict, simulation_costs, task_seconds
from tests.planning import CLUSTER, NUM_MICROBATCHES, planned

F, B, U = 3.0, 5.0, 7.0  # seconds, so large that messages between meshes vanish beside them
SECONDS = StageSeconds(TaskSeconds(1.0, 2.0), TaskSeconds(4.0, 1.0), TaskSeconds(6.0, 1.0))


@cache
def simulated(num_stages: int) -> SimulatedPlan:
    one = planned()
    refinement = one.refinement()
    partition = next(p for p in refinement.partitions if len(p.stages) == num_stages)
    return simulate_partition(one.pricer, partition, SCHEDULES[ScheduleKind.ONE_F_ONE_B], refinement.seconds_of(one.pricer))


def priced(plan: SimulatedPlan, factors: tuple[float, ...]) -> list[PricedStage]:
    """The stages of a plan, each `factor` times as slow as SECONDS."""
    stages: list[PricedStage] = []
    for choice, devices, factor in zip(plan.partition.stages, plan.devices, factors, strict=True):
        prices = MeshPrices(logical_mesh(CLUSTER, choice.submesh, choice.option.shape))
        tasks = (SECONDS.forward, SECONDS.backward, SECONDS.update)
        seconds = StageSeconds(*(TaskSeconds(task.compute * factor, task.communication * factor) for task in tasks))
        stages.append(PricedStage(devices, prices, seconds))
    return stages


def test_one_stage_takes_its_microbatches_and_its_update():
    plan = simulated(1)
    timeline = predict(plan.assembly, priced(plan, (1.0,)), CLUSTER)
    assert timeline.seconds == pytest.approx(NUM_MICROBATCHES * (F + B) + U)
    assert timeline.bubble_fractions == (pytest.approx(0.0),)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.25), (0.5, 2.0)])
def test_two_stages_take_the_slower_ones_work_and_the_way_through_the_other(factors: tuple[float, float]):
    plan = simulated(2)
    timeline = predict(plan.assembly, priced(plan, factors), CLUSTER)
    slow, fast = max(factors), min(factors)
    least = NUM_MICROBATCHES * (F + B) * slow + U * slow
    assert least < timeline.seconds <= least + (F + B + U) * fast + 0.1
    alone = [NUM_MICROBATCHES * (F + B) * factor + U * factor for factor in factors]
    idle = [1 - busy / timeline.seconds for busy in alone]
    assert timeline.bubble_fractions == pytest.approx(idle, abs=0.01)


def test_a_gather_takes_what_its_resharding_takes_and_sums_take_nothing():
    prices = MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), MeshShape(4, 1)))
    stage = PricedStage((0, 1, 2, 3), prices, SECONDS)
    shape = MeshShape(4, 1)
    split, whole = Layout((64, 32), "float32", Spec(((0,), ())), shape), Layout((64, 32), "float32", Spec(((), ())), shape)
    tasks = MappingProxyType({"gather:value.1": identity("gather:value.1", split, whole), "sum:1": identity("sum:1", whole, whole)})
    seconds = task_seconds(stage, tasks)
    assert seconds["gather:value.1"] == reshard_seconds(prices.mesh, split.spec, whole.spec, 64 * 32 * 4) > 0
    assert seconds["sum:1"] == 0
    assert (seconds["forward"], seconds["backward"], seconds["update"]) == (F, B, U)


def identity(name: str, source: Layout, target: Layout) -> StageTask:
    return StageTask(name, lambda place: lambda x: (x,), (source,), (target,))


def test_a_slower_network_delays_what_is_sent_between_stages():
    plan = simulated(2)
    slow = replace(CLUSTER, inter_node=replace(CLUSTER.inter_node, latency=10.0))
    near, far = (predict(plan.assembly, priced(plan, (1.0, 1.0)), cluster).seconds for cluster in (CLUSTER, slow))
    assert far >= near + 2 * 10.0, "the first microbatch goes there and comes back"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_bytes_of_buffers_are_those_of_their_largest_tiles(num_stages: int):
    plan = simulated(num_stages)
    for index in range(num_stages):
        program, tasks = plan.assembly.programs[index], plan.assembly.tasks(index)
        expected: dict[str, int] = {}
        for run in runs(program):
            task = tasks[run.task]
            for buffer, layout in zip((*run.inputs, *run.outputs), (*task.inputs, *task.outputs), strict=True):
                parts = (layout,) if isinstance(layout, Layout) else layout
                expected[buffer.name] = max(expected.get(buffer.name, 0), sum(tile_bytes(part) for part in parts))
        sizes = buffer_bytes(plan.assembly, index, tasks)
        assert {name: sizes[name] for name in expected} == expected
        assert {"state", "batch", "residual", "gradient"} <= {name.split(".")[0] for name in expected}
        assert plan.timeline.peak_bytes[index] > sum(sizes[buffer.name] for buffer in program.resident)


def runs(program: MeshProgram) -> list[Run]:
    return [one for one in program.instructions if isinstance(one, Run)]


def tile_bytes(layout: Layout) -> int:
    return int(np.prod(layout.spec.local_shape(layout.shape, layout.mesh))) * np.dtype(layout.dtype).itemsize


def test_costs_name_every_task_and_buffer_of_every_mesh():
    plan = simulated(2)
    costs = simulation_costs(plan.assembly, priced(plan, (1.0, 1.0)), CLUSTER)
    for program, seconds, sizes in zip(plan.assembly.programs, costs.task_seconds, costs.buffer_bytes, strict=True):
        assert {one.task for one in runs(program)} <= seconds.keys()
        assert {buffer.name for buffer in (*program.resident, *program.results)} <= sizes.keys()
    assert costs.reduce_seconds > 0
