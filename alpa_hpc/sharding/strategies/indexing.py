"""Lookups in a table (gather) and what they write back (the scatters): embeddings, routing, cross-entropy.

The table has four kinds of dims: *batching* dims go along with a dim of the indices; *window* dims that are taken whole are loops of their
own; *looked-up* dims are addressed with single rows, so each device can answer for the rows that it has; the others stay whole.
"""

from collections.abc import Callable

from jax import lax
from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.strategies.rule import Combine, OpRule, RuleDraft, shape_of


def gather_rule(eqn: JaxprEqn) -> OpRule:
    """Factors: index positions, whole window dims, and looked-up dims of the table, whose pieces sum (others contribute zero)."""
    numbers, cuts = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    positions = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    draft = RuleDraft.of(eqn)
    for index_dim, position in enumerate(positions):
        table_dim = {0: batching[index_dim]} if index_dim in batching else {}
        draft.factor(shape[position], {**table_dim, 1: index_dim}, {0: position})
    for d, offset in window_dims(len(table), (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), numbers.offset_dims):
        if cuts[d] == table[d]:
            draft.factor(table[d], {0: d}, {0: offset})
    if hasattr(aval_of(eqn.invars[0]).dtype, "itemsize"):  # keys of random numbers cannot be added up
        for d in looked_up_dims(eqn):
            draft.factor(table[d], {0: d}, combine=Combine.SUM)
    return draft.rule()


def scatter_rule(combine: Combine | None) -> Callable[[JaxprEqn], OpRule]:
    """Factors: batching dims, whole window dims, looked-up dims of the table (each device writes its own rows), and update positions.

    The latter where what several devices wrote into the same table can be put together: by `combine`, None for overwriting.
    """

    def rule(eqn: JaxprEqn) -> OpRule:
        numbers = eqn.params["dimension_numbers"]
        table, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
        positions = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
        batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        draft = RuleDraft.of(eqn)
        for index_dim, position in enumerate(positions):
            if index_dim in batching:
                dim = batching[index_dim]
                draft.factor(table[dim], {0: dim, 1: index_dim, 2: position}, {0: dim})
            elif combine is not None:
                draft.factor(updates[position], {1: index_dim, 2: position}, combine=combine)
        for d, u in window_dims(len(table), (*numbers.inserted_window_dims, *numbers.operand_batching_dims), numbers.update_window_dims):
            if updates[u] == table[d]:
                draft.factor(table[d], {0: d, 2: u}, {0: d})
        for d in looked_up_dims(eqn):
            draft.factor(table[d], {0: d}, {0: d})
        return draft.rule()

    return rule


def window_dims(rank: int, without: tuple[int, ...], offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    """(dim of the table, dim of the result or update) of each window dim."""
    return list(zip([d for d in range(rank) if d not in without], offsets, strict=True))


def looked_up_dims(eqn: JaxprEqn) -> dict[int, int]:
    """Dims of the table from which the indices of a gather or scatter take single rows -> which component of the index says the row."""
    if eqn.params["mode"] is lax.GatherScatterMode.ONE_HOT:
        return {}
    table, cuts = shape_of(eqn.invars[0]), window_sizes(eqn)
    return {d: component for component, d in enumerate(index_map(eqn)) if cuts[d] == 1 < table[d]}


def index_map(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dim of the table that each component of an index addresses."""
    numbers = eqn.params["dimension_numbers"]
    return tuple(numbers.start_index_map if eqn.primitive is lax.gather_p else numbers.scatter_dims_to_operand_dims)


def window_sizes(eqn: JaxprEqn) -> tuple[int, ...]:
    """How much of each dim of the table one index takes."""
    if eqn.primitive is lax.gather_p:
        return tuple(eqn.params["slice_sizes"])
    numbers, updates = eqn.params["dimension_numbers"], shape_of(eqn.invars[2])
    rank = len(shape_of(eqn.invars[0]))
    window = window_dims(rank, (*numbers.inserted_window_dims, *numbers.operand_batching_dims), numbers.update_window_dims)
    sizes = [1] * rank
    for d, u in window:
        sizes[d] = updates[u]
    return tuple(sizes)
