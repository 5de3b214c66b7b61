"""What the rank scripts share: a description of the meshes on the command line -> this rank's context and transport."""

import sys

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.runtime.devices import CpuDevice
from alpa_hpc.runtime.groups import MeshContext, join_mesh
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.runtime.transport import MpiTransport


def shapes_of(text: str) -> tuple[MeshShape, ...]:
    """`2x1,1x1` -> the shapes of two meshes."""
    return tuple(MeshShape(*map(int, shape.split("x"))) for shape in text.split(","))


def join(shapes: tuple[MeshShape, ...]) -> MeshContext:
    """Join with ranks dealt out to the meshes in order."""
    ranks: list[tuple[int, ...]] = []
    for shape in shapes:
        first = sum(map(len, ranks))
        ranks.append(tuple(range(first, first + shape.num_devices)))
    return join_mesh(tuple(ranks), shapes, CpuDevice())


def connect() -> tuple[MeshContext, MpiTransport, tuple[MeshShape, ...]]:
    """Context, transport (with tiny chunks, so that messages need several) and shapes of the first argument."""
    shapes = shapes_of(sys.argv[1])
    context = join(shapes)
    return context, MpiTransport(context, DirectLinks(), chunk_bytes=100), shapes
