"""(Restriction, LayeredStep) -> Restrict: the same sharding problem with strategies forbidden; a baseline has no cost model of its own.

A strategy that breaks a restriction costs infinity. A tensor that cannot be split as it should (an operator without a rule runs whole; a
vector stretched over a batch lies as the vector does) is asked for nothing. What one node decides for several tensors must suit all of
them; where nothing does, the demands go first (what must be split), then what the axes forbid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jax.extend.core import Jaxpr, Var
from numpy.typing import NDArray

from alpa_hpc.baselines.dim_kinds import KindsOf, border_variables, layer_kinds
from alpa_hpc.baselines.restriction import FREE, OF_BATCHES, OF_BORDERS, OF_EXPERTS, Restriction, Storage, storable
from alpa_hpc.baselines.roles import Roles, layer_roles
from alpa_hpc.ir.graph import Atom
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.graph import FREE as FREE_HOME
from alpa_hpc.sharding.graph import EquationRecord
from alpa_hpc.sharding.spec import SpecList
from alpa_hpc.sharding.stage import Restrict, unrestricted

Mask = NDArray[np.bool_]
Lying = tuple[int, Var, SpecList]  # a node, a variable, and the spec that the variable has with each choice of the node


def restrict_to(restriction: Restriction, step: LayeredStep) -> Restrict:
    """What a StagePricer or StageSolver applies to each layer problem of `step`."""
    return unrestricted if restriction == FREE else partial(_restricted, restriction, step)


def _restricted(restriction: Restriction, step: LayeredStep, problem: LayerProblem) -> LayerProblem:
    masks = _Masks.all_allowed(problem)
    _restrict_computation(restriction, layer_kinds(step, problem.layer), problem, masks)
    _restrict_storage(restriction, layer_kinds(step, problem.layer), problem, masks)
    old = problem.problem
    costs = tuple(np.where(mask, seconds, np.inf) for mask, seconds in zip(masks.strictest(), old.node_costs, strict=True))
    return replace(problem, problem=replace(old, node_costs=costs))


@dataclass(frozen=True, slots=True, eq=False)
class _Masks:
    """For each node the strategies that storage, axes and demands allow."""

    stored: tuple[Mask, ...]
    permitted: tuple[Mask, ...]
    demanded: tuple[Mask, ...]

    @classmethod
    def all_allowed(cls, problem: LayerProblem) -> "_Masks":
        """Nothing is forbidden yet."""
        return cls(*(tuple(np.ones(len(costs), np.bool_) for costs in problem.problem.node_costs) for _ in range(3)))

    def demand(self, node: int, flags: Sequence[bool]) -> None:
        """Forbid the strategies that are not flagged, unless that is all of them."""
        if any(flags):
            self.demanded[node][:] &= flags

    def strictest(self) -> list[Mask]:
        """For each node the strictest mask that leaves a strategy."""
        found: list[Mask] = []
        for stored, permitted, demanded in zip(self.stored, self.permitted, self.demanded, strict=True):
            levels = (stored & permitted & demanded, stored & permitted, stored)
            found.append(next((mask for mask in levels if mask.any()), np.ones_like(stored)))
        return found


def _restrict_computation(restriction: Restriction, kinds_of: KindsOf, problem: LayerProblem, masks: _Masks) -> None:
    """What forward and backward compute lies as the axes say; values between layers by themselves, so that neighbours agree."""
    roles, wide = layer_roles(problem.layer), _wide_axes(problem)
    for node, var, specs in _computed(problem, roles, with_gradients=restriction.updates is not Storage.SPLIT):
        kinds = kinds_of(var)
        masks.permitted[node][:] &= [restriction.permits(spec, kinds) for spec in specs]
        if var not in roles.weights:
            masks.demand(node, [restriction.splits(spec, kinds, wide, OF_BATCHES) for spec in specs])
    for node, var, specs in _borders(problem):
        kinds = kinds_of(var)
        masks.demand(node, [restriction.splits(spec, kinds, wide, OF_BORDERS) for spec in specs])


def _restrict_storage(restriction: Restriction, kinds_of: KindsOf, problem: LayerProblem, masks: _Masks) -> None:
    """Parameters, batch inputs and what updates work on lie as the restriction says."""
    roles, wide = layer_roles(problem.layer), _wide_axes(problem)
    experts = {position for var, _ in roles.experts for position in roles.weights[var]}
    invars = problem.layer.forward.jaxpr.invars
    updates = {update.work.param: update.gradient for update in problem.updates} | dict(problem.replicas)

    def store(tensor: int, var: Var, how: Storage) -> None:
        stored, kinds = problem.tensors[tensor], kinds_of(var)
        permitted = [restriction.permits(spec, kinds) for spec in stored.specs]
        masks.stored[stored.home][:] &= storable(how, stored.specs, stored.shape, permitted)

    for position, (param, tensor) in enumerate(zip(problem.layer.params, problem.params, strict=True)):
        store(tensor, invars[position], restriction.matrices if position in roles.matrices else restriction.vectors)
        store(updates[param], invars[position], restriction.updates)
        if position in experts:
            home, kinds = problem.tensors[tensor], kinds_of(invars[position])
            masks.demand(home.home, [restriction.splits(spec, kinds, wide, OF_EXPERTS) for spec in home.specs])
    for number, tensor in enumerate(problem.batch, start=len(problem.params)):
        store(tensor, invars[number], restriction.batch)


def _wide_axes(problem: LayerProblem) -> list[int]:
    """The axes of several devices: those that split something."""
    return sorted({axis for tensor in problem.tensors for spec in tensor.specs for dim in spec.dims for axis in dim})


def _borders(problem: LayerProblem) -> Iterator[Lying]:
    """How values between layers, and their cotangents, can lie."""
    variable_of = dict(border_variables(problem.layer))
    for port in (*problem.inputs, *problem.outputs, *problem.cotangent_inputs, *problem.cotangent_outputs):
        if port.value in variable_of:
            tensor = problem.tensors[port.tensor]
            yield tensor.home, variable_of[port.value], tensor.specs


def _computed(problem: LayerProblem, roles: Roles, *, with_gradients: bool) -> Iterator[Lying]:
    """How what forward and backward compute and read can lie: all but what weights alone make, and perhaps what only gradients need."""
    yield from _borders(problem)
    elsewhere = {FREE_HOME, *problem.borders}
    for program in (problem.forward, problem.backward):
        flat = program.jaxpr.jaxpr
        skipped = frozenset[Var]() if with_gradients else _gradient_variables(flat, program.records)
        for node, var, specs in _lying_in(problem, program, roles.weights):
            if node not in elsewhere and var not in skipped:
                yield node, var, specs


def _gradient_variables(flat: Jaxpr, records: Sequence[EquationRecord]) -> frozenset[Var]:
    """Variables that linear operators alone take to a gradient."""
    return frozenset(
        eqn.outvars[position] for eqn, record in zip(flat.eqns, records, strict=True) for position in record.work.may_stay_partial
    )


def _lying_in(problem: LayerProblem, program: Program, weights: Mapping[Var, frozenset[int]]) -> Iterator[Lying]:
    flat = program.jaxpr.jaxpr
    for var, number in zip(flat.invars, program.inputs, strict=True):
        if var not in weights:
            yield problem.tensors[number].home, var, problem.tensors[number].specs
    for eqn, record in zip(flat.eqns, program.records, strict=True):
        if record.node == FREE_HOME or all(var in weights for var in eqn.outvars):
            continue
        for var, number in zip(eqn.outvars, record.results, strict=True):
            yield problem.tensors[number].home, var, problem.tensors[number].specs
        yield from _lying_at(record, eqn.invars, eqn.outvars)


def _lying_at(record: EquationRecord, invars: Sequence[Atom], outvars: Sequence[Var]) -> Iterator[Lying]:
    for position, atom in enumerate(invars):
        if isinstance(atom, Var):
            yield record.node, atom, tuple(plan.operands[position] for plan in record.plans)
    for position, var in enumerate(outvars):
        yield record.node, var, tuple(plan.raw[position] for plan in record.plans)
