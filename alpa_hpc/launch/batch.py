"""(job kind, run folder, size, options) -> a batch script, by submitit's writer: pure, so that what is shown is what is submitted.

Python itself is the batch shell (`exec`): it hears Slurm's signals at once, and no srun stands between it and mpirun, which would hang
inside a Slurm step.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from submitit.slurm import slurm

from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.options import Flags, SlurmOptions
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.python import job_python

SIGNAL = "TERM@0"  # comes with the end of a job's time itself


@dataclass(frozen=True, slots=True)
class Allocation:
    """Whole numbers of a job's size: nodes, tasks (ranks) on each, and GPUs on each (0: the job needs none)."""

    num_nodes: int
    tasks_per_node: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job, or an array of profiling tasks `tasks` (numbers that follow each other), at most `max_parallel` of them at a time.

    `dependency` is sbatch's (such as "afterok:12"), empty where the job waits for nobody.
    """

    kind: JobKind
    allocation: Allocation
    tasks: Sequence[int] = (0,)
    max_parallel: int = 1
    dependency: str = ""

    @property
    def is_array(self) -> bool:
        """Whether the job is an array."""
        return self.kind is JobKind.PROFILE


def job_name(paths: RunPaths, job: BatchJob) -> str:
    """`train-quickstart-3f2a1b`, `profile-quickstart-3f2a1b-0003`: no other job has it, so that it can be found by it.

    The kind comes first, since squeue shows eight letters; then the run's own token, and of an array its first task.
    """
    name = f"{job.kind.value}-{paths.name}-{paths.root.name.rpartition('-')[2]}"
    return f"{name}-{job.tasks[0]:04d}" if job.is_array else name


def batch_script(job: BatchJob, paths: RunPaths, options: SlurmOptions) -> str:
    """The text for sbatch."""
    flags = sbatch_flags(job, options)
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in sorted(options.environment.items())]
    # submitit's executor writes its scripts with this function; asking it directly needs no sbatch on this machine.
    return slurm._make_sbatch_string(  # noqa: SLF001
        command=_command(job, paths),
        folder=str(paths.batch_log_folder(job.kind)).replace("%", "%%"),  # which sbatch would fill in
        job_name=job_name(paths, job),
        stderr_to_stdout=True,
        setup=[*_guarded(options.setup), *exports] or None,
        use_srun=False,
        map_count=len(job.tasks) if job.is_array else None,
        array_parallelism=job.max_parallel,
        nodes=job.allocation.num_nodes,
        ntasks_per_node=job.allocation.tasks_per_node,
        wckey=None,  # pyright: ignore[reportArgumentType] - left out: sites that check wckeys refuse submitit's
        time=None,  # pyright: ignore[reportArgumentType] - left out here: it is among our own flags, if it was asked for
        additional_parameters=flags,
    )


def _guarded(setup: Sequence[str]) -> list[str]:
    """Setup lines, the first failing one of which ends the job: a module that is not there would else be missed much later."""
    if not setup:
        return []
    say = 'echo "a line of launcher.slurm.setup failed with $code: $BASH_COMMAND" >&2'
    return [f"trap 'code=$?; {say}; exit $code' ERR", *setup, "trap - ERR"]


def sbatch_flags(job: BatchJob, options: SlurmOptions) -> dict[str, Any]:
    """Flags beside size and name; a value of True stands for a flag without one."""
    gpus = {"gpus-per-node": job.allocation.gpus_per_node}
    if options.gres:
        gpus = {"gres": options.gres if job.kind is not JobKind.PLAN else ""}
    flags: dict[str, Any] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "time": options.time_minutes,
        "mem": options.memory,
        "cpus-per-task": options.cpus_per_task,
        **gpus,
    }
    asked = {name: value for name, value in flags.items() if value not in ("", 0)}
    added = {**_flags_of_kind(job), **_named(options.additional), **_named(_own_flags(job.kind, options))}
    kept = {name: value for name, value in (asked | added).items() if value != "" and value is not False}  # --mem=0 is all memory
    return {"signal": SIGNAL, **kept}  # without one, submitit writes its own, which ends Python 90 s early


def _flags_of_kind(job: BatchJob) -> dict[str, Any]:
    """A job of ours is not to be started again by Slurm after a node failed: none of them can go on where it stopped."""
    common: dict[str, Any] = {"no-requeue": True}
    match job.kind:
        case JobKind.PLAN:
            return common
        case JobKind.PROFILE:
            return {**common, "exclusive": True}  # timings of a shared node would be its neighbours'
        case JobKind.TRAIN:
            # Without the second flag a job whose dependency has failed stays in the queue for ever.
            return {**common, **({"dependency": job.dependency, "kill-on-invalid-dep": "yes"} if job.dependency else {})}


def _own_flags(kind: JobKind, options: SlurmOptions) -> Flags:
    match kind:
        case JobKind.PLAN:
            return options.plan
        case JobKind.PROFILE:
            return options.profile
        case JobKind.TRAIN:
            return options.train


def _named(flags: Flags) -> dict[str, Any]:
    """Flags by sbatch's own spelling; YAML's true for those without a value."""
    return {name.replace("_", "-"): True if value in ("true", "True") else value for name, value in flags.items()}


def _command(job: BatchJob, paths: RunPaths) -> str:
    words = f"exec {job_python()} {shlex.quote(str(job_script(job.kind.value)))} {shlex.quote(str(paths.root))}"
    return f"{words} $(({job.tasks[0]} + SLURM_ARRAY_TASK_ID))" if job.is_array else words
