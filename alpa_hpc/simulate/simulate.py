"""Mesh programs and costs -> Timeline, by running every instruction in virtual time.

Rules: a mesh runs its instructions in order and computes one task at a time. A Send occupies the link from its mesh to the other, one
message after the other, while the mesh goes on; a Recv waits for the arrival. An AllMeshReduce begins when the last mesh comes to it. Feed
and Free take no time. Each link has one sender, so the result does not depend on the order in which meshes are advanced.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, Feed, Free, Recv, Run, Send
from alpa_hpc.runtime.outline import AbstractProgram
from alpa_hpc.simulate.costs import SimulationCosts
from alpa_hpc.simulate.timeline import Event, EventKind, MemorySample, Timeline


def simulate(programs: Sequence[AbstractProgram], costs: SimulationCosts) -> Timeline:
    """One iteration of programs that `check_programs` accepts; costs must have every task and buffer of the programs."""
    network = Network({}, {}, deque(range(len(programs))))
    traces = [Trace(program.mesh) for program in programs]
    meshes = [run_mesh(program, costs, network, trace) for program, trace in zip(programs, traces, strict=True)]
    joining: list[int] = []
    num_done = 0
    while network.ready:
        mesh = network.ready.popleft()
        awaited = next(meshes[mesh], DONE)
        if awaited == DONE:
            num_done += 1
        elif awaited == JOIN:
            joining.append(mesh)
        else:
            network.waiting[awaited] = mesh
        if len(joining) == len(programs):
            join(traces, costs.reduce_seconds)
            network.ready.extend(joining)
            joining.clear()
    assert num_done == len(programs), "the programs deadlock: check_programs comes before simulate"
    return timeline_of(traces)


JOIN = -1  # what a mesh awaits: the other meshes,
DONE = -2  # nothing more,
Awaited = int  # or the message with this tag


@dataclass(slots=True)
class Network:
    """Messages under way: arrival times by tag, meshes that wait for a tag, and meshes that can go on."""

    arrivals: dict[int, float]
    waiting: dict[int, int]
    ready: deque[int]

    def deliver(self, tag: int, arrival: float) -> None:
        """Note a message's arrival time and wake who waits for it."""
        self.arrivals[tag] = arrival
        if tag in self.waiting:
            self.ready.append(self.waiting.pop(tag))


@dataclass(slots=True)
class Trace:
    """What one mesh has done so far. `held` are the bytes a device has in buffers at time `clock`; `peak` counts tasks' workspace, too."""

    mesh: int
    clock: float = 0.0
    busy: float = 0.0
    held: int = 0
    peak: int = 0
    events: list[Event] = field(default_factory=list[Event])
    memory: list[MemorySample] = field(default_factory=list[MemorySample])

    def run(self, task: str, microbatch: int, seconds: float, delta: int, workspace: int) -> None:
        """Compute a task."""
        self.hold(delta)
        self.peak = max(self.peak, self.held + workspace)
        self.memory.append(MemorySample(self.clock, self.held))
        self.record(EventKind.RUN, task, microbatch, self.clock + seconds)
        self.busy += seconds

    def hold(self, delta: int) -> None:
        """Take or release bytes."""
        self.held += delta
        self.peak = max(self.peak, self.held)

    def record(self, kind: EventKind, name: str, microbatch: int, stop: float) -> None:
        """Spend the time until `stop`, if that is later."""
        if stop > self.clock:
            self.events.append(Event(self.mesh, kind, name, microbatch, self.clock, stop))
            self.clock = stop


def run_mesh(program: AbstractProgram, costs: SimulationCosts, network: Network, trace: Trace) -> Generator[Awaited, None, None]:
    """Run a program up to each message that has not been sent, or join of meshes; yield what it awaits."""
    sizes, workspace = costs.buffer_bytes[program.mesh], costs.workspace_bytes[program.mesh]
    seconds = costs.task_seconds[program.mesh]
    links: dict[int, float] = {}
    growth: dict[str, int] = {}
    trace.hold(bytes_of(program.resident, sizes))
    for instruction, shift, tag_shift in program.placed():
        match instruction:
            case Free(buffer):
                trace.held -= sizes[buffer.name]
            case Run(task, _, outputs, donated):
                if task not in growth:
                    growth[task] = bytes_of(outputs, sizes) - bytes_of(donated, sizes)
                trace.run(task, microbatch_of(instruction, shift), seconds[task], growth[task], workspace[task])
            case Send(buffer, _, _, to, tag):
                start = max(trace.clock, links.get(to, 0.0))
                links[to] = start + costs.send_seconds(program.mesh, to, instruction)
                trace.events.append(Event(program.mesh, EventKind.SEND, buffer.name, shifted(buffer, shift), start, links[to]))
                network.deliver(tag + tag_shift, links[to])
            case Recv(buffer, _, _, _, tag):
                if tag + tag_shift not in network.arrivals:
                    yield tag + tag_shift
                trace.record(EventKind.WAIT, buffer.name, shifted(buffer, shift), network.arrivals.pop(tag + tag_shift))
                trace.hold(sizes[buffer.name])
            case Feed(buffer):
                trace.hold(sizes[buffer.name])
            case AllMeshReduce(_, outputs):
                yield JOIN
                trace.hold(bytes_of(outputs, sizes))
            case _:
                assert_never(instruction)


def join(traces: list[Trace], seconds: float) -> None:
    """Let all meshes wait for the last one and join."""
    start = max(trace.clock for trace in traces)
    for trace in traces:
        trace.record(EventKind.WAIT, "join", ITERATION, start)
        trace.record(EventKind.REDUCE, "join", ITERATION, start + seconds)


def bytes_of(buffers: tuple[Buffer, ...], sizes: Mapping[str, int]) -> int:
    """Bytes a device of all buffers."""
    return sum(sizes[buffer.name] for buffer in buffers)


def microbatch_of(run: Run, shift: int) -> int:
    """The microbatch whose buffers a task touches, or ITERATION."""
    for buffers in (run.outputs, run.inputs):
        for buffer in buffers:
            if buffer.microbatch != ITERATION:
                return buffer.microbatch + shift
    return ITERATION


def shifted(buffer: Buffer, shift: int) -> int:
    """The microbatch of a placed buffer, or ITERATION."""
    return ITERATION if buffer.microbatch == ITERATION else buffer.microbatch + shift


def timeline_of(traces: list[Trace]) -> Timeline:
    """Put the meshes together; the iteration ends when the last mesh has nothing left to do and the last message has arrived."""
    last_events = (event.stop for trace in traces for event in trace.events)
    seconds = max(last_events, default=0.0)
    return Timeline(
        seconds=seconds,
        events=tuple(event for trace in traces for event in trace.events),
        memory=tuple(tuple(trace.memory) for trace in traces),
        peak_bytes=tuple(trace.peak for trace in traces),
        bubble_fractions=tuple(1 - trace.busy / seconds if seconds else 0.0 for trace in traces),
    )
