"""The verbs as a person and a script use them: which run is meant, what is printed, and the exit status."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_hpc.__main__ import main as command_line
from alpa_hpc.commands import VERBS, find, list_runs, status, verb
from alpa_hpc.commands.progress import TAIL_BYTES, read_progress
from alpa_hpc.commands.text import duration
from alpa_hpc.errors import LaunchError, StoreError
from alpa_hpc.launch import queue
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.status import JobState
from alpa_hpc.launch.submission import Submission, write_submission
from tests.commands.run_folders import PLAN, PROFILE, TRAIN, FakeSlurm, made, report, write_log

REPOSITORY = Path(__file__).parents[2]


# ---- which verb


@pytest.mark.parametrize(
    ("word", "hint"), [("explian", "did you mean explain? Expected one of status, explain"), ("quickstart", "expected one of")]
)
def test_a_word_that_is_no_verb_is_told_with_those_that_are(
    word: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["alpa_hpc", word])
    with pytest.raises(SystemExit) as ended:
        command_line()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: found '{word}', {hint}")


# ---- which run


def test_a_run_is_meant_by_folder_id_or_the_start_of_it(runs: Path) -> None:
    old = made(runs, run_id="20260101-000000-aaaaaa")
    new = made(runs, "other", run_id="20260102-000000-bbbbbb")
    for name in (str(new.root), "runs/other/20260102-000000-bbbbbb", "20260102-000000-bbbbbb", "20260102", "other/2026", None):
        assert find.find_run(name, Path("runs")).root == new.root
    assert find.find_run("20260101", Path("runs")).root == old.root


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2026", "'2026' is the start of 2 runs in .*/runs: other/20260102.*, demo/20260101.*Say more"),
        ("9", "no run is called '9'.*no such id in .*/runs"),
        (".", r"is not a run folder: it has no run\.json"),
        ("runs/demo/nothing", "no run is called"),
    ],
)
def test_a_run_that_is_not_one_is_refused(runs: Path, name: str, message: str) -> None:
    made(runs, run_id="20260101-000000-aaaaaa")
    made(runs, "other", run_id="20260102-000000-bbbbbb")
    with pytest.raises(LaunchError, match=message):
        find.find_run(name, Path("runs"))


def test_no_runs_and_foreign_runs(runs: Path) -> None:
    with pytest.raises(LaunchError, match="there are no runs in .*/runs"):
        find.find_run(None, Path("runs"))
    made(runs).marker.write_text('{"format": "alpa_hpc run", "version": 99}')
    with pytest.raises(StoreError, match="version 1"):
        find.find_run(None, Path("runs"))


# ---- status


def test_status_of_a_run_that_trains(runs: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(TRAIN, (0,), False, "14", "train-demo-1", "", time.time()))
    report(paths, PLAN, JobState.DONE)
    report(paths, TRAIN, JobState.RUNNING)
    paths.metrics.write_text('{"step": 1, "loss": 5.5}\n{"step": 40, "loss": 2.4123, "seconds": 1}\n{"step": 41, "lo')
    slurm.states["14"] = QueueState(QueuePhase.RUNNING, nodes="node[1-2]")
    assert status.main([]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"run +{paths.root}\n", out)
    assert re.search(r"state +training\n", out)
    assert re.search(r"training +step 40/160  loss 2.412\n", out)
    assert re.search(r"\nplan +done +node7 +1 s", out)
    assert re.search(r"\ntrain +running +14 +node\[1-2\] +0 s ago\n", out)


def test_status_shows_the_first_failure_in_its_own_words(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs)
    text = "Traceback (most recent call last):\n  File\nValueError: rank two is unwell"
    report(paths, TRAIN, JobState.FAILED, message="ValueError: rank two is unwell", is_explained=False, traceback=text, ended=20.0)
    report(paths, PLAN, JobState.FAILED, message="training failed\nmore", ended=30.0)
    report(paths, PROFILE, JobState.FAILED, message="does not compile\nmore", ended=10.0)
    assert status.main([str(paths.root)]) == 1
    out = capsys.readouterr().out
    assert out.endswith(f"\ntrain failed first, in its own words:\n{text}\n")
    assert "state       failed (plan: training failed)" in out


def test_status_for_scripts(runs: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    slurm.states["12"] = QueueState(QueuePhase.FAILED, "NonZeroExitCode", 7, nodes="node3", ended=9.0)
    assert status.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["launcher"], told["step"]) == (str(paths.root), "failed", "slurm", 0)
    plan = told["jobs"][0]
    assert (plan["job"], plan["state"], plan["slurm_id"], plan["exit_code"]) == ("plan", "failed", "12", 7)
    assert (plan["nodes"], plan["submitted"], plan["ended"]) == ("node3", 5.0, 9.0)


def test_status_that_cannot_be_told_is_2(runs: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs, launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    slurm.states["12"] = QueueState(QueuePhase.UNKNOWN, "Unable to contact slurm controller")
    assert status.main([]) == 2
    assert "unknown (plan: Slurm cannot be asked: Unable to contact slurm controller)" in capsys.readouterr().out
    assert verb.run_verb("status", ["nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: no run is called 'nothing'")


def test_many_profiling_tasks_share_a_line_but_failures_do_not(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(runs)
    for task in range(30):
        report(paths, PROFILE, JobState.FAILED if task == 7 else JobState.DONE, task, node=f"node{task % 2}")
    report(paths, PLAN, JobState.RUNNING, pid=os.getpid())
    status.main([])
    out = capsys.readouterr().out
    assert re.search(r"\nprofile \(29\) +done +node0,node1 ", out)
    assert re.search(r"\nprofile-0007 +failed", out)
    assert len(out.splitlines()) == 9


# ---- list


def test_list_is_newest_first_and_one_bad_run_hides_no_other(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs.main([]) == 0
    assert "there are no runs in" in capsys.readouterr().out
    failed = made(runs, run_id="20260101-000000-aaaaaa")
    report(failed, PLAN, JobState.FAILED, message="stage 1 is empty")
    made(runs, "other", run_id="20260103-000000-cccccc").config.unlink()
    made(runs, run_id="20260102-000000-bbbbbb")
    assert list_runs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["20260103-000000-cccccc", "other", "unknown"],
        ["20260102-000000-bbbbbb", "demo", "planning"],
        ["20260101-000000-aaaaaa", "demo", "failed"],
    ]
    assert lines[3].endswith("plan: stage 1 is empty")


def test_list_shows_the_last_ones_unless_asked_for_all(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_runs, "NUM_SHOWN", 2)
    for number in range(3):
        made(runs, run_id=f"2026010{number}-000000-aaaaaa")
    list_runs.main([])
    assert capsys.readouterr().out.splitlines()[-1] == "and 1 older ones (--all)"
    list_runs.main(["--all"])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_list_asks_a_controller_that_is_down_only_once(runs: Path, slurm: FakeSlurm) -> None:
    for number in range(3):
        paths = made(runs, launcher="slurm")
        write_submission(paths, Submission(PLAN, (0,), False, str(number), "plan-demo-1", "", 5.0))
        slurm.states[str(number)] = QueueState(QueuePhase.UNKNOWN, "down")
    list_runs.main([])
    assert len(slurm.calls) == 1


# ---- text and figures


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99, "99 s"), (100, "1 min"), (3599, "59 min"), (19200, "5 h 20 min"), (187200, "2 d 4 h"), (-3, "0 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_progress_is_read_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert read_progress(metrics, 9).describe() == ""
    for text in ("", '{"step": 1', "\n", "[]\n", "text\n"):
        metrics.write_text(text)
        assert read_progress(metrics, 9).step == 0
    lines = [f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 2 * TAIL_BYTES // 20)]
    metrics.write_text("".join(lines))
    assert read_progress(metrics, 0).describe() == f"step {len(lines)}  loss 0.5"


# ---- the command line itself


def command(*arguments: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(
        [sys.executable, "-m", "alpa_hpc", *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_each_verb_is_in_the_help_and_has_its_module(tmp_path: Path) -> None:
    listed = command("--help", folder=tmp_path).stdout
    for name in VERBS:
        assert re.search(rf"python -m alpa_hpc {name}\b", listed), name
        assert (REPOSITORY / "alpa_hpc" / "commands" / f"{'list_runs' if name == 'list' else name}.py").is_file()


@pytest.mark.parametrize("arguments", [("status",), ("list",), ("list", "--sweep"), ("explain",), ("logs",), ("cancel",)])
def test_a_look_at_a_run_imports_no_jax_and_no_hydra(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    made(tmp_path / "runs")
    code = (
        f"import sys; sys.argv = ['alpa_hpc', *{arguments}]\n"
        "from alpa_hpc.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print('status', end.code, sorted({'jax', 'hydra', 'numpy', 'submitit', 'h5py'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"status [02] \[\]\n$", done.stdout), done.stdout + done.stderr


def test_a_verbs_errors_are_a_line_and_status_2(tmp_path: Path) -> None:
    done = command("status", "nothing", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: no run is called 'nothing'.*\n", done.stderr)
    assert "Traceback" in command("status", "nothing", folder=tmp_path, ALPA_HPC_TRACEBACK="1").stderr


def test_output_that_nobody_reads_on_is_no_error(tmp_path: Path) -> None:
    paths = made(tmp_path / "runs")
    report(paths, PLAN, JobState.DONE)
    write_log(paths, PLAN, "7_0_log.out", "a line\n" * 50000)
    shell = f"{sys.executable} -m alpa_hpc logs | head -1"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(shell, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("a line\n", "")


def test_slurm_is_found_missing_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    paths = made(tmp_path / "runs", launcher="slurm")
    write_submission(paths, Submission(PLAN, (0,), False, "12", "plan-demo-1", "", 5.0))
    assert queue.ask_queue(["12"])["12"].phase is QueuePhase.UNKNOWN
    assert status.main([str(paths.root)]) == 2
    assert "squeue cannot be started here: No such file or directory" in capsys.readouterr().out
