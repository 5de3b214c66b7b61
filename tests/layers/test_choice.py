"""The number of layers that is chosen follows the blocks of the model."""

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.layers.blocks import RepeatedBlock, find_block
from alpa_hpc.layers.choice import CHOOSE, MOST_LAYERS, choose_num_layers
from alpa_hpc.layers.forward import cut_forward
from alpa_hpc.models.gpt import GPT

BLOCK = [0, 9, 1, 9]


def repeated(number: int) -> tuple[list[int], list[str]]:
    """A first equation, blocks whose first one reads something else, and a last equation."""
    return [1, *BLOCK * number, 5], ["first", "other", *"bcd", *list("abcd") * (number - 1), "last"]


NOTHING_REPEATS = RepeatedBlock(0, 0, 1)


@pytest.mark.parametrize("number", [2, 3, 12, 48])
def test_the_block_is_found_and_counted(number: int) -> None:
    block = find_block(*repeated(number))
    assert block == RepeatedBlock(1, 1 + 4 * number, 4) and block.times == number
    assert block.places(7).tolist() == [1, 0, 3, 2, 1, 0, 3], "a block ends before equation 1 + 4 i"


def test_what_repeats_but_holds_little_work_is_no_block() -> None:
    flops, patterns = repeated(10)
    assert find_block([*flops, 1000], [*patterns, "large"]) == find_block([1, 2, 3], "abc") == NOTHING_REPEATS
    assert NOTHING_REPEATS.times == 1 and not NOTHING_REPEATS.places(5).any()


@pytest.mark.parametrize(("number", "layers"), [(2, 2), (12, 12), (16, 16), (17, 8), (24, 12), (32, 16), (48, 16), (49, 12), (96, 16)])
def test_layers_are_whole_blocks_and_at_most_sixteen(number: int, layers: int) -> None:
    assert choose_num_layers(find_block(*repeated(number)), num_heavy=2 * number) == layers


def test_without_blocks_there_is_a_layer_a_product_but_at_most_sixteen() -> None:
    assert choose_num_layers(NOTHING_REPEATS, num_heavy=3) == 3
    assert choose_num_layers(NOTHING_REPEATS, num_heavy=100) == MOST_LAYERS
    assert choose_num_layers(NOTHING_REPEATS, num_heavy=0) == 1


def test_a_gpt_gets_a_layer_a_block() -> None:
    model = GPT(num_layers=5, hidden=16, num_heads=2, vocab=32, sequence=8)
    params = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    key = jax.random.key(0)

    def loss(*arguments: jax.Array) -> list[jax.Array]:
        return [model.loss(jax.tree.unflatten(tree, arguments[:-1]), {"tokens": arguments[-1]}, key)]

    closed = jax.make_jaxpr(loss)(*leaves, jax.ShapeDtypeStruct((4, 9), jnp.int32))
    assert len(cut_forward(closed, num_params=len(leaves), num_layers=CHOOSE, imbalance=0.5).layers) == 5
