"""Layer -> which of its variables are made of weights alone, and what its matrix products make of the weights' dims.

Derived from the equations, not from names: a *matrix* is a parameter that a product, convolution or lookup reads; an *expert* dim is one
along which a product has a matrix for each of several (GShard's experts); *token* dims are the rows that all go through the same matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax.extend.core import Jaxpr, JaxprEqn, Var

from alpa_hpc.ir.graph import variables
from alpa_hpc.ir.work import Layer
from alpa_hpc.sharding.equation_work import CONTRACTIONS
from alpa_hpc.sharding.strategies.dim_sets import Dim
from alpa_hpc.sharding.strategies.rule import shape_of


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """What a layer's forward and backward tell of it.

    weights:  each variable that depends on parameters and constants alone -> the positions in `layer.params` of those parameters
    matrices: positions of the parameters that products, convolutions and lookups read
    experts:  expert dims of the variables that are multiplied
    tokens:   token dims of the activations that are multiplied
    """

    weights: Mapping[Var, frozenset[int]]
    matrices: frozenset[int]
    experts: frozenset[Dim]
    tokens: frozenset[Dim]


@lru_cache(maxsize=256)
def layer_roles(layer: Layer) -> Roles:
    """The roles of a layer's variables."""
    weights: dict[Var, frozenset[int]] = {}
    for program in (layer.forward.jaxpr, layer.backward.jaxpr):
        weights.update(_made_of_weights(program, len(layer.params)))
    uses = [(eqn, position) for eqn in layer.forward.jaxpr.eqns for position in _weight_operands(eqn, weights)]
    matrices = frozenset(param for eqn, position in uses for param in weights[_var(eqn, position)])
    products = [(eqn, position) for eqn, position in uses if eqn.primitive.name == "dot_general"]
    experts = frozenset(dim for eqn, position in products for dim in _batch_dims(eqn, position))
    return Roles(weights, matrices, experts, frozenset(dim for eqn, position in products for dim in _row_dims(eqn, 1 - position)))


def _made_of_weights(program: Jaxpr, num_params: int) -> dict[Var, frozenset[int]]:
    made = {var: frozenset((position,)) for position, var in enumerate(program.invars[:num_params])}
    constants = set(program.constvars)
    for eqn in program.eqns:
        read = variables(eqn.invars)
        if any(var not in made and var not in constants for var in read):
            continue
        sources = frozenset[int]().union(*(made[var] for var in read if var in made))
        if sources:
            made.update(dict.fromkeys(eqn.outvars, sources))
        else:
            constants.update(eqn.outvars)
    return made


def _weight_operands(eqn: JaxprEqn, weights: Mapping[Var, frozenset[int]]) -> Iterator[int]:
    """Positions of the weights that a product, convolution or lookup applies to something else."""
    if eqn.primitive.name in CONTRACTIONS and any(var not in weights for var in variables(eqn.invars)):
        yield from (position for position, atom in enumerate(eqn.invars) if isinstance(atom, Var) and atom in weights)


def _var(eqn: JaxprEqn, position: int) -> Var:
    atom = eqn.invars[position]
    assert isinstance(atom, Var), "a literal is no weight"
    return atom


def _batch_dims(eqn: JaxprEqn, position: int) -> Iterator[Dim]:
    _, batch = eqn.params["dimension_numbers"]
    var = _var(eqn, position)
    return ((var, d) for d in batch[position] if shape_of(var)[d] > 1)


def _row_dims(eqn: JaxprEqn, position: int) -> Iterator[Dim]:
    contracted, batch = eqn.params["dimension_numbers"]
    var = _var(eqn, position)
    return ((var, d) for d in range(len(shape_of(var))) if d not in (*contracted[position], *batch[position]))
