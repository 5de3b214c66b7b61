"""Which link each logical axis gets: worked cases, and the flows counted edge by edge."""

from collections import Counter

import pytest

from alpa_hpc.cluster.collectives import all_to_all
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)
INTRA = Link(100e9, 1e-6)
INTER = Link(80e9, 1e-5)


def cluster_of(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    return ClusterSpec("test", num_nodes, devices_per_node, DEVICE, INTRA, INTER)


@pytest.mark.parametrize("shape", [MeshShape(1, 4), MeshShape(2, 2), MeshShape(4, 1)])
def test_an_axis_inside_one_node_has_the_intra_node_link(shape: MeshShape) -> None:
    mesh = logical_mesh(cluster_of(2, 4), Submesh(1, 4), shape)
    assert mesh.links == (INTRA, INTRA)
    assert mesh.exchange_links == (INTRA, INTRA)


@pytest.mark.parametrize(
    ("shape", "bandwidth_rows", "bandwidth_cols"),
    [
        (MeshShape(2, 8), 80e9 / 8, 100e9),  # eight groups of two devices cross each node; rows lie inside nodes
        (MeshShape(4, 4), 80e9 / 4, 100e9),
        (MeshShape(8, 2), 80e9 / 2, 100e9),
        (MeshShape(16, 1), 80e9, 100e9),  # one ring through all devices: one flow a node
        (MeshShape(1, 16), 100e9, 80e9),
    ],
)
def test_groups_that_cross_nodes_share_their_card(shape: MeshShape, bandwidth_rows: float, bandwidth_cols: float) -> None:
    mesh = logical_mesh(cluster_of(2, 8), Submesh(2, 8), shape)
    assert [link.bandwidth for link in mesh.links] == [bandwidth_rows, bandwidth_cols]
    for link, size in zip(mesh.links, shape.sizes, strict=True):
        crosses = link.bandwidth != INTRA.bandwidth
        assert link.latency == (INTER.latency if crosses else INTRA.latency), size


def test_a_fast_network_never_beats_the_device_path() -> None:
    fast = ClusterSpec("fast", 2, 2, DEVICE, Link(10e9, 1e-6), Link(1000e9, 1e-5))
    mesh = logical_mesh(fast, Submesh(2, 2), MeshShape(2, 2))
    assert mesh.links[0].bandwidth == 10e9
    assert mesh.exchange_links[0].bandwidth == 10e9


@pytest.mark.parametrize("shape", [MeshShape(3, 4), MeshShape(4, 3), MeshShape(2, 6), MeshShape(6, 2), MeshShape(12, 1), MeshShape(1, 12)])
def test_flows_equal_the_ring_edges_that_leave_a_node(shape: MeshShape) -> None:
    cluster = cluster_of(2, 6)
    mesh = logical_mesh(cluster, Submesh(2, 6), shape)
    rows, cols = shape.sizes
    down = [[row * cols + col for row in range(rows)] for col in range(cols)]
    across = [[row * cols + col for col in range(cols)] for row in range(rows)]
    for axis, groups in enumerate((down, across)):
        edges = [(group[i] // 6, group[(i + 1) % len(group)] // 6) for group in groups for i in range(len(group))]
        flows = max(Counter(src for src, dst in edges if src != dst).values(), default=0)
        assert mesh.links[axis].bandwidth == (min(100e9, 80e9 / flows) if flows else 100e9)


@pytest.mark.parametrize("shape", [MeshShape(2, 6), MeshShape(1, 12), MeshShape(3, 4), MeshShape(4, 3)])
def test_an_exchange_takes_as_long_as_its_busiest_card_or_device(shape: MeshShape) -> None:
    slow = ClusterSpec("slow", 2, 6, DEVICE, Link(100e9, 0.0), Link(5e9, 0.0))
    mesh = logical_mesh(slow, Submesh(2, 6), shape)
    rows, cols = shape.sizes
    num_bytes = 1e9
    for axis, size in enumerate(shape.sizes):
        sent: Counter[int] = Counter()
        for src in range(12):
            for dst in range(12):
                same_group = src % cols == dst % cols if axis == 0 else src // cols == dst // cols
                if same_group and src // 6 != dst // 6:
                    sent[src // 6] += 1
        card = max(sent.values(), default=0) * num_bytes / size**2 / 5e9
        path = (size - 1) / size**2 * num_bytes / 100e9
        assert all_to_all(mesh.exchange_links[axis], size, num_bytes) == pytest.approx(max(card, path)), (rows, axis)


@pytest.mark.parametrize(
    ("submesh", "shape", "spanning"),
    [
        ((1, 8), (2, 4), (False, False)),
        ((2, 8), (2, 8), (True, False)),
        ((2, 8), (8, 2), (True, False)),
        ((2, 8), (1, 16), (False, True)),
        ((2, 8), (16, 1), (True, False)),
        ((3, 4), (2, 6), (True, True)),
    ],
)
def test_an_axis_spans_nodes_where_a_group_has_devices_of_several(
    submesh: tuple[int, int], shape: tuple[int, int], spanning: tuple[bool, bool]
) -> None:
    mesh = logical_mesh(cluster_of(*submesh), Submesh(*submesh), MeshShape(*shape))
    assert mesh.spanning == spanning
