"""What became of a job is told by its own marker, else by Slurm, else by this machine's processes; what nobody can tell is not made up."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError, PlanError
from alpa_hpc.launch.evidence import SETTLE_SECONDS, JobPhase, JobView
from alpa_hpc.launch.files import write_json
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.status import JobState, JobStatus, reporting, write_status
from alpa_hpc.launch.submission import Submission, write_submission
from alpa_hpc.launch.views import RunPhase, RunView, is_cancelled, mark_cancelled, view_run

PLAN, PROFILE, TRAIN = JobKind.PLAN, JobKind.PROFILE, JobKind.TRAIN
ELSEWHERE = "node-that-is-not-here"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return made(tmp_path)


def made(folder: Path, launcher: str = "slurm", mode: str = "full") -> RunPaths:
    paths = new_run(folder, "demo")
    paths.config.write_text(f"mode: {mode}\nlauncher:\n  kind: {launcher}\ntraining:\n  num_steps: 160\n")
    return paths


def submit(paths: RunPaths, kind: JobKind, job_id: str, tasks: tuple[int, ...] = (0,)) -> Submission:
    submission = Submission(kind, tasks, kind is PROFILE, job_id, f"{kind.value}-demo-1", "#!/bin/bash\n", time.time())
    write_submission(paths, submission)
    return submission


def report(paths: RunPaths, kind: JobKind, state: JobState, task: int = 0, **fields: object) -> JobStatus:
    ended = None if state is JobState.RUNNING else time.time()
    code = {JobState.RUNNING: None, JobState.DONE: 0, JobState.FAILED: 1}[state]
    status = JobStatus(kind, task, state, code, ELSEWHERE, "node7", 1, time.time(), ended, "", is_explained=True, traceback="")
    status = replace(status, **fields)  # pyright: ignore[reportArgumentType]
    write_status(paths, status)
    return status


class Queue:
    """A queue that says what it is given, of everything else that it forgot it, and keeps what it was asked."""

    def __init__(self, states: Mapping[str, QueueState] | None = None) -> None:
        self.states = states or {}
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, ids: Sequence[str]) -> Mapping[str, QueueState]:
        self.asked.append(tuple(ids))
        return {one: self.states.get(one, QueueState(QueuePhase.GONE)) for one in ids}


def view(paths: RunPaths, states: Mapping[str, QueueState] | None = None) -> RunView:
    return view_run(paths, Queue(states), lambda names: {})


def job(seen: RunView, kind: JobKind, task: int = 0) -> JobView:
    (found,) = [one for one in seen.jobs if (one.kind, one.task) == (kind, task)]
    return found


def test_a_run_from_nothing_to_done(paths: RunPaths) -> None:
    seen = view(paths)
    assert [(one.kind, one.phase) for one in seen.jobs] == [(PLAN, JobPhase.WAITING), (TRAIN, JobPhase.WAITING)]
    assert seen.phase is RunPhase.PLANNING
    submit(paths, PLAN, "12")
    seen = view(paths, {"12": QueueState(QueuePhase.PENDING, "Priority")})
    assert (job(seen, PLAN).phase, job(seen, PLAN).reason, job(seen, PLAN).slurm_id) == (JobPhase.PENDING, "Priority", "12")
    report(paths, PLAN, JobState.RUNNING)
    submit(paths, PROFILE, "13", (3, 4))
    report(paths, PROFILE, JobState.DONE, 3)
    seen = view(paths, {"12": QueueState(QueuePhase.RUNNING, nodes="node2"), "13_1": QueueState(QueuePhase.RUNNING, nodes="node3")})
    assert seen.phase is RunPhase.PLANNING
    assert [(one.phase.value, one.nodes, one.slurm_id) for one in seen.jobs] == [
        ("running", "node2", "12"),
        ("done", "node7", "13_0"),
        ("running", "node3", "13_1"),
        ("waiting", "", ""),
    ]
    report(paths, PROFILE, JobState.DONE, 4)
    report(paths, PLAN, JobState.DONE)
    submit(paths, TRAIN, "14")
    assert view(paths, {"14": QueueState(QueuePhase.PENDING, "Resources")}).phase is RunPhase.TRAINING
    report(paths, TRAIN, JobState.DONE)
    seen = view(paths)
    assert (seen.phase, seen.reason) == (RunPhase.DONE, "")
    assert seen.settings.num_steps == 160


def test_the_queue_is_asked_once_and_only_about_what_is_open(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    submit(paths, PROFILE, "13", (0, 1, 2))
    submit(paths, TRAIN, "14")
    report(paths, PLAN, JobState.DONE)
    report(paths, PROFILE, JobState.FAILED, 0, message="does not compile")
    report(paths, PROFILE, JobState.RUNNING, 1)
    queue = Queue()
    view_run(paths, queue)
    assert queue.asked == [("13_1", "13_2", "14")]
    for task in (1, 2):
        report(paths, PROFILE, JobState.DONE, task)
    report(paths, TRAIN, JobState.DONE)
    queue = Queue()
    view_run(paths, queue)
    assert queue.asked == []


def test_a_marker_written_while_slurm_is_asked_counts(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    report(paths, PLAN, JobState.RUNNING)

    def ask(ids: Sequence[str]) -> Mapping[str, QueueState]:
        report(paths, PLAN, JobState.DONE)
        return dict.fromkeys(ids, QueueState(QueuePhase.GONE))

    assert job(view_run(paths, ask), PLAN).phase is JobPhase.DONE


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    ("state", "phase", "reason"),
    [
        (QueueState(QueuePhase.FAILED, "NonZeroExitCode", 7), JobPhase.FAILED, "failed with exit code 7"),
        (QueueState(QueuePhase.FAILED, "JobLaunchFailure", 0, 9), JobPhase.FAILED, "probably out of host memory"),
        (QueueState(QueuePhase.FAILED, "JobLaunchFailure", 0, 53), JobPhase.FAILED, "not visible from the node"),
        (QueueState(QueuePhase.OUT_OF_MEMORY), JobPhase.FAILED, "out of host memory"),
        (QueueState(QueuePhase.TIMED_OUT), JobPhase.FAILED, "time limit"),
        (QueueState(QueuePhase.NODE_FAILED, nodes="node3"), JobPhase.FAILED, "lost a node"),
        (QueueState(QueuePhase.PREEMPTED), JobPhase.FAILED, "preempted"),
        (QueueState(QueuePhase.GONE), JobPhase.FAILED, "no longer knows"),
        (QueueState(QueuePhase.COMPLETED, ended=1.0), JobPhase.FAILED, "ended with exit code 0; it had"),
        (QueueState(QueuePhase.CANCELLED), JobPhase.CANCELLED, "was cancelled"),
        (QueueState(QueuePhase.UNKNOWN, "connect failure"), JobPhase.UNKNOWN, "cannot be asked: connect failure"),
        (QueueState(QueuePhase.PENDING, "PartitionNodeLimit"), JobPhase.PENDING, "never start it"),
        (QueueState(QueuePhase.RUNNING, nodes="node1"), JobPhase.RUNNING, ""),
    ],
)
def test_slurm_explains_a_job_that_has_not_told_its_end(
    paths: RunPaths, state: QueueState, phase: JobPhase, reason: str, is_begun: bool
) -> None:
    submit(paths, PLAN, "12")
    if is_begun:
        report(paths, PLAN, JobState.RUNNING)
    seen = view(paths, {"12": state})
    assert job(seen, PLAN).phase is phase
    assert reason in job(seen, PLAN).reason
    expected = {"failed": "failed", "cancelled": "cancelled", "unknown": "unknown"}.get(phase.value, "planning")
    assert seen.phase.value == expected


def test_a_job_that_has_just_completed_may_not_have_been_heard_yet(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    report(paths, PLAN, JobState.RUNNING)
    late = QueueState(QueuePhase.COMPLETED, ended=time.time() - 2)
    assert job(view(paths, {"12": late}), PLAN).phase is JobPhase.RUNNING
    later = QueueState(QueuePhase.COMPLETED, ended=time.time() - SETTLE_SECONDS - 1)
    assert job(view(paths, {"12": later}), PLAN).phase is JobPhase.FAILED


def test_a_job_in_the_queue_again_says_so(paths: RunPaths) -> None:
    submit(paths, TRAIN, "14")
    report(paths, PLAN, JobState.DONE)
    report(paths, TRAIN, JobState.RUNNING)
    seen = view(paths, {"14": QueueState(QueuePhase.PENDING, "BeginTime")})
    assert (job(seen, TRAIN).phase, job(seen, TRAIN).reason) == (JobPhase.PENDING, "BeginTime, again, after it had started")


def test_a_failure_in_its_own_words_needs_no_queue(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    report(paths, PLAN, JobState.FAILED, message="stage 1 is empty\nmore", traceback="Traceback ...")
    queue = Queue()
    seen = view_run(paths, queue)
    assert queue.asked == []
    assert (seen.phase, seen.reason) == (RunPhase.FAILED, "plan: stage 1 is empty")
    assert (job(seen, PLAN).account, job(seen, PLAN).exit_code) == ("stage 1 is empty\nmore", 1)


def test_an_error_that_does_not_explain_itself_brings_its_traceback(tmp_path: Path) -> None:
    paths = made(tmp_path, "local")
    with pytest.raises(KeyError), reporting(paths, PLAN):
        raise KeyError("width")
    seen = job(view(paths), PLAN)
    assert seen.reason == "KeyError: 'width'"
    assert "test_views.py" in seen.account


@pytest.mark.parametrize(
    ("state", "phase", "reason"),
    [
        (QueueState(QueuePhase.TIMED_OUT), JobPhase.FAILED, "time limit"),
        (QueueState(QueuePhase.CANCELLED), JobPhase.CANCELLED, "was cancelled"),
        (QueueState(QueuePhase.PREEMPTED), JobPhase.FAILED, "preempted"),
        (QueueState(QueuePhase.FAILED, "NonZeroExitCode", 1), JobPhase.FAILED, "(SIGTERM)"),
        (QueueState(QueuePhase.GONE), JobPhase.FAILED, "(SIGTERM)"),
        (QueueState(QueuePhase.UNKNOWN, "down"), JobPhase.FAILED, "(SIGTERM)"),
    ],
)
def test_a_job_that_was_told_to_stop_is_explained_by_slurm(paths: RunPaths, state: QueueState, phase: JobPhase, reason: str) -> None:
    submit(paths, PLAN, "12")
    with pytest.raises(LaunchError), reporting(paths, PLAN):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    seen = view(paths, {"12": state})
    assert job(seen, PLAN).phase is phase
    assert reason in job(seen, PLAN).reason


def test_a_failed_profiling_task_fails_no_run(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    submit(paths, PROFILE, "13", (0,))
    report(paths, PLAN, JobState.RUNNING)
    seen = view(paths, {"12": QueueState(QueuePhase.RUNNING)})
    assert job(seen, PROFILE).phase is JobPhase.FAILED
    assert seen.phase is RunPhase.PLANNING


# ---- runs that Slurm has no part in


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_local_job_is_as_alive_as_its_process(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    paths = made(tmp_path, "local")
    report(paths, PLAN, JobState.RUNNING, host=socket.gethostname(), pid=sleeper.pid)
    assert job(view(paths), PLAN).phase is JobPhase.RUNNING
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent does not know yet
    zombie = job(view(paths), PLAN)
    sleeper.wait()
    for seen in (zombie, job(view(paths), PLAN)):
        assert seen.phase is JobPhase.FAILED
        assert f"process {sleeper.pid} ended without a report" in seen.reason
    assert view(paths).phase is RunPhase.FAILED


def test_a_process_that_only_got_the_number_is_another_one(tmp_path: Path) -> None:
    paths = made(tmp_path, "local")
    report(paths, PLAN, JobState.RUNNING, host=socket.gethostname(), pid=os.getpid(), started=time.time() - 86400.0)
    assert job(view(paths), PLAN).phase is JobPhase.FAILED


def test_a_process_of_another_machine_cannot_be_told_from_here(tmp_path: Path) -> None:
    paths = made(tmp_path, "local")
    report(paths, PLAN, JobState.RUNNING)
    seen = view(paths)
    assert (seen.phase, job(seen, PLAN).phase) == (RunPhase.UNKNOWN, JobPhase.UNKNOWN)
    assert ELSEWHERE in seen.reason
    assert "cannot be asked for from here" in seen.reason


def test_a_local_job_that_has_begun_and_not_reported(tmp_path: Path) -> None:
    paths = made(tmp_path, "local")
    assert job(view(paths), PLAN).phase is JobPhase.WAITING
    paths.log_folder(PLAN).mkdir()
    assert job(view(paths), PLAN).phase is JobPhase.PENDING


def test_profiling_inside_the_planning_job_shares_its_fate(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    report(paths, PLAN, JobState.RUNNING)
    report(paths, PROFILE, JobState.RUNNING, 0)
    write_json(paths.profile_request(1), {})
    alive = view(paths, {"12": QueueState(QueuePhase.RUNNING)})
    assert [one.phase.value for one in alive.jobs] == ["running", "running", "waiting", "waiting"]
    dead = view(paths)
    assert [one.phase.value for one in dead.jobs] == ["failed", "failed", "cancelled", "cancelled"]
    assert job(dead, PROFILE, 0).reason == "ended with the planning job"


def test_a_run_in_one_process_is_told_by_what_it_leaves(tmp_path: Path) -> None:
    paths = made(tmp_path, "inprocess")
    assert view(paths).phase is RunPhase.PLANNING
    write_json(paths.planning, {})
    assert view(paths).phase is RunPhase.TRAINING
    write_json(paths.training, {})
    assert view(paths).phase is RunPhase.DONE


def test_a_run_that_only_plans_and_one_that_only_shows(tmp_path: Path) -> None:
    paths = made(tmp_path, "inprocess", "plan")
    assert [one.kind for one in view(paths).jobs] == [PLAN]
    write_json(paths.planning, {})
    assert view(paths).phase is RunPhase.DONE
    shown = view(made(tmp_path, "slurm", "dry_run"))
    assert (shown.phase, shown.jobs) == (RunPhase.DONE, ())


# ---- submissions without a number


def test_a_submission_without_a_number_is_found_by_its_name(paths: RunPaths) -> None:
    submit(paths, PLAN, "")
    seen = view_run(paths, Queue({"33": QueueState(QueuePhase.RUNNING)}), lambda names: dict.fromkeys(names, "33"))
    assert (job(seen, PLAN).phase, job(seen, PLAN).slurm_id) == (JobPhase.RUNNING, "33")
    assert job(view_run(paths, Queue(), lambda names: {}), PLAN).phase is JobPhase.WAITING
    assert job(view_run(paths, Queue(), lambda names: None), PLAN).phase is JobPhase.UNKNOWN


def test_of_a_task_that_was_submitted_twice_the_last_time_counts(paths: RunPaths) -> None:
    submit(paths, PROFILE, "13", (0, 1))
    submit(paths, PROFILE, "15", (1, 2))
    seen = view(paths)
    assert [one.slurm_id for one in seen.jobs if one.kind is PROFILE] == ["13_0", "15_0", "15_1"]


# ---- cancelled runs


def test_a_cancelled_run(paths: RunPaths) -> None:
    submit(paths, PLAN, "12")
    assert not is_cancelled(paths)
    mark_cancelled(paths)
    first = (paths.root / "cancelled.json").read_text()
    mark_cancelled(paths)
    assert is_cancelled(paths)
    assert (paths.root / "cancelled.json").read_text() == first
    with pytest.raises(LaunchError), reporting(paths, PLAN):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    seen = view(paths)
    assert [(one.phase, one.reason) for one in seen.jobs] == [(JobPhase.CANCELLED, "with the run")] * 2
    assert seen.phase is RunPhase.CANCELLED


def test_a_cancelled_run_keeps_what_ended_before(paths: RunPaths) -> None:
    report(paths, PLAN, JobState.FAILED, message="stage 1 is empty")
    mark_cancelled(paths)
    assert view(paths).phase is RunPhase.FAILED
    report(paths, PLAN, JobState.DONE)
    submit(paths, TRAIN, "14")
    report(paths, TRAIN, JobState.FAILED, message="mpirun with 4 ranks ended with exit code 143; the first traceback above says why")
    assert view(paths).phase is RunPhase.CANCELLED
    report(paths, TRAIN, JobState.DONE)
    assert view(paths).phase is RunPhase.DONE


# ---- what cannot be read


def test_a_run_without_a_readable_config_is_unknown_and_says_so(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    seen = view(paths)
    assert seen.phase is RunPhase.UNKNOWN
    assert "config.yaml is not there" in seen.reason
    for text in ("mode: [", "mode: odd\n", "[]", "", "mode: full\nlauncher: {kind: cloud}\ntraining: {num_steps: 1}\n"):
        paths.config.write_text(text)
        assert "not a config of this version" in view(paths).torn[0]


def test_torn_files_hide_nothing_else(paths: RunPaths) -> None:
    submit(paths, TRAIN, "7")
    paths.config.write_text("mode: [")
    paths.status(PLAN).write_text('{"a')
    (paths.submission_folder / "plan.json").write_text("[]")
    seen = view(paths, {"7": QueueState(QueuePhase.RUNNING)})
    assert job(seen, TRAIN).phase is JobPhase.RUNNING, "so that it can be cancelled"
    assert len(seen.torn) == 2
    assert job(seen, PLAN).reason


def test_a_number_that_is_another_jobs_now_is_not_ours(paths: RunPaths) -> None:
    submit(paths, PLAN, "7")
    foreign = QueueState(QueuePhase.RUNNING, name="somebody-elses")
    assert job(view(paths, {"7": foreign}), PLAN).phase is JobPhase.FAILED


def test_a_refused_submission_has_failed_with_the_words_of_sbatch(paths: RunPaths) -> None:
    write_submission(paths, replace(submit(paths, PLAN, ""), refusal="sbatch refused it: invalid partition"))
    seen = view(paths)
    assert (seen.phase, seen.reason) == (RunPhase.FAILED, "plan: sbatch refused it: invalid partition")


def test_a_look_at_a_run_needs_no_jax() -> None:
    code = "import sys, alpa_hpc.launch.views; print(sorted({'jax', 'hydra', 'numpy', 'submitit', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_error_is_told_by_its_first_line(paths: RunPaths) -> None:
    with pytest.raises(PlanError), reporting(paths, PLAN):
        raise PlanError("first line\nsecond")
    assert view(paths).reason == "plan: first line"
