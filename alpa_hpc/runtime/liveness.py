"""Instructions without Frees -> the same with a Free right after each buffer's last use.

Rule: walking backwards, a buffer touched by an instruction and not live behind it dies there, unless the instruction consumes it (a
donated input). What a Run makes in place of a donated input has the same name, so a name may live several times, one after the other.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

from alpa_hpc.runtime.instructions import AllMeshReduce, Buffer, Feed, Free, Instruction, Recv, Run, Send


def reads(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers whose content the instruction uses, donated ones included."""
    match instruction:
        case Run(inputs=inputs) | AllMeshReduce(inputs=inputs):
            return inputs
        case Send(buffer=buffer):
            return (buffer,)
        case Feed() | Recv() | Free():
            return ()
        case _:
            assert_never(instruction)


def makes(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers that exist from the instruction on."""
    match instruction:
        case Run(outputs=outputs) | AllMeshReduce(outputs=outputs):
            return outputs
        case Feed(buffer=buffer) | Recv(buffer=buffer):
            return (buffer,)
        case Send() | Free():
            return ()
        case _:
            assert_never(instruction)


def consumes(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers that no longer exist behind the instruction (unless it makes them anew)."""
    match instruction:
        case Run(donated=donated):
            return donated
        case Free(buffer=buffer):
            return (buffer,)
        case Feed() | Send() | Recv() | AllMeshReduce():
            return ()
        case _:
            assert_never(instruction)


def free_after_last_use(instructions: Sequence[Instruction], resident: Iterable[Buffer], kept: Iterable[Buffer]) -> tuple[Instruction, ...]:
    """Insert the Frees; `resident` buffers exist before the first instruction, `kept` ones must exist behind the last."""
    live = set(kept)
    backwards: list[Instruction] = []
    for instruction in reversed(instructions):
        made, used, consumed = makes(instruction), reads(instruction), consumes(instruction)
        dying = dict.fromkeys(buffer for buffer in (*used, *made) if buffer not in live and buffer not in consumed)
        backwards.extend(Free(buffer) for buffer in reversed(dying))
        backwards.append(instruction)
        live.difference_update(made)
        live.update(used)
    backwards.extend(Free(buffer) for buffer in resident if buffer not in live)
    return tuple(reversed(backwards))
