"""Chosen stages -> seconds of one iteration, and whether they fit: the definition that the stage DP minimises (paper, Eq. 2 and 5).

    T = sum_i t_i + (B - 1) * max_i t_i,    t_i = seconds_i + seconds_once_i / B + transfer_i
    fixed_i + in_flight(stages from i to the end, B) * inflight_i + workspace_i <= limit    for each stage i

Beyond the paper, t_i has gradient synchronisation, update and transfer. transfer_i is what crosses the cut before stage i, forward
and back. In pipeline order a stage starts after so many devices; its input stays inside a node if the stage is a part of a node, starts
inside one and ends there, and then uses the stage's own device paths; otherwise it uses the network cards of the stage's nodes. (A stage
that would end in the next node is laid into another one, `stages.placement`; so in every partition of a cluster of n nodes n - 1 or more
stages receive from another node.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alpa_hpc.cluster.collectives import point_to_point
from alpa_hpc.cluster.hardware import ClusterSpec, Link, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.stages.cost_table import CostTable, StageOption

InFlight = Callable[[int, int], int]  # (stages from this one to the end, this one included; microbatches) -> microbatches held at once


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers [start, stop) run by `option` on `submesh`."""

    start: int
    stop: int
    submesh: Submesh
    option: StageOption


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Stages in pipeline order. No partition of the same table takes fewer than `lower_bound` seconds an iteration."""

    stages: tuple[StageChoice, ...]
    objective_seconds: float
    lower_bound: float


def one_forward_one_backward(stages_to_end: int, num_microbatches: int) -> int:
    """Microbatches in flight under 1F1B."""
    return min(stages_to_end, num_microbatches)


def iteration_seconds(stages: Sequence[StageChoice], table: CostTable, cluster: ClusterSpec, num_microbatches: int) -> float:
    """Seconds of one iteration of `stages`, by the formula above."""
    seconds: list[float] = []
    offset = 0
    for stage in stages:
        crosses = crosses_nodes(cluster, stage.submesh, offset)
        transfer = transfer_seconds(cluster, stage.submesh, table.boundary_bytes[stage.start], crosses=crosses)
        seconds.append(option_seconds(stage.option, num_microbatches) + transfer)
        offset += stage.submesh.num_devices
    return sum(seconds) + (num_microbatches - 1) * max(seconds)


def option_seconds(option: StageOption, num_microbatches: int) -> float:
    """Seconds of a stage a microbatch, with its share of what happens once an iteration."""
    return option.seconds + option.seconds_once / num_microbatches


def crosses_nodes(cluster: ClusterSpec, submesh: Submesh, offset: int) -> bool:
    """Whether the input of a stage on `submesh` that starts after `offset` devices comes from another node."""
    inside = offset % cluster.devices_per_node
    return inside == 0 or inside + submesh.num_devices > cluster.devices_per_node


def transfer_seconds(cluster: ClusterSpec, submesh: Submesh, num_bytes: float, *, crosses: bool) -> float:
    """Seconds to receive `num_bytes` on `submesh` and to send as many back; 0 where nothing is received."""
    if num_bytes == 0:
        return 0.0
    bandwidth = cluster.intra_node.bandwidth * submesh.num_devices
    if not crosses:
        return 2 * point_to_point(Link(bandwidth, cluster.intra_node.latency), num_bytes)
    network = cluster.inter_node.bandwidth * submesh.num_nodes
    return 2 * point_to_point(Link(min(bandwidth, network), cluster.inter_node.latency), num_bytes)


def check_stages(
    stages: Sequence[StageChoice],
    table: CostTable,
    cluster: ClusterSpec,
    num_microbatches: int,
    memory_limit: float,
    in_flight: InFlight = one_forward_one_backward,
) -> Sequence[StageChoice]:
    """Return `stages` if they cover the layers in order, use all devices, come from `table` and fit; raise PlanError otherwise."""
    expected = 0
    for position, stage in enumerate(stages):
        if stage.start != expected:
            raise PlanError(f"stage {position} starts at layer {stage.start}, expected layer {expected}: stages must be consecutive")
        if stage.option not in table.options.get((stage.start, stage.stop, stage.submesh), ()):
            raise PlanError(f"stage {position} runs layers [{stage.start}, {stage.stop}) by an option that the cost table lacks")
        held = in_flight(len(stages) - position, num_microbatches)
        if stage.option.peak_bytes(held) > memory_limit:
            raise PlanError(
                f"stage {position} needs {stage.option.peak_bytes(held):.0f} bytes a device with {held} microbatches in flight, "
                f"the limit is {memory_limit:.0f}"
            )
        expected = stage.stop
    if expected != table.num_layers:
        raise PlanError(f"the stages end at layer {expected}, expected {table.num_layers}")
    used = sum(stage.submesh.num_devices for stage in stages)
    if used != cluster.num_devices:
        raise PlanError(f"the stages use {used} devices, expected all {cluster.num_devices} of cluster {cluster.name!r}")
    return stages
