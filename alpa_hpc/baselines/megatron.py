"""(number of layers, rows of a microbatch, ClusterSpec) -> Megatron-style plans: a grid of data x tensor x pipeline parallel degrees.

Every stage has as many layers and devices; tensor parallelism stays inside a node (Narayanan et al. 2021, the paper's baseline in
section 8.1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from alpa_hpc.baselines.manual import ManualStage
from alpa_hpc.baselines.restriction import MEGATRON
from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh

WIDEST_TENSOR_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Degrees:
    """Into how many parts the batch, each layer and the row of layers are split."""

    data: int
    tensor: int
    pipeline: int

    def __str__(self) -> str:
        return f"dp{self.data} tp{self.tensor} pp{self.pipeline}"


def megatron_grid(num_layers: int, rows: int, cluster: ClusterSpec) -> tuple[Degrees, ...]:
    """All degrees whose product is the number of devices: pipeline divides the layers, data the rows, tensor a node."""
    return tuple(
        Degrees(per_stage // tensor, tensor, pipeline)
        for pipeline in _divisors(num_layers)
        if cluster.num_devices % pipeline == 0
        for per_stage in (cluster.num_devices // pipeline,)
        if per_stage % cluster.devices_per_node == 0 or cluster.devices_per_node % per_stage == 0
        for tensor in _divisors(min(per_stage, cluster.devices_per_node))
        if tensor <= WIDEST_TENSOR_PARALLEL and per_stage % tensor == 0 and rows % (per_stage // tensor) == 0
    )


def megatron_stages(degrees: Degrees, num_layers: int, cluster: ClusterSpec) -> tuple[ManualStage, ...]:
    """The stages of a point of the grid, all recomputed in the backward pass."""
    per_stage, layers = degrees.data * degrees.tensor, num_layers // degrees.pipeline
    width = cluster.devices_per_node
    submesh = Submesh(1, per_stage) if per_stage <= width else Submesh(per_stage // width, width)
    shape = MeshShape(degrees.data, degrees.tensor)
    starts = range(0, num_layers, layers)
    return tuple(ManualStage(start, start + layers, submesh, shape, remat=True, restriction=MEGATRON) for start in starts)


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)
