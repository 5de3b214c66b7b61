"""(number of layers, ClusterSpec) -> StageCandidates: every run of layers, submesh, logical shape and remat choice worth pricing.

Paper, section 5.2: submeshes are a part of one node that tiles it, (1, 2^i), or whole nodes, (n, M). Where M is not a power of
two the parts are the divisors of M. Candidates that belong to no complete partition (that leave devices which the other layers
cannot use up) are left out; that loses nothing.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.errors import ConfigError


class SubmeshShapes(enum.Enum):
    """Which numbers of whole nodes a stage may have."""

    ALL = "all"
    POWER_OF_TWO = "power_of_two"
    ONE_DEVICE = "one_device"
    """none: each stage has one device, so no operator is split"""


class LogicalShapes(enum.Enum):
    """Which logical shapes a submesh may take."""

    ALL = "all"
    SINGLE_NODE_MODEL_PARALLEL = "single_node_model_parallel"
    """axis 1 stays inside one node"""
    ROWS = "rows"
    """all devices along axis 0"""


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """Which stage candidates are priced. `remat` lists the choices tried: keep residuals (False), recompute them (True), or both."""

    submesh_shapes: SubmeshShapes = SubmeshShapes.ALL
    logical_shapes: LogicalShapes = LogicalShapes.SINGLE_NODE_MODEL_PARALLEL
    remat: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        if not self.remat or len(set(self.remat)) != len(self.remat):
            raise ConfigError(f"remat needs one or both of false and true, each once, found {list(self.remat)}")


@dataclass(frozen=True, slots=True, order=True)
class StageCandidate:
    """Layers [start, stop) on a submesh seen as `shape`, with or without recomputing each layer's forward in its backward."""

    start: int
    stop: int
    submesh: Submesh
    shape: MeshShape
    remat: bool

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, f"empty run of layers in {self}"
        assert self.submesh.num_devices == self.shape.num_devices, f"shape and submesh differ in devices in {self}"


def submesh_shapes(cluster: ClusterSpec, shapes: SubmeshShapes) -> tuple[Submesh, ...]:
    """The physical submeshes a stage may have, by number of devices: the divisors of a node, then whole nodes; always the whole cluster.

    With ONE_DEVICE a device, and nothing else.
    """
    if shapes is SubmeshShapes.ONE_DEVICE:
        return (Submesh(1, 1),)
    in_node = tuple(Submesh(1, size) for size in _divisors(cluster.devices_per_node))
    counts = range(2, cluster.num_nodes + 1)
    if shapes is SubmeshShapes.POWER_OF_TWO:
        counts = [count for count in counts if count & (count - 1) == 0 or count == cluster.num_nodes]
    return in_node + tuple(Submesh(count, cluster.devices_per_node) for count in counts)


def mesh_shapes(submesh: Submesh, shapes: LogicalShapes) -> tuple[MeshShape, ...]:
    """The logical shapes (n / k, k) of a submesh of n devices, by rows."""
    num_devices = submesh.num_devices
    limits = {LogicalShapes.ALL: num_devices, LogicalShapes.SINGLE_NODE_MODEL_PARALLEL: submesh.devices_per_node, LogicalShapes.ROWS: 1}
    widest = limits[shapes]
    return tuple(MeshShape(num_devices // cols, cols) for cols in reversed(_divisors(num_devices)) if cols <= widest)


def enumerate_candidates(num_layers: int, cluster: ClusterSpec, options: CandidateOptions) -> tuple[StageCandidate, ...]:
    """All candidates that belong to some complete partition of `num_layers` layers on all devices, by layers, devices and shape."""
    submeshes = submesh_shapes(cluster, options.submesh_shapes)
    usable = _usable_counts(num_layers, cluster.num_devices, [submesh.num_devices for submesh in submeshes])
    return tuple(
        StageCandidate(start, stop, submesh, shape, remat)
        for start in range(num_layers)
        for stop in range(start + 1, num_layers + 1)
        for submesh in submeshes
        if _completes(usable[start], usable[num_layers - stop], cluster.num_devices - submesh.num_devices)
        for shape in mesh_shapes(submesh, options.logical_shapes)
        for remat in options.remat
    )


def balanced(
    candidates: Sequence[StageCandidate], layer_flop: Sequence[float], num_devices: int, tolerance: float
) -> tuple[StageCandidate, ...]:
    """The candidates whose share of the cluster's `num_devices` is within a factor 1 + tolerance of their share of the FLOP.

    This can lose the optimum, unless the tolerance is infinite; it is the rule by which the paper's implementation keeps large searches
    short.
    """
    before = np.concatenate([[0.0], np.cumsum(np.asarray(layer_flop, np.float64))])

    def is_balanced(candidate: StageCandidate) -> bool:
        flop = float(before[candidate.stop] - before[candidate.start])
        fair = float(before[-1]) * candidate.submesh.num_devices / num_devices
        return flop / (1 + tolerance) <= fair and fair / (1 + tolerance) <= flop

    return tuple(candidate for candidate in candidates if is_balanced(candidate))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _usable_counts(num_layers: int, num_devices: int, sizes: Sequence[int]) -> npt.NDArray[np.bool_]:
    """usable[l, d]: whether l layers can be cut into stages that use exactly d devices (any number of stages from 1 to l)."""
    exactly = np.zeros((num_layers + 1, num_devices + 1), np.bool_)
    exactly[0, 0] = True
    for count in range(1, num_layers + 1):
        for size in sizes:
            exactly[count, size:] |= exactly[count - 1, : num_devices + 1 - size]
    usable = np.zeros_like(exactly)
    usable[0] = exactly[0]
    usable[1:] = np.logical_or.accumulate(exactly[1:], axis=0)
    return usable


def _completes(usable_before: npt.NDArray[np.bool_], usable_after: npt.NDArray[np.bool_], num_devices: int) -> bool:
    """Whether `num_devices` can be divided between the layers before a stage and those after it."""
    return bool(np.any(usable_before[: num_devices + 1] & usable_after[num_devices::-1]))
