"""What the update needs in memory, on stages of a small GPT whose specs are looked at one by one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.sharding import schedule
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import Move, reshard_moves
from alpa_hpc.sharding.shared_params import readers_of
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.update_kernels import GRADIENT, PARAMETER, UpdateKernel
from alpa_hpc.sharding.update_memory import UpdateMemory, _Exchange, _memory, resharding_memory, update_memory
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
    layers = chosen(MeshShape(1, 1))
    [(first, *_)] = [readers for readers in readers_of(layers).values() if len(readers) > 1]
    tied = first.chosen.problem.tensors[first.tensor].num_bytes
    assert update_memory(layers, MeshShape(1, 1), hiding=True) == UpdateMemory(tied, 0.0, 0.0, 0.0), "the sum of what its two readers make"


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_no_more_is_summed_than_there_is_and_no_less_than_an_even_split(shape: MeshShape):
    layers = chosen(shape)
    memory = update_memory(layers, shape, hiding=True)
    assert owned_bytes(layers) / shape.num_devices * 0.9 <= memory.summed <= owned_bytes(layers)
    assert memory.most >= memory.summed + max(memory.sync, memory.hand_out)
    assert max(memory.sync, memory.hand_out) <= memory.joint <= memory.summed + memory.sync + memory.hand_out


FOUR = MeshShape(4, 1)
WHOLE, SUMMANDS = Spec(((), ())), Spec(((), ()), (0,))
ROWS, COLUMNS = Spec(((0,), ())), Spec(((), (0,)))
BYTES = 16 * 16 * 4.0
ONE_KERNEL = UpdateKernel((GRADIENT, PARAMETER), (PARAMETER + 1,), (), 0.0, elementwise=True, updates=True, collective=None)


def memory_of(*specs: Spec) -> UpdateMemory:
    """Parameters [16, 16], stored whole on four devices, their gradients summed and they updated in these specs."""
    return _memory(tuple(exchange(spec, SUMMANDS) for spec in specs), (False, False), True)


def exchange(spec: Spec, *gradients: Spec, kernel: UpdateKernel = ONE_KERNEL) -> _Exchange:
    return _Exchange((16, 16), 4, FOUR, gradients, spec, reshard_moves(spec, WHOLE, FOUR), (kernel,))


def shared(spec: Spec, *gradients: Spec) -> UpdateMemory:
    """One parameter whose gradients several layers make."""
    return _memory((exchange(spec, *gradients),), (False, False), True)


def test_a_new_parameter_waits_beside_where_it_arrives():
    assert memory_of(ROWS).hand_out == BYTES / 4
    assert memory_of(WHOLE).hand_out == 0, "it is made where it is stored"


def test_what_arrives_in_another_order_is_copied_to_where_it_is_stored():
    assert memory_of(COLUMNS).hand_out == BYTES / 4 + BYTES


def test_of_parameters_that_arrive_together_one_copy_lies_where_the_other_one_is_stored():
    assert memory_of(ROWS, ROWS).hand_out == 2 * BYTES / 4, "both arrive where they are stored while both wait"
    assert memory_of(COLUMNS, COLUMNS).hand_out == BYTES / 4 + BYTES, "so does the one of both that waits and is updated last"


def test_where_an_update_does_not_read_the_old_parameter_nothing_else_lies():
    unread = exchange(COLUMNS, SUMMANDS, kernel=replace(ONE_KERNEL, reads=(GRADIENT,)))
    copies = _memory((unread, unread), (False, False), True).hand_out - BYTES / 4
    assert copies > memory_of(COLUMNS, COLUMNS).hand_out - BYTES / 4 == BYTES


def test_gradients_are_summed_in_the_order_of_devices():
    assert memory_of(ROWS).sync == 0
    assert memory_of(COLUMNS).sync == BYTES
    assert memory_of(ROWS, COLUMNS, COLUMNS).sync == 2 * BYTES, "one collective of all three"
    assert memory_of(ROWS, COLUMNS).summed == BYTES / 2


def test_gradients_of_several_layers_are_added_before_they_move():
    assert shared(ROWS, SUMMANDS, SUMMANDS).sync == BYTES, "their sum, on each device"
    assert shared(ROWS, SUMMANDS, SUMMANDS).joint == BYTES + BYTES / 4, "and what arrives of it"
    assert shared(COLUMNS, SUMMANDS, SUMMANDS).sync == BYTES, "the copy in the order of devices is of the sum"
    assert shared(ROWS, SUMMANDS, SUMMANDS).summed == BYTES / 4


def test_gradients_of_several_layers_meet_where_they_are_wanted():
    assert shared(ROWS, SUMMANDS, ROWS).sync == BYTES / 4, "the one that has moved, until the other one is added"
    assert shared(ROWS, ROWS, ROWS).sync == 0
    assert shared(ROWS, ROWS, ROWS).summed == BYTES / 4, "no accumulator is reused for the sum"
    assert shared(ROWS, ROWS).summed == 0


def test_what_is_too_much_for_one_collective_moves_by_several(monkeypatch: pytest.MonkeyPatch):
    count = 6
    together = memory_of(*[ROWS] * count).hand_out
    monkeypatch.setattr(schedule, "COMBINED_BYTES", 2 * BYTES)
    _memory.cache_clear()
    apart = memory_of(*[ROWS] * count).hand_out
    _memory.cache_clear()
    assert together == count * BYTES / 4
    assert 2 * BYTES / 4 <= apart < together, "what waits for a later one lies where others are stored"


def handed_out(shape: MeshShape) -> Iterator[tuple[float, tuple[Move, ...]]]:
    """Of each parameter its bytes, whole, and the moves of its new value to where it is stored."""
    for layer in chosen(shape):
        problem = layer.problem
        for update in problem.updates:
            stored = problem.params[problem.layer.params.index(update.work.param)]
            yield problem.tensors[stored].num_bytes, reshard_moves(layer.spec(update.update.outputs[0]), layer.spec(stored), shape)


def test_what_lies_between_two_gathers_is_there_of_all_parameters_but_for_those_that_have_arrived():
    shape = MeshShape(2, 2)
    between = [num_bytes / moves[0].after.num_shards(shape) for num_bytes, moves in handed_out(shape) if len(moves) > 1]
    most = sum(num_bytes for num_bytes, moves in handed_out(shape) if moves)
    assert len(between) > 3 and len(set(between)) > 1
    largest = [num_bytes for num_bytes in between if num_bytes == max(between)]
    assert sum(largest) <= update_memory(chosen(shape), shape, hiding=True).hand_out <= most


def test_an_array_that_is_gathered_in_two_steps_lies_in_memory_half_gathered():
    split, half, whole = Spec(((0,), (1,))), Spec(((0,), ())), Spec(((), ()))
    size, mesh, here = 64 * 64 * 4, MeshShape(2, 4), (False, False)
    assert resharding_memory((64, 64), 4, mesh, split, split, here, hiding=True) == 0
    assert resharding_memory((64, 64), 4, mesh, half, whole, here, hiding=True) == 0
    assert resharding_memory((64, 64), 4, mesh, split, whole, here, hiding=True) >= size / 2
