"""TracedStep -> UpdateStep: what follows the loss, split into one program a parameter, scalar work, and rounds of reductions.

Every equation gets an owner: the one parameter that reaches it (by its gradient, itself or its optimiser state), or nobody (`SHARED`).
A scalar of one owner that another reads, or an add / max / and tree over scalars of several owners, becomes a reduction; its result is
shared. Reductions whose operands depend on the results of others (the norm of clipped gradients) are made in a later round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.check import check_flat
from alpa_hpc.ir.graph import Atom, assemble, aval_of, constants_of, reached, variables
from alpa_hpc.ir.inline import inline_update
from alpa_hpc.ir.key import content_key
from alpa_hpc.ir.reference import finish
from alpa_hpc.ir.trace import TracedStep
from alpa_hpc.ir.work import ParamPartials, ParamUpdate, ReductionKind, ReductionRound, UpdateStep
from alpa_hpc.layers.owners import SHARED, Owned, Reduced, assign_owners, join_function

MOST_ROUNDS = 8  # of reductions; each is a program of its own, and all meshes wait for each


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """The owned equations and what is derived from them once; `rounds[r]` = the reductions of round r."""

    owned: Owned
    rounds: tuple[tuple[Reduced, ...], ...]
    constants: dict[Var, ArrayLike]
    varying: set[Var]
    scalar_inputs: set[Var]
    maker: dict[Var, int]


def split_update(traced: TracedStep) -> UpdateStep:
    """Split `traced.after` by parameter. Raises TraceError where parameters are joined other than by scalars, or in too many rounds."""
    whole = _whole_update(traced)
    owned = assign_owners(whole, params=traced.params, state_names=traced.state_names, num_extras=traced.num_values + len(traced.aux_kinds))
    rounds = _rounds(owned)
    results = [reduced.result for reductions in rounds for reduced in reductions]
    inputs = {*owned.extras, *(var for leaf, var in enumerate(owned.leaves) if owned.leaf_owners[leaf] == SHARED), *results}
    varying = reached(owned.equations, {*owned.gradients, *owned.leaves, *owned.extras, *results})
    maker = {var: number for number, equation in enumerate(owned.equations) for var in equation.outvars}
    split = _Split(owned, rounds, constants_of(whole), varying, inputs, maker)
    parts = [_round(split, number, len(traced.params)) for number in range(len(rounds))]
    updates = [_update(split, param) for param in range(len(traced.params))]
    after = list(dict.fromkeys(var for _, scalars in updates for var in scalars))
    return UpdateStep(
        params=tuple(
            _param_update(split, traced, param, tuple(partials[param] for _, partials in parts), update, after)
            for param, update in enumerate(updates)
        ),
        rounds=tuple(one for one, _ in parts),
        shared_leaves=tuple(leaf for leaf, owner in enumerate(owned.leaf_owners) if owner == SHARED),
        shared_after=_shared(split, [*after, *owned.new_shared, *owned.metrics], with_results=results),
        num_scalars_after=len(after),
    )


def _rounds(owned: Owned) -> tuple[tuple[Reduced, ...], ...]:
    """The reductions in the rounds in which their operands are known."""
    count = max((reduced.round + 1 for reduced in owned.reductions), default=0)
    if count > MOST_ROUNDS:
        raise TraceError(
            f"the update needs {count} rounds of reductions over parameters, each of scalars that depend on the one before; at most "
            f"{MOST_ROUNDS} are made. Join them by add, max, min, and, or (as optax.tree.norm does), not one by one."
        )
    return tuple(tuple(reduced for reduced in owned.reductions if reduced.round == number) for number in range(count))


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


def _round(split: _Split, number: int, num_params: int) -> tuple[ReductionRound, list[ParamPartials]]:
    """A round of reductions, and each parameter's part in it."""
    reductions = split.rounds[number]
    programs = [_partials(split, param, reductions) for param in range(num_params)]
    before = list(dict.fromkeys(var for _, scalars, _ in programs for var in scalars))
    known = [reduced.result for earlier in split.rounds[:number] for reduced in earlier]
    partials = [ParamPartials(tuple(map(before.index, scalars)), mine, program) for program, scalars, mine in programs]
    return ReductionRound(tuple(reduced.kind for reduced in reductions), _shared(split, before, with_results=known)), partials


def _partials(split: _Split, param: int, reductions: Sequence[Reduced]) -> tuple[ClosedJaxpr, list[Var], tuple[int, ...]]:
    """A parameter's program of a round, the shared scalars it reads, and the reductions it has a part in."""
    mine: list[int] = []
    outputs: list[Atom] = []
    extra: list[JaxprEqn] = []
    for number, reduced in enumerate(reductions):
        operands = [var for var in reduced.operands if split.owned.owner[var] == param]
        if operands:
            output, equations = _joined(reduced, operands)
            mine.append(number)
            outputs.append(output)
            extra += equations
    return *_program(split, param, outputs, extra), tuple(mine)


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


def _param_update(  # noqa: PLR0913 - its programs and the list that numbers their scalars
    split: _Split,
    traced: TracedStep,
    param: int,
    partials: tuple[ParamPartials, ...],
    update: tuple[ClosedJaxpr, list[Var]],
    after: Sequence[Var],
) -> ParamUpdate:
    kinds = [[split.rounds[number][reduction].kind.value for reduction in part.reductions] for number, part in enumerate(partials)]
    return ParamUpdate(
        param=traced.params[param],
        key=content_key([part.program for part in partials], update[0], kinds),
        leaves=split.owned.leaves_of[param],
        scalars=tuple(after.index(var) for var in update[1]),
        partials=partials,
        update=update[0],
    )


def _shared(split: _Split, outputs: Sequence[Atom], *, with_results: Sequence[Var]) -> ClosedJaxpr:
    owned = split.owned
    leaves = [var for leaf, var in enumerate(owned.leaves) if owned.leaf_owners[leaf] == SHARED]
    closed = assemble([*leaves, *owned.extras, *with_results], outputs, owned.equations, split.constants)
    return check_flat(closed, where="shared part of the update")
