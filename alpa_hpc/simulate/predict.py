"""An assembly on a cluster -> what its iteration would take: the programs in virtual time, with each task's predicted seconds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from alpa_hpc.cluster.collectives import all_reduce
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.runtime.instructions import Layout, Run, Send
from alpa_hpc.runtime.outline import distinct
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import Argument, StageTask, reused_inputs
from alpa_hpc.sharding.breakdown import StageSeconds
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import reshard_seconds
from alpa_hpc.sharding.splits import ChosenSplit
from alpa_hpc.sharding.update_memory import replica_memory, resharding_memory, update_memory
from alpa_hpc.sharding.workspace import chosen_backward_workspace, chosen_forward_workspace
from alpa_hpc.simulate.costs import SimulationCosts, transfer_seconds
from alpa_hpc.simulate.simulate import simulate
from alpa_hpc.simulate.timeline import Timeline

SCALAR_BYTES = 8.0


@dataclass(frozen=True, slots=True, eq=False)
class PricedStage:
    """A stage's global devices, the prices of its mesh, and the seconds of its tasks."""

    devices: tuple[int, ...]
    prices: MeshPrices
    seconds: StageSeconds


def predict(assembly: Assembly, stages: Sequence[PricedStage], cluster: ClusterSpec) -> Timeline:
    """One iteration in virtual time."""
    return simulate(assembly.outlines, simulation_costs(assembly, stages, cluster))


def simulation_costs(assembly: Assembly, stages: Sequence[PricedStage], cluster: ClusterSpec) -> SimulationCosts:
    """Seconds of every task and message, bytes a device of every buffer."""
    tasks = [assembly.tasks(index) for index in range(len(stages))]

    @cache  # every microbatch sends the same
    def seconds(mesh: int, to: int, num_bytes: int) -> float:
        return transfer_seconds(cluster, stages[mesh].devices, stages[to].devices, num_bytes)

    def send_seconds(mesh: int, to: int, send: Send) -> float:
        return seconds(mesh, to, send.source.num_bytes)

    return SimulationCosts(
        tuple(task_seconds(stage, mine) for stage, mine in zip(stages, tasks, strict=True)),
        tuple(buffer_bytes(assembly, index, tasks[index]) for index in range(len(stages))),
        tuple(
            workspace_bytes(stage, mine, hiding=cluster.device.hides_collectives)
            for stage, mine in zip(assembly.stages, tasks, strict=True)
        ),
        send_seconds,
        all_reduce(cluster.inter_node, len(stages), SCALAR_BYTES),
    )


def task_seconds(stage: PricedStage, tasks: Mapping[str, StageTask]) -> Mapping[str, float]:
    """Seconds of each task; gradient sync and update are all counted in `update`, sums and zeros take none."""
    seconds = dict.fromkeys(tasks, 0.0)
    seconds["forward"] = stage.seconds.forward.total
    seconds["backward"] = stage.seconds.backward.total
    seconds["update"] = stage.seconds.update.total
    for name, task in tasks.items():
        if name.startswith("gather:"):
            wire, wanted = _gathered(task)
            seconds[name] = reshard_seconds(stage.prices.mesh, wire.spec, wanted.spec, float(wire.num_bytes))
    return seconds


def buffer_bytes(assembly: Assembly, index: int, tasks: Mapping[str, StageTask]) -> Mapping[str, int]:
    """Bytes a device of every buffer of a mesh's program, by name; the most where it changes its layout (a gradient, once it is summed)."""
    sizes: dict[str, int] = {}
    for instruction in distinct(assembly.outlines[index]):
        if not isinstance(instruction, Run):
            continue
        task = tasks[instruction.task]
        pairs = ((instruction.inputs, task.inputs), (instruction.outputs, task.outputs))
        for buffers, layouts in pairs:
            for buffer, layout in zip(buffers, layouts, strict=True):
                sizes[buffer.name] = max(sizes.get(buffer.name, 0), argument_bytes(layout))
    for buffer in (*assembly.outlines[index].resident, *assembly.outlines[index].results):
        sizes.setdefault(buffer.name, int(SCALAR_BYTES))
    return sizes


def workspace_bytes(stage: Stage, tasks: Mapping[str, StageTask], *, hiding: bool) -> Mapping[str, int]:
    """Bytes a device that each task needs beside its buffers; what it consumes without reusing it goes only when the task is over."""
    temporary = temporary_bytes(stage, tasks, hiding=hiding)
    return {name: temporary[name] + _consumed_late(task) for name, task in tasks.items()}


def _consumed_late(task: StageTask) -> int:
    reused = reused_inputs(task)
    return sum(argument_bytes(task.inputs[position]) for position in task.donated if position not in reused)


def temporary_bytes(stage: Stage, tasks: Mapping[str, StageTask], *, hiding: bool) -> Mapping[str, int]:
    """Bytes a device that each task is thought to take while it runs, beyond its inputs and outputs; `hiding` as DeviceSpec has it."""
    splits = [ChosenSplit(chosen, stage.shape) for chosen in stage.layers]
    memory = update_memory(stage.layers, stage.shape, hiding=hiding)
    sums_first = "partials" in tasks  # else the update sums gradients itself
    known: dict[str, Callable[[], float]] = {
        "forward": lambda: chosen_forward_workspace(splits, hiding=hiding),
        "backward": lambda: chosen_backward_workspace(splits, hiding=hiding),
        "partials": lambda: memory.sync,
        "update": lambda: memory.hand_out if sums_first else memory.joint,
    }
    for name in tasks:
        kind, _, number = name.partition(":")
        if kind == "reduce":
            known[f"reduce:{number}"] = partial(replica_memory, stage.layers, stage.shape, int(number), hiding=hiding)
        if kind == "gather":
            known[name] = partial(_gathering_bytes, tasks[name], stage.layers[0].problem.spanning, hiding=hiding)
    return {name: int(known[name]()) if name in known else 0 for name in tasks}


def _gathering_bytes(task: StageTask, spanning: tuple[bool, bool], *, hiding: bool) -> float:
    """Bytes a device that a gather needs beside the tile that has arrived and what is made of it."""
    wire, wanted = _gathered(task)
    return resharding_memory(wire.shape, np.dtype(wire.dtype).itemsize, wire.mesh, wire.spec, wanted.spec, spanning, hiding=hiding)


def _gathered(task: StageTask) -> tuple[Layout, Layout]:
    """What a gather reads and makes."""
    wire, wanted = task.inputs[0], task.outputs[0]
    assert isinstance(wire, Layout) and isinstance(wanted, Layout), "gathers take one array"
    return wire, wanted


def argument_bytes(argument: Argument) -> int:
    """Bytes a device of one buffer."""
    return tile_bytes(argument) if isinstance(argument, Layout) else sum(tile_bytes(one) for one in argument)


def tile_bytes(layout: Layout) -> int:
    """Bytes of one device's tile."""
    return layout.num_bytes // layout.spec.num_shards(layout.mesh)
