"""ForwardLayer -> forward, backward and recomputing backward, from one vjp of the layer (paper, section 5.3).

The vjp is traced as one jaxpr and flattened; backward is what depends on a cotangent, forward the rest. What crosses between them
is a residual, unless the backward can cheaply make it again: from parameters and constants alone, by widening or moving something
smaller, or by elementwise arithmetic on what it holds anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.check import check_flat
from alpa_hpc.ir.flops import aval_bytes
from alpa_hpc.ir.graph import Atom, assemble, aval_of, constants_of, reached, variables
from alpa_hpc.ir.inline import inline_all, inline_derivative_calls
from alpa_hpc.layers.forward import ForwardLayer
from alpa_hpc.layers.underivable import check_differentiable

_MOVES = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "neg", "stop_gradient"}
)
_ARITHMETIC = _MOVES | frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "max",
        "min",
        "square",
        "integer_pow",
        "select_n",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "sign",
        "abs",
    }
    | {"add_any", "iota", "random_wrap", "slice"}
)
_MAX_STEPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """The two flat jaxprs of a layer; see `ir.work.Layer`."""

    forward: ClosedJaxpr
    backward: ClosedJaxpr


@dataclass(frozen=True, slots=True, eq=False)
class _Joint:
    """Flat [params, others, cotangents] -> [outputs, results of the backward]; remat equations are still whole."""

    closed: ClosedJaxpr
    num_params: int
    num_others: int
    num_outputs: int

    @property
    def params(self) -> list[Var]:
        return self.closed.jaxpr.invars[: self.num_params]

    @property
    def others(self) -> list[Var]:
        return self.closed.jaxpr.invars[self.num_params : self.num_params + self.num_others]

    @property
    def cotangents(self) -> list[Var]:
        return self.closed.jaxpr.invars[self.num_params + self.num_others :]

    @property
    def outputs(self) -> list[Atom]:
        return self.closed.jaxpr.outvars[: self.num_outputs]

    @property
    def results(self) -> list[Atom]:
        return self.closed.jaxpr.outvars[self.num_outputs :]


def differentiate(layer: ForwardLayer) -> Programs:
    """Forward and backward of a layer; equal layers give equal programs."""
    joint = _trace_vjp(layer)
    kept, made_again = _choose_residuals(joint)
    equations, constants = joint.closed.jaxpr.eqns, constants_of(joint.closed)
    late = reached(equations, joint.cotangents)
    early_equations = [equation for equation in equations if late.isdisjoint(equation.outvars)]
    late_equations = [equation for equation in equations if not late.isdisjoint(equation.outvars)]
    again = [equation for equation in early_equations if not made_again.isdisjoint(equation.outvars)]
    inputs = [*joint.params, *joint.others]
    forward = assemble(inputs, [*joint.outputs, *kept], early_equations, constants)
    backward = assemble([*inputs, *kept, *joint.cotangents], joint.results, [*again, *late_equations], constants)
    return Programs(
        forward=check_flat(inline_all(forward, unguarded=frozenset()), where="forward of a layer"),
        backward=check_flat(_finish(layer, joint.num_params, backward), where="backward of a layer"),
    )


def _trace_vjp(layer: ForwardLayer) -> _Joint:
    avals = layer.closed.in_avals
    num_params = len(layer.params)
    wanted = [num_params + len(layer.batch) + layer.inputs.index(value) for value in layer.cotangent_inputs]
    seeded = _seeded_outputs(layer)

    def vjp(arguments: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        def forward(differentiated: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            inputs = list(arguments)
            for position, value in zip([*range(num_params), *wanted], differentiated, strict=True):
                inputs[position] = value
            outputs = eval_jaxpr(layer.closed.jaxpr, layer.closed.consts, *inputs)
            return [outputs[position] for position in seeded], outputs

        primals = [arguments[position] for position in (*range(num_params), *wanted)]
        _, pull_back, outputs = jax.vjp(forward, primals, has_aux=True)
        [gradients] = pull_back(list(cotangents))
        return [*outputs, *gradients[num_params:], *gradients[:num_params]]

    cotangent_avals = [_struct(layer.closed.out_avals[position]) for position in seeded]
    try:
        traced = jax.make_jaxpr(vjp)([_struct(aval) for aval in avals], cotangent_avals)
    except Exception:
        inputs, outputs = layer.closed.jaxpr.invars, layer.closed.jaxpr.outvars
        differentiated = [inputs[position] for position in (*range(num_params), *wanted)]
        check_differentiable(layer.closed, differentiated, variables(outputs[position] for position in seeded))
        raise
    return _Joint(inline_derivative_calls(traced), num_params, len(avals) - num_params, len(layer.outputs))


def _seeded_outputs(layer: ForwardLayer) -> list[int]:
    """Positions of the outputs that get a cotangent; the loss, if made here, is the last."""
    positions = [layer.outputs.index(value) for value in layer.cotangent_outputs]
    return [*positions, layer.loss_position] if layer.has_loss else positions


def _choose_residuals(joint: _Joint) -> tuple[list[Var], set[Var]]:
    """What the forward keeps for the backward, and what the backward makes again."""
    equations = joint.closed.jaxpr.eqns
    late = reached(equations, joint.cotangents)
    maker = {var: equation for equation in equations for var in equation.outvars if var not in late}
    free = {*joint.params, *joint.closed.jaxpr.constvars}
    for equation in equations:
        if all(var in free for var in variables(equation.invars)):
            free.update(equation.outvars)
    again: set[Var] = set()
    needed: dict[Var, None] = {}
    pending = [var for eqn in equations if not late.isdisjoint(eqn.outvars) for var in variables(eqn.invars) if var not in late]
    pending += [var for var in variables(joint.results) if var not in late]
    while pending:
        var = pending.pop()
        if var not in maker or var in again or var in needed:
            continue
        if var in free or _is_move(maker[var], free):
            again.update(maker[var].outvars)
            pending += variables(maker[var].invars)
        else:
            needed[var] = None
    order = {var: number for number, var in enumerate(var for equation in equations for var in equation.outvars)}
    return _without_arithmetic(sorted(needed, key=order.__getitem__), maker, again, {*free, *joint.others})


def _is_move(equation: JaxprEqn, free: set[Var]) -> bool:
    """Whether the equation only widens or moves one value that is no larger than its result, or makes a PRNG key."""
    if all(jnp.issubdtype(aval_of(var).dtype, jax.dtypes.prng_key) for var in equation.outvars):
        return True
    reads = [var for var in variables(equation.invars) if var not in free]
    small = sum(aval_bytes(var.aval) for var in reads) <= sum(aval_bytes(var.aval) for var in equation.outvars)
    return equation.primitive.name in _MOVES and len(reads) == 1 and small


def _without_arithmetic(needed: list[Var], maker: dict[Var, JaxprEqn], again: set[Var], held: set[Var]) -> tuple[list[Var], set[Var]]:
    """Residuals in order, less those that elementwise arithmetic makes from inputs, weights and earlier residuals."""
    kept: list[Var] = []
    available = set(held)

    def can_make(var: Var, depth: int) -> list[JaxprEqn] | None:
        if var in available:
            return []
        equation = maker.get(var)
        if depth == 0 or equation is None or equation.primitive.name not in _ARITHMETIC:
            return None
        steps: list[JaxprEqn] = []
        for operand in variables(equation.invars):
            before = can_make(operand, depth - 1)
            if before is None:
                return None
            steps += before
        return [*steps, equation]

    for var in needed:
        steps = can_make(var, _MAX_STEPS)
        if steps is None:
            kept.append(var)
        else:
            again.update(made for equation in steps for made in equation.outvars)
        available.add(var)
    for var in list(again):
        again.update(_makers_behind(var, maker, set(kept)))
    return kept, again


def _makers_behind(var: Var, maker: dict[Var, JaxprEqn], kept: set[Var]) -> set[Var]:
    """Everything that must be made again so that `var` can be."""
    found: set[Var] = set()
    pending = [var]
    while pending:
        current = pending.pop()
        if current in found or current in kept or current not in maker:
            continue
        found.add(current)
        pending += variables(maker[current].invars)
    return found


def _finish(layer: ForwardLayer, num_params: int, backward: ClosedJaxpr) -> ClosedJaxpr:
    """Inline remat, and replace the cotangent of the loss, the last input, by 1."""
    flat = inline_all(backward, unguarded=frozenset(backward.jaxpr.invars[:num_params]))
    if not layer.has_loss:
        return flat
    *inputs, seed = flat.jaxpr.invars
    one = Literal(np.ones((), aval_of(seed).dtype), ShapedArray((), aval_of(seed).dtype))

    def substitute(atoms: Sequence[Atom]) -> list[Atom]:
        return [one if atom is seed else atom for atom in atoms]

    equations = [equation.replace(invars=substitute(equation.invars)) for equation in flat.jaxpr.eqns]
    return assemble(inputs, substitute(flat.jaxpr.outvars), equations, constants_of(flat))


def _struct(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
