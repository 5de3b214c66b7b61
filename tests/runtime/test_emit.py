"""Emitted programs do the iteration they describe, under any interleaving: an interpreter follows who added what to which buffer."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.runtime.instructions import ITERATION, AllMeshReduce, Buffer, Feed, Free, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.listing import instruction_line, program_hash
from alpa_hpc.runtime.pipeline import PipelineIO
from alpa_hpc.runtime.routes import ReceiveLayout
from alpa_hpc.runtime.schedule import AbstractSchedule, OneFOneB
from alpa_hpc.runtime.transfer import plan_transfer, receive_layout
from tests.pipelines import chain, emit_programs, keep_layout, pipelines, schedules, split_first_dim

Content = Counter[object]  # the summands a buffer consists of
receive_layouts: st.SearchStrategy[ReceiveLayout] = st.sampled_from([keep_layout, split_first_dim, receive_layout])


@dataclass
class Cluster:
    """All meshes of one iteration: their buffers, their place in the program, and messages under way in each direction of each pair."""

    pipeline: PipelineIO
    programs: tuple[MeshProgram, ...]
    buffers: list[dict[Buffer, Content]] = field(init=False)
    position: list[int] = field(init=False)
    links: dict[tuple[int, int], deque[tuple[int, Content]]] = field(default_factory=dict[tuple[int, int], deque[tuple[int, Content]]])

    def __post_init__(self):
        self.buffers = [{buffer: Content([(buffer.name, "old")]) for buffer in program.resident} for program in self.programs]
        self.position = [0] * len(self.programs)

    def run(self, rng: random.Random) -> None:
        """Advance random meshes by one instruction each until all are done; a state in which none can go on fails."""
        while any(place < len(p.instructions) for place, p in zip(self.position, self.programs, strict=True)):
            movable = [mesh for mesh in range(len(self.programs)) if self.can_go_on(mesh)]
            assert movable or self.join(), f"stuck at {self.position}"
            if movable:
                mesh = rng.choice(movable)
                self.step(mesh)
                self.position[mesh] += 1

    def can_go_on(self, mesh: int) -> bool:
        """Whether the next instruction exists and does not wait."""
        if self.position[mesh] == len(self.programs[mesh].instructions):
            return False
        match self.programs[mesh].instructions[self.position[mesh]]:
            case Recv(sender=sender):
                return bool(self.links.get((sender, mesh)))
            case AllMeshReduce():
                return False
            case _:
                return True

    def join(self) -> bool:
        """Do the reduction at which all meshes stand."""
        heads = [p.instructions[place : place + 1] for place, p in zip(self.position, self.programs, strict=True)]
        joins = [one for head in heads for one in head if isinstance(one, AllMeshReduce)]
        if len(joins) < len(self.programs):
            return False
        for index in range(len(joins[0].outputs)):
            total = Content()
            for buffers, join in zip(self.buffers, joins, strict=True):
                total += buffers[join.inputs[index]]
            for buffers, join in zip(self.buffers, joins, strict=True):
                buffers[join.outputs[index]] = total
        self.position = [place + 1 for place in self.position]
        return True

    def step(self, mesh: int) -> None:
        """Do one instruction."""
        buffers = self.buffers[mesh]
        match self.programs[mesh].instructions[self.position[mesh]]:
            case Feed(buffer, batch_input):
                self.make(mesh, buffer, Content([("batch", batch_input, buffer.microbatch)]))
            case Send(buffer, _, _, to, tag):
                self.links.setdefault((mesh, to), deque()).append((tag, buffers[buffer]))
            case Recv(buffer, _, _, sender, tag):
                arrived_tag, content = self.links[sender, mesh].popleft()
                assert arrived_tag == tag, "messages arrive in the order in which they were sent"
                self.make(mesh, buffer, content)
            case Free(buffer):
                del buffers[buffer]
            case Run() as run:
                inputs = [buffers[buffer] for buffer in run.inputs]
                for buffer in run.donated:
                    del buffers[buffer]
                outputs = self.task(mesh, run, inputs)
                for buffer, content in zip(run.outputs, outputs, strict=True):
                    self.make(mesh, buffer, content)
            case AllMeshReduce():
                raise AssertionError("joined elsewhere")

    def make(self, mesh: int, buffer: Buffer, content: Content) -> None:
        """Define a buffer that does not exist."""
        assert buffer not in self.buffers[mesh]
        self.buffers[mesh][buffer] = content

    def task(self, mesh: int, run: Run, inputs: list[Content]) -> list[Content]:
        """What a task makes; asserts that it reads what the contract says."""
        stage, kind = self.pipeline.stages[mesh], run.task.split(":")[0]
        given_ = dict(zip(run.inputs, inputs, strict=True))
        match kind:
            case "zeros":
                assert run.outputs == numbered("gradient", stage.gradients) + numbered("extra", range(self.pipeline.num_loss_outputs))
                return [Content()] * len(run.outputs)
            case "gather":
                return inputs
            case "sum" | "reduce" | "merge":
                return [sum(inputs, Content())]
            case "partials":
                self.check_reads_all(mesh, given_)
                number = int(run.task.partition(":")[2] or 0)
                first = sum(map(len, self.pipeline.rounds[:number]))
                self.check_reduced(given_, first)
                gradients = () if number else numbered("gradient", stage.owned)
                scalars = numbered("scalar", range(first, first + len(self.pipeline.rounds[number])))
                assert (run.outputs, run.donated) == (gradients + scalars, gradients)
                return [given_[gradient] for gradient in gradients] + [Content([("scalar", mesh)])] * len(scalars)
            case "update":
                self.check_reads_all(mesh, given_)
                self.check_reduced(given_, self.pipeline.num_reductions)
                return [Content([(buffer.name, "new")]) for buffer in run.outputs]
            case _:
                return self.pass_of_microbatch(mesh, run, given_)

    def check_reduced(self, given_: dict[Buffer, Content], count: int) -> None:
        """The first `count` reductions have the scalars of all meshes."""
        for index in range(count):
            assert given_[Buffer(f"reduced.{index}")] == Content(("scalar", other) for other in range(len(self.programs)))

    def check_reads_all(self, mesh: int, given_: dict[Buffer, Content]) -> None:
        """Gradients have the summands of all stages and microbatches, losses those of the stages that make them."""
        stages, microbatches = self.pipeline.stages, range(self.pipeline.num_microbatches)
        for param in stages[mesh].owned:
            adding = [index for index, stage in enumerate(stages) if param in stage.gradients]
            assert given_[Buffer(f"gradient.{param}")] == Content(("gradient", index, m) for index in adding for m in microbatches)
        for loss in range(self.pipeline.num_loss_outputs):
            making = [index for index, stage in enumerate(stages) if loss in stage.loss_outputs]
            assert given_[Buffer(f"total.{loss}")] == Content(("loss", index, m) for index in making for m in microbatches)
        replicas = self.pipeline.replicas_on(mesh)
        state = [Buffer(f"state.{leaf}") for leaf in stages[mesh].leaves if leaf not in replicas]
        assert [buffer for buffer in given_ if buffer.name.startswith("state")] == state

    def pass_of_microbatch(self, mesh: int, run: Run, given_: dict[Buffer, Content]) -> list[Content]:
        """A forward or a backward."""
        stage = self.pipeline.stages[mesh]
        m = self.microbatch(mesh, run.task)
        common = numbered("state", stage.params) + numbered("batch", stage.batch, m) + numbered("value", stage.inputs, m)
        residuals = numbered("residual", range(stage.num_residuals), m)
        extras, gradients = numbered("extra", stage.loss_outputs), numbered("gradient", stage.gradients)
        for value in stage.inputs:
            assert given_[Buffer(f"value.{value}", m)] == Content([("value", value, m)])
        for param in stage.params:
            assert given_[Buffer(f"state.{param}")] == Content([(f"state.{param}", "old")])
        if run.task == "forward":
            assert (run.inputs, run.donated) == (common + extras, extras)
            assert run.outputs == numbered("value", stage.outputs, m) + residuals + extras
            made = [Content([("value", value, m)]) for value in stage.outputs] + [Content([("residual", m)])] * len(residuals)
            return made + [given_[extra] + Content([("loss", mesh, m)]) for extra in extras]
        assert run.task == "backward"
        assert (run.inputs, run.donated) == (common + residuals + numbered("cotangent", stage.cotangent_outputs, m) + gradients, gradients)
        assert run.outputs == numbered("cotangent", stage.cotangent_inputs, m) + gradients
        assert all(given_[residual] == Content([("residual", m)]) for residual in residuals)
        for value in stage.cotangent_outputs:
            makers = [index for index, other in enumerate(self.pipeline.stages) if value in other.cotangent_inputs]
            assert given_[Buffer(f"cotangent.{value}", m)] == Content(("cotangent", value, maker, m) for maker in makers)
        made = [Content([("cotangent", value, mesh, m)]) for value in stage.cotangent_inputs]
        return made + [given_[gradient] + Content([("gradient", mesh, m)]) for gradient in gradients]

    def microbatch(self, mesh: int, task: str) -> int:
        """How often the mesh has run the task: microbatches go in order in each direction."""
        done = self.programs[mesh].instructions[: self.position[mesh]]
        return sum(isinstance(instruction, Run) and instruction.task == task for instruction in done)


def numbered(name: str, numbers: tuple[int, ...] | range, microbatch: int = ITERATION) -> tuple[Buffer, ...]:
    """Buffers of a kind."""
    return tuple(Buffer(f"{name}.{number}", microbatch) for number in numbers)


@settings(max_examples=120, deadline=None)
@given(pipelines(max_microbatches=6), schedules, receive_layouts, st.integers())
def test_programs_do_one_iteration_under_any_interleaving(
    pipeline: PipelineIO, schedule: AbstractSchedule, receive: ReceiveLayout, seed: int
):
    programs = emit_programs(pipeline, schedule, receive)
    cluster = Cluster(pipeline, programs)
    cluster.run(random.Random(seed))
    assert not any(cluster.links.values()), "a message was never received"
    for program, buffers in zip(programs, cluster.buffers, strict=True):
        assert buffers == {buffer: Content([(buffer.name, "new")]) for buffer in (*program.resident, *program.results)}


@settings(max_examples=60, deadline=None)
@given(pipelines(max_microbatches=4), schedules, receive_layouts)
def test_sends_follow_and_receives_precede_their_runs(pipeline: PipelineIO, schedule: AbstractSchedule, receive: ReceiveLayout):
    for program in emit_programs(pipeline, schedule, receive):
        made_by_last_run: set[Buffer] = set()
        received: set[Buffer] = set()
        for instruction in program.instructions:
            match instruction:
                case Run(_, inputs, outputs):
                    received -= set(inputs)
                    made_by_last_run = set(outputs)
                case Send(buffer):
                    assert buffer in made_by_last_run
                    assert not received
                case Recv(buffer):
                    received.add(buffer)
                case Feed() | Free() | AllMeshReduce():
                    pass
        assert received <= set(program.resident)


@settings(max_examples=50, deadline=None)
@given(pipelines(max_microbatches=2), schedules)
def test_every_message_has_a_transfer(pipeline: PipelineIO, schedule: AbstractSchedule):
    for program in emit_programs(pipeline, schedule, receive_layout):
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                assert plan_transfer(instruction.source, instruction.target)


@settings(max_examples=30, deadline=None)
@given(pipelines(), schedules, receive_layouts)
def test_emission_is_deterministic(pipeline: PipelineIO, schedule: AbstractSchedule, receive: ReceiveLayout):
    programs = emit_programs(pipeline, schedule, receive)
    assert programs == emit_programs(pipeline, schedule, receive)
    assert program_hash(programs) == program_hash(emit_programs(pipeline, schedule, receive))


def test_the_first_of_two_meshes_reads_like_this():
    program = emit_programs(chain(num_stages=2, num_microbatches=1, num_residuals=1), OneFOneB(), split_first_dim)[0]
    assert [instruction_line(instruction) for instruction in program.instructions] == [
        "run zeros [] -> [gradient.0 extra.0] donating []",
        "feed batch.0@0 <- input 0",
        "run forward [state.0 batch.0@0] -> [value.0@0 residual.0@0] donating []",
        "send value.0@0 -> mesh 1 tag 0: float32(16, 16) [R,R] on 1x2 -> float32(16, 16) [S01,R] on 1x2",
        "free value.0@0",
        "recv cotangent.0.tile@0 <- mesh 1 tag 1: float32(16, 16) [R,R] on 1x2 -> float32(16, 16) [S01,R] on 1x2",
        "run gather:cotangent.0 [cotangent.0.tile@0] -> [cotangent.0@0] donating []",
        "free cotangent.0.tile@0",
        "run backward [state.0 batch.0@0 residual.0@0 cotangent.0@0 gradient.0] -> [gradient.0] donating [gradient.0]",
        "free batch.0@0",
        "free residual.0@0",
        "free cotangent.0@0",
        "reduce [extra.0] -> [total.0] by sum",
        "free extra.0",
        "run partials [gradient.0 state.0 state.2 total.0] -> [gradient.0 scalar.0] donating [gradient.0]",
        "reduce [scalar.0] -> [reduced.0] by sum",
        "free scalar.0",
        "run update [gradient.0 state.0 state.2 total.0 reduced.0] -> [state.0 state.2 metric.0] donating [gradient.0 state.0 state.2]",
        "free total.0",
        "free reduced.0",
    ]
