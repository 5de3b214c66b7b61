"""The log that is meant, of one rank or of all, and as it grows."""

import os
import threading
import time
from pathlib import Path

import pytest

from alpa_hpc.commands import logs
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.status import JobState
from alpa_hpc.launch.submission import Submission, write_submission
from tests.commands.run_folders import PLAN, PROFILE, TRAIN, FakeSlurm, made, report, write_log, write_text


def test_logs_of_the_job_that_is_meant(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs)
    report(paths, PLAN, JobState.DONE)
    write_log(paths, PLAN, "7_0_log.out", "planned\n")
    report(paths, PROFILE, JobState.FAILED, 3)
    write_log(paths, PROFILE, "8_0_log.out", "does not compile\n", 3)
    for arguments, text in (([], "does not compile\n"), (["2", "plan"], "planned\n"), (["2", "profile-0003"], "does not compile\n")):
        assert logs.main(arguments) == 0
        assert capsys.readouterr().out == text
    for name, message in (
        ("trian", "has no job 'trian'; its jobs are plan, profile-0003, train"),
        ("train", "has written no log .* it is waiting"),
    ):
        with pytest.raises(LaunchError, match=message):
            logs.main(["2", name])


def test_logs_of_array_tasks_are_told_apart_by_slurms_numbers(runs: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PROFILE, (4, 5), True, "13", "profile-demo-1", "", 6.0))
    for task in (4, 5):
        report(paths, PROFILE, JobState.DONE, task)
        write_text(paths.batch_log_folder(PROFILE) / f"13_{task - 4}_0_log.out", f"task {task}\n")
    logs.main(["2", "profile-0005"])
    assert capsys.readouterr().out == "task 5\n"
    assert slurm.calls == [], "nothing is open"


def test_logs_of_one_rank(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs)
    report(paths, TRAIN, JobState.DONE)
    text = "mpirun says\n[1,0]<stdout>: step 1\n[1,12]<stderr>: Traceback\n[1,1]<stdout>: step 1b\n[1,12]<stderr>:   File\n"
    write_log(paths, TRAIN, "9_0_log.out", text)
    logs.main(["2", "train", "--rank", "12"])
    assert capsys.readouterr().out == "Traceback\n  File\n"
    logs.main(["2", "train", "--rank", "1"])
    assert capsys.readouterr().out == "step 1b\n"


def test_logs_follow_a_job_to_its_end(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0.1)
    paths = made(runs)
    report(paths, PLAN, JobState.RUNNING, pid=os.getpid())

    def work() -> None:
        time.sleep(0.2)
        log = write_log(paths, PLAN, "7_0_log.out", "one\ntw")
        time.sleep(0.2)
        with log.open("a") as stream:
            stream.write("o\nthree")
        report(paths, PLAN, JobState.DONE)

    writer = threading.Thread(target=work)
    writer.start()
    assert logs.main(["--follow"]) == 0
    writer.join()
    assert capsys.readouterr().out == "one\ntwo\nthree"
