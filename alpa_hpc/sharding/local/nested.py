"""scan, while and cond on one device: the same loop over the nested programs, evaluated on tiles (see `strategies/nested.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from alpa_hpc.ir.graph import Atom, aval_of, constants_of
from alpa_hpc.sharding.assignment import NONE, Assignment, EquationPlan, plan_of
from alpa_hpc.sharding.place import LocalRun, Place
from alpa_hpc.sharding.spec import AXES, Spec
from alpa_hpc.sharding.strategies.nested import InnerStep, NestedSplit, nested_split
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT

Tiles = list[jax.Array]
NO_SUMS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """A nest on this device: how it is split, which factor each mesh axis has, and who runs an equation."""

    split: NestedSplit
    assignment: Assignment
    place: Place
    run: LocalRun

    def program(self, number: int, arguments: Sequence[jax.Array]) -> Tiles:
        """What a nested program makes of tiles."""
        program = self.split.nest.programs[number]
        tiles: dict[Var, jax.Array] = dict(zip(program.jaxpr.invars, arguments, strict=True))
        for var, value in constants_of(program).items():
            tiles[var] = self.place.cut(jnp.asarray(value), self._spec(var))
        for step in self.split.steps[number]:
            tiles.update(zip(step.eqn.outvars, self._step(step, [_read(tiles, atom) for atom in step.eqn.invars]), strict=True))
        return [_read(tiles, atom) for atom in program.jaxpr.outvars]

    def _spec(self, var: Var) -> Spec:
        return Spec(tuple(tuple(axis for axis in AXES if self.assignment[axis] == factor != UNSPLIT) for factor in self.split.dims[var]))

    def _step(self, step: InnerStep, operands: Tiles) -> Sequence[jax.Array]:
        first, second = (step.outer.index(factor) if factor in step.outer and factor != NONE else NONE for factor in self.assignment)
        plan = plan_of(step.rule, (first, second), self.place.shape)
        held = [self.split.sums_of(atom) for atom in step.eqn.invars]
        brought = NO_SUMS.union(*held)
        return self.run(step.eqn, plan, [self.summed(x, have, brought) for x, have in zip(operands, held, strict=True)], self.place)

    def summed(self, x: jax.Array, have: frozenset[int], wanted: frozenset[int]) -> jax.Array:
        """A value that is a sum over the factors `have`, as this device's summand over `wanted` too."""
        return self.place.once(x, tuple(axis for axis in AXES if self.assignment[axis] in wanted - have))

    def flows(self, values: Sequence[jax.Array], sources: Sequence[Atom], targets: Sequence[Atom]) -> Tiles:
        """Values of `sources` as the sums that `targets` are."""
        columns = zip(values, map(self.split.sums_of, sources), map(self.split.sums_of, targets), strict=True)
        return [self.summed(x, have, wanted) for x, have, wanted in columns]

    def enter(self, values: Sequence[jax.Array], targets: Sequence[Atom]) -> Tiles:
        """Values from outside, which are whole, as the sums that `targets` are."""
        return [self.summed(x, NO_SUMS, self.split.sums_of(target)) for x, target in zip(values, targets, strict=True)]


def _inside(run: LocalRun, eqn: JaxprEqn, plan: EquationPlan, place: Place) -> _Inside:
    return _Inside(nested_split(rule_of, eqn), plan.assignment, place, run)


def _read(tiles: Mapping[Var, jax.Array], atom: Atom) -> jax.Array:
    return jnp.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else tiles[atom]


def scan(run: LocalRun, eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """Carry, then what is stacked."""
    inside, params = _inside(run, eqn, plan, place), eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    stop = num_consts + num_carry
    body = inside.split.nest.programs[0].jaxpr
    carried, outcomes = body.invars[num_consts:stop], body.outvars[:num_carry]

    def step(carry: Tiles, rows: Tiles) -> tuple[Tiles, Tiles]:
        made = inside.program(0, [*operands[:num_consts], *carry, *rows])
        return inside.flows(made[:num_carry], outcomes, carried), made[num_carry:]

    start = inside.enter(operands[num_consts:stop], carried)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, start, list(operands[stop:]), **options)
    return [*carry, *stacked]


def while_loop(run: LocalRun, eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """The condition reads nothing that differs between devices, so all of them stop at once."""
    inside = _inside(run, eqn, plan, place)
    num_asked, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, consts, start = operands[:num_asked], operands[num_asked : num_asked + num_consts], operands[num_asked + num_consts :]
    body = inside.split.nest.programs[1].jaxpr
    carried = body.invars[num_consts:]

    def goes_on(carry: Tiles) -> jax.Array:
        (answer,) = inside.program(0, [*asked, *carry])
        return answer

    def step(carry: Tiles) -> Tiles:
        return inside.flows(inside.program(1, [*consts, *carry]), body.outvars, carried)

    return lax.while_loop(goes_on, step, inside.enter(start, carried))


def cond(run: LocalRun, eqn: JaxprEqn, plan: EquationPlan, operands: Sequence[jax.Array], place: Place) -> Sequence[jax.Array]:
    """A result that is a sum in one branch is one in all."""
    inside = _inside(run, eqn, plan, place)
    index, *arguments = operands
    every = [NO_SUMS.union(*map(inside.split.sums_of, passage.atoms)) for passage in inside.split.nest.results]

    def branch(number: int) -> Tiles:
        made = inside.program(number, arguments)
        outcomes = inside.split.nest.programs[number].jaxpr.outvars
        columns = zip(made, map(inside.split.sums_of, outcomes), every, strict=True)
        return [inside.summed(x, have, wanted) for x, have, wanted in columns]

    return lax.switch(index, [lambda number=number: branch(number) for number in range(len(inside.split.nest.programs))])
