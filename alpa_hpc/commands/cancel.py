"""`python -m alpa_hpc cancel [RUN]` -> no job of the run is left, and none is submitted any more.

The run is marked first, so that a planning job about to submit the training job does not; then jobs that wait are cancelled, then those
that run, and the queue is read again until nothing is left. Exit status: 0 nothing is left, 1 something is, 2 it could not be done.
"""

import argparse
import socket
import sys
import time
from collections.abc import Sequence

from alpa_hpc.commands.find import add_run_arguments, find_run
from alpa_hpc.errors import StoreError
from alpa_hpc.launch.evidence import JobPhase, JobView
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.queue import cancel, cancel_pending
from alpa_hpc.launch.status import JobState, read_status
from alpa_hpc.launch.views import RunPhase, RunView, mark_cancelled, view_run
from alpa_hpc.process import ask_to_stop

PATIENCE_SECONDS = 30.0
POLL_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Cancel a run."""
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc cancel", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_arguments(parser)
    asked = parser.parse_args(arguments)
    paths = find_run(asked.run, asked.runs)
    view = view_run(paths)
    for line in view.torn:
        sys.stderr.write(f"warning: {line}\n")
    if not _is_open(view):
        sys.stdout.write(f"nothing of {paths.root} is left to cancel\n")
        return 0
    mark_cancelled(paths)
    left = cancel_jobs(paths, PATIENCE_SECONDS)
    for job in left:
        sys.stdout.write(f"{paths.job_name(job.kind, job.task)} is {job.phase.value}: {job.reason or 'it was asked to end'}\n")
    sys.stdout.write(f"{'cancelled' if not left else 'not all is cancelled of'} {paths.root}\n")
    return 1 if left else 0


def cancel_jobs(paths: RunPaths, patience_seconds: float) -> tuple[JobView, ...]:
    """End the jobs of a run, also those that appear meanwhile; those that are left when the time is over. LaunchError as `queue.cancel`."""
    end = time.monotonic() + patience_seconds
    asked: set[tuple[JobKind, int]] = set()
    num_empty = 0
    while True:
        left = tuple(job for job in view_run(paths).jobs if _may_be_alive(job))
        asked |= _end(paths, [job for job in left if (job.kind, job.task) not in asked])
        num_empty = 0 if left else num_empty + 1
        # Twice: a planning job may submit after the submissions were read, and have ended when Slurm is asked about it.
        if num_empty == 2 or time.monotonic() > end:
            return left
        time.sleep(POLL_SECONDS)


def _end(paths: RunPaths, jobs: Sequence[JobView]) -> set[tuple[JobKind, int]]:
    """Ask jobs to end; those that could be asked."""
    ids = [job.slurm_id for job in jobs if job.slurm_id]
    if ids:
        cancel_pending(ids)
        cancel(ids)
    return {(job.kind, job.task) for job in jobs if job.slurm_id or _end_process(paths, job)}


def _is_open(view: RunView) -> bool:
    is_on_its_way = view.phase in (RunPhase.PLANNING, RunPhase.TRAINING, RunPhase.UNKNOWN)
    return is_on_its_way or any(_may_be_alive(job) for job in view.jobs)


def _may_be_alive(job: JobView) -> bool:
    return job.phase in (JobPhase.PENDING, JobPhase.RUNNING, JobPhase.UNKNOWN)


def _end_process(paths: RunPaths, job: JobView) -> bool:
    """Stop a job that is a process of this machine, by its own account, and say whether; elsewhere nothing can be done from here."""
    try:
        status = read_status(paths, job.kind, job.task)
    except StoreError:
        return False
    if status is None or status.state is not JobState.RUNNING or status.host != socket.gethostname():
        return False
    return ask_to_stop(status.pid, status.started)
