"""One equation on one device: the same primitive with the shapes of this device's tiles.

Most primitives take their shapes from their operands; those that carry shapes in their parameters, or that must know where the tile
lies, have an entry in `LOCAL`. Sums over split factors are left partial (paper, section 4.1); `apply.py` finishes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.collectives import AbstractCollectives
from alpa_hpc.sharding.strategies.indexing import single_lookup_dim
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


LocalRun = Callable[[JaxprEqn, EquationPlan, Sequence[jax.Array], Place], Sequence[jax.Array]]


def run_local(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Results of the equation on this device's tiles, sums over split factors still partial."""
    run = LOCAL.get(eqn.primitive.name)
    if run is not None:
        return run(eqn, plan, operands, place)
    return bind(eqn, operands, {})


def bind(eqn: JaxprEqn, operands: Sequence[jax.Array], changes: dict[str, object]) -> Sequence[jax.Array]:
    """Apply the equation's primitive with some of its parameters replaced."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    results = eqn.primitive.bind(*operands, **params)
    return results if eqn.primitive.multiple_results else [results]


def _result_shape(eqn: JaxprEqn, plan: EquationPlan, place: Place) -> tuple[int, ...]:
    return plan.raw[0].local_shape(shape_of(eqn.outvars[0]), place.shape)


def _broadcast(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    return bind(eqn, operands, {"shape": _result_shape(eqn, plan, place)})


def _reshape(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    return bind(eqn, operands, {"new_sizes": _result_shape(eqn, plan, place)})


def _slice(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    del place
    whole = shape_of(eqn.invars[0])
    limits = tuple(
        local if limit == size and split else limit
        for limit, size, local, split in zip(eqn.params["limit_indices"], whole, operands[0].shape, plan.operands[0].dims, strict=True)
    )
    return bind(eqn, operands, {"limit_indices": limits})


def _dynamic_slice(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    return bind(eqn, operands, {"slice_sizes": _result_shape(eqn, plan, place)})


def _gather(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    table, indices = operands
    numbers = eqn.params["dimension_numbers"]
    whole = shape_of(eqn.invars[0])
    sizes = tuple(local if cut == size else cut for cut, size, local in zip(eqn.params["slice_sizes"], whole, table.shape, strict=True))
    looked_up = single_lookup_dim(numbers.start_index_map, numbers.collapsed_slice_dims)
    axes = plan.operands[0].dims[looked_up] if looked_up is not None else ()
    if not axes:
        return bind(eqn, operands, {"slice_sizes": _kept_cuts(eqn, sizes, looked_up)})
    assert looked_up is not None, "a split lookup dim exists"
    rows = table.shape[looked_up]
    indices = _clamped(eqn, indices, whole[looked_up])
    mine = indices - (place.tile(axes) * rows).astype(indices.dtype)
    inside = ((mine >= 0) & (mine < rows))[..., 0]
    (found,) = bind(eqn, (table, jnp.clip(mine, 0, rows - 1)), {"slice_sizes": _kept_cuts(eqn, sizes, looked_up)})
    positions = tuple(d for d in range(found.ndim) if d not in numbers.offset_dims)
    other = jnp.zeros((), found.dtype)
    if eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:  # a row that nobody holds is filled by the first device
        outside = ((indices < 0) | (indices >= whole[looked_up]))[..., 0]
        fill = lax.broadcast_in_dim(outside & place.first(axes), found.shape, positions)
        other = jnp.where(fill, _fill_value(eqn, found.dtype), other)
    return [jnp.where(lax.broadcast_in_dim(inside, found.shape, positions), found, other)]


def _clamped(eqn: JaxprEqn, indices: jax.Array, num_rows: int) -> jax.Array:
    """Row numbers of the whole table as the primitive reads them: those outside count as the nearest row in mode CLIP."""
    return jnp.clip(indices, 0, num_rows - 1) if eqn.params["mode"] == lax.GatherScatterMode.CLIP else indices


def _fill_value(eqn: JaxprEqn, dtype: jnp.dtype) -> jax.Array:
    """What a gather gives for rows outside the table: its `fill_value`, else NaN, the least signed or the greatest unsigned number."""
    chosen = eqn.params["fill_value"]
    if chosen is not None:
        return jnp.asarray(chosen, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.ones((), dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max, dtype)


def _kept_cuts(eqn: JaxprEqn, sizes: tuple[int, ...], looked_up: int | None) -> tuple[int, ...]:
    """The looked-up dim is cut to single rows even where the table has one row."""
    cuts = eqn.params["slice_sizes"]
    return tuple(cuts[d] if d == looked_up else size for d, size in enumerate(sizes))


def _scatter_add(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    table, indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    looked_up = single_lookup_dim(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)
    axes = plan.operands[0].dims[looked_up] if looked_up is not None else ()
    changes: dict[str, object] = {}
    if axes:
        assert looked_up is not None, "a split lookup dim exists"
        indices = _clamped(eqn, indices, shape_of(eqn.invars[0])[looked_up])
        indices = indices - (place.tile(axes) * table.shape[looked_up]).astype(indices.dtype)
        indices = jnp.where(indices < 0, jnp.iinfo(indices.dtype).max, indices)  # rows of other devices are dropped
        changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False, "unique_indices": False}
    if plan.raw[0].partial:  # the table itself counts once in the sum
        table = jnp.where(place.first(plan.raw[0].partial), table, jnp.zeros((), table.dtype))
    return bind(eqn, (table, indices, updates), changes)


LOCAL: dict[str, LocalRun] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "scatter-add": _scatter_add,
}
