"""A jaxpr whose vjp failed -> TraceError that names the operator to blame and the user's line that wrote it.

Each equation is differentiated by itself, in what depends on the differentiated inputs; the first that fails is to blame, and inside a
scan, cond or call the first of its body.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.faults import first_line, place_of, place_of_equation
from alpa_hpc.ir.graph import aval_of, closed_jaxpr, needed_equations, variables
from alpa_hpc.ir.inline import nested_jaxprs

_LOOP = "while"
_INSTEAD_OF_LOOP = (
    "a loop of unknown length keeps nothing for its backward pass. Use jax.lax.scan, or jax.lax.fori_loop with bounds that are Python "
    "numbers; if no gradient is wanted through it, put jax.lax.stop_gradient around what it reads"
)
_INSTEAD = "Write it with other operators, give it a rule by jax.custom_vjp, or put jax.lax.stop_gradient around what it reads"


def check_differentiable(closed: ClosedJaxpr, differentiated: Sequence[Var], outputs: Sequence[Var]) -> None:
    """Raise TraceError for the first equation that cannot be differentiated by itself; those that `outputs` need come first."""
    active = _active(closed.jaxpr, differentiated)
    on_the_way = {id(equation) for equation in needed_equations(closed.jaxpr.eqns, outputs)}
    for equation in sorted(closed.jaxpr.eqns, key=lambda equation: id(equation) not in on_the_way):
        cause = _failure(equation, active)
        if cause is not None:
            raise _refusal(*_innermost(equation, cause))


def _refusal(equation: JaxprEqn, cause: Exception) -> TraceError:
    name, place = equation.primitive.name, place_of(cause) or place_of_equation(equation)
    why = _INSTEAD_OF_LOOP if name == _LOOP else f"{type(cause).__name__}: {first_line(cause).rstrip('.')}. {_INSTEAD}"
    return TraceError(f"the loss cannot be differentiated through '{name}'{place}: {why}.")


def _innermost(equation: JaxprEqn, cause: Exception) -> tuple[JaxprEqn, Exception]:
    """The equation itself, or the one in its body that fails."""
    bodies: list[Jaxpr] = [] if equation.primitive.name == _LOOP else nested_jaxprs(equation)
    for body in bodies:
        active = _active(body, body.invars)
        for inner in body.eqns:
            inner_cause = _failure(inner, active)
            if inner_cause is not None:
                return _innermost(inner, inner_cause)
    return equation, cause


def _active(jaxpr: Jaxpr, differentiated: Sequence[Var]) -> set[Var]:
    """The variables through which a tangent of the differentiated inputs flows."""
    active = set(filter(_is_float, differentiated))
    for equation in jaxpr.eqns:
        if equation.primitive.name != "stop_gradient" and not active.isdisjoint(variables(equation.invars)):
            active.update(filter(_is_float, equation.outvars))
    return active


def _failure(equation: JaxprEqn, active: set[Var]) -> Exception | None:
    """What differentiating one equation by itself raises."""
    inputs = list(dict.fromkeys(variables(equation.invars)))
    places = [place for place, var in enumerate(inputs) if var in active]
    results = [place for place, var in enumerate(equation.outvars) if _is_float(var)]
    if not places or not results:
        return None
    closed = closed_jaxpr(inputs, equation.outvars, [equation], {})

    def pulled(*arguments: jax.Array) -> object:
        def forward(*chosen: jax.Array) -> list[jax.Array]:
            values = list(arguments)
            for place, value in zip(places, chosen, strict=True):
                values[place] = value
            outputs = eval_jaxpr(closed.jaxpr, closed.consts, *values)
            return [outputs[place] for place in results]

        outputs, pull_back = jax.vjp(forward, *(arguments[place] for place in places))
        return pull_back(outputs)

    try:
        jax.eval_shape(pulled, *(jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in inputs))
    except Exception as error:  # noqa: BLE001 - whatever a rule raises, a rule of the user's too
        return error
    return None


def _is_float(var: Var) -> bool:
    return jnp.issubdtype(aval_of(var).dtype, jnp.inexact)
