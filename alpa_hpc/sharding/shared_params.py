"""Parameters that several layers of a stage read: how they and their gradients move, and what that adds to the seconds of the layers.

A layer by itself thinks that it has such a parameter as it wants it, that its gradient is summed alone, and that the new value comes to it
from another stage. In one stage the parameter is stored as its first reader wants it and goes to the others in each task that reads it;
gradients that lie alike are summed before they move, and there is nobody to whom the new value must be sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.breakdown import NO_SECONDS, StageSeconds, TaskSeconds
from alpa_hpc.sharding.graph import Tensor
from alpa_hpc.sharding.needed import needed
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import Move, bytes_after, joint_moves, reshard_moves, reshard_seconds, step_seconds
from alpa_hpc.sharding.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A layer that reads a parameter, and the parameter's place in the layer."""

    chosen: ChosenLayer
    place: int

    @property
    def tensor(self) -> int:
        """The parameter."""
        return self.chosen.problem.params[self.place]

    @property
    def stored(self) -> Spec:
        """How the layer wants the parameter."""
        return self.chosen.spec(self.tensor)

    @property
    def gradient(self) -> Spec:
        """How the layer makes its gradient."""
        return self.chosen.spec(self.chosen.problem.gradients[self.place])

    @property
    def target(self) -> Spec:
        """Where the layer by itself has its gradient summed: at the update, or where a replica's leaves for the owner."""
        problem = self.chosen.problem
        param = problem.layer.params[self.place]
        owned = [program.gradient for program in problem.updates if program.work.param == param]
        return self.chosen.spec(owned[0] if owned else dict(problem.replicas)[param])

    def reads_in_forward(self) -> bool:
        """Whether the forward reads the parameter."""
        problem = self.chosen.problem
        wanted = (*problem.forward.outputs[: len(problem.outputs)], *problem.residuals)
        return self.tensor in needed(problem.forward, wanted).before

    def reads_in_backward(self) -> bool:
        """Whether the backward reads it, or the forward that runs once more before."""
        problem = self.chosen.problem
        again = needed(problem.forward, problem.remade).before
        return self.tensor in again | needed(problem.backward, problem.backward.outputs).before


def readers_of(layers: Sequence[ChosenLayer]) -> dict[int, list[Reader]]:
    """The readers of each parameter of a stage, in order: the first says how it is stored and where its gradient is summed."""
    found: dict[int, list[Reader]] = {}
    for chosen in layers:
        for place, param in enumerate(chosen.problem.layer.params):
            found.setdefault(param, []).append(Reader(chosen, place))
    return found


def shared_seconds(layers: Sequence[ChosenLayer], prices: MeshPrices) -> StageSeconds:
    """What the seconds of a stage's tasks are above the sum of its layers'."""
    total = NO_SECONDS
    for readers in readers_of(layers).values():
        if len(readers) > 1:
            tensor = readers[0].chosen.problem.tensors[readers[0].tensor]
            forward = _reading([one for one in readers if one.reads_in_forward()], readers[0].stored, tensor, prices)
            backward = _reading([one for one in readers if one.reads_in_backward()], readers[0].stored, tensor, prices)
            seconds = TaskSeconds(0.0, forward), TaskSeconds(0.0, backward), TaskSeconds(0.0, _summing(readers, tensor, prices))
            total += StageSeconds(*seconds)
    return total


def _reading(readers: Iterable[Reader], stored: Spec, tensor: Tensor, prices: MeshPrices) -> float:
    """The parameter on its way to all who read it in a task; what several want is made once."""
    moves = {move for one in readers for move in reshard_moves(stored, one.stored, prices.mesh.shape)}
    return sum(_move_seconds(moves, tensor, prices))


def _summing(readers: Sequence[Reader], tensor: Tensor, prices: MeshPrices) -> float:
    """The gradients summed together, less each by itself; and nothing is handed out to later readers, which they count."""
    first, *later = readers
    together = sum(_move_seconds(joint_moves([one.gradient for one in readers], first.target, prices.mesh.shape), tensor, prices))
    alone = sum(reshard_seconds(prices.mesh, one.gradient, one.target, tensor.num_bytes) for one in readers)
    handed_out = sum(reshard_seconds(prices.mesh, one.target, one.stored, tensor.num_bytes) for one in later)
    return together - alone - handed_out


def _move_seconds(moves: Iterable[Move], tensor: Tensor, prices: MeshPrices) -> Iterator[float]:
    for move in moves:
        local = tensor.num_bytes / move.before.num_shards(prices.mesh.shape)
        for step in move.steps:
            yield step_seconds(step, prices.mesh, local)
            local = bytes_after(step, prices.mesh, local)
