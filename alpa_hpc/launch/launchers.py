"""Who runs the jobs of a run: this process itself, or processes of this machine through submitit's local executor."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.executor import run_job, run_tasks, slurm_script
from alpa_hpc.launch.mpirun import Place, check_can_launch
from alpa_hpc.launch.options import LauncherOptions
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.profiling import MAX_PARALLEL
from alpa_hpc.training.metrics import read_metrics, show_progress

DAY_SECONDS = 86400.0


class Launcher(Protocol):
    """Runs the three kinds of job on a run folder, each to its end."""

    def check(self, num_devices: int) -> None:
        """Refuse, before a run folder is made, what cannot start."""
        ...

    def plan(self, paths: RunPaths) -> None:
        """Run the planning job."""
        ...

    def profile(self, paths: RunPaths, tasks: Sequence[int]) -> None:
        """Run profiling tasks."""
        ...

    def train(self, paths: RunPaths, num_steps: int) -> None:
        """Run the training job."""
        ...

    def scripts(self, paths: RunPaths, num_nodes: int, devices_per_node: int) -> str:
        """The batch scripts that would be submitted."""
        ...


@dataclass(frozen=True, slots=True)
class InProcessLauncher:
    """Everything in this process; `plan_run`, `profile_task` and `train_all` are what the job scripts would call."""

    plan_run: Callable[[RunPaths], None]
    profile_task: Callable[[RunPaths, int], None]
    train_all: Callable[[RunPaths], None]

    def check(self, num_devices: int) -> None:
        """See Launcher."""
        assert num_devices >= 1, "a cluster has devices"

    def plan(self, paths: RunPaths) -> None:
        """See Launcher."""
        self.plan_run(paths)

    def profile(self, paths: RunPaths, tasks: Sequence[int]) -> None:
        """See Launcher."""
        for task in tasks:
            self.profile_task(paths, task)

    def train(self, paths: RunPaths, num_steps: int) -> None:
        """See Launcher."""
        del num_steps
        self.train_all(paths)

    def scripts(self, paths: RunPaths, num_nodes: int, devices_per_node: int) -> str:
        """See Launcher."""
        raise LaunchError("launcher=inprocess submits no jobs, so there are no scripts to show: use launcher=slurm")


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Jobs are processes of this machine; training is one MPI rank a device."""

    def check(self, num_devices: int) -> None:
        """See Launcher."""
        check_can_launch(num_devices, Place.THIS_MACHINE, os.environ)

    def plan(self, paths: RunPaths) -> None:
        """See Launcher."""
        run_job(JobKind.PLAN, paths, timeout_seconds=DAY_SECONDS)

    def profile(self, paths: RunPaths, tasks: Sequence[int]) -> None:
        """See Launcher."""
        run_tasks(JobKind.PROFILE, paths, tasks, max_parallel=MAX_PARALLEL, timeout_seconds=DAY_SECONDS)

    def train(self, paths: RunPaths, num_steps: int) -> None:
        """See Launcher."""
        shown = 0
        with show_progress("training", num_steps, sys.stderr) as display:

            def watch() -> None:
                nonlocal shown
                for figures in read_metrics(paths.metrics)[shown:]:
                    shown += 1
                    display.advance(shown, {name: value for name, value in figures.items() if name != "step"})

            run_job(JobKind.TRAIN, paths, timeout_seconds=DAY_SECONDS, watch=watch)
            watch()

    def scripts(self, paths: RunPaths, num_nodes: int, devices_per_node: int) -> str:
        """See Launcher."""
        raise LaunchError("launcher=local starts processes, not batch scripts: use launcher=slurm to see scripts")


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Shows the batch scripts of a run; submitting them is not built yet, and says so."""

    options: LauncherOptions

    def check(self, num_devices: int) -> None:
        """See Launcher."""
        raise LaunchError(_NOT_BUILT)

    def plan(self, paths: RunPaths) -> None:
        """See Launcher."""
        raise LaunchError(_NOT_BUILT)

    def profile(self, paths: RunPaths, tasks: Sequence[int]) -> None:
        """See Launcher."""
        raise LaunchError(_NOT_BUILT)

    def train(self, paths: RunPaths, num_steps: int) -> None:
        """See Launcher."""
        raise LaunchError(_NOT_BUILT)

    def scripts(self, paths: RunPaths, num_nodes: int, devices_per_node: int) -> str:
        """See Launcher."""
        plan = slurm_script(JobKind.PLAN, paths, self.options.slurm, 1, 1)
        train = slurm_script(JobKind.TRAIN, paths, self.options.slurm, num_nodes, devices_per_node)
        return f"# ---- planning job\n{plan}\n# ---- training job\n{train}"


_NOT_BUILT = (
    "launcher=slurm can show its scripts (mode=dry_run) and plan here (mode=plan with profiling=analytic), but does not submit jobs yet. "
    "Run by hand what mode=dry_run prints, or use launcher=local."
)
