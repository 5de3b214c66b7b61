"""A run -> batch jobs: the planning job, the profiling arrays that it submits, and the training job, by whoever may submit it.

The command returns when the jobs are in the queue; who follows it (`launcher.wait`) only watches, and may leave at any time.
"""

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.batch import Allocation, BatchJob, batch_script
from alpa_hpc.launch.executor import run_tasks
from alpa_hpc.launch.follow import Watch, follow_job, wait_for_tasks
from alpa_hpc.launch.launchers import RunSize, refuse_cancelled
from alpa_hpc.launch.mpirun import check_can_launch_elsewhere, refuse_root
from alpa_hpc.launch.options import Chain, LauncherOptions, SlurmOptions
from alpa_hpc.launch.outcome import JobOutcome, NotStarted
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.profiling import ProfileTask
from alpa_hpc.launch.queue import QueueState, cancel
from alpa_hpc.launch.slurm import check_sbatch, refusal_ahead, submit, with_site_defaults
from alpa_hpc.launch.submission import Submission
from alpa_hpc.launch.views import is_cancelled
from alpa_hpc.launch.watching import QueueTeller, tell_submitted, training_progress

ONE_PROCESS = Submesh(1, 1)


def both(tell: Watch, advance: Callable[[], None]) -> Watch:
    """Watches the queue and the run."""

    def watch(states: Mapping[str, QueueState]) -> None:
        tell(states)
        advance()

    return watch


@contextmanager
def cancelled_on_the_way_out(submissions: Sequence[Submission]) -> Generator[None]:
    """Cancel jobs should the block be left by an exception: nobody would wait for them."""
    try:
        yield
    except BaseException:
        cancel([one.job_id for one in submissions])
        raise


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Jobs are batch jobs. `has_gpus`: the devices are GPUs, which profiling and training ask Slurm for."""

    options: LauncherOptions
    size: RunSize
    has_gpus: bool
    max_pending_seconds: float

    @property
    def num_shares(self) -> int:
        """See Launcher: a task a request, so that all of them may run at once, and the death of one hits no other."""
        return sys.maxsize if self.options.chain is Chain.INSIDE else self.size.max_parallel

    def check(self) -> None:
        """See Launcher."""
        check_sbatch(os.environ)
        check_can_launch_elsewhere(os.environ)
        refuse_root(os.environ)  # now, not when training starts after hours in a queue

    def plan(self, paths: RunPaths) -> bool:
        """See Launcher."""
        return self._followed(paths, self._submit(paths, self._planning_job()), (JobKind.PLAN,))

    def plan_and_train(self, paths: RunPaths) -> bool:
        """See Launcher."""
        planning = self._submit(paths, self._planning_job())
        self._warn_of_training(paths)
        both = (JobKind.PLAN, JobKind.TRAIN)
        match self.options.chain:
            case Chain.INSIDE:
                return self._followed(paths, planning, both)
            case Chain.DEPENDENCY:
                training = self._submit(paths, self._training_after(planning[0].job_id))
                return self._followed(paths, (*planning, *training), both)
            case Chain.LOGIN:
                tell_submitted(paths, planning)
                self._follow(paths, JobKind.PLAN, "the planning job goes on, but with launcher.chain=login nobody will submit training now")
                return self._followed(paths, self._submit(paths, self._training_job()), (JobKind.TRAIN,))

    def planned(self, paths: RunPaths) -> None:
        """See Launcher."""
        if self.options.chain is Chain.INSIDE:
            self._submit(paths, self._training_job())

    def profile(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> Mapping[int, JobOutcome]:
        """See Launcher: as arrays, one for each size of mesh; or inside the planning job, where it may submit nothing."""
        match self.options.chain:
            case Chain.INSIDE:
                return self._profile_as_arrays(paths, tasks)
            case Chain.DEPENDENCY | Chain.LOGIN:
                return self._profile_inside(paths, tasks)

    def scripts(self, paths: RunPaths) -> str:
        """See Launcher. How many profiling tasks an array has is what planning finds out; here it is as many as run at a time."""
        tasks = tuple(range(self.size.max_parallel)) if self.options.chain is Chain.INSIDE else ()
        shown = {
            "planning job": self._planning_job(),
            "profiling tasks, one array for each size of mesh": self._profiling_job(ONE_PROCESS, tasks),
            "training job": self._training_after("PLANNING_JOB") if self.options.chain is Chain.DEPENDENCY else self._training_job(),
        }
        return "\n".join(f"# ---- {name}\n{batch_script(job, paths, self._flags())}" for name, job in shown.items() if job.tasks)

    def _profile_as_arrays(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> dict[int, JobOutcome]:
        submissions: list[Submission] = []
        outcomes: dict[int, JobOutcome] = {}
        for submesh, group in groupby(tasks, key=lambda task: task.submesh):
            numbers = tuple(task.number for task in group)
            try:
                submissions += self._submit(paths, self._profiling_job(submesh, numbers))
            except LaunchError as refused:
                if is_cancelled(paths):
                    raise
                outcomes |= dict.fromkeys(numbers, NotStarted(str(refused)))
        with cancelled_on_the_way_out(submissions):
            return outcomes | wait_for_tasks(paths, submissions, max_pending_seconds=self.max_pending_seconds)

    def _profile_inside(self, paths: RunPaths, tasks: Sequence[ProfileTask]) -> dict[int, JobOutcome]:
        small = [task.number for task in tasks if task.submesh == ONE_PROCESS]
        seconds = self.size.task_seconds(tasks)
        alone = f"with launcher.chain={self.options.chain.value} only the planning job measures, on one device"
        outcomes: dict[int, JobOutcome] = {task.number: NotStarted(alone) for task in tasks if task.number not in small}
        return outcomes | run_tasks(JobKind.PROFILE, paths, small, max_parallel=self.size.max_parallel, timeout_seconds=seconds)

    def _warn_of_training(self, paths: RunPaths) -> None:
        """Say now what Slurm would say of the training job after hours of planning; one that is submitted at once hears it anyway."""
        refusal = "" if self.options.chain is Chain.DEPENDENCY else refusal_ahead(self._training_job(), paths, self._flags(), os.environ)
        if refusal:
            sys.stderr.write(f"warning: as things are, Slurm would refuse the training job that follows planning: {refusal}\n")

    def _submit(self, paths: RunPaths, job: BatchJob) -> tuple[Submission, ...]:
        refuse_cancelled(paths)
        return submit(job, paths, self._flags(), os.environ)

    def _followed(self, paths: RunPaths, submitted: Sequence[Submission], kinds: Sequence[JobKind]) -> bool:
        """Say what is in the queue, and follow the jobs of `kinds` to their end, if that is wished; whether it was."""
        tell_submitted(paths, submitted)
        for kind in kinds if self.options.wait else ():
            self._follow(paths, kind, f"the jobs go on, and `python -m alpa_hpc cancel {paths.root}` would end them")
        return self.options.wait

    def _follow(self, paths: RunPaths, kind: JobKind, after_leaving: str) -> None:
        """Show a job's way to its end; `after_leaving` is told to a person who leaves by Ctrl-C."""
        teller = QueueTeller()
        steps = training_progress(paths, self.size.num_steps) if kind is JobKind.TRAIN else nullcontext(lambda: None)
        try:
            with steps as advance:
                follow_job(paths, kind, both(teller.watch, advance))
        except KeyboardInterrupt:
            sys.stderr.write(f"no longer following: {after_leaving}\n")
            raise

    def _flags(self) -> SlurmOptions:
        return with_site_defaults(self.options.slurm, os.environ)

    def _gpus(self, devices_per_node: int) -> int:
        return devices_per_node if self.has_gpus else 0

    def _planning_job(self) -> BatchJob:
        return BatchJob(JobKind.PLAN, Allocation(1, 1, 0))

    def _profiling_job(self, submesh: Submesh, tasks: tuple[int, ...]) -> BatchJob:
        allocation = Allocation(submesh.num_nodes, submesh.devices_per_node, self._gpus(submesh.devices_per_node))
        return BatchJob(JobKind.PROFILE, allocation, tasks, self.size.max_parallel)

    def _training_job(self) -> BatchJob:
        devices = self.size.devices
        return BatchJob(JobKind.TRAIN, Allocation(devices.num_nodes, devices.devices_per_node, self._gpus(devices.devices_per_node)))

    def _training_after(self, planning_job: str) -> BatchJob:
        return replace(self._training_job(), dependency=f"afterok:{planning_job}")
