"""Gather and the scatters where the table's rows are split: each device answers for its own rows (see `strategies/indexing.py`)."""

from collections.abc import Mapping, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.place import Place, bind
from alpa_hpc.sharding.strategies.indexing import index_map, looked_up_dims, window_sizes
from alpa_hpc.sharding.strategies.rule import shape_of

_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}  # what holds for all rows does not for those of one device


def gather(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """What this device's rows give; zeros for rows of other devices."""
    table, indices = operands
    whole, rows = shape_of(eqn.invars[0]), _split_rows(eqn, plan)
    sizes = tuple(
        local if cut == size and d not in rows else cut
        for d, (cut, size, local) in enumerate(zip(eqn.params["slice_sizes"], whole, table.shape, strict=True))
    )
    if not rows:
        return bind(eqn, operands, {"slice_sizes": sizes})
    fills = eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    indices = _wide(indices)
    outside = _outside(eqn, indices) if fills else None
    mine, inside = _own_rows(_clamped(eqn, indices), rows, plan, table, place)
    (found,) = bind(eqn, (table, mine), {"slice_sizes": sizes, "mode": lax.GatherScatterMode.CLIP, **_UNORDERED})
    positions = tuple(d for d in range(found.ndim) if d not in eqn.params["dimension_numbers"].offset_dims)

    def spread(mask: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(mask, found.shape, positions)

    value = jnp.where(spread(inside), found, jnp.zeros((), found.dtype))
    if outside is None:
        return [value]
    axes = tuple(axis for d in rows for axis in plan.operands[0].dims[d])  # a row that nobody holds is filled by the first device
    fill = jnp.where(place.first(axes), _fill_value(eqn, found.dtype), jnp.zeros((), found.dtype))
    return [jnp.where(spread(outside), fill, value)]


def scatter(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Write what falls into this device's rows; the table itself counts once where updates are summed over devices."""
    table, indices, updates = operands
    changes: dict[str, object] = {}
    rows = _split_rows(eqn, plan)
    if rows:
        indices = _wide(indices)
        clips = eqn.params["mode"] is lax.GatherScatterMode.CLIP
        mine, inside = _own_rows(_clamped(eqn, indices) if clips else indices, rows, plan, table, place)
        mine = _signed(mine)
        indices = jnp.where(inside[..., None], mine, jnp.iinfo(mine.dtype).max)
        changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, **_UNORDERED}
        # XLA makes slices of a single update, and merges them with a slice that made the table as if its row were inside.
        table = lax.optimization_barrier(table)
    return bind(eqn, (place.once(table, plan.raw[0].partial), indices, updates), changes)


def _split_rows(eqn: JaxprEqn, plan: EquationPlan) -> Mapping[int, int]:
    """Looked-up dims of the table that the plan splits -> their component of the index."""
    return {d: component for d, component in looked_up_dims(eqn).items() if plan.operands[0].dims[d]}


def _own_rows(
    indices: jax.Array, rows: Mapping[int, int], plan: EquationPlan, table: jax.Array, place: Place
) -> tuple[jax.Array, jax.Array]:
    """Indices into this device's tile, those of other rows brought inside; which of them are its own."""
    components = [indices[..., i] for i in range(indices.shape[-1])]
    own: list[jax.Array] = []
    for d, component in rows.items():
        first = (place.tile(plan.operands[0].dims[d]) * table.shape[d]).astype(indices.dtype)
        shifted = components[component] - first
        own.append((shifted >= 0) & (shifted < table.shape[d]))
        components[component] = jnp.clip(shifted, 0, table.shape[d] - 1)
    return jnp.stack(components, -1), reduce(jnp.logical_and, own)


def _wide(indices: jax.Array) -> jax.Array:
    """Indices in a type that holds every row number of a table."""
    return indices if indices.dtype.itemsize >= jnp.dtype(jnp.int32).itemsize else indices.astype(jnp.int32)


def _last_starts(eqn: JaxprEqn, dtype: jnp.dtype) -> jax.Array:
    """The greatest index of each component whose window lies in the whole table."""
    table, sizes = shape_of(eqn.invars[0]), window_sizes(eqn)
    return jnp.asarray([table[d] - sizes[d] for d in index_map(eqn)], dtype)


def _outside(eqn: JaxprEqn, indices: jax.Array) -> jax.Array:
    return jnp.any((indices < 0) | (indices > _last_starts(eqn, indices.dtype)), -1)


def _clamped(eqn: JaxprEqn, indices: jax.Array) -> jax.Array:
    """The nearest indices whose windows lie in the whole table: what lookups outside of it mean unless they are filled."""
    return _signed(jnp.clip(indices, 0, _last_starts(eqn, indices.dtype)))


def _signed(indices: jax.Array) -> jax.Array:
    """Numbers too great for a signed type turn negative: no row has them either way."""
    return indices.astype(jnp.int64 if indices.dtype.itemsize > jnp.dtype(jnp.int32).itemsize else jnp.int32)


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
