"""Bytes that live only while a stage's tasks run: what is made, read for the last time, and gone."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.splits import ChosenSplit, EvenSplit
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.sharding.task_tiles import all_steps, backward_tiles
from alpa_hpc.sharding.tiles import Compute, Tile
from alpa_hpc.sharding.work_kind import Work, lying_apart
from alpa_hpc.sharding.workspace import backward_workspace, chosen_workspace, evenly_split_workspace, forward_workspace
from tests.planning import CLUSTER, prepared
from tests.random_plans import sgd_step

ROWS, WIDTH = 8, 16
SQUARE = ROWS * WIDTH * 4  # bytes of an activation [8, 16]
WEIGHT = WIDTH * WIDTH * 4
LONE = MeshShape(1, 1)
Body = Callable[[jax.Array, list[jax.Array]], jax.Array]


def one_layer(body: Body, *, num_weights: int = 1, remat: bool = False) -> LayerProblem:
    """The mean of `body(x, weights)` as one layer on two devices."""
    return layer_of(body, jnp.ones((ROWS, WIDTH)), [jnp.ones((WIDTH, WIDTH))] * num_weights, remat=remat)


def layer_of(body: Body, batch: jax.Array, weights: list[jax.Array], *, remat: bool = False) -> LayerProblem:
    step_of = sgd_step(lambda weights, x: jnp.mean(body(x, weights)))
    traced = trace_step(step_of, {"params": weights}, batch, num_microbatches=1)
    step = cut_layers(traced, num_layers=1, imbalance=1.0)
    return StageSolver(step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 2), MeshShape(2, 1))), remat=remat).problem(0)


@cache
def products(count: int, *, remat: bool = False) -> LayerProblem:
    """The sine of x @ u, of that @ v, and so on."""

    def body(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            x = jnp.sin(x @ weight)
        return x

    return one_layer(body, num_weights=count, remat=remat)


def forward(problem: LayerProblem) -> float:
    return forward_workspace([EvenSplit(problem, LONE)], hiding=True)


def backward(problem: LayerProblem) -> float:
    return backward_workspace([EvenSplit(problem, LONE)], hiding=True)


def test_results_that_are_kept_are_not_counted_again():
    for count in (3, 6):
        assert forward(products(count)) <= SQUARE + 64, "each product is a residual, but for the last"


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_kept_of_a_product_alone_lies_where_the_product_would(turned: bool):
    def body(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        products = jnp.einsum("oi,bi->ob", weights[0], x).T if turned else x @ weights[0]
        return jnp.sum(jnp.tanh(products), axis=0)

    assert forward(one_layer(body)) <= 2 * WIDTH * 4


def test_who_reads_what_is_kept_of_a_part_of_a_product_works_it_out_for_itself():
    x, weight, product, left, right, half, other = (Tile(SQUARE, "float32", 4) for _ in range(7))
    steps = [
        Compute(Work.CONTRACTION, (x, weight), (product,), name="dot_general"),
        Compute(Work.FUSED, (product,), (left, right), name="split"),
        Compute(Work.FUNCTION, (left,), (half,), name="mul"),
        Compute(Work.REDUCTION, (half, right), (other,), name="reduce_sum"),
    ]
    lifetimes = lifetimes_of(steps, kept=[half])
    [copy] = [kernel for kernel in lifetimes.kernels if not lifetimes.kept.isdisjoint(kernel.makes)]
    [made] = lifetimes.kernels[0].makes[:1]
    assert copy.reads == {made}, "it is worked out of the product"
    assert not any(lifetimes.kept & kernel.reads for kernel in lifetimes.kernels), "and nobody waits for it"


@pytest.mark.parametrize(
    ("equation", "found"), [("bqhd,bkhd->bhqk", (0, 1)), ("bhqd,bhkd->bhqk", ()), ("qbd,kbd->bqk", ()), ("bqd,bkd->bqk", ())]
)
def test_batches_lie_apart_where_other_dims_lie_between_them(equation: str, found: tuple[int, ...]):
    shape = (2, 3, 4, 5)[: equation.index(",")]
    [eqn] = [
        eqn for eqn in jax.make_jaxpr(partial(jnp.einsum, equation))(*[jnp.ones(shape)] * 2).eqns if eqn.primitive.name == "dot_general"
    ]
    assert lying_apart(eqn) == found


def test_arguments_are_copied_first_for_a_batch_of_products_that_lies_apart_in_them():
    queries, keys, x, weight, product, scores = (Tile(SQUARE, "float32", 4) for _ in range(6))
    steps = [
        Compute(Work.CONTRACTION, (x, weight), (product,), name="dot_general"),
        Compute(Work.CONTRACTION, (queries, keys), (scores,), name="dot_general", apart=(queries, keys)),
        Compute(Work.CONTRACTION, (product, scores), (Tile(SQUARE, "float32", 4),), name="dot_general"),
    ]
    lifetimes = lifetimes_of(steps)
    copies = [kernel.makes[0] for kernel in lifetimes.kernels[:2]]
    assert lifetimes.kernels[3].reads == set(copies)
    assert lifetimes.peak_bytes() == 4 * SQUARE, "both copies, the product and the scores"


def test_a_recomputing_forward_holds_two_activations_however_long_it_is():
    three, six = (forward(products(count, remat=True)) for count in (3, 6))
    assert three == pytest.approx(2 * SQUARE, abs=64)
    assert six == three


def test_gradients_that_products_add_to_are_in_no_memory_but_what_they_are_made_of_waits_for_them():
    for count in (3, 6):
        assert backward(products(count)) == count * SQUARE, "a gradient is larger than what it is made of: XLA puts it off"


def test_a_recomputing_backward_holds_what_it_made_again():
    three, six = (backward(products(count, remat=True)) for count in (3, 6))
    assert six - three == 3 * 2 * SQUARE, "each product, of which the next works out the sine, and its gradient"
    assert six > backward(products(6))


def test_what_is_elementwise_is_fused_and_what_is_converted_for_one_product_is_read_as_it_is():
    def long_chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for _ in range(5):
            x = 2 * jnp.abs(x) + 1
        return x @ weights[0]

    assert forward(one_layer(long_chain, remat=True)) == pytest.approx(SQUARE, abs=64), "the result: the product works out its operand"
    twice = one_layer(lambda x, weights: (x * jnp.sin(x)) @ weights[0], remat=True)
    assert forward(twice) == pytest.approx(2 * SQUARE, abs=64), "the operand, which is made of two readings, and the result"
    halves = one_layer(lambda x, w: (x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16)).astype(jnp.float32), remat=True)
    assert forward(halves) == pytest.approx(SQUARE / 2, abs=64), "the product alone"


def test_a_weight_converted_for_two_products_lies_in_memory_from_the_first_to_the_last():
    def twice(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        half = weights[0].astype(jnp.bfloat16)
        return ((x.astype(jnp.bfloat16) @ half) @ half).astype(jnp.float32)

    needed = forward(one_layer(twice, remat=True))
    assert WEIGHT / 2 + SQUARE / 2 <= needed <= WEIGHT / 2 + 2 * SQUARE


def test_every_byte_counts_by_what_it_takes_on_a_device():
    problem = products(3)
    assert evenly_split_workspace(problem, 1) == backward(problem)
    assert evenly_split_workspace(problem, 4) == pytest.approx(backward(problem) / 4)


def test_what_is_not_made_element_by_element_is_made_beside_what_it_is_made_of():
    """Of a product [16, 16] an operand [16, 16] of a product [16, 8]."""

    def needed(between: Callable[[jax.Array], jax.Array]) -> float:
        return forward(one_layer(lambda x, weights: between(weights[0] @ weights[1]) @ x.T, num_weights=2, remat=True))

    in_place, beside = WEIGHT + SQUARE, 2 * WEIGHT
    assert needed(jnp.exp) == pytest.approx(in_place, abs=64)
    assert needed(lambda product: jnp.exp(product).T) == pytest.approx(beside, abs=64)
    assert needed(partial(jax.nn.softmax, axis=1)) == pytest.approx(beside, abs=256), "a kernel makes whole rows"
    assert needed(partial(jax.nn.softmax, axis=0)) == pytest.approx(in_place, abs=256)


def test_a_row_that_no_kernel_keeps_is_made_in_place():
    for length, arrays in ((1 << 14, 2), (1 << 15, 1)):
        weights = [jnp.ones((WIDTH, length)), jnp.ones((length, 1))]
        needed = forward(layer_of(lambda x, w: jax.nn.softmax(x @ w[0], axis=1) @ w[1], jnp.ones((ROWS, WIDTH)), weights, remat=True))
        assert needed == pytest.approx(arrays * ROWS * length * 4, rel=0.01), length


def test_probabilities_and_their_gradients_lie_together_since_one_kernel_makes_both():
    """Of exponents that are kept, one product wants what they are divided by their sum, and two want its gradient."""
    length = 64
    square = ROWS * length * length * 4

    def attention(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        del weights
        return jax.nn.softmax(jnp.einsum("rqd,rkd->rqk", x, x), axis=2) @ x

    def body(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return attention(x @ weights[0], weights)

    problem = layer_of(body, jnp.ones((ROWS, length, WIDTH)), [jnp.ones((WIDTH, WIDTH))])
    kept = sum(problem.tensors[tensor].num_bytes for tensor in problem.residuals)
    assert kept >= square
    assert 2 * square <= backward(problem) < 3 * square


IMAGES, SIDE, KERNEL = 8, 16, 3 * 3 * 8 * 16 * 4
CONVOLVED = IMAGES * SIDE * SIDE * 16 * 4  # bytes


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@cache
def convolution(size: int, *, remat: bool = False) -> LayerProblem:
    batch, kernel = jnp.ones((IMAGES, SIDE, SIDE, 8)), jnp.ones((size, size, 8, 16))
    return layer_of(lambda x, weights: convolved(x, weights[0]), batch, [kernel], remat=remat)


def test_a_convolution_reads_a_copy_of_its_kernel_in_the_order_of_its_library():
    for size in (1, 3):
        copy = size * size * 8 * 16 * 4
        assert forward(convolution(size, remat=True)) == pytest.approx(CONVOLVED + copy, abs=64)


def test_a_recomputing_backward_turns_a_kernel_once_for_both_convolutions():
    """Of the second of two convolutions: its copy lies in memory from when it is made again to when the gradient of its images is."""

    def twice(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return jnp.sin(convolved(jnp.sin(convolved(x, weights[0])), weights[1]))

    batch, kernels = jnp.ones((1, 4, 4, 8)), [jnp.ones((3, 3, 8, 16)), jnp.ones((3, 3, 16, 16))]
    problem = layer_of(twice, batch, kernels, remat=True)
    tiles = backward_tiles([EvenSplit(problem, LONE)])
    lifetimes = lifetimes_of(all_steps(tiles))
    assert sum(size == 3 * 3 * 16 * 16 * 4 for size in lifetimes.sizes) == 2, "a copy, and the kernel's gradient"


def test_the_gradient_of_a_kernel_is_added_in_the_order_of_the_kernel_and_copied_there():
    assert backward(convolution(3)) == pytest.approx(CONVOLVED + KERNEL, abs=64), "the images' gradient, which is made for it, is larger"
    small = layer_of(lambda x, weights: jnp.mean(convolved(x, weights[0]), axis=(1, 2)), jnp.ones((1, 4, 4, 8)), [jnp.ones((3, 3, 8, 16))])
    assert backward(small) >= 2 * KERNEL


def test_a_scatter_to_the_largest_of_each_window_finds_their_places_first():
    def pooled(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        product = x @ weights[0]
        return jax.lax.reduce_window(product, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    problem = layer_of(pooled, jnp.ones((IMAGES, SIDE, SIDE, 8)), [jnp.ones((8, 16))])
    windows = CONVOLVED / 4
    assert backward(problem) >= CONVOLVED + 5 * windows, "the result, an index for each of four dims, and what is found there"
    lifetimes = lifetimes_of(all_steps(backward_tiles([EvenSplit(problem, LONE)])))
    [finding] = [kernel for kernel in lifetimes.kernels if any(lifetimes.sizes[value] == 5 * windows for value in kernel.makes)]
    assert finding.reads.isdisjoint(value for kernel in lifetimes.kernels for value in kernel.makes), "no cotangent"


@cache
def gpt(start: int, stop: int, *, remat: bool) -> tuple[ChosenLayer, ...]:
    solver = StageSolver(prepared().step, MeshPrices(logical_mesh(CLUSTER, Submesh(1, 4), MeshShape(2, 2))), remat=remat)
    return solver.choose(start, stop, MemoryPrice(0.0, 0.0))


def test_a_stage_needs_what_its_hungriest_layer_needs_and_no_less_than_an_even_split():
    shape = MeshShape(2, 2)
    layers = gpt(0, 3, remat=False)
    each = [backward_workspace([ChosenSplit(layer, shape)], hiding=True) for layer in layers]
    assert chosen_workspace(layers, shape, hiding=True) >= 0.95 * max(each), (
        "layers share what they make of the same parameter, and have an order of their own"
    )
    assert len(set(each)) > 1
    for layer in layers:
        assert chosen_workspace((layer,), shape, hiding=True) >= evenly_split_workspace(layer.problem, shape.num_devices)


def test_recomputed_layers_hold_what_they_hand_to_each_other():
    """While one layer recomputes, the cotangent that it waits for lies in memory; by itself, that is one of its arguments."""
    step = StageSolver(two_products(), MeshPrices(logical_mesh(CLUSTER, Submesh(1, 2), MeshShape(2, 1))), remat=True)
    splits = [EvenSplit(step.problem(index), LONE) for index in range(2)]
    together, each = backward_workspace(splits, hiding=True), [backward_workspace([split], hiding=True) for split in splits]
    assert max(each) + SQUARE <= together <= sum(each) + SQUARE


def two_products() -> LayeredStep:
    """Two layers of three products each."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.sin(x @ weight)
        return jnp.mean(x)

    weights = [jnp.ones((WIDTH, WIDTH))] * 6
    return cut_layers(
        trace_step(sgd_step(loss), {"params": weights}, jnp.ones((ROWS, WIDTH)), num_microbatches=1), num_layers=2, imbalance=1.0
    )


def test_a_recomputed_layer_holds_its_residuals_while_its_backward_runs():
    kept, remade = gpt(1, 2, remat=False)[0].problem, gpt(1, 2, remat=True)[0].problem
    residuals = sum(remade.tensors[tensor].num_bytes for tensor in set(remade.remade))
    assert not kept.remade and residuals > 0
    held = evenly_split_workspace(remade, 1) - evenly_split_workspace(kept, 1)
    assert 0 < held < residuals, "products' results and operands; what lies between is fused"
    assert evenly_split_workspace(remade, 1) >= max(remade.tensors[tensor].num_bytes for tensor in remade.remade)
