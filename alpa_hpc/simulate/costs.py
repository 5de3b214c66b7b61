"""What the parts of an iteration take: seconds of tasks, of messages between meshes (alpha-beta) and of joins, bytes of buffers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.runtime.instructions import Send


@dataclass(frozen=True, slots=True, eq=False)
class SimulationCosts:
    """Per mesh: seconds of each task, bytes a device of each buffer name, and those that each task needs beside its buffers.

    For a message from one mesh to another, its seconds.

    `send_seconds(mesh, to, send)` is how long the message occupies the link from `mesh` to `to`; `reduce_seconds` is one AllMeshReduce.
    """

    task_seconds: tuple[Mapping[str, float], ...]
    buffer_bytes: tuple[Mapping[str, int], ...]
    workspace_bytes: tuple[Mapping[str, int], ...]
    send_seconds: Callable[[int, int, Send], float]
    reduce_seconds: float


def transfer_seconds(cluster: ClusterSpec, source_devices: Sequence[int], target_devices: Sequence[int], num_bytes: int) -> float:
    """Seconds to move an array of `num_bytes`, each byte once, from devices to other devices of the cluster (devices count through nodes).

    Every source device holds an equal part and sends equal parts of it to every target device. A node's bytes to and from other nodes
    share its inter-node path; a device's bytes to and from devices of its node use its own path. The slowest path decides:
    seconds = max over paths of latency + bytes / bandwidth.
    """
    assert source_devices and target_devices, "a transfer has devices at both ends"
    sources, targets = (Counter(device // cluster.devices_per_node for device in devices) for devices in (source_devices, target_devices))
    seconds = 0.0
    for here, there in ((sources, targets), (targets, sources)):
        for node, count in here.items():
            inside = there[node] / there.total()
            outside_bytes = num_bytes * count / here.total() * (1 - inside)
            inside_bytes = num_bytes / here.total() * inside
            for link, link_bytes in ((cluster.inter_node, outside_bytes), (cluster.intra_node, inside_bytes)):
                if link_bytes > 0:
                    seconds = max(seconds, link.latency + link_bytes / link.bandwidth)
    return seconds
