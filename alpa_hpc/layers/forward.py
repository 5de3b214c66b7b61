"""Loss jaxpr -> forward layers: runs of its equations, each with what it reads and makes, not yet differentiated.

Equations that depend on parameters and constants alone, and those that make PRNG keys, belong to no layer: each layer that needs one holds
a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.flops import aval_bytes, equation_flops
from alpa_hpc.ir.graph import assemble, aval_of, constants_of, needed_equations, reached, variables
from alpa_hpc.ir.inline import is_heavy
from alpa_hpc.ir.key import aval_text, content_key, equation_text
from alpa_hpc.layers.blocks import find_block
from alpa_hpc.layers.choice import CHOOSE, choose_num_layers
from alpa_hpc.layers.cluster import cluster_equations, equal_counts
from alpa_hpc.layers.options import Clustering
from alpa_hpc.layers.order import linear_order
from alpa_hpc.layers.received import Crossing

NO_LOSS = -1
ANYWHERE = -1
_FAR = 400  # equations; what lies further back than any repeated block counts as one place in a pattern


@dataclass(frozen=True, slots=True, eq=False)
class ForwardLayer:
    """`closed`: [params, batch, inputs] -> outputs. All positions in order of first use.

    `loss_position` is where the loss is among the outputs, or NO_LOSS.
    """

    closed: ClosedJaxpr
    params: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cotangent_inputs: tuple[int, ...]
    cotangent_outputs: tuple[int, ...]
    loss_position: int

    @property
    def has_loss(self) -> bool:
        """Whether this layer makes the loss, so that its backward starts by itself."""
        return self.loss_position != NO_LOSS


@dataclass(frozen=True, slots=True, eq=False)
class ForwardLayers:
    """All layers, the aval of each value id, and the value ids of the loss outputs (the loss first)."""

    layers: tuple[ForwardLayer, ...]
    values: dict[int, ShapedArray]
    loss_values: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """The loss jaxpr with its variables by role; `body` are the equations that belong to one layer each."""

    closed: ClosedJaxpr
    params: dict[Var, int]
    batch: dict[Var, int]
    copied: list[JaxprEqn]
    body: list[JaxprEqn]


def cut_forward(
    loss: ClosedJaxpr, *, num_params: int, num_layers: int, imbalance: float, clustering: Clustering = Clustering.COMMUNICATION
) -> ForwardLayers:
    """Cut a loss [params, batch] -> outputs (the loss first) into `num_layers` or CHOOSE. Raises TraceError if it cannot."""
    parts = _by_role(_with_distinct_outputs(loss), num_params)
    flops = [float(equation_flops(equation)) for equation in parts.body]
    order = linear_order(flops, _crossings(parts))
    parts, flops = replace(parts, body=[parts.body[place] for place in order]), [flops[place] for place in order]
    patterns = _patterns(parts)
    if num_layers == CHOOSE:
        num_layers = choose_num_layers(find_block(flops, patterns), sum(map(is_heavy, parts.body)))
    match clustering:
        case Clustering.COMMUNICATION:
            cuts = cluster_equations(flops, _crossings(parts), patterns, num_layers=num_layers, imbalance=imbalance)
        case Clustering.EQUAL_OPERATORS:
            cuts = equal_counts(len(parts.body), num_layers)
    bounds = [0, *cuts, len(parts.body)]
    runs = [parts.body[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
    return _connect(parts, runs)


def _with_distinct_outputs(loss: ClosedJaxpr) -> ClosedJaxpr:
    """Outputs that are literals, inputs or repeated become results of an equation of their own."""
    jaxpr = loss.jaxpr
    made = {var for equation in jaxpr.eqns for var in equation.outvars}
    outputs = list(jaxpr.outvars)
    equations = list(jaxpr.eqns)
    for position, atom in enumerate(outputs):
        if isinstance(atom, Literal) or atom not in made or atom in outputs[:position]:
            [copy] = jax.make_jaxpr(jax.lax.optimization_barrier)(jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype)).eqns
            outputs[position] = Var(copy.outvars[0].aval)
            equations.append(copy.replace(invars=[atom], outvars=[outputs[position]]))
    return assemble(jaxpr.invars, outputs, equations, constants_of(loss))


def _by_role(loss: ClosedJaxpr, num_params: int) -> _Loss:
    jaxpr = loss.jaxpr
    params = {var: position for position, var in enumerate(jaxpr.invars[:num_params])}
    batch = {var: position for position, var in enumerate(jaxpr.invars[num_params:])}
    weightlike = {*params, *jaxpr.constvars}
    outputs = set(variables(jaxpr.outvars))
    copied: list[JaxprEqn] = []
    body: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        reads = variables(equation.invars)
        from_weights = all(var in weightlike for var in reads)
        makes_key = all(jnp.issubdtype(aval_of(var).dtype, jax.dtypes.prng_key) for var in equation.outvars)
        if outputs.isdisjoint(equation.outvars) and (from_weights or makes_key):
            copied.append(equation)
            if from_weights:
                weightlike.update(equation.outvars)
        else:
            body.append(equation)
    return _Loss(loss, params, batch, copied, body)


def _crossings(parts: _Loss) -> list[Crossing]:
    """Values between body equations; what a copied equation reads counts as read by the equations that need the copy."""
    producer = {var: position for position, equation in enumerate(parts.body) for var in equation.outvars}
    behind: dict[Var, set[Var]] = {}
    for equation in parts.copied:
        reads = {var for atom in variables(equation.invars) for var in behind.get(atom, {atom}) if var in producer or var in behind}
        behind.update(dict.fromkeys(equation.outvars, reads))
    readers: dict[Var, set[int]] = {}
    for position, equation in enumerate(parts.body):
        for atom in variables(equation.invars):
            for var in behind.get(atom, {atom} & producer.keys()):
                readers.setdefault(var, set()).add(position)
    return [Crossing(aval_bytes(var.aval), producer[var], tuple(sorted(where))) for var, where in readers.items()]


def _patterns(parts: _Loss) -> list[str]:
    """For each body equation a text that is equal where a block of the model repeats."""
    producer = {var: position for position, equation in enumerate(parts.body) for var in equation.outvars}
    copies = {var: equation for equation in parts.copied for var in equation.outvars}
    names: dict[tuple[Var, int], str] = {(var, ANYWHERE): f"param {aval_text(var.aval)}" for var in parts.params}
    names.update({(var, ANYWHERE): f"batch {position}" for var, position in parts.batch.items()})
    from_body = reached([*parts.body, *parts.copied], producer)

    def name(atom: Var | Literal, position: int) -> str:
        if isinstance(atom, Literal):
            return content_key(atom.val)
        if atom in producer:
            return str(min(position - producer[atom], _FAR))
        place = (atom, position if atom in from_body else ANYWHERE)
        if place not in names and atom in copies:
            equation = copies[atom]
            operands = [name(operand, position) for operand in equation.invars]
            names[place] = content_key(equation_text(equation), operands, equation.outvars.index(atom))
        return names.get(place, "constant")

    return [" ".join((equation_text(eqn), *(name(atom, position) for atom in eqn.invars))) for position, eqn in enumerate(parts.body)]


def _connect(parts: _Loss, runs: Sequence[Sequence[JaxprEqn]]) -> ForwardLayers:
    jaxpr = parts.closed.jaxpr
    home = {var: index for index, run in enumerate(runs) for equation in run for var in equation.outvars}
    programs = [_with_copies(parts, run) for run in runs]
    reads = [dict.fromkeys(var for equation in program for var in variables(equation.invars)) for program in programs]
    leaving = {var for index, read in enumerate(reads) for var in read if home.get(var, index) != index} | set(variables(jaxpr.outvars))
    ids = {var: number for number, var in enumerate(var for run in runs for eqn in run for var in eqn.outvars if var in leaving)}
    wants = _cotangents(parts, programs)
    unused = [var for var in parts.params if not any(var in read for read in reads)]
    layers: list[ForwardLayer] = []
    needed_later: set[Var] = set()
    for index in reversed(range(len(runs))):
        entering = [var for var in reads[index] if home.get(var, index) != index]
        made = [var for equation in runs[index] for var in equation.outvars if var in leaving]
        params = [var for var in reads[index] if var in parts.params] + (unused if index == 0 else [])
        batch = [var for var in reads[index] if var in parts.batch]
        closed = assemble([*params, *batch, *entering], made, programs[index], constants_of(parts.closed))
        cotangents_in = [var for var in entering if var in wants[index]]
        layers.append(
            ForwardLayer(
                closed=closed,
                params=tuple(parts.params[var] for var in params),
                batch=tuple(parts.batch[var] for var in batch),
                inputs=tuple(ids[var] for var in entering),
                outputs=tuple(ids[var] for var in made),
                cotangent_inputs=tuple(ids[var] for var in cotangents_in),
                cotangent_outputs=tuple(ids[var] for var in made if var in needed_later),
                loss_position=made.index(jaxpr.outvars[0]) if jaxpr.outvars[0] in made else NO_LOSS,
            )
        )
        needed_later.update(cotangents_in)
    values = {number: aval_of(var) for var, number in ids.items()}
    return ForwardLayers(tuple(reversed(layers)), values, tuple(ids[var] for var in variables(jaxpr.outvars)))


def _with_copies(parts: _Loss, run: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a layer and the copies they need, in the order of the loss."""
    allowed = {id(equation) for equation in (*parts.copied, *run)}
    ordered = [equation for equation in parts.closed.jaxpr.eqns if id(equation) in allowed]
    return needed_equations(ordered, [var for equation in run for var in equation.outvars])


def _cotangents(parts: _Loss, programs: Sequence[Sequence[JaxprEqn]]) -> list[set[Var]]:
    """For each layer the variables it reads through which a gradient flows: they depend on a parameter, and the loss on them there."""
    equations = parts.closed.jaxpr.eqns
    from_params = set(parts.params)
    for equation in equations:
        if any(var in from_params for var in variables(equation.invars)):
            from_params.update(var for var in equation.outvars if _is_float(var))
    to_loss = {parts.closed.jaxpr.outvars[0]}
    for equation in reversed(equations):
        if any(var in to_loss for var in equation.outvars):
            to_loss.update(var for var in variables(equation.invars) if _is_float(var))
    return [
        {var for eqn in program if not to_loss.isdisjoint(eqn.outvars) for var in variables(eqn.invars) if var in from_params}
        for program in programs
    ]


def _is_float(var: Var) -> bool:
    return jnp.issubdtype(aval_of(var).dtype, jnp.inexact)
