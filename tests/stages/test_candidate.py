"""Submesh and logical shapes, and that the candidates left out belong to no complete partition."""

import itertools
from collections.abc import Iterator

import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import ConfigError
from alpa_hpc.stages.candidate import (
    CandidateOptions,
    LogicalShapes,
    StageCandidate,
    SubmeshShapes,
    balanced,
    enumerate_candidates,
    mesh_shapes,
    submesh_shapes,
)

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)


def cluster_of(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    return ClusterSpec("test", num_nodes, devices_per_node, DEVICE, Link(4.0, 0.01), Link(1.0, 0.1))


def test_submeshes_of_the_papers_cluster() -> None:
    parts = (Submesh(1, 1), Submesh(1, 2), Submesh(1, 4), Submesh(1, 8))
    assert submesh_shapes(cluster_of(8, 8), SubmeshShapes.ALL) == parts + tuple(Submesh(n, 8) for n in range(2, 9))
    assert submesh_shapes(cluster_of(8, 8), SubmeshShapes.POWER_OF_TWO) == (*parts, Submesh(2, 8), Submesh(4, 8), Submesh(8, 8))


def test_other_sizes_of_nodes_and_clusters_keep_the_whole_cluster() -> None:
    assert submesh_shapes(cluster_of(3, 6), SubmeshShapes.POWER_OF_TWO) == (
        Submesh(1, 1),
        Submesh(1, 2),
        Submesh(1, 3),
        Submesh(1, 6),
        Submesh(2, 6),
        Submesh(3, 6),
    )
    assert submesh_shapes(cluster_of(1, 1), SubmeshShapes.ALL) == (Submesh(1, 1),)


def test_logical_shapes() -> None:
    assert mesh_shapes(Submesh(2, 2), LogicalShapes.ALL) == (MeshShape(1, 4), MeshShape(2, 2), MeshShape(4, 1))
    assert mesh_shapes(Submesh(2, 2), LogicalShapes.SINGLE_NODE_MODEL_PARALLEL) == (MeshShape(2, 2), MeshShape(4, 1))
    assert mesh_shapes(Submesh(1, 1), LogicalShapes.ALL) == (MeshShape(1, 1),)


def complete_cells(num_layers: int, cluster: ClusterSpec) -> set[tuple[int, int, Submesh]]:
    """The cells of all complete partitions, by enumeration."""
    submeshes = submesh_shapes(cluster, SubmeshShapes.ALL)

    def extend(start: int, devices: int) -> Iterator[tuple[tuple[int, int, Submesh], ...]]:
        if start == num_layers and devices == 0:
            yield ()
        for stop, submesh in itertools.product(range(start + 1, num_layers + 1), submeshes):
            if submesh.num_devices <= devices:
                for rest in extend(stop, devices - submesh.num_devices):
                    yield ((start, stop, submesh), *rest)

    return {cell for partition in extend(0, cluster.num_devices) for cell in partition}


@pytest.mark.parametrize(("num_nodes", "devices_per_node"), [(1, 1), (1, 4), (2, 2), (2, 3), (2, 4), (1, 8)])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_candidates_are_the_cells_of_complete_partitions(num_layers: int, num_nodes: int, devices_per_node: int) -> None:
    cluster = cluster_of(num_nodes, devices_per_node)
    options = CandidateOptions(SubmeshShapes.ALL, LogicalShapes.ALL, (True,))
    candidates = enumerate_candidates(num_layers, cluster, options)
    assert {(candidate.start, candidate.stop, candidate.submesh) for candidate in candidates} == complete_cells(num_layers, cluster)
    assert list(candidates) == sorted(set(candidates))


def test_each_cell_has_every_shape_and_remat_choice() -> None:
    candidates = enumerate_candidates(1, cluster_of(1, 4), CandidateOptions(logical_shapes=LogicalShapes.ALL))
    shapes = (MeshShape(1, 4), MeshShape(2, 2), MeshShape(4, 1))
    assert candidates == tuple(StageCandidate(0, 1, Submesh(1, 4), shape, remat) for shape in shapes for remat in (False, True))


def test_balance_keeps_stages_whose_devices_match_their_work() -> None:
    cluster = cluster_of(1, 4)
    candidates = enumerate_candidates(2, cluster, CandidateOptions(remat=(False,)))
    kept = balanced(candidates, [3.0, 1.0], cluster.num_devices, tolerance=0.5)
    assert {(c.start, c.stop, c.submesh.num_devices) for c in kept} == {(0, 2, 4), (0, 1, 2)}
    assert set(kept) < set(candidates)


@pytest.mark.parametrize("remat", [(), (True, True)])
def test_remat_choices_are_checked(remat: tuple[bool, ...]) -> None:
    with pytest.raises(ConfigError, match="remat"):
        CandidateOptions(remat=remat)
