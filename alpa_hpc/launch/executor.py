"""(job kind, run folder, task number) -> a finished job: submits a job script and waits for its own account of its end.

What submitit pickles is those three values and nothing else; the job is the script `jobs/KIND.py`, which a person can run
by hand in the same way. Nothing waits through submitit's `result()`: without accounting it blocks long after a job's end.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import submitit

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.files import log_tail
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome, NotStarted, outcome_of
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.python import job_python
from alpa_hpc.launch.status import JobState, read_status

POLL_SECONDS = 0.1
STOP_SECONDS = 15.0  # between asking a job to stop and killing it
TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in flight."""

    kind: JobKind
    task: int
    job: "submitit.Job[None]"
    deadline: float
    seconds: float  # from its submission to the deadline

    @property
    def log(self) -> Path:
        """The file that holds all of the job's output."""
        return self.job.paths.stdout


def run_job(kind: JobKind, paths: RunPaths, task: int = 0, *, timeout_seconds: float, watch: Callable[[], None] = lambda: None) -> None:
    """Run one job to its end; LaunchError, with its own account or the end of its log, if it fails, dies or takes too long."""
    outcomes = run_tasks(kind, paths, (task,), max_parallel=1, timeout_seconds=timeout_seconds, watch=watch)
    match outcomes[task]:
        case Ended():
            return
        case Died(reason) | NotStarted(reason):
            raise LaunchError(f"job {paths.job_name(kind, task)} {reason}")


def run_tasks(
    kind: JobKind,
    paths: RunPaths,
    tasks: Sequence[int],
    *,
    max_parallel: int,
    timeout_seconds: float,
    watch: Callable[[], None] = lambda: None,
) -> dict[int, JobOutcome]:
    """Run several jobs of one kind, at most `max_parallel` at once, and say what became of each.

    `timeout_seconds` bounds each job; `watch` is called at every poll, for a person who follows.
    """
    assert max_parallel >= 1, "no job would ever start"
    waiting, running, finished = list(tasks), list[Submitted](), dict[int, JobOutcome]()
    try:
        while waiting or running:
            while waiting and len(running) < max_parallel:
                running.append(_submit(kind, paths, waiting.pop(0), timeout_seconds))
            time.sleep(POLL_SECONDS)
            watch()
            for submitted in tuple(running):
                outcome = _ended(submitted, paths)
                if outcome is not None:
                    finished[submitted.task] = outcome
                    running.remove(submitted)
    finally:
        for submitted in running:
            _stop(submitted)
    return finished


def _submit(kind: JobKind, paths: RunPaths, task: int, timeout_seconds: float) -> Submitted:
    job_script(kind.value)  # a missing script should fail here, not in a log
    paths.status(kind, task).unlink(missing_ok=True)  # the account of an earlier attempt must not be taken for this one's
    executor = submitit.LocalExecutor(folder=paths.log_folder(kind, task), python=job_python())
    minutes = (timeout_seconds + 2 * STOP_SECONDS) / 60  # a backstop, should this process be killed; our own bound comes first
    executor.update_parameters(timeout_min=minutes, signal_delay_s=0, stderr_to_stdout=True)
    with deaf_to_ctrl_c():
        job = executor.submit(become_job_script, kind, str(paths.root), task)
    return Submitted(kind, task, job, deadline=time.monotonic() + timeout_seconds, seconds=timeout_seconds)


@contextmanager
def deaf_to_ctrl_c() -> Generator[None]:
    """Have what starts in the block take no notice of a terminal's Ctrl-C: this process hears it, and stops its jobs in good order."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def become_job_script(kind: JobKind, root: str, task: int) -> None:
    """Replace this process by the job script, so that signals, output and exit code are the script's own."""
    command = [sys.executable, "-P", str(job_script(kind.value)), root]
    if kind is JobKind.PROFILE:
        command.append(str(task))
    os.execv(command[0], command)


def _ended(submitted: Submitted, paths: RunPaths) -> JobOutcome | None:
    """What became of a job, or None while it is on its way."""
    is_gone = submitted.job.done()  # asked before the marker is read: a marker written in between is then seen
    status = read_status(paths, submitted.kind, submitted.task)
    if not is_gone:
        if time.monotonic() <= submitted.deadline:
            return None
        _stop(submitted)
        return Died(_with_log(f"took longer than the {submitted.seconds / 60:.3g} minutes it was given and was stopped", submitted.log))
    outcome = outcome_of(status)
    if status is not None and status.state is not JobState.RUNNING:
        return outcome
    assert not isinstance(outcome, Ended), "a job without a final account has not ended well"
    return replace(outcome, reason=_with_log(outcome.reason, submitted.log))


def _with_log(reason: str, log: Path) -> str:
    return f"{reason}\n--- the end of {log}:\n{log_tail(log, TAIL_LINES)}"


def _stop(submitted: Submitted) -> None:
    """Say so, ask the job to stop (SIGTERM, which submitit's local controller hands on to the script) and, after a while, make it."""
    sys.stderr.write(f"stopping the {submitted.kind.value} job {submitted.job.job_id}\n")
    end = time.monotonic() + STOP_SECONDS
    while not submitted.job.done() and time.monotonic() < end:
        os.kill(int(submitted.job.job_id), signal.SIGTERM)
        time.sleep(0.5)
    if not submitted.job.done():
        submitted.job.cancel()
