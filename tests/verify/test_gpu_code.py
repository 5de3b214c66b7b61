"""Code for GPUs does what the plan says: bytes of each kind and group, peak memory. Compiled for described H100s; none is needed."""

from functools import cache

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.runtime.alone import tasks_alone
from alpa_hpc.runtime.stage import Stage, describe_stage
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.training.prepare import prepare
from alpa_hpc.verify.check import TaskCheck
from alpa_hpc.verify.plan import check_tasks
from alpa_hpc.verify.target import described_mesh
from tests.planning import TRAINING
from tests.updates import LONE, UPDATES, UpdateCase, name_of, step_of
from tests.updates import stage_of as updating

pytestmark = [pytest.mark.slow, pytest.mark.gpu_code, pytest.mark.usefixtures("gpu_compiler")]

SUBMESH = Submesh(1, 8)
DEVICE = DeviceSpec("gpu", memory=80 << 30, flops_32bit=6e13, flops_16bit=9e14, memory_bandwidth=3e12, efficiency=0.5)
CLUSTER = ClusterSpec("one node", 1, 8, DEVICE, intra_node=Link(4e11, 1e-5), inter_node=Link(5e10, 2e-5))
MODEL = GPT(num_layers=2, hidden=2048, num_heads=16, vocab=1024, sequence=1024, dtype="bfloat16")


@cache
def step() -> LayeredStep:
    """Two microbatches of eight sequences, in two layers."""
    return prepare(MODEL, TRAINING, LayerOptions(num_layers=2, imbalance=1.0), 2).step


@cache
def checked(shape: MeshShape, *, remat: bool) -> dict[str, TaskCheck]:
    solver = StageSolver(step(), MeshPrices(logical_mesh(CLUSTER, SUBMESH, shape)), remat)
    stage = Stage(shape, solver.choose(0, 2, MemoryPrice(0.0, 0.0)))
    io = describe_stage(step(), (stage,), 0, {})
    tasks = {task.name: task for task in tasks_alone(step(), stage)}
    return {one.task: one for one in check_tasks(step(), stage, io, tasks, described_mesh(CheckTarget.H100, SUBMESH, shape))[0]}


CASES = [(MeshShape(2, 4), True), (MeshShape(4, 2), False)]


@pytest.mark.parametrize(("shape", "remat"), CASES)
def test_gpu_code_exchanges_what_is_planned_to_the_byte(shape: MeshShape, remat: bool):
    for name, one in checked(shape, remat=remat).items():
        for lane in one.lanes:
            assert lane.compiled_bytes == lane.planned_bytes, (name, lane)
        assert not one.mismatches


def test_the_cases_have_collectives_of_every_task():
    kinds = {(name, lane.lane.kind) for shape, remat in CASES for name, one in checked(shape, remat=remat).items() for lane in one.lanes}
    assert {name for name, _ in kinds} == {"forward", "backward", "partials", "update"}
    assert {kind for _, kind in kinds} >= {CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}


@pytest.mark.parametrize(("shape", "remat"), CASES)
def test_peak_memory_is_as_predicted_within_a_tenth(shape: MeshShape, remat: bool):
    for name, one in checked(shape, remat=remat).items():
        assert one.memory.planned_peak == pytest.approx(one.memory.compiled_peak, rel=0.1), name


@pytest.mark.parametrize("case", UPDATES, ids=name_of)
def test_an_update_has_arrays_inside_where_it_is_said_to(case: UpdateCase):
    step, stage = step_of(case), updating(case)
    tasks = {task.name: task for task in tasks_alone(step, stage)}
    [one], _ = check_tasks(
        step,
        stage,
        describe_stage(step, (stage,), 0, {}),
        {"update": tasks["update"]},
        described_mesh(CheckTarget.H100, Submesh(1, 1), LONE),
    )
    assert one.memory.compiled_temporary == pytest.approx(case.num_arrays * case.num_bytes, abs=0.05 * case.num_bytes)
