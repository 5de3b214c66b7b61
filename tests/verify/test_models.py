"""Stages of each model compile for CPUs to what their plans say: bytes of each kind of collective among the same devices, task by task.

The devices for which strategies are chosen compute slowly, so that much is split, and in many ways.
"""

from collections.abc import Callable, Mapping
from functools import cache

import optax
import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.models.gpt import GPT
from alpa_hpc.runtime.alone import tasks_alone
from alpa_hpc.runtime.stage import Stage, describe_stage
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import TaskCheck
from alpa_hpc.verify.plan import check_tasks
from alpa_hpc.verify.target import described_mesh
from tests.models.test_planned import family, llama, moe, wide_resnet
from tests.random_plans import NUM_LAYERS, ROWS, Family, tokens

pytestmark = pytest.mark.slow

SUBMESH = Submesh(2, 4)
DEVICE = DeviceSpec("slow", 4 << 30, 1e8, 1e8, 1e12, 1.0)
CLUSTER = ClusterSpec("slow devices", 2, 4, DEVICE, Link(1e10, 1e-8), Link(1e9, 1e-8))
NUM_MICROBATCHES = 2


def gpt() -> Family:
    model = GPT(num_layers=2, hidden=16, num_heads=4, vocab=32, sequence=8)
    return family(model, lambda rows: tokens(rows, model.vocab, model.sequence + 1), optax.adamw(1e-2))


CASES: Mapping[str, tuple[Callable[[], Family], int, MeshShape]] = {
    "gpt": (gpt, 3, MeshShape(2, 4)),
    "moe": (moe, 3, MeshShape(2, 4)),
    "llama": (llama, 3, MeshShape(4, 2)),
    "wide_resnet": (wide_resnet, 2, MeshShape(2, 4)),
}


@cache
def checked(name: str) -> Mapping[str, TaskCheck]:
    """The tasks of a stage of one of a model's layers, compiled."""
    make, layer, shape = CASES[name]
    made = make()
    batch = made.make_batch(NUM_MICROBATCHES * ROWS)
    traced = trace_step(made.step, made.state, batch, num_microbatches=NUM_MICROBATCHES)
    step = cut_layers(traced, num_layers=NUM_LAYERS, imbalance=3.0)
    solver = StageSolver(step, MeshPrices(logical_mesh(CLUSTER, SUBMESH, shape)), remat=False)
    stage = Stage(shape, solver.choose(layer, layer + 1, MemoryPrice(0.0, 0.0)))
    tasks = {one.name: one for one in tasks_alone(step, stage)}
    mesh = described_mesh(CheckTarget.CPU, SUBMESH, shape)
    return {one.task: one for one in check_tasks(step, stage, describe_stage(step, (stage,), 0, {}), tasks, mesh)[0]}


@pytest.mark.parametrize("name", CASES)
def test_code_exchanges_what_is_planned(name: str):
    for one in checked(name).values():
        assert not one.mismatches
        for lane in one.lanes:
            assert 0.95 <= lane.planned_bytes / lane.compiled_bytes <= 1.05, (one.task, lane)


@pytest.mark.parametrize("name", CASES)
def test_every_model_has_collectives_in_each_task(name: str):
    found = checked(name)
    assert {"forward", "backward", "update"} <= set(found)
    assert all(found[task].lanes for task in ("forward", "backward", "update"))
    assert len({lane.lane for one in found.values() for lane in one.lanes}) >= 5


def test_all_kinds_occur_and_each_axis_and_both():
    lanes = {lane.lane for name in CASES for one in checked(name).values() for lane in one.lanes}
    assert {lane.kind for lane in lanes} == set(CollectiveKind) - {CollectiveKind.COLLECTIVE_PERMUTE}
    assert {lane.axes for lane in lanes} == {(0,), (1,), (0, 1)}
