"""Mesh programs and costs -> Timeline, by running every instruction in virtual time.

Rules: a mesh runs its instructions in order and computes one task at a time. A Send occupies the link from its mesh to the other, one
message after the other, while the mesh goes on; a Recv waits for the arrival. An AllMeshReduce begins when the last mesh comes to it. Feed
and Free take no time. Each link has one sender, so the result does not depend on the order in which meshes are advanced.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, assert_never

import numpy as np

from alpa_hpc.runtime.instructions import AllMeshReduce, Buffer, Feed, Free, Instruction, Recv, Run, Send
from alpa_hpc.runtime.outline import AbstractProgram
from alpa_hpc.simulate.clockwork import FlatPrograms, Op, run_clocks
from alpa_hpc.simulate.costs import SimulationCosts
from alpa_hpc.simulate.timeline import MeshTimeline, Timeline


def simulate(programs: Sequence[AbstractProgram], costs: SimulationCosts) -> Timeline:
    """One iteration of programs that `check_programs` accepts; costs must have every task and buffer of the programs."""
    flat, lengths = flatten(programs, costs)
    held = [bytes_of(program.resident, costs.buffer_bytes[program.mesh]) for program in programs]
    clocks, spans = run_clocks(flat, np.array(held, np.int64), sum(lengths))
    assert (clocks.steps == flat.step_starts[1:]).all(), "the programs deadlock: check_programs comes before simulate"
    meshes: list[MeshTimeline] = []
    for mesh, (first, length) in enumerate(zip(flat.first_places, lengths, strict=True)):
        rows = slice(int(first), int(first) + length)
        peak, busy = int(clocks.peaks[mesh]), float(clocks.busy[mesh])
        meshes.append(MeshTimeline(spans.starts[rows], spans.stops[rows], spans.held[rows], peak, busy))
    return Timeline(float(spans.stops.max(initial=0.0)), tuple(meshes))


class Row(NamedTuple):
    """An instruction to the clock; see FlatPrograms."""

    op: Op
    seconds: float = 0.0
    adds: int = 0
    workspace: int = 0
    link: int = 0
    tag: int = 0


def flatten(programs: Sequence[AbstractProgram], costs: SimulationCosts) -> tuple[FlatPrograms, list[int]]:
    """All programs as arrays, and how many instructions each runs."""
    parts = [part for program in programs for part in program.parts]
    owners = [program.mesh for program in programs for _ in program.parts]
    rows = [[row(costs, mesh, len(programs), one) for one in part] for mesh, part in zip(owners, parts, strict=True)]
    firsts = list(accumulate((len(program.parts) for program in programs), initial=0))
    orders = [[(first + part, number) for part, number in p.order if p.parts[part]] for first, p in zip(firsts, programs, strict=False)]
    lengths = [sum(len(parts[part]) for part, _ in order) for order in orders]
    columns = [np.array(column) for column in zip(*(one for part in rows for one in part), strict=True)]
    steps = np.array([step for order in orders for step in order], np.int64).reshape(-1, 2)
    stride = max(program.tag_stride for program in programs)
    flat = FlatPrograms(
        *columns,
        part_starts=ints(accumulate(map(len, parts), initial=0)),
        step_parts=steps[:, 0].copy(),
        step_microbatches=steps[:, 1].copy(),
        step_starts=ints(accumulate(map(len, orders), initial=0)),
        first_places=ints(accumulate(lengths[:-1], initial=0)),
        tag_stride=stride,
        num_tags=int(columns[-1].max(initial=0)) + stride * int(steps[:, 1].max(initial=0)) + 1,
        num_links=len(programs) ** 2,
    )
    return flat, lengths


def row(costs: SimulationCosts, mesh: int, num_meshes: int, instruction: Instruction) -> Row:
    """What an instruction of a mesh takes."""
    sizes = costs.buffer_bytes[mesh]
    match instruction:
        case Run(task, _, outputs, donated):
            growth = bytes_of(outputs, sizes) - bytes_of(donated, sizes)
            return Row(Op.RUN, costs.task_seconds[mesh][task], growth, costs.workspace_bytes[mesh][task])
        case Send(to=to, tag=tag):
            return Row(Op.SEND, costs.send_seconds(mesh, to, instruction), link=mesh * num_meshes + to, tag=tag)
        case Recv(buffer, tag=tag):
            return Row(Op.RECV, adds=sizes[buffer.name], tag=tag)
        case AllMeshReduce(_, outputs):
            return Row(Op.JOIN, costs.reduce_seconds, bytes_of(outputs, sizes))
        case Feed(buffer):
            return Row(Op.HOLD, adds=sizes[buffer.name])
        case Free(buffer):
            return Row(Op.HOLD, adds=-sizes[buffer.name])
        case _:
            assert_never(instruction)


def bytes_of(buffers: tuple[Buffer, ...], sizes: Mapping[str, int]) -> int:
    """Bytes a device of all buffers."""
    return sum(sizes[buffer.name] for buffer in buffers)


def ints(numbers: Iterable[int]) -> np.ndarray:
    """The numbers as the clock wants them."""
    return np.fromiter(numbers, np.int64)
