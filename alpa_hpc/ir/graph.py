"""A flat list of equations -> ClosedJaxpr, and the few questions asked of such lists (who needs what, who depends on what)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

Atom = Var | Literal
_NAMELESS = DebugInfo("alpa_hpc", "<unknown>", None, None)


def aval_of(atom: Atom) -> ShapedArray:
    """Shape and dtype of an array-valued atom."""
    return cast("ShapedArray", atom.aval)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are variables, in order (literals are left out)."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def needed_equations(equations: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that `outputs` depend on, in order."""
    wanted = set(variables(outputs))
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        if any(var in wanted for var in equation.outvars):
            wanted.update(variables(equation.invars))
            kept.append(equation)
    return kept[::-1]


def reached(equations: Sequence[JaxprEqn], sources: Iterable[Var]) -> set[Var]:
    """`sources` and every variable that depends on one of them."""
    found = set(sources)
    for equation in equations:
        if any(var in found for var in variables(equation.invars)):
            found.update(equation.outvars)
    return found


def assemble(
    inputs: Sequence[Var], outputs: Sequence[Atom], equations: Sequence[JaxprEqn], constants: Mapping[Var, ArrayLike]
) -> ClosedJaxpr:
    """A closed jaxpr of those `equations` that `outputs` need; it holds only the `constants` that are read."""
    kept = needed_equations(equations, outputs)
    read = dict.fromkeys(var for equation in kept for var in variables(equation.invars))
    read.update(dict.fromkeys(variables(outputs)))
    held = [var for var in read if var in constants and var not in set(inputs)]
    return closed_jaxpr(inputs, outputs, kept, {var: constants[var] for var in held})


def closed_jaxpr(
    inputs: Sequence[Var], outputs: Sequence[Atom], equations: Sequence[JaxprEqn], constants: Mapping[Var, ArrayLike]
) -> ClosedJaxpr:
    """A closed jaxpr of exactly these parts."""
    effects = frozenset(effect for equation in equations for effect in equation.effects)
    jaxpr = Jaxpr(list(constants), list(inputs), list(outputs), list(equations), effects, _NAMELESS)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def constants_of(closed: ClosedJaxpr) -> dict[Var, ArrayLike]:
    """The array constants of a jaxpr by variable."""
    return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
