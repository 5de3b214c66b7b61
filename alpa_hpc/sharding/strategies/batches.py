"""Operators that do one thing to each element of a batch: the dims of the batch are factors, those inside an element stay whole."""

from collections.abc import Callable

from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.strategies.rule import OpRule, RuleDraft, shape_of


def leading_rule(element_rank: Callable[[JaxprEqn], int]) -> Callable[[JaxprEqn], OpRule]:
    """All operands and results begin with the same batch dims; an element of the first operand has `element_rank` dims."""

    def rule(eqn: JaxprEqn) -> OpRule:
        draft = RuleDraft.of(eqn)
        operand = shape_of(eqn.invars[0])
        for d in range(len(operand) - element_rank(eqn)):
            draft.factor(operand[d], dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d))
        return draft.rule()

    return rule


LINEAR_ALGEBRA = {  # primitive -> dims of one element of its first operand
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
LINEAR_ALGEBRA_RULES = {name: leading_rule(lambda _, rank=rank: rank) for name, rank in LINEAR_ALGEBRA.items()}


def fft_rule(eqn: JaxprEqn) -> OpRule:
    """Transforms the last dims."""
    return leading_rule(lambda one: len(one.params["fft_lengths"]))(eqn)


def along_rule(param: str) -> Callable[[JaxprEqn], OpRule]:
    """Operators along the one dim that parameter `param` names (sort, top_k, cumulative sums): all others are the batch."""

    def rule(eqn: JaxprEqn) -> OpRule:
        draft = RuleDraft.of(eqn)
        shape = shape_of(eqn.invars[0])
        for d in range(len(shape)):
            if d != eqn.params[param] % len(shape):
                draft.factor(shape[d], dict.fromkeys(range(len(eqn.invars)), d), dict.fromkeys(range(len(eqn.outvars)), d))
        return draft.rule()

    return rule
