"""Jobs through submitit's local executor: what ends well, fails, dies or hangs is told apart by the job's own account."""

import os
import pickle
import time
from pathlib import Path

import pytest

import alpa_hpc
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import executor, python
from alpa_hpc.launch.executor import run_job, run_tasks
from alpa_hpc.launch.outcome import Died, Ended, NotStarted
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.status import JobState, read_status

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from alpa_hpc.errors import PlanError
from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.status import reporting
paths = open_run(Path(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own: this alpa_hpc, but job scripts that the test writes."""
    checkout = tmp_path / "checkout"
    folder = checkout / "jobs"
    folder.mkdir(parents=True)
    (checkout / "alpa_hpc").symlink_to(Path(str(alpa_hpc.__file__)).parent)
    monkeypatch.setattr(python, "import_folders", lambda: (str(checkout),))
    monkeypatch.setattr(executor, "job_script", lambda name: folder / f"{name}.py")
    return folder


def write_script(folder: Path, kind: JobKind, body: str) -> None:
    (folder / f"{kind.value}.py").write_text(HEAD + body)


def logs(paths: RunPaths) -> str:
    return "\n".join(path.read_text() for path in paths.logs.rglob("*.out"))


def test_a_job_runs_from_any_folder_and_gets_the_run_folder_alone(
    scripts: Path, run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "with reporting(paths, JobKind.PLAN):\n    print('arguments', sys.argv[1:])\n    paths.plan.write_text('{}')\n"
    write_script(scripts, JobKind.PLAN, body)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run_job(JobKind.PLAN, run, timeout_seconds=60)
    status = read_status(run, JobKind.PLAN)
    assert status is not None
    assert (status.state, status.exit_code) == (JobState.DONE, 0)
    assert run.plan.read_text() == "{}"
    assert f"arguments ['{run.root}']" in logs(run)
    (submitted,) = run.logs.rglob("*_submitted.pkl")
    delayed = pickle.loads(submitted.read_bytes())
    assert (delayed.function, delayed.args, delayed.kwargs) == (executor.become_job_script, (JobKind.PLAN, str(run.root), 0), {})


def test_a_failing_job_says_why(scripts: Path, run: RunPaths) -> None:
    write_script(scripts, JobKind.PLAN, "with reporting(paths, JobKind.PLAN):\n    raise PlanError('stage 1 is empty')\n")
    with pytest.raises(LaunchError, match=r"^job plan failed on \S+: stage 1 is empty$"):
        run_job(JobKind.PLAN, run, timeout_seconds=60)


def test_the_traceback_of_an_error_of_ours_comes_with_it(scripts: Path, run: RunPaths) -> None:
    write_script(scripts, JobKind.PLAN, "with reporting(paths, JobKind.PLAN):\n    {}['absent']\n")
    with pytest.raises(LaunchError, match=r"job plan failed on \S+: Traceback (.|\n)*plan\.py(.|\n)*KeyError: 'absent'$"):
        run_job(JobKind.PLAN, run, timeout_seconds=60)


def test_a_killed_job_is_noticed_at_once_with_the_end_of_its_log(scripts: Path, run: RunPaths) -> None:
    body = "with reporting(paths, JobKind.TRAIN):\n    print('last words', flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    write_script(scripts, JobKind.TRAIN, body)
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"job train .*ended without a report(.|\n)*last words"):
        run_job(JobKind.TRAIN, run, timeout_seconds=600)
    assert time.monotonic() - start < 15


def test_a_job_that_never_reports_is_noticed(scripts: Path, run: RunPaths) -> None:
    write_script(scripts, JobKind.PLAN, "raise SystemExit('no module')\n")
    with pytest.raises(LaunchError, match=r"ended before it could report(.|\n)*no module"):
        run_job(JobKind.PLAN, run, timeout_seconds=60)


def test_an_old_account_is_not_taken_for_a_new_one(scripts: Path, run: RunPaths) -> None:
    write_script(scripts, JobKind.PLAN, "with reporting(paths, JobKind.PLAN):\n    pass\n")
    run_job(JobKind.PLAN, run, timeout_seconds=60)
    write_script(scripts, JobKind.PLAN, "os.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(LaunchError, match="ended before it could report"):
        run_job(JobKind.PLAN, run, timeout_seconds=60)


def test_a_job_over_its_time_is_stopped_with_what_it_started(scripts: Path, run: RunPaths) -> None:
    body = """
with reporting(paths, JobKind.TRAIN):
    child = subprocess.Popen(["sleep", "120"])
    (paths.root / "child").write_text(str(child.pid))
    try:
        child.wait()
    finally:
        child.terminate()
        child.wait()
"""
    write_script(scripts, JobKind.TRAIN, body)
    start = time.monotonic()
    with pytest.raises(LaunchError, match="took longer than the 0.0667 minutes it was given and was stopped"):
        run_job(JobKind.TRAIN, run, timeout_seconds=4)
    assert time.monotonic() - start < 15
    status = read_status(run, JobKind.TRAIN)
    assert status is not None
    assert status.state is JobState.FAILED
    with pytest.raises(ProcessLookupError):
        os.kill(int((run.root / "child").read_text()), 0)


def test_tasks_of_a_round_run_at_most_so_many_at_once(scripts: Path, run: RunPaths) -> None:
    body = """
task = int(sys.argv[2])
with reporting(paths, JobKind.PROFILE, task):
    mark = paths.root / f"busy-{task}"
    mark.touch()
    time.sleep(0.4)
    paths.profile_answer(task).write_text(str(len(list(paths.root.glob("busy-*")))))
    mark.unlink()
"""
    write_script(scripts, JobKind.PROFILE, body)
    polls: list[int] = []
    outcomes = run_tasks(JobKind.PROFILE, run, (5, 2, 9), max_parallel=2, timeout_seconds=60, watch=lambda: polls.append(1))
    assert outcomes == {5: Ended(), 2: Ended(), 9: Ended()}
    assert max(int(run.profile_answer(task).read_text()) for task in (5, 2, 9)) <= 2
    assert polls


def test_each_task_of_a_round_has_its_own_end_and_stops_no_other(scripts: Path, run: RunPaths) -> None:
    body = """
task = int(sys.argv[2])
if task == 4:
    raise SystemExit("no module")
with reporting(paths, JobKind.PROFILE, task):
    if task == 1:
        raise PlanError("does not compile")
    if task == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    write_script(scripts, JobKind.PROFILE, body)
    outcomes = run_tasks(JobKind.PROFILE, run, (1, 2, 4, 5), max_parallel=3, timeout_seconds=60)
    kinds = {1: Died, 2: Died, 4: NotStarted, 5: Ended}
    assert {task: type(outcome) for task, outcome in outcomes.items()} == kinds
    reasons = {task: outcome.reason for task, outcome in outcomes.items() if not isinstance(outcome, Ended)}
    assert reasons[1].endswith(": does not compile")
    assert "ended without a report" in reasons[2]
    assert "ended before it could report" in reasons[4]
    assert "no module" in reasons[4], "the end of its log"


def test_who_is_interrupted_leaves_no_job_behind(scripts: Path, run: RunPaths) -> None:
    write_script(scripts, JobKind.TRAIN, "with reporting(paths, JobKind.TRAIN):\n    time.sleep(120)\n")

    def interrupt() -> None:
        if read_status(run, JobKind.TRAIN) is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(JobKind.TRAIN, run, timeout_seconds=600, watch=interrupt)
    status = read_status(run, JobKind.TRAIN)
    assert status is not None
    assert (status.state, "SIGTERM" in status.message) == (JobState.FAILED, True)


def test_a_missing_script_is_found_before_anything_is_submitted(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Path:
        raise LaunchError(f"there is no job script {name}")

    monkeypatch.setattr(executor, "job_script", nothing)
    with pytest.raises(LaunchError, match="no job script plan"):
        run_job(JobKind.PLAN, run, timeout_seconds=60)
    assert not any(run.logs.iterdir())


def test_a_package_in_the_working_folder_does_not_pose_as_ours(
    scripts: Path, run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alpa_hpc.py").write_text("raise SystemExit('this is not the package')\n")
    monkeypatch.chdir(tmp_path)
    write_script(scripts, JobKind.PLAN, "with reporting(paths, JobKind.PLAN):\n    pass\n")
    run_job(JobKind.PLAN, run, timeout_seconds=60)
