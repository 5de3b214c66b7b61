"""Operators that sum over dims: matrix products and reductions."""

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT, Combine, OpRule, shape_of


def dot_general_rule(eqn: JaxprEqn) -> OpRule:
    """Factors: batch dims, free dims of each side, contracted dims (summed). Result dims are batch, left free, right free.

    A batched product (attention) is split over its batch dims alone, as in the original: splitting inside the small products moves more
    than it saves, and would square the number of specs that the tensors around it can have.
    """
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_shape, right_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    left, right = [UNSPLIT] * len(left_shape), [UNSPLIT] * len(right_shape)
    sizes: list[int] = []
    result: list[int] = []
    for a, b in zip(left_batch, right_batch, strict=True):
        left[a] = right[b] = len(sizes)
        result.append(len(sizes))
        sizes.append(left_shape[a])
    reduced: list[tuple[int, Combine]] = []
    contracted: list[int] = []
    for a, b in zip(left_contract, right_contract, strict=True):
        left[a] = right[b] = len(sizes)
        contracted.append(len(sizes))
        reduced.append((len(sizes), Combine.SUM))
        sizes.append(left_shape[a])
    for dims, shape in ((left, left_shape), (right, right_shape)):
        for d in range(len(shape)):
            if dims[d] == UNSPLIT:
                dims[d] = len(sizes)
                result.append(len(sizes))
                sizes.append(shape[d])
    rule = OpRule(tuple(sizes), (tuple(left), tuple(right)), (tuple(result),), tuple(reduced))
    num_batch = len(left_batch)
    return _only_factors(rule, num_batch) if any(size > 1 for size in sizes[:num_batch]) else rule


def _only_factors(rule: OpRule, count: int) -> OpRule:
    """The rule with its first `count` factors only."""

    def kept(dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(factor if factor < count else UNSPLIT for factor in dims)

    return OpRule(rule.sizes[:count], tuple(map(kept, rule.operands)), tuple(map(kept, rule.results)))


def reduction_rule(eqn: JaxprEqn) -> OpRule:
    """reduce_sum, reduce_max, reduce_min, reduce_and, reduce_or: reduced dims are combined over the axes that split them."""
    combine = _COMBINE[eqn.primitive.name]
    shape = shape_of(eqn.invars[0])
    if eqn.primitive.name in _BITWISE and aval_of(eqn.invars[0]).dtype != bool:
        return arg_reduction_rule(eqn)
    axes = set(eqn.params["axes"])
    kept = tuple(d for d in range(len(shape)) if d not in axes)
    reduced = tuple((d, combine) for d in range(len(shape)) if d in axes)
    return OpRule(shape, (tuple(range(len(shape))),), (kept,), reduced, linear=combine is Combine.SUM)


_BITWISE = frozenset({"reduce_or", "reduce_and"})  # on integers they are no maximum and no minimum: the reduced dims stay whole
_COMBINE = {
    "reduce_sum": Combine.SUM,
    "reduce_max": Combine.MAX,
    "reduce_min": Combine.MIN,
    "reduce_or": Combine.MAX,
    "reduce_and": Combine.MIN,
}


def arg_reduction_rule(eqn: JaxprEqn) -> OpRule:
    """Argmax and argmin: the searched dims stay whole."""
    shape = shape_of(eqn.invars[0])
    axes = set(eqn.params["axes"])
    operand = tuple(UNSPLIT if d in axes else d for d in range(len(shape)))
    return OpRule(shape, (operand,), (tuple(d for d in range(len(shape)) if d not in axes),))
