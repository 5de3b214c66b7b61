"""The stages of a plan -> PlanCheck: each distinct task compiled for the target, and held against the plan, before it is trained by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.compiler import is_of_gpus
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.tasks import StageTask, compile_task
from alpa_hpc.simulate.predict import temporary_bytes
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import TaskCheck, check_task
from alpa_hpc.verify.target import described_mesh

LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """A task that XLA's compiler itself failed on, of which nothing is known; `reason` = the beginning of what it said, one line."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class StageCheck:
    """The checked tasks of one stage, and those that were not compiled; those that an earlier stage has, too, are left out."""

    stage: int
    tasks: tuple[TaskCheck, ...]
    not_compiled: tuple[NotCompiled, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A plan against the code of a target."""

    target: CheckTarget
    stages: tuple[StageCheck, ...]

    @property
    def tasks(self) -> tuple[TaskCheck, ...]:
        """All distinct tasks."""
        return tuple(task for stage in self.stages for task in stage.tasks)

    @property
    def mismatches(self) -> tuple[str, ...]:
        """What does not agree, a text each."""
        return tuple(f"stage {one.stage}, {text}" for one in self.stages for task in one.tasks for text in task.mismatches)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know, a sentence each: what does not agree, and what the compiler failed on."""
        failed = [
            not_compiled_words(self.target.value, one.stage, task.task, task.reason) for one in self.stages for task in one.not_compiled
        ]
        return (*map(mismatch_words, self.mismatches), *failed)


def mismatch_words(mismatch: str) -> str:
    """What does not agree, as a sentence."""
    return f"the compiled code is not as planned: {mismatch}"


def not_compiled_words(target: str, stage: int, task: str, reason: str) -> str:
    """What the compiler failed on, as a sentence."""
    return f"the plan stands, but stage {stage}, {task} is not checked: XLA's compiler for {target} failed on it: {reason}"


def check_plan_code(assembly: Assembly, submeshes: Sequence[Submesh], target: CheckTarget) -> PlanCheck:
    """Compile every task of every stage for `target`, once, and hold it against the plan; nothing for CheckTarget.NONE.

    A task that the compiler fails on says nothing of the plan, and is left unchecked.

    Raises:
        ConfigError: this installation cannot compile for the target.
    """
    if target is CheckTarget.NONE:
        return PlanCheck(target, ())
    seen: set[tuple[object, ...]] = set()
    checks: list[StageCheck] = []
    for index, (stage, submesh) in enumerate(zip(assembly.stages, submeshes, strict=True)):
        contents = {name: _content(stage, submesh, task) for name, task in assembly.tasks(index).items()}
        tasks = {name: task for name, task in assembly.tasks(index).items() if contents[name] not in seen}
        seen.update(contents.values())
        mesh = described_mesh(target, submesh, stage.shape)
        checks.append(StageCheck(index, *check_tasks(assembly.step, stage, assembly.pipeline.stages[index], tasks, mesh)))
    return PlanCheck(target, tuple(checks))


def check_tasks(
    step: LayeredStep, stage: Stage, io: StageIO, tasks: Mapping[str, StageTask], mesh: Mesh
) -> tuple[tuple[TaskCheck, ...], tuple[NotCompiled, ...]]:
    """Compile tasks of a stage for `mesh` and hold them against the plan: those that compile, and those that the compiler fails on."""
    temporary = temporary_bytes(stage, tasks, hiding=is_of_gpus(mesh.devices.flat))  # all that are described are from Hopper on
    checks: list[TaskCheck] = []
    failures: list[NotCompiled] = []
    for name, task in tasks.items():
        try:
            checks.append(check_task(step, stage, io, task, temporary[name], compile_task(task, mesh)))
        except JaxRuntimeError as error:
            failures.append(NotCompiled(name, _first_line(str(error))))
    return tuple(checks), tuple(failures)


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."


def _content(stage: Stage, submesh: Submesh, task: StageTask) -> tuple[object, ...]:
    """What a task's code depends on: tasks of equal content are compiled once."""
    layers = tuple(
        (chosen.problem.layer.key, chosen.problem.remat, chosen.choices, tuple(update.work.key for update in chosen.problem.updates))
        for chosen in stage.layers
    )
    return (submesh, stage.shape, layers, task.name.partition(":")[0], task.inputs, task.outputs)
