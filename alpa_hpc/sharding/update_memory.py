"""What a stage's update needs in memory once an iteration, beyond state and accumulators: summed gradients, and tiles under way.

XLA starts the collectives of all parameters before it waits for the first, so what one collective leaves for the next lies in memory for
all parameters at once, and so do new parameters that wait to be handed out. A collective along another dim than the first works on a
transposed copy. Much of this finds room where parameters are stored, whose memory is free from when the new value is made until it arrives.
How much depends on the order in which XLA does things. As seen in code that it made: of transposed copies of gradients, two lie in memory
of their own, of those of new parameters all that do not arrive together; of two parameters that one collective puts right where they are
stored, one has room for another that waits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.graph import Tensor
from alpa_hpc.sharding.resharding import AllGather, AllToAll, Lane, Move, ReduceScatter, reshard_moves
from alpa_hpc.sharding.spec import Spec

COMBINED_BYTES = 30 << 20  # up to which XLA makes one collective of several, by default (`xla_gpu_all_gather_combine_threshold_bytes`)


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes a device. `summed`: gradients that are not summed where they are accumulated; then the temporary ones of two steps.

    sync:     while gradients are summed over the mesh
    hand_out: while new parameters go to where they are stored
    """

    summed: float
    sync: float
    hand_out: float

    @property
    def most(self) -> float:
        """The most that is needed at once; accumulators still lie beside the sums."""
        return self.summed + max(self.sync, self.hand_out)


def update_memory(layers: Sequence[ChosenLayer], shape: MeshShape) -> UpdateMemory:
    """What the update of the parameters that `layers` own needs."""
    exchanges = tuple(_exchanges(layers, shape))
    between = sum(one.bytes_in(move.after) for one in exchanges for move in one.incoming[:-1])
    copies = (max(map(one.copied, one.incoming), default=0.0) for one in exchanges)
    waiting = [one.waiting for one in exchanges]
    homes = [one.bytes_in(one.outgoing[0].after) for one in exchanges if one.is_straight]
    return UpdateMemory(
        summed=sum(one.bytes_in(one.incoming[-1].after) for one in exchanges if one.incoming),
        sync=between + _largest(copies, 2),
        hand_out=sum(waiting) - _room(waiting, homes) + _on_the_way(exchanges),
    )


def _on_the_way(exchanges: Sequence["_Exchange"]) -> float:
    """Bytes of what a collective leaves for the next, or for a copy to where it is stored, of all parameters that are under way at once.

    XLA starts small ones first: they have arrived if what arrives is smaller than what the largest begins with.
    """
    begins = max((one.bytes_in(one.outgoing[0].after) for one in exchanges if len(one.outgoing) > 1), default=0.0)
    arriving: dict[Lane, list[_Exchange]] = {}
    for one in exchanges:
        if one.outgoing and not one.outgoing[-1].is_local:
            arriving.setdefault(one.outgoing[-1].lane, []).append(one)
    return sum(_arriving(together, begins) for together in arriving.values())


def _arriving(together: Sequence["_Exchange"], begins: float) -> float:
    """Of parameters that arrive by the same devices' collectives.

    If XLA combines them, all have their new values before any arrives, and a copy has room where another one is stored: but the largest.
    """
    copies = sorted(max(one.passed_on, *map(one.copied, one.outgoing)) for one in together if one.arrives_as_copy)
    if sum(one.bytes_in(one.outgoing[-1].after) for one in together) <= COMBINED_BYTES:
        copies = copies[-1:]
    straight = (one for one in together if not one.arrives_as_copy and one.bytes_in(one.outgoing[-1].after) >= begins)
    return sum(copies) + sum(one.passed_on for one in straight)


def _room(waiting: Iterable[float], homes: Iterable[float]) -> float:
    """Bytes of what waits that finds room in every second one of `homes`."""
    left = sorted(waiting, reverse=True)
    found = 0.0
    for home in sorted(homes, reverse=True)[1::2]:
        fitting = next((num_bytes for num_bytes in left if num_bytes <= home), None)
        if fitting is not None:
            left.remove(fitting)
            found += fitting
    return found


def _largest(sizes: Iterable[float], count: int) -> float:
    return sum(sorted(sizes)[-count:])


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How a parameter's gradient comes to its update, and the new parameter to where it is stored."""

    tensor: Tensor
    mesh: MeshShape
    incoming: tuple[Move, ...]
    outgoing: tuple[Move, ...]

    @property
    def waiting(self) -> float:
        """Bytes of the new parameter before it is handed out; 0 where it is made where it is stored.

        It waits there, too, if a copy arrives and what is stored is made of that; and it is gone before all lie between two collectives.
        """
        waits = len(self.outgoing) == 1 and not self.outgoing[0].is_local and not self.arrives_as_copy
        return self.bytes_in(self.outgoing[0].before) if waits else 0.0

    @property
    def passed_on(self) -> float:
        """Bytes of what one collective leaves for the next."""
        return sum(self.bytes_in(move.after) for move in self.outgoing[:-1])

    @property
    def arrives_as_copy(self) -> bool:
        """Whether the new parameter arrives in another order than it is stored in."""
        return bool(self.outgoing) and self.copied(self.outgoing[-1]) > 0

    @property
    def is_straight(self) -> bool:
        """Whether one collective puts the new parameter right where it is stored."""
        return len(self.outgoing) == 1 and not self.copied(self.outgoing[0])

    def bytes_in(self, spec: Spec) -> float:
        """Bytes a device of the parameter in a spec."""
        return self.tensor.num_bytes / spec.num_shards(self.mesh)

    def copied(self, move: Move) -> float:
        """Bytes of the transposed copy that a move works on."""
        match move.steps[0]:
            case AllGather(_, dim) | ReduceScatter(_, dim) if prod(move.before.local_shape(self.tensor.shape, self.mesh)[:dim]) > 1:
                return max(self.bytes_in(move.before), self.bytes_in(move.after))
            case AllToAll():
                return self.bytes_in(move.before)
            case _:
                return 0.0


def _exchanges(layers: Sequence[ChosenLayer], shape: MeshShape) -> Iterator[_Exchange]:
    for chosen in layers:
        problem = chosen.problem
        place = {param: position for position, param in enumerate(problem.layer.params)}
        for program in problem.updates:
            gradient, stored = (tensors[place[program.work.param]] for tensors in (problem.gradients, problem.params))
            incoming = reshard_moves(chosen.spec(gradient), chosen.spec(program.gradient), shape)
            outgoing = reshard_moves(chosen.spec(program.update.outputs[0]), chosen.spec(stored), shape)
            yield _Exchange(problem.tensors[stored], shape, incoming, outgoing)
