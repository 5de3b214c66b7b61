"""The instructions of a mesh program: a closed union of frozen classes."""

import math
from collections.abc import Iterator
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
PlacedInstruction = tuple[Instruction, int, int]  # and what is to be added to the microbatch of its buffers, and to its tag


@dataclass(frozen=True, slots=True)
class MeshProgram:
    """What one mesh does in one iteration.

    `resident` buffers (state) exist before and after; `results` are read by the host at the end, then dropped.
    """

    mesh: int
    instructions: tuple[Instruction, ...]
    resident: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    def placed(self) -> Iterator[PlacedInstruction]:
        """Every instruction in order; nothing is to be added."""
        return ((instruction, 0, 0) for instruction in self.instructions)

    def distinct(self) -> tuple[Instruction, ...]:
        """Every instruction."""
        return self.instructions
