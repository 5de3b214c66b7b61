"""The linear order of the equations: branches are taken whole where a program goes through them in turns; all else stays as traced."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.inline import inline_calls
from alpa_hpc.layers.forward import _by_role, _crossings, _with_distinct_outputs, cut_forward
from alpa_hpc.layers.order import linear_order
from alpa_hpc.layers.received import Crossing
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.training.model import Model
from tests.layers.test_forward import KEY, ROWS, matrices, traced

DEPTH, WIDTH = 4, 8


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[Crossing]]:
    count = draw(st.integers(1, 12))
    flops = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    readers = [draw(st.sets(st.integers(producer + 1, count - 1), max_size=3)) for producer in range(count - 1)]
    return flops, [Crossing(draw(st.integers(1, 20)), producer, tuple(sorted(one))) for producer, one in enumerate(readers) if one]


def alive(order: Sequence[int], flops: Sequence[int], crossings: Sequence[Crossing]) -> int:
    """Bytes alive while each equation runs, those that it reads included, times its FLOP; all of it."""
    place = {position: index for index, position in enumerate(order)}
    return sum(
        flops[order[index]] * one.size
        for one in crossings
        for index in range(place[one.producer] + 1, max(place[reader] for reader in one.readers) + 1)
    )


@settings(max_examples=500, deadline=None)
@given(programs())
def test_every_equation_comes_once_and_after_what_it_reads_and_no_more_is_alive(program: tuple[list[int], list[Crossing]]) -> None:
    flops, crossings = program
    order = linear_order(flops, crossings)
    assert sorted(order) == list(range(len(flops)))
    place = {position: index for index, position in enumerate(order)}
    assert all(place[one.producer] < place[reader] for one in crossings for reader in one.readers)
    assert order == list(range(len(flops))) or alive(order, flops, crossings) < alive(range(len(flops)), flops, crossings)


def two_towers(params: Sequence[Sequence[jax.Array]], left: jax.Array, right: jax.Array) -> jax.Array:
    """A layer of each tower in turns, and the product of what they end with."""
    for first, second in zip(*params, strict=True):
        left, right = jnp.tanh(left @ first), jnp.tanh(right @ second)
    return jnp.sum(left * right)


def test_towers_that_are_traced_in_turns_are_cut_one_after_the_other() -> None:
    shapes = matrices(*[(WIDTH, WIDTH)] * DEPTH)
    closed, num_params = traced(two_towers, (shapes, shapes), *matrices((ROWS, WIDTH), (ROWS, WIDTH)))
    layers = cut_forward(closed, num_params=num_params, num_layers=4, imbalance=0.5).layers
    assert [layer.params for layer in layers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layers[2].inputs == (), "the second tower waits for nothing of the first"
    assert layers[1].outputs[0] in layers[3].inputs, "what the first tower ends with goes to the end of the second"


def test_a_branch_that_meets_the_others_at_every_step_is_no_reason_to_change_the_order() -> None:
    flops = [1] * 9
    crossings = [Crossing(8, position, tuple(range(position + 1, min(position + 3, 9)))) for position in range(8)]
    assert linear_order(flops, crossings) == list(range(9))


@pytest.mark.parametrize(
    "model",
    [
        GPT(num_layers=3, hidden=16, num_heads=2, vocab=32, sequence=8, dtype="bfloat16", dropout=0.1),
        MoE(num_layers=4, hidden=16, num_heads=2, num_experts=4, vocab=32, sequence=8, group_size=8, mlp_factor=2),
        Llama(num_layers=3, hidden=16, num_heads=4, num_kv_heads=2, mlp_width=32, vocab=32, sequence=8),
        WideResNet(depth=14, channels=8, width=2, num_classes=10, image=32),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_without_towers_are_cut_as_they_are_traced(model: Model) -> None:
    batch, tree = jax.tree.flatten(model.batch(ROWS))
    params = jax.eval_shape(model.init, KEY)
    closed, num_params = traced(lambda params, *leaves: model.loss(params, jax.tree.unflatten(tree, leaves), KEY), params, *batch)
    parts = _by_role(_with_distinct_outputs(inline_calls(closed)), num_params)
    order = linear_order([float(equation_flops(equation)) for equation in parts.body], _crossings(parts))
    assert all(first < second for first, second in itertools.pairwise(order))
