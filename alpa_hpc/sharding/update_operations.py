"""A parameter's update by a layer's strategies -> the operations of one device on its tiles, as XLA has them before it fuses.

Equal operations are one, a number that meets an array is spread over it first, and what sums more than a kernel can does so in two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt, prod

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from alpa_hpc.ir.graph import aval_of
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.graph import EquationRecord
from alpa_hpc.sharding.kernel_costs import CYCLES, LONGEST_COLUMN, LONGEST_ROW, OTHER_CYCLES, Reduction
from alpa_hpc.sharding.kernel_seconds import Collective
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.priority_fusion import Operation, Value
from alpa_hpc.sharding.resharding import CollectiveKind, Lane, Move, reshard_moves
from alpa_hpc.sharding.spec import Spec, split_of
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE
from alpa_hpc.sharding.strategies.rule import Combine, shape_of
from alpa_hpc.sharding.tiles import COMMUTATIVE
from alpa_hpc.sharding.work_kind import ROW_REDUCTIONS, changes_nothing

VIEWS = frozenset("reshape squeeze expand_dims copy copy_p stop_gradient".split())
MOVES = frozenset("broadcast_in_dim slice dynamic_slice transpose rev concatenate pad iota".split())
NUMBER_REDUCTIONS = ROW_REDUCTIONS | {"reduce_prod", "reduce_and", "reduce_or"}
NEUTRAL = {"mul": 1, "div": 1, "add": 0, "add_any": 0, "sub": 0}
ADDING = 7  # cycles of a unit for what a reduction does with an element


@dataclass(slots=True, eq=False)
class UpdateOperations:
    """Operations being listed, and which of them are collectives."""

    split: ChosenSplit
    operations: list[Operation] = field(default_factory=list[Operation])
    collectives: dict[Value, Collective] = field(default_factory=dict[Value, Collective])
    _known: dict[tuple[object, ...], Value] = field(default_factory=dict[tuple[object, ...], Value])
    _values: dict[tuple[int, Spec], Value] = field(default_factory=dict[tuple[int, Spec], Value])

    def run(self, program: Program) -> tuple[list[Value], list[Value]]:
        """List a program's operations; its inputs and its results."""
        inputs = [self._value(tensor, self.split.own(tensor)) for tensor in program.inputs]
        for number, _ in needed(program, program.outputs).equations:
            if program.records[number].plans:
                self._run(program.jaxpr.jaxpr.eqns[number], program.records[number])
        return inputs, [self._value(tensor, self.split.own(tensor)) for tensor in program.outputs]

    def _value(self, tensor: int, spec: Spec) -> Value:
        """A tensor in a spec, brought there if it was not yet."""
        if (tensor, spec) not in self._values:
            own, known = self.split.own(tensor), self.split.problem.tensors[tensor]
            if spec == own:
                self._values[tensor, spec] = Value(prod(spec.local_shape(known.shape, self.split.shape)), known.itemsize)
            else:
                self._values[tensor, spec] = self._moved(self._value(tensor, own), tensor, own, spec)
        return self._values[tensor, spec]

    def _run(self, eqn: JaxprEqn, record: EquationRecord) -> None:
        specs = self.split.read(record)
        reads = [
            self._number(atom) if isinstance(atom, Literal) else self._value(tensor, spec)
            for atom, tensor, spec in zip(eqn.invars, record.operands, specs, strict=True)
        ]
        made = self.split.made(record)
        for position, (tensor, spec) in enumerate(zip(record.results, made, strict=True)):
            value = self._computed(eqn, reads, specs, spec, position)
            for combine, axes in self.split.joined(record).items():
                value = self._exchanged(value, Lane(CollectiveKind.ALL_REDUCE, axes), combine, value.elements)
            own = self.split.own(tensor)
            self._values[tensor, own] = self._moved(value, tensor, spec, own)

    def _computed(self, eqn: JaxprEqn, reads: Sequence[Value], specs: Sequence[Spec], made: Spec, position: int) -> Value:
        name = eqn.primitive.name
        shape = made.local_shape(shape_of(eqn.outvars[position]), self.split.shape)
        result = Value(prod(shape), np.dtype(aval_of(eqn.outvars[position]).dtype).itemsize)
        for place in _given_back(eqn):
            return reads[place]
        if name in ELEMENTWISE:
            reads = [self._spread(value, result.elements) for value in reads]
            return self._made((name, str(eqn.params), position), reads, result, _cycles(eqn) * result.elements)
        if name in NUMBER_REDUCTIONS:
            tile = specs[0].local_shape(shape_of(eqn.invars[0]), self.split.shape)
            return self._reduced(name, reads[0], result, tile, eqn.params["axes"])
        return self._made((name, str(eqn.params), position), reads, result, 0.0, along=False, fused=name in MOVES)

    def _spread(self, value: Value, elements: int) -> Value:
        """A number for each element of an array."""
        if value.elements == elements:
            return value
        return self._made(("spread", elements), [value], Value(elements, value.itemsize), 0.0, along=False)

    def _reduced(self, name: str, value: Value, result: Value, tile: Sequence[int], axes: Sequence[int]) -> Value:
        reduction = _reduction(tile, axes)
        longest = LONGEST_ROW if reduction.minor == 1 else LONGEST_COLUMN
        if reduction.reduced > longest:
            pieces = _pieces(reduction.reduced)
            first = Reduction(reduction.major * pieces, reduction.reduced // pieces, reduction.minor)
            part = Value(result.elements * pieces, result.itemsize)
            value = self._made((name, first), [value], part, ADDING * value.elements, along=False, reduction=first)
            reduction = Reduction(reduction.major, pieces, reduction.minor)
        return self._made((name, reduction), [value], result, ADDING * value.elements, along=False, reduction=reduction)

    def _moved(self, value: Value, tensor: int, source: Spec, target: Spec) -> Value:
        for move in reshard_moves(source, target, self.split.shape):
            elements = prod(move.after.local_shape(self.split.problem.tensors[tensor].shape, self.split.shape))
            if move.is_local:
                value = self._made((move,), [value], Value(elements, value.itemsize), 0.0, along=False)
            else:
                value = self._exchanged(value, move.lane, move, elements)
        return value

    def _exchanged(self, value: Value, lane: Lane, how: Move | Combine, elements: int) -> Value:
        made = self._made((lane, how), [value], Value(elements, value.itemsize), 0.0, along=False, fused=False)
        across = any(self.split.problem.spanning[axis] for axis in lane.axes)
        moved = float(max(value.num_bytes, made.num_bytes))
        self.collectives[made] = Collective(
            lane, made.itemsize, moved, float(made.num_bytes), split_of(lane.axes, self.split.shape), across
        )
        return made

    def _number(self, literal: Literal) -> Value:
        dtype = np.dtype(aval_of(literal).dtype)
        return self._known.setdefault(("number", str(literal.val), str(dtype)), Value(1, dtype.itemsize))

    def _made(  # noqa: PLR0913 - an operation's
        self,
        how: tuple[object, ...],
        reads: Sequence[Value],
        made: Value,
        flop: float,
        *,
        along: bool = True,
        reduction: Reduction | None = None,
        fused: bool = True,
    ) -> Value:
        """What an operation makes; of what it has made already."""
        key = (*how, *reads)
        if key not in self._known:
            self._known[key] = made
            self.operations.append(Operation(tuple(reads), made, flop, along, reduction, fused))
        return self._known[key]


def _given_back(eqn: JaxprEqn) -> tuple[int, ...]:
    """The place of the operand that an equation gives back as it is, if it does; then XLA removes it."""
    name = eqn.primitive.name
    if name in VIEWS or changes_nothing(eqn):
        return (0,)
    if name not in NEUTRAL:
        return ()
    (first, last), neutral = eqn.invars, NEUTRAL[name]
    if isinstance(last, Literal) and last.val == neutral:
        return (0,)
    return (1,) if isinstance(first, Literal) and first.val == neutral and name in COMMUTATIVE else ()


def _cycles(eqn: JaxprEqn) -> float:
    """Of a unit, for an element."""
    name = eqn.primitive.name
    if name == "div" and isinstance(eqn.invars[1], Literal):
        return CYCLES["mul"]
    if name == "integer_pow":
        power = eqn.params["y"]
        return CYCLES["mul"] * max(1, abs(power).bit_length() - 1) + (CYCLES["div"] if power < 0 else 0)
    return CYCLES.get(name, OTHER_CYCLES)


def _reduction(tile: Sequence[int], axes: Sequence[int]) -> Reduction:
    """How dims lie that go: the last ones and all that does not lie between others counts as rows."""
    reduced = prod(tile[axis] for axis in axes)
    behind = prod(tile[max(axes, default=-1) + 1 :])
    if behind == 1:
        return Reduction(prod(tile) // max(1, reduced), reduced, 1)
    return Reduction(prod(tile) // max(1, reduced * behind), reduced, behind)


def _pieces(length: int) -> int:
    """Into how many parts a long sum is cut: about as many as a part has elements."""
    pieces = 1 << (isqrt(length).bit_length() - 1)
    while length % pieces:
        pieces //= 2
    return pieces
