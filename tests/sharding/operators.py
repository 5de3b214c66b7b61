"""One equation, split in many ways and run on tiles by every device of a mesh, against the equation on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh, PartitionSpec

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.apply import reshard
from alpa_hpc.sharding.assignment import EquationPlan, own_plans, plan_of, whole_plan
from alpa_hpc.sharding.collectives import AXIS_NAMES, MeshCollectives
from alpa_hpc.sharding.localise import run_local
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.spec import Spec, fits, replicated
from alpa_hpc.sharding.strategies.registry import rule_of, whole_rule
from alpa_hpc.sharding.strategies.rule import shape_of


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 0.9, shape).astype(np.float32)


def ints(*shape: int, low: int = 0, high: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def bools(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2, shape).astype(bool)


@dataclass(frozen=True, eq=False)
class Trial:
    """An equation, values of its operands, and ways to split it."""

    eqn: JaxprEqn
    operands: Sequence[np.ndarray | jax.Array]
    plans: Sequence[EquationPlan]


def only_equation(function: Callable[..., object], *operands: np.ndarray | jax.Array) -> tuple[JaxprEqn, list[np.ndarray | jax.Array]]:
    """The one equation of `function(*operands)`, and what it reads."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    (eqn,) = jaxpr.eqns
    given = dict(zip(jaxpr.invars, operands, strict=True))
    return eqn, [np.asarray(atom.val) if isinstance(atom, Literal) else given[atom] for atom in eqn.invars]


def all_plans(eqn: JaxprEqn, mesh: MeshShape) -> list[EquationPlan]:
    """All assignments, and for linear operators the same with operands that are sums over the axes left free."""
    rule = rule_of(eqn)
    if rule is None:
        return list(whole_plan(whole_rule(eqn), mesh).plans)
    plans = list(own_plans(rule, mesh).plans)
    if rule.linear and jnp.issubdtype(aval_of(eqn.invars[0]).dtype, jnp.floating):
        plans += [plan_of(rule, (-1, -1), mesh, partial) for partial in ((0,), (1,), (0, 1))]
        plans += [plan_of(rule, (factor, -1), mesh, (1,)) for factor in range(len(rule.sizes)) if rule.sizes[factor] % mesh.rows == 0]
    return plans


def check(trials: Sequence[Trial], shape: MeshShape) -> None:
    """Every plan of every trial, run on the devices of a mesh of `shape` and put together, gives what the equation gives on one device."""
    for trial in trials:
        for plan in trial.plans:
            assert all(fits(s, shape_of(a), shape) for s, a in zip(plan.operands, trial.eqn.invars, strict=True))
    for trial, results in zip(trials, _run(trials, shape), strict=True):
        expected = _on_one_device(trial)
        for plan, found in zip(trial.plans, results, strict=True):
            for raw, a, b in zip(plan.raw, found, expected, strict=True):
                _assert_same(np.asarray(_numbers(a)), np.asarray(_numbers(b)), len(raw.partial), f"{shape} {plan} {trial.eqn}")


def _assert_same(found: np.ndarray, expected: np.ndarray, num_sums: int, message: str) -> None:
    if found.dtype == bool or np.issubdtype(found.dtype, np.integer):
        total = found.sum(tuple(range(num_sums)), dtype=found.dtype) if num_sums else found
        np.testing.assert_array_equal(total, expected, err_msg=message)
        return
    wide = np.complex128 if np.iscomplexobj(found) else np.float64
    total = found.astype(wide).sum(tuple(range(num_sums)))
    tolerance = 1e-5 if found.dtype.itemsize >= np.dtype(np.float32).itemsize else 2e-2
    np.testing.assert_allclose(total, expected.astype(wide), rtol=tolerance, atol=1e-6, err_msg=message)


def _on_one_device(trial: Trial) -> Sequence[jax.Array]:
    params = trial.eqn.primitive.get_bind_params(trial.eqn.params)
    results = trial.eqn.primitive.bind(*trial.operands, **params)
    return results if trial.eqn.primitive.multiple_results else [results]


def _numbers(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _run(trials: Sequence[Trial], shape: MeshShape) -> list[list[list[jax.Array]]]:
    place = Place(shape, MeshCollectives())
    mesh = Mesh(np.array(jax.devices()[: shape.num_devices]).reshape(shape.rows, shape.cols), AXIS_NAMES)

    def run(values: Sequence[Sequence[jax.Array]]) -> list[list[list[jax.Array]]]:
        return [[_unfinished(trial.eqn, plan, mine, place) for plan in trial.plans] for trial, mine in zip(trials, values, strict=True)]

    out_specs = [[[_out_spec(raw) for raw in plan.raw] for plan in trial.plans] for trial in trials]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)([list(trial.operands) for trial in trials])


def _unfinished(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> list[jax.Array]:
    """Run the plan; results that are partial sums get a dim of size 1 in front for each axis of the sum."""
    tiles = [_brought(x, spec, place) for x, spec in zip(operands, plan.operands, strict=True)]
    results: list[jax.Array] = []
    for raw, made, var in zip(plan.raw, run_local(eqn, plan, tiles, place), eqn.outvars, strict=True):
        assert made.shape == raw.local_shape(shape_of(var), place.shape), (plan, made.shape)
        assert made.dtype == aval_of(var).dtype, (plan, made.dtype)
        value = made
        for axis, combine in plan.combined:
            value = place.collectives.all_reduce(value, (axis,), combine)
        results.append(value.reshape((1,) * len(raw.partial) + value.shape))
    return results


def _brought(x: jax.Array, spec: Spec, place: Place) -> jax.Array:
    """This device's tile of a whole operand; where the spec is partial, different shares of it that add up to it."""
    for axis in spec.partial:
        size = place.shape.sizes[axis]
        share = jnp.where(place.collectives.index(axis) == size - 1, 1.5 - 0.5 * size, 0.5)
        x = x * share.astype(x.dtype)
    return reshard(x, replicated(x.ndim), Spec(spec.dims), place)


def _out_spec(raw: Spec) -> PartitionSpec:
    split = [tuple(AXIS_NAMES[axis] for axis in dim) or None for dim in raw.dims]
    return PartitionSpec(*(AXIS_NAMES[axis] for axis in raw.partial), *split)
