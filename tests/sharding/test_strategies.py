"""Every rule under every assignment: the local form of the primitive, finished, equals the primitive on whole arrays.

A primitive is covered by a row of `CASES`: a function of one equation and its operands. Every name in `RULES` must have a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh, PartitionSpec

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.apply import reshard
from alpa_hpc.sharding.assignment import EquationPlan, following, own_plans, plan_of, whole_plan
from alpa_hpc.sharding.collectives import AXIS_NAMES, MeshCollectives
from alpa_hpc.sharding.localise import Place, run_local
from alpa_hpc.sharding.spec import Spec, fits, replicated
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
from alpa_hpc.sharding.strategies.registry import RULES, rule_of, whole_rule
from alpa_hpc.sharding.strategies.rule import shape_of

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SHAPES = [(2, 2), (2, 1), (1, 2), (2, 4)]


Dims = tuple[tuple[int, ...], tuple[int, ...]]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 0.9, shape).astype(np.float32)


def ints(*shape: int, low: int = 0, high: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def bools(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2, shape).astype(bool)


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


def equation_of(one: Case) -> JaxprEqn:
    jaxpr = jax.make_jaxpr(one.function)(*one.operands).jaxpr
    (eqn,) = jaxpr.eqns
    assert eqn.primitive.name == one.primitive
    return eqn


def operand_values(eqn: JaxprEqn, one: Case) -> list[np.ndarray]:
    given = dict(zip(jax.make_jaxpr(one.function)(*one.operands).jaxpr.invars, one.operands, strict=True))
    positions = iter(given.values())
    return [np.asarray(atom.val) if isinstance(atom, Literal) else next(positions) for atom in eqn.invars]


def plans_of(eqn: JaxprEqn, mesh: MeshShape) -> list[EquationPlan]:
    """All assignments, and for linear operators the same with operands that are sums over the axes left free."""
    rule = rule_of(eqn)
    if rule is None:
        return list(whole_plan(whole_rule(eqn), mesh).plans)
    plans = list(own_plans(rule, mesh).plans)
    if rule.linear and jnp.issubdtype(aval_of(eqn.invars[0]).dtype, jnp.floating):
        plans += [plan_of(rule, (-1, -1), mesh, partial) for partial in ((0,), (1,), (0, 1))]
        plans += [plan_of(rule, (factor, -1), mesh, (1,)) for factor in range(len(rule.sizes)) if rule.sizes[factor] % mesh.rows == 0]
    return plans


def brought(x: jax.Array, spec: Spec, place: Place) -> jax.Array:
    """This device's tile of a whole operand; where the spec is partial, different shares of it that add up to it."""
    for axis in spec.partial:
        size = place.shape.sizes[axis]
        share = jnp.where(place.collectives.index(axis) == size - 1, 1.5 - 0.5 * size, 0.5)
        x = x * share.astype(x.dtype)
    return reshard(x, replicated(x.ndim), Spec(spec.dims), place)


def unfinished(eqn: JaxprEqn, plan: EquationPlan, operands: tuple[jax.Array, ...], place: Place) -> list[jax.Array]:
    """Run the plan; results that are partial sums get a dim of size 1 in front for each axis of the sum."""
    tiles = [brought(x, spec, place) for x, spec in zip(operands, plan.operands, strict=True)]
    results: list[jax.Array] = []
    for raw, made, var in zip(plan.raw, run_local(eqn, plan, tiles, place), eqn.outvars, strict=True):
        assert made.shape == raw.local_shape(shape_of(var), place.shape), (plan, made.shape)
        value = made
        for axis, combine in plan.combined:
            value = place.collectives.all_reduce(value, axis, combine)
        results.append(value.reshape((1,) * len(raw.partial) + value.shape))
    return results


def out_spec(raw: Spec) -> PartitionSpec:
    split = [tuple(AXIS_NAMES[axis] for axis in dim) or None for dim in raw.dims]
    return PartitionSpec(*(AXIS_NAMES[axis] for axis in raw.partial), *split)


def names() -> list[str]:
    return [f"{number}-{one.primitive}" for number, one in enumerate(CASES)]


@pytest.mark.parametrize("one", CASES, ids=names())
def test_every_assignment_gives_the_whole_result(one: Case) -> None:
    eqn = equation_of(one)
    operands = operand_values(eqn, one)
    params = eqn.primitive.get_bind_params(eqn.params)
    expected = eqn.primitive.bind(*operands, **params)
    expected = expected if eqn.primitive.multiple_results else [expected]
    for rows, cols in SHAPES if one.primitive not in ELEMENTWISE else SHAPES[:1]:
        shape = MeshShape(rows, cols)
        plans = plans_of(eqn, shape)
        assert all(fits(s, shape_of(a), shape) for plan in plans for s, a in zip(plan.operands, eqn.invars, strict=True))
        place = Place(shape, MeshCollectives())
        mesh = Mesh(np.array(jax.devices()[: rows * cols]).reshape(rows, cols), AXIS_NAMES)

        def run(*values: jax.Array, plans: list[EquationPlan] = plans, place: Place = place) -> list[list[jax.Array]]:
            return [unfinished(eqn, plan, values, place) for plan in plans]

        out_specs = [[out_spec(raw) for raw in plan.raw] for plan in plans]
        mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=out_specs, check_vma=False)
        results = jax.jit(mapped, compiler_options=QUICK)(*operands)
        for plan, found in zip(plans, results, strict=True):
            for raw, a, b in zip(plan.raw, found, expected, strict=True):
                total = np.asarray(a, np.float64).sum(tuple(range(len(raw.partial))))
                tolerance = 2e-2 if a.dtype == jnp.bfloat16 else 1e-5
                np.testing.assert_allclose(total, np.asarray(b, np.float64), rtol=tolerance, atol=1e-6, err_msg=f"{shape} {plan}")


def test_every_rule_has_a_case():
    covered = {one.primitive for one in CASES}
    assert set(RULES) - ELEMENTWISE <= covered
    assert len(covered & ELEMENTWISE) >= 25


def test_unknown_primitives_run_whole():
    eqn = jax.make_jaxpr(lax.sort)(X).jaxpr.eqns[0]
    assert rule_of(eqn) is None
    table = whole_plan(whole_rule(eqn), MeshShape(2, 4))
    assert table.plans[0].split == 1
    assert table.operands == ((replicated(2),),)


def test_matrix_products_have_two_dimensional_strategies():
    eqn = equation_of(case("dot_general", dot(((1,), (0,))), floats(8, 16), floats(16, 8)))
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
