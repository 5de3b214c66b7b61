"""Lookups in a table (gather) and their gradient (scatter-add): embeddings."""

from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.strategies.rule import UNSPLIT, Combine, OpRule, shape_of


def gather_rule(eqn: JaxprEqn) -> OpRule | None:
    """Factors: index positions, whole window dims, and the looked-up dim of the table, whose pieces sum (others contribute zero)."""
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims or numbers.start_indices_batching_dims:
        return None
    table, indices, shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), shape_of(eqn.outvars[0])
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    result = list(range(len(shape)))
    index_dims = (*batch_dims, UNSPLIT)
    window = [d for d in range(len(table)) if d not in numbers.collapsed_slice_dims]
    table_dims = [UNSPLIT] * len(table)
    for d, offset in zip(window, numbers.offset_dims, strict=True):
        if eqn.params["slice_sizes"][d] == table[d]:
            table_dims[d] = offset
        else:
            result[offset] = UNSPLIT
    sizes, reduced = list(shape), ()
    looked_up = single_lookup_dim(numbers.start_index_map, numbers.collapsed_slice_dims)
    if looked_up is not None:
        table_dims[looked_up] = len(sizes)
        sizes.append(table[looked_up])
        reduced = ((len(sizes) - 1, Combine.SUM),)
    assert len(index_dims) == len(indices), "gather indices end with the index vector"
    return OpRule(tuple(sizes), (tuple(table_dims), index_dims), (tuple(result),), reduced)


def scatter_add_rule(eqn: JaxprEqn) -> OpRule | None:
    """Factors: update positions (summed into the table), whole window dims, and the table's indexed dim (each device adds its own rows)."""
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims or numbers.scatter_indices_batching_dims:
        return None
    table, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    update_dims = list(range(len(updates)))
    positions = [d for d in update_dims if d not in numbers.update_window_dims]
    window = [d for d in range(len(table)) if d not in numbers.inserted_window_dims]
    table_dims = [UNSPLIT] * len(table)
    for d, u in zip(window, numbers.update_window_dims, strict=True):
        if updates[u] == table[d]:
            table_dims[d] = u
        else:
            update_dims[u] = UNSPLIT
    sizes = list(updates)
    looked_up = single_lookup_dim(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)
    if looked_up is not None:
        table_dims[looked_up] = len(sizes)
        sizes.append(table[looked_up])
    reduced = tuple((d, Combine.SUM) for d in positions)
    return OpRule(tuple(sizes), (tuple(table_dims), (*positions, UNSPLIT), tuple(update_dims)), (tuple(table_dims),), reduced)


def single_lookup_dim(mapped: tuple[int, ...], collapsed: tuple[int, ...]) -> int | None:
    """The one table dim that the indices address with single rows, if there is exactly one."""
    return mapped[0] if len(mapped) == 1 and tuple(collapsed) == tuple(mapped) else None
