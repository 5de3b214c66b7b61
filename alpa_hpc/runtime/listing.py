"""Instruction -> one line of text: the canonical form that is hashed, and what errors show.

run backward [state.0 value.3@2 gradient.0] -> [cotangent.3@2 gradient.0] donating [gradient.0]
recv value.3.tile@2 <- mesh 0 tag 7: float32(8, 16) [S0,R] on 2x1 -> float32(8, 16) [S0,S1] on 2x2
"""

import hashlib
from collections.abc import Iterable
from typing import assert_never

from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, Feed, Free, Instruction, Layout, MeshProgram, Recv, Run, Send


def instruction_line(instruction: Instruction) -> str:
    """An instruction in one line; equal lines mean equal instructions."""
    match instruction:
        case Feed(buffer, batch_input):
            return f"feed {buffer_text(buffer)} <- input {batch_input}"
        case Run(task, inputs, outputs, donated):
            return f"run {task} {buffers_text(inputs)} -> {buffers_text(outputs)} donating {buffers_text(donated)}"
        case Send(buffer, source, target, to, tag):
            return f"send {buffer_text(buffer)} -> mesh {to} tag {tag}: {layout_text(source)} -> {layout_text(target)}"
        case Recv(buffer, source, target, sender, tag):
            return f"recv {buffer_text(buffer)} <- mesh {sender} tag {tag}: {layout_text(source)} -> {layout_text(target)}"
        case AllMeshReduce(inputs, outputs, kinds):
            return f"reduce {buffers_text(inputs)} -> {buffers_text(outputs)} by {' '.join(kind.value for kind in kinds)}"
        case Free(buffer):
            return f"free {buffer_text(buffer)}"
        case _:
            assert_never(instruction)


def program_hash(programs: Iterable[MeshProgram]) -> str:
    """SHA-256 (hex) of all programs' text, equal on every rank that derived the same programs."""
    digest = hashlib.sha256()
    for program in programs:
        header = f"mesh {program.mesh} resident {buffers_text(program.resident)} results {buffers_text(program.results)}"
        digest.update("\n".join((header, *map(instruction_line, program.instructions), "")).encode())
    return digest.hexdigest()


def buffer_text(buffer: Buffer) -> str:
    """NAME@MICROBATCH, or NAME for what lives once an iteration."""
    return buffer.name if buffer.microbatch == ITERATION else f"{buffer.name}@{buffer.microbatch}"


def buffers_text(buffers: Iterable[Buffer]) -> str:
    """Buffers in brackets."""
    return f"[{' '.join(map(buffer_text, buffers))}]"


def layout_text(layout: Layout) -> str:
    """dtype(shape) split on mesh."""
    return f"{layout.dtype}{layout.shape} {layout.spec} on {layout.mesh.rows}x{layout.mesh.cols}"
