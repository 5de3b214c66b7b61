"""Placement covers every device once, keeps submeshes inside nodes, and exists for whatever device counts the DP may choose."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.stages.candidate import CandidateOptions, SubmeshShapes, enumerate_candidates, submesh_shapes
from alpa_hpc.stages.placement import place_submeshes

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)


def cluster_of(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    return ClusterSpec("test", num_nodes, devices_per_node, DEVICE, Link(4.0, 0.01), Link(1.0, 0.1))


def check_covered(submeshes: list[Submesh], cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    placed = place_submeshes(submeshes, cluster)
    width = cluster.devices_per_node
    assert sorted(device for devices in placed for device in devices) == list(range(cluster.num_devices))
    for submesh, devices in zip(submeshes, placed, strict=True):
        assert devices == tuple(range(devices[0], devices[0] + submesh.num_devices))
        if submesh.devices_per_node < width:
            assert devices[0] // width == devices[-1] // width
        else:
            assert devices[0] % width == 0
    return placed


def covers(sizes: list[int], total: int) -> Iterator[list[int]]:
    """Every multiset of `sizes` that sums to `total`."""
    if not sizes:
        if total == 0:
            yield []
        return
    for count in range(total // sizes[0] + 1):
        for rest in covers(sizes[1:], total - count * sizes[0]):
            yield [sizes[0]] * count + rest


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8, 9, 10, 12])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_every_set_of_submeshes_that_sums_to_the_cluster_can_be_placed(num_nodes: int, width: int) -> None:
    cluster = cluster_of(num_nodes, width)
    by_size = {submesh.num_devices: submesh for submesh in submesh_shapes(cluster, SubmeshShapes.ALL)}
    for sizes in covers(sorted(by_size), cluster.num_devices):
        check_covered([by_size[size] for size in sizes], cluster)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_nodes=st.integers(1, 4), width=st.sampled_from([2, 3, 4, 6, 8, 12, 16]))
def test_any_order_of_stages_can_be_placed(data: st.DataObject, num_nodes: int, width: int) -> None:
    cluster = cluster_of(num_nodes, width)
    shapes = submesh_shapes(cluster, SubmeshShapes.ALL)
    submeshes: list[Submesh] = []
    while (left := cluster.num_devices - sum(submesh.num_devices for submesh in submeshes)) > 0:
        submeshes.append(data.draw(st.sampled_from([submesh for submesh in shapes if submesh.num_devices <= left])))
    check_covered(submeshes, cluster)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_nodes=st.integers(1, 5), width=st.sampled_from([3, 6, 12]), shapes=st.sampled_from(SubmeshShapes))
def test_every_partition_into_candidates_can_be_placed(data: st.DataObject, num_nodes: int, width: int, shapes: SubmeshShapes) -> None:
    """Nodes whose devices are no power of two, whatever stages come after each other."""
    if shapes is SubmeshShapes.ONE_DEVICE:  # a stage a device takes a layer a device
        num_nodes = 1
    cluster = cluster_of(num_nodes, width)
    num_layers = data.draw(st.integers(0, 3)) + width if shapes is SubmeshShapes.ONE_DEVICE else data.draw(st.integers(1, 6))
    candidates = enumerate_candidates(num_layers, cluster, CandidateOptions(shapes, remat=(True,)))
    cells = {(one.start, one.stop, one.submesh) for one in candidates}
    completes = completions(frozenset(cells), num_layers)
    start, left, submeshes = 0, cluster.num_devices, list[Submesh]()
    while start < num_layers:
        following = sorted(
            (stop, submesh) for first, stop, submesh in cells if first == start and (stop, left - submesh.num_devices) in completes
        )
        start, submesh = data.draw(st.sampled_from(following))
        left -= submesh.num_devices
        submeshes.append(submesh)
    check_covered(submeshes, cluster)


def completions(cells: frozenset[tuple[int, int, Submesh]], num_layers: int) -> set[tuple[int, int]]:
    """(layer, devices) such that the layers from there on can use up exactly so many devices."""
    found = {(num_layers, 0)}
    for first in reversed(range(num_layers)):
        found |= {
            (first, devices + submesh.num_devices)
            for start, stop, submesh in cells
            if start == first
            for layer, devices in found
            if layer == stop
        }
    return found


def parts(*sizes: int) -> list[Submesh]:
    return [Submesh(1, size) for size in sizes]


def test_stages_that_fit_in_pipeline_order_stay_in_it() -> None:
    assert check_covered([*parts(2, 2), Submesh(2, 4), *parts(1, 1, 2)], cluster_of(4, 4)) == (
        (0, 1),
        (2, 3),
        tuple(range(4, 12)),
        (12,),
        (13,),
        (14, 15),
    )


def test_stages_that_do_not_fit_in_order_share_the_earliest_node_they_can_fill() -> None:
    assert check_covered([*parts(2), Submesh(1, 4), *parts(2)], cluster_of(2, 4)) == ((0, 1), (4, 5, 6, 7), (2, 3))
    assert check_covered(parts(1, 2, 2, 1, 2), cluster_of(2, 4)) == ((0,), (1, 2), (4, 5), (3,), (6, 7))


def test_an_early_stage_is_not_taken_where_the_rest_could_not_be_packed() -> None:
    check_covered(parts(1, 3, 2, 3, 1, 2), cluster_of(2, 6))
    check_covered(parts(1, 1, 2, 3, 3, 2), cluster_of(2, 6))


@pytest.mark.parametrize(
    ("submeshes", "message"),
    [
        (parts(4), "use 4 devices, expected all 8"),
        ([Submesh(2, 2), *parts(4)], "stage 0 is on 2 x 2 devices, expected whole nodes of 4"),
        (parts(3, 3, 2), r"stages of \[2, 3, 3\] devices cannot fill nodes of 4"),
    ],
)
def test_what_cannot_be_placed_is_refused(submeshes: list[Submesh], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place_submeshes(submeshes, cluster_of(2, 4))
