"""Cross-mesh resharding: (source Layout, target Layout) -> the tiles that travel between the two meshes (paper, section 6).

Rule: a device of the target mesh needs one box of the array; the boxes of the source mesh cut it into tiles, and each tile is sent by one
of the devices that hold it, the one with the fewest bytes to send so far. Replication on the target mesh is removed beforehand by
`receive_layout`: the array arrives split over every mesh axis that fits, so each byte crosses once, and the fast links inside the mesh
gather the rest.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.sharding.spec import AXES, Spec, fits, tile_index

Box = tuple[tuple[int, int], ...]  # [start, stop) of each dim, in the whole array


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of the array that goes from one device to one other; devices are row * cols + col, slices index their local arrays."""

    source_device: int
    target_device: int
    source_slice: tuple[slice, ...]
    target_slice: tuple[slice, ...]
    shape: tuple[int, ...]


@cache
def receive_layout(layout: Layout) -> Layout:
    """The layout in which an array that is wanted as `layout` should arrive: split over as many mesh axes as divide it.

    Each mesh axis that does not split the array yet is appended to a dim that still divides, so a tiled all-gather over those axes gives
    `layout`. Among equal splits the earliest dims win: their tiles are contiguous. Axes that fit nowhere stay replicated. Raises
    ProgramError for a partial sum.
    """
    _refuse_partial(layout)
    used = {axis for dim in layout.spec.dims for axis in dim}
    spare = [axis for axis in AXES if axis not in used and layout.mesh.sizes[axis] > 1]
    choices = itertools.product((*range(len(layout.shape)), None), repeat=len(spare))
    candidates = (_with_axes(layout.spec, zip(spare, places, strict=True)) for places in choices)
    fitting = (spec for spec in candidates if fits(spec, layout.shape, layout.mesh))
    return replace(layout, spec=max(fitting, key=lambda spec: spec.num_shards(layout.mesh)))


@cache
def plan_transfer(source: Layout, target: Layout) -> tuple[Tile, ...]:
    """The tiles that carry every element of every target device exactly once, in order of target device and then of source box.

    At most one tile goes from one device to one other. Where several devices hold a box, the one with the fewest bytes so far sends it
    (then the lowest number): deterministic, so that every rank plans the same. Raises ProgramError where a layout is a partial sum, where
    shapes or dtypes differ, or where a dim does not divide.
    """
    _check_pair(source, target)
    holders = _holders(source)
    load = [0] * source.mesh.num_devices
    tiles: list[Tile] = []
    for target_device, wanted in enumerate(_boxes(target)):
        for held in _touching(wanted, source):
            overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True))
            shape = tuple(stop - start for start, stop in overlap)
            sender = min(holders[held], key=lambda device: (load[device], device))
            load[sender] += math.prod(shape)
            tiles.append(Tile(sender, target_device, _local(overlap, held), _local(overlap, wanted), shape))
    return tuple(tiles)


def wire_bytes(source: Layout, target: Layout) -> int:
    """Bytes that cross between the meshes when `source` is transferred to `target`."""
    return sum(math.prod(tile.shape) for tile in plan_transfer(source, target)) * np.dtype(source.dtype).itemsize


def lower_bound_bytes(layout: Layout) -> int:
    """Bytes that any transfer of the array moves between meshes: each element once."""
    return math.prod(layout.shape) * np.dtype(layout.dtype).itemsize


def _with_axes(spec: Spec, places: "zip[tuple[int, int | None]]") -> Spec:
    dims = list(spec.dims)
    for axis, dim in places:
        if dim is not None:
            dims[dim] = (*dims[dim], axis)
    return Spec(tuple(dims))


def _refuse_partial(layout: Layout) -> None:
    if layout.spec.partial:
        raise ProgramError(
            f"array {layout.dtype}{list(layout.shape)} in layout {layout.spec} is a partial sum over mesh axes {layout.spec.partial}, "
            "and a transfer carries whole values only. Reduce it on its mesh first (a `reduce` task), then send."
        )


def _check_pair(source: Layout, target: Layout) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ProgramError(
            f"a transfer from {source.dtype}{list(source.shape)} to {target.dtype}{list(target.shape)}: "
            "both ends must name the same shape and dtype. Make the Send and its Recv from one pair of layouts."
        )
    for layout in (source, target):
        _refuse_partial(layout)
        if not fits(layout.spec, layout.shape, layout.mesh):
            raise ProgramError(
                f"layout {layout.spec} on a {layout.mesh.rows} x {layout.mesh.cols} mesh does not divide the shape {list(layout.shape)}; "
                "a transfer needs equal tiles. Replicate that dim, or choose another spec."
            )


def _boxes(layout: Layout) -> list[Box]:
    """The box that each device holds, in device order."""
    return [_box(layout, *divmod(device, layout.mesh.cols)) for device in range(layout.mesh.num_devices)]


def _box(layout: Layout, row: int, col: int) -> Box:
    sizes = layout.spec.local_shape(layout.shape, layout.mesh)
    starts = (tile_index(dim, row, col, layout.mesh) * size for dim, size in zip(layout.spec.dims, sizes, strict=True))
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def _holders(layout: Layout) -> dict[Box, list[int]]:
    """The devices that hold each box."""
    holders: dict[Box, list[int]] = {}
    for device, box in enumerate(_boxes(layout)):
        holders.setdefault(box, []).append(device)
    return holders


def _touching(wanted: Box, source: Layout) -> list[Box]:
    """The source boxes that overlap `wanted`: found by division, so that big meshes need no search over pairs."""
    sizes = source.spec.local_shape(source.shape, source.mesh)
    pieces = (
        [(index * size, (index + 1) * size) for index in range(start // size, -(-stop // size))] if size else []
        for (start, stop), size in zip(wanted, sizes, strict=True)
    )
    return list(itertools.product(*pieces))


def _local(overlap: Box, held: Box) -> tuple[slice, ...]:
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(overlap, held, strict=True))
