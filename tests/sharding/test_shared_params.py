"""A parameter that several layers of a stage read: GPT's embedding, which the first layer looks up and the last one multiplies by."""

from functools import cache

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import reshard_seconds
from alpa_hpc.sharding.shared_params import Reader, readers_of, shared_seconds
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from tests.planning import CLUSTER, prepared

FREE, DEAR = MemoryPrice(0.0, 0.0), MemoryPrice(1.0, 1.0)


@cache
def solver() -> StageSolver:
    return StageSolver(prepared().step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), MeshShape(4, 1))), remat=False)


def chosen(price: MemoryPrice) -> tuple[ChosenLayer, ...]:
    return solver().choose(0, len(prepared().step.layers), price)


def tied(layers: tuple[ChosenLayer, ...]) -> tuple[Reader, Reader]:
    [(first, second)] = [readers for readers in readers_of(layers).values() if len(readers) > 1]
    return first, second


def seconds(reader: Reader, source: Spec, target: Spec) -> float:
    tensor = reader.chosen.problem.tensors[reader.tensor]
    assert source in tensor.specs or source == reader.gradient
    return reshard_seconds(solver().prices.mesh, source, target, tensor.num_bytes)


def test_both_have_it_as_it_is_stored():
    for price in (FREE, DEAR):
        first, second = tied(chosen(price))
        assert first.stored == second.stored
    assert first.stored.num_shards(MeshShape(4, 1)) == 4, "where memory is dear, it is split"


def test_gradients_that_lie_alike_are_summed_once_and_nobody_is_sent_the_new_value():
    layers = chosen(FREE)
    first, second = tied(layers)
    assert first.gradient == second.gradient and first.gradient.partial
    found = shared_seconds(layers, solver().prices)
    twice, sent = seconds(second, second.gradient, second.target), seconds(second, second.target, second.stored)
    assert twice > 0
    assert found.update.total == pytest.approx(-twice - sent)
    assert found.forward.total == found.backward.total == 0


def test_what_is_stored_otherwise_is_brought_to_its_reader_in_every_task():
    layers = chosen(DEAR)
    first, second = tied(layers)
    problem = second.chosen.problem
    tensor = problem.tensors[second.tensor]
    for choice, spec in enumerate(tensor.specs):
        choices = list(second.chosen.choices)
        choices[tensor.home] = choice
        found = shared_seconds((*layers[:-1], ChosenLayer(problem, tuple(choices))), solver().prices)
        expected = seconds(second, first.stored, spec)
        assert (found.forward.total, found.backward.total) == pytest.approx((expected, expected))
        assert (expected > 0) == (spec != first.stored)
