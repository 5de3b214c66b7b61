"""Chosen layers -> seconds of their tasks, computation and communication apart: what the simulator runs and what a measurement replaces.

Each equation is priced as it will be run; a resharding that several readers share counts once, as it is executed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.graph import FREE
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import AllReduce, reshard_seconds, step_seconds
from alpa_hpc.sharding.spec import Spec


@dataclass(frozen=True, slots=True)
class TaskSeconds:
    """Seconds of one run of a task on each device: its own work, and waiting for collectives."""

    compute: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Work and communication one after the other."""
        return self.compute + self.communication

    def __add__(self, other: "TaskSeconds") -> "TaskSeconds":
        return TaskSeconds(self.compute + other.compute, self.communication + other.communication)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Forward and backward of one microbatch, and the update of one iteration (gradient sync included)."""

    forward: TaskSeconds
    backward: TaskSeconds
    update: TaskSeconds

    @property
    def microbatch(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward.total + self.backward.total

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(self.forward + other.forward, self.backward + other.backward, self.update + other.update)


NO_SECONDS = StageSeconds(TaskSeconds(), TaskSeconds(), TaskSeconds())


def layer_seconds(chosen: ChosenLayer, prices: MeshPrices) -> StageSeconds:
    """What a layer adds to the seconds of its stage's tasks."""
    problem = chosen.problem
    outputs = [port.tensor for port in problem.outputs]
    forward = program_seconds(problem.forward, outputs, chosen, prices)
    again = program_seconds(problem.forward, (), chosen, prices) if problem.remat else TaskSeconds()
    cotangents = [port.tensor for port in problem.cotangent_inputs]
    backward = program_seconds(problem.backward, cotangents, chosen, prices)
    return StageSeconds(forward, again + backward, update_seconds(chosen, prices))


def program_seconds(program: Program, targets: Sequence[int], chosen: ChosenLayer, prices: MeshPrices) -> TaskSeconds:
    """Seconds of a program whose first outputs are resharded to the tensors `targets`."""
    compute = communication = 0.0
    seen: set[tuple[int, Spec]] = set()
    for record in program.records:
        if not record.plans:
            continue
        plan = record.plans[0 if record.node == FREE else chosen.choices[record.node]]
        compute += float(prices.work(record.work.work, (plan,))[0])
        for tensor, spec in zip(record.operands, plan.operands, strict=True):
            if tensor >= 0 and (tensor, spec) not in seen:
                seen.add((tensor, spec))
                communication += _move(chosen, tensor, spec, prices)
        for position, tensor in enumerate(record.results):
            communication += _completion(chosen, tensor, plan.raw[position], [axis for axis, _ in plan.combined], prices)
    for tensor, target in zip(program.outputs, targets, strict=False):
        communication += _move(chosen, tensor, chosen.spec(target), prices)
    return TaskSeconds(compute, communication)


def update_seconds(chosen: ChosenLayer, prices: MeshPrices) -> TaskSeconds:
    """Gradient sync, update, and handing out the new parameters of one layer."""
    problem = chosen.problem
    total = TaskSeconds()
    place = {param: position for position, param in enumerate(problem.layer.params)}
    for program in problem.updates:
        position = place[program.work.param]
        param, gradient = problem.params[position], problem.gradients[position]
        sync = _move(chosen, gradient, chosen.spec(program.gradient), prices)
        hand_out = _move(chosen, program.update.outputs[0], chosen.spec(param), prices)
        total += TaskSeconds(0.0, sync + hand_out)
        total = sum((program_seconds(one, (), chosen, prices) for one in program.programs), total)
    for param, tensor in problem.replicas:
        gradient = problem.gradients[place[param]]
        sync = _move(chosen, gradient, chosen.spec(tensor), prices)
        total += TaskSeconds(0.0, sync + _move(chosen, tensor, chosen.spec(problem.params[place[param]]), prices))
    return total


def _move(chosen: ChosenLayer, tensor: int, spec: Spec, prices: MeshPrices) -> float:
    t = chosen.problem.tensors[tensor]
    return 0.0 if t.home == FREE else reshard_seconds(prices.mesh, chosen.spec(tensor), spec, t.num_bytes)


def _completion(chosen: ChosenLayer, tensor: int, raw: Spec, combined: Sequence[int], prices: MeshPrices) -> float:
    t = chosen.problem.tensors[tensor]
    spec = chosen.spec(tensor)
    seconds = reshard_seconds(prices.mesh, raw, spec, t.num_bytes) if raw != spec else 0.0
    local = t.num_bytes / raw.num_shards(prices.mesh.shape)
    return seconds + sum(step_seconds(AllReduce(axis), prices.mesh, local) for axis in combined)
