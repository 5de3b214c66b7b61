"""Families of operators with random shapes and parameters, split at random: tiles put together = the operator on one device.

A family draws an equation with its operands from a seed. Many are drawn at once and compiled as one program a mesh.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.inline import inline_all
from alpa_hpc.sharding.assignment import NONE, own_plans
from alpa_hpc.sharding.equation_work import NESTS
from alpa_hpc.sharding.strategies.batches import LINEAR_ALGEBRA
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
from alpa_hpc.sharding.strategies.registry import RULES, rule_of
from tests.sharding.operators import Trial, all_plans, check
from tests.sharding.test_strategies import CASES

SHAPES = [(2, 2), (2, 4), (4, 2), (8, 1), (1, 4)]
Array = np.ndarray | jax.Array
Drawn = list[tuple[JaxprEqn, list[Array]]]
MAX_PLANS = 5  # of each case


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.any = random.Random(seed)
        self.numbers = np.random.default_rng(seed)

    def array(self, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """Small whole numbers, exact in any type and distinct enough to be told apart."""
        return self.numbers.integers(-9, 10, shape).astype(dtype)

    def dtype(self) -> Any:
        return self.any.choice((np.float32, np.int32))

    def turn(self, options: Sequence[Any]) -> Any:
        """Each option in turn, as seeds go up."""
        return options[self.seed % len(options)]

    def size(self) -> int:
        return self.any.choice((2, 4, 8))

    def order(self, rank: int) -> tuple[int, ...]:
        return tuple(self.any.sample(range(rank), rank))


def equations(function: Callable[..., object], *operands: Array, only: Sequence[str]) -> Drawn:
    """The equations of `function(*operands)` with one of the primitives `only`, each with the values that it reads there."""
    closed = inline_all(jax.make_jaxpr(function)(*operands), unguarded=frozenset())
    known: dict[Any, Array] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    known.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    found: Drawn = []
    for eqn in closed.jaxpr.eqns:
        values = [np.asarray(atom.val) if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        known.update(zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True))
        if eqn.primitive.name in only:
            found.append((eqn, values))
    return found


CONV = ("conv_general_dilated",)


def convolution(draw: Draw) -> Drawn:
    """A convolution and both its gradients, dims in any order; plain, grouped or depthwise."""
    rank = draw.any.choice((1, 2))
    groups, per_group = draw.any.choice(((1, 4), (1, 8), (4, 2), (8, 1), (2, 2)))
    channels, outputs = groups * per_group, groups * draw.any.choice((1, 2, 4))
    kernel = [draw.any.choice((1, 2, 3)) for _ in range(rank)]
    strides = [draw.any.choice((1, 1, 2)) for _ in range(rank)]
    padding = [draw.any.choice(((0, 0), (0, 0), (1, 1), (0, 1))) for _ in range(rank)]
    left, right, out = draw.order(2 + rank), draw.order(2 + rank), draw.order(2 + rank)
    numbers = lax.ConvDimensionNumbers(left, right, out)
    x_shape, w_shape = [0] * (2 + rank), [0] * (2 + rank)
    for dim, size in zip(left, (draw.size(), channels, *[draw.any.choice((4, 8)) for _ in range(rank)]), strict=True):
        x_shape[dim] = size
    for dim, size in zip(right, (outputs, per_group, *kernel), strict=True):
        w_shape[dim] = size
    dilation = [draw.any.choice((1, 1, 2)) for _ in range(rank)]

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=numbers, feature_group_count=groups
        )

    def with_gradients(x: jax.Array, w: jax.Array) -> object:
        y, back = jax.vjp(run, x, w)
        return y, back(y)

    return equations(with_gradients, draw.array(*x_shape), draw.array(*w_shape), only=CONV)


def patches(draw: Draw) -> Drawn:
    """Convolutions whose windows do not overlap, or are the whole image, and the gradient of the kernel."""
    size = draw.any.choice((1, 2, 4))
    side = draw.any.choice((size, 8))
    strides = draw.any.choice(((size, size), (size, size), (2 * size, size))) if side == 8 else (1, 1)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def with_gradient(x: jax.Array, w: jax.Array) -> object:
        y, back = jax.vjp(lambda w: run(x, w), w)
        return y, back(y)

    return equations(with_gradient, draw.array(draw.size(), side, side, 4), draw.array(size, size, 4, draw.size()), only=CONV)


def batch_groups(draw: Draw) -> Drawn:
    """Groups of the batch, each with outputs of its own."""
    groups = draw.any.choice((2, 4, 8))
    x = draw.array(groups * draw.any.choice((1, 2)), draw.any.choice((2, 4)), 5, dtype=np.float32)
    w = draw.array(groups * draw.any.choice((1, 2)), x.shape[1], draw.any.choice((1, 3)), dtype=np.float32)
    return equations(lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", batch_group_count=groups), x, w, only=CONV)


def ordering(draw: Draw) -> Drawn:
    """sort of several operands, top_k, argmax, cumulative operators in both directions."""
    shape = tuple(draw.size() for _ in range(draw.any.choice((1, 2, 3))))
    axis = draw.any.randrange(len(shape))
    x, y = draw.array(*shape, dtype=draw.dtype()), draw.array(*shape)
    kinds: list[Callable[[jax.Array, jax.Array], object]] = [
        lambda x, y: lax.sort((x, y), dimension=axis, num_keys=draw.any.choice((1, 2)), is_stable=True),
        lambda x, y: lax.top_k(x, draw.any.choice((1, 2)), axis=axis),
        lambda x, y: lax.argmax(x, axis, np.int32),
        lambda x, y: lax.argmin(y, axis, np.int32),
        *(
            lambda x, y, run=run: run(x, axis=axis, reverse=draw.any.random() < 0.5)
            for run in (lax.cumsum, lax.cummax, lax.cummin, lax.cumprod)
        ),
        lambda x, y: lax.cumlogsumexp(y, axis=axis, reverse=True),
        lambda x, y: lax.approx_max_k(y, 1, reduction_dimension=axis),
    ]
    return equations(draw.turn(kinds), x, y, only=ORDERINGS)


ORDERINGS = ("sort", "top_k", "argmax", "argmin", "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "approx_top_k")


def pooling(draw: Draw) -> Drawn:
    """Pooling and its gradient: windows that overlap, that do not, that are padded, that cover a dim."""
    shape = tuple(draw.any.choice((4, 8)) for _ in range(3))
    window = tuple(draw.any.choice((1, 2, 3, size)) for size in shape)
    strides = tuple(draw.any.choice((1, w, w)) for w in window)
    padding = [draw.any.choice(((0, 0), (0, 0), (0, w - 1))) for w in window]
    x = draw.array(*shape)
    combine, start = draw.turn(((lax.max, -np.inf), (lax.min, np.inf), (lax.add, 0.0), (lax.mul, 1.0), (None, 0.0)))
    if combine is None:
        return equations(lambda x: lax.reduce_window((x, x), (0.0, 0.0), _larger, window, strides, padding), x, only=POOLS)

    def run(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, start, combine, window, strides, padding)

    if combine in (lax.mul, lax.add):
        return equations(run, x, only=POOLS)
    return equations(lambda x: (jax.vjp(run, x)[1](run(x)), jax.jvp(run, (x,), (x,))), x, only=POOLS)


POOLS = (
    *("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"),
    *("select_and_scatter_add", "select_and_gather_add"),
)


def _larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """By the first component."""
    first = a[0] >= b[0]
    return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])


MODES = ("clip", "fill", "promise_in_bounds")


def lookup(draw: Draw) -> Drawn:
    """Gathers: rows, rows and columns, rows of each element of a batch, windows; indices of several types, also outside the table."""
    mode = draw.any.choice(MODES)
    shape = tuple(draw.any.choice((4, 8)) for _ in range(3))
    table = draw.array(*shape, dtype=draw.any.choice((np.float32, np.int32, np.uint8)))
    index_dtype = draw.any.choice((np.int32, np.int8, np.uint32))
    low, high = (0, 4) if mode == "promise_in_bounds" else (-3 if index_dtype != np.uint32 else 0, 11)
    count = draw.size()

    def indices(*shape: int) -> np.ndarray:
        return draw.numbers.integers(low, high, shape).astype(index_dtype)

    one = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0,))
    two = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0, 2), start_index_map=(2, 0))
    kept = lax.GatherDimensionNumbers(offset_dims=(1, 2, 3), collapsed_slice_dims=(), start_index_map=(1, 0, 2))
    paired = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(1,), start_index_map=(1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)
    )
    numbers, sizes, index = draw.turn(
        (
            (one, (1, shape[1], shape[2]), indices(count, 1)),
            (one, (1, 2, shape[2]), indices(count, 1)),
            (two, (1, shape[1], 1), indices(count, 2)),
            (kept, (1, 1, shape[2]), np.concatenate([indices(count, 2), np.zeros((count, 1), index_dtype)], 1)),
            (kept, (2, 1, shape[2]), np.concatenate([indices(count, 2), np.zeros((count, 1), index_dtype)], 1)),
            (paired, (1, 1, shape[2]), indices(shape[0], 1)),
        )
    )
    return equations(lambda t, i: lax.gather(t, i, numbers, sizes, mode=mode), table, index, only=("gather",))


def writing(draw: Draw) -> Drawn:
    """All scatters: rows, rows and columns, rows of each element of a batch, windows."""
    mode = draw.any.choice(MODES)
    shape = tuple(draw.any.choice((4, 8)) for _ in range(3))
    dtype = draw.dtype()
    low, high = (0, 4) if mode == "promise_in_bounds" else (-3, 11)
    count = draw.size()
    one = lax.ScatterDimensionNumbers(update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    two = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(2, 0))
    paired = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    numbers, index_shape, update_shape = draw.any.choice(
        (
            (one, (count, 1), (count, shape[1], shape[2])),
            (one, (count, 1), (count, 2, shape[2])),
            (two, (count, 2), (count, shape[1])),
            (paired, (shape[0], 1), (shape[0], shape[2])),
        )
    )
    index = draw.numbers.integers(low, high, index_shape).astype(draw.any.choice((np.int32, np.int8)))
    kinds = (lax.scatter, lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max)
    write = draw.turn(kinds)
    if write is lax.scatter:  # which of several updates of one place wins is not said
        index = np.stack([draw.numbers.permutation(4)[: index_shape[0]] for _ in range(index_shape[1])], 1).astype(np.int32)
        update_shape = (len(index), *update_shape[1:]) if numbers is not paired else update_shape
        if numbers is paired:
            index = np.arange(shape[0], dtype=np.int32)[:, None] % 4
    table, updates = draw.array(*shape, dtype=dtype), draw.array(*update_shape, dtype=dtype)
    return equations(lambda t, i, u: write(t, i, u, numbers, mode=mode), table, index, updates, only=SCATTERS)


SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def product(draw: Draw) -> Drawn:
    """Matrix products with any batch, contracted and free dims, in any order."""
    num_batch, num_contract = draw.any.choice((0, 1, 1, 2)), draw.any.choice((0, 1, 1, 2))
    shared = [draw.size() for _ in range(num_batch + num_contract)]
    free = [[draw.size() for _ in range(draw.any.choice((0, 1, 1, 2)))] for _ in range(2)]
    orders = [draw.order(len(shared) + len(one)) for one in free]
    places = [{loop: dim for dim, loop in enumerate(order)} for order in orders]
    dtype = draw.dtype()
    left, right = (draw.array(*([*shared, *one][loop] for loop in order), dtype=dtype) for one, order in zip(free, orders, strict=True))
    batch, contract = (
        (tuple(places[0][loop] for loop in loops), tuple(places[1][loop] for loop in loops))
        for loops in (range(num_batch), range(num_batch, len(shared)))
    )
    return equations(lambda a, b: lax.dot_general(a, b, (contract, batch)), left, right, only=("dot_general",))


def ragged_product(draw: Draw) -> Drawn:
    """Rows in groups, and the gradients."""
    rows, groups = 8, draw.any.choice((2, 4))
    cuts = np.sort(draw.numbers.integers(0, rows + 1, groups - 1))
    sizes = np.diff([0, *cuts, rows]).astype(np.int32)
    x = draw.array(rows, draw.size())
    w = draw.array(groups, x.shape[1], draw.size())

    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> object:
        y, back = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
        return y, back(y)

    return equations(run, x, w, sizes, only=("ragged_dot_general",))


def reduction(draw: Draw) -> Drawn:
    """Reductions that no collective completes, or one does; of numbers and of booleans; by any function."""
    shape = tuple(draw.size() for _ in range(3))
    axes = tuple(draw.any.sample(range(3), draw.any.choice((1, 2, 3))))
    whole, real = draw.array(*shape, dtype=np.int32), draw.array(*shape)
    truth = whole > 0
    kinds: list[tuple[Callable[..., object], Array]] = [
        (lambda x: lax.reduce_prod(x, axes), np.sign(real) + 1.5),
        (lambda x: lax.reduce_xor(x, axes), whole),
        (lambda x: lax.reduce_and(x, axes), draw.any.choice((whole, truth))),
        (lambda x: lax.reduce_or(x, axes), draw.any.choice((whole, truth))),
        (lambda x: lax.reduce_max(x, axes), draw.any.choice((whole, real))),
        (lambda x: lax.reduce_min(x, axes), draw.any.choice((whole, real))),
        (lambda x: lax.reduce_sum(x, axes), draw.any.choice((whole, real))),
        (lambda x: lax.reduce((x, x), (np.float32(-99), np.float32(-99)), _larger, axes), real),
    ]
    function, x = draw.turn(kinds)
    return equations(function, x, only=REDUCTIONS)


REDUCTIONS = ("reduce", *(f"reduce_{kind}" for kind in ("prod", "xor", "and", "or", "max", "min", "sum")))


def moving(draw: Draw) -> Drawn:
    """Dims that are stacked, taken apart, repeated, reread as other numbers, counted, updated in place."""
    shape = tuple(draw.size() for _ in range(3))
    x, y = draw.array(*shape), draw.array(*shape)
    axis = draw.any.randrange(3)
    part = tuple(draw.any.choice((size, size // 2)) for size in shape)
    kinds: list[Callable[[jax.Array, jax.Array], object]] = [
        lambda x, y: jnp.stack([x, y], axis),
        lambda x, y: jnp.unstack(x, axis=axis),
        lambda x, y: lax.tile(x, [draw.any.choice((1, 2)) for _ in shape]),
        lambda x, y: lax.bitcast_convert_type(x, draw.any.choice((np.int32, np.uint16))),
        lambda x, y: lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.uint8), np.float32),
        lambda x, y: lax.broadcasted_iota(draw.any.choice((np.int32, np.uint8, np.float32)), shape, axis),
        lambda x, y: lax.dynamic_update_slice(x, y[tuple(map(slice, part))], [np.int32(draw.any.randrange(3)) for _ in shape]),
        lambda x, y: lax.dynamic_slice(x, [np.int32(draw.any.randrange(3)) for _ in shape], part),
        lambda x, y: lax.reduce_precision(x, 5, 3),
        lambda x, y: lax.clamp(y, x, y + 2),
        lambda x, y: lax.optimization_barrier((x, y)),
        lambda x, y: lax.expand_dims(x, [axis]),
    ]
    return equations(draw.turn(kinds), x, y, only=MOVES)


MOVES = (
    *("stack", "unstack", "tile", "bitcast_convert_type", "iota", "dynamic_update_slice", "dynamic_slice"),
    *("reduce_precision", "clamp", "optimization_barrier", "broadcast_in_dim"),
)


def random_numbers(draw: Draw) -> Drawn:
    """Keys made, split and used; bits of all widths."""
    key = jax.random.key(draw.any.randrange(1000))
    keys = jax.random.split(key, (draw.size(),))
    shape = (draw.size(), draw.size())
    bits = draw.any.choice((np.uint8, np.uint16, np.uint32))
    alpha = draw.numbers.uniform(0.5, 2.0, (len(keys), 2)).astype(np.float32)
    kinds: list[tuple[Callable[..., object], Sequence[Array]]] = [
        (lambda k: jax.random.bits(k, shape, bits), (key,)),
        (jax.vmap(lambda k: jax.random.bits(k, shape, bits)), (keys,)),
        (lambda k: jax.random.split(k, shape), (key,)),
        (jax.vmap(jax.random.split), (keys,)),
        (jax.vmap(jax.random.fold_in), (keys, np.arange(len(keys), dtype=np.uint32))),
        (lambda k: jax.random.clone(jax.random.wrap_key_data(jax.random.key_data(k))), (keys,)),
        (jax.vmap(jax.random.gamma), (keys, alpha)),
        (jax.vmap(jax.random.key), (np.arange(len(keys), dtype=np.int32),)),
        (lambda k: jax.random.bits(k, shape), (jax.random.key(3, impl="rbg"),)),
    ]
    function, operands = draw.turn(kinds)
    return equations(function, *operands, only=RANDOM)


RANDOM = [f"random_{name}" for name in ("bits", "split", "fold_in", "wrap", "unwrap", "gamma", "seed", "clone")]


def linear_algebra(draw: Draw) -> Drawn:
    """Factorisations, solvers and Fourier transforms of each element of a batch."""
    batch = tuple(draw.size() for _ in range(draw.any.choice((1, 2))))
    a = draw.array(*batch, 3, 3)
    spd = a @ np.swapaxes(a, -1, -2) + 99 * np.eye(3, dtype=np.float32)
    lower = np.tril(a) + 20 * np.eye(3, dtype=np.float32)
    kinds: list[tuple[Callable[..., object], Sequence[Array]]] = [
        (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (spd,)),
        (lambda a: lax.linalg.eigh(a, symmetrize_input=False), (spd,)),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (lower, draw.array(*batch, 3, 2))),
        *((getattr(lax.linalg, name), (spd,)) for name in ("lu", "svd", "qr", "schur", "hessenberg", "eig", "tridiagonal")),
        (lambda a: lax.linalg.householder_product(a, a[..., 0]), (a / 9,)),
        (lambda a: lax.linalg.lu_pivots_to_permutation(abs(a[..., 0]).astype(np.int32) % 3, 4), (a,)),
        (lambda a, c: lax.linalg.ormqr(a, a[..., 0], c), (a / 9, spd)),
        (lambda a, c: lax.linalg.symmetric_product(a, c, symmetrize_output=False), (a, spd)),
        (lambda x: lax.fft(x, "RFFT", (8,)), (draw.array(*batch, 8),)),
        (lambda x: lax.fft(x, "FFT", (3, 3)), (a.astype(np.complex64),)),
        (lambda d, x: lax.linalg.tridiagonal_solve(d, d + 40, d, x), (draw.array(*batch, 4), draw.array(*batch, 4, 2))),
    ]
    function, operands = draw.turn(kinds)
    return equations(function, *operands, only=(*LINEAR_ALGEBRA, "fft"))


@dataclass(frozen=True)
class Family:
    """How cases are drawn, how many, which primitives come up among them, and whether some results are made in pieces."""

    draw: Callable[[Draw], Drawn]
    num_cases: int
    kinds: frozenset[str]
    has_sums: bool = False


PRIVATE = {"geqrf", "select_and_scatter"}  # no function of jax.lax binds these; they follow the rules of their relatives
FAMILIES = [
    Family(convolution, 15, frozenset(CONV), has_sums=True),
    Family(patches, 15, frozenset(CONV), has_sums=True),
    Family(batch_groups, 15, frozenset(CONV), has_sums=True),
    Family(ordering, 20, frozenset(ORDERINGS)),
    Family(pooling, 15, frozenset(POOLS), has_sums=True),
    Family(lookup, 24, frozenset({"gather"}), has_sums=True),
    Family(writing, 24, frozenset(SCATTERS), has_sums=True),
    Family(product, 24, frozenset({"dot_general"}), has_sums=True),
    Family(ragged_product, 5, frozenset({"ragged_dot_general"}), has_sums=True),
    Family(reduction, 24, frozenset(REDUCTIONS), has_sums=True),
    Family(moving, 24, frozenset(MOVES)),
    Family(random_numbers, 10, frozenset(RANDOM)),
    Family(linear_algebra, 17, frozenset({*LINEAR_ALGEBRA, "fft"} - PRIVATE)),
]


def drawn_trials(family: Family, shape: MeshShape, seeds: Sequence[int]) -> list[Trial]:
    """For each equation that the family draws: the plan that splits most, and some others."""
    trials: list[Trial] = []
    for seed in seeds:
        draw = Draw(seed)
        for eqn, operands in family.draw(draw):
            plans = all_plans(eqn, shape)
            chosen = draw.any.sample(plans, min(MAX_PLANS, len(plans)))
            trials.append(Trial(eqn, operands, [max(plans, key=lambda plan: plan.split), *chosen]))
    return trials


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.draw.__name__)
def test_tiles_put_together_are_the_whole(family: Family) -> None:
    seen: list[Trial] = []
    for number, (rows, cols) in enumerate(SHAPES):
        shape = MeshShape(rows, cols)
        trials = drawn_trials(family, shape, range(number, family.num_cases, len(SHAPES)))
        check(trials, shape)
        seen += trials
    assert {trial.eqn.primitive.name for trial in seen} == family.kinds
    plans = [plan for trial in seen for plan in trial.plans]
    assert any(NONE not in plan.assignment and plan.assignment[0] != plan.assignment[1] for plan in plans), "two loops at once"
    assert any((0, 1) in spec.dims for plan in plans for spec in (*plan.operands, *plan.raw)), "one dim over both axes"
    pieces = any(plan.combined or any(spec.partial for spec in plan.raw) for plan in plans)
    assert pieces or not family.has_sums


def test_every_rule_is_tried_here_or_by_a_fixed_case() -> None:
    fixed = {one.primitive for one in CASES} | ELEMENTWISE
    drawn = frozenset[str]().union(*(family.kinds for family in FAMILIES))
    assert set(RULES) - fixed - drawn == {"sharding_constraint", "layout_constraint", "device_put", *NESTS, *PRIVATE}


def test_every_elementwise_primitive_of_jax_has_a_rule() -> None:
    assert _is_elementwise(lax.atan2_p), "else nothing is found"
    assert not _is_elementwise(lax.optimization_barrier_p)
    primitives = [getattr(lax, name) for name in dir(lax) if name.endswith("_p")]
    assert [one.name for one in primitives if one.name not in RULES and _is_elementwise(one)] == []


def _is_elementwise(primitive: Any) -> bool:
    """Whether it binds without parameters on arrays of one shape, and its result follows a permutation of the elements."""
    for count in (1, 2, 3):
        for dtype in (np.float32, np.int32, bool, np.complex64):
            xs = [np.linspace(0.1, 0.9, 4).astype(dtype) if dtype is not np.int32 else np.arange(4, dtype=np.int32) for _ in range(count)]
            try:
                whole = primitive.bind(*xs)
                parts = primitive.bind(*(x[::-1] for x in xs))
            except (TypeError, ValueError, NotImplementedError, AttributeError, KeyError, AssertionError, RuntimeError):
                continue
            if isinstance(whole, jax.Array) and whole.shape == (4,):
                return bool(np.array_equal(np.asarray(whole)[::-1], np.asarray(parts), equal_nan=True))
    return False


def test_convolutions_of_a_model_have_two_dimensional_strategies() -> None:
    eqn, _ = convolution(Draw(0))[0]
    rule = rule_of(eqn)
    assert rule is not None
    plans = own_plans(rule, MeshShape(2, 2)).plans
    assert {plan.split for plan in plans} == {1, 2, 4}
