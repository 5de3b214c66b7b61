"""Hardware as data: devices, links, nodes, and the rectangles of devices that stages run on."""

import math
from dataclasses import dataclass

from alpa_hpc.arguments import check_fields
from alpa_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """A network path. `bandwidth` in bytes a second in one direction, `latency` in seconds a message."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        check_fields(self)
        _check_positive("link", "bandwidth", self.bandwidth, "bytes a second")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"link: latency is {self.latency}, expected seconds a message, a finite number >= 0")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device. Memory in bytes (usable), rates in FLOP/s and bytes/s; `efficiency` scales the peak rates of matmuls.

    `memory` is a whole number once the device is made: 0.9 * 80e9 is as good, and a part of a byte is dropped.
    `hides_collectives`: XLA puts its kernels in an order in which others run while a collective is under way, and what these read waits in
    memory. So it is for GPUs from Hopper on, and not before: seen in code for H100 and for A100.
    """

    kind: str
    memory: float
    flops_32bit: float
    flops_16bit: float
    memory_bandwidth: float
    efficiency: float
    hides_collectives: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_positive(f"device {self.kind!r}", "memory", self.memory, "bytes", least=1)
        for name, unit in _RATE_UNITS.items():
            _check_positive(f"device {self.kind!r}", name, getattr(self, name), unit)
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"device {self.kind!r}: efficiency is {self.efficiency}, expected more than 0 and at most 1, "
                "the part of its peak rates that products of matrices reach"
            )
        object.__setattr__(self, "memory", math.floor(self.memory))


_RATE_UNITS = {"flops_32bit": "FLOP a second", "flops_16bit": "FLOP a second", "memory_bandwidth": "bytes a second"}


def _check_positive(owner: str, name: str, value: float, unit: str, least: int = 0) -> None:
    if not (0 < value < math.inf and value >= least):
        bound = f">= {least}" if least else "> 0"
        raise ConfigError(f"{owner}: {name} is {value}, expected {unit}, a finite number {bound}")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Equal nodes. `intra_node` is one device's path inside a node; `inter_node` is one *node's* path, shared by its devices."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ConfigError(
                f"cluster {self.name!r} needs at least one node and one device a node, found {self.num_nodes} x {self.devices_per_node}"
            )

    @property
    def num_devices(self) -> int:
        """All devices of the cluster."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """A physical rectangle: `num_nodes` x `devices_per_node`; either one node or whole nodes (paper, section 5.2)."""

    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """Devices in the rectangle."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, order=True)
class MeshShape:
    """The logical view a stage has of its submesh: axis 0 has `rows` devices, axis 1 has `cols`; devices in row-major order."""

    rows: int
    cols: int

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.rows * self.cols

    @property
    def sizes(self) -> tuple[int, int]:
        """Devices along axis 0 and axis 1."""
        return (self.rows, self.cols)
