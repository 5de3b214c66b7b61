"""What a simulation gives: when every mesh computes, sends and waits, and how much memory its buffers take meanwhile."""

from dataclasses import dataclass

from alpa_hpc.kernels import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class MeshTimeline:
    """What one mesh does: `starts[k]` and `stops[k]` are the seconds, from the iteration's begin, of the k-th instruction of its program.

    A Run computes meanwhile, a Recv or an AllMeshReduce waits and joins, a Send is on its link while the mesh goes on. `held_bytes[k]` are
    those that a device has in buffers once the k-th instruction has begun (and waited); `peak_bytes` counts tasks' workspace, too.
    """

    starts: Floats
    stops: Floats
    held_bytes: Ints
    peak_bytes: int
    busy_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One iteration: its seconds, and what each mesh does."""

    seconds: float
    meshes: tuple[MeshTimeline, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes a device of each mesh."""
        return tuple(mesh.peak_bytes for mesh in self.meshes)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """The part of the iteration in which a mesh runs no task."""
        return tuple(1 - mesh.busy_seconds / self.seconds if self.seconds else 0.0 for mesh in self.meshes)
