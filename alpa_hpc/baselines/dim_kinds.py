"""(LayeredStep, Layer) -> the kind of each dim of the layer's variables: batch, inner or border.

Derived, not named. The *batch* is the class (`dim_classes`) of the first dim of a batch input, in whatever it flows into. *Border* dims
are those of a value between layers, or of a class that a matrix product must have whole: hidden size, sequence, head size. The rest is
*inner*: the heads, the width of the MLP, the vocabulary; what Megatron splits.
"""

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache

from jax.extend.core import Var

from alpa_hpc.ir.graph import Atom, variables
from alpa_hpc.ir.work import Layer, LayeredStep
from alpa_hpc.sharding.dim_classes import layer_classes
from alpa_hpc.sharding.strategies.dim_sets import Dim, DimSets
from alpa_hpc.sharding.strategies.rule import shape_of


class DimKind(enum.Enum):
    """What a dim of an activation or weight is."""

    BATCH = enum.auto()
    INNER = enum.auto()
    BORDER = enum.auto()


Kinds = tuple[DimKind, ...]
KindsOf = Callable[[Var], Kinds]


def layer_kinds(step: LayeredStep, layer: Layer) -> KindsOf:
    """The kinds of the dims of a variable of `layer`'s forward or backward."""
    classes = layer_classes(layer)
    batch = _batch_roots(layer, classes, batch_dims(step))
    border = classes.marked_roots() | {classes.find(dim) for var in _border(layer) for dim in _dims(var)}

    def kind(dim: Dim) -> DimKind:
        root = classes.find(dim)
        if root in batch:
            return DimKind.BATCH
        return DimKind.BORDER if root in border else DimKind.INNER

    return lambda var: tuple(map(kind, _dims(var)))


@lru_cache(maxsize=64)
def batch_dims(step: LayeredStep) -> Mapping[int, frozenset[int]]:
    """For each value between layers, its dims that are the batch."""
    found: dict[int, frozenset[int]] = {}
    for layer in step.layers:
        classes = layer_classes(layer)
        roots = _batch_roots(layer, classes, found)
        for value, atom in zip(layer.outputs, layer.forward.jaxpr.outvars, strict=False):
            found[value] = frozenset(d for var in variables([atom]) for _, d in _dims(var) if classes.find((var, d)) in roots)
    return found


def microbatch_rows(step: LayeredStep) -> int:
    """Into how many parts a microbatch can be split at the most: the size of its first dim."""
    return min((int(aval.shape[0]) for aval in step.batch_avals if aval.shape), default=1)


def _batch_roots(layer: Layer, classes: DimSets, known: Mapping[int, frozenset[int]]) -> frozenset[Dim]:
    invars = layer.forward.jaxpr.invars
    first_batch, first_input = len(layer.params), len(layer.params) + len(layer.batch)
    rows = [(var, 0) for var in invars[first_batch:first_input] if shape_of(var)]
    rows += [(var, d) for value, var in zip(layer.inputs, invars[first_input:], strict=True) for d in known.get(value, frozenset[int]())]
    return frozenset(map(classes.find, rows))


def _border(layer: Layer) -> list[Var]:
    forward = layer.forward.jaxpr
    outputs: list[Atom] = list(forward.outvars[: len(layer.outputs)])
    return [*forward.invars[len(layer.params) + len(layer.batch) :], *variables(outputs)]


def _dims(var: Var) -> list[Dim]:
    return [(var, d) for d in range(len(shape_of(var)))]
