"""A job's own account survives the round trip and tells how the job ended."""

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError, PlanError, StoreError
from alpa_hpc.launch.paths import JobKind, new_run
from alpa_hpc.launch.status import JobState, JobStatus, read_status, reporting, write_status


def test_round_trip(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    running = JobStatus(JobKind.PROFILE, 3, JobState.RUNNING, None, "host", "node7", 17, 1.5, None, "", is_explained=True, traceback="")
    failed = replace(running, state=JobState.FAILED, exit_code=1, ended=2.5, message="m", is_explained=False, traceback="t\nt")
    for status in (running, failed):
        write_status(paths, status)
        assert read_status(paths, JobKind.PROFILE, 3) == status
    assert read_status(paths, JobKind.PROFILE, 4) is None


def test_a_foreign_status_is_refused(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    for content in ('{"kind": "plan"}', '{"kind": "plan", "state": "odd"}', "[]", "{"):
        paths.status(JobKind.PLAN).write_text(content)
        with pytest.raises(StoreError, match=r"plan\.json"):
            read_status(paths, JobKind.PLAN)


def test_a_job_reports_running_then_done(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    with reporting(paths, JobKind.TRAIN):
        during = read_status(paths, JobKind.TRAIN)
    after = read_status(paths, JobKind.TRAIN)
    assert during is not None
    assert after is not None
    assert (during.state, during.exit_code, during.pid) == (JobState.RUNNING, None, os.getpid())
    assert (after.state, after.exit_code) == (JobState.DONE, 0)
    assert after.ended is not None
    assert 0 <= after.ended - after.started <= 60
    assert after.started <= time.time()


def test_a_failure_is_reported_and_goes_on_its_way(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    for error, message, is_explained in (
        (PlanError("first line\nsecond"), "first line\nsecond", True),
        (ValueError("first line\nsecond"), "ValueError: first line", False),
        (KeyError("x"), "KeyError: 'x'", False),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", False),
    ):
        with pytest.raises(type(error)), reporting(paths, JobKind.PLAN):
            raise error
        status = read_status(paths, JobKind.PLAN)
        assert status is not None
        assert (status.state, status.exit_code, status.message, status.is_explained) == (JobState.FAILED, 1, message, is_explained)
        assert "test_status.py" in status.traceback


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({}, socket.gethostname()),
        ({"SLURMD_NODENAME": "node3"}, "node3"),
        ({"SLURMD_NODENAME": "node3", "SLURM_JOB_NODELIST": "node[3-4]"}, "node[3-4]"),
    ],
)
def test_a_job_says_on_which_nodes_it_runs_by_the_names_that_the_scheduler_has_for_them(
    variables: dict[str, str], node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = new_run(tmp_path, "demo")
    for name in ("SLURMD_NODENAME", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, variables.get(name, ""))
    with reporting(paths, JobKind.PROFILE, 1):
        status = read_status(paths, JobKind.PROFILE, 1)
    assert status is not None
    assert (status.node, status.host) == (node, socket.gethostname())


def test_sigterm_runs_the_finally_blocks_of_the_job(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    stopped: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LaunchError, match="SIGTERM"), reporting(paths, JobKind.PLAN):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            stopped.append("child")
    assert stopped == ["child"]
    assert signal.getsignal(signal.SIGTERM) is before
    status = read_status(paths, JobKind.PLAN)
    assert status is not None
    assert status.state is JobState.FAILED
