"""(ClusterSpec, Submesh, MeshShape) -> LogicalMesh: which network path each logical axis of a stage's mesh has.

Paper, section 4.1. Devices are numbered node-major and laid out row-major, so axis 1 joins `cols` neighbours and axis 0
joins devices `cols` apart. A group inside one node runs at the intra-node link. A group that spans nodes runs a ring with
one outgoing flow a node; the groups of an axis run at once and share each node's network card, so each gets bandwidth
min(intra, inter / groups crossing a node) at the inter-node latency.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """A stage's mesh with the path of each axis, as one device sees it: `links` for rings, `exchange_links` for all-to-all."""

    submesh: Submesh
    shape: MeshShape
    device: DeviceSpec
    links: tuple[Link, Link]
    exchange_links: tuple[Link, Link]

    def __post_init__(self) -> None:
        assert self.submesh.num_devices == self.shape.num_devices, f"{self.shape} does not lay out the devices of {self.submesh}"

    @property
    def spanning(self) -> tuple[bool, bool]:
        """Whether the groups of an axis have devices of several nodes."""
        columns, rows = _nodes_of_groups(self.submesh, self.shape)
        return _several(columns), _several(rows)


def logical_mesh(cluster: ClusterSpec, submesh: Submesh, shape: MeshShape) -> LogicalMesh:
    """The logical mesh of `shape` on `submesh`, with the effective per-device link of each axis."""
    columns, rows = _nodes_of_groups(submesh, shape)
    return LogicalMesh(
        submesh,
        shape,
        cluster.device,
        (_ring_link(cluster, columns), _ring_link(cluster, rows)),
        (_exchange_link(cluster, columns), _exchange_link(cluster, rows)),
    )


def _nodes_of_groups(submesh: Submesh, shape: MeshShape) -> tuple[Groups, Groups]:
    """The nodes of the devices of each group of axis 0, and of axis 1."""
    nodes = (np.arange(submesh.num_devices) // submesh.devices_per_node).reshape(shape.sizes)
    return nodes.T.tolist(), nodes.tolist()


def _several(groups: Groups) -> bool:
    return any(len(frozenset(group)) > 1 for group in groups)


def _ring_link(cluster: ClusterSpec, groups: Groups) -> Link:
    """The link of a ring in each of `groups` (the nodes of a group's devices, in ring order), all running at once."""
    crossing = [frozenset(group) for group in groups if len(frozenset(group)) > 1]
    if not crossing:
        return cluster.intra_node
    flows = max(Counter(node for group in crossing for node in group).values())
    return Link(min(cluster.intra_node.bandwidth, cluster.inter_node.bandwidth / flows), cluster.inter_node.latency)


def _exchange_link(cluster: ClusterSpec, groups: Groups) -> Link:
    """The link an all-to-all in each of `groups` sees: a device serves n - 1 pairs, a node with m of them m (n - m)."""
    pairs_of_node: Counter[int] = Counter()
    for group in groups:
        for node, inside in Counter(group).items():
            pairs_of_node[node] += inside * (len(group) - inside)
    busiest = max(pairs_of_node.values())
    if busiest == 0:
        return cluster.intra_node
    share = (len(groups[0]) - 1) / busiest
    return Link(min(cluster.intra_node.bandwidth, cluster.inter_node.bandwidth * share), cluster.inter_node.latency)
