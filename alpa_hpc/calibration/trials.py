"""(ClusterSpec, Sizes) -> Trials: which primitives are timed, of what sizes and between whom. No plan and no model is among them.

Collectives run in all groups of a mesh axis at once and messages between all pairs at once, as in training, where devices share paths and
cores.
"""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.errors import ConfigError
from alpa_hpc.sharding.resharding import CollectiveKind

COLLECTIVES = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
COLUMNS_A_DEVICE = 64


class Pass(enum.Enum):
    """Passes over memory that models and optimisers consist of, beside products of matrices."""

    ADD = "add"
    GELU = "gelu"
    NORMALISE = "normalise"
    SOFTMAX = "softmax"
    ADAM = "adam"


class Precision(enum.Enum):
    """The formats that devices have a rate for."""

    BITS_32 = "float32"
    BITS_16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self is Precision.BITS_32 else 2


@dataclass(frozen=True, slots=True)
class CollectiveTrial:
    """A collective along `axis` of a mesh of all devices as `shape`; `num_bytes` = one group's whole tensor (`cluster.collectives`).

    That is a float32 matrix, `dim` of which is split before (all-gather, all-to-all) or after it (reduce-scatter): what a device has to
    do to put pieces of columns in place is a part of what the collective takes.
    """

    kind: CollectiveKind
    shape: MeshShape
    axis: int
    dim: int
    num_bytes: int

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        columns = COLUMNS_A_DEVICE * self.shape.sizes[self.axis]
        return self.num_bytes // (4 * columns), columns

    @property
    def label(self) -> str:
        """Words for people."""
        return f"{self.kind.value} among {self.shape.sizes[self.axis]} along axis {self.axis} of {self.shape.rows}x{self.shape.cols}"


@dataclass(frozen=True, slots=True)
class MessageTrial:
    """A message of `num_bytes` from each of `senders` to the rank in the same place of `receivers`, and one as long back."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    num_bytes: int

    @property
    def label(self) -> str:
        """Words for people."""
        return f"message of {len(self.senders)} ranks, the first to rank {self.receivers[0]}"


@dataclass(frozen=True, slots=True)
class ProductTrial:
    """The three products of a linear layer, forward and backward: `rows` vectors of `width` numbers, a weight of width x width."""

    precision: Precision
    rows: int
    width: int

    @property
    def label(self) -> str:
        """Words for people."""
        return f"products of {self.precision.value}"


@dataclass(frozen=True, slots=True)
class PassTrial:
    """A pass over `rows` float32 vectors of `width` numbers; those of a model's layer forward and backward."""

    kind: Pass
    rows: int
    width: int

    @property
    def label(self) -> str:
        """Words for people."""
        return f"pass {self.kind.value}"


Trial = CollectiveTrial | MessageTrial | ProductTrial | PassTrial


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the primitives are: bytes of tensors and messages, (rows, width) of products and of passes."""

    num_bytes: tuple[int, ...]
    products: tuple[tuple[int, int], ...]
    passes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not (self.num_bytes and self.products and self.passes):
            raise ConfigError(f"a calibration needs sizes of tensors, products and passes, found {self}")


CPU_SIZES = Sizes(
    num_bytes=(1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    products=((128, 256), (512, 256), (1024, 256), (256, 512), (1024, 512), (256, 1024), (1024, 1024)),
    passes=((128, 256), (512, 256), (1024, 512), (2048, 1024), (4096, 2048)),
)
GPU_SIZES = Sizes(
    num_bytes=(1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    products=((1024, 1024), (2048, 2048), (2048, 4096), (4096, 4096), (4096, 8192)),
    passes=((1024, 1024), (4096, 1024), (8192, 4096), (16384, 4096)),
)
QUICK_SIZES = Sizes(num_bytes=(1 << 12, 1 << 24), products=((64, 64), (512, 512)), passes=((64, 128), (1024, 1024)))
"""To try a calibration out: what it finds is no basis for a plan."""


def trials_of(cluster: ClusterSpec, sizes: Sizes) -> tuple[Trial, ...]:
    """All trials of a cluster, in the order in which they run."""
    products = (ProductTrial(precision, rows, width) for precision in Precision for rows, width in sizes.products)
    passes = (PassTrial(kind, rows, width) for kind in Pass for rows, width in sizes.passes)
    return (*products, *passes, *_collectives(cluster, sizes), *_messages(cluster, sizes))


def group_nodes(cluster: ClusterSpec, shape: MeshShape, axis: int) -> list[list[int]]:
    """The nodes of the devices of each group along an axis, in the order of the mesh."""
    nodes = (np.arange(shape.num_devices) // cluster.devices_per_node).reshape(shape.sizes)
    groups: list[list[int]] = (nodes.T if axis == 0 else nodes).tolist()
    return groups


def crosses_nodes(cluster: ClusterSpec, trial: CollectiveTrial | MessageTrial) -> bool:
    """Whether it uses the paths between nodes."""
    match trial:
        case CollectiveTrial():
            return any(len(set(group)) > 1 for group in group_nodes(cluster, trial.shape, trial.axis))
        case MessageTrial():
            ends = zip(trial.senders, trial.receivers, strict=True)
            return any(a // cluster.devices_per_node != b // cluster.devices_per_node for a, b in ends)


def _collectives(cluster: ClusterSpec, sizes: Sizes) -> Iterator[CollectiveTrial]:
    ways = [(kind, dim) for kind in COLLECTIVES for dim in ((0,) if kind is CollectiveKind.ALL_REDUCE else (0, 1))]
    for (shape, axis), (kind, dim), num_bytes in product(mesh_axes(cluster.num_devices), ways, sizes.num_bytes):
        least = 4 * COLUMNS_A_DEVICE * shape.sizes[axis] ** 2  # bytes of as many rows as there are devices: both dims divide
        yield CollectiveTrial(kind, shape, axis, dim, math.ceil(num_bytes / least) * least)


def mesh_axes(num_devices: int) -> list[tuple[MeshShape, int]]:
    """The axes of all logical shapes of so many devices, those that group them alike once."""
    shapes = [MeshShape(num_devices // cols, cols) for cols in range(1, num_devices) if num_devices % cols == 0]
    axes = [(shape, 0) for shape in shapes]
    return axes + [(shape, 1) for shape in shapes if shape.cols > 1]


def _messages(cluster: ClusterSpec, sizes: Sizes) -> Iterator[MessageTrial]:
    for senders, receivers in _pairs(Submesh(cluster.num_nodes, cluster.devices_per_node)):
        for num_bytes in sizes.num_bytes:
            yield MessageTrial(senders, receivers, num_bytes)


def _pairs(devices: Submesh) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Neighbours in every node, and each device of the first node with the one in the same place of the second."""
    size = devices.devices_per_node
    if size > 1:
        senders = tuple(node * size + place for node in range(devices.num_nodes) for place in range(0, size - 1, 2))
        yield senders, tuple(sender + 1 for sender in senders)
    if devices.num_nodes > 1:
        yield tuple(range(size)), tuple(range(size, 2 * size))
