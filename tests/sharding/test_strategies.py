"""Every rule under every assignment: the local form of the primitive, finished, equals the primitive on whole arrays.

A primitive is covered by a row of `CASES`, a function of one equation and its operands, or by a family of random cases.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.assignment import following, own_plans, whole_plan
from alpa_hpc.sharding.spec import Spec, replicated
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
from alpa_hpc.sharding.strategies.registry import rule_of, whole_rule
from tests.sharding.operators import Trial, all_plans, bools, check, floats, ints, only_equation

SHAPES = [(2, 2), (2, 1), (1, 2), (2, 4)]


Dims = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """`function(*operands)` is one equation of `primitive`."""

    primitive: str
    function: Callable[..., object]
    operands: tuple[np.ndarray, ...]


def case(primitive: str, function: Callable[..., object], *operands: np.ndarray) -> Case:
    return Case(primitive, function, operands)


X, Y = floats(8, 16), floats(8, 16, seed=1)
ROWS_OF_TABLE = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
ADD_TO_TABLE = lax.ScatterDimensionNumbers(update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
COLUMNS = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,))
WINDOWS = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))


def look_up(mode: lax.GatherScatterMode) -> Callable[..., jax.Array]:
    return lambda table, indices: lax.gather(table, indices, ROWS_OF_TABLE, slice_sizes=(1, 4), mode=mode)


def add_rows(mode: lax.GatherScatterMode) -> Callable[..., jax.Array]:
    return lambda table, indices, updates: lax.scatter_add(table, indices, updates, ADD_TO_TABLE, mode=mode)


def dot(contract: Dims, batch: Dims = ((), ())) -> Callable[..., jax.Array]:
    return lambda a, b: lax.dot_general(a, b, (contract, batch))


TABLE, NEAR, FAR = floats(8, 4), ints(2, 8, 1), ints(2, 8, 1, low=-3, high=12)
MODES = lax.GatherScatterMode
ONE, FIVE = np.full((), 1, np.float32), np.full((), 5, np.int32)
CASES = [
    *(case(name, getattr(lax, name), X, Y) for name in ("add", "sub", "mul", "div", "max", "min", "rem", "atan2", "nextafter", "pow")),
    *(case(name, getattr(lax, name), X) for name in ("exp", "log", "tanh", "sin", "rsqrt", "neg", "abs", "is_finite", "erf", "logistic")),
    *(case(name, getattr(lax, name), X, Y) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    case("add", lambda x: x + 1.5, X),
    case("not", lax.bitwise_not, bools(8, 16)),
    case("integer_pow", lambda x: x**3, X),
    case("select_n", lax.select_n, bools(8, 16), X, Y),
    case("select_n", lax.select_n, np.array(True), X, Y),
    case("clamp", lambda x: lax.clamp(0.2, x, 0.7), X),
    case("convert_element_type", lambda x: lax.convert_element_type(x, jnp.bfloat16), X),
    case("convert_element_type", lambda x: lax.convert_element_type(x, jnp.int32), X * 10),
    case("convert_element_type", lambda x: lax.convert_element_type(x, jnp.float32), ints(8, 16)),
    case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), floats(4, 8, 16)),
    case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8, 16), (1, 2)), X),
    case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)), floats(8, 1)),
    case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16), ()), ONE),
    case("squeeze", lambda x: lax.squeeze(x, (1,)), floats(8, 1, 16)),
    case("squeeze", lambda x: lax.squeeze(x, (0, 1)), floats(1, 1)),
    case("reshape", lambda x: lax.reshape(x, (4, 2, 16)), X),
    case("reshape", lambda x: lax.reshape(x, (8, 16)), floats(4, 2, 16)),
    case("reshape", lambda x: lax.reshape(x, (128,)), X),
    case("reshape", lambda x: lax.reshape(x, (1, 16, 8)), X),
    case("reshape", lambda x: lax.reshape(x, (1,)), ONE),
    case("reshape", lambda x: lax.reshape(x, (6, 4)), floats(4, 6)),
    case("slice", lambda x: lax.slice(x, (0, 3), (8, 9)), X),
    case("slice", lambda x: lax.slice(x, (0, 0), (8, 16), (2, 1)), X),
    case("pad", lambda x: lax.pad(x, 0.0, [(0, 0, 0), (2, 2, 0)]), X),
    case("concatenate", lambda x, y: lax.concatenate([x, y], 1), X, Y),
    case("split", lambda x: lax.split(x, (4, 12), axis=1), X),
    case("rev", lambda x: lax.rev(x, (1,)), X),
    case("dynamic_slice", lambda x, i: lax.dynamic_slice_p.bind(x, np.int32(0), i, slice_sizes=(8, 4)), X, FIVE),
    case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, np.int32(0), i), X, floats(8, 4), FIVE),
    *(
        case(name, lambda x, name=name: getattr(lax, name)(x, axis=1), X)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    ),
    case("dot_general", dot(((1,), (0,))), floats(8, 16), floats(16, 8)),
    case("dot_general", dot(((2,), (0,))), floats(2, 8, 4), floats(4, 3, 8)),
    case("dot_general", dot(((3,), (3,)), ((0, 2), (0, 2))), floats(2, 4, 8, 4), floats(2, 8, 8, 4)),
    case("dot_general", dot(((0, 1), (0, 1))), floats(4, 8, 2), floats(4, 8, 16)),
    case("reduce_sum", lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), X),
    case("reduce_sum", lambda x: lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), X),
    *(case(f"reduce_{kind}", lambda x, kind=kind: getattr(lax, f"reduce_{kind}")(x, (1,)), X) for kind in ("max", "min")),
    *(case(f"reduce_{kind}", lambda x, kind=kind: getattr(lax, f"reduce_{kind}")(x, (1,)), bools(8, 16)) for kind in ("and", "or")),
    *(case(f"reduce_{kind}", lambda x, kind=kind: getattr(lax, f"reduce_{kind}")(x, (1,)), ints(8, 16)) for kind in ("and", "or")),
    *(case(name, lambda x, name=name: getattr(lax, name)(x, 1, jnp.int32), X) for name in ("argmax", "argmin")),
    *(case("gather", look_up(mode), TABLE, NEAR) for mode in (MODES.PROMISE_IN_BOUNDS, MODES.CLIP)),
    *(case("gather", look_up(mode), TABLE, FAR) for mode in (MODES.CLIP, MODES.FILL_OR_DROP)),
    case("gather", look_up(MODES.FILL_OR_DROP), ints(8, 4), FAR),
    case("gather", lambda t, i: lax.gather(t, i, COLUMNS, slice_sizes=(8, 1), mode="clip"), X, ints(4, 1)),
    case("gather", lambda t, i: lax.gather(t, i, WINDOWS, slice_sizes=(3, 16), mode="clip"), X, ints(4, 1)),
    *(case("scatter-add", add_rows(mode), TABLE, FAR, floats(2, 8, 4)) for mode in (MODES.CLIP, MODES.FILL_OR_DROP)),
    case("scatter-add", add_rows(MODES.PROMISE_IN_BOUNDS), TABLE, NEAR, floats(2, 8, 4)),
]


NUM_PARTS = 6  # cases that are compiled together


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("rows_cols", SHAPES, ids=str)
def test_every_assignment_gives_the_whole_result(part: int, rows_cols: tuple[int, int]) -> None:
    shape = MeshShape(*rows_cols)
    trials: list[Trial] = []
    for one in CASES[part::NUM_PARTS]:
        if one.primitive in ELEMENTWISE and rows_cols != SHAPES[0]:
            continue
        eqn, operands = only_equation(one.function, *one.operands)
        assert eqn.primitive.name == one.primitive
        trials.append(Trial(eqn, operands, all_plans(eqn, shape)))
    check(trials, shape)


def test_most_elementwise_rules_have_a_case():
    assert len({one.primitive for one in CASES} & ELEMENTWISE) >= 25


def test_unknown_primitives_run_whole():
    eqn, _ = only_equation(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), X)
    assert rule_of(eqn) is None
    table = whole_plan(whole_rule(eqn), MeshShape(2, 4))
    assert table.plans[0].split == 1
    assert table.operands == ((replicated(2),),)


def test_matrix_products_have_two_dimensional_strategies():
    eqn, _ = only_equation(dot(((1,), (0,))), floats(8, 16), floats(16, 8))
    rule = rule_of(eqn)
    assert rule is not None
    plans = own_plans(rule, MeshShape(2, 4)).plans
    assert len(plans) == 16
    assert {plan.split for plan in plans} == {1, 2, 4, 8}
    assert any(plan.raw[0] == Spec(((0,), (1,))) for plan in plans)  # rows and columns of the result
    assert any(plan.raw[0] == Spec(((0,), ()), (1,)) for plan in plans)  # rows, and a sum over the contracted dim


def test_what_is_not_linear_takes_no_partial_sums():
    for function, operands in [(lax.exp, (X,)), (lambda x: x + 1.5, (X,)), (lambda x: lax.convert_element_type(x, jnp.int32), (X,))]:
        rule = rule_of(jax.make_jaxpr(function)(*operands).jaxpr.eqns[0])
        assert rule is not None
        assert following(rule, 0, Spec(((), ()), (0,)), MeshShape(2, 2)) is None
