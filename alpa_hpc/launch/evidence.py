"""Evidence on one job (its marker, Slurm's word, the processes of this machine) -> JobView.

A marker with an end is believed; without one, the reason says who says what. What cannot be told is UNKNOWN, never failed.
"""

import enum
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_hpc.launch.outcome import account
from alpa_hpc.launch.paths import JobKind
from alpa_hpc.launch.queue import QueuePhase, QueueState, never_starts
from alpa_hpc.launch.status import JobState, JobStatus
from alpa_hpc.launch.submission import Submission
from alpa_hpc.process import is_running

_STOPPED = re.compile(r"\(SIGTERM\)|mpirun .*ended with exit code")  # the words of `launch.status` and `launch.mpirun`
SETTLE_SECONDS = 60.0  # a file may show up this much later than Slurm's word, on a network file system


class JobPhase(enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    """known to the run, and not submitted yet"""
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """nobody who knows could be asked from here"""


@dataclass(frozen=True, slots=True)
class JobView:
    """What became of a job, or of one task of an array. Times in seconds since 1970; None and empty texts where there is nothing to say.

    reason:   why it is not done, in one line
    slurm_id: as squeue has it, such as 123 or 123_4
    nodes:    where it runs or ran
    account:  its own words on its failure: a message, or the traceback of an exception that needs one
    """

    kind: JobKind
    task: int
    phase: JobPhase
    reason: str
    slurm_id: str
    nodes: str
    exit_code: int | None
    submitted: float | None
    started: float | None
    ended: float | None
    account: str

    @property
    def since(self) -> float | None:
        """When the present phase began."""
        if self.phase in (JobPhase.WAITING, JobPhase.PENDING):
            return self.submitted
        return self.started if self.phase is JobPhase.RUNNING else self.ended


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a job.

    status:     its own marker
    submission: the record of its submission to Slurm
    state:      Slurm's word, where it was asked
    has_result: the file that it writes at its end is there
    has_begun:  the folder of its log is there
    is_askable: Slurm answered when asked for jobs by name, where it had to be
    torn:       why its marker cannot be read; empty where it can, or is not there
    """

    kind: JobKind
    task: int
    status: JobStatus | None
    submission: Submission | None
    state: QueueState | None
    has_result: bool
    has_begun: bool
    is_askable: bool
    torn: str = ""

    @property
    def slurm_id(self) -> str:
        """How Slurm calls it; empty if it has no number there."""
        return self.submission.slurm_id(self.task) if self.submission is not None and self.submission.job_id else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A phase, and why."""

    phase: JobPhase
    reason: str = ""


def judge(evidence: Evidence, *, now: float, is_cancelled: bool) -> JobView:
    """What became of the job, by all the evidence; `is_cancelled`: somebody cancelled the run."""
    verdict = _verdict(evidence, now)
    if is_cancelled and verdict.phase in (JobPhase.WAITING, JobPhase.FAILED) and _was_cut_short(evidence):
        verdict = Verdict(JobPhase.CANCELLED, "with the run")
    status, state = evidence.status, evidence.state
    code = status.exit_code if status is not None else None
    ended = status.ended if status is not None else None
    if state is not None and state.is_over and ended is None:
        code, ended = _exit_code(state), state.ended
    nodes = state.nodes if state is not None else ""
    return JobView(
        evidence.kind,
        evidence.task,
        verdict.phase,
        verdict.reason,
        evidence.slurm_id,
        nodes or (status.node if status is not None else ""),
        code,
        evidence.submission.submitted if evidence.submission is not None else None,
        status.started if status is not None else None,
        ended,
        account(status) if status is not None and status.state is JobState.FAILED else "",
    )


def judge_after_planning(jobs: Sequence[JobView]) -> tuple[JobView, ...]:
    """The views, where jobs that only the planning job starts, or that it keeps inside, share its fate."""
    planning = next((job for job in jobs if job.kind is JobKind.PLAN), None)
    if planning is None or planning.phase in (JobPhase.WAITING, JobPhase.PENDING, JobPhase.UNKNOWN):
        return tuple(jobs)
    return tuple(job if job.slurm_id or job.kind is JobKind.PLAN else _like_planning(job, planning.phase) for job in jobs)


def knows_no_cause(status: JobStatus) -> bool:
    """Whether a job failed without knowing why: it was told to stop, or its ranks ended without a word."""
    return status.state is JobState.FAILED and _STOPPED.search(status.message) is not None


def _like_planning(job: JobView, planning: JobPhase) -> JobView:
    """A job of which Slurm knows nothing: as a part of planning, or as what follows it."""
    is_over = planning is not JobPhase.RUNNING
    if job.kind is JobKind.PROFILE and job.phase is JobPhase.UNKNOWN:
        over = replace(job, phase=JobPhase.FAILED, reason="ended with the planning job")
        return over if is_over else replace(job, phase=JobPhase.RUNNING, reason="")
    is_to_come = planning is JobPhase.DONE and job.kind is JobKind.TRAIN
    if is_over and not is_to_come and job.phase in (JobPhase.WAITING, JobPhase.PENDING):
        return replace(job, phase=JobPhase.CANCELLED, reason="was not started before planning ended")
    return job


def _was_cut_short(evidence: Evidence) -> bool:
    """Whether a job of a cancelled run did not fail by itself."""
    status = evidence.status
    return status is None or status.state is JobState.RUNNING or knows_no_cause(status)


def _verdict(evidence: Evidence, now: float) -> Verdict:
    status = evidence.status
    if status is not None and status.state is JobState.DONE:
        return Verdict(JobPhase.DONE)
    if status is not None and status.state is JobState.FAILED:
        return _of_failure(status, evidence.state)
    if evidence.state is not None:
        return _by_queue(evidence, evidence.state, now)
    if evidence.submission is not None:
        return _by_name(evidence, evidence.submission)
    if status is not None:
        return _by_process(status)
    if evidence.torn:
        return Verdict(JobPhase.UNKNOWN, evidence.torn)
    if evidence.has_result:
        return Verdict(JobPhase.DONE)
    return Verdict(JobPhase.PENDING, "starts, and has not reported yet") if evidence.has_begun else Verdict(JobPhase.WAITING)


def _of_failure(status: JobStatus, state: QueueState | None) -> Verdict:
    """A job's own words, or Slurm's where the job was stopped from outside."""
    if not knows_no_cause(status) or state is None or state.phase not in _STOPPING:
        return Verdict(JobPhase.FAILED, status.message.partition("\n")[0])
    return Verdict(JobPhase.CANCELLED if state.phase is QueuePhase.CANCELLED else JobPhase.FAILED, state.describe())


_STOPPING = (QueuePhase.CANCELLED, QueuePhase.TIMED_OUT, QueuePhase.OUT_OF_MEMORY, QueuePhase.NODE_FAILED, QueuePhase.PREEMPTED)


def _by_queue(evidence: Evidence, state: QueueState, now: float) -> Verdict:
    """The verdict on a job that has not told its end."""
    match state.phase:
        case QueuePhase.UNKNOWN:
            return Verdict(JobPhase.UNKNOWN, f"Slurm cannot be asked: {state.reason}")
        case QueuePhase.RUNNING:
            return Verdict(JobPhase.RUNNING)
        case QueuePhase.PENDING:
            end = "; Slurm will never start it" if never_starts(state.reason) else ""
            again = "again, after it had started" if evidence.status is not None else ""
            return Verdict(JobPhase.PENDING, ", ".join(word for word in (state.reason + end, again) if word))
        case QueuePhase.CANCELLED:
            return Verdict(JobPhase.CANCELLED, state.describe())
        case _:
            return _of_silent_end(evidence, state, now)


def _of_silent_end(evidence: Evidence, state: QueueState, now: float) -> Verdict:
    if state.phase is QueuePhase.COMPLETED and state.ended is not None and now - state.ended < SETTLE_SECONDS:
        return Verdict(JobPhase.RUNNING, "has ended, and its report is not visible yet")
    lack = "; it had not reported anything" if evidence.status is None else "; it had reported its start only"
    lack = f"; {evidence.torn}" if evidence.torn else lack
    return Verdict(JobPhase.FAILED, state.describe() + lack)


def _by_name(evidence: Evidence, submission: Submission) -> Verdict:
    """The verdict on a job that sbatch refused, or whose answer was not noted."""
    if submission.refusal:
        return Verdict(JobPhase.FAILED, submission.refusal.partition("\n")[0])
    if not evidence.is_askable:
        return Verdict(JobPhase.UNKNOWN, "sbatch was asked for it, and Slurm cannot be asked what came of it")
    return Verdict(JobPhase.WAITING, "sbatch was asked for it, and Slurm has no job of its name")


def _by_process(status: JobStatus) -> Verdict:
    """The verdict on a job that runs without Slurm, or was started by hand."""
    if status.host != socket.gethostname():
        return Verdict(JobPhase.UNKNOWN, f"started on {status.host} and cannot be asked for from here: look there")
    if is_running(status.pid, status.started):
        return Verdict(JobPhase.RUNNING)
    return Verdict(JobPhase.FAILED, f"process {status.pid} ended without a report: killed, perhaps out of host memory")


def _exit_code(state: QueueState) -> int | None:
    return None if state.phase is QueuePhase.GONE else state.exit_code or (128 + state.signal if state.signal else 0)
