"""Emitted programs pass the check; programs that were broken in any of many ways do not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.check import check_memory, check_programs, peak_bytes
from alpa_hpc.runtime.emit import emit_outlines
from alpa_hpc.runtime.instructions import AllMeshReduce, Buffer, Free, Instruction, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.listing import program_hash
from alpa_hpc.runtime.outline import ProgramOutline
from alpa_hpc.runtime.pipeline import PipelineIO, shortened
from alpa_hpc.runtime.schedule import AbstractSchedule, GPipe, OneFOneB
from tests.pipelines import chain, emit_programs, keep_layout, pipelines, schedules, split_first_dim, tied_chain

Programs = tuple[MeshProgram, ...]


def with_instructions(programs: Programs, mesh: int, instructions: list[Instruction]) -> Programs:
    """The programs, one of them with other instructions."""
    changed = replace(programs[mesh], instructions=tuple(instructions))
    return (*programs[:mesh], changed, *programs[mesh + 1 :])


def place_of(programs: Programs, mesh: int, kind: type[Instruction]) -> int:
    """Index of the first instruction of a class."""
    return next(index for index, instruction in enumerate(programs[mesh].instructions) if isinstance(instruction, kind))


@settings(max_examples=100, deadline=None)
@given(pipelines(), schedules, st.booleans())
def test_emitted_programs_pass(pipeline: PipelineIO, schedule: AbstractSchedule, split: bool):
    programs = emit_programs(pipeline, schedule, split_first_dim if split else keep_layout)
    assert check_programs(programs, schedule) is programs


def verdict(outlines: Sequence[ProgramOutline], schedule: AbstractSchedule) -> bool:
    """Whether the programs pass."""
    try:
        check_programs(tuple(outline.written_out() for outline in outlines), schedule)
    except ProgramError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(pipelines(), schedules, st.integers(0, 5), st.data())
def test_a_short_program_is_refused_where_the_whole_one_is(
    pipeline: PipelineIO, schedule: AbstractSchedule, more: int, data: st.DataObject
):
    whole = replace(pipeline, num_microbatches=4 * len(pipeline.stages) + 2 + more)
    mesh = data.draw(st.integers(0, len(pipeline.stages) - 1))
    part = data.draw(st.sampled_from(("first", "forward", "backward", "last")))
    gone, moved = data.draw(st.integers(0, 50)), data.draw(st.none() | st.integers(0, 50))

    def broken(one: PipelineIO) -> tuple[ProgramOutline, ...]:
        """The outlines, an instruction taken out of one (and put in at another place)."""
        outlines = emit_outlines(one, schedule, split_first_dim)
        instructions: list[Instruction] = list(getattr(outlines[mesh], part))
        if instructions:
            taken = instructions.pop(gone % len(instructions))
            if moved is not None:
                instructions.insert(moved % (len(instructions) + 1), taken)
        changed = replace(outlines[mesh], **{part: tuple(instructions)})
        return (*outlines[:mesh], changed, *outlines[mesh + 1 :])

    short = shortened(whole)
    assert short.num_microbatches < whole.num_microbatches
    assert verdict(broken(short), schedule) == verdict(broken(whole), schedule)


@settings(max_examples=120, deadline=None)
@given(pipelines(max_microbatches=3), schedules, st.data())
def test_no_instruction_can_be_missing(pipeline: PipelineIO, schedule: AbstractSchedule, data: st.DataObject):
    programs = emit_programs(pipeline, schedule, split_first_dim)
    mesh = data.draw(st.integers(0, len(programs) - 1))
    instructions = list(programs[mesh].instructions)
    del instructions[data.draw(st.integers(0, len(instructions) - 1))]
    broken = with_instructions(programs, mesh, instructions)
    with pytest.raises(ProgramError):
        check_programs(broken, schedule)
    assert program_hash(broken) != program_hash(programs)


@settings(max_examples=120, deadline=None)
@given(pipelines(max_microbatches=3), schedules, st.data())
def test_no_instruction_can_be_doubled(pipeline: PipelineIO, schedule: AbstractSchedule, data: st.DataObject):
    programs = emit_programs(pipeline, schedule, split_first_dim)
    mesh = data.draw(st.integers(0, len(programs) - 1))
    instructions = list(programs[mesh].instructions)
    index = data.draw(st.integers(0, len(instructions) - 1))
    instructions.insert(index, instructions[index])
    with pytest.raises(ProgramError):
        check_programs(with_instructions(programs, mesh, instructions), schedule)


def test_a_partial_gradient_is_merged_once():
    programs = check_programs(emit_programs(tied_chain(3, 2), OneFOneB(), keep_layout), OneFOneB())
    instructions = list(programs[0].instructions)
    index = next(index for index, one in enumerate(instructions) if isinstance(one, Run) and one.task == "merge:0")
    twice = [*instructions[:index], instructions[index], *instructions[index:]]
    with pytest.raises(ProgramError, match=r"run merge:0 .* runs a second time"):
        check_programs(with_instructions(programs, 0, twice), OneFOneB())
    never = [*instructions[:index], *instructions[index + 1 :]]
    with pytest.raises(ProgramError, match=r"frees partial.0.2, which nothing has read"):
        check_programs(with_instructions(programs, 0, never), OneFOneB())


@settings(max_examples=50, deadline=None)
@given(pipelines(max_microbatches=4), schedules, st.data())
def test_two_receives_from_one_mesh_cannot_change_places(pipeline: PipelineIO, schedule: AbstractSchedule, data: st.DataObject):
    programs = emit_programs(pipeline, schedule, keep_layout)
    pairs = [
        (mesh, first, second)
        for mesh, program in enumerate(programs)
        for first, one in enumerate(program.instructions)
        for second, other in enumerate(program.instructions[:first])
        if isinstance(one, Recv) and isinstance(other, Recv) and one.sender == other.sender
    ]
    assume(pairs != [])
    mesh, first, second = data.draw(st.sampled_from(pairs))
    instructions = list(programs[mesh].instructions)
    instructions[first], instructions[second] = instructions[second], instructions[first]
    with pytest.raises(ProgramError):
        check_programs(with_instructions(programs, mesh, instructions), schedule)


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16])
def test_no_mesh_can_wait_for_a_cotangent_before_it_sends_the_value(num_stages: int, num_microbatches: int):
    programs = emit_programs(chain(num_stages, num_microbatches), OneFOneB(), keep_layout)
    check_programs(programs, OneFOneB())
    for mesh in range(num_stages - 1):
        instructions = list(programs[mesh].instructions)
        cotangent = next(one for one in instructions if isinstance(one, Recv) and one.sender == mesh + 1)
        instructions.remove(cotangent)
        instructions.insert(place_of(programs, mesh, Send), cotangent)
        with pytest.raises(ProgramError, match="deadlock: .* wait for ever"):
            check_programs(with_instructions(programs, mesh, instructions), OneFOneB())


def test_a_mesh_cannot_join_before_it_sends():
    programs = emit_programs(chain(2, 1), OneFOneB(), keep_layout)
    instructions = list(programs[1].instructions)
    index = place_of(programs, 1, Send)
    send, free = instructions[index : index + 2]
    del instructions[index : index + 2]
    join = next(place for place, one in enumerate(instructions) if isinstance(one, AllMeshReduce))
    instructions[join + 1 : join + 1] = [send, free]
    with pytest.raises(ProgramError, match=r"deadlock: 2 of 2 meshes(.|\n)*> +\d+  recv cotangent(.|\n)*> +\d+  reduce"):
        check_programs(with_instructions(programs, 1, instructions), OneFOneB())


def test_reductions_are_the_same_on_all_meshes():
    programs = emit_programs(chain(3, 2), OneFOneB(), keep_layout)
    join = programs[1].instructions[place_of(programs, 1, AllMeshReduce)]
    assert isinstance(join, AllMeshReduce)
    instructions: list[Instruction] = [replace(join, kinds=()) if one == join else one for one in programs[1].instructions]
    with pytest.raises(ProgramError, match="differs from that of mesh 0"):
        check_programs(with_instructions(programs, 1, instructions), OneFOneB())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda receive: replace(receive, target=replace(receive.target, shape=(4, 4))), "other layouts"),
        (lambda receive: replace(receive, sender=2), "other meshes"),
        (lambda receive: replace(receive, tag=10**6), "has no Recv"),
    ],
)
def test_a_receive_fits_its_send(change: Callable[[Instruction], Instruction], reason: str):
    programs = emit_programs(chain(3, 2), OneFOneB(), keep_layout)
    index = place_of(programs, 1, Recv)
    instructions = list(programs[1].instructions)
    instructions[index] = change(instructions[index])
    with pytest.raises(ProgramError, match=reason):
        check_programs(with_instructions(programs, 1, instructions), OneFOneB())


def test_a_value_cannot_arrive_under_another_name():
    programs = emit_programs(chain(2, 1), OneFOneB(), keep_layout)
    renamed = {Buffer("value.0", 0): Buffer("value.7", 0)}
    instructions: list[Instruction] = []
    for one in programs[1].instructions:
        match one:
            case Recv(buffer) | Free(buffer):
                instructions.append(replace(one, buffer=renamed.get(buffer, buffer)))
            case Run(inputs=inputs):
                instructions.append(replace(one, inputs=tuple(renamed.get(buffer, buffer) for buffer in inputs)))
            case _:
                instructions.append(one)
    with pytest.raises(ProgramError, match="another array"):
        check_programs(with_instructions(programs, 1, instructions), OneFOneB())


def test_too_many_microbatches_in_flight():
    programs = emit_programs(chain(3, 4), GPipe(), keep_layout)
    with pytest.raises(ProgramError, match="microbatches in flight to 4, expected 0 to 3 with OneFOneB"):
        check_programs(programs, OneFOneB())


def test_an_error_shows_mesh_index_and_neighbours():
    programs = emit_programs(chain(2, 1), OneFOneB(), keep_layout)
    index = place_of(programs, 0, Free)
    instructions = list(programs[0].instructions)
    instructions.insert(index, instructions[index])
    with pytest.raises(ProgramError) as error:
        check_programs(with_instructions(programs, 0, instructions), OneFOneB())
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"mesh 0, instruction {index + 1} (free value.0@0) frees value.0@0, which does not exist here")
    assert lines[1:][index + 1].startswith(f"> {index + 1:6d}  free value.0@0")
    assert len(lines) == 1 + (index + 1) + 1 + 5


def test_peak_bytes_by_hand():
    first, second, state = Buffer("first"), Buffer("second"), Buffer("state")
    program = MeshProgram(
        mesh=0,
        instructions=(
            Run("make", (), (first,)),  # 100 + 10
            Run("grow", (first, state), (second, state), (state,)),  # 100 + 10 + 1000: the state is replaced in place
            Free(first),
            Free(second),
        ),
        resident=(state,),
        results=(),
    )
    sizes = {"state": 100, "first": 10, "second": 1000}
    assert peak_bytes(program, sizes) == 1110
    assert check_memory(program, sizes, 1110) is program
    with pytest.raises(ProgramError, match="mesh 0 holds up to 1110 bytes"):
        check_memory(program, sizes, 1109)


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()])
def test_peak_bytes_follow_the_schedule(schedule: AbstractSchedule):
    num_stages, num_microbatches = 4, 8
    programs = emit_programs(chain(num_stages, num_microbatches, num_residuals=3), schedule, keep_layout)
    names = {buffer.name for program in programs for one in program.instructions for buffer in buffers_of(one)}
    sizes = {name: 1 if name.startswith("residual") else 0 for name in names}
    for program in programs:
        assert peak_bytes(program, sizes) == 3 * schedule.max_in_flight(program.mesh, num_stages, num_microbatches)


def buffers_of(instruction: Instruction) -> tuple[Buffer, ...]:
    """All buffers an instruction names."""
    match instruction:
        case Run(inputs=inputs, outputs=outputs) | AllMeshReduce(inputs=inputs, outputs=outputs):
            return inputs + outputs
        case _:
            return (instruction.buffer,)
