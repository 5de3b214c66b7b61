"""What a stage's update needs in memory once an iteration, beyond state and accumulators: summed gradients, and tiles under way.

The moves of gradients to their updates and of new parameters to where they are stored become kernels, as those of forward and backward do.
Most updates are one kernel between; of others, arrays lie in memory inside (`update_kernels`). A collective along another dim than the
first works on a transposed copy; XLA makes one collective of several of a kind among the same devices. Gradients that several layers make
of a parameter are added where they lie alike, on their way or where they are wanted. Memory where a parameter is stored is free from when
its update has read it until the new value arrives, and has room for others; but none if the update does not read it, as where it is a copy
in fewer bits of what the optimiser keeps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.kernel_order import ordered
from alpa_hpc.sharding.kernel_seconds import Collective, streaming_seconds
from alpa_hpc.sharding.lifetimes import Lifetimes
from alpa_hpc.sharding.resharding import AllGather, AllToAll, Move, ReduceScatter, joint_moves, reshard_moves
from alpa_hpc.sharding.schedule import with_collectives_joined
from alpa_hpc.sharding.spec import Spec, split_of
from alpa_hpc.sharding.update_kernels import GRADIENT, PARAMETER, UpdateKernel, update_kernels


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes a device. `summed`: gradients that are not summed where they are accumulated; then the temporary ones of tasks.

    sync:     while gradients are summed over the mesh, by a task of its own
    hand_out: while parameters are updated by such sums, and new ones go to where they are stored
    joint:    while one task does both, sums included
    """

    summed: float
    sync: float
    hand_out: float
    joint: float

    @property
    def most(self) -> float:
        """The most that is needed at once; where a task of its own sums gradients, accumulators still lie beside the sums."""
        return max(self.joint, self.summed + max(self.sync, self.hand_out))


def update_memory(layers: Sequence[ChosenLayer], shape: MeshShape, *, hiding: bool) -> UpdateMemory:
    """What the update of the parameters that `layers` own needs; `hiding` as DeviceSpec has it."""
    return _memory(tuple(_exchanges(layers, shape)), layers[0].problem.spanning, hiding)


def replica_memory(layers: Sequence[ChosenLayer], shape: MeshShape, param: int, *, hiding: bool) -> float:
    """Bytes a device that the task needs which sums the gradient of a parameter owned by another stage, beside the sum."""
    readers = [chosen for chosen in layers if param in chosen.problem.layer.params]
    first = readers[0]
    arrives = dict(first.problem.replicas)[param]
    tensor, target = first.problem.tensors[arrives], first.spec(arrives)
    gradients = tuple(_gradient_spec(chosen, param) for chosen in readers)
    return _Listing(first.problem.spanning, hiding).sync((_Exchange(tensor.shape, tensor.itemsize, shape, gradients, target, (), ()),))


@lru_cache(maxsize=1024)
def resharding_memory(  # noqa: PLR0913 - an array's, and of two specs
    shape: tuple[int, ...], itemsize: int, mesh: MeshShape, before: Spec, after: Spec, spanning: tuple[bool, bool], *, hiding: bool
) -> float:
    """Bytes a device that a task needs which brings an array from one spec to another, beside both."""
    return _Listing(spanning, hiding).sync((_Exchange(shape, itemsize, mesh, (before,), after, (), ()),))


def _gradient_spec(chosen: ChosenLayer, param: int) -> Spec:
    return chosen.spec(chosen.problem.gradients[chosen.problem.layer.params.index(param)])


@lru_cache(maxsize=1024)
def _memory(exchanges: tuple["_Exchange", ...], spanning: tuple[bool, bool], hiding: bool) -> UpdateMemory:  # noqa: FBT001 - a key
    return UpdateMemory(
        summed=sum(one.bytes_in(one.target) for one in exchanges if one.incoming or len(one.gradients) > 1),
        sync=_Listing(spanning, hiding).sync(exchanges),
        hand_out=_Listing(spanning, hiding).hand_out(exchanges),
        joint=_Listing(spanning, hiding).joint(exchanges),
    )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How a parameter's gradient comes to its update, and the new parameter to where it is stored.

    `gradients` = how the layers that read it make theirs, `target` = how the update reads their sum; `inside` = as `update_kernels` has it.
    """

    shape: tuple[int, ...]
    itemsize: int
    mesh: MeshShape
    gradients: tuple[Spec, ...]
    target: Spec
    outgoing: tuple[Move, ...]
    inside: tuple[UpdateKernel, ...]

    @property
    def incoming(self) -> tuple[Move, ...]:
        """The moves of the gradients."""
        return joint_moves(self.gradients, self.target, self.mesh)

    def bytes_in(self, spec: Spec) -> float:
        """Bytes a device of the parameter in a spec."""
        return float(self.itemsize * prod(spec.local_shape(self.shape, self.mesh)))

    @property
    def new_bytes(self) -> float:
        """Bytes a device of a new parameter that waits to be moved to where it is stored; one that is made there is counted there."""
        return 0.0 if all(move.is_local for move in self.outgoing) else self.bytes_in(self.outgoing[0].before)

    def copies_first(self, move: Move) -> bool:
        """Whether a collective reads a transposed copy of what there is."""
        match move.steps[0]:
            case ReduceScatter():
                return move.sums_inside(move.before.local_shape(self.shape, self.mesh))
            case AllToAll():
                return True
            case _:
                return False

    def copies_last(self, move: Move) -> bool:
        """Whether what is wanted is a transposed copy of what a collective brings."""
        match move.steps[0]:
            case AllGather(_, dim):
                return self._is_inner(move, dim)
            case _:
                return False

    def _is_inner(self, move: Move, dim: int) -> bool:
        return prod(move.before.local_shape(self.shape, self.mesh)[:dim]) > 1


def _exchanges(layers: Sequence[ChosenLayer], shape: MeshShape) -> Iterator[_Exchange]:
    """Of each parameter, in the order of the state."""
    made: dict[int, list[Spec]] = {}
    for chosen in layers:
        for param in chosen.problem.layer.params:
            made.setdefault(param, []).append(_gradient_spec(chosen, param))
    found: dict[int, _Exchange] = {}
    for chosen in layers:
        problem = chosen.problem
        for program in problem.updates:
            param = program.work.param
            stored = problem.params[problem.layer.params.index(param)]
            outgoing = reshard_moves(chosen.spec(program.update.outputs[0]), chosen.spec(stored), shape)
            tensor = problem.tensors[stored]
            target = chosen.spec(program.gradient)
            inside = update_kernels(program.update, chosen, shape)
            found[param] = _Exchange(tensor.shape, tensor.itemsize, shape, tuple(made[param]), target, outgoing, inside)
    return (found[param] for param in sorted(found))


@dataclass(slots=True, eq=False)
class _Listing:
    """Kernels of a task being listed; `spanning` as LayerProblem has it, `hiding` as DeviceSpec."""

    spanning: tuple[bool, bool]
    hiding: bool
    lifetimes: Lifetimes = field(default_factory=Lifetimes)

    def sync(self, exchanges: Iterable[_Exchange]) -> float:
        """Bytes that a task needs that sums gradients, beside the sums."""
        for one in exchanges:
            parts = self._gradients(one)
            self.lifetimes.kept |= parts[0] if len(parts) == 1 else self._run(_all(parts), one.bytes_in(one.target))
        return self._bytes()

    def hand_out(self, exchanges: Iterable[_Exchange]) -> float:
        """Bytes that a task needs that updates parameters by sums."""
        for one in exchanges:
            self._updated(one, frozenset((self.lifetimes.value(),)))
        return self._bytes()

    def joint(self, exchanges: Iterable[_Exchange]) -> float:
        """Bytes that a task needs that does both."""
        for one in exchanges:
            self._updated(one, _all(self._gradients(one)))
        return self._bytes()

    def _gradients(self, one: _Exchange) -> list[frozenset[int]]:
        """A parameter's gradients on their way, as `runtime.update_tasks.summed` has them: the summands that have come to the target."""
        alike: dict[Spec, list[frozenset[int]]] = {}
        for spec in one.gradients:
            alike.setdefault(spec, []).append(frozenset((self.lifetimes.value(),)))
        for move in one.incoming:
            parts = alike.pop(move.before)
            sources = _all(parts)
            if len(parts) > 1 and not move.is_local and not one.copies_first(move):  # else the kernel of the copy adds them
                sources = self._run(sources, one.bytes_in(move.before))
            alike.setdefault(move.after, []).append(self._moved(one, sources, (move,)))
        return alike[one.target]

    def _updated(self, one: _Exchange, gradient: frozenset[int]) -> None:
        old = self.lifetimes.value()
        values = {GRADIENT: gradient, PARAMETER: frozenset((old,))}
        for kernel in one.inside:
            sources = _all(values[number] for number in kernel.reads)
            if kernel.collective:
                values[kernel.makes[0]] = self.lifetimes.exchange(sources, kernel.collective)
                continue
            sizes = (*kernel.sizes, one.new_bytes) if kernel.updates else kernel.sizes
            seconds = max(kernel.seconds, self._streaming_seconds(sources, sum(sizes)))
            made = self.lifetimes.run(sources, sizes, in_place=kernel.elementwise, seconds=seconds)
            values.update((number, frozenset((value,))) for number, value in zip(kernel.makes, made, strict=True))
            if kernel.updates and one.new_bytes:
                arrived = self._moved(one, frozenset(made[-1:]), one.outgoing)
                self.lifetimes.kept |= arrived
                self.lifetimes.instead |= dict.fromkeys(arrived, old)

    def _moved(self, one: _Exchange, sources: frozenset[int], moves: Iterable[Move]) -> frozenset[int]:
        """A tile after a resharding."""
        for move in moves:
            if move.is_local:
                sources = self._run(sources, one.bytes_in(move.after))
                continue
            if one.copies_first(move):
                sources = self._run(sources, one.bytes_in(move.before))
            sources = self._collective(one, sources, move)
            if one.copies_last(move):
                sources = self._run(sources, one.bytes_in(move.after))
        return sources

    def _run(self, sources: frozenset[int], num_bytes: float) -> frozenset[int]:
        seconds = self._streaming_seconds(sources, num_bytes)
        return frozenset(self.lifetimes.run(sources, (num_bytes,), in_place=False, seconds=seconds))

    def _streaming_seconds(self, sources: frozenset[int], num_bytes: float) -> float:
        return streaming_seconds(sum(self.lifetimes.sizes[source] for source in sources) + num_bytes)

    def _collective(self, one: _Exchange, sources: frozenset[int], move: Move) -> frozenset[int]:
        before, after = one.bytes_in(move.before), one.bytes_in(move.after)
        across = any(self.spanning[axis] for axis in move.axes)
        return self.lifetimes.exchange(
            sources, Collective(move.lane, one.itemsize, max(before, after), after, split_of(move.axes, one.mesh), across)
        )

    def _bytes(self) -> float:
        return self.lifetimes.bytes_beside_kept(ordered(with_collectives_joined(self.lifetimes), hiding=self.hiding))


def _all(parts: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*parts)
