"""Operators that sum over dims: matrix products and reductions."""

from math import prod

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.strategies.rule import Combine, OpRule, RuleDraft, shape_of


def dot_general_rule(eqn: JaxprEqn) -> OpRule:
    """Factors: batch dims, contracted dims (summed), free dims of each side. Result dims are batch, left free, right free.

    A product that has more to split in its batch than inside is split over its batch dims alone (see `splits_batch_alone`).
    """
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    draft = RuleDraft.of(eqn)
    for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        draft.factor(left[a], {0: a, 1: b}, {0: i})
    if splits_batch_alone(eqn):
        return draft.rule()
    for a, b in zip(left_contract, right_contract, strict=True):
        draft.factor(left[a], {0: a, 1: b}, combine=Combine.SUM)
    result = len(left_batch)
    for position, shape, taken in ((0, left, (*left_batch, *left_contract)), (1, right, (*right_batch, *right_contract))):
        for d in range(len(shape)):
            if d not in taken:
                draft.factor(shape[d], {position: d}, {0: result})
                result += 1
    return draft.rule()


def is_batched(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product with a batch of more than one."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return any(shape_of(eqn.invars[0])[d] > 1 for d in batch)


def splits_batch_alone(eqn: JaxprEqn) -> bool:
    """Whether a product has more elements in its batch than its shortest loop (rows, columns, contracted) has steps.

    Splitting the batch moves nothing, and there is more of it than of that loop: so it is in attention, whose shortest loop is the head
    size. Splitting inside such products would move more than it saves, and square the number of specs that the tensors around can have.
    The few large products of a layer of experts are split inside as well.
    """
    (contract, _), (batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    count, steps = prod(left[d] for d in batch), prod(left[d] for d in contract)
    rows = prod(left) // max(count * steps, 1)
    columns = prod(right[d] for d in range(len(right)) if d not in right_batch) // max(steps, 1)
    return count > max(1, min(steps, rows, columns))


def ragged_dot_rule(eqn: JaxprEqn) -> OpRule:
    """Rows in groups of any size, each with a matrix of its own: all dims but the rows and the groups are factors."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, _) = numbers.dot_dimension_numbers
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    ragged, groups = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    draft = RuleDraft.of(eqn)
    if left_batch or len(shape_of(eqn.invars[2])) != 1:
        return draft.rule()
    for a, b in zip(left_contract, right_contract, strict=True):
        if a not in ragged:
            draft.factor(left[a], {0: a, 1: b}, combine=Combine.SUM)
    result = 0 if ragged.isdisjoint(left_contract) else 1  # where the rows are summed, each group has a result of its own
    for position, shape, taken, whole in ((0, left, left_contract, ragged), (1, right, {*right_contract, *groups}, set[int]())):
        for d in range(len(shape)):
            if d not in taken:
                if d not in whole:
                    draft.factor(shape[d], {position: d}, {0: result})
                result += 1
    return draft.rule()


def reduction_rule(eqn: JaxprEqn) -> OpRule:
    """reduce_sum, reduce_max, reduce_min, reduce_and, reduce_or: reduced dims are combined over the axes that split them.

    `and` and `or` of integers are no maximum and no minimum: their reduced dims stay whole.
    """
    name = eqn.primitive.name
    if name in ("reduce_and", "reduce_or") and aval_of(eqn.invars[0]).dtype != bool:
        return kept_dims_rule(eqn)
    return _reduction(eqn, COMBINE[name])


def kept_dims_rule(eqn: JaxprEqn) -> OpRule:
    """Reductions whose pieces no collective puts together (argmax, products, xor, any function): reduced dims stay whole."""
    return _reduction(eqn, None)


def _reduction(eqn: JaxprEqn, combine: Combine | None) -> OpRule:
    draft = RuleDraft.of(eqn)
    axes = eqn.params["dimensions" if "dimensions" in eqn.params else "axes"]
    count, kept = len(eqn.outvars), 0
    for d, size in enumerate(shape_of(eqn.invars[0])):
        if d not in axes:
            draft.factor(size, dict.fromkeys(range(count), d), dict.fromkeys(range(count), kept))
            kept += 1
        elif combine is not None:
            draft.factor(size, {0: d}, combine=combine)
    return draft.rule(linear=combine is Combine.SUM)


COMBINE = {
    "reduce_sum": Combine.SUM,
    "reduce_max": Combine.MAX,
    "reduce_min": Combine.MIN,
    "reduce_or": Combine.MAX,
    "reduce_and": Combine.MIN,
}
