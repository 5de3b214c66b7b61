"""Stage -> the collectives that its strategies stand for, task by task: worked out from specs alone, to be held against compiled programs.

What a task exchanges follows from the plan in three ways: an equation reads an operand in another spec than it has, a sum or maximum over
split dims is completed, and an array goes from the spec of one border (of a layer, of the update) to that of the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from jax.core import ShapedArray

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage, gradient_spec, layout_of, partial_spec
from alpa_hpc.runtime.tasks import StageTask, dtype_of
from alpa_hpc.runtime.update_tasks import reduction_avals
from alpa_hpc.sharding.apply import ChosenLayer, share_specs
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.resharding import Lane, Move, joint_moves, reshard_moves
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.task_tiles import backward_tiles, forward_tiles
from alpa_hpc.sharding.tiles import Exchange, LayerTiles, Origin, Tile
from alpa_hpc.verify.narrowed import sent_sizes


@dataclass(frozen=True, slots=True, eq=False)
class InProgram:
    """Within a layer's program."""

    chosen: ChosenLayer
    origin: Origin


@dataclass(frozen=True, slots=True)
class AtBorder:
    """Between layers, tasks or meshes; in words."""

    words: str


Site = InProgram | AtBorder


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCollective:
    """A collective that the plan stands for; `num_bytes` = bytes a device of its larger side, as `hlo` counts them."""

    lane: Lane
    dtype: str
    num_bytes: int
    site: Site


def planned_collectives(
    step: LayeredStep, stage: Stage, io: StageIO, task: StageTask, *, gpu: bool = True
) -> tuple[PlannedCollective, ...]:
    """What a task of a stage exchanges; `gpu`: whether it is compiled for GPUs."""
    planned = _planned(step, stage, io, task, gpu=gpu)
    return planned if gpu else tuple(replace(one, num_bytes=one.num_bytes * _cpu_widening(one.dtype)) for one in planned)


def _cpu_widening(dtype: str) -> int:
    """How many times as wide XLA for CPUs makes an array before it exchanges it: bfloat16 goes as float32, eight bits as float16."""
    return 2 if dtype == "bfloat16" or dtype.startswith("float8") else 1


def _planned(step: LayeredStep, stage: Stage, io: StageIO, task: StageTask, *, gpu: bool) -> tuple[PlannedCollective, ...]:
    kind, _, number = task.name.partition(":")
    match kind:
        case "forward" | "score":
            return tuple(_forward(stage, gpu=gpu))
        case "backward":
            return tuple(_backward(stage, gpu=gpu))
        case "partials" if not number:
            return (*_sums(step, stage, io.owned), *_partials(step, stage, io, 0))
        case "partials":
            return tuple(_partials(step, stage, io, int(number)))
        case "update":
            read = [param for param in io.owned if _reads_gradient(stage, param)]  # a frozen parameter's sum would be made for nobody
            sums = () if step.update.rounds else _sums(step, stage, read)
            return (*sums, *_update(step, stage, io))
        case "reduce":
            return tuple(_sums(step, stage, (int(number),)))
        case "gather":
            return tuple(_gather(task))
        case _:
            return ()


def _forward(stage: Stage, *, gpu: bool) -> Iterator[PlannedCollective]:
    tiles = forward_tiles([ChosenSplit(chosen, stage.shape) for chosen in stage.layers], gpu=gpu)
    sent = sent_sizes(tiles) if gpu else None
    for chosen, one in zip(stage.layers, tiles, strict=True):
        yield from _in_program(chosen, one, sent)


def _backward(stage: Stage, *, gpu: bool) -> Iterator[PlannedCollective]:
    """Gradients are never among what moves: they stay as they are made until the iteration ends."""
    tiles = backward_tiles([ChosenSplit(chosen, stage.shape) for chosen in stage.layers], gpu=gpu)
    sent = sent_sizes(tiles) if gpu else None
    for chosen, one in zip(reversed(stage.layers), tiles, strict=True):
        yield from _in_program(chosen, one, sent)


def _in_program(chosen: ChosenLayer, tiles: LayerTiles, sent: Mapping[Exchange, int] | None = None) -> Iterator[PlannedCollective]:
    """What a layer exchanges; `sent`: bytes an element of each collective, where they are fewer than its tiles have."""
    for one in tiles.steps:
        if isinstance(one, Exchange):
            itemsize = one.made.itemsize if sent is None else sent[one]
            num_bytes = round(max(one.read.num_bytes, one.made.num_bytes) * itemsize / one.made.itemsize)
            yield PlannedCollective(one.lane, one.made.dtype, num_bytes, InProgram(chosen, one.origin))


def _reads_gradient(stage: Stage, param: int) -> bool:
    program = stage.update_of(param)[1]
    return program.gradient in needed(program.update, program.update.outputs).before


def _sums(step: LayeredStep, stage: Stage, params: Sequence[int]) -> Iterator[PlannedCollective]:
    """The gradients of each parameter, summed over the mesh once an iteration; those of layers that come to lie alike together."""
    for param in params:
        words = f"gradient of {step.state_names[param]}, summed"
        layout = layout_of(step.state_avals[param], partial_spec(stage, param), stage.shape)
        specs = [gradient_spec(reader, param) for reader in stage.readers(param)]
        yield from _moves(layout, joint_moves(specs, layout.spec, stage.shape), words)


def _partials(step: LayeredStep, stage: Stage, io: StageIO, number: int) -> Iterator[PlannedCollective]:
    """The programs that give scalars for a round, and these scalars: those that are partial alike are summed as one, equal ones once."""
    summands: dict[tuple[int, tuple[int, ...]], list[Tile]] = {}
    avals = reduction_avals(step, number)
    for param in io.owned:
        chosen, update = stage.update_of(param)
        program = update.partials[number]
        specs = share_specs(program, chosen)
        tiles = LayerTiles(ChosenSplit(chosen, stage.shape), left=specs)
        yield from _update_program(step, stage, param, program, tiles)
        for position, (reduction, tensor) in enumerate(zip(update.work.partials[number].reductions, program.outputs, strict=True)):
            spec = specs.get(tensor, chosen.spec(tensor))
            summands.setdefault((reduction, spec.partial), []).append(tiles.leave(program, position, spec))
    distinct = {(axes, tuple(found)): reduction for (reduction, axes), found in summands.items()}
    for (axes, _), reduction in distinct.items():
        yield from _moved(avals[reduction], Spec((), axes), Spec(()), stage, f"reduction {reduction} over parameters")


def _update(step: LayeredStep, stage: Stage, io: StageIO) -> Iterator[PlannedCollective]:
    """The update of each owned parameter, and its new value on its way to where it is stored."""
    for param in io.owned:
        chosen, program = stage.update_of(param)
        yield from _update_program(step, stage, param, program.update, LayerTiles(ChosenSplit(chosen, stage.shape)))
        targets = (stage.param_spec(param), *map(chosen.spec, program.leaves[1:]))
        for leaf, tensor, target in zip(program.work.leaves, program.update.outputs, targets, strict=True):
            yield from _moved(step.state_avals[leaf], chosen.spec(tensor), target, stage, f"new {step.state_names[leaf]}, handed out")


def _update_program(step: LayeredStep, stage: Stage, param: int, program: Program, tiles: LayerTiles) -> Iterator[PlannedCollective]:
    """The parameter brought to its update, if that reads it, and what the program exchanges."""
    chosen, update = stage.update_of(param)
    tiles.run(program, program.outputs)
    if any(update.leaves[0] in record.operands for record in program.records):
        target = chosen.spec(update.leaves[0])
        words = f"parameter {step.state_names[param]}, as its update reads it"
        yield from _moved(step.state_avals[param], stage.param_spec(param), target, stage, words)
    yield from _in_program(chosen, tiles)


def _gather(task: StageTask) -> Iterator[PlannedCollective]:
    """From the layout in which an array crosses meshes to the one its reader wants."""
    (wire,), (wanted,) = task.inputs, task.outputs
    assert isinstance(wire, Layout) and isinstance(wanted, Layout), "gathers take one array"
    yield from _moved_layout(wire, wanted.spec, f"{task.name.removeprefix('gather:')} as it arrives from another mesh")


def _moved(aval: ShapedArray, source: Spec, target: Spec, stage: Stage, words: str) -> Iterator[PlannedCollective]:
    return _moved_layout(layout_of(aval, source, stage.shape), target, words)


def _moved_layout(layout: Layout, target: Spec, words: str) -> Iterator[PlannedCollective]:
    """One resharding."""
    return _moves(layout, reshard_moves(layout.spec, target, layout.mesh), words)


def _moves(layout: Layout, moves: Sequence[Move], words: str) -> Iterator[PlannedCollective]:
    """Moves of what `layout` says, whatever its spec."""
    for move in moves:
        if not move.is_local:
            larger = max(prod(spec.local_shape(layout.shape, layout.mesh)) for spec in (move.before, move.after))
            yield PlannedCollective(move.lane, layout.dtype, dtype_of(layout).itemsize * larger, AtBorder(words))
