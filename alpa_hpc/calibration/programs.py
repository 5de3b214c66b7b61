"""A trial -> the program of one device that is timed for it, and what it works on.

A collective runs several times in a row inside one program, as in tasks: what it takes to start a program is no part of it. Each run needs
what the one before gave, and a loop keeps them apart, so that the compiler neither joins nor drops any. A device's own work runs once, and
its results are new arrays, as those of tasks are: on CPUs it takes long to be given memory. The fit sets the start of a program apart.
"""

from collections.abc import Callable, Mapping
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from alpa_hpc.calibration.trials import CollectiveTrial, Pass, PassTrial, Precision, ProductTrial
from alpa_hpc.sharding.collectives import AbstractCollectives
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.strategies.rule import Combine

RUNS = 8  # of a collective in one program
SEQUENCE = 32  # rows of a product come in sequences of so many, as tokens do

Arrays = tuple[jax.Array, ...]
Device = Callable[..., Arrays]  # one device's part of a program


def repeated(function: Device) -> Device:
    """`RUNS` of a function that gives back arrays like those that it takes, one after the other."""

    def run(*arrays: jax.Array) -> Arrays:
        return lax.fori_loop(0, RUNS, lambda _, carried: function(*carried), arrays)

    return run


def collective_program(trial: CollectiveTrial, collectives: AbstractCollectives) -> Device:
    """One collective of the tile that `collective_tile` says."""
    size, axis, dim = trial.shape.sizes[trial.axis], trial.axis, trial.dim

    def run(x: jax.Array) -> Arrays:
        match trial.kind:
            case CollectiveKind.ALL_REDUCE:
                # Half of it stays this device's own: the sum of what is equal everywhere would be compiled to a product.
                return (0.5 * x + (0.5 / size) * collectives.all_reduce(x, (axis,), Combine.SUM),)
            case CollectiveKind.ALL_GATHER:
                whole, width = collectives.all_gather(x, axis, dim), x.shape[dim]
                return (lax.dynamic_slice_in_dim(whole, (collectives.index(axis) + 1) % size * width, width, dim),)
            case CollectiveKind.REDUCE_SCATTER:
                return (lax.dynamic_update_slice_in_dim(x, collectives.reduce_scatter(x, axis, dim) / size, 0, dim),)
            case CollectiveKind.ALL_TO_ALL:
                return (collectives.all_to_all(x, axis, dim, 1 - dim).reshape(x.shape),)
            case other:
                raise AssertionError(f"{other} is not calibrated")

    return run


def collective_tile(trial: CollectiveTrial) -> tuple[int, int]:
    """The shape of what each device holds before the collective."""
    rows, columns = trial.matrix
    match trial.kind:
        case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE_SCATTER:
            return rows, columns
        case CollectiveKind.ALL_GATHER | CollectiveKind.ALL_TO_ALL:
            size = trial.shape.sizes[trial.axis]
            return (rows // size, columns) if trial.dim == 0 else (rows, columns // size)
        case other:
            raise AssertionError(f"{other} is not calibrated")


def work_program(trial: ProductTrial | PassTrial) -> Device:
    """A device's own work."""
    match trial:
        case ProductTrial():
            return _products
        case PassTrial(kind=kind):
            return _PASSES[kind]
        case _:
            assert_never(trial)


def work_arguments(trial: ProductTrial | PassTrial) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of what it works on."""
    match trial:
        case ProductTrial(precision, rows, width):
            dtype = jnp.float32 if precision is Precision.BITS_32 else jnp.bfloat16
            vectors = jax.ShapeDtypeStruct((rows // SEQUENCE, SEQUENCE, width), dtype)
            return vectors, jax.ShapeDtypeStruct((width, width), dtype), vectors
        case PassTrial(kind, rows, width):
            return (jax.ShapeDtypeStruct((rows, width), jnp.float32),) * _NUM_ARRAYS[kind]
        case _:
            assert_never(trial)


def _products(x: jax.Array, weight: jax.Array, cotangent: jax.Array) -> Arrays:
    """A linear layer as it is differentiated: compilers take another kernel for the gradient of a weight than for x.T @ y alone."""
    y, backward = jax.vjp(lambda x, weight: x @ weight, x, weight)
    return (y, *backward(cotangent))


def _both_ways(function: Callable[[jax.Array], jax.Array]) -> Device:
    """A function of one array, and what backward makes of a cotangent of its result."""

    def run(x: jax.Array, cotangent: jax.Array) -> Arrays:
        y, backward = jax.vjp(function, x)
        return (y, *backward(cotangent))

    return run


def _add(x: jax.Array, y: jax.Array) -> Arrays:
    return (x + y,)


def _normalise(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def _softmax(x: jax.Array) -> jax.Array:
    exponentials = jnp.exp(x - lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def _adam(weight: jax.Array, first: jax.Array, second: jax.Array, gradient: jax.Array) -> Arrays:
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient * gradient
    return (weight - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second)


_PASSES: Mapping[Pass, Device] = {
    Pass.ADD: _add,
    Pass.GELU: _both_ways(jax.nn.gelu),
    Pass.NORMALISE: _both_ways(_normalise),
    Pass.SOFTMAX: _both_ways(_softmax),
    Pass.ADAM: _adam,
}
_NUM_ARRAYS: Mapping[Pass, int] = {Pass.ADD: 2, Pass.GELU: 2, Pass.NORMALISE: 2, Pass.SOFTMAX: 2, Pass.ADAM: 4}
