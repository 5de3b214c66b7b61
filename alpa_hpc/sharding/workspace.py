"""A stage's programs -> bytes that live only while they run: what a task needs beyond the arrays that it is given and gives.

Steps become kernels (`fusion`), kernels are put in order (`schedule`), and their values live from the first to the last that needs them
(`lifetimes`). The results of a task have memory of their own; what lives before they are made may lie there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from alpa_hpc.cluster.hardware import DeviceSpec, MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.schedule import as_scheduled
from alpa_hpc.sharding.splits import AbstractSplit, ChosenSplit, EvenSplit
from alpa_hpc.sharding.tiles import LayerTiles, Tile, TileStep
from alpa_hpc.sharding.update_memory import update_memory


def chosen_workspace(layers: Sequence[ChosenLayer], shape: MeshShape) -> float:
    """Bytes a device that the hungriest task of a stage needs on a mesh of `shape`, beside what a microbatch in flight holds.

    Never less than what an even split needs, which is what a stage is thought to need before its strategies are known.
    """
    splits = [ChosenSplit(chosen, shape) for chosen in layers]
    held = sum(_inflight_bytes(chosen) for chosen in layers)  # nothing of it is there when the update runs
    return max(
        forward_workspace([(split.chosen.problem, split) for split in splits]),
        *map(chosen_backward_workspace, splits),
        *(evenly_split_workspace(chosen.problem, shape.num_devices) for chosen in layers),
        update_memory(layers, shape).most - held,
    )


def _inflight_bytes(chosen: ChosenLayer) -> float:
    columns = zip(chosen.problem.problem.inflight_bytes, chosen.choices, strict=True)
    return float(sum(num_bytes[choice] for num_bytes, choice in columns))


@lru_cache(maxsize=4096)
def evenly_split_workspace(problem: LayerProblem, num_devices: int) -> float:
    """Bytes a device that a layer's backward needs if every tensor were split over all devices: it knows no strategy, and moves nothing."""
    return backward_workspace(problem, EvenSplit(problem, MeshShape(num_devices, 1)))


def forward_workspace(layers: Sequence[tuple[LayerProblem, AbstractSplit]]) -> float:
    """Bytes that the forward of consecutive layers needs."""
    steps: list[TileStep] = []
    kept: list[Tile] = []
    values: dict[int, Tile] = {}
    for problem, split in layers:
        tiles = forward_tiles(problem, split, values)
        steps += tiles.steps
        for position, port in enumerate(problem.outputs):
            values[port.value] = tiles.leave(problem.forward, position, split.own(port.tensor))
        kept += map(tiles.get, problem.residuals)
    kept += values.values()
    lifetimes = lifetimes_of(steps, kept, (), layers[0][0].device)
    return lifetimes.bytes_beside_kept(as_scheduled(lifetimes.kernels))


def chosen_backward_workspace(split: ChosenSplit) -> float:
    """Bytes that the backward of one layer needs, by its strategies; worked out once for layers that are alike."""
    problem = split.chosen.problem
    return _alike_workspace(
        _Backward(problem.layer.key, problem.remat, problem.labels, split.chosen.choices, split.shape, problem.device, split)
    )


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the backward of a layer is, and what it needs depends on; `split` is one of those that are alike."""

    key: str
    remat: bool
    labels: tuple[tuple[str, ...], ...]
    choices: tuple[int, ...]
    shape: MeshShape
    device: DeviceSpec
    split: ChosenSplit = field(compare=False)


@lru_cache(maxsize=1024)
def _alike_workspace(backward: _Backward) -> float:
    return backward_workspace(backward.split.chosen.problem, backward.split)


def backward_workspace(problem: LayerProblem, split: AbstractSplit) -> float:
    """Bytes that the backward of one layer needs; if it recomputes, its residuals live inside it."""
    tiles = backward_tiles(problem, split)
    gradients = problem.backward.outputs[len(problem.cotangent_inputs) :]
    lifetimes = lifetimes_of(tiles.steps, (), [tiles.get(tensor) for tensor in gradients], problem.device)
    return lifetimes.peak_bytes(as_scheduled(lifetimes.kernels))


def forward_tiles(problem: LayerProblem, split: AbstractSplit, values: Mapping[int, Tile] = MappingProxyType({})) -> LayerTiles:
    """The steps of a layer's forward, its outputs brought to their ports; `values` = those that layers before it have made."""
    tiles = LayerTiles(split)
    for port in problem.inputs:
        if port.value in values:
            tiles.put(port.tensor, values[port.value])
    outputs = problem.forward.outputs[: len(problem.outputs)]
    tiles.run(problem.forward, (*outputs, *problem.residuals))
    for position, port in enumerate(problem.outputs):
        tiles.leave(problem.forward, position, split.own(port.tensor))
    return tiles


def backward_tiles(problem: LayerProblem, split: AbstractSplit) -> LayerTiles:
    """The steps of a layer's backward, after those of its forward if it recomputes."""
    tiles = LayerTiles(split)
    if problem.remat:
        tiles.run(problem.forward, problem.remade)
    tiles.run(problem.backward, problem.backward.outputs)
    for position, port in enumerate(problem.cotangent_inputs):
        tiles.leave(problem.backward, position, split.own(port.tensor))
    return tiles
