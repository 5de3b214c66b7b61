"""Simulated iterations take what closed forms say, and no less than their longest part."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.runtime.check import peak_bytes
from alpa_hpc.runtime.emit import emit_outlines
from alpa_hpc.runtime.instructions import AllMeshReduce, Instruction, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.pipeline import PipelineIO
from alpa_hpc.runtime.schedule import AbstractSchedule, GPipe, OneFOneB
from alpa_hpc.simulate.costs import SimulationCosts
from alpa_hpc.simulate.simulate import simulate
from alpa_hpc.simulate.timeline import Timeline
from tests.pipelines import chain, emit_programs, keep_layout, pipelines, schedules, split_first_dim

SendSeconds = Callable[[int, int, Send], float]


def no_send_seconds(mesh: int, to: int, send: Send) -> float:
    """Messages arrive at once."""
    del mesh, to, send
    return 0.0


def costs_of(
    num_meshes: int, tasks: Mapping[str, float], send_seconds: SendSeconds = no_send_seconds, reduce: float = 0.0
) -> SimulationCosts:
    """The same seconds of tasks on all meshes (0 where not given); a buffer is as large as its name is long."""
    sizes, workspace = SizeOfName(), defaultdict[str, int](int)
    return SimulationCosts(
        (defaultdict(float, tasks),) * num_meshes, (sizes,) * num_meshes, (workspace,) * num_meshes, send_seconds, reduce
    )


Span = tuple[float, float]


def spans_of(programs: Sequence[MeshProgram], timeline: Timeline, mesh: int, kind: type[Instruction], task: str = "") -> list[Span]:
    """When the instructions of a kind (the Runs of a task) start and stop on a mesh, in the order of its program."""
    rows = zip(programs[mesh].instructions, timeline.meshes[mesh].starts.tolist(), timeline.meshes[mesh].stops.tolist(), strict=True)
    return [
        (start, stop) for one, start, stop in rows if isinstance(one, kind) and (not task or (isinstance(one, Run) and one.task == task))
    ]


class SizeOfName(dict[str, int]):
    """A size of every name."""

    def __missing__(self, name: str) -> int:
        return len(name)


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 9), st.integers(1, 9), schedules)
@settings(deadline=None)
def test_equal_stages_without_messages(num_stages: int, num_microbatches: int, forward: int, backward: int, schedule: AbstractSchedule):
    programs = emit_programs(chain(num_stages, num_microbatches), schedule, keep_layout)
    timeline = simulate(programs, costs_of(num_stages, {"forward": forward, "backward": backward}))
    assert timeline.seconds == (num_stages - 1 + num_microbatches) * (forward + backward)
    bubble = (num_stages - 1) / (num_stages - 1 + num_microbatches)
    assert timeline.bubble_fractions == pytest.approx((bubble,) * num_stages)


def test_messages_overlap_with_compute_and_fill_and_drain_the_pipe():
    num_stages, num_microbatches, forward, backward, message = 4, 8, 5, 10, 2
    tasks = {"forward": forward, "backward": backward}
    gpipe = simulate(
        emit_programs(chain(num_stages, num_microbatches), GPipe(), keep_layout), costs_of(num_stages, tasks, lambda *_: message)
    )
    assert gpipe.seconds == (num_stages - 1 + num_microbatches) * (forward + backward) + 2 * (num_stages - 1) * message


def test_one_link_carries_one_message_at_a_time():
    num_microbatches, message = 6, 7
    programs = emit_programs(chain(2, num_microbatches), GPipe(), keep_layout)
    timeline = simulate(programs, costs_of(2, {"forward": 1, "backward": 1}, lambda *_: message))
    sends = spans_of(programs, timeline, 0, Send)
    assert sends == [(1 + message * index, 1 + message * (index + 1)) for index in range(num_microbatches)]
    assert [start for start, _ in spans_of(programs, timeline, 1, Run, "forward")] == [stop for _, stop in sends]


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
def test_stages_that_read_nothing_of_each_other_run_at_the_same_time(schedule: AbstractSchedule):
    num_microbatches, forward, backward = 6, 5, 10
    plain = chain(3, num_microbatches)
    left, right, end = plain.stages  # as they are, each reads what the one before it makes
    right = replace(right, batch=(0,), inputs=(), cotangent_inputs=())
    both = {value: end.value_layouts[1] for value in (0, 1)}
    end = replace(end, inputs=(0, 1), cotangent_inputs=(0, 1), value_layouts=both, cotangent_layouts=both)
    towers = replace(plain, stages=(left, right, end))
    costs = costs_of(3, {"forward": forward, "backward": backward})
    programs = emit_programs(towers, schedule, keep_layout)
    timeline = simulate(programs, costs)
    assert [spans_of(programs, timeline, mesh, Run, "forward")[0][0] for mesh in range(3)] == [0, 0, forward]
    assert timeline.seconds == (2 - 1 + num_microbatches) * (forward + backward), "as long as a pipeline of two stages"


def test_update_and_joins_come_last():
    programs = emit_programs(chain(3, 4), OneFOneB(), keep_layout)
    timeline = simulate(programs, costs_of(3, {"forward": 1, "backward": 2, "partials": 4, "update": 8}, reduce=16))
    assert timeline.seconds == (3 - 1 + 4) * 3 + 16 + 4 + 16 + 8
    joins = [[stop for _, stop in spans_of(programs, timeline, mesh, AllMeshReduce)] for mesh in range(3)]
    assert [len(one) for one in joins] == [2] * 3
    assert joins[0] == joins[1] == joins[2], "all meshes join at the same times"


@settings(max_examples=60, deadline=None)
@given(pipelines(max_microbatches=6), schedules, st.integers(0, 3))
def test_time_respects_order_and_messages(pipeline: PipelineIO, schedule: AbstractSchedule, message: int):
    programs = emit_programs(pipeline, schedule, split_first_dim)
    tasks = {"zeros": 1.0, "forward": 3.0, "backward": 5.0, "update": 2.0}
    costs = costs_of(len(programs), tasks, lambda *_: message, reduce=1)
    timeline = simulate(programs, costs)
    for program in programs:
        mine = timeline.meshes[program.mesh]
        own = list(zip(program.instructions, mine.starts, mine.stops, strict=True))
        spans = [(start, stop) for one, start, stop in own if not isinstance(one, Send)]
        assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False)), "a mesh does one thing at a time"
        busy = sum(stop - start for one, start, stop in own if isinstance(one, Run))
        assert busy == sum(costs.task_seconds[program.mesh][one.task] for one in program.instructions if isinstance(one, Run))
        assert timeline.bubble_fractions[program.mesh] == pytest.approx(1 - busy / timeline.seconds)
        assert timeline.peak_bytes[program.mesh] == peak_bytes(program, sizes_of(programs))
        assert mine.held_bytes.max() <= mine.peak_bytes
        assert mine.held_bytes[-1] == sum(len(buffer.name) for buffer in (*program.resident, *program.results))
    assert timeline.seconds == max(mesh.stops.max() for mesh in timeline.meshes)
    assert timeline.seconds >= pipeline.num_microbatches * 8 + 1 + 2


@settings(max_examples=60, deadline=None)
@given(pipelines(max_microbatches=6), schedules, st.integers(0, 3))
def test_an_outline_takes_what_its_programs_take(pipeline: PipelineIO, schedule: AbstractSchedule, message: int):
    outlines = emit_outlines(pipeline, schedule, split_first_dim)
    costs = costs_of(len(outlines), {"zeros": 1.0, "forward": 3.0, "backward": 5.0, "update": 2.0}, lambda *_: message, reduce=1)
    found, expected = simulate(outlines, costs), simulate([outline.written_out() for outline in outlines], costs)
    assert found.seconds == expected.seconds
    for one, other in zip(found.meshes, expected.meshes, strict=True):
        assert (one.peak_bytes, one.busy_seconds) == (other.peak_bytes, other.busy_seconds)
        for mine, its in ((one.starts, other.starts), (one.stops, other.stops), (one.held_bytes, other.held_bytes)):
            np.testing.assert_array_equal(mine, its)


def sizes_of(programs: tuple[MeshProgram, ...]) -> dict[str, int]:
    """The size of every buffer that the programs name."""
    names = {buffer.name for program in programs for buffer in program.resident}
    for program in programs:
        for one in program.instructions:
            match one:
                case Run(inputs=inputs, outputs=outputs) | AllMeshReduce(inputs=inputs, outputs=outputs):
                    names |= {buffer.name for buffer in (*inputs, *outputs)}
                case _:
                    names.add(one.buffer.name)
    return {name: len(name) for name in names}


def test_a_deadlock_is_refused():
    programs = emit_programs(chain(2, 1), OneFOneB(), keep_layout)
    silent = tuple(one for one in programs[1].instructions if not isinstance(one, Send | Recv))
    with pytest.raises(AssertionError, match="check_programs comes before simulate"):
        simulate((programs[0], MeshProgram(1, silent, programs[1].resident, programs[1].results)), costs_of(2, {}))
