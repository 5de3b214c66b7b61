"""How buffers get from mesh to mesh: (Send, array) on one side -> the same array in the Recv's target layout on the other.

Two transports with one interface: `InProcessTransport` (every mesh in this process) and `MpiTransport` (one rank a device, through host
memory). Both move the tiles of `plan_transfer`. Nothing here blocks except `send`, which waits until its array is computed.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_hpc.errors import ProgramError
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.arrays import HostArray, aligned_bytes, aligned_empty, check_layout, place, replicate
from alpa_hpc.runtime.instructions import Layout, Recv, Send
from alpa_hpc.runtime.links import AbstractLinks
from alpa_hpc.runtime.transfer import Tile, plan_transfer

if TYPE_CHECKING:
    from mpi4py import MPI

    from alpa_hpc.runtime.groups import MeshContext

POLL_SECONDS: Final = 50e-6
STAMP: Final = np.dtype(np.float64)  # each message ends with the time it was sent, in seconds of the monotonic clock

T = TypeVar("T")


class AbstractPending(ABC, Generic[T]):
    """Something that is on its way."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `take` would return at once; asking also drives the messages on."""

    @abstractmethod
    def take(self) -> T:
        """What arrived; once, and only after `ready`."""


class AbstractTransport(ABC):
    """One mesh's connection to all others."""

    @abstractmethod
    def send(self, instruction: Send, array: jax.Array) -> None:
        """Copy what this process holds of `array` and start sending it; the array may be donated or freed when this returns."""

    @abstractmethod
    def receive(self, instruction: Recv) -> AbstractPending[jax.Array]:
        """Start to receive; the array arrives in `instruction.target`."""

    @abstractmethod
    def all_reduce(self, arrays: tuple[jax.Array, ...], kinds: tuple[ReductionKind, ...]) -> AbstractPending[tuple[jax.Array, ...]]:
        """Join replicated arrays over all meshes, in mesh order: every mesh gets the same bits. All meshes call it alike."""

    @abstractmethod
    def drained(self) -> bool:
        """Whether all that was sent has left; asking drives the messages on."""


def join_scalars(values: Sequence[tuple[HostArray, ...]], kinds: tuple[ReductionKind, ...]) -> tuple[HostArray, ...]:
    """Join each mesh's values into one, from mesh 0 upwards: the order of summation is part of the result."""
    return tuple(_join(column, kind) for column, kind in zip(zip(*values, strict=True), kinds, strict=True))


def _join(column: Sequence[HostArray], kind: ReductionKind) -> HostArray:
    joined = column[0]
    for value in column[1:]:
        match kind:
            case ReductionKind.SUM:
                joined = joined + value
            case ReductionKind.MAX:
                joined = np.maximum(joined, value)
            case ReductionKind.MIN:
                joined = np.minimum(joined, value)
            case ReductionKind.AND:
                joined = np.logical_and(joined, value)
            case ReductionKind.OR:
                joined = np.logical_or(joined, value)
    return np.asarray(joined, dtype=column[0].dtype)


@dataclass(slots=True)
class Exchange:
    """What the meshes of one process have under way: tiles sent and not yet received, and the values of each all-mesh reduction.

    sent:   (from, to, tag) -> tiles of each transfer, oldest first
    rounds: number of the reduction -> (mesh -> its values, meshes that have not taken the result yet)
    """

    num_meshes: int
    sent: dict[tuple[int, int, int], deque[list[HostArray]]] = field(default_factory=dict)
    rounds: dict[int, tuple[dict[int, tuple[HostArray, ...]], set[int]]] = field(default_factory=dict)


@final
class InProcessTransport(AbstractTransport):
    """Transport between meshes of one process; numpy copies move the tiles."""

    def __init__(self, exchange: Exchange, index: int, mesh: Mesh) -> None:
        self._exchange = exchange
        self._index = index
        self._mesh = mesh
        self._num_reductions = 0

    def send(self, instruction: Send, array: jax.Array) -> None:
        """Copy the tiles out of the array; they wait in the exchange."""
        check_layout(array, instruction.source, self._mesh, f"Send of {instruction.buffer} from mesh {self._index}")
        tiles = plan_transfer(instruction.source, instruction.target)
        parts = [np.asarray(array.addressable_data(device)) for device in range(self._mesh.size)]
        copies = [np.array(parts[tile.source_device][tile.source_slice], order="C") for tile in tiles]
        self._exchange.sent.setdefault((self._index, instruction.to, instruction.tag), deque()).append(copies)

    def receive(self, instruction: Recv) -> AbstractPending[jax.Array]:
        """What comes with this tag next."""
        return _InProcessArrival(self._exchange, (instruction.sender, self._index, instruction.tag), instruction, self._mesh)

    def all_reduce(self, arrays: tuple[jax.Array, ...], kinds: tuple[ReductionKind, ...]) -> AbstractPending[tuple[jax.Array, ...]]:
        """Leave this mesh's values in the round; they are joined once all meshes have come."""
        position = self._num_reductions
        values, _ = self._exchange.rounds.setdefault(position, ({}, set(range(self._exchange.num_meshes))))
        values[self._index] = tuple(np.array(array.addressable_data(0)) for array in arrays)
        self._num_reductions += 1
        return _InProcessReduction(self._exchange, position, kinds, self._index, self._mesh)

    def drained(self) -> bool:
        """True: what was sent belongs to the receivers already."""
        return True


def in_process_transports(meshes: Sequence[Mesh]) -> tuple[InProcessTransport, ...]:
    """One transport for each mesh, all connected to each other."""
    exchange = Exchange(len(meshes))
    return tuple(InProcessTransport(exchange, index, mesh) for index, mesh in enumerate(meshes))


@final
class _InProcessArrival(AbstractPending[jax.Array]):
    def __init__(self, exchange: Exchange, address: tuple[int, int, int], instruction: Recv, mesh: Mesh) -> None:
        self._exchange = exchange
        self._address = address
        self._instruction = instruction
        self._mesh = mesh

    def ready(self) -> bool:
        return bool(self._exchange.sent.get(self._address))

    def take(self) -> jax.Array:
        source, target = self._instruction.source, self._instruction.target
        copies = self._exchange.sent[self._address].popleft()
        shape = target.spec.local_shape(target.shape, target.mesh)
        locals_ = [aligned_empty(shape, np.dtype(target.dtype)) for _ in range(target.mesh.num_devices)]
        for tile, copy in zip(plan_transfer(source, target), copies, strict=True):
            locals_[tile.target_device][tile.target_slice] = copy
        return place(target, self._mesh, locals_)


@final
class _InProcessReduction(AbstractPending[tuple[jax.Array, ...]]):
    def __init__(self, exchange: Exchange, position: int, kinds: tuple[ReductionKind, ...], index: int, mesh: Mesh) -> None:
        self._exchange = exchange
        self._position = position
        self._kinds = kinds
        self._index = index
        self._mesh = mesh

    def ready(self) -> bool:
        values, _ = self._exchange.rounds[self._position]
        return len(values) == self._exchange.num_meshes

    def take(self) -> tuple[jax.Array, ...]:
        values, waiting = self._exchange.rounds[self._position]
        joined = join_scalars([values[mesh] for mesh in range(self._exchange.num_meshes)], self._kinds)
        waiting.remove(self._index)
        if not waiting:
            del self._exchange.rounds[self._position]
        return tuple(replicate(value, self._mesh) for value in joined)


@dataclass(frozen=True, slots=True)
class _Message:
    """Bytes on their way, payload then time stamp, and the requests (one a chunk) that move them."""

    tile: Tile
    content: HostArray
    requests: tuple["MPI.Request", ...]

    def done(self) -> bool:
        """Whether all chunks have been moved; asking drives MPI on."""
        return all([request.Test() for request in self.requests])

    def payload(self, dtype: np.dtype[Any]) -> HostArray:
        """The tile's elements, as a view of the message."""
        return self.content[: -STAMP.itemsize].view(dtype).reshape(self.tile.shape)


@final
class MpiTransport(AbstractTransport):
    """Transport of one rank: sends and receives the tiles of its own device, through host memory.

    A pair of ranks has at most one tile in a transfer, so the instruction's tag names it. A message longer than `chunk_bytes` (MPI counts
    in 32 bits) goes in several parts with the same tag, which MPI keeps in order.
    """

    def __init__(self, context: "MeshContext", links: AbstractLinks, chunk_bytes: int = 1 << 30) -> None:
        self._context = context
        self._links = links
        self._chunk_bytes = chunk_bytes
        self._outgoing: list[_Message] = []

    def send(self, instruction: Send, array: jax.Array) -> None:
        """Copy this rank's tiles out of the array and start their messages; waits until the array is computed."""
        context = self._context
        check_layout(array, instruction.source, context.mesh, f"Send of {instruction.buffer} from mesh {context.mesh_index}")
        tiles = tiles_from(instruction.source, instruction.target, context.local_device)
        if not tiles:
            return
        part = self._computed(array.addressable_data(0))
        ranks, tag = context.ranks[instruction.to], self._tag(instruction.tag)
        for tile in tiles:
            content = np.empty(message_bytes(tile, part.dtype), np.uint8)
            content[: -STAMP.itemsize].view(part.dtype).reshape(tile.shape)[...] = part[tile.source_slice]
            content[-STAMP.itemsize :].view(STAMP)[0] = time.monotonic()
            requests = tuple(context.world.Isend(chunk, ranks[tile.target_device], tag) for chunk in self._chunks(content))
            self._outgoing.append(_Message(tile, content, requests))

    def receive(self, instruction: Recv) -> AbstractPending[jax.Array]:
        """Start the messages of the tiles this rank gets, each into a fresh buffer."""
        context = self._context
        ranks, tag, dtype = context.ranks[instruction.sender], self._tag(instruction.tag), np.dtype(instruction.target.dtype)
        messages: list[_Message] = []
        for tile in tiles_to(instruction.source, instruction.target, context.local_device):
            content = aligned_bytes(message_bytes(tile, dtype))
            requests = tuple(context.world.Irecv(chunk, ranks[tile.source_device], tag) for chunk in self._chunks(content))
            messages.append(_Message(tile, content, requests))
        return _MpiArrival(instruction, context, self._links, messages)

    def all_reduce(self, arrays: tuple[jax.Array, ...], kinds: tuple[ReductionKind, ...]) -> AbstractPending[tuple[jax.Array, ...]]:
        """Start to gather every rank's values."""
        own = [self._computed(array.addressable_data(0)) for array in arrays]
        packed = np.frombuffer(b"".join(value.tobytes() for value in own), np.uint8)
        everyone = np.empty((self._context.world.size, packed.size), np.uint8)
        request = self._context.world.Iallgather(packed, everyone)
        return _MpiReduction(self._context, kinds, own, packed, everyone, request)

    def drained(self) -> bool:
        """Whether all messages of this rank have left; asking drives MPI on."""
        self._outgoing = [message for message in self._outgoing if not message.done()]
        return not self._outgoing

    def _computed(self, shard: jax.Array) -> HostArray:
        """The shard on the host. While it is being computed the messages already sent are driven on: peers may wait for them.

        Once they have left this waits without asking: to ask every 50 us takes time of the core that may be computing the shard.
        """
        while not shard.is_ready():  # pyright: ignore[reportAttributeAccessIssue] - jax.Array has it, its stub does not
            if self.drained():
                jax.block_until_ready(shard)
            else:
                time.sleep(POLL_SECONDS)
        self.drained()
        return np.asarray(shard)

    def _chunks(self, content: HostArray) -> list[HostArray]:
        return [content[start : start + self._chunk_bytes] for start in range(0, content.size, self._chunk_bytes)]

    def _tag(self, tag: int) -> int:
        if tag > self._context.tag_limit:
            raise ProgramError(
                f"message tag {tag} is above this MPI's limit {self._context.tag_limit}. Number the tags of the programs more densely."
            )
        return tag


@final
class _MpiArrival(AbstractPending[jax.Array]):
    def __init__(self, instruction: Recv, context: "MeshContext", links: AbstractLinks, messages: list[_Message]) -> None:
        self._instruction = instruction
        self._context = context
        self._links = links
        self._messages = messages
        self._due: list[float] = []  # of the messages that are here, in order

    def ready(self) -> bool:
        while len(self._due) < len(self._messages):
            message = self._messages[len(self._due)]
            if not message.done():
                return False
            self._due.append(self._due_time(message))
        return time.monotonic() >= max(self._due, default=0.0)

    def take(self) -> jax.Array:
        target = self._instruction.target
        shape, dtype = target.spec.local_shape(target.shape, target.mesh), np.dtype(target.dtype)
        if len(self._messages) == 1 and self._messages[0].tile.shape == shape:
            return place(target, self._context.mesh, [self._messages[0].payload(dtype)])
        buffer = aligned_empty(shape, dtype)
        for message in self._messages:
            buffer[message.tile.target_slice] = message.payload(dtype)
        return place(target, self._context.mesh, [buffer])

    def _due_time(self, message: _Message) -> float:
        sender = self._context.ranks[self._instruction.sender][message.tile.source_device]
        sent = float(message.content[-STAMP.itemsize :].view(STAMP)[0])
        return self._links.due(sender, self._context.rank, message.content.size - STAMP.itemsize, sent)


@final
class _MpiReduction(AbstractPending[tuple[jax.Array, ...]]):
    """Every rank gathers all values and joins those of each mesh's first device, in mesh order: the same bits everywhere."""

    def __init__(
        self,
        context: "MeshContext",
        kinds: tuple[ReductionKind, ...],
        own: list[HostArray],
        packed: HostArray,
        everyone: HostArray,
        request: "MPI.Request",
    ) -> None:
        self._context = context
        self._kinds = kinds
        self._own = own
        self._packed = packed  # MPI reads it until the request is done
        self._everyone = everyone
        self._request = request

    def ready(self) -> bool:
        return self._request.Test()

    def take(self) -> tuple[jax.Array, ...]:
        leaders = [self._unpacked(self._everyone[ranks[0]]) for ranks in self._context.ranks]
        return tuple(replicate(value, self._context.mesh) for value in join_scalars(leaders, self._kinds))

    def _unpacked(self, row: HostArray) -> tuple[HostArray, ...]:
        values: list[HostArray] = []
        start = 0
        for like in self._own:
            values.append(np.frombuffer(row[start : start + like.nbytes].tobytes(), like.dtype).reshape(like.shape))
            start += like.nbytes
        return tuple(values)


@cache
def tiles_from(source: Layout, target: Layout, device: int) -> tuple[Tile, ...]:
    """The tiles that one source device sends."""
    return tuple(tile for tile in plan_transfer(source, target) if tile.source_device == device)


@cache
def tiles_to(source: Layout, target: Layout, device: int) -> tuple[Tile, ...]:
    """The tiles that one target device receives."""
    return tuple(tile for tile in plan_transfer(source, target) if tile.target_device == device)


def message_bytes(tile: Tile, dtype: np.dtype[Any]) -> int:
    """Length of the message that carries a tile: its elements and the time stamp."""
    return math.prod(tile.shape) * dtype.itemsize + STAMP.itemsize
