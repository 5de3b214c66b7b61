"""The instructions of a mesh program: a closed union of frozen classes."""

import math
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport] - makes numpy know "bfloat16"
import numpy as np

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.sharding.spec import Spec

ITERATION = -1  # `Buffer.microbatch` of what lives once an iteration or longer


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """A distributed array on one mesh: `name` such as "value.3", "cotangent.3", "residual.0", "gradient.5", "state.5", "batch.0"."""

    name: str
    microbatch: int = ITERATION


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, dtype name (numpy), and how the array lies on its mesh."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    mesh: MeshShape

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Feed:
    """Put a microbatch's batch input on the mesh."""

    buffer: Buffer
    batch_input: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run one compiled task of this mesh; inputs in `donated` are consumed (they count as freed)."""

    task: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    donated: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send a buffer to another mesh, where it arrives in layout `target`. The buffer stays until freed."""

    buffer: Buffer
    source: Layout
    target: Layout
    to: int
    tag: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive what the Send with the same tag, from mesh `sender`, carries."""

    buffer: Buffer
    source: Layout
    target: Layout
    sender: int
    tag: int


@dataclass(frozen=True, slots=True)
class AllMeshReduce:
    """Join scalars over all meshes (every mesh has this instruction, in the same order): all-finite, global norm, broadcast of the loss."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    kinds: tuple[ReductionKind, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a buffer."""

    buffer: Buffer


Instruction = Feed | Run | Send | Recv | AllMeshReduce | Free
PlacedPart = tuple[int, int]  # the number of a run of instructions, and what is to be added to the microbatch of their buffers


@dataclass(frozen=True, slots=True)
class MeshProgram:
    """What one mesh does in one iteration.

    `resident` buffers (state) exist before and after; `results` are read by the host at the end, then dropped.
    """

    mesh: int
    instructions: tuple[Instruction, ...]
    resident: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    @property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """All instructions are one part; nothing is to be added to their tags."""
        return (self.instructions,)

    @property
    def order(self) -> tuple[PlacedPart, ...]:
        """The one part."""
        return ((0, 0),)

    @property
    def tag_stride(self) -> int:
        """None."""
        return 0
