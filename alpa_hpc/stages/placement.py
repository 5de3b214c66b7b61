"""(StagePartition, ClusterSpec) -> the devices of each stage: submeshes laid on nodes so that all are covered (paper, appendix A).

A unit is a run of whole nodes that one stage has, or one node that several stages share. A shared node takes the earliest stages, in
pipeline order, with which the others can still be packed exactly; so stages that follow each other share nodes where they can. Units
take nodes in the order of their first stage. Where the sizes of shared nodes divide one another (powers of two) the packing always
exists; for other divisors of a node it is searched for (tried for all sets of stages on up to 3 nodes: a node of 30 is the smallest
that some set of its divisors cannot fill).
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from alpa_hpc.cluster.hardware import ClusterSpec, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.stages.objective import StagePartition


def place(partition: StagePartition, cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """Global device numbers (node-major) of each stage, in the row-major order of its submesh. Raises PlanError if they cannot be laid."""
    return place_submeshes([stage.submesh for stage in partition.stages], cluster)


def place_submeshes(submeshes: Sequence[Submesh], cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """Global device numbers of each submesh; together all devices of the cluster, each once. Raises PlanError if that is impossible."""
    width = cluster.devices_per_node
    used = sum(submesh.num_devices for submesh in submeshes)
    if used != cluster.num_devices:
        raise PlanError(f"the stages use {used} devices, expected all {cluster.num_devices} of cluster {cluster.name!r}")
    for position, submesh in enumerate(submeshes):
        if submesh.devices_per_node != width and not (submesh.num_nodes == 1 and submesh.devices_per_node < width):
            found = f"{submesh.num_nodes} x {submesh.devices_per_node} devices"
            raise PlanError(f"stage {position} is on {found}, expected whole nodes of {width} devices or a part of one node")
    whole = [(position,) for position, submesh in enumerate(submeshes) if submesh.devices_per_node == width]
    parts = {position: submesh.num_devices for position, submesh in enumerate(submeshes) if submesh.devices_per_node < width}
    devices: dict[int, tuple[int, ...]] = {}
    offset = 0
    for unit in sorted([*whole, *_shared_nodes(parts, width)]):
        for position in unit:
            size = submeshes[position].num_devices
            devices[position] = tuple(range(offset, offset + size))
            offset += size
    return tuple(devices[position] for position in range(len(submeshes)))


def _shared_nodes(sizes: dict[int, int], width: int) -> list[tuple[int, ...]]:
    """Stages (position: devices) grouped into nodes of `width` devices, each full; groups and their members in pipeline order."""
    left = Counter(sizes.values())
    if not _packs(width, 0, _frozen(left), width):
        found = sorted(sizes.values())
        raise PlanError(f"stages of {found} devices cannot fill nodes of {width}: use submeshes whose sizes divide one another")
    waiting = dict(sorted(sizes.items()))
    groups: list[tuple[int, ...]] = []
    while waiting:
        room, group = width, list[int]()
        for position, size in waiting.items():
            if size <= room and _packs(width, room - size, _frozen(left - Counter([size])), width):
                left -= Counter([size])
                room -= size
                group.append(position)
        waiting = {position: size for position, size in waiting.items() if position not in group}
        groups.append(tuple(group))
    return groups


def _frozen(counts: Counter[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(counts.items(), reverse=True))


@lru_cache(maxsize=100_000)
def _packs(width: int, room: int, counts: tuple[tuple[int, int], ...], largest: int) -> bool:
    """Whether pieces (size, count) fill `room` devices of an open node, with pieces up to `largest`, and then whole nodes of `width`."""
    if room == 0:
        return not counts or _packs(width, width, counts, width)
    return any(_packs(width, room - size, _without(counts, size), size) for size, _ in counts if size <= min(room, largest))


def _without(counts: tuple[tuple[int, int], ...], size: int) -> tuple[tuple[int, int], ...]:
    return tuple((other, count - (other == size)) for other, count in counts if count > (other == size))
