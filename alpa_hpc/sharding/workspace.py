"""A stage's programs -> bytes that live only while they run: what a task needs beyond the arrays that it is given and gives.

Steps become kernels (`fusion`), kernels are put in order (`schedule`), and their values live from the first to the last that needs them
(`lifetimes`). The results of a task have memory of their own; what lives before they are made may lie there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.merge_products import merge_products
from alpa_hpc.sharding.schedule import as_scheduled
from alpa_hpc.sharding.splits import AbstractSplit, ChosenSplit, EvenSplit
from alpa_hpc.sharding.task_tiles import all_steps, backward_tiles, forward_tiles
from alpa_hpc.sharding.tiles import LayerTiles, Origin, Tile
from alpa_hpc.sharding.update_memory import update_memory
from alpa_hpc.sharding.wiring import port_names


def chosen_workspace(layers: Sequence[ChosenLayer], shape: MeshShape, *, hiding: bool) -> float:
    """Bytes a device that the hungriest task of a stage needs on a mesh of `shape`, beside what a microbatch in flight holds.

    Never less than what an even split needs, which is what a stage is thought to need before its strategies are known. `hiding` as
    DeviceSpec has it.
    """
    splits = [ChosenSplit(chosen, shape) for chosen in layers]
    held = sum(_inflight_bytes(chosen) for chosen in layers)  # nothing of it is there when the update runs
    return max(
        chosen_forward_workspace(splits, hiding=hiding),
        chosen_backward_workspace(splits, hiding=hiding),
        *(evenly_split_workspace(chosen.problem, shape.num_devices) for chosen in layers),
        update_memory(layers, shape, hiding=hiding).most - held,
    )


def _inflight_bytes(chosen: ChosenLayer) -> float:
    columns = zip(chosen.problem.problem.inflight_bytes, chosen.choices, strict=True)
    return float(sum(num_bytes[choice] for num_bytes, choice in columns))


@lru_cache(maxsize=4096)
def evenly_split_workspace(problem: LayerProblem, num_devices: int) -> float:
    """Bytes a device that a layer's backward needs if every tensor were split over all devices: it knows no strategy, and moves nothing."""
    return backward_workspace([EvenSplit(problem, MeshShape(num_devices, 1))], hiding=False)


def forward_workspace(layers: Sequence[AbstractSplit], *, hiding: bool) -> float:
    """Bytes that the forward of consecutive layers needs."""
    tiles = forward_tiles(layers)
    kept = [tile for split, one in zip(layers, tiles, strict=True) for tile in _kept(split.problem, one)]
    lifetimes = lifetimes_of(merge_products(all_steps(tiles)), kept, mesh=layers[0].shape, spanning=layers[0].problem.spanning)
    return lifetimes.bytes_beside_kept(as_scheduled(lifetimes, hiding=hiding))


def _kept(problem: LayerProblem, tiles: LayerTiles) -> list[Tile]:
    """Outputs and residuals of a layer."""
    end = Origin(problem.forward, len(problem.forward.records))
    outputs = [tiles.leave(problem.forward, position, tiles.split.own(port.tensor)) for position, port in enumerate(problem.outputs)]
    return [*outputs, *(tiles.get(tensor, end) for tensor in problem.residuals)]


def chosen_forward_workspace(splits: Sequence[ChosenSplit], *, hiding: bool) -> float:
    """Bytes that the forward of a stage needs, by its strategies; worked out once for stages that are alike."""
    return _alike_forward(_stage(splits, hiding=hiding))


def chosen_backward_workspace(splits: Sequence[ChosenSplit], *, hiding: bool) -> float:
    """Bytes that the backward of a stage needs, by its strategies; worked out once for stages that are alike."""
    return _alike_backward(_stage(splits, hiding=hiding))


@dataclass(frozen=True, slots=True)
class _AlikeLayer:
    """What a layer's tasks are, and what they need depends on; `arrays` = numbers of what it reads and makes in its stage."""

    key: str
    remat: bool
    labels: tuple[tuple[str, ...], ...]
    choices: tuple[int, ...]
    spanning: tuple[bool, bool]
    arrays: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stage:
    """The layers of a stage; `splits` are those of one that is alike."""

    layers: tuple[_AlikeLayer, ...]
    shape: MeshShape
    hiding: bool
    splits: tuple[ChosenSplit, ...] = field(compare=False)


def _stage(splits: Sequence[ChosenSplit], *, hiding: bool) -> _Stage:
    numbers: dict[tuple[str, int], int] = {}
    return _Stage(tuple(_alike(split, numbers) for split in splits), splits[0].shape, hiding, tuple(splits))


def _alike(split: ChosenSplit, numbers: dict[tuple[str, int], int]) -> _AlikeLayer:
    problem = split.problem
    layer = problem.layer
    names = (*(("param", param) for param in layer.params), *(("batch", one) for one in layer.batch), *port_names(layer, ()))
    arrays = tuple(numbers.setdefault(name, len(numbers)) for name in names)
    return _AlikeLayer(layer.key, problem.remat, problem.labels, split.chosen.choices, problem.spanning, arrays)


@lru_cache(maxsize=1024)
def _alike_forward(stage: _Stage) -> float:
    return forward_workspace(stage.splits, hiding=stage.hiding)


@lru_cache(maxsize=1024)
def _alike_backward(stage: _Stage) -> float:
    return backward_workspace(stage.splits, hiding=stage.hiding)


def backward_workspace(layers: Sequence[AbstractSplit], *, hiding: bool) -> float:
    """Bytes that the backward of consecutive layers needs; where they recompute, their residuals live inside it."""
    tiles = backward_tiles(layers)
    lifetimes = lifetimes_of(
        merge_products(all_steps(tiles)), added=_gradients(tiles), mesh=layers[0].shape, spanning=layers[0].problem.spanning
    )
    return lifetimes.peak_bytes(as_scheduled(lifetimes, hiding=hiding))


def _gradients(tiles: Sequence[LayerTiles]) -> list[Tile]:
    """The gradients of parameters in the order of the task's results, which are those of the first layer first."""
    found: dict[int, list[Tile]] = {}
    for one in reversed(tiles):
        problem = one.split.problem
        end = Origin(problem.backward, len(problem.backward.records))
        made = problem.backward.outputs[len(problem.cotangent_inputs) :]
        for param, tensor in zip(problem.layer.params, made, strict=True):
            found.setdefault(param, []).append(one.get(tensor, end))
    return [tile for gradients in found.values() for tile in gradients]
