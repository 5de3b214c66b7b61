"""Compiled tasks of a stage, held against the plan: collectives kind by kind and byte by byte, peak memory (DESIGN, "Apply").

XLA combines collectives of one kind among the same devices, so bytes are compared by lane: the kind and the mesh axes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import StageTask, reused_inputs
from alpa_hpc.sharding.resharding import Lane
from alpa_hpc.simulate.predict import argument_bytes
from alpa_hpc.verify.hlo import Collective, collectives
from alpa_hpc.verify.neighbourhood import compiled_site, site_lines
from alpa_hpc.verify.traffic import PlannedCollective, planned_collectives

One = TypeVar("One")

TOLERANCE = 0.05  # by which compiled bytes of a lane may differ from the plan's
MOST_PLACES = 3  # that a mismatch names


@dataclass(frozen=True, slots=True)
class LaneCheck:
    """Bytes a device of one lane of a task, planned and compiled; `num_devices` talk to each other."""

    lane: Lane
    num_devices: int
    planned_bytes: int
    compiled_bytes: int

    @property
    def agrees(self) -> bool:
        """Whether both say the same, within the tolerance."""
        return abs(self.planned_bytes - self.compiled_bytes) <= TOLERANCE * max(self.planned_bytes, self.compiled_bytes)


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Bytes a device at the most while a task runs, what it is given and gives included, and those that it needs beside that."""

    planned_peak: int
    compiled_peak: int
    planned_temporary: int
    compiled_temporary: int


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """One compiled task against the plan; `mismatches` = a text for each lane that does not agree."""

    task: str
    lanes: tuple[LaneCheck, ...]
    memory: MemoryCheck
    mismatches: tuple[str, ...]


def check_task(step: LayeredStep, stage: Stage, io: StageIO, task: StageTask, temporary: int, compiled: Compiled) -> TaskCheck:
    """Hold a compiled task against the plan; `temporary` = bytes that it is thought to need beside its buffers."""
    planned = planned_collectives(step, stage, io, task, gpu=is_for_gpus(compiled))
    found = collectives(compiled.as_text() or "")
    lanes = lane_checks(planned, found, stage.shape)
    wrong = tuple(mismatch(task.name, one, planned, found, stage) for one in lanes if not one.agrees)
    return TaskCheck(task.name, lanes, memory_check(task, temporary, compiled), wrong)


def is_for_gpus(compiled: Compiled) -> bool:
    """Whether XLA compiled for GPUs: it then knows of barriers when it looks for what is made twice, and gathers before it broadcasts."""
    shardings: list[Sharding] = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return all(device.platform != "cpu" for sharding in shardings for device in sharding.device_set)


def memory_check(task: StageTask, temporary: int, compiled: Compiled) -> MemoryCheck:
    """Peak memory. Inputs that a program does not read are not among its arguments, but lie in memory all the same."""
    found = compiled.memory_analysis()
    assert found is not None, "CPU and GPU programs say what memory they need"
    inputs, outputs = sum(map(argument_bytes, task.inputs)), sum(map(argument_bytes, task.outputs))
    reused = sum(argument_bytes(task.inputs[position]) for position in reused_inputs(task))
    compiled_temporary = int(found.temp_size_in_bytes)
    compiled_outputs = int(found.output_size_in_bytes) - int(found.alias_size_in_bytes)
    return MemoryCheck(inputs + outputs - reused + temporary, inputs + compiled_outputs + compiled_temporary, temporary, compiled_temporary)


def lane_checks(planned: Sequence[PlannedCollective], found: Sequence[Collective], shape: MeshShape) -> tuple[LaneCheck, ...]:
    """Bytes by lane, of each lane that one of both knows."""
    plan, code = Counter[Lane](), Counter[Lane]()
    for one in planned:
        plan[one.lane] += one.num_bytes
    for one in found:
        code[lane_of(one, shape)] += one.num_bytes
    lanes = sorted(plan | code, key=lambda lane: (lane.kind.value, lane.axes))
    return tuple(LaneCheck(lane, group_size(lane, shape), plan[lane], code[lane]) for lane in lanes)


def lane_of(one: Collective, shape: MeshShape) -> Lane:
    """The lane of a compiled collective; no axes where its groups are not those of any (as of a collective-permute)."""
    groups = frozenset(map(frozenset, one.groups))
    axes = next((axes for axes, known in axis_groups(shape).items() if known == groups), ())
    return Lane(one.kind, tuple(axis for axis in axes if shape.sizes[axis] > 1))


def axis_groups(shape: MeshShape) -> dict[tuple[int, ...], frozenset[frozenset[int]]]:
    """For axes of a mesh, the devices (numbered row by row) that differ only in their places on them."""
    devices = np.arange(shape.num_devices).reshape(shape.sizes)
    rows = {(0,): devices.T, (1,): devices, (0, 1): devices.reshape(1, -1)}
    return {axes: frozenset(frozenset(int(device) for device in row) for row in table) for axes, table in rows.items()}


def group_size(lane: Lane, shape: MeshShape) -> int:
    """How many devices talk to each other."""
    size = 1
    for axis in lane.axes:
        size *= shape.sizes[axis]
    return size


def mismatch(task: str, lane: LaneCheck, planned: Sequence[PlannedCollective], found: Sequence[Collective], stage: Stage) -> str:
    """What a lane should move and what it moves, and the places of the largest collectives that only one of both has."""
    plan = [one for one in planned if one.lane == lane.lane]
    code = [one for one in found if lane_of(one, stage.shape) == lane.lane]
    sizes = Counter(size for one in code for size in one.parts)
    missing = _unmatched(plan, sizes, lambda one: (one.num_bytes,))
    surplus = _unmatched(code, Counter(one.num_bytes for one in plan), lambda one: one.parts)
    axes = " and ".join(map(str, lane.lane.axes)) or "none"
    lines = [
        f"{task}: {lane.lane.kind.value} over mesh axis {axes} (groups of {lane.num_devices}): planned {lane.planned_bytes} bytes a "
        f"device in {len(plan)} collectives, compiled {lane.compiled_bytes} in {len(code)}"
    ]
    places = [("planned", one.num_bytes, compiled_site(stage.layers, one.origin)) for one in surplus]
    places += [("compiled", one.num_bytes, one.site) for one in missing]
    for word, num_bytes, site in sorted(places, key=lambda place: -place[1])[:MOST_PLACES]:
        lines.append(f"  not {word}: {num_bytes} bytes, at")
        lines += [f"    {line}" for line in site_lines(site)]
    return "\n".join(lines)


def _unmatched(ones: Sequence[One], sizes: Counter[int], sizes_of: Callable[[One], tuple[int, ...]]) -> list[One]:
    """Those that find no partner of their size on the other side; a combined collective needs one for each array."""
    left = Counter(sizes)
    found: list[One] = []
    for one in ones:
        mine = Counter(sizes_of(one))
        if mine <= left:
            left -= mine
        else:
            found.append(one)
    return found
