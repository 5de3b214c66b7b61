"""Bytes that live only while a layer runs: made, read for the last time, and gone."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.workspace import chosen_workspace, evenly_split_workspace, layer_workspace, peak_bytes
from tests.planning import CLUSTER, prepared
from tests.random_plans import sgd_step

ROWS, WIDTH = 8, 16
SQUARE = ROWS * WIDTH * 4  # bytes of an activation [8, 16]


@cache
def chain(num_products: int) -> LayerProblem:
    """One layer: the mean of x @ w @ w @ ..., on a mesh of 2 x 1."""

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        x = batch
        for _ in range(num_products):
            x = x @ params
        return jnp.mean(x)

    params, batch = {"params": jnp.ones((WIDTH, WIDTH))}, jnp.ones((ROWS, WIDTH))
    step = cut_layers(trace_step(sgd_step(loss), params, batch, num_microbatches=1), num_layers=1, imbalance=1.0)
    return StageSolver(step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 2), MeshShape(2, 1))), remat=False).problem(0)


def whole(problem: LayerProblem, tensor: int) -> float:
    return problem.tensors[tensor].num_bytes


def test_a_chain_of_products_holds_two_activations_however_long_it_is():
    three, six = (peak_bytes(chain(n).forward, lambda tensor, n=n: whole(chain(n), tensor)) for n in (3, 6))
    assert 2 * SQUARE <= three <= 2 * SQUARE + 64
    assert six == three


def test_every_bytes_counts_by_what_it_takes_on_a_device():
    problem = chain(3)
    one, four = (layer_workspace(problem, lambda tensor, d=d: whole(problem, tensor) / d) for d in (1, 4))
    assert one == evenly_split_workspace(problem, 1)
    assert four == pytest.approx(one / 4) and evenly_split_workspace(problem, 4) == pytest.approx(four)


@cache
def gpt(start: int, stop: int, *, remat: bool) -> tuple[ChosenLayer, ...]:
    solver = StageSolver(prepared().step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), MeshShape(2, 2))), remat=remat)
    return solver.choose(start, stop, MemoryPrice(0.0, 0.0))


def test_a_stage_needs_what_its_hungriest_layer_needs_and_no_less_than_an_even_split():
    shape = MeshShape(2, 2)
    layers = gpt(0, 3, remat=False)
    each = [chosen_workspace((layer,), shape) for layer in layers]
    assert chosen_workspace(layers, shape) == max(each)
    assert len(set(each)) > 1
    for layer, needed in zip(layers, each, strict=True):
        assert needed >= evenly_split_workspace(layer.problem, shape.num_devices)


def test_a_recomputed_layer_holds_its_residuals_while_its_backward_runs():
    kept, remade = gpt(1, 2, remat=False)[0].problem, gpt(1, 2, remat=True)[0].problem
    residuals = sum(whole(remade, tensor) for tensor in set(remade.remade))
    assert not kept.remade and residuals > 0
    backward = peak_bytes(remade.backward, lambda tensor: whole(remade, tensor))
    held = evenly_split_workspace(remade, 1) - backward  # products' results and operands; what lies between is fused
    assert 0 < held < residuals
    assert held >= max(whole(remade, tensor) for tensor in remade.remade)
    assert evenly_split_workspace(remade, 1) > evenly_split_workspace(kept, 1)
