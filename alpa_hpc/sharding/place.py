"""Where a device stands in its mesh, and how it runs an equation's primitive there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.collectives import AbstractCollectives
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.strategies.rule import shape_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device stands: its mesh and the way to the others."""

    shape: MeshShape
    collectives: AbstractCollectives

    def tile(self, axes: tuple[int, ...]) -> jax.Array:
        """Which piece of a dim split by `axes` this device holds."""
        index = jnp.zeros((), jnp.int32)
        for axis in axes:
            index = index * self.shape.sizes[axis] + self.collectives.index(axis)
        return index

    def first(self, axes: tuple[int, ...]) -> jax.Array:
        """Whether this device is the first along all `axes`."""
        return self.tile(axes) == 0

    def once(self, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """`x` as this device's summand of itself over `axes`: the first device has it, the others have zeros."""
        return jnp.where(self.first(axes), x, jnp.zeros((), x.dtype)) if axes else x

    def cut(self, x: jax.Array, spec: Spec) -> jax.Array:
        """This device's tile of an array that it has whole."""
        local = spec.local_shape(x.shape, self.shape)
        if local == x.shape:
            return x
        return jax.lax.dynamic_slice(x, [self.tile(axes) * size for axes, size in zip(spec.dims, local, strict=True)], local)


LocalRun = Callable[[JaxprEqn, EquationPlan, Sequence[jax.Array], Place], Sequence[jax.Array]]


def bind(eqn: JaxprEqn, operands: Sequence[jax.Array], changes: Mapping[str, object]) -> Sequence[jax.Array]:
    """Apply the equation's primitive with some of its parameters replaced; what it says of the user's own mesh is left out."""
    elsewhere = {name: None for name in ("sharding", "out_sharding") if name in eqn.params}
    params = eqn.primitive.get_bind_params({**eqn.params, **elsewhere, **changes})
    results = eqn.primitive.bind(*operands, **params)
    return results if eqn.primitive.multiple_results else [results]


def local_result(eqn: JaxprEqn, plan: EquationPlan, place: Place) -> tuple[int, ...]:
    """Shape of this device's tile of the first result."""
    return plan.raw[0].local_shape(shape_of(eqn.outvars[0]), place.shape)
