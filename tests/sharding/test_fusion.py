"""Steps become kernels as XLA makes them: what a product adds to, and what is worked out twice, is nowhere in memory."""

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.lifetimes import Lifetimes
from alpa_hpc.sharding.tiles import Compute, Tile
from alpa_hpc.sharding.work_kind import Side, Work, swaps

BYTES = 512.0
SIDES = (Side((1,), (), 2), Side((0,), (), 2))
BATCHED = (Side((2,), (0,), 3), Side((1,), (0,), 3))


def tile(dtype: str = "float32") -> Tile:
    itemsize = jnp.dtype(dtype).itemsize
    return Tile(BYTES * itemsize / 4, dtype, itemsize)


def product(made: Tile, sides: tuple[Side, ...] = SIDES) -> Compute:
    return Compute(Work.CONTRACTION, (tile(), tile()), (made,), name="dot_general", sides=sides)


def sizes(lifetimes: Lifetimes) -> list[float]:
    """Of what kernels make in memory."""
    return sorted(lifetimes.sizes[value] for kernel in lifetimes.kernels for value in kernel.makes if lifetimes.sizes[value])


def test_a_product_adds_to_an_argument_of_its_dtype_as_it_writes() -> None:
    gradient = tile()
    lifetimes = lifetimes_of([product(gradient)], added=[gradient])
    assert not sizes(lifetimes)
    assert len(lifetimes.results) == 1


def test_a_product_of_fewer_bits_than_the_argument_lies_in_memory_first() -> None:
    narrow, gradient = tile("bfloat16"), tile()
    converted = Compute(Work.CONVERSION, (narrow,), (gradient,), name="convert_element_type")
    assert sizes(lifetimes_of([product(narrow), converted], added=[gradient])) == [BYTES / 2]


def test_what_others_read_too_lies_in_memory() -> None:
    gradient, other = tile(), tile()
    lifetimes = lifetimes_of([product(gradient), Compute(Work.REDUCTION, (gradient,), (other,), name="reduce_sum")], added=[gradient])
    assert sizes(lifetimes) == [BYTES, BYTES]


@pytest.mark.parametrize(("order", "front"), [((1, 0), 0), ((2, 0, 1), 0), ((0, 2, 1), 1), ((1, 0, 2), None), ((0, 3, 1, 2), 1)])
def test_a_transposition_swaps_what_lies_behind_the_dims_that_it_leaves(order: tuple[int, ...], front: int | None) -> None:
    [eqn] = jax.make_jaxpr(lambda x: jnp.transpose(x, order))(jnp.ones((2, 3, 4, 5)[: len(order)])).eqns
    assert swaps(eqn) == front


@pytest.mark.parametrize(("sides", "front", "inside"), [(SIDES, 0, True), (BATCHED, 1, True), (BATCHED, 0, False), (SIDES, 1, False)])
def test_the_sides_of_a_product_may_be_swapped_as_it_writes(sides: tuple[Side, ...], front: int, inside: bool) -> None:
    made, gradient = tile(), tile()
    turned = Compute(Work.TRANSPOSITION, (made,), (gradient,), name="transpose", swaps=front)
    assert sizes(lifetimes_of([product(made, sides), turned], added=[gradient])) == ([] if inside else [BYTES])


def wanted_twice(*, apart: bool) -> Lifetimes:
    """A sum of two products, which two functions read: kept both, or one kernel with what they make."""
    left, right, total, one, other = (tile() for _ in range(5))
    steps = [
        product(left),
        product(right),
        Compute(Work.FUSED, (left, right), (total,), name="atan2"),
        Compute(Work.FUNCTION, (total,), (one,), name="tanh"),
        Compute(Work.FUSED, (total, one), (other,), name="atan2"),
    ]
    return lifetimes_of(steps, kept=[one, other] if apart else [other])


def test_what_one_kernel_wants_twice_is_worked_out_inside() -> None:
    assert sizes(wanted_twice(apart=False)) == [BYTES] * 3, "two products and the result"
    assert sizes(wanted_twice(apart=True)) == [BYTES] * 5, "and the sum, for two kernels"
