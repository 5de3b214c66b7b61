"""Small products of one operand are one product: what each of them was is a part of it, and lies there until it is read."""

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.merge_products import PART, SMALL, merge_products
from alpa_hpc.sharding.splits import EvenSplit
from alpa_hpc.sharding.task_tiles import all_steps, backward_tiles
from alpa_hpc.sharding.tiles import Compute, Tile, TileStep
from alpa_hpc.sharding.work_kind import Side, Work
from alpa_hpc.sharding.workspace import forward_workspace
from tests.sharding.test_workspace import SQUARE, WIDTH, layer_of, one_layer

LONE = MeshShape(1, 1)
OF_ROWS, OF_COLUMNS = Side((1,), (), 2), Side((0,), (), 2)


def tile(num_bytes: float = 4.0) -> Tile:
    return Tile(num_bytes, "float32", 4)


def product(left: Tile, right: Tile, sides: tuple[Side, Side] = (OF_ROWS, OF_COLUMNS)) -> Compute:
    return Compute(Work.CONTRACTION, (left, right), (tile(),), sides=sides, flop=1.0)


def products(steps: list[TileStep]) -> list[Compute]:
    return [step for step in steps if isinstance(step, Compute) and step.work is Work.CONTRACTION]


def test_small_products_that_read_an_operand_alike_are_one():
    x = tile()
    steps = [product(x, tile()) for _ in range(3)]
    whole, *parts = merge_products(steps)
    assert isinstance(whole, Compute)
    assert whole.reads == (x, *(step.reads[1] for step in steps))
    assert [made.num_bytes for made in whole.makes] == [12.0]
    assert whole.flop == 3.0
    assert [(part.name, part.reads, part.makes) for part in parts if isinstance(part, Compute)] == [
        (PART, whole.makes, step.makes) for step in steps
    ]


def test_a_matrix_may_be_read_transposed_but_not_summed_over_otherwise():
    x = tile()
    assert len(products(merge_products([product(x, tile()), product(tile(), x, (OF_ROWS, OF_ROWS))]))) == 1
    assert len(products(merge_products([product(x, tile()), product(x, tile(), (OF_COLUMNS, OF_COLUMNS))]))) == 2
    batch = Side((2,), (0,), 3)
    assert len(products(merge_products([product(x, tile(), (batch, batch)), product(tile(), x, (batch, batch))]))) == 2


@pytest.mark.parametrize(("large", "left"), [(0, 1), (1, 1), (2, 2)])
def test_of_two_products_one_is_small(large: int, left: int):
    x = tile()
    assert len(products(merge_products([product(x, tile(SMALL if number < large else 4.0)) for number in range(2)]))) == left


def test_a_product_that_waits_for_another_is_not_merged_with_it():
    x = tile()
    first = product(x, tile())
    between = Compute(Work.FUSED, first.makes, (tile(),), name="sin")
    steps = [first, between, product(x, between.makes[0])]
    assert merge_products(steps) == steps


def test_what_reads_a_product_runs_once_the_last_of_those_merged_with_it_could():
    x, late = tile(), tile()
    first, second = product(x, tile()), product(x, late)
    reader = Compute(Work.REDUCTION, first.makes, (tile(),), name="reduce_sum")
    maker = Compute(Work.REDUCTION, (tile(),), (late,), name="reduce_sum")
    order = merge_products([first, reader, maker, second])
    [whole] = products(order)
    assert order.index(maker) < order.index(whole) < order.index(reader)
    assert len(order) == len([maker, whole, reader]) + 2


def attention(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """What is kept of three products of one array."""
    query, key, value = (x @ weight for weight in weights)
    return jnp.sum(jnp.tanh(query * key) * jnp.exp(value), axis=0)


def test_what_is_kept_of_merged_products_is_copied_out_of_them():
    assert forward_workspace([EvenSplit(one_layer(attention, num_weights=3), LONE)], hiding=True) >= 3 * SQUARE


def test_gradients_of_two_weights_of_one_sum_are_one_product():
    """As in a recurrent net, for each step in time."""

    def body(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return jnp.tanh(x @ weights[0] + jnp.sin(x) @ weights[1])

    tiles = backward_tiles([EvenSplit(one_layer(body, num_weights=2), LONE)])
    [whole] = products(merge_products(all_steps(tiles)))
    assert [made.num_bytes for made in whole.makes] == [2 * WIDTH * WIDTH * 4]


@pytest.mark.parametrize(("dim", "piece", "is_copied"), [(1, 64, False), (0, 64, True), (1, 16, True)])
def test_products_read_piece_by_piece_what_lies_so_along_a_dim_that_they_do_not_sum_over(dim: int, piece: int, is_copied: bool):
    """As the weights of several gates, which are read at every step in time."""
    shape = tuple(piece if axis == dim else 128 for axis in range(2))
    pieces = [jnp.ones(shape)] * (128 // piece)

    def body(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        whole = jnp.concatenate(weights, axis=dim)
        for _ in range(3):
            x = jnp.tanh(x @ whole)
        return x

    need = forward_workspace([EvenSplit(layer_of(body, jnp.ones((4, 128)), pieces), LONE)], hiding=True)
    assert (need >= 128 * 128 * 4) == is_copied
