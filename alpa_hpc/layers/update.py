"""TracedStep -> UpdateStep: what follows the loss, split into one program a parameter, scalar work, and one round of reductions.

Every equation gets an owner: the one parameter that reaches it (by its gradient, itself or its optimiser state), or nobody (`SHARED`).
A scalar of one owner that another reads, or an add / max / and tree over scalars of several owners, becomes a reduction; its result is
shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from alpa_hpc.ir.check import check_flat
from alpa_hpc.ir.graph import Atom, assemble, aval_of, constants_of, reached, variables
from alpa_hpc.ir.inline import inline_update
from alpa_hpc.ir.key import content_key
from alpa_hpc.ir.reference import finish
from alpa_hpc.ir.trace import TracedStep
from alpa_hpc.ir.work import ParamUpdate, ReductionKind, UpdateStep
from alpa_hpc.layers.owners import SHARED, Owned, Reduced, assign_owners, join_function


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """The owned equations and what is derived from them once."""

    owned: Owned
    constants: dict[Var, ArrayLike]
    varying: set[Var]
    scalar_inputs: set[Var]
    maker: dict[Var, int]


def split_update(traced: TracedStep) -> UpdateStep:
    """Split `traced.after` by parameter. Raises TraceError for an update that joins parameters in another way than by scalars, once."""
    whole = _whole_update(traced)
    owned = assign_owners(whole, params=traced.params, state_names=traced.state_names, num_extras=traced.num_values + len(traced.aux_kinds))
    results = [reduced.result for reduced in owned.reductions]
    inputs = {*owned.extras, *(var for leaf, var in enumerate(owned.leaves) if owned.leaf_owners[leaf] == SHARED), *results}
    varying = reached(owned.equations, {*owned.gradients, *owned.leaves, *owned.extras, *results})
    maker = {var: number for number, equation in enumerate(owned.equations) for var in equation.outvars}
    split = _Split(owned, constants_of(whole), varying, inputs, maker)
    partials = {param: _partials(split, param) for param in range(len(traced.params))}
    updates = {param: _update(split, param) for param in range(len(traced.params))}
    before = list(dict.fromkeys(var for _, scalars in partials.values() for var in scalars))
    after = list(dict.fromkeys(var for _, scalars in updates.values() for var in scalars))
    return UpdateStep(
        params=tuple(_param_update(split, traced, param, partials[param], updates[param], before, after) for param in partials),
        reductions=tuple(reduced.kind for reduced in owned.reductions),
        shared_leaves=tuple(leaf for leaf, owner in enumerate(owned.leaf_owners) if owner == SHARED),
        shared_before=_shared(split, before, with_results=()),
        shared_after=_shared(split, [*after, *owned.new_shared, *owned.metrics], with_results=results),
        num_scalars_after=len(after),
    )


def _whole_update(traced: TracedStep) -> ClosedJaxpr:
    """[gradient sums, state leaves, accumulated loss outputs] -> [new state leaves, metrics], flat."""
    state = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.state_avals]
    sums = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.loss.out_avals]
    means = jax.make_jaxpr(lambda *sums: finish(traced, *sums))(sums, [state[leaf] for leaf in traced.params])
    after = traced.after.jaxpr
    leaves, read = after.invars[: len(state)], after.invars[len(state) :]
    renamed = dict(zip(read, means.jaxpr.outvars, strict=True))
    equations = [*means.jaxpr.eqns, *(equation.replace(invars=_renamed(equation.invars, renamed)) for equation in after.eqns)]
    sum_vars, gradients = means.jaxpr.invars[: len(sums)], means.jaxpr.invars[len(sums) :]
    constants = {**constants_of(means), **constants_of(traced.after)}
    return inline_update(assemble([*gradients, *leaves, *sum_vars], _renamed(after.outvars, renamed), equations, constants))


def _renamed(atoms: Sequence[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def _program(split: _Split, param: int, outputs: Sequence[Atom], last: Sequence[JaxprEqn]) -> tuple[ClosedJaxpr, list[Var]]:
    """A program of one parameter, [gradient, leaves, scalars] -> outputs, and the shared scalars it reads, in order of use."""
    owned = split.owned
    kept: set[int] = set()
    made_last = {var for equation in last for var in equation.outvars}
    mine = [owned.gradients[param], *(owned.leaves[leaf] for leaf in owned.leaves_of[param])]
    pending = [*variables(outputs), *(var for equation in last for var in variables(equation.invars))]
    scalars: set[Var] = set()
    while pending:
        var = pending.pop()
        if var in mine or var in split.constants or var in scalars or var in made_last:
            continue
        if _is_shared_scalar(split, var, param):
            scalars.add(var)
        elif split.maker[var] not in kept:
            kept.add(split.maker[var])
            pending += variables(owned.equations[split.maker[var]].invars)
    chosen = [*(owned.equations[number] for number in sorted(kept)), *last]
    used = dict.fromkeys([*(var for equation in chosen for var in variables(equation.invars)), *variables(outputs)])
    ordered = [var for var in used if var in scalars]
    return check_flat(assemble([*mine, *ordered], outputs, chosen, split.constants), where="update of a parameter"), ordered


def _is_shared_scalar(split: _Split, var: Var, param: int) -> bool:
    """Whether `var` is made once for all parameters: a shared input, or a scalar that is neither the parameter's own nor a constant."""
    if var in split.scalar_inputs:
        return True
    if split.owned.owner.get(var, SHARED) == param or var not in split.varying:
        return False
    return aval_of(var).shape == () and var in split.owned.owner


def _partials(split: _Split, param: int) -> tuple[ClosedJaxpr, list[Var]]:
    outputs: list[Atom] = []
    extra: list[JaxprEqn] = []
    for reduced in split.owned.reductions:
        operands = [var for var in reduced.operands if split.owned.owner[var] == param]
        if operands:
            output, equations = _joined(reduced, operands)
            outputs.append(output)
            extra += equations
    return _program(split, param, outputs, extra)


def _joined(reduced: Reduced, operands: Sequence[Var]) -> tuple[Var, list[JaxprEqn]]:
    """One rank-0 value of a parameter's operands of a reduction."""
    closed = _join_program(reduced.kind, tuple(jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in operands))
    made = {var: Var(var.aval) for equation in closed.jaxpr.eqns for var in equation.outvars}
    names = made | dict(zip(closed.jaxpr.invars, operands, strict=True))
    equations = [
        equation.replace(invars=_renamed(equation.invars, names), outvars=[made[var] for var in equation.outvars])
        for equation in closed.jaxpr.eqns
    ]
    [output] = variables(_renamed(closed.jaxpr.outvars, names))
    return output, equations


@lru_cache(maxsize=256)
def _join_program(kind: ReductionKind, operands: tuple[jax.ShapeDtypeStruct, ...]) -> ClosedJaxpr:
    """[scalars of size 1] -> their join, of rank 0; most parameters have the same."""
    join = join_function(kind)

    def joined(*parts: jax.Array) -> jax.Array:
        scalars = [lax.reshape(part, ()) if part.shape else part for part in parts]
        result = scalars[0]
        for scalar in scalars[1:]:
            result = join(result, scalar)
        return result

    return jax.make_jaxpr(joined)(*operands)


def _update(split: _Split, param: int) -> tuple[ClosedJaxpr, list[Var]]:
    owned = split.owned
    return _program(split, param, [owned.new_leaves[leaf] for leaf in owned.leaves_of[param]], [])


def _param_update(  # noqa: PLR0913 - the two programs and the two lists that number their scalars
    split: _Split,
    traced: TracedStep,
    param: int,
    partials: tuple[ClosedJaxpr, list[Var]],
    update: tuple[ClosedJaxpr, list[Var]],
    before: Sequence[Var],
    after: Sequence[Var],
) -> ParamUpdate:
    owned = split.owned
    mine = tuple(number for number, reduced in enumerate(owned.reductions) if any(owned.owner[var] == param for var in reduced.operands))
    return ParamUpdate(
        param=traced.params[param],
        key=content_key(partials[0], update[0], [owned.reductions[number].kind.value for number in mine]),
        leaves=owned.leaves_of[param],
        scalars_in=tuple(before.index(var) for var in partials[1]),
        scalars_out=tuple(after.index(var) for var in update[1]),
        reductions=mine,
        partials=partials[0],
        update=update[0],
    )


def _shared(split: _Split, outputs: Sequence[Atom], *, with_results: Sequence[Var]) -> ClosedJaxpr:
    owned = split.owned
    leaves = [var for leaf, var in enumerate(owned.leaves) if owned.leaf_owners[leaf] == SHARED]
    closed = assemble([*leaves, *owned.extras, *with_results], outputs, owned.equations, split.constants)
    return check_flat(closed, where="shared part of the update")
