"""Run a mesh program: (MeshProgram, jitted tasks, state) -> new state and results, instruction by instruction (paper, section 6).

Each instruction is turned once into a closure over slot numbers; an iteration calls the closures in order. The loop can stop after any
instruction, so one process interleaves several meshes (`run_interleaved`), and an MPI rank runs its own mesh to the end (`run_iteration`).
"""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, assert_never, final

import jax

from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.check import check_buffers
from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, Feed, Free, Instruction, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.listing import instruction_line
from alpa_hpc.runtime.liveness import makes, reads
from alpa_hpc.runtime.transport import POLL_SECONDS, AbstractPending, AbstractTransport

Task = Callable[..., Sequence[jax.Array]]
FeedBatch = Callable[[int, int], jax.Array]  # (batch input, microbatch) -> the array on this mesh, as the tasks want it


class StepResult(enum.Enum):
    """What one `Executor.step` did."""

    PROGRESSED = enum.auto()
    BLOCKED = enum.auto()
    DONE = enum.auto()


@dataclass(frozen=True, slots=True)
class Position:
    """Where a mesh is: how many instructions it has finished since the start, and the one it is at now, as text."""

    finished: int
    index: int
    microbatch: int
    instruction: str


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What an iteration leaves: the resident buffers, and the results for the host."""

    resident: dict[Buffer, jax.Array]
    results: dict[Buffer, jax.Array]


@dataclass(slots=True)
class _Iteration:
    """State of the iteration under way: each buffer's array by slot, the next instruction, and what that one waits for."""

    slots: list[Any]
    feed: FeedBatch
    index: int = 0
    wait: "_Wait | None" = None


@dataclass(frozen=True, slots=True)
class _Wait:
    """A pending arrival and what to do with it."""

    pending: AbstractPending[Any]
    store: Callable[[_Iteration, Any], None]


_Step = Callable[[_Iteration], _Wait | None]  # None: the instruction is finished


@final
class Executor:
    """One mesh's program, ready to be run iteration after iteration. Make it with `prepare`."""

    def __init__(self, program: MeshProgram, steps: tuple[_Step, ...], slots: Mapping[Buffer, int], transport: AbstractTransport) -> None:
        self.program = program
        self._steps = steps
        self._slots = slots
        self._transport = transport
        self._finished = 0
        self._iteration: _Iteration | None = None

    def start(self, resident: Mapping[Buffer, jax.Array], feed: FeedBatch) -> None:
        """Begin an iteration with the state in `resident`; the caller drops its own references, since tasks may donate the arrays."""
        assert self._iteration is None, f"mesh {self.program.mesh} is still in an iteration"
        _check_resident(self.program, resident)
        slots: list[Any] = [None] * len(self._slots)
        for buffer in self.program.resident:
            slots[self._slots[buffer]] = resident[buffer]
        self._iteration = _Iteration(slots, feed)

    def step(self) -> StepResult:
        """Try the next instruction. BLOCKED: it waits for another mesh; ask again. An error gets a note that says where it happened."""
        iteration = self._iteration
        assert iteration is not None, f"mesh {self.program.mesh} has no iteration: call start first"
        if iteration.index == len(self._steps):
            return StepResult.DONE if self._transport.drained() else StepResult.BLOCKED
        try:
            return self._advance(iteration)
        except Exception as error:
            error.add_note(f"at {self.describe()}")
            raise

    def finish(self) -> IterationResult:
        """End an iteration that is DONE and hand out its buffers."""
        iteration = self._iteration
        assert iteration is not None and iteration.index == len(self._steps), f"mesh {self.program.mesh} is not done"
        self._iteration = None
        resident = {buffer: iteration.slots[self._slots[buffer]] for buffer in self.program.resident}
        return IterationResult(resident, {buffer: iteration.slots[self._slots[buffer]] for buffer in self.program.results})

    def running(self) -> bool:
        """Whether an iteration is under way."""
        return self._iteration is not None

    def position(self) -> Position:
        """Where this mesh is now; safe to ask from another thread."""
        iteration = self._iteration
        index = iteration.index if iteration is not None else 0
        if iteration is None or index >= len(self._steps):
            return Position(self._finished, index, ITERATION, "none (between iterations, or its last messages are leaving)")
        instruction = self.program.instructions[index]
        return Position(self._finished, index, microbatch_of(instruction), instruction_line(instruction))

    def describe(self) -> str:
        """The position in words, for messages."""
        position = self.position()
        microbatch = "" if position.microbatch == ITERATION else f", microbatch {position.microbatch}"
        return f"mesh {self.program.mesh}, instruction {position.index} of {len(self._steps)}{microbatch}: {position.instruction}"

    def _advance(self, iteration: _Iteration) -> StepResult:
        wait = iteration.wait if iteration.wait is not None else self._steps[iteration.index](iteration)
        if wait is not None:
            if not wait.pending.ready():
                iteration.wait = wait
                return StepResult.BLOCKED
            wait.store(iteration, wait.pending.take())
            iteration.wait = None
        iteration.index += 1
        self._finished += 1
        return StepResult.PROGRESSED


def prepare(program: MeshProgram, tasks: Mapping[str, Task], transport: AbstractTransport) -> Executor:
    """Bind a program to the mesh's tasks and transport. Raises ProgramError for an unknown task or misused buffer."""
    check_buffers(program)
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and instruction.task not in tasks:
            raise ProgramError(
                f"mesh {program.mesh}, instruction {index} runs task {instruction.task!r}, expected one of {sorted(tasks)}. "
                "Compile the mesh's tasks from the plan the program was emitted from."
            )
    slots = {buffer: slot for slot, buffer in enumerate(sorted(_all_buffers(program)))}
    steps = tuple(_bind(instruction, tasks, transport, slots) for instruction in program.instructions)
    return Executor(program, steps, slots, transport)


def run_iteration(executor: Executor, resident: Mapping[Buffer, jax.Array], feed: FeedBatch) -> IterationResult:
    """Run one iteration of one mesh to its end, waiting for the other meshes where it must."""
    executor.start(resident, feed)
    while (result := executor.step()) is not StepResult.DONE:
        if result is StepResult.BLOCKED:
            time.sleep(POLL_SECONDS)
    return executor.finish()


def run_interleaved(
    executors: Sequence[Executor], residents: Sequence[Mapping[Buffer, jax.Array]], feeds: Sequence[FeedBatch]
) -> tuple[IterationResult, ...]:
    """Run one iteration of all meshes in this thread, an instruction each in turn. Raises ProgramError where all block: a deadlock."""
    for executor, resident, feed in zip(executors, residents, feeds, strict=True):
        executor.start(resident, feed)
    running = list(executors)
    while running:
        outcomes = [(executor, executor.step()) for executor in running]
        running = [executor for executor, outcome in outcomes if outcome is not StepResult.DONE]
        if running and all(outcome is StepResult.BLOCKED for _, outcome in outcomes):
            waiting = "\n  ".join(executor.describe() for executor in running)
            raise ProgramError(
                f"no mesh can go on; they wait at\n  {waiting}\nRun check_programs on the programs: a Send or Recv has no partner."
            )
    return tuple(executor.finish() for executor in executors)


def microbatch_of(instruction: Instruction) -> int:
    """The microbatch an instruction works for; ITERATION where all its buffers live longer."""
    return max((buffer.microbatch for buffer in (*reads(instruction), *makes(instruction))), default=ITERATION)


def _check_resident(program: MeshProgram, resident: Mapping[Buffer, jax.Array]) -> None:
    if resident.keys() != set(program.resident):
        missing, foreign = sorted(set(program.resident) - resident.keys()), sorted(resident.keys() - set(program.resident))
        raise ProgramError(f"mesh {program.mesh} started with resident buffers {missing} missing and {foreign} unknown to its program.")


def _all_buffers(program: MeshProgram) -> set[Buffer]:
    used = {buffer for instruction in program.instructions for buffer in (*reads(instruction), *makes(instruction))}
    return used | set(program.resident) | set(program.results)


def _bind(instruction: Instruction, tasks: Mapping[str, Task], transport: AbstractTransport, slots: Mapping[Buffer, int]) -> _Step:
    """The closure of an instruction: all look-ups that can be done once are done here."""
    match instruction:
        case Run():
            return _bind_run(instruction, tasks[instruction.task], slots)
        case Feed(buffer=buffer, batch_input=batch_input):
            return _bind_feed(slots[buffer], batch_input, buffer.microbatch)
        case Send(buffer=buffer):
            return _bind_send(instruction, slots[buffer], transport)
        case Recv(buffer=buffer):
            return _bind_receive(instruction, slots[buffer], transport)
        case AllMeshReduce():
            return _bind_reduce(instruction, slots, transport)
        case Free(buffer=buffer):
            return _bind_free(slots[buffer])
    assert_never(instruction)


def _bind_run(instruction: Run, task: Task, slots: Mapping[Buffer, int]) -> _Step:
    inputs = _reader([slots[buffer] for buffer in instruction.inputs])
    donated = [slots[buffer] for buffer in instruction.donated]
    outputs = [slots[buffer] for buffer in instruction.outputs]

    def run(iteration: _Iteration) -> None:
        values = iteration.slots
        made = task(*inputs(values))
        for slot in donated:
            values[slot] = None
        for slot, array in zip(outputs, made, strict=True):
            values[slot] = array

    return run


def _bind_feed(slot: int, batch_input: int, microbatch: int) -> _Step:
    def feed(iteration: _Iteration) -> None:
        iteration.slots[slot] = iteration.feed(batch_input, microbatch)

    return feed


def _bind_send(instruction: Send, slot: int, transport: AbstractTransport) -> _Step:
    def send(iteration: _Iteration) -> None:
        transport.send(instruction, iteration.slots[slot])

    return send


def _bind_receive(instruction: Recv, slot: int, transport: AbstractTransport) -> _Step:
    def store(iteration: _Iteration, array: jax.Array) -> None:
        iteration.slots[slot] = array

    def receive(_: _Iteration) -> _Wait:
        return _Wait(transport.receive(instruction), store)

    return receive


def _bind_reduce(instruction: AllMeshReduce, slots: Mapping[Buffer, int], transport: AbstractTransport) -> _Step:
    inputs = _reader([slots[buffer] for buffer in instruction.inputs])
    outputs = [slots[buffer] for buffer in instruction.outputs]

    def store(iteration: _Iteration, arrays: tuple[jax.Array, ...]) -> None:
        for slot, array in zip(outputs, arrays, strict=True):
            iteration.slots[slot] = array

    def reduce(iteration: _Iteration) -> _Wait:
        return _Wait(transport.all_reduce(inputs(iteration.slots), instruction.kinds), store)

    return reduce


def _bind_free(slot: int) -> _Step:
    def free(iteration: _Iteration) -> None:
        iteration.slots[slot] = None

    return free


def _reader(slots: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function from the slots' values to a tuple of those asked for, fast (itemgetter gives a tuple only for two or more)."""
    if len(slots) < 2:
        return lambda values: tuple(values[slot] for slot in slots)
    return itemgetter(*slots)
