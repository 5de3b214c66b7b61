"""What the update needs in memory, on stages of a small GPT whose specs are looked at one by one."""

from collections.abc import Iterator
from functools import cache

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.sharding import update_memory as update_memory_module
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import AllGather, Move, reshard_moves
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


def handed_out(shape: MeshShape) -> Iterator[tuple[float, tuple[Move, ...]]]:
    """Of each parameter its bytes, whole, and the moves of its new value to where it is stored."""
    for layer in chosen(shape):
        problem = layer.problem
        for update in problem.updates:
            stored = problem.params[problem.layer.params.index(update.work.param)]
            yield problem.tensors[stored].num_bytes, reshard_moves(layer.spec(update.update.outputs[0]), layer.spec(stored), shape)


def test_what_waits_to_be_handed_out_is_counted_parameter_by_parameter(monkeypatch: pytest.MonkeyPatch):
    shape = MeshShape(4, 1)
    waiting, copied = list[float](), list[float]()
    for num_bytes, moves in handed_out(shape):
        if moves:
            (step,) = moves[0].steps
            assert isinstance(step, AllGather) and len(moves) == 1, "on one axis new parameters are gathered, once"
            if step.dim:
                copied.append(num_bytes)
            else:
                waiting.append(num_bytes / moves[0].before.num_shards(shape))
    assert len(waiting) > 2 and len(copied) > 2
    combined = update_memory(chosen(shape), shape).hand_out
    monkeypatch.setattr(update_memory_module, "COMBINED_BYTES", 0)
    apart = update_memory(chosen(shape), shape).hand_out
    assert apart - combined == sum(copied) - max(copied), "all but the largest lie where others are stored"
    alone = apart - sum(copied)
    assert 0 < alone < sum(waiting), "some of them find room"
    assert sum(waiting) - alone <= sum(sorted(waiting)[-(len(waiting) // 2) :]), "every second straight one has room for one"


def test_what_lies_between_two_gathers_is_there_of_all_parameters_but_for_those_that_have_arrived():
    shape = MeshShape(2, 2)
    between = [num_bytes / moves[0].after.num_shards(shape) for num_bytes, moves in handed_out(shape) if len(moves) > 1]
    most = sum(num_bytes for num_bytes, moves in handed_out(shape) if moves)
    assert len(between) > 3 and len(set(between)) > 1
    largest = [num_bytes for num_bytes in between if num_bytes == max(between)]
    assert sum(largest) <= update_memory(chosen(shape), shape).hand_out <= most
