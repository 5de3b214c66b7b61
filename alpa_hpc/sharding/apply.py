"""LayerProblem + choices -> what one device computes: the layer's equations on tiles, with exactly the collectives that were priced.

Everything here is traced inside `shard_map` (all axes manual), so XLA inserts no collective of its own: each resharding edge is the steps
of `reshard_moves`, done once for each (tensor, spec) that is read. A partial sum is just this device's summand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from alpa_hpc.ir.graph import aval_of, constants_of
from alpa_hpc.sharding.assignment import EquationPlan, combined_axes, making
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.graph import FREE, EquationRecord
from alpa_hpc.sharding.localise import run_local
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.resharding import AllGather, AllReduce, AllToAll, MaskFirst, Move, ReduceScatter, Slice, reshard_moves
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.strategies.registry import rule_of, whole_rule
from alpa_hpc.sharding.strategies.rule import Combine


@dataclass(frozen=True, slots=True, eq=False)
class ChosenLayer:
    """A layer's problem with a strategy for each node."""

    problem: LayerProblem
    choices: tuple[int, ...]

    def spec(self, tensor: int) -> Spec:
        """How `tensor` lies."""
        t = self.problem.tensors[tensor]
        return t.specs[0] if t.home == FREE else t.specs[self.choices[t.home]]


def reshard(x: jax.Array, source: Spec, target: Spec, place: Place) -> jax.Array:
    """Bring this device's tile from `source` to `target`."""
    for move in reshard_moves(source, target, place.shape):
        x = run_move(x, move, place)
    return x


def run_move(x: jax.Array, move: Move, place: Place) -> jax.Array:
    """One collective, or one local cut; without elements, nothing but the new shape."""
    if x.size == 0:
        return jnp.zeros(move.after.local_shape(move.before.whole_shape(x.shape, place.shape), place.shape), x.dtype)
    match move.steps[0]:
        case Slice(axis, dim):
            size = x.shape[dim] // place.shape.sizes[axis]
            return lax.dynamic_slice_in_dim(x, place.collectives.index(axis) * size, size, axis=dim)
        case AllGather(axis, dim):
            return place.collectives.all_gather(x, axis, dim)
        case AllReduce():
            return place.collectives.all_reduce(x, move.axes, Combine.SUM)
        case ReduceScatter(axis, dim):
            return place.collectives.reduce_scatter(x, axis, dim)
        case AllToAll(axis, source, target):
            return place.collectives.all_to_all(x, axis, source, target)
        case MaskFirst(axis):
            return place.once(x, (axis,))


@dataclass(frozen=True, slots=True, eq=False)
class _Free:
    """An equation that any device can do by itself, in whole or in part, and which of its results is meant."""

    eqn: JaxprEqn
    record: EquationRecord
    position: int


@dataclass(slots=True, eq=False)
class _Tiles:
    """The tiles made so far: for each tensor, its value in every spec that somebody asked for; free tensors are made when asked for.

    `left` = the specs of tensors that stay as they are made.
    """

    chosen: ChosenLayer
    place: Place
    left: Mapping[int, Spec]
    known: dict[int, dict[Spec, jax.Array]] = field(default_factory=dict)
    free: dict[int, _Free] = field(default_factory=dict)

    def put(self, tensor: int, spec: Spec, value: jax.Array) -> None:
        self.known.setdefault(tensor, {})[spec] = value

    def get(self, tensor: int, spec: Spec) -> jax.Array:
        held = self.known.setdefault(tensor, {})
        if spec not in held:
            own = self.chosen.spec(tensor)
            made = self._make(self.free[tensor], spec) if tensor in self.free else None
            held[spec] = reshard(self.get(tensor, own), own, spec, self.place) if made is None else made
        return held[spec]

    def _make(self, free: _Free, spec: Spec) -> jax.Array | None:
        """This device's own piece, where the operator can make pieces by themselves."""
        rule = rule_of(free.eqn) or whole_rule(free.eqn)
        plan = making(rule, free.position, spec, self.place.shape)
        return None if plan is None else run_local(free.eqn, plan, self.read(free.eqn, free.record, plan), self.place)[free.position]

    def read(self, eqn: JaxprEqn, record: EquationRecord, plan: EquationPlan) -> list[jax.Array]:
        """The operands of an equation as `plan` wants them."""
        return [
            jnp.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else self.get(tensor, spec)
            for atom, tensor, spec in zip(eqn.invars, record.operands, plan.operands, strict=True)
        ]


def share_specs(program: Program, chosen: ChosenLayer) -> dict[int, Spec]:
    """Of a program's results that are sums the specs in which it makes them: what is summed with others is summed over the mesh once."""
    read = {tensor for record in program.records for tensor in record.operands}
    specs: dict[int, Spec] = {}
    for record in program.records:
        if record.node == FREE or record.plans[chosen.choices[record.node]].combined:
            continue
        raw = record.plans[chosen.choices[record.node]].raw
        specs |= {
            tensor: spec for tensor, spec in zip(record.results, raw, strict=True) if tensor in program.outputs and tensor not in read
        }
    return specs


def run_program(
    program: Program, chosen: ChosenLayer, arguments: Sequence[jax.Array], place: Place, left: Mapping[int, Spec] | None = None
) -> list[jax.Array]:
    """Evaluate a program on this device: arguments and results lie as their tensors' specs say, those in `left` as they were made."""
    tiles = _Tiles(chosen, place, left or {})
    for tensor, value in zip(program.inputs, arguments, strict=True):
        if tensor >= 0:
            tiles.put(tensor, chosen.spec(tensor), value)
    _put_constants(program, tiles)
    title = program_title(chosen.problem, program)
    for number in range(len(program.records)):
        with jax.named_scope(f"layer{chosen.problem.layer.index}.{title}.{number}"):  # XLA remembers it: `verify` names it for people
            _run_equation(program, number, tiles)
    return [_output(program, position, tiles, chosen) for position in range(len(program.outputs))]


def program_title(problem: LayerProblem, program: Program) -> str:
    """The name of one of a layer's programs: forward, backward, update_P or partials_P of parameter P (partialsN_P of round N)."""
    titles = {id(problem.forward): "forward", id(problem.backward): "backward"}
    for update in problem.updates:
        titles[id(update.update)] = f"update_{update.work.param}"
        titles |= {id(one): f"partials{number or ''}_{update.work.param}" for number, one in enumerate(update.partials)}
    return titles[id(program)]


def _run_equation(program: Program, number: int, tiles: _Tiles) -> None:
    eqn, record, chosen = program.jaxpr.jaxpr.eqns[number], program.records[number], tiles.chosen
    if eqn.primitive.name == "optimization_barrier":
        _barrier(record.operands, tiles, chosen)
        return
    if record.node == FREE:
        tiles.free.update((tensor, _Free(eqn, record, position)) for position, tensor in enumerate(record.results))
        return
    plan = record.plans[chosen.choices[record.node]]
    results = run_local(eqn, plan, tiles.read(eqn, record, plan), tiles.place)
    for position, (tensor, value) in enumerate(zip(record.results, results, strict=True)):
        spec = tiles.left.get(tensor, chosen.spec(tensor))
        tiles.put(tensor, spec, _finish(value, plan, position, spec, tiles.place))


def _put_constants(program: Program, tiles: _Tiles) -> None:
    constants = constants_of(program.jaxpr)
    flat = program.jaxpr.jaxpr
    reads = [(flat.outvars, program.outputs)] + [
        (eqn.invars, record.operands) for eqn, record in zip(flat.eqns, program.records, strict=True)
    ]
    for atoms, tensors in reads:
        for atom, tensor in zip(atoms, tensors, strict=True):
            if not isinstance(atom, Literal) and atom in constants and tensor not in tiles.known:
                tiles.put(tensor, tiles.chosen.spec(tensor), jnp.asarray(constants[atom]))


def _barrier(tensors: tuple[int, ...], tiles: _Tiles, chosen: ChosenLayer) -> None:
    """An optimization barrier holds back each operand in the spec it has; copies in other specs are forgotten."""
    own = [(tensor, chosen.spec(tensor)) for tensor in tensors if tensor >= 0]
    held = lax.optimization_barrier([tiles.get(tensor, spec) for tensor, spec in own])
    for (tensor, spec), value in zip(own, held, strict=True):
        tiles.known[tensor] = {spec: value}


def _finish(value: jax.Array, plan: EquationPlan, position: int, spec: Spec, place: Place) -> jax.Array:
    for combine, axes in combined_axes(plan, place.shape).items():
        value = place.collectives.all_reduce(value, axes, combine)
    return reshard(value, plan.raw[position], spec, place)


def _output(program: Program, position: int, tiles: _Tiles, chosen: ChosenLayer) -> jax.Array:
    tensor = program.outputs[position]
    atom = program.jaxpr.jaxpr.outvars[position]
    if isinstance(atom, Literal):
        return jnp.broadcast_to(jnp.asarray(atom.val, aval_of(atom).dtype), aval_of(atom).shape)
    return tiles.get(tensor, tiles.left.get(tensor, chosen.spec(tensor)))
