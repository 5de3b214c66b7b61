"""Programs of all meshes -> the same programs, or a ProgramError that shows the place: the proof that they can run (DESIGN, promise 4).

Rules, each stated by one function:

    check_buffers     a buffer exists when used, is made once, is read, is freed once; in the end only state and results exist
    check_once        a task runs once an iteration or once a microbatch
    check_in_flight   no more microbatches in flight than the schedule allows, each with one forward and one backward
    check_messages    every Send meets one Recv; both say the same of the array
    check_order       between two meshes, in each direction, messages are received in the order in which they are sent
    check_reductions  all meshes join the same scalars in the same order
    check_progress    nobody waits for ever

A mesh runs its instructions in order, a Send never waits, a Recv waits for one message that the program names. Such networks (Kahn, 1974)
do the same whatever the interleaving, so `check_progress` proves termination for all of them by running one.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NoReturn

from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.listing import buffer_text, instruction_line
from alpa_hpc.runtime.liveness import consumes, makes, reads
from alpa_hpc.runtime.schedule import AbstractSchedule

NEIGHBOURS = 5  # instructions shown before and after the one an error is about
DIRECTION = {"forward": 1, "backward": -1}  # what a task does to the number of microbatches in flight

Meeting = Send | Recv | AllMeshReduce


def check_programs(programs: tuple[MeshProgram, ...], schedule: AbstractSchedule) -> tuple[MeshProgram, ...]:
    """Run all programs symbolically and return them; raises ProgramError at the first broken rule of the module's header."""
    for mesh, program in enumerate(programs):
        assert program.mesh == mesh, f"program {mesh} is for mesh {program.mesh}: programs are listed by mesh"
        check_buffers(program)
        check_once(program)
    check_in_flight(programs, schedule)
    check_messages(programs)
    check_order(programs)
    check_reductions(programs)
    check_progress(programs)
    return programs


def peak_bytes(program: MeshProgram, sizes: Mapping[str, int]) -> int:
    """Most bytes a device holds in buffers at once, where `sizes` has the bytes a device of each buffer name.

    Outputs exist beside inputs while a task runs, but take the place of donated ones. A task's temporary memory is not a buffer.
    """
    held = sum(sizes[buffer.name] for buffer in program.resident)
    peak = held
    for instruction in program.instructions:
        held += sum(sizes[buffer.name] for buffer in makes(instruction)) - sum(sizes[buffer.name] for buffer in consumes(instruction))
        peak = max(peak, held)
    return peak


def check_memory(program: MeshProgram, sizes: Mapping[str, int], limit_bytes: int) -> MeshProgram:
    """Return the program if its buffers fit into `limit_bytes` a device; raises ProgramError with both numbers."""
    peak = peak_bytes(program, sizes)
    if peak > limit_bytes:
        raise ProgramError(
            f"mesh {program.mesh} holds up to {peak} bytes a device in buffers, more than the {limit_bytes} it may: "
            "plan with more microbatches, more recomputation or more devices"
        )
    return program


def check_buffers(program: MeshProgram) -> None:
    """A buffer exists when used, is made once, is read before it goes, and goes once; state and results remain."""
    exist, unread = set(program.resident), set[Buffer]()
    for index, instruction in enumerate(program.instructions):
        used, made, gone = reads(instruction), makes(instruction), consumes(instruction)
        if not exist.issuperset(used):
            fail(program, index, f"uses {missing(used, exist)}, which does not exist here: never made, or freed before")
        unread.difference_update(used)
        if not exist.issuperset(gone):
            fail(program, index, f"frees {missing(gone, exist)}, which does not exist here: freed or donated before")
        if not unread.isdisjoint(gone):
            fail(program, index, f"frees {buffers_text(unread.intersection(gone))}, which nothing has read")
        exist.difference_update(gone)
        if not exist.isdisjoint(made) or len(set(made)) < len(made):
            fail(program, index, f"makes {buffers_text(exist.intersection(made) or made)}, which exists already")
        exist.update(made)
        unread.update(made)
    check_end(program, exist)


def check_end(program: MeshProgram, exist: set[Buffer]) -> None:
    """Behind the last instruction exactly state and results exist."""
    last, expected = len(program.instructions) - 1, {*program.resident, *program.results}
    if exist - expected:
        fail(program, last, f"is the last, and {buffers_text(exist - expected)} is left: a Free is missing")
    if expected - exist:
        fail(program, last, f"is the last, and {buffers_text(expected - exist)}, state or a result, is gone")


def check_once(program: MeshProgram) -> None:
    """No two Runs of a task have the same microbatch; forward and backward, which may touch no microbatch's buffer, are counted instead."""
    seen: set[tuple[str, int]] = set()
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and instruction.task not in DIRECTION:
            key = (instruction.task, instruction.inputs[0].microbatch if instruction.inputs else ITERATION)
            if key in seen:
                fail(program, index, "runs a second time")
            seen.add(key)


def check_in_flight(programs: tuple[MeshProgram, ...], schedule: AbstractSchedule) -> None:
    """Forwards run ahead of backwards within the schedule's bound, as many of both, as many on every mesh."""
    counts = [sum(isinstance(instruction, Run) and instruction.task == "forward" for instruction in p.instructions) for p in programs]
    for program, count in zip(programs, counts, strict=True):
        if count != counts[0]:
            fail(program, 0, f"begins a program of {count} forwards; that of mesh 0 has {counts[0]}")
        bound = schedule.max_in_flight(program.mesh, len(programs), count) if count else 0
        in_flight = 0
        for index, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Run) or instruction.task not in DIRECTION:
                continue
            in_flight += DIRECTION[instruction.task]
            if not 0 <= in_flight <= bound:
                fail(program, index, f"brings the microbatches in flight to {in_flight}, expected 0 to {bound} with {schedule}")
        if in_flight:
            fail(program, len(program.instructions) - 1, f"is the last, and {in_flight} microbatches have had no backward")


def check_messages(programs: tuple[MeshProgram, ...]) -> None:
    """Send and Recv with the same tag exist once each, name each other's mesh, and agree on array and layouts."""
    sends, receives = by_tag(programs, Send), by_tag(programs, Recv)
    for tag, (mesh, index) in sends.items():
        if tag not in receives:
            fail(programs[mesh], index, "has no Recv")
    for tag, (mesh, index) in receives.items():
        if tag not in sends:
            fail(programs[mesh], index, "has no Send")
        sender, send_index = sends[tag]
        send, receive = programs[sender].instructions[send_index], programs[mesh].instructions[index]
        assert isinstance(send, Send) and isinstance(receive, Recv), "by_tag selects by class"
        difference = disagreement(sender, send, mesh, receive)
        if difference:
            fail(programs[mesh], index, f"does not fit its Send ({difference}): {instruction_line(send)}")


def by_tag(programs: tuple[MeshProgram, ...], kind: type[Send] | type[Recv]) -> dict[int, tuple[int, int]]:
    """Tag -> (mesh, index) of the Sends or of the Recvs, each tag once."""
    places: dict[int, tuple[int, int]] = {}
    for mesh, program in enumerate(programs):
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, kind):
                if instruction.tag in places:
                    fail(program, index, f"repeats a tag of mesh {places[instruction.tag][0]}, instruction {places[instruction.tag][1]}")
                places[instruction.tag] = (mesh, index)
    return places


def disagreement(sender: int, send: Send, receiver: int, receive: Recv) -> str:
    """What a Send and its Recv say differently, or nothing. A received name is the sent one, perhaps with a mesh or "tile" behind."""
    rules = (
        ("other meshes", send.to == receiver and receive.sender == sender),
        ("other layouts", send.source == receive.source and send.target == receive.target),
        ("source and target of different sizes", (send.source.shape, send.source.dtype) == (send.target.shape, send.target.dtype)),
        ("another microbatch", send.buffer.microbatch == receive.buffer.microbatch),
        ("another array", f"{receive.buffer.name}.".startswith(f"{send.buffer.name}.")),
    )
    return ", ".join(text for text, holds in rules if not holds)


def check_order(programs: tuple[MeshProgram, ...]) -> None:
    """Each mesh receives from each other mesh in the order in which that one sends."""
    sent: dict[tuple[int, int], deque[int]] = {}
    for mesh, program in enumerate(programs):
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                sent.setdefault((mesh, instruction.to), deque()).append(instruction.tag)
    for mesh, program in enumerate(programs):
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Recv):
                expected = sent[instruction.sender, mesh].popleft()
                if instruction.tag != expected:
                    fail(program, index, f"is out of order: mesh {instruction.sender} sends tag {expected} first")


def check_reductions(programs: tuple[MeshProgram, ...]) -> None:
    """The n-th AllMeshReduce is the same on every mesh."""
    joins = [[(i, join) for i, join in enumerate(p.instructions) if isinstance(join, AllMeshReduce)] for p in programs]
    for program, own in zip(programs, joins, strict=True):
        if len(own) != len(joins[0]):
            fail(program, len(program.instructions) - 1, f"ends a program of {len(own)} reductions; that of mesh 0 has {len(joins[0])}")
        for (index, join), (_, first) in zip(own, joins[0], strict=True):
            if join != first:
                fail(program, index, f"differs from that of mesh 0: {instruction_line(first)}")


def check_progress(programs: tuple[MeshProgram, ...]) -> None:
    """Run all programs until nobody can go on; everybody must be at the end."""
    places = [[index for index, meet in enumerate(program.instructions) if isinstance(meet, Meeting)] for program in programs]
    done, sent, waiting, joined = [0] * len(programs), set[int](), dict[int, int](), list[int]()
    ready = deque(range(len(programs)))
    while ready:
        mesh = ready.popleft()
        while done[mesh] < len(places[mesh]):
            meeting = programs[mesh].instructions[places[mesh][done[mesh]]]
            if isinstance(meeting, AllMeshReduce):
                joined.append(mesh)
                break
            if isinstance(meeting, Recv) and meeting.tag not in sent:
                waiting[meeting.tag] = mesh
                break
            if isinstance(meeting, Send):
                sent.add(meeting.tag)
                ready.extend(waiting.pop(tag) for tag in (meeting.tag,) if tag in waiting)
            done[mesh] += 1
        if len(joined) == len(programs):
            done = [count + 1 for count in done]
            ready.extend(joined)
            joined.clear()
    fail_stuck(programs, [(mesh, places[mesh][count]) for mesh, count in enumerate(done) if count < len(places[mesh])])


def fail_stuck(programs: tuple[MeshProgram, ...], stuck: list[tuple[int, int]]) -> None:
    """Raise a ProgramError that shows where each (mesh, instruction index) waits; return if there is none."""
    if stuck:
        places = "\n".join(f"mesh {mesh} waits at instruction {index}:\n{neighbourhood(programs[mesh], index)}" for mesh, index in stuck)
        raise ProgramError(f"deadlock: {len(stuck)} of {len(programs)} meshes wait for ever\n{places}")


def fail(program: MeshProgram, index: int, reason: str) -> NoReturn:
    """Raise the ProgramError of one instruction, shown with its neighbours."""
    line = instruction_line(program.instructions[index])
    raise ProgramError(f"mesh {program.mesh}, instruction {index} ({line}) {reason}\n{neighbourhood(program, index)}")


def neighbourhood(program: MeshProgram, index: int) -> str:
    """The instruction and its neighbours, one a line, the instruction marked."""
    first = max(index - NEIGHBOURS, 0)
    shown = enumerate(program.instructions[first : index + NEIGHBOURS + 1], first)
    return "\n".join(f"{'>' if place == index else ' '} {place:6d}  {instruction_line(instruction)}" for place, instruction in shown)


def missing(buffers: Iterable[Buffer], exist: set[Buffer]) -> str:
    """The buffers that do not exist, as text."""
    return buffers_text(buffer for buffer in buffers if buffer not in exist)


def buffers_text(buffers: Iterable[Buffer]) -> str:
    """Buffers in order, separated by commas."""
    return ", ".join(map(buffer_text, sorted(buffers)))
