"""(Restriction, LayeredStep) -> Restrict: the same sharding problem with strategies forbidden; a baseline has no cost model of its own.

A restriction says what kind of dim (`dim_kinds`) each mesh axis may split in forward and backward. A strategy that breaks it costs
infinity. Updates stay free: weight-update sharding is on for all.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from alpa_hpc.baselines.dim_kinds import DimKind, Kinds, layer_kinds
from alpa_hpc.ir.graph import Atom
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.graph import FREE as FREE_HOME
from alpa_hpc.sharding.graph import EquationRecord
from alpa_hpc.sharding.spec import Spec, SpecList
from alpa_hpc.sharding.stage import Restrict, unrestricted

Mask = NDArray[np.bool_]
Lying = tuple[int, Atom, SpecList]  # a node, a variable, and the spec that the variable has with each choice of the node


class AxisUse(enum.Enum):
    """What a mesh axis may split."""

    ANY = enum.auto()
    """any dim"""
    BATCH = enum.auto()
    """the batch, of every tensor that has one, and nothing else"""
    NOT_BATCH = enum.auto()
    """any dim but the batch"""
    INNER = enum.auto()
    """inner dims"""


PERMITTED = {
    AxisUse.ANY: frozenset(DimKind),
    AxisUse.BATCH: frozenset({DimKind.BATCH}),
    AxisUse.NOT_BATCH: frozenset({DimKind.INNER, DimKind.BORDER}),
    AxisUse.INNER: frozenset({DimKind.INNER}),
}


@dataclass(frozen=True, slots=True)
class Restriction:
    """What axis 0 and axis 1 may split."""

    name: str
    axes: tuple[AxisUse, AxisUse]

    def permits(self, spec: Spec, kinds: Kinds) -> bool:
        """Whether a tensor whose dims are `kinds` may lie so."""
        return all(kind in PERMITTED[self.axes[axis]] for dim, kind in zip(spec.dims, kinds, strict=True) for axis in dim)

    def obeys(self, spec: Spec, kinds: Kinds, wide: Sequence[int]) -> bool:
        """Whether it may, and its batch, if any, is split over all axes that are for the batch (of those in `wide`: of several devices)."""
        batch = [axis for dim, kind in zip(spec.dims, kinds, strict=True) if kind is DimKind.BATCH for axis in dim]
        wanted = [axis for axis in wide if self.axes[axis] is AxisUse.BATCH and DimKind.BATCH in kinds]
        return self.permits(spec, kinds) and set(wanted) <= set(batch)


FREE = Restriction("free", (AxisUse.ANY, AxisUse.ANY))
BATCH_ON_AXIS_0 = Restriction("batch on axis 0", (AxisUse.BATCH, AxisUse.NOT_BATCH))
"""The original's force_batch_dim_to_mesh_dim=0."""
MEGATRON = Restriction("Megatron", (AxisUse.BATCH, AxisUse.INNER))
"""Data parallel over axis 0; over axis 1 columns of qkv and up, rows of out and down, the vocabulary; no sequence parallelism."""


def restrict_to(restriction: Restriction, step: LayeredStep) -> Restrict:
    """What a StagePricer or StageSolver applies to each layer problem of `step`."""
    return unrestricted if restriction == FREE else partial(_restricted, restriction, step)


def _restricted(restriction: Restriction, step: LayeredStep, problem: LayerProblem) -> LayerProblem:
    old = problem.problem
    obeying = [np.ones(len(costs), np.bool_) for costs in old.node_costs]
    permitted = [mask.copy() for mask in obeying]
    wide = sorted({axis for tensor in problem.tensors for spec in tensor.specs for dim in spec.dims for axis in dim})
    kinds_of = layer_kinds(step, problem.layer)
    for node, atom, specs in _lying(problem):
        if node != FREE_HOME and isinstance(atom, Var):
            kinds = kinds_of(atom)
            obeying[node] &= [restriction.obeys(spec, kinds, wide) for spec in specs]
            permitted[node] &= [restriction.permits(spec, kinds) for spec in specs]
    masks = [_first_possible(*pair) for pair in zip(obeying, permitted, strict=True)]
    costs = tuple(np.where(mask, seconds, np.inf) for mask, seconds in zip(masks, old.node_costs, strict=True))
    return replace(problem, problem=replace(old, node_costs=costs))


def _first_possible(*masks: Mask) -> Mask:
    """The strictest mask that leaves a strategy: an operator without a rule runs whole, so it cannot split the batch."""
    return next((mask for mask in masks if mask.any()), np.ones_like(masks[0]))


def _lying(problem: LayerProblem) -> Iterator[Lying]:
    """How all tensors of forward, backward and the border can lie."""
    layer = problem.layer
    forward = layer.forward.jaxpr
    values = dict(zip(layer.inputs, forward.invars[len(layer.params) + len(layer.batch) :], strict=True))
    values.update({v: atom for v, atom in zip(layer.outputs, forward.outvars, strict=False) if isinstance(atom, Var)})
    for port in (*problem.cotangent_inputs, *problem.outputs, *problem.cotangent_outputs):
        tensor = problem.tensors[port.tensor]
        if port.value in values:
            yield tensor.home, values[port.value], tensor.specs
    yield from _lying_in(problem, problem.forward)
    yield from _lying_in(problem, problem.backward)


def _lying_in(problem: LayerProblem, program: Program) -> Iterator[Lying]:
    flat = program.jaxpr.jaxpr
    for var, number in zip(flat.invars, program.inputs, strict=True):
        yield problem.tensors[number].home, var, problem.tensors[number].specs
    for eqn, record in zip(flat.eqns, program.records, strict=True):
        for var, number in zip(eqn.outvars, record.results, strict=True):
            yield problem.tensors[number].home, var, problem.tensors[number].specs
        yield from _lying_at(record, eqn.invars, eqn.outvars)


def _lying_at(record: EquationRecord, invars: Sequence[Atom], outvars: Sequence[Var]) -> Iterator[Lying]:
    if record.node == FREE_HOME:
        return
    for position, atom in enumerate(invars):
        yield record.node, atom, tuple(plan.operands[position] for plan in record.plans)
    for position, var in enumerate(outvars):
        yield record.node, var, tuple(plan.raw[position] for plan in record.plans)
