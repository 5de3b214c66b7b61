"""Run folder and queue -> RunView: what became of each job of a run, for people and for who follows it.

Order of trust: a job's own final marker; Slurm (`launch.queue`) for jobs without one; this machine's processes for jobs that Slurm never
had. Files that a job leaves at its end speak for runs whose jobs keep no markers (launcher=inprocess).
"""

import enum
import getpass
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_hpc.errors import StoreError
from alpa_hpc.launch.evidence import Evidence, JobPhase, JobView, judge, judge_after_planning, knows_no_cause
from alpa_hpc.launch.files import write_json
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.queue import QueueState, ask_queue, find_by_name
from alpa_hpc.launch.settings import RunSettings, read_settings
from alpa_hpc.launch.status import JobState, JobStatus, read_status
from alpa_hpc.launch.submission import Submission, in_order, read_submission, submission_files

__all__ = ["JobPhase", "JobView", "RunPhase", "RunView", "is_cancelled", "mark_cancelled", "view_run"]

Ask = Callable[[Sequence[str]], Mapping[str, QueueState]]
Find = Callable[[Sequence[str]], Mapping[str, str] | None]


class RunPhase(enum.Enum):
    """Where a run is as a whole."""

    PLANNING = "planning"
    TRAINING = "training"
    CALIBRATING = "calibrating"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at a glance; `reason` explains a phase that is not DONE, `jobs` are in the order in which they run.

    `torn` has a line for each file that could not be read; what else is known stands all the same.
    """

    paths: RunPaths
    settings: RunSettings
    phase: RunPhase
    reason: str
    jobs: tuple[JobView, ...]
    torn: tuple[str, ...] = ()


def view_run(paths: RunPaths, ask: Ask = ask_queue, find: Find = find_by_name) -> RunView:
    """What became of a run and of each of its jobs. The queue is asked only about jobs whose own marker leaves something open."""
    torn: list[str] = []
    settings = _settings(paths, torn)
    submissions, is_askable = _with_numbers(_submissions(paths, torn), find)
    jobs = _jobs(paths, settings, submissions)
    evidence = [_evidence(paths, kind, task, submissions, is_askable=is_askable) for kind, task in jobs]
    evidence = _with_queue(paths, evidence, ask)
    cancelled = is_cancelled(paths)
    views = judge_after_planning([judge(one, now=time.time(), is_cancelled=cancelled) for one in evidence])
    phase, reason = _phase_of_run([view for view in views if view.kind in settings.jobs], is_cancelled=cancelled)
    if torn and all(job.phase is JobPhase.WAITING for job in views):
        phase, reason = RunPhase.UNKNOWN, torn[0]
    reason = reason or _WHOLE.get(settings.jobs, "")
    return RunView(paths, settings, phase, reason, views, tuple(torn))


def mark_cancelled(paths: RunPaths) -> None:
    """Note that nothing more of this run is to be submitted; a job about to do so looks here first. The first note stays."""
    if not is_cancelled(paths):
        write_json(paths.root / _CANCELLED, {"time": time.time(), "user": getpass.getuser(), "host": socket.gethostname()})


def is_cancelled(paths: RunPaths) -> bool:
    """Whether somebody cancelled the run."""
    return (paths.root / _CANCELLED).exists()


_CANCELLED = "cancelled.json"


_WHOLE: Mapping[tuple[JobKind, ...], str] = {
    (): "a dry run: nothing was submitted",
    (JobKind.PLAN,): "planning was all that was asked for",
    (JobKind.PROFILE,): "a calibration",
}


def _settings(paths: RunPaths, torn: list[str]) -> RunSettings:
    try:
        return read_settings(paths)
    except StoreError as error:
        torn.append(str(error))
        kind = LauncherKind.SLURM if submission_files(paths) else LauncherKind.LOCAL
        return RunSettings(kind, (JobKind.PLAN, JobKind.TRAIN), 0)


def _submissions(paths: RunPaths, torn: list[str]) -> tuple[Submission, ...]:
    found: list[Submission] = []
    for path in submission_files(paths):
        try:
            found.append(read_submission(path))
        except StoreError as error:
            torn.append(str(error))
    return in_order(found)


def _status(paths: RunPaths, kind: JobKind, task: int) -> tuple[JobStatus | None, str]:
    """A job's marker, and why it cannot be read if so."""
    try:
        return read_status(paths, kind, task), ""
    except StoreError as error:
        return None, str(error)


def _with_numbers(submissions: Sequence[Submission], find: Find) -> tuple[tuple[Submission, ...], bool]:
    """Submissions with the numbers of those whose submitter could not note them, and whether Slurm could be asked for these."""
    nameless = [one.job_name for one in submissions if not one.job_id]
    found = find(nameless) if nameless else {}
    known = found or {}
    return tuple(one if one.job_id else replace(one, job_id=known.get(one.job_name, "")) for one in submissions), found is not None


def _jobs(paths: RunPaths, settings: RunSettings, submissions: Iterable[Submission]) -> list[tuple[JobKind, int]]:
    """All jobs that the run is known to have, in the order in which they run."""
    tasks = {task for one in submissions if one.kind is JobKind.PROFILE for task in one.tasks}
    prefixes = ((paths.profile_folder, "request-"), (paths.status_folder, f"{JobKind.PROFILE.value}-"))
    for folder, prefix in prefixes:
        tasks |= {
            int(path.stem.removeprefix(prefix)) for path in folder.glob(f"{prefix}*.json") if path.stem.removeprefix(prefix).isdecimal()
        }
    whole = {kind for kind in JobKind if kind in settings.jobs or paths.status(kind).exists()} - {JobKind.PROFILE}
    return sorted(
        [(kind, 0) for kind in whole] + [(JobKind.PROFILE, task) for task in tasks], key=lambda job: (_ORDER.index(job[0]), job[1])
    )


_ORDER = (JobKind.PLAN, JobKind.PROFILE, JobKind.TRAIN)


def _evidence(paths: RunPaths, kind: JobKind, task: int, submissions: Sequence[Submission], *, is_askable: bool) -> Evidence:
    submission = next((one for one in reversed(submissions) if one.kind is kind and task in one.tasks), None)
    has_begun = paths.log_folder(kind, task).exists()
    status, torn = _status(paths, kind, task)
    return Evidence(kind, task, status, submission, None, _has_result(paths, kind), has_begun, is_askable, torn)


def _has_result(paths: RunPaths, kind: JobKind) -> bool:
    """Whether the file is there that a job writes last."""
    match kind:
        case JobKind.PLAN:
            return paths.planning.exists()
        case JobKind.TRAIN:
            return paths.training.exists()
        case JobKind.PROFILE:
            return False


def _with_queue(paths: RunPaths, evidence: Sequence[Evidence], ask: Ask) -> list[Evidence]:
    """The evidence with Slurm's word where it is needed, and with markers that were written while Slurm was asked."""
    ids = {one.slurm_id for one in evidence if one.slurm_id and not _is_settled(one.status)}
    if not ids:
        return list(evidence)
    states = ask(sorted(ids))
    list(paths.status_folder.iterdir())  # makes a network file system look again
    return [
        replace(one, state=_own(one, states[one.slurm_id]), status=_status(paths, one.kind, one.task)[0]) if one.slurm_id in ids else one
        for one in evidence
    ]


def _own(evidence: Evidence, state: QueueState) -> QueueState:
    return state if evidence.submission is None else state.of(evidence.submission.job_name)


def _is_settled(status: JobStatus | None) -> bool:
    """Whether a job's marker leaves nothing to ask: one that was told to stop does not know why."""
    return status is not None and (status.state is JobState.DONE or (status.state is JobState.FAILED and not knows_no_cause(status)))


def _phase_of_run(jobs: Sequence[JobView], *, is_cancelled: bool) -> tuple[RunPhase, str]:
    """The phase that follows from the jobs that decide: where a run is planned, a profiling task that failed only costs it a choice."""
    for job in jobs:
        if job.phase is JobPhase.DONE:
            continue
        if is_cancelled and job.phase is not JobPhase.FAILED:
            return RunPhase.CANCELLED, _reason_of(job)
        return _PHASES.get(job.phase, _IN_PROGRESS[job.kind]), _reason_of(job)
    return RunPhase.DONE, ""


def _reason_of(job: JobView) -> str:
    return f"{job.kind.value}: {job.reason}" if job.reason else ""


_PHASES = {JobPhase.FAILED: RunPhase.FAILED, JobPhase.CANCELLED: RunPhase.CANCELLED, JobPhase.UNKNOWN: RunPhase.UNKNOWN}
_IN_PROGRESS = {JobKind.PLAN: RunPhase.PLANNING, JobKind.TRAIN: RunPhase.TRAINING, JobKind.PROFILE: RunPhase.CALIBRATING}
