"""Does code for GPUs do what a plan says? Stages on 8 described H100s, compiled without a GPU: `python benchmarks/gpu_hlo.py [MODEL ...]`.

Prints, for each program of each stage, bytes a device of every collective by kind and group, planned and compiled, and the peak memory,
planned and as XLA reports it; then the worst ratios. Needs the wheels of jax's CUDA plugin: pip install '.[gpu-check]'. Exit status 1
where bytes of a kind and group differ by more than 5 %, peak memory by more than 10 %, or XLA's compiler fails. `gpu_hlo_outside.py`
asks the same of models of other libraries.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import jax

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.config import compose_experiment
from alpa_hpc.errors import ConfigError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.parts import prepared
from alpa_hpc.runtime.alone import tasks_alone
from alpa_hpc.runtime.stage import Stage, describe_stage
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import LaneCheck, TaskCheck
from alpa_hpc.verify.plan import check_tasks
from alpa_hpc.verify.target import check_compiler, described_mesh

SUBMESH = Submesh(1, 8)
ON_A_NODE = (
    "mode=plan",
    "cluster=dgx_h100",
    f"cluster.num_nodes={SUBMESH.num_nodes}",
    f"cluster.devices_per_node={SUBMESH.devices_per_node}",
)
MEMORY_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Case:
    """Layers [start, stop) of an experiment on a mesh of 8, by the fastest strategies; with or without recomputation."""

    experiment: str
    start: int
    stop: int
    shape: tuple[int, int]
    remat: bool
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What it is."""
        rows, cols = self.shape
        return f"{self.experiment} layers {self.start}-{self.stop - 1} on {rows}x{cols}{', recomputed' if self.remat else ''}"


OF_FOUR = ("model.num_layers=4", "layers.num_layers=2")  # a whole model, with what its first and its last layer share
OF_64 = ("schedule.num_microbatches=64",)

CASES = (
    Case("gpt350m", 0, 2, (8, 1), remat=False, overrides=(*OF_FOUR, *OF_64)),
    Case("gpt350m", 0, 2, (4, 2), remat=False, overrides=(*OF_FOUR, *OF_64)),
    Case("gpt350m", 0, 2, (2, 4), remat=True, overrides=(*OF_FOUR, *OF_64)),
    Case("gpt1_3b", 0, 2, (4, 2), remat=False),
    Case("gpt1_3b", 1, 2, (8, 1), remat=True),
    Case("gpt1_3b", 1, 2, (2, 4), remat=False),
    Case("gpt6_7b", 3, 4, (2, 4), remat=False, overrides=("schedule.num_microbatches=256",)),
    Case("gpt6_7b", 3, 5, (4, 2), remat=True, overrides=("schedule.num_microbatches=256",)),
    Case("gpt39b", 0, 1, (2, 4), remat=True),
    Case("gpt39b", 7, 8, (8, 1), remat=True),
    Case("gpt39b", 7, 8, (2, 4), remat=False),
    Case("gpt39b", 15, 16, (2, 4), remat=True),
    Case("gpt39b", 15, 16, (4, 2), remat=False),
    Case("gpt39b", 2, 6, (2, 4), remat=True),
    Case("moe380m", 0, 4, (8, 1), remat=False, overrides=OF_64),
    Case("moe380m", 0, 4, (2, 4), remat=True, overrides=OF_64),
    Case("moe2_4b", 0, 1, (8, 1), remat=True),
    Case("moe2_4b", 3, 4, (2, 4), remat=False),
    Case("moe2_4b", 3, 4, (8, 1), remat=True),
    Case("moe2_4b", 7, 8, (4, 2), remat=True),
    Case("wresnet250m", 0, 16, (8, 1), remat=False),
    Case("wresnet1b", 0, 1, (8, 1), remat=False),
    Case("wresnet1b", 0, 2, (4, 2), remat=True),
    Case("wresnet1b", 0, 6, (8, 1), remat=False),
    Case("wresnet1b", 2, 4, (4, 2), remat=False),
    Case("wresnet1b", 2, 5, (8, 1), remat=True),
    Case("wresnet1b", 4, 6, (4, 2), remat=True),
    Case("wresnet1b", 5, 7, (2, 4), remat=False),
    Case("wresnet1b", 7, 8, (2, 4), remat=False),
    Case("wresnet1b", 10, 12, (4, 2), remat=True),
    Case("wresnet1b", 13, 14, (4, 2), remat=True),
    Case("wresnet1b", 13, 15, (4, 2), remat=True),
    Case("wresnet1b", 15, 16, (1, 8), remat=False),
    Case("llama1_1b", 0, 2, (2, 4), remat=True, overrides=OF_FOUR),
    Case("llama1_1b", 0, 2, (4, 2), remat=False, overrides=OF_FOUR),
    Case("llama1_1b", 0, 1, (8, 1), remat=True),
    Case("llama1_1b", 1, 3, (4, 2), remat=False),
    Case("llama1_1b", 5, 6, (2, 4), remat=False),
    Case("llama8b", 7, 8, (2, 4), remat=True),
    Case("llama8b", 15, 16, (4, 2), remat=True),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """Programs held against their plan, and how many XLA's compiler failed on."""

    tasks: tuple[TaskCheck, ...]
    num_failed: int

    @property
    def lanes(self) -> list[LaneCheck]:
        """Kinds and groups of all programs."""
        return [lane for task in self.tasks for lane in task.lanes]

    @property
    def peaks(self) -> list[float]:
        """Planned / compiled peak memory of each program."""
        return [task.memory.planned_peak / task.memory.compiled_peak for task in self.tasks]

    @property
    def is_as_planned(self) -> bool:
        """Whether there is nothing to complain of."""
        return (
            not self.num_failed
            and all(lane.agrees for lane in self.lanes)
            and all(abs(peak - 1) <= MEMORY_TOLERANCE for peak in self.peaks)
        )


def main(names: Sequence[str]) -> int:
    if not can_compile():
        return 2
    return finish([check(case) for case in CASES if not names or case.experiment in names])


def can_compile() -> bool:
    """Whether XLA can compile for a described GPU here; says what is missing."""
    jax.config.update("jax_platforms", "cpu")  # programs are lowered on the CPU, and compiled for a GPU that is described
    try:
        check_compiler(CheckTarget.H100)
    except ConfigError as error:
        print(error)
        return False
    return True


def finish(stages: Sequence[Checked]) -> int:
    """Print the worst ratios; the exit status."""
    whole = Checked(tuple(task for one in stages for task in one.tasks), sum(one.num_failed for one in stages))
    ratios = [ratio(lane) for lane in whole.lanes]
    if whole.tasks:
        off = sum(not lane.agrees for lane in whole.lanes)
        print(f"{len(ratios)} kinds and groups: planned / compiled bytes {min(ratios):.3f} to {max(ratios):.3f}, {off} outside 5 %")
        print(f"{len(whole.peaks)} programs: planned / compiled peak memory {min(whole.peaks):.3f} to {max(whole.peaks):.3f}")
    if whole.num_failed:
        print(f"XLA's compiler failed on {whole.num_failed} programs")
    return int(not whole.is_as_planned)


def check(case: Case) -> Checked:
    step, cluster = step_of(case.experiment, case.overrides)
    print(case.words)
    return check_stage(step, cluster, (case.start, case.stop), MeshShape(*case.shape), remat=case.remat)


def check_stage(step: LayeredStep, cluster: ClusterSpec, layers: tuple[int, int], shape: MeshShape, *, remat: bool) -> Checked:
    """Compile a stage of layers [start, stop) by its fastest strategies, hold it against its plan, and print both."""
    solver = StageSolver(step, MeshPrices(logical_mesh(cluster, SUBMESH, shape)), remat)
    stage = Stage(shape, solver.choose(*layers, MemoryPrice(0.0, 0.0)))
    tasks = {task.name: task for task in tasks_alone(step, stage)}
    io = describe_stage(step, (stage,), 0, {})
    checks, failures = check_tasks(step, stage, io, tasks, described_mesh(CheckTarget.H100, SUBMESH, shape))
    for line in (line for one in checks for line in task_lines(one)):
        print(f"  {line}")
    for one in failures:
        print(f"  {one.task:9} NOT COMPILED: XLA's compiler failed on it: {one.reason}")
    return Checked(checks, len(failures))


@cache
def step_of(experiment: str, overrides: tuple[str, ...]) -> tuple[LayeredStep, ClusterSpec]:
    config = compose_experiment(experiment, (*ON_A_NODE, *overrides))
    return prepared(config).step, config.cluster


def task_lines(one: TaskCheck) -> Iterator[str]:
    memory = one.memory
    yield (
        f"{one.task:9} peak {memory.planned_peak / 1e6:9.1f} / {memory.compiled_peak / 1e6:9.1f} MB = "
        f"{memory.planned_peak / memory.compiled_peak:.3f}; of that temporary {memory.planned_temporary / 1e6:.1f} / "
        f"{memory.compiled_temporary / 1e6:.1f}"
    )
    for lane in one.lanes:
        yield (
            f"{'':9} {lane.lane.kind.value} over axis {','.join(map(str, lane.lane.axes))} ({lane.num_devices} devices): "
            f"{lane.planned_bytes} / {lane.compiled_bytes} bytes = {ratio(lane):.3f}"
        )
    yield from (f"MISMATCH {text}" for text in one.mismatches)


def ratio(lane: LaneCheck) -> float:
    return lane.planned_bytes / lane.compiled_bytes if lane.compiled_bytes else float("inf")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
