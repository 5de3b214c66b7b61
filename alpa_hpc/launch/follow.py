"""Submissions -> what became of each of their tasks: waits for the jobs' own accounts, and asks Slurm why one is late.

A task's own marker is trusted first; the queue only explains its absence. What cannot be asked is still on its way.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.files import log_tail
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome, NotStarted, outcome_of
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.queue import QueuePhase, QueueState, ask_queue, cancel, never_starts
from alpa_hpc.launch.status import JobState, read_status
from alpa_hpc.launch.submission import Submission, read_submissions

MARKER_SECONDS = 0.5  # between two looks at the file system
QUEUE_SECONDS = 5.0  # between two questions to the controller, which all users share
TAIL_LINES = 10  # of a log
SETTLE_SECONDS = 20.0  # a marker may show up this much later than Slurm's word, on a network file system
Ask = Callable[[Sequence[str]], Mapping[str, QueueState]]
Watch = Callable[[Mapping[str, QueueState]], None]  # called at every poll, with what the queue said if it was asked


def unwatched(_states: Mapping[str, QueueState]) -> None:
    """Watches nothing."""


THROTTLED = "JobArrayTaskLimit"  # the pending reason of a task that our own limit holds back


@dataclass(slots=True, eq=False)
class Waiting:
    """A task that somebody waits for: since when it has been pending, and since when Slurm says that it is over (None: not yet)."""

    submission: Submission
    task: int
    pending_since: float = field(default_factory=time.monotonic)
    over_since: float | None = None

    @property
    def slurm_id(self) -> str:
        """How Slurm calls it."""
        return self.submission.slurm_id(self.task)


def wait_for_tasks(
    paths: RunPaths, submissions: Sequence[Submission], *, max_pending_seconds: float, ask: Ask = ask_queue, watch: Watch = unwatched
) -> dict[int, JobOutcome]:
    """What became of every task; one that is pending for longer than `max_pending_seconds`, or for a lasting reason, is cancelled."""
    waiting = [Waiting(submission, task) for submission in submissions for task in submission.tasks]
    outcomes: dict[int, JobOutcome] = {}
    next_question = time.monotonic() + QUEUE_SECONDS / 2
    while waiting:
        time.sleep(MARKER_SECONDS)
        states: Mapping[str, QueueState] = {}
        if time.monotonic() >= next_question:
            states = ask([one.slurm_id for one in waiting])
            next_question = time.monotonic() + QUEUE_SECONDS
        watch(states)
        for one in tuple(waiting):
            outcome = reported(paths, one)
            if outcome is None and states.get(one.slurm_id) is not None:
                outcome = judge(paths, one, states[one.slurm_id].of(one.submission.job_name), max_pending_seconds)
            if outcome is not None:
                outcomes[one.task] = outcome
                waiting.remove(one)
    return outcomes


def follow_job(paths: RunPaths, kind: JobKind, watch: Watch) -> None:
    """Wait until the planning or training job of a run has ended; LaunchError with its own account if it did not end well."""
    submission = _submitted(paths, kind)
    outcomes = wait_for_tasks(paths, (submission,), max_pending_seconds=math.inf, watch=watch)
    match outcomes[0]:
        case Ended():
            return
        case Died(reason) | NotStarted(reason):
            raise LaunchError(f"{kind.value} job {submission.job_id} {reason}\n{_log_of(paths, submission)}")


def _log_of(paths: RunPaths, submission: Submission) -> str:
    """Where a job's log is; of one without an account of its own, such as one whose set-up failed, also how it ends."""
    folder = paths.batch_log_folder(submission.kind)
    status = read_status(paths, submission.kind)
    if status is not None and status.state is not JobState.RUNNING:
        return f"Its log is in {folder}."
    log = next(folder.glob(f"{submission.job_id}_*.out"), folder)  # named by submitit
    return f"--- the end of {log}:\n{log_tail(log, TAIL_LINES)}"


def _submitted(paths: RunPaths, kind: JobKind) -> Submission:
    """The newest submission of a kind; the planning job may have made it a moment ago, on another node."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = [one for one in read_submissions(paths) if one.kind is kind and one.job_id]
        if found:
            return found[-1]
        if time.monotonic() > deadline:
            raise LaunchError(f"no {kind.value} job was submitted for {paths.root}; the logs in {paths.logs} say why")
        time.sleep(MARKER_SECONDS)


def reported(paths: RunPaths, one: Waiting) -> JobOutcome | None:
    """The outcome by the task's own final marker, or None while there is none."""
    list(paths.status_folder.iterdir())  # makes a network file system look again
    status = read_status(paths, one.submission.kind, one.task)
    return None if status is None or status.state is JobState.RUNNING else outcome_of(status)


def judge(paths: RunPaths, one: Waiting, state: QueueState, max_pending_seconds: float) -> JobOutcome | None:
    """The outcome by what Slurm says of a task without a final marker, or None while it is on its way or cannot be told."""
    now = time.monotonic()
    match state.phase:
        case QueuePhase.UNKNOWN:
            return None
        case QueuePhase.RUNNING:
            one.pending_since, one.over_since = now, None
            return None
        case QueuePhase.PENDING:
            return _judge_pending(one, state, now, max_pending_seconds)
        case _:
            one.over_since = now if one.over_since is None else one.over_since
            return _gone(paths, one, state) if now - one.over_since >= SETTLE_SECONDS else None


def _judge_pending(one: Waiting, state: QueueState, now: float, max_pending_seconds: float) -> JobOutcome | None:
    if state.reason == THROTTLED:
        one.pending_since = now
    if never_starts(state.reason):
        why = f"Slurm would never start it ({state.reason})"
    elif now - one.pending_since > max_pending_seconds:
        why = f"it waited in the queue for more than {max_pending_seconds / 60:.0f} minutes ({state.reason})"
    else:
        return None
    try:
        cancel([one.slurm_id])
    except LaunchError:
        return None  # Slurm cannot be asked just now: the next look will tell
    return NotStarted(why)


def _gone(paths: RunPaths, one: Waiting, state: QueueState) -> JobOutcome:
    """A job that is over and has not said how: by what it said last, and Slurm's words."""
    status = read_status(paths, one.submission.kind, one.task)
    if status is not None and status.state is not JobState.RUNNING:
        return outcome_of(status)
    words = f"Slurm job {one.slurm_id}: {state.describe()}"
    return NotStarted(f"ended before it could report anything ({words})") if status is None else Died(f"on {status.node} {words}")
