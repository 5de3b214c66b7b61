"""Resharding: from one spec to another on the same mesh, as the collectives that are really run (paper, Table 2).

`reshard_steps` is the single source: the cost model prices these steps and `apply.py` executes them, one collective a move.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import assert_never

from alpa_hpc.cluster import collectives
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.cluster.mesh import LogicalMesh
from alpa_hpc.sharding.spec import AXES, Spec


@dataclass(frozen=True, slots=True)
class Slice:
    """Keep this device's piece of `dim`; no traffic."""

    axis: int
    dim: int


@dataclass(frozen=True, slots=True)
class AllGather:
    """Undo a split of `dim` over `axis` (the minor-most split of that dim)."""

    axis: int
    dim: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum the partial values over `axis`."""

    axis: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Sum the partial values over `axis` and keep this device's piece of `dim`."""

    axis: int
    dim: int


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Move the split over `axis` from dim `source` to dim `target`."""

    axis: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class MaskFirst:
    """Make a whole value partial over `axis`: the first device keeps it, the others hold zeros; no traffic."""

    axis: int


Step = Slice | AllGather | AllReduce | ReduceScatter | AllToAll | MaskFirst
LocalStep = Slice | MaskFirst  # what a device does by itself


class CollectiveKind(enum.Enum):
    """What devices do together, by the opcodes of HLO."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


@dataclass(frozen=True, slots=True)
class Lane:
    """A kind of collective among the devices that differ only in their places on `axes` of the mesh."""

    kind: CollectiveKind
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Steps that run as one, and the specs before and after: all-reduces in a row are one over all their axes."""

    steps: tuple[Step, ...]
    before: Spec
    after: Spec

    @property
    def is_local(self) -> bool:
        """Whether every device does it by itself."""
        return isinstance(self.steps[0], LocalStep)

    def sums_inside(self, tile: tuple[int, ...]) -> bool:
        """Whether it is a reduce-scatter of a tile of this shape along a dim with others in front of it: XLA turns the tile first."""
        match self.steps[0]:
            case ReduceScatter(_, dim):
                return prod(tile[:dim]) > 1
            case _:
                return False

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes along which devices take part."""
        return tuple(sorted(step.axis for step in self.steps))

    @property
    def lane(self) -> Lane:
        """The collective."""
        match self.steps[0]:
            case AllReduce():
                kind = CollectiveKind.ALL_REDUCE
            case AllGather():
                kind = CollectiveKind.ALL_GATHER
            case ReduceScatter():
                kind = CollectiveKind.REDUCE_SCATTER
            case AllToAll():
                kind = CollectiveKind.ALL_TO_ALL
            case Slice() | MaskFirst():
                raise AssertionError(f"{self.steps[0]} is no collective")
            case other:
                assert_never(other)
        return Lane(kind, self.axes)


@cache
def reshard_moves(source: Spec, target: Spec, mesh: MeshShape) -> tuple[Move, ...]:
    """`reshard_steps` as a mesh of this shape runs them: without those along axes of one device, where there is nothing to do."""
    moves: list[Move] = []
    spec = source
    for step in reshard_steps(source, target):
        before, spec = spec, after_step(spec, step)
        if mesh.sizes[step.axis] == 1:
            continue
        if moves and isinstance(step, AllReduce) and isinstance(moves[-1].steps[-1], AllReduce):
            last = moves.pop()
            moves.append(Move((*last.steps, step), last.before, spec))
        else:
            moves.append(Move((step,), before, spec))
    return tuple(moves)


def joint_moves(sources: Iterable[Spec], target: Spec, mesh: MeshShape) -> tuple[Move, ...]:
    """The moves that bring arrays in `sources` to `target` where all are summed: those that come by the same spec are summed there.

    In an order in which all that come by a spec are there before it is left.
    """
    ways = {source: reshard_moves(source, target, mesh) for source in sources}
    moves = {move.before: (len(way) - number, move) for way in ways.values() for number, move in enumerate(way)}
    return tuple(move for _, move in sorted(moves.values(), key=lambda found: -found[0]))


@cache
def reshard_steps(source: Spec, target: Spec) -> tuple[Step, ...]:
    """The collectives that turn `source` into `target`, cheap ones first so that later ones move fewer bytes."""
    assert len(source.dims) == len(target.dims), f"cannot reshard {source} to {target}: ranks differ"
    steps: list[Step] = []
    current = source
    while current != target:
        step = _next_step(current, target)
        steps.append(step)
        current = after_step(current, step)
        assert len(steps) < 16, f"resharding {source} to {target} does not end"
    return tuple(steps)


def _next_step(current: Spec, target: Spec) -> Step:
    free = [axis for axis in AXES if axis not in current.partial and all(axis not in dim for dim in current.dims)]
    for axis in free:
        dim = _ready_dim(current, target, axis)
        if dim >= 0:
            return Slice(axis, dim)
    for axis in current.partial:
        dim = _ready_dim(current, target, axis)
        if dim >= 0:
            return ReduceScatter(axis, dim)
    surplus = _surplus(current, target)
    for axis, dim in surplus:
        ready = _ready_dim(current, target, axis)
        if ready >= 0 and ready != dim:
            return AllToAll(axis, dim, ready)
    for axis in current.partial:
        if axis not in target.partial:
            return AllReduce(axis)
    if surplus:
        axis, dim = surplus[0]
        return AllGather(axis, dim)
    (axis,) = [axis for axis in target.partial if axis not in current.partial][:1]
    return MaskFirst(axis)


def _ready_dim(current: Spec, target: Spec, axis: int) -> int:
    """The dim of `target` that `axis` splits, if `axis` is the next split that dim is missing; else -1."""
    for dim, (have, want) in enumerate(zip(current.dims, target.dims, strict=True)):
        if axis in want and have == want[: want.index(axis)]:
            return dim
    return -1


def _surplus(current: Spec, target: Spec) -> list[tuple[int, int]]:
    """(axis, dim) of minor-most splits that `target` does not have in that place."""
    found: list[tuple[int, int]] = []
    for dim, (have, want) in enumerate(zip(current.dims, target.dims, strict=True)):
        if have and have != want[: len(have)]:
            found.append((have[-1], dim))
    return found


def after_step(spec: Spec, step: Step) -> Spec:
    """The spec that a value of spec `spec` has after `step`."""
    dims = list(spec.dims)
    partial = spec.partial
    match step:
        case Slice(axis, dim):
            dims[dim] = (*dims[dim], axis)
        case AllGather(_, dim):
            dims[dim] = dims[dim][:-1]
        case AllReduce(axis):
            partial = tuple(a for a in partial if a != axis)
        case ReduceScatter(axis, dim):
            partial = tuple(a for a in partial if a != axis)
            dims[dim] = (*dims[dim], axis)
        case AllToAll(axis, source, target):
            dims[source] = dims[source][:-1]
            dims[target] = (*dims[target], axis)
        case MaskFirst(axis):
            partial = tuple(sorted((*partial, axis)))
    return Spec(tuple(dims), partial)


def step_seconds(step: Step, mesh: LogicalMesh, local_bytes: float) -> float:
    """Seconds of one step on a tile of `local_bytes` (its size before the step), by the alpha-beta model."""
    link = mesh.links[step.axis]
    size = mesh.shape.sizes[step.axis]
    match step:
        case Slice() | MaskFirst():
            return 0.0
        case AllGather():
            return collectives.all_gather(link, size, local_bytes * size)
        case AllReduce():
            return collectives.all_reduce(link, size, local_bytes)
        case ReduceScatter():
            return collectives.reduce_scatter(link, size, local_bytes)
        case AllToAll():
            return collectives.all_to_all(mesh.exchange_links[step.axis], size, local_bytes * size)


def bytes_after(step: Step, mesh: LogicalMesh, local_bytes: float) -> float:
    """Bytes of the tile after `step`."""
    size = mesh.shape.sizes[step.axis]
    match step:
        case Slice() | ReduceScatter():
            return local_bytes / size
        case AllGather():
            return local_bytes * size
        case AllReduce() | AllToAll() | MaskFirst():
            return local_bytes


def reshard_seconds(mesh: LogicalMesh, source: Spec, target: Spec, num_bytes: float) -> float:
    """Seconds to reshard a tensor of `num_bytes` (all of it) from `source` to `target`."""
    local = num_bytes / source.num_shards(mesh.shape)
    seconds = 0.0
    for step in reshard_steps(source, target):
        seconds += step_seconds(step, mesh, local)
        local = bytes_after(step, mesh, local)
    return seconds
