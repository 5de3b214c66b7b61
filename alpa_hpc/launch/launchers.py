"""Who runs the jobs of a run: this process itself, processes of this machine through submitit's local executor, or Slurm."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.executor import run_job, run_tasks
from alpa_hpc.launch.mpirun import Place, check_can_launch
from alpa_hpc.launch.outcome import Ended, JobOutcome
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.profiling import ProfileTask
from alpa_hpc.launch.views import is_cancelled, mark_cancelled
from alpa_hpc.launch.watching import job_output, training_progress

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class RunSize:
    """What a launcher must know of a run.

    devices:       those of the training job
    num_steps:     its steps
    max_parallel:  how many profiling tasks run at a time (0: none)
    stage_seconds: how long a profiling task may take for each of its requests
    """

    devices: Submesh
    num_steps: int
    max_parallel: int
    stage_seconds: float = DAY_SECONDS

    def task_seconds(self, tasks: Sequence[ProfileTask]) -> float:
        """How long each of these profiling tasks may take; a calibration has no requests, and a day."""
        most = max((len(task.requests) for task in tasks), default=0)
        return min(self.stage_seconds * most, DAY_SECONDS) if most else DAY_SECONDS


def refuse_cancelled(paths: RunPaths) -> None:
    """Raise LaunchError where somebody has cancelled the run since."""
    if is_cancelled(paths):
        raise LaunchError(f"the run {paths.root} was cancelled: no more jobs are started")


@contextmanager
def noting_a_stop(paths: RunPaths) -> Generator[None]:
    """Note that a person stopped the run, lest its jobs count as failed; the stop goes on its way."""
    try:
        yield
    except KeyboardInterrupt:
        mark_cancelled(paths)
        raise


class Launcher(Protocol):
    """Runs the jobs of a run, or has somebody run them."""

    @property
    def num_shares(self) -> int:
        """How many profiling tasks at most share the work that one mesh is to be timed for."""
        ...

    def check(self) -> None:
        """Refuse, before a run folder is made, what cannot start."""
        ...

    def plan(self, paths: RunPaths) -> bool:
        """Run the planning job, to its end or into a queue; whether it has ended."""
        ...

    def plan_and_train(self, paths: RunPaths) -> bool:
        """Run the planning job and then the training job, to their end or into a queue; whether they have ended."""
        ...

    def planned(self, paths: RunPaths) -> None:
        """Called by the planning job of a run that is to be trained, when the plan is there."""
        ...

    def profile(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        """Run profiling tasks, from inside the planning job; what became of each."""
        ...

    def scripts(self, paths: RunPaths) -> str:
        """The batch scripts that would be submitted."""
        ...


@dataclass(frozen=True, slots=True)
class InProcessLauncher:
    """Everything in this process; the three functions are what job scripts would do."""

    plan_here: Callable[[RunPaths], None]
    profile_here: Callable[[RunPaths, int], None]
    train_here: Callable[[RunPaths], None]

    @property
    def num_shares(self) -> int:
        """See Launcher."""
        return 1

    def check(self) -> None:
        """See Launcher."""

    def plan(self, paths: RunPaths) -> bool:
        """See Launcher."""
        self.plan_here(paths)
        return True

    def plan_and_train(self, paths: RunPaths) -> bool:
        """See Launcher."""
        self.plan(paths)
        self.train_here(paths)
        return True

    def planned(self, paths: RunPaths) -> None:
        """See Launcher."""

    def profile(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        """See Launcher."""
        for task in tasks:
            self.profile_here(paths, task.number)
        return {task.number: Ended() for task in tasks}

    def scripts(self, paths: RunPaths) -> str:
        """See Launcher."""
        raise LaunchError("launcher=inprocess submits no jobs, so there are no scripts to show: use launcher=slurm")


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Jobs are processes of this machine; training is one MPI rank a device."""

    size: RunSize

    @property
    def num_shares(self) -> int:
        """See Launcher."""
        return self.size.max_parallel

    def check(self) -> None:
        """See Launcher."""
        check_can_launch(self.size.devices.num_devices, Place.THIS_MACHINE, os.environ)

    def plan(self, paths: RunPaths) -> bool:
        """See Launcher."""
        with noting_a_stop(paths):
            run_job(JobKind.PLAN, paths, timeout_seconds=DAY_SECONDS, watch=job_output(paths, JobKind.PLAN))
        return True

    def plan_and_train(self, paths: RunPaths) -> bool:
        """See Launcher."""
        self.plan(paths)
        refuse_cancelled(paths)
        with noting_a_stop(paths), training_progress(paths, self.size.num_steps) as advance:
            run_job(JobKind.TRAIN, paths, timeout_seconds=DAY_SECONDS, watch=advance)
        return True

    def planned(self, paths: RunPaths) -> None:
        """See Launcher."""

    def profile(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        """See Launcher."""
        numbers = [task.number for task in tasks]
        seconds = self.size.task_seconds(tasks)
        return run_tasks(JobKind.PROFILE, paths, numbers, max_parallel=self.size.max_parallel, timeout_seconds=seconds)

    def scripts(self, paths: RunPaths) -> str:
        """See Launcher."""
        raise LaunchError("launcher=local starts processes, not batch scripts: use launcher=slurm to see scripts")
