"""A layer's programs -> dims that are not worth splitting, for where the whole space of specs is too wide to be searched exactly.

Dims that some operator splits together form a class (the batch, the hidden size, the heads, ...). A class is *awkward* if a matrix product
or a convolution must have one of its dims whole, or if a batched product has two of its dims: the sequence and the head size around
attention, height and width. Splitting it means resharding there, so leaving it out loses little and makes every table smaller. A tensor
whose dims are all awkward keeps them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax.extend.core import Jaxpr, Literal, Var

from alpa_hpc.ir.graph import Atom
from alpa_hpc.ir.inline import HEAVY
from alpa_hpc.ir.work import Layer, LayeredStep
from alpa_hpc.sharding.strategies.contraction import is_batched
from alpa_hpc.sharding.strategies.dim_sets import Dim, DimSets, factor_dims, whole_dims
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import shape_of

Dims = frozenset[int]


@lru_cache(maxsize=64)
def awkward_values(step: LayeredStep) -> Mapping[int, Dims]:
    """For each value between layers, the dims that are awkward in one of the layers it touches: neighbours must see the same specs."""
    found: dict[int, Dims] = {}
    for layer in step.layers:
        dims, forward = awkward_dims(layer), layer.forward.jaxpr
        first_input = len(layer.params) + len(layer.batch)
        touched = (*zip(layer.inputs, forward.invars[first_input:], strict=True), *zip(layer.outputs, forward.outvars, strict=False))
        for value, atom in touched:
            if isinstance(atom, Var):
                found[value] = found.get(value, frozenset[int]()) | dims.get(atom, frozenset[int]())
    return {value: dims for value, dims in found.items() if len(dims) < len(step.values[value].shape)}


@lru_cache(maxsize=64)
def awkward_params(step: LayeredStep) -> Mapping[int, Dims]:
    """For each parameter that several layers read, the dims that are awkward in one of them: all must see the same specs."""
    readers: dict[int, list[Dims]] = {}
    for layer in step.layers:
        dims = awkward_dims(layer)
        for param, var in zip(layer.params, layer.forward.jaxpr.invars, strict=False):
            readers.setdefault(param, []).append(dims.get(var, frozenset[int]()))
    found = {param: frozenset[int]().union(*dims) for param, dims in readers.items() if len(dims) > 1}
    return {param: dims for param, dims in found.items() if len(dims) < len(step.state_avals[param].shape)}


def awkward_dims(layer: Layer) -> Mapping[Var, Dims]:
    """For each variable of the layer's forward and backward, its dims of awkward classes."""
    return _awkward_dims(_programs(layer))


def layer_classes(layer: Layer) -> DimSets:
    """The classes of the dims of the layer's forward and backward."""
    return _classes(_programs(layer))


@dataclass(frozen=True, slots=True)
class _Programs:
    """What decides the classes of a layer; equal layers share it. `returned` = positions of the outputs that have a cotangent."""

    forward: Jaxpr
    backward: Jaxpr
    num_outputs: int
    returned: tuple[int, ...]
    num_cotangents_out: int


def _programs(layer: Layer) -> _Programs:
    returned = tuple(layer.outputs.index(value) for value in layer.cotangent_outputs)
    return _Programs(layer.forward.jaxpr, layer.backward.jaxpr, len(layer.outputs), returned, len(layer.cotangent_inputs))


@lru_cache(maxsize=256)
def _awkward_dims(programs: _Programs) -> Mapping[Var, Dims]:
    return _marked(_classes(programs), (programs.forward, programs.backward))


@lru_cache(maxsize=256)
def _classes(programs: _Programs) -> DimSets:
    classes = DimSets()
    forward, backward = programs.forward, programs.backward
    for program in (forward, backward):
        _join_equations(program, classes)
    num_reads = len(forward.invars)
    for a, b in zip(forward.invars, backward.invars, strict=False):
        _join_variables(a, b, classes)
    residuals = forward.outvars[programs.num_outputs :]
    for a, b in zip(residuals, backward.invars[num_reads:], strict=False):
        _join_variables(a, b, classes)
    for position, cotangent in zip(programs.returned, backward.invars[num_reads + len(residuals) :], strict=True):
        _join_variables(forward.outvars[position], cotangent, classes)
    for param, gradient in zip(forward.invars, backward.outvars[programs.num_cotangents_out :], strict=False):
        _join_variables(param, gradient, classes)
    for program in (forward, backward):
        _mark_squares(program, classes)
    return classes


def _join_equations(program: Jaxpr, classes: DimSets) -> None:
    for eqn in program.eqns:
        rule = rule_of(eqn)
        if rule is None:
            continue
        first: dict[int, Dim] = {}
        for factor, dim in factor_dims(eqn, rule):
            classes.join(dim, first.setdefault(factor, dim))
        if eqn.primitive.name in HEAVY:
            for dim in whole_dims(eqn, rule):
                classes.mark(dim)


def _mark_squares(program: Jaxpr, classes: DimSets) -> None:
    """Mark the class of which a batched product has two loops (queries by keys): only one of them could be split."""
    for eqn in program.eqns:
        rule = rule_of(eqn) if is_batched(eqn) else None
        if rule is None:
            continue
        factor_of: dict[Dim, int] = {}
        for factor, dim in factor_dims(eqn, rule):
            if factor_of.setdefault(classes.find(dim), factor) != factor:
                classes.mark(dim)


def _join_variables(a: Atom, b: Atom, classes: DimSets) -> None:
    if isinstance(a, Literal) or isinstance(b, Literal) or shape_of(a) != shape_of(b):
        return
    for d in range(len(shape_of(a))):
        classes.join((a, d), (b, d))


def _marked(classes: DimSets, programs: tuple[Jaxpr, ...]) -> Mapping[Var, Dims]:
    roots = classes.marked_roots()
    found: dict[Var, Dims] = {}
    for program in programs:
        atoms = (*program.invars, *(var for eqn in program.eqns for var in eqn.outvars))
        for var in atoms:
            dims = frozenset(d for d, size in enumerate(shape_of(var)) if classes.find((var, d)) in roots or size == 1)
            if any(d not in dims for d in range(len(shape_of(var)))):
                found[var] = dims
    return found
