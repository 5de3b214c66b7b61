"""On a real Slurm: what it says of jobs that run, wait, fail, are cancelled or forgotten, and what a run looks like meanwhile."""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alpa_hpc.commands import cancel, status
from alpa_hpc.launch.evidence import JobPhase
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.queue import QueuePhase, ask_queue, find_by_name, never_starts
from alpa_hpc.launch.queue import cancel as cancel_jobs
from alpa_hpc.launch.submission import Submission, write_submission
from alpa_hpc.launch.views import RunPhase, is_cancelled, view_run
from tests.slurm.bed import Bed
from tests.slurm.conftest import StartBed

pytestmark = pytest.mark.slurm

PLAN, PROFILE, TRAIN = JobKind.PLAN, JobKind.PROFILE, JobKind.TRAIN
JOB = """
import sys, time
from pathlib import Path
from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.status import reporting
with reporting(open_run(Path(sys.argv[1])), JobKind.PLAN):
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def slurm_conf(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "bed" in request.fixturenames:
        use(request.getfixturevalue("bed"), monkeypatch)


def use(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])


def made(folder: Path) -> RunPaths:
    paths = new_run(folder, "demo")
    paths.config.write_text("mode: full\nlauncher:\n  kind: slurm\ntraining:\n  num_steps: 160\n")
    return paths


def record(paths: RunPaths, kind: JobKind, job_id: str, tasks: tuple[int, ...] = (0,), name: str = "") -> None:
    write_submission(paths, Submission(kind, tasks, kind is PROFILE, job_id, name or "wrap", "", time.time()))


def wait_until(is_so: Callable[[], bool], seconds: float = 50.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.2)


def phase(job_id: str) -> QueuePhase:
    return ask_queue([job_id])[job_id].phase


@contextmanager
def stopped_controller(bed: Bed) -> Generator[None]:
    """The controller, alive but deaf: as one under too much load, or on a node that hangs."""
    controller = bed.daemon("slurmctld")
    os.kill(controller, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(controller, signal.SIGCONT)


def test_jobs_and_tasks_in_every_phase(bed: Bed) -> None:
    runs = bed.submit("sleep 60", "--nodes=2")
    fails = bed.submit("exit 7")
    killed = bed.submit("kill -9 $$")
    unseen = bed.submit("true", "--output=/nonexistent/folder/job.out")
    held = bed.submit("true", "--hold")
    array = bed.submit("test $SLURM_ARRAY_TASK_ID = 1 && exit 3; sleep 60", "--array=0-2")
    throttled = bed.submit("sleep 60", "--array=0-2%1")
    ids = [runs, fails, killed, unseen, held, f"{array}_0", f"{array}_1", f"{throttled}_0", f"{throttled}_2", "999999", "999998_3"]
    try:
        for over in (fails, killed, unseen):
            bed.wait(over)
        wait_until(lambda: phase(f"{array}_1") is QueuePhase.FAILED and phase(f"{throttled}_0") is QueuePhase.RUNNING)
        states = ask_queue(ids)
    finally:
        cancel_jobs([one for one in ids if not one.startswith("9999")])
        bed.run("scancel", array, throttled)
    assert [states[one].phase.value for one in ids] == [
        *("running", "failed", "failed", "failed", "pending"),
        *("running", "failed", "running", "pending", "gone", "gone"),
    ]
    assert (states[runs].nodes.startswith("node["), states[fails].exit_code, states[killed].signal) == (True, 7, 9)
    assert "not visible from the node" in states[unseen].describe()
    assert states[held].reason == "JobHeldUser"
    assert (states[f"{array}_1"].exit_code, states[f"{throttled}_2"].reason) == (3, "JobArrayTaskLimit")
    wait_until(lambda: phase(runs) is QueuePhase.CANCELLED and phase(f"{array}_0") is QueuePhase.CANCELLED)


def test_one_task_is_cancelled_and_no_other(bed: Bed) -> None:
    array = bed.submit("sleep 60", "--array=0-2")
    try:
        wait_until(lambda: phase(f"{array}_2") is QueuePhase.RUNNING)
        cancel_jobs([f"{array}_2"])  # the last task's own number is that of the whole array
        wait_until(lambda: phase(f"{array}_2") is QueuePhase.CANCELLED)
        states = ask_queue([f"{array}_0", f"{array}_1"])
        assert {state.phase for state in states.values()} == {QueuePhase.RUNNING}
    finally:
        bed.run("scancel", array)


def test_a_dependency_that_cannot_be_met_never_starts(bed: Bed) -> None:
    failed = bed.submit("exit 1")
    after = bed.submit("true", f"--dependency=afterok:{failed}")
    try:
        wait_until(lambda: ask_queue([after])[after].reason == "DependencyNeverSatisfied")
        assert never_starts(ask_queue([after])[after].reason)
    finally:
        cancel_jobs([after])


def test_a_controller_that_does_not_answer_is_unknown_and_ends_nothing(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("alpa_hpc.launch.queue.ANSWER_SECONDS", 3.0)
    paths = made(tmp_path)
    job = bed.submit("sleep 60")
    record(paths, PLAN, job)
    try:
        with stopped_controller(bed):
            assert phase(job) is QueuePhase.UNKNOWN
            assert status.main([str(paths.root)]) == 2
        assert "unknown (plan: Slurm cannot be asked" in capsys.readouterr().out
        wait_until(lambda: view_run(paths).jobs[0].phase is JobPhase.RUNNING)
        assert status.main([str(paths.root)]) == 0
    finally:
        cancel_jobs([job])


@pytest.mark.slow
def test_a_controller_that_is_gone_is_unknown_and_its_forgotten_jobs_are_not(start_bed: StartBed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = start_bed(MIN_JOB_AGE=2)
    use(bed, monkeypatch)
    failed, array = bed.submit("exit 7"), bed.submit("exit 3", "--array=0-1")
    wait_until(lambda: not bed.squeue().strip(), seconds=90)
    states = ask_queue([failed, f"{array}_0"])
    assert (states[failed].phase, states[failed].exit_code) == (QueuePhase.FAILED, 7), "the log of ended jobs knows"
    assert states[f"{array}_0"].phase is QueuePhase.GONE, "it does not know tasks"
    os.kill(bed.daemon("slurmctld"), signal.SIGTERM)
    wait_until(lambda: phase(failed) is QueuePhase.UNKNOWN)
    assert "Unable to contact slurm controller" in ask_queue([failed])[failed].reason


def test_a_run_is_cancelled_whole_and_its_name_finds_what_has_no_number(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = made(tmp_path)
    record(paths, PLAN, bed.submit("sleep 60"))
    array = bed.submit("sleep 60", "--array=0-3%2")
    record(paths, PROFILE, array, (0, 1, 2, 3))
    name = f"train-demo-{paths.root.name[-6:]}"
    training = bed.submit("sleep 60", f"--job-name={name}")
    record(paths, TRAIN, "", name=name)
    other = bed.submit("sleep 60")
    try:
        wait_until(lambda: phase(f"{array}_1") is QueuePhase.RUNNING)
        assert find_by_name([name]) == {name: training}
        assert cancel.main([str(paths.root)]) == 0
        seen = view_run(paths)
        assert is_cancelled(paths)
        assert seen.phase is RunPhase.CANCELLED
        assert {job.phase for job in seen.jobs} == {JobPhase.CANCELLED}
        assert [job.slurm_id for job in seen.jobs][-1] == training
        assert phase(other) is QueuePhase.RUNNING, "another run's job"
        assert capsys.readouterr().out == f"cancelled {paths.root}\n"
    finally:
        cancel_jobs([other])


def test_a_job_of_ours_that_slurm_stops_is_explained_by_slurm(bed: Bed, tmp_path: Path) -> None:
    paths = made(tmp_path)
    program = tmp_path / "job.py"
    program.write_text(JOB)
    job = bed.submit(f"PYTHONPATH={Path(__file__).parents[2]} exec {sys.executable} {program} {paths.root}")
    record(paths, PLAN, job)
    wait_until(lambda: paths.status(PLAN).exists())
    seen = view_run(paths).jobs[0]
    assert (seen.phase, seen.slurm_id) == (JobPhase.RUNNING, job)
    assert seen.nodes.startswith("node")
    cancel_jobs([job])
    wait_until(lambda: view_run(paths).jobs[0].phase is JobPhase.CANCELLED)
    assert view_run(paths).jobs[0].reason == "was cancelled"
    assert view_run(paths).phase is RunPhase.CANCELLED
