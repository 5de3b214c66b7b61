"""Primitives whose parameters hold the shape or the place of the result: the same with this device's."""

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.assignment import EquationPlan
from alpa_hpc.sharding.place import Place, bind, local_result
from alpa_hpc.sharding.spec import split_of
from alpa_hpc.sharding.strategies.rule import shape_of


def broadcast(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Widen to the tile's shape."""
    return bind(eqn, operands, {"shape": local_result(eqn, plan, place)})


def reshape(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Regroup to the tile's shape."""
    return bind(eqn, operands, {"new_sizes": local_result(eqn, plan, place)})


def cut(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """`slice`: a split dim is taken whole, up to the end of the tile."""
    del place
    whole = shape_of(eqn.invars[0])
    limits = tuple(
        local if limit == size and split else limit
        for limit, size, local, split in zip(eqn.params["limit_indices"], whole, operands[0].shape, plan.operands[0].dims, strict=True)
    )
    return bind(eqn, operands, {"limit_indices": limits})


def dynamic_slice(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """A split dim is taken whole: as much as the tile has."""
    return bind(eqn, operands, {"slice_sizes": local_result(eqn, plan, place)})


def iota(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Counts from where the tile begins."""
    dim, shape = eqn.params["dimension"], local_result(eqn, plan, place)
    (counts,) = bind(eqn, operands, {"shape": shape})
    axes = plan.raw[0].dims[dim]
    return [counts + (place.tile(axes) * shape[dim]).astype(counts.dtype)] if axes else [counts]


def convolution(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """A device has its share of the groups."""
    batch, channel, *_ = eqn.params["dimension_numbers"].lhs_spec
    changes: dict[str, object] = {}
    for name, dim in (("feature_group_count", channel), ("batch_group_count", batch)):
        if eqn.params[name] > 1:
            changes[name] = eqn.params[name] // split_of(plan.operands[0].dims[dim], place.shape)
    return bind(eqn, operands, changes)


def pooling(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """One window over all of a split dim is one over all of the tile."""
    del place
    columns = zip(eqn.params["window_dimensions"], operands[0].shape, shape_of(eqn.outvars[0]), plan.operands[0].dims, strict=True)
    return bind(eqn, operands, {"window_dimensions": tuple(tile if count == 1 and axes else size for size, tile, count, axes in columns)})


def transform(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """An FFT of rows that lie in the order of their dims: XLA's on CPUs fails on others, and does not say so where layouts are chosen."""
    del plan, place
    (x,) = operands
    order = Layout(tuple(range(x.ndim)))
    (made,) = bind(eqn, [with_layout_constraint(x, order)], {})
    return [with_layout_constraint(made, order)]


def identity(eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """What means something to the compiler or to the user's own mesh alone."""
    del eqn, plan, place
    return list(operands)
