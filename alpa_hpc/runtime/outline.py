"""What a mesh does in an iteration, not yet written out for every microbatch: what comes first, one forward, one backward, what comes last.

Programs of large models are millions of instructions, and all microbatches' are equal up to numbers. Ranks run programs that are written
out, and checks prove those; who only asks what happens (virtual time, memory, which tasks there are) reads the outline.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, assert_never

from alpa_hpc.runtime.instructions import (
    ITERATION,
    AllMeshReduce,
    Buffer,
    Feed,
    Free,
    Instruction,
    MeshProgram,
    PlacedPart,
    Recv,
    Run,
    Send,
)
from alpa_hpc.runtime.liveness import consumes, makes, reads
from alpa_hpc.runtime.schedule import Forward, Step


class AbstractProgram(Protocol):
    """An iteration of a mesh, written out or not."""

    @property
    def mesh(self) -> int:
        """The mesh."""
        ...

    @property
    def resident(self) -> tuple[Buffer, ...]:
        """Buffers that exist before and after."""
        ...

    @property
    def results(self) -> tuple[Buffer, ...]:
        """Buffers that the host reads in the end."""
        ...

    @property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """Runs of instructions, as microbatch 0 has them."""
        ...

    @property
    def order(self) -> Iterable[PlacedPart]:
        """The program: which part follows which, and for which microbatch."""
        ...

    @property
    def tag_stride(self) -> int:
        """By how much the tags of a microbatch are larger than those of the one before."""
        ...


def distinct(program: AbstractProgram) -> Iterator[Instruction]:
    """The instructions of a program, those that microbatches repeat once where it is an outline."""
    return chain.from_iterable(program.parts)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramOutline:
    """`forward` and `backward` are the instructions of microbatch 0; those of microbatch m have tags larger by m * `tag_stride`."""

    mesh: int
    first: tuple[Instruction, ...]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    last: tuple[Instruction, ...]
    steps: tuple[Step, ...]
    tag_stride: int
    resident: tuple[Buffer, ...]
    results: tuple[Buffer, ...]

    @property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """See AbstractProgram."""
        return (self.first, self.forward, self.backward, self.last)

    @property
    def order(self) -> Iterator[PlacedPart]:
        """See AbstractProgram."""
        yield 0, 0
        yield from ((1 if isinstance(step, Forward) else 2, step.microbatch) for step in self.steps)
        yield 3, 0

    def written_out(self) -> MeshProgram:
        """The program."""
        forward, backward = Template.of(self.forward), Template.of(self.backward)
        steps: list[Instruction] = []
        for step in self.steps:
            template = forward if isinstance(step, Forward) else backward
            steps.extend(template.at(step.microbatch, self.tag_stride))
        return MeshProgram(self.mesh, (*self.first, *steps, *self.last), self.resident, self.results)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Instructions of microbatch 0, to be repeated for the others: `fixed` buffers live once an iteration, `moving` names a microbatch."""

    instructions: tuple[Instruction, ...]
    fixed: Mapping[str, Buffer]
    moving: tuple[str, ...]

    @staticmethod
    def of(instructions: tuple[Instruction, ...]) -> "Template":
        """Sort the buffers of the instructions by how long they live."""
        touched = dict.fromkeys(
            buffer for instruction in instructions for buffer in (*reads(instruction), *makes(instruction), *consumes(instruction))
        )
        fixed = {buffer.name: buffer for buffer in touched if buffer.microbatch == ITERATION}
        return Template(instructions, fixed, tuple(buffer.name for buffer in touched if buffer.microbatch != ITERATION))

    def at(self, microbatch: int, tag_stride: int) -> Iterator[Instruction]:
        """The instructions for a microbatch; a buffer is one object however often it is used, as programs have millions of uses."""
        moved = {**self.fixed, **{name: Buffer(name, microbatch) for name in self.moving}}
        tag_shift = microbatch * tag_stride
        for instruction in self.instructions:
            match instruction:
                case Run(task, inputs, outputs, donated):
                    yield Run(task, *(tuple([moved[buffer.name] for buffer in buffers]) for buffers in (inputs, outputs, donated)))
                case Send(buffer, source, target, to, tag):
                    yield Send(moved[buffer.name], source, target, to, tag + tag_shift)
                case Recv(buffer, source, target, sender, tag):
                    yield Recv(moved[buffer.name], source, target, sender, tag + tag_shift)
                case Feed(buffer, batch_input):
                    yield Feed(moved[buffer.name], batch_input)
                case Free(buffer):
                    yield Free(moved[buffer.name])
                case AllMeshReduce():
                    raise AssertionError("meshes join once an iteration, never once a microbatch")
                case _:
                    assert_never(instruction)
