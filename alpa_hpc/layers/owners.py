"""Flat update jaxpr -> an owner for each equation and state leaf, and the reductions that join owners; see `layers/update.py`.

A leaf of the optimiser belongs to the parameter that reaches its new value, found by iterating until nothing changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from alpa_hpc.errors import TraceError
from alpa_hpc.ir.check import short
from alpa_hpc.ir.graph import Atom, aval_of, variables
from alpa_hpc.ir.work import ReductionKind

SHARED = -1
_JOINS = {
    "add": ReductionKind.SUM,
    "add_any": ReductionKind.SUM,
    "max": ReductionKind.MAX,
    "min": ReductionKind.MIN,
    "and": ReductionKind.AND,
    "or": ReductionKind.OR,
}
_OF_BOOLEANS = (ReductionKind.AND, ReductionKind.OR)


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """A reduction: `result` = the join of `operands`, scalars (size 1) of several owners, known once `round` earlier rounds are over."""

    kind: ReductionKind
    operands: tuple[Var, ...]
    result: Var
    round: int


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The update with owners. Each equation reads its owner's variables, shared ones and results of reductions only.

    `owner` has every variable made by an equation; owners are positions in the parameters, or SHARED. `leaves_of` a parameter are those
    that share its fate, itself first.
    """

    gradients: tuple[Var, ...]
    leaves: tuple[Var, ...]
    extras: tuple[Var, ...]
    params: tuple[int, ...]
    leaf_owners: tuple[int, ...]
    leaves_of: tuple[tuple[int, ...], ...]
    equations: list[JaxprEqn]
    owner: dict[Var, int]
    reductions: tuple[Reduced, ...]
    new_leaves: tuple[Atom, ...]
    metrics: tuple[Atom, ...]

    @property
    def new_shared(self) -> list[Atom]:
        """New values of the shared leaves."""
        return [new for new, owner in zip(self.new_leaves, self.leaf_owners, strict=True) if owner == SHARED]


def join_function(kind: ReductionKind) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The binary operation of a reduction."""
    match kind:
        case ReductionKind.SUM:
            return lax.add
        case ReductionKind.MAX:
            return lax.max
        case ReductionKind.MIN:
            return lax.min
        case ReductionKind.AND:
            return lax.bitwise_and
        case ReductionKind.OR:
            return lax.bitwise_or


def assign_owners(whole: ClosedJaxpr, *, params: Sequence[int], state_names: Sequence[str], num_extras: int) -> Owned:
    """Owners of [gradients, state leaves, extras] -> [new leaves, metrics]. Raises TraceError where parameters mix in an unknown way."""
    num_leaves = len(state_names)
    owners = [SHARED] * num_leaves
    for number, leaf in enumerate(params):
        owners[leaf] = number
    while True:
        painter = _Painter(whole, tuple(params), tuple(owners), tuple(state_names), num_extras)
        owned = painter.paint()
        grown = [_grown(owned, painter.readers, leaf) for leaf in range(num_leaves)]
        if grown == owners:
            return painter.finished(owned)
        owners = grown


def _grown(owned: Owned, readers: dict[Var, set[int]], leaf: int) -> int:
    """The owner of a leaf, now that the owner of its new value is known."""
    current, new = owned.leaf_owners[leaf], owned.new_leaves[leaf]
    if current != SHARED or isinstance(new, Literal):
        return current
    if new is owned.leaves[leaf]:
        read_by = readers.get(new, set())
        return next(iter(read_by)) if len(read_by) == 1 and aval_of(new).shape else SHARED
    return owned.owner.get(new, SHARED)


def _leaves_of(params: Sequence[int], leaf_owners: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    leaves = [[first] for first in params]
    for leaf, owner in enumerate(leaf_owners):
        if owner != SHARED and leaf != params[owner]:
            leaves[owner].append(leaf)
    return tuple(map(tuple, leaves))


@dataclass(slots=True, eq=False)
class _Painter:
    """One pass over the update with given owners of the leaves.

    `rounds` of a variable = the rounds of reductions that it waits for, if any. `mixed` = shared scalars that an equation other than a
    join makes of several owners' (the product of two norms): what they meet next is shared, too, so that a row of such equations is one
    round.
    """

    whole: ClosedJaxpr
    params: tuple[int, ...]
    leaf_owners: tuple[int, ...]
    state_names: tuple[str, ...]
    num_extras: int
    owner: dict[Var, int] = field(default_factory=dict)
    rounds: dict[Var, int] = field(default_factory=dict[Var, int])
    mixed: set[Var] = field(default_factory=set[Var])
    joins: dict[Var, tuple[ReductionKind, tuple[Var, ...]]] = field(default_factory=dict)
    results: dict[Var, Var] = field(default_factory=dict)
    reductions: list[Reduced] = field(default_factory=list)
    equations: list[JaxprEqn] = field(default_factory=list)
    readers: dict[Var, set[int]] = field(default_factory=dict)

    def paint(self) -> Owned:
        """Owners of all equations."""
        jaxpr = self.whole.jaxpr
        num_params, num_leaves = len(self.params), len(self.leaf_owners)
        gradients, leaves = jaxpr.invars[:num_params], jaxpr.invars[num_params : num_params + num_leaves]
        self.owner.update({var: number for number, var in enumerate(gradients)})
        self.owner.update(zip(leaves, self.leaf_owners, strict=True))
        for equation in jaxpr.eqns:
            self._equation(equation)
        return Owned(
            gradients=tuple(gradients),
            leaves=tuple(leaves),
            extras=tuple(jaxpr.invars[num_params + num_leaves :]),
            params=self.params,
            leaf_owners=self.leaf_owners,
            leaves_of=_leaves_of(self.params, self.leaf_owners),
            equations=self.equations,
            owner=self.owner,
            reductions=(),
            new_leaves=tuple(jaxpr.outvars[:num_leaves]),
            metrics=tuple(jaxpr.outvars[num_leaves:]),
        )

    def finished(self, owned: Owned) -> Owned:
        """The same with outputs that read reductions where they must."""
        new_leaves = [
            self._output(new, owner, name) for new, owner, name in zip(owned.new_leaves, self.leaf_owners, self.state_names, strict=True)
        ]
        metrics = [self._output(atom, SHARED, "a metric") for atom in owned.metrics]
        return replace(owned, reductions=tuple(self.reductions), new_leaves=tuple(new_leaves), metrics=tuple(metrics))

    def _owner(self, atom: Atom) -> int:
        return SHARED if isinstance(atom, Literal) else self.owner.get(atom, SHARED)

    def _equation(self, equation: JaxprEqn) -> None:
        if self._join(equation):
            return
        owner = self._equation_owner(equation)
        operands = [self._resolved(atom, owner) for atom in equation.invars]
        for var in variables(operands):
            self.readers.setdefault(var, set()).add(owner)
        self.equations.append(equation.replace(invars=operands))
        self.owner.update(dict.fromkeys(equation.outvars, owner))
        if waits := max((self.rounds.get(var, 0) for var in variables(operands)), default=0):
            self.rounds.update(dict.fromkeys(equation.outvars, waits))
        if owner == SHARED and self._mixes(equation):
            self.mixed.update(equation.outvars)

    def _join(self, equation: JaxprEqn) -> bool:
        """Whether the equation joins scalars of several owners; it then becomes (a part of) a reduction."""
        kind = _JOINS.get(equation.primitive.name)
        [*results] = equation.outvars
        if kind is None or aval_of(results[0]).shape or (kind in _OF_BOOLEANS and aval_of(results[0]).dtype != np.bool_):
            return False
        operands: list[Var] = []
        for atom in equation.invars:
            if isinstance(atom, Var) and atom in self.joins and self.joins[atom][0] is kind:
                operands += self.joins[atom][1]
            elif isinstance(atom, Var) and self._owner(atom) != SHARED:
                operands.append(atom)
            else:
                return False
        if len({self.owner[var] for var in operands}) < 2:
            return False
        self.joins[results[0]] = (kind, tuple(operands))
        return True

    def _equation_owner(self, equation: JaxprEqn) -> int:
        owners = self._owners(equation)
        if self._mixes(equation) and all(aval_of(atom).size == 1 for atom in equation.invars):
            return SHARED
        if len(owners) <= 1:
            return next(iter(owners), SHARED)
        large = {self._owner(atom) for atom in equation.invars if isinstance(atom, Var) and aval_of(atom).size != 1} - {SHARED}
        if len(large) <= 1:
            return next(iter(large), SHARED)
        named = ", ".join(f"'{self.state_names[self.params[number]]}'" for number in sorted(large))
        raise TraceError(
            f"the update mixes parameters {named} in one array: {short(equation)}. Parameters may only be joined by scalars "
            "(norms, all-finite); write the update tensor by tensor."
        )

    def _owners(self, equation: JaxprEqn) -> set[int]:
        return {self._owner(atom) for atom in equation.invars} - {SHARED}

    def _mixes(self, equation: JaxprEqn) -> bool:
        """Whether an equation reads scalars of several owners, or one of an owner and one that was mixed before."""
        owners = self._owners(equation)
        return len(owners) > 1 or (len(owners) == 1 and any(var in self.mixed for var in variables(equation.invars)))

    def _resolved(self, atom: Atom, reader: int) -> Atom:
        """The operand as `reader` sees it: its own or shared as it is, another owner's or joined as the result of a reduction."""
        if isinstance(atom, Literal):
            return atom
        if atom in self.joins:
            return self._reduced(atom, *self.joins[atom])
        return atom if self._owner(atom) in (SHARED, reader) else self._reduced_alone(atom)

    def _reduced_alone(self, var: Var) -> Var:
        """One owner's scalar as all see it."""
        return self._reduced(var, ReductionKind.AND if aval_of(var).dtype == np.bool_ else ReductionKind.SUM, (var,))

    def _reduced(self, var: Var, kind: ReductionKind, operands: tuple[Var, ...]) -> Var:
        if var not in self.results:
            [aval] = jax.make_jaxpr(lambda x: lax.reshape(x, ()))(jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype)).out_avals
            result = Var(aval)
            round_ = max(self.rounds.get(operand, 0) for operand in operands)
            self.reductions.append(Reduced(kind, operands, result, round_))
            self.results[var] = self._like(result, var)
            self.rounds.update(dict.fromkeys((result, self.results[var]), round_ + 1))
            self.owner[self.results[var]] = SHARED
        return self.results[var]

    def _like(self, result: Var, var: Var) -> Var:
        if not aval_of(var).shape:
            return result
        closed = jax.make_jaxpr(lambda x: lax.reshape(x, aval_of(var).shape))(jax.ShapeDtypeStruct((), aval_of(var).dtype))
        [equation] = closed.jaxpr.eqns
        shaped = Var(var.aval)
        self.equations.append(equation.replace(invars=[result], outvars=[shaped]))
        return shaped

    def _output(self, atom: Atom, owner: int, name: str) -> Atom:
        if isinstance(atom, Literal):
            return atom
        found = self._owner(atom)
        joined = atom in self.joins or found not in (SHARED, owner)
        if joined and aval_of(atom).size != 1:
            other = self.state_names[self.params[found]]
            raise TraceError(
                f"{name} gets an array of {aval_of(atom).dtype}{list(aval_of(atom).shape)} that belongs to parameter '{other}'. "
                "A metric must be a scalar, and a parameter's new value must depend on it."
            )
        if not joined:
            return atom
        return self._reduced(atom, *self.joins[atom]) if atom in self.joins else self._reduced_alone(atom)
