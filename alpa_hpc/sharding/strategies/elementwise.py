"""Operators that work element by element: every dim is a factor; scalars have none."""

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, shape_of

ELEMENTWISE = frozenset(
    (
        "add sub mul mulhi div rem max min pow integer_pow exp exp2 log log1p expm1 tanh sin cos tan asin acos atan atan2 sinh cosh "
        "asinh acosh atanh logistic sqrt rsqrt cbrt square neg sign abs floor ceil round is_finite not and or xor shift_left "
        "shift_right_logical shift_right_arithmetic eq ne lt le gt ge eq_to lt_to le_to select_n clamp convert_element_type "
        "reduce_precision copy stage add_any population_count clz real imag conj complex nextafter "
        "erf erf_inv erfc lgamma digamma polygamma igamma igamma_grad_a igammac zeta bessel_i0e bessel_i1e regularized_incomplete_beta "
        "threefry2x32"
    ).split()
)

LINEAR = frozenset("add sub neg add_any convert_element_type copy stage".split())


def elementwise_rule(eqn: JaxprEqn) -> OpRule | None:
    """Dims align by position; a dim of size 1 that is stretched, and an operand without dims, are whole on every device."""
    shape = shape_of(eqn.outvars[0])
    factors = tuple(range(len(shape)))
    operands: list[tuple[int, ...]] = []
    for atom in eqn.invars:
        sizes = shape_of(atom)
        if sizes and len(sizes) != len(shape):
            return None
        operands.append(tuple(d if size == shape[d] else UNSPLIT for d, size in enumerate(sizes)))
    return OpRule(shape, tuple(operands), (factors,) * len(eqn.outvars), linear=_is_linear(eqn, operands))


def _is_linear(eqn: JaxprEqn, operands: list[tuple[int, ...]]) -> bool:
    if eqn.primitive.name == "convert_element_type" and jnp.issubdtype(aval_of(eqn.invars[0]).dtype, jnp.inexact):
        return jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact)  # the sum of rounded parts is not the rounded sum
    whole = tuple(range(len(shape_of(eqn.outvars[0]))))  # x + 1 of a partial x would add 1 on every device
    return eqn.primitive.name in LINEAR and whole != () and all(dims == whole for dims in operands)
