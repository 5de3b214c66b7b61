"""A parameter's update by a layer's strategies -> the kernels that XLA makes of it, where arrays lie in memory between them.

Such an array is what Adafactor divides by its own mean square, or a clipped gradient whose squares are averaged over rows and columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem, Program
from alpa_hpc.sharding.graph import FREE
from alpa_hpc.sharding.joined_kernels import joined_kernels
from alpa_hpc.sharding.kernel_seconds import Collective, streaming_seconds
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.priority_fusion import FusedKernel, Value, fused_kernels
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.update_operations import NUMBER_REDUCTIONS, UpdateOperations

GRADIENT, PARAMETER = 0, 1  # the numbers of what an update reads; what a kernel makes is numbered from there


@dataclass(frozen=True, slots=True)
class UpdateKernel:
    """One of an update's kernels, or collectives: numbers of what it reads and makes.

    sizes:       bytes of what it makes, nothing of a new leaf, which lies where the old one was; but for a new parameter, the last one
    elementwise: whether what it makes may lie over an operand
    updates:     whether it makes the new parameter
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    sizes: tuple[float, ...]
    seconds: float
    elementwise: bool
    updates: bool
    collective: Collective | None


def update_kernels(program: Program, chosen: ChosenLayer, shape: MeshShape) -> tuple[UpdateKernel, ...]:
    """One kernel where no array as large as the parameter lies in memory between kernels, and none waits for other devices.

    So it is of an update without a reduction, which goes through its arrays once.
    """
    if not _reduces(program):
        return _lone(program)
    choices = tuple(chosen.choices[node] for node in _nodes(program, chosen.problem))
    return _kernels(_Update(program, shape, choices, chosen))


@dataclass(frozen=True, slots=True)
class _Update:
    """What the kernels of an update depend on; `choices` of its nodes are those of the layer."""

    program: Program
    shape: MeshShape
    choices: tuple[int, ...]
    chosen: ChosenLayer = field(compare=False)


@lru_cache(maxsize=4096)
def _reduces(program: Program) -> bool:
    return any(eqn.primitive.name in NUMBER_REDUCTIONS for eqn in program.jaxpr.jaxpr.eqns)


@lru_cache(maxsize=4096)
def _nodes(program: Program, problem: LayerProblem) -> tuple[int, ...]:
    """The nodes whose choices say how its equations are split and how its tensors lie, in a fixed order."""
    read = (tensor for record in program.records for tensor in (*record.operands, *record.results))
    homes = (problem.tensors[tensor].home for tensor in (*program.inputs, *program.outputs, *read) if tensor >= 0)
    return tuple(dict.fromkeys(node for node in (*homes, *(record.node for record in program.records)) if node != FREE))


@lru_cache(maxsize=4096)
def _kernels(update: _Update) -> tuple[UpdateKernel, ...]:
    listed = UpdateOperations(ChosenSplit(update.chosen, update.shape))
    inputs, results = listed.run(update.program)
    return _alike_kernels(_Listed(_content(listed, inputs, results), listed, inputs, results)) or _lone(update.program)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The operations of an update; those of equal `content` become equal kernels."""

    content: tuple[object, ...]
    listed: UpdateOperations = field(compare=False)
    inputs: Sequence[Value] = field(compare=False)
    results: Sequence[Value] = field(compare=False)


def _content(listed: UpdateOperations, inputs: Sequence[Value], results: Sequence[Value]) -> tuple[object, ...]:
    """All of the operations, with values as numbers."""
    numbers: dict[Value, int] = {}

    def number(values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(value, len(numbers)) for value in values)

    ends = number(inputs), number(results)
    operations = tuple(
        (number((one.made, *one.reads)), one.flop, one.along, one.reduction, one.fused, listed.collectives.get(one.made))
        for one in listed.operations
    )
    return (*ends, operations, tuple((value.elements, value.itemsize) for value in numbers))


@lru_cache(maxsize=4096)
def _alike_kernels(update: _Listed) -> tuple[UpdateKernel, ...]:
    """Nothing for an update that is one kernel."""
    (gradient, parameter, *_), results, collectives = update.inputs, update.results, update.listed.collectives
    kernels = fused_kernels(update.listed.operations, results)
    between = (one.made.elements for one in kernels if one.reduction is None and one.made not in results)
    if not collectives and not 1 < parameter.elements <= max(between, default=0):
        return ()
    if results[0] in collectives or all(one.made is not results[0] for one in kernels):
        return ()  # it makes no new parameter, or somewhere else
    numbers = {gradient: GRADIENT, parameter: PARAMETER} | {one.made: number for number, one in enumerate(kernels, PARAMETER + 1)}
    return tuple(_kernel(parts, numbers, results, collectives) for parts in joined_kernels(kernels))


@lru_cache(maxsize=4096)
def _lone(program: Program) -> tuple[UpdateKernel, ...]:
    """An update as one kernel."""
    known = {GRADIENT: program.inputs[GRADIENT], PARAMETER: program.inputs[PARAMETER]}
    read = {tensor for number, _ in needed(program, program.outputs).equations for tensor in program.records[number].operands}
    reads = tuple(number for number, tensor in known.items() if tensor in read)
    return (UpdateKernel(reads, (PARAMETER + 1,), (), 0.0, elementwise=True, updates=True, collective=None),)


def _kernel(
    parts: Sequence[FusedKernel], numbers: Mapping[Value, int], results: Sequence[Value], collectives: Mapping[Value, Collective]
) -> UpdateKernel:
    """Kernels that are one; of them, the one that makes the new parameter last."""
    made = sorted((one.made for one in parts), key=lambda value: (value is results[0], numbers[value]))
    updates = made[-1] is results[0]
    operands = {value for one in parts for value in one.operands}.difference(made)
    return UpdateKernel(
        reads=tuple(sorted(numbers[value] for value in operands if value in numbers)),
        makes=tuple(numbers[value] for value in made),
        sizes=tuple(0.0 if value in results else float(value.num_bytes) for value in (made[:-1] if updates else made)),
        seconds=streaming_seconds(sum(value.num_bytes for value in (*operands, *made))),
        elementwise=all(one.fused and one.reduction is None for one in parts),
        updates=updates,
        collective=collectives.get(made[0]),
    )
