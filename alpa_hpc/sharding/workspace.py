"""A stage's programs -> bytes that live only while they run: what a task needs beyond the arrays that it is given and gives.

Steps become kernels (`fusion`), kernels are put in order (`schedule`), and their values live from the first to the last that needs them
(`lifetimes`). The results of a task have memory of their own; what lives before they are made may lie there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from alpa_hpc.cluster.hardware import DeviceSpec, MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.schedule import as_scheduled
from alpa_hpc.sharding.splits import AbstractSplit, ChosenSplit, EvenSplit
from alpa_hpc.sharding.task_tiles import all_steps, backward_tiles, forward_tiles
from alpa_hpc.sharding.tiles import LayerTiles, Origin, Tile
from alpa_hpc.sharding.update_memory import update_memory


def chosen_workspace(layers: Sequence[ChosenLayer], shape: MeshShape) -> float:
    """Bytes a device that the hungriest task of a stage needs on a mesh of `shape`, beside what a microbatch in flight holds.

    Never less than what an even split needs, which is what a stage is thought to need before its strategies are known.
    """
    splits = [ChosenSplit(chosen, shape) for chosen in layers]
    held = sum(_inflight_bytes(chosen) for chosen in layers)  # nothing of it is there when the update runs
    return max(
        forward_workspace(splits),
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
    return backward_workspace([EvenSplit(problem, MeshShape(num_devices, 1))])


def forward_workspace(layers: Sequence[AbstractSplit]) -> float:
    """Bytes that the forward of consecutive layers needs."""
    tiles = forward_tiles(layers)
    kept = [tile for split, one in zip(layers, tiles, strict=True) for tile in _kept(split.problem, one)]
    lifetimes = lifetimes_of(all_steps(tiles), kept, (), layers[0].problem.device)
    return lifetimes.bytes_beside_kept(as_scheduled(lifetimes.kernels))


def _kept(problem: LayerProblem, tiles: LayerTiles) -> list[Tile]:
    """Outputs and residuals of a layer."""
    end = Origin(problem.forward, len(problem.forward.records))
    outputs = [tiles.leave(problem.forward, position, tiles.split.own(port.tensor)) for position, port in enumerate(problem.outputs)]
    return [*outputs, *(tiles.get(tensor, end) for tensor in problem.residuals)]


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
    return backward_workspace([backward.split])


def backward_workspace(layers: Sequence[AbstractSplit]) -> float:
    """Bytes that the backward of consecutive layers needs; where they recompute, their residuals live inside it."""
    tiles = backward_tiles(layers)
    gradients = [tile for one in tiles for tile in _gradients(one)]
    lifetimes = lifetimes_of(all_steps(tiles), (), gradients, layers[0].problem.device)
    return lifetimes.peak_bytes(as_scheduled(lifetimes.kernels))


def _gradients(tiles: LayerTiles) -> list[Tile]:
    program = tiles.split.problem.backward
    end = Origin(program, len(program.records))
    return [tiles.get(tensor, end) for tensor in program.outputs[len(tiles.split.problem.cotangent_inputs) :]]
