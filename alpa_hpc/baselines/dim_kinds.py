"""(LayeredStep, Layer) -> the kind of each dim of the layer's variables: batch, expert, token, border or inner.

Derived, not named; a kind is that of a whole class of dims (`dim_classes`), and of several the first in this order. The *batch* is the
first dim of a batch input, in whatever it flows into. *Expert* and *token* dims are what products with weights make them (`roles`):
experts, and what lies beside the batch in front of a weight, as the sequence does. *Border* dims are the others of a value between layers,
or of a class that a matrix product must have whole: hidden size, head size. The rest is *inner*: the heads, the width of the MLP, the
vocabulary; what Megatron splits.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax.extend.core import Var

from alpa_hpc.baselines.roles import layer_roles
from alpa_hpc.ir.graph import variables
from alpa_hpc.ir.work import Layer, LayeredStep
from alpa_hpc.sharding.dim_classes import layer_classes
from alpa_hpc.sharding.strategies.dim_sets import Dim, DimSets, dims_of
from alpa_hpc.sharding.strategies.rule import shape_of


class DimKind(enum.Enum):
    """What a dim of an activation or weight is."""

    BATCH = enum.auto()
    EXPERT = enum.auto()
    TOKEN = enum.auto()
    BORDER = enum.auto()
    INNER = enum.auto()


Kinds = tuple[DimKind, ...]
KindsOf = Callable[[Var], Kinds]


def layer_kinds(step: LayeredStep, layer: Layer) -> KindsOf:
    """The kinds of the dims of a variable of `layer`'s forward or backward."""
    inside, between = layer_classes(layer), step_classes(step)

    def kind(dim: Dim) -> DimKind:
        root = between.joined.find(inside.find(dim))
        return next((kind for kind, members in between.members.items() if root in members), DimKind.INNER)

    return lambda var: tuple(map(kind, dims_of(var)))


@dataclass(frozen=True, slots=True, eq=False)
class StepClasses:
    """Classes of dims of a whole step: those of its layers, joined where a value goes from layer to layer; the classes of each kind."""

    joined: DimSets
    members: Mapping[DimKind, frozenset[Dim]]


@lru_cache(maxsize=64)
def step_classes(step: LayeredStep) -> StepClasses:
    """The classes of a step, so that a dim is of one kind in all layers that see it."""
    joined, seen = DimSets(), dict[tuple[int, int], Dim]()
    found: dict[DimKind, list[Dim]] = {kind: [] for kind in DimKind if kind is not DimKind.INNER}
    for layer in step.layers:
        classes, roles = layer_classes(layer), layer_roles(layer)
        border = [(value, dim) for value, var in border_variables(layer) for dim in dims_of(var)]
        for value, dim in border:
            root = classes.find(dim)
            joined.join(root, seen.setdefault((value, dim[1]), root))
        rows = [(var, 0) for var in batch_variables(layer)]
        for kind, dims in (
            (DimKind.BATCH, rows),
            (DimKind.EXPERT, roles.experts),
            (DimKind.TOKEN, roles.tokens),
            (DimKind.BORDER, (*classes.marked_roots(), *(dim for _, dim in border))),
        ):
            found[kind] += map(classes.find, dims)
    return StepClasses(joined, {kind: frozenset(map(joined.find, dims)) for kind, dims in found.items()})


def border_variables(layer: Layer) -> list[tuple[int, Var]]:
    """(value, variable of the forward) for each value that comes into a layer or leaves it."""
    forward = layer.forward.jaxpr
    arriving = zip(layer.inputs, forward.invars[len(layer.params) + len(layer.batch) :], strict=True)
    leaving = ((value, atom) for value, atom in zip(layer.outputs, forward.outvars, strict=False) if isinstance(atom, Var))
    return [*arriving, *leaving]


def batch_variables(layer: Layer) -> list[Var]:
    """The batch inputs that have rows: all but scalars and the words of a key of random numbers."""
    forward, first = layer.forward.jaxpr, len(layer.params)
    keys = {atom for eqn in forward.eqns if eqn.primitive.name == "random_wrap" for atom in variables(eqn.invars)}
    return [var for var in forward.invars[first : first + len(layer.batch)] if shape_of(var) and var not in keys]


def microbatch_rows(step: LayeredStep) -> int:
    """Into how many parts a microbatch can be split at the most: the size of its first dim."""
    return min((shape_of(var)[0] for layer in step.layers for var in batch_variables(layer)), default=1)
