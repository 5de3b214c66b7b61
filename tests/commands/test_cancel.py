"""A cancelled run is marked first, ended whole, and touches no other; what could not be ended is said."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from alpa_hpc.commands import cancel, status, verb
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import views
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.status import JobState
from alpa_hpc.launch.submission import Submission, write_submission
from alpa_hpc.launch.views import is_cancelled
from tests.commands.run_folders import PLAN, PROFILE, TRAIN, FakeSlurm, made, report


def test_cancel_marks_the_run_and_then_ends_what_waits_and_what_runs(
    runs: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    write_submission(paths, Submission(PROFILE, (0, 1), True, "13", "profile-demo-1", "", 6.0))
    report(paths, PROFILE, JobState.DONE, 0)
    slurm.states |= {"12": QueueState(QueuePhase.RUNNING), "13_1": QueueState(QueuePhase.PENDING)}
    pending = slurm.cancel_pending

    def marked_first(ids: Sequence[str]) -> None:
        assert is_cancelled(paths)
        pending(ids)

    monkeypatch.setattr(cancel, "cancel_pending", marked_first)
    assert cancel.main([]) == 0
    assert [call for call in slurm.calls if call[0] != "ask"] == [("pending", "12", "13_1"), ("cancel", "12", "13_1")]
    assert capsys.readouterr().out == f"cancelled {paths.root}\n"
    assert status.main([]) == 1
    assert cancel.main([]) == 0
    assert capsys.readouterr().out.endswith(f"nothing of {paths.root} is left to cancel\n")


def test_cancel_finds_what_was_submitted_at_the_last_moment(runs: Path, slurm: FakeSlurm) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    slurm.states["12"] = QueueState(QueuePhase.RUNNING)

    def submit_late() -> None:
        """The planning job's last act: after the submissions were read, before it is seen to be over."""
        if slurm.states["12"].is_over and "14" not in slurm.states:
            write_submission(paths, Submission(TRAIN, (0,), False, "14", "train-demo-1", "", 7.0))
            slurm.states["14"] = QueueState(QueuePhase.PENDING)

    slurm.when_asked = submit_late
    assert cancel.main([]) == 0
    assert ("cancel", "14") in slurm.calls


def test_cancel_says_what_is_left(
    runs: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    slurm.states["12"] = QueueState(QueuePhase.RUNNING)
    monkeypatch.setattr(cancel, "cancel", slurm.cancel_pending)
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.1)
    assert cancel.main([]) == 1
    assert "plan is running: it was asked to end\nnot all is cancelled of" in capsys.readouterr().out
    assert len([call for call in slurm.calls if call[0] == "pending"]) == 2, "a job is asked once"


def test_cancel_that_slurm_does_not_hear_is_2(runs: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    slurm.states["12"] = QueueState(QueuePhase.UNKNOWN, "down")

    def refuse(ids: Sequence[str]) -> None:
        raise LaunchError(f"scancel did not do its work for {ids}")

    monkeypatch.setattr(cancel, "cancel", refuse)
    assert verb.run_verb("cancel", []) == 2
    assert is_cancelled(paths), "the planning job, if it lives, submits nothing more"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_cancel_of_a_local_run_stops_its_process(runs: Path, sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "POLL_SECONDS", 0.01)
    paths = made(runs)
    report(paths, PLAN, JobState.RUNNING, pid=sleeper.pid)
    assert cancel.main([]) == 0
    assert sleeper.wait(timeout=5) == -signal.SIGTERM
    assert views.view_run(paths).phase is views.RunPhase.CANCELLED


def test_cancel_leaves_a_process_alone_that_only_has_the_number(runs: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    paths = made(runs)
    report(paths, PLAN, JobState.RUNNING, pid=sleeper.pid, started=time.time() - 86400)
    cancel.main([])
    assert sleeper.poll() is None
