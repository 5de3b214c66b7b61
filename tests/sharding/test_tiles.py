"""Steps of a device: what is the same function of the same tiles is one step, and what changes nothing is none."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.resharding import reshard_moves
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.splits import EvenSplit
from alpa_hpc.sharding.task_tiles import forward_tiles
from tests.sharding.test_workspace import one_layer

Body = Callable[[jax.Array, jax.Array], jax.Array]


def count(body: Body) -> int:
    """The steps of the forward of the mean of `body(x, y)`, two products [8, 16]."""
    problem = one_layer(lambda x, weights: body(x @ weights[0], x @ weights[1]), num_weights=2, remat=True)
    [tiles] = forward_tiles([EvenSplit(problem, MeshShape(1, 1))])
    return len(tiles.steps)


LEAST = count(lambda x, y: x + y)


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (lambda x, y: x * y + y * x, 1),
        (lambda x, y: x * y - y * x, 1),
        (lambda x, y: jnp.maximum(x, y) + jnp.maximum(y, x), 1),
        (lambda x, y: (x - y) + (y - x), 2),
        (lambda x, y: (x + 1) + (1 + x) + y, 2),
        (lambda x, y: (x - 1) + (1 - x) + y, 3),
        (lambda x, y: jnp.sin(x) + jnp.sin(x) + y, 2),
        (lambda x, y: jnp.sin(x) + jnp.sin(y), 2),
    ],
)
def test_equal_functions_are_one_step_and_operands_of_what_commutes_have_no_order(body: Body, more: int):
    assert count(body) == LEAST + more


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda x: lax.rev(x[None], (0,))[0], 2),
        (lambda x: lax.rev(x, (0,)), 1),
        (lambda x: lax.reshape_p.bind(x, new_sizes=x.shape, dimensions=None, sharding=None), 0),
        (lambda x: lax.transpose_p.bind(x, permutation=(0, 1)), 0),
        (lambda x: lax.broadcast_in_dim_p.bind(x, shape=x.shape, broadcast_dimensions=(0, 1), sharding=None), 0),
        (lambda x: x[:4], 1),
    ],
)
def test_what_changes_nothing_is_no_step(change: Callable[[jax.Array], jax.Array], steps: int):
    assert count(lambda x, y: jnp.sum(change(x)) + jnp.sum(y)) == count(lambda x, y: jnp.sum(x) + jnp.sum(y)) + steps


@pytest.mark.parametrize(("dim", "shape", "inside"), [(0, (8, 4), False), (1, (8, 4), True), (1, (1, 8), False), (2, (1, 2, 8), True)])
def test_a_sum_is_inside_where_its_dim_has_others_in_front_of_it(dim: int, shape: tuple[int, ...], inside: bool):
    rank = len(shape)
    whole = Spec(((),) * rank, (0,))
    [scatter] = reshard_moves(whole, Spec(tuple((0,) if at == dim else () for at in range(rank))), MeshShape(2, 1))
    assert scatter.sums_inside(shape) == inside
    [reduce] = reshard_moves(whole, Spec(((),) * rank), MeshShape(2, 1))
    assert not reduce.sums_inside(shape)
