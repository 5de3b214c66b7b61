"""The collectives of a device, and their stand-ins that keep shapes and memory traffic but talk to nobody.

Programs are written against `AbstractCollectives`: training runs them inside `shard_map` with `MeshCollectives`; profiling a device's own
work runs the same program with `LoneCollectives` on one device (DESIGN 7.12).
"""

from typing import Final, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.strategies.rule import Combine

AXIS_NAMES: Final = ("x", "y")  # of every mesh: axis 0 (rows), axis 1 (cols)


class AbstractCollectives(Protocol):
    """What one device asks of the others along a mesh axis."""

    def index(self, axis: int) -> jax.Array:
        """This device's place on the axis, int32 scalar."""
        ...

    def all_reduce(self, x: jax.Array, axes: tuple[int, ...], combine: Combine) -> jax.Array:
        """Combine the values of all devices along `axes` element by element; everyone gets all."""
        ...

    def reduce_scatter(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """Sum the axis's values; each device keeps its piece of `dim`."""
        ...

    def all_gather(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """Join the axis's pieces along `dim`."""
        ...

    def all_to_all(self, x: jax.Array, axis: int, source: int, target: int) -> jax.Array:
        """Join along `source`, split along `target`."""
        ...


class MeshCollectives:
    """The real ones, inside a `shard_map` over axes "x" and "y".

    Pieces are joined and split as a first dim of their own. XLA would do so along any dim, by another layout of the array, which spreads
    into what is computed around it: an update then runs on transposed copies (GPU), the collective takes two to three times as long (CPU).
    """

    def index(self, axis: int) -> jax.Array:
        """See AbstractCollectives."""
        return lax.axis_index(AXIS_NAMES[axis])

    def all_reduce(self, x: jax.Array, axes: tuple[int, ...], combine: Combine) -> jax.Array:
        """See AbstractCollectives."""
        if x.dtype == jnp.bool_:
            return self.all_reduce(x.astype(jnp.uint8), axes, combine).astype(jnp.bool_)  # as wide as a bool, and known to NCCL and gloo
        names = tuple(AXIS_NAMES[axis] for axis in axes)
        match combine:
            case Combine.SUM:
                return lax.psum(x, names)
            case Combine.MAX:
                return lax.pmax(x, names)
            case Combine.MIN:
                return lax.pmin(x, names)

    def reduce_scatter(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """See AbstractCollectives."""
        name = AXIS_NAMES[axis]
        pieces = x.reshape(*x.shape[:dim], lax.axis_size(name), -1, *x.shape[dim + 1 :])
        return lax.psum_scatter(jnp.moveaxis(pieces, dim, 0), name, scatter_dimension=0, tiled=False)

    def all_gather(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """See AbstractCollectives."""
        pieces = jnp.moveaxis(lax.all_gather(x, AXIS_NAMES[axis], axis=0, tiled=False), 0, dim)
        return pieces.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def all_to_all(self, x: jax.Array, axis: int, source: int, target: int) -> jax.Array:
        """See AbstractCollectives."""
        return lax.all_to_all(x, AXIS_NAMES[axis], split_axis=target, concat_axis=source, tiled=True)


class GlooCollectives(MeshCollectives):
    """The real ones between CPU processes, without gloo's reduce-scatter: now and then its last kilobytes are wrong, without any error.

    Seen with jaxlib 0.10.2 where large and small ones take turns (`tests/runtime/test_gloo.py`): about one in a hundred of those of 256 KB,
    from the byte on at which the third TCP segment of a message begins. Its other collectives were right in every one of the same trials.
    """

    def reduce_scatter(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """An all-to-all of the same bytes, and the sum here, in the order of the devices."""
        pieces = jnp.stack(jnp.split(x, lax.axis_size(AXIS_NAMES[axis]), axis=dim))
        return jnp.sum(self.all_to_all(pieces, axis, 0, 0), axis=0, dtype=x.dtype)


def mesh_collectives(mesh: Mesh) -> MeshCollectives:
    """Those that the devices of a mesh have."""
    return GlooCollectives() if mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu" else MeshCollectives()


class LoneCollectives:
    """One device alone plays device (0, 0) of a mesh of `shape`: same local shapes, wrong numbers, right amount of local work."""

    def __init__(self, shape: MeshShape) -> None:
        self._sizes = shape.sizes

    def index(self, axis: int) -> jax.Array:
        """See AbstractCollectives."""
        del axis
        return jnp.zeros((), jnp.int32)

    def all_reduce(self, x: jax.Array, axes: tuple[int, ...], combine: Combine) -> jax.Array:
        """See AbstractCollectives."""
        del axes, combine
        return x

    def reduce_scatter(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """See AbstractCollectives."""
        return lax.slice_in_dim(x, 0, x.shape[dim] // self._sizes[axis], axis=dim)

    def all_gather(self, x: jax.Array, axis: int, dim: int) -> jax.Array:
        """See AbstractCollectives."""
        return jnp.concatenate([x] * self._sizes[axis], axis=dim)

    def all_to_all(self, x: jax.Array, axis: int, source: int, target: int) -> jax.Array:
        """See AbstractCollectives."""
        return self.all_gather(self.reduce_scatter(x, axis, target), axis, source)
