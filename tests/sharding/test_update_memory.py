"""What the update needs in memory, on stages of a small GPT whose specs are looked at one by one."""

from functools import cache

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import AllGather, reshard_moves
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.update_memory import UpdateMemory, update_memory
from tests.planning import CLUSTER, prepared

SHAPES = (MeshShape(4, 1), MeshShape(2, 2), MeshShape(1, 1))


@cache
def chosen(shape: MeshShape) -> tuple[ChosenLayer, ...]:
    submesh = Submesh(1, shape.num_devices)
    solver = StageSolver(prepared().step, MeshPrices(logical_mesh(CLUSTER, submesh, shape)), remat=False)
    return solver.choose(0, 3, MemoryPrice(0.0, 0.0))


def owned_bytes(layers: tuple[ChosenLayer, ...]) -> float:
    """Bytes of all updated parameters, whole."""
    return sum(layer.problem.tensors[update.gradient].num_bytes for layer in layers for update in layer.problem.updates)


def test_one_device_exchanges_nothing():
    assert update_memory(chosen(MeshShape(1, 1)), MeshShape(1, 1)) == UpdateMemory(0.0, 0.0, 0.0)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_no_more_is_summed_than_there_is_and_no_less_than_an_even_split(shape: MeshShape):
    layers = chosen(shape)
    memory = update_memory(layers, shape)
    assert owned_bytes(layers) / shape.num_devices * 0.9 <= memory.summed <= owned_bytes(layers)
    assert memory.most == memory.summed + max(memory.sync, memory.hand_out)


def test_what_waits_to_be_handed_out_is_counted_parameter_by_parameter():
    shape = MeshShape(4, 1)
    waiting, straight, copied = list[float](), list[float](), list[float]()
    for layer in chosen(shape):
        problem = layer.problem
        for update in problem.updates:
            stored = problem.params[problem.layer.params.index(update.work.param)]
            source, num_bytes = layer.spec(update.update.outputs[0]), problem.tensors[stored].num_bytes
            moves = reshard_moves(source, layer.spec(stored), shape)
            if moves:
                (step,) = moves[0].steps
                assert isinstance(step, AllGather) and len(moves) == 1, "on one axis new parameters are gathered, once"
                waiting.append(num_bytes / source.num_shards(shape))
                (copied if step.dim else straight).append(num_bytes)
    assert len(straight) > 2 and len(copied) > 2
    alone = update_memory(chosen(shape), shape).hand_out - sum(sorted(copied)[-2:])
    assert 0 < alone < sum(waiting), "some of them find room"
    assert sum(waiting) - alone <= sum(sorted(waiting)[-(len(straight) // 2) :]), "every second straight one has room for one"
