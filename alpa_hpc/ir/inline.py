"""ClosedJaxpr -> the same computation with calls inlined, every variable new, and inner constants lifted to the outside.

Before differentiation only `jit` and `closed_call` may go: a custom_jvp, custom_vjp or remat that is inlined loses its rule. `remat2` is
inlined last, behind an optimization barrier, so that what it recomputes is not merged with what was computed before.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from jax.typing import ArrayLike

from alpa_hpc.ir.graph import Atom, assemble, aval_of

CALLS = frozenset({"jit", "closed_call", "core_call"})
DERIVATIVE_CALLS = CALLS | {"custom_jvp_call", "custom_vjp_call"}
ALL_CALLS = DERIVATIVE_CALLS | {"remat2"}
MAX_UNROLLED_LENGTH = 256
HEAVY = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


def called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr that a call equation evaluates on its operands."""
    body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    assert body is not None, f"{equation.primitive} is no call"
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, [])


class Rewriter:
    """Collects the equations of a new flat jaxpr; it owns the new variables and the lifted constants."""

    def __init__(self, calls: frozenset[str], rules: "Rules") -> None:
        self.calls = calls
        self.rules = rules
        self.equations: list[JaxprEqn] = []
        self.constants: dict[Var, ArrayLike] = {}
        self._constant_vars: dict[int, Var] = {}

    def constant(self, value: ArrayLike, like: Var) -> Var:
        """The variable of a lifted constant; the same object is lifted once."""
        var = self._constant_vars.setdefault(id(value), Var(like.aval))
        self.constants[var] = value
        return var

    def emit(self, equation: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """Append `equation` with new operands and new outputs."""
        outputs = [Var(var.aval) for var in equation.outvars]
        params, effects = equation.params, equation.effects
        self.equations.append(new_jaxpr_eqn(list(operands), outputs, equation.primitive, params, effects, equation.source_info))
        return list(outputs)

    def bind(self, function: Callable[..., object], *operands: Atom) -> list[Atom]:
        """Append the equations of a JAX function applied to `operands`."""
        traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in operands))
        return self.run(traced.jaxpr, traced.consts, list(operands))

    def run(self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], operands: Sequence[Atom]) -> list[Atom]:
        """Append all equations of `jaxpr`, applied to `operands`; gives its outputs."""
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update({var: self.constant(value, var) for var, value in zip(jaxpr.constvars, consts, strict=True)})

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for equation in jaxpr.eqns:
            ins = [read(atom) for atom in equation.invars]
            env.update(zip(equation.outvars, self._equation(equation, ins), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        name = equation.primitive.name
        if name in self.rules:
            return self.rules[name](self, equation, operands)
        if name in self.calls:
            body = called_jaxpr(equation)
            return self.run(body.jaxpr, body.consts, operands)
        return self.emit(equation, operands)


Rule = Callable[[Rewriter, JaxprEqn, list[Atom]], list[Atom]]
Rules = Mapping[str, Rule]


def rewrite(closed: ClosedJaxpr, calls: frozenset[str], rules: Rules) -> ClosedJaxpr:
    """Inline `calls`, replace equations that have a rule, rename everything and drop what no output needs."""
    writer = Rewriter(calls, rules)
    inputs = [Var(var.aval) for var in closed.jaxpr.invars]
    outputs = writer.run(closed.jaxpr, closed.consts, inputs)
    return assemble(inputs, outputs, writer.equations, writer.constants)


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline jit and closed_call only: what may be done before differentiation. Short scans with a matmul inside are unrolled."""
    return rewrite(closed, CALLS, {**_POSITIONAL, "scan": _unroll_scan})


def inline_derivative_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline all calls but remat: what may be done after differentiation and before forward and backward are parted."""
    return rewrite(closed, DERIVATIVE_CALLS, _PLAIN)


def inline_all(closed: ClosedJaxpr, *, unguarded: frozenset[Var]) -> ClosedJaxpr:
    """Inline every call; what a differentiated remat reads passes an optimization barrier, except inputs in `unguarded` (parameters)."""
    writer = Rewriter(ALL_CALLS, {})
    inputs = [Var(var.aval) for var in closed.jaxpr.invars]
    free = {new for new, old in zip(inputs, closed.jaxpr.invars, strict=True) if old in unguarded}
    writer.rules = {**_PLAIN, "remat2": lambda w, equation, operands: _inline_remat(w, equation, operands, free)}
    outputs = writer.run(closed.jaxpr, closed.consts, inputs)
    return assemble(inputs, outputs, writer.equations, writer.constants)


def inline_update(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline every call, and turn each cond into both branches and a select (what follows the loss is cheap, and is split by parameter).

    Short scans with a matmul inside, such as the steps of an optimiser that makes matrices orthogonal, are unrolled.
    """
    return rewrite(closed, ALL_CALLS, {**_PLAIN, "cond": _select_branches, "add": _add_unless_zero, "scan": _unroll_scan})


def _inline_remat(writer: Rewriter, equation: JaxprEqn, operands: list[Atom], free: set[Var]) -> list[Atom]:
    guarded = [i for i, atom in enumerate(operands) if isinstance(atom, Var) and atom not in free and atom not in writer.constants]
    if equation.params["differentiated"] and equation.params["prevent_cse"] and guarded:
        behind = writer.bind(lambda *xs: lax.optimization_barrier(xs), *(operands[i] for i in guarded))
        for i, atom in zip(guarded, behind, strict=True):
            operands[i] = atom
    body = called_jaxpr(equation)
    return writer.run(body.jaxpr, body.consts, operands)


def _select_branches(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    index, *arguments = operands
    results = [writer.run(branch.jaxpr, branch.consts, arguments) for branch in equation.params["branches"]]
    chosen: list[Atom] = []
    for cases in zip(*results, strict=True):
        if all(case is cases[0] for case in cases):
            chosen.append(cases[0])
        else:
            chosen += writer.bind(lambda which, *xs: _select(which, xs), index, *cases)
    return chosen


def _add_unless_zero(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Drop the zero of x + 0: Python's `sum` starts with a zero, which would make the first parameter's update differ from all others."""
    for zero, other in (operands, operands[::-1]):
        same = (aval_of(other).shape, aval_of(other).dtype) == (aval_of(equation.outvars[0]).shape, aval_of(equation.outvars[0]).dtype)
        if isinstance(zero, Literal) and zero.val == 0 and same:
            return [other]
    return writer.emit(equation, operands)


def _select(which: jax.Array, cases: Sequence[jax.Array]) -> jax.Array:
    result = cases[-1]
    for number, case in enumerate(cases[:-1]):
        result = lax.select_n(which == number, result, case)
    return result


def has_heavy(jaxpr: Jaxpr) -> bool:
    """Whether a matrix product or a convolution occurs in `jaxpr` or in one nested in it."""
    return any(map(is_heavy, jaxpr.eqns))


def is_heavy(equation: JaxprEqn) -> bool:
    """Whether the equation is a matrix product or a convolution, or holds one."""
    return equation.primitive.name in HEAVY or any(map(has_heavy, nested_jaxprs(equation)))


def nested_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs in the parameters of an equation."""
    found: list[Jaxpr] = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _unroll_scan(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    params = equation.params
    length, body = params["length"], called_jaxpr(equation)
    if length > MAX_UNROLLED_LENGTH or length == 0 or not has_heavy(body.jaxpr):
        return writer.emit(equation, operands)
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, stacked = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    results: dict[int, list[Atom]] = {}
    for row in range(length)[:: -1 if params["reverse"] else 1]:
        rows = [atom for whole in stacked for atom in writer.bind(lambda x, row=row: lax.index_in_dim(x, row, keepdims=False), whole)]
        outputs = writer.run(body.jaxpr, body.consts, [*consts, *carry, *rows])
        carry, results[row] = outputs[:num_carry], outputs[num_carry:]
    num_stacked = len(results[0])
    joined = [writer.bind(_stack, *(results[row][i] for row in range(length))) for i in range(num_stacked)]
    return [*carry, *(atom for [atom] in joined)]


def _stack(*rows: jax.Array) -> jax.Array:
    expanded = [lax.expand_dims(row, [0]) for row in rows]
    return lax.concatenate(expanded, 0)


def _operand_itself(_: Rewriter, __: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    return operands


def _reduce_dims(reduce: Callable[[jax.Array, Sequence[int]], jax.Array]) -> Rule:
    """A collective over a named axis of `vmap` is, once the axis is a dim, a reduction over that dim."""

    def rule(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        axes = equation.params["axes"]
        if equation.params["axis_index_groups"] is not None or not all(isinstance(axis, int) for axis in axes):
            return writer.emit(equation, operands)
        return [result for operand in operands for result in writer.bind(lambda x: reduce(x, axes), operand)]

    return rule


def _only_case(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """A choice among cases that are one and the same: XLA makes no choice of it, and so does not bring its mask anywhere."""
    cases = operands[1:]
    return cases[:1] if all(case is cases[0] for case in cases) else writer.emit(equation, operands)


def _solve_only(writer: Rewriter, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """The solver alone; the system as a product and the transposed solver, with what they read, are there for differentiation."""
    counts, solve = equation.params["const_lengths"], equation.params["jaxprs"].solve
    first = counts.matvec + counts.vecmat
    num_consts = sum(counts)
    return writer.run(solve.jaxpr, solve.consts, [*operands[first : first + counts.solve], *operands[num_consts:]])


_POSITIONAL = {"psum": _reduce_dims(lax.reduce_sum), "pmax": _reduce_dims(lax.reduce_max), "pmin": _reduce_dims(lax.reduce_min)}
_PLAIN = {  # the first three mean something to differentiation only
    "stop_gradient": _operand_itself,
    "name": _operand_itself,
    "custom_linear_solve": _solve_only,
    "select_n": _only_case,
    **_POSITIONAL,
}
