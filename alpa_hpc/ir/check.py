"""Flat jaxpr -> the same jaxpr, or a fault with the equations around it."""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.faults import place_of_equation
from alpa_hpc.ir.graph import aval_of, variables
from alpa_hpc.ir.inline import ALL_CALLS, nested_jaxprs

_NEIGHBOURS = 3
_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def check_flat(closed: ClosedJaxpr, *, where: str) -> ClosedJaxpr:
    """Every variable is defined before its use and once, and no call remains; an assertion names the place else."""
    jaxpr = closed.jaxpr
    defined = {*jaxpr.constvars, *jaxpr.invars}
    assert len(defined) == len(jaxpr.constvars) + len(jaxpr.invars), f"{where}: an input occurs twice"
    for position, equation in enumerate(jaxpr.eqns):
        missing = [var for var in variables(equation.invars) if var not in defined]
        assert not missing, f"{where}: operand without definition\n{neighbourhood(jaxpr.eqns, position)}"
        assert equation.primitive.name not in ALL_CALLS, f"{where}: a call remains\n{neighbourhood(jaxpr.eqns, position)}"
        assert not defined.intersection(equation.outvars), f"{where}: defined twice\n{neighbourhood(jaxpr.eqns, position)}"
        defined.update(equation.outvars)
    assert all(var in defined for var in variables(jaxpr.outvars)), f"{where}: an output without definition"
    return closed


def check_effects(closed: ClosedJaxpr, *, where: str) -> ClosedJaxpr:
    """No equation prints, calls back or writes; raises TraceError with the equation else."""
    for position, equation in enumerate(closed.jaxpr.eqns):
        if equation.effects:
            raise TraceError(
                f"{where}: '{equation.primitive}' has side effects ({', '.join(map(str, equation.effects))}), which a step that is cut "
                f"into pieces cannot keep in order. Remove debug prints, callbacks and writes from the step{place_of_equation(equation)}\n"
                f"{neighbourhood(closed.jaxpr.eqns, position)}"
            )
    return closed


def check_widths(closed: ClosedJaxpr, *, where: str) -> ClosedJaxpr:
    """No equation makes 64 bits where jax has none: a part that is traced by itself would have 32; raises TraceError with the equation."""
    wide = None if jax.config.read("jax_enable_x64") else _first_wide(closed.jaxpr)
    if wide is not None:
        raise TraceError(
            f"{where}: '{wide.primitive}' makes {', '.join(str(var.aval) for var in wide.outvars)} under jax.enable_x64, and pieces of a "
            f"step are traced outside of it. Use 32 bits there, or set JAX_ENABLE_X64=1 for the whole run{place_of_equation(wide)}"
        )
    return closed


def _first_wide(jaxpr: Jaxpr) -> JaxprEqn | None:
    for equation in jaxpr.eqns:
        inner = next(filter(None, map(_first_wide, nested_jaxprs(equation))), None)
        if inner is not None:
            return inner
        if any(str(aval_of(var).dtype) in _WIDE for var in equation.outvars):
            return equation
    return None


def neighbourhood(equations: list[JaxprEqn], position: int) -> str:
    """The equation at `position`, marked, with a few before and after it."""
    first, last = max(0, position - _NEIGHBOURS), position + _NEIGHBOURS + 1
    shown = enumerate(equations[first:last], first)
    return "\n".join(f"{'->' if number == position else '  '} {number}: {short(equation)}" for number, equation in shown)


def short(equation: JaxprEqn) -> str:
    """One line of an equation."""
    text = " ".join(str(equation).split())
    return text if len(text) <= 200 else text[:200] + " ..."
