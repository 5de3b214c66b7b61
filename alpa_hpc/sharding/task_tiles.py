"""The layers of a stage -> the steps that one device takes in a forward and in a backward task, layer by layer as they run.

What several layers read, or one makes and another reads, is one tile, so that nothing is made of it twice: as in the task, where XLA sees
all layers at once. Only a barrier, in front of layers that recompute, keeps it from knowing, and not even that in code for CPUs, from
which XLA removes barriers before it looks for what is made twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.reassociate import join_sums
from alpa_hpc.sharding.spec import Spec, common_spec
from alpa_hpc.sharding.splits import AbstractSplit
from alpa_hpc.sharding.tiles import Functions, LayerTiles, Origin, Tile, TileStep

Layers = Sequence[AbstractSplit]


def forward_tiles(layers: Layers, *, gpu: bool = True) -> list[LayerTiles]:
    """The steps of the forward of consecutive layers, outputs brought to their ports."""
    task = _Task(layers, gpu)
    return task.over([_forward(task, split) for split in layers])


def _forward(task: "_Task", split: AbstractSplit) -> LayerTiles:
    problem, tiles = split.problem, task.start(split)
    outputs = problem.forward.outputs[: len(problem.outputs)]
    tiles.run(problem.forward, (*outputs, *problem.residuals))
    for position, port in enumerate(problem.outputs):
        task.values[port.value] = tiles.leave(problem.forward, position, split.own(port.tensor))
        tiles.kept.add(task.values[port.value])
    tiles.kept.update(tiles.get(tensor, Origin(problem.forward, 0)) for tensor in problem.residuals)
    return tiles


def backward_tiles(layers: Layers, *, gpu: bool = True) -> list[LayerTiles]:
    """The steps of the backward of consecutive layers, the last one first; of layers that recompute, after those of their forward."""
    task = _Task(layers, gpu)
    return task.over([_backward(task, split) for split in reversed(layers)])


def _backward(task: "_Task", split: AbstractSplit) -> LayerTiles:
    problem, tiles = split.problem, task.start(split)
    for port in problem.cotangent_outputs:
        tiles.put(port.tensor, task.cotangent(split, port.value, port.tensor), split.own(port.tensor))
    if problem.remat:
        tiles.hold(_behind_barrier(problem), Origin(problem.forward, 0))
        tiles.run(problem.forward, problem.remade)
    tiles.run(problem.backward, problem.backward.outputs)
    for position, port in enumerate(problem.cotangent_inputs):
        piece = tiles.leave(problem.backward, position, split.own(port.tensor))
        known = task.cotangents.get(port.value)
        task.cotangents[port.value] = piece if known is None else tiles.add(known, piece)
    gradients = problem.backward.outputs[len(problem.cotangent_inputs) :]
    tiles.kept.update(tiles.get(tensor, Origin(problem.backward, len(problem.backward.records))) for tensor in gradients)
    return tiles


def _behind_barrier(problem: LayerProblem) -> tuple[int, ...]:
    """What a layer that recomputes reads: none of it before the layer's cotangents are there."""
    backward = needed(problem.backward, problem.backward.outputs).before
    before = needed(problem.forward, problem.remade).before | backward
    cotangents = (port.tensor for port in problem.cotangent_outputs)
    return tuple(tensor for tensor in dict.fromkeys((*problem.forward.inputs, *cotangents)) if tensor in before)


@dataclass(slots=True, eq=False)
class _Task:
    """What layers of a task share: arrays as they are stored, by their numbers, and what was made of them."""

    layers: Layers
    gpu: bool
    functions: Functions = field(default_factory=Functions)
    values: dict[int, Tile] = field(default_factory=dict[int, Tile])
    cotangents: dict[int, Tile] = field(default_factory=dict[int, Tile])
    _params: dict[int, tuple[Tile, Spec]] = field(default_factory=dict[int, tuple[Tile, Spec]])
    _batch: dict[int, tuple[Tile, Spec]] = field(default_factory=dict[int, tuple[Tile, Spec]])

    def __post_init__(self) -> None:
        wanted: dict[int, list[Spec]] = {}
        for split in self.layers:
            for param, tensor in zip(split.problem.layer.params, split.problem.params, strict=True):
                self._params.setdefault(param, _stored(split, tensor, split.own(tensor)))  # as its first reader wants it
            for one, tensor in zip(split.problem.layer.batch, split.problem.batch, strict=True):
                wanted.setdefault(one, []).append(split.own(tensor))
        for split in self.layers:
            for one, tensor in zip(split.problem.layer.batch, split.problem.batch, strict=True):
                self._batch.setdefault(one, _stored(split, tensor, common_spec(wanted[one])))

    def start(self, split: AbstractSplit) -> LayerTiles:
        """A layer that has made nothing yet, and reads what is there."""
        problem = split.problem
        tiles = LayerTiles(split, self.functions, self.gpu)
        for tensor, number in zip(problem.params, problem.layer.params, strict=True):
            tiles.put(tensor, *self._params[number])
        for tensor, number in zip(problem.batch, problem.layer.batch, strict=True):
            tiles.put(tensor, *self._batch[number])
        for port in problem.inputs:
            own = split.own(port.tensor)
            tiles.put(port.tensor, self.values.setdefault(port.value, _stored(split, port.tensor, own)[0]), own)
        return tiles

    def over(self, tiles: list[LayerTiles]) -> list[LayerTiles]:
        """The layers when all have run: what leaves with cotangents is wanted, and sums are exchanged in the place of summands."""
        made = {port.value for split in self.layers for port in split.problem.outputs}
        tiles[-1].kept.update(tile for value, tile in self.cotangents.items() if value not in made)
        if self.gpu:
            join_sums(tiles)
        return tiles

    def cotangent(self, split: AbstractSplit, value: int, tensor: int) -> Tile:
        """The cotangent of a value, as it is when a layer that made the value reads it."""
        return self.cotangents.setdefault(value, _stored(split, tensor, split.own(tensor))[0])


def _stored(split: AbstractSplit, tensor: int, spec: Spec) -> tuple[Tile, Spec]:
    return Tile(split.num_bytes(tensor, spec), split.dtype(tensor), split.itemsize(tensor)), spec


def all_steps(tiles: Iterable[LayerTiles]) -> list[TileStep]:
    """The steps of layers in the order in which they run."""
    return [step for one in tiles for step in one.steps]
