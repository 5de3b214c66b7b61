"""Random bits of a tile: exactly those that the whole array has there, drawn from its own element numbers (see `strategies/random.py`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.place import Place, bind, local_result
from alpa_hpc.sharding.spec import Spec


def random_bits(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Counter-based bits (threefry, partitionable): the bits of an element depend on the key and on its number in the array alone."""
    (keys,) = operands
    shape = tuple(eqn.params["shape"])
    spec = Spec(plan.raw[0].dims[keys.ndim :])
    if not any(spec.dims):
        return bind(eqn, operands, {})
    low = _numbers(shape, spec, place)
    data = jax.random.key_data(keys)
    first, second = (lax.broadcast_in_dim(data[..., i], local_result(eqn, plan, place), range(keys.ndim)) for i in range(2))
    counts = jnp.broadcast_to(low, first.shape)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(counts), counts)
    return [_joined(high, low, eqn.params["bit_width"])]


def _numbers(shape: tuple[int, ...], spec: Spec, place: Place) -> jax.Array:
    """The number of each element of the tile in the whole array, in row-major order."""
    local = spec.local_shape(shape, place.shape)
    number = jnp.zeros(local, jnp.uint32)
    for d, size in enumerate(shape):
        first = (place.tile(spec.dims[d]) * local[d]).astype(jnp.uint32)
        number = number * jnp.uint32(size) + first + lax.broadcasted_iota(jnp.uint32, local, d)
    return number


def _joined(high: jax.Array, low: jax.Array, bit_width: int) -> jax.Array:
    """Two words to one number, as jax does it."""
    dtype = jnp.dtype(f"uint{bit_width}")
    words = 2 * jnp.iinfo(high.dtype).bits
    if bit_width == words:
        return (high.astype(dtype) << jnp.asarray(words // 2, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)
