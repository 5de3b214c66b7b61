"""FLOP and bytes of one equation: dot and convolution exact, everything else one FLOP an element; a scan is its body times its length."""

import math
from collections.abc import Callable, Iterable

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.ir.inline import nested_jaxprs

_FREE = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "iota",
        "convert_element_type",
        "copy",
        "transpose",
        "slice",
        "bitcast_convert_type",
    }
    | {
        "optimization_barrier",
        "random_wrap",
        "random_unwrap",
        "stop_gradient",
        "name",
        "pad",
        "concatenate",
        "rev",
        "gather",
        "dynamic_slice",
    }
)


def aval_bytes(aval: object) -> int:
    """Bytes of an array (a PRNG key counts 8, an abstract token 0)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 8)


def equation_bytes(equation: JaxprEqn) -> int:
    """Bytes read and written by an equation whose operands all come from memory."""
    atoms: Iterable[Var | Literal] = (*equation.invars, *equation.outvars)
    return sum(aval_bytes(atom.aval) for atom in atoms)


def equation_flops(equation: JaxprEqn) -> int:
    """FLOP of an equation; a cond counts its dearest branch, a while its body once, a call what it calls."""
    rule = _RULES.get(equation.primitive.name)
    if rule is not None:
        return rule(equation)
    if equation.primitive.name in _FREE:
        return 0
    inner = nested_jaxprs(equation)
    if inner:
        return sum(jaxpr_flops(jaxpr) for jaxpr in inner)
    sizes = [math.prod(getattr(atom.aval, "shape", ())) for atom in (*equation.invars, *equation.outvars)]
    return max(sizes, default=0)


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """FLOP of all equations of a jaxpr."""
    return sum(equation_flops(equation) for equation in jaxpr.eqns)


def _dot_flops(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = aval_of(equation.invars[0]).shape
    return 2 * math.prod(aval_of(equation.outvars[0]).shape) * math.prod(left[dim] for dim in contracted)


def _ragged_dot_flops(equation: JaxprEqn) -> int:
    """Each row meets the matrix of one group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    columns = math.prod(size for dim, size in enumerate(aval_of(equation.invars[1]).shape) if dim not in shared)
    return 2 * math.prod(aval_of(equation.invars[0]).shape) * columns


def _conv_flops(equation: JaxprEqn) -> int:
    kernel = aval_of(equation.invars[1]).shape
    out_dim = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = math.prod(kernel) // kernel[out_dim]
    return 2 * math.prod(aval_of(equation.outvars[0]).shape) * per_output


def _scan_flops(equation: JaxprEqn) -> int:
    return equation.params["length"] * sum(jaxpr_flops(jaxpr) for jaxpr in nested_jaxprs(equation))


def _cond_flops(equation: JaxprEqn) -> int:
    return max(jaxpr_flops(branch.jaxpr) for branch in equation.params["branches"])


_RULES: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
    "scan": _scan_flops,
    "cond": _cond_flops,
}
