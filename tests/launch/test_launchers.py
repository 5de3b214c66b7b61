"""In one process or as jobs of this machine: planning before training, and no training after a planning that failed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import launchers
from alpa_hpc.launch.launchers import InProcessLauncher, Launcher, LocalLauncher, RunSize
from alpa_hpc.launch.outcome import Died, Ended, JobOutcome
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.profiling import ProfileTask
from alpa_hpc.launch.views import mark_cancelled
from alpa_hpc.training.metrics import open_metrics
from tests.launching import LONE, profile_request

SIZE = RunSize(Submesh(2, 4), num_steps=10, max_parallel=3)
TASKS = [ProfileTask(number, LONE, (profile_request(f"{number}"),)) for number in (4, 7)]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that LocalLauncher runs, each with what was said to it."""
    done: list[str] = []

    def run_job(kind: JobKind, paths: RunPaths, **_: Any) -> None:
        done.append(kind.value)
        if paths.plan.exists():
            raise LaunchError("planning went wrong")

    def run_tasks(
        kind: JobKind, _paths: RunPaths, tasks: list[int], *, max_parallel: int, timeout_seconds: float, **_: Any
    ) -> Mapping[int, JobOutcome]:
        done.append(f"{kind.value} {tasks} {max_parallel} {timeout_seconds:g} s")
        return dict.fromkeys(tasks, Died("was killed"))

    monkeypatch.setattr(launchers, "run_job", run_job)
    monkeypatch.setattr(launchers, "run_tasks", run_tasks)
    return done


def in_process(done: list[str]) -> InProcessLauncher:
    return InProcessLauncher(
        lambda paths: done.append(f"plan {paths.name}"),
        lambda _, task: done.append(f"profile {task}"),
        lambda paths: done.append(f"train {paths.name}"),
    )


def test_one_process_does_one_after_another(run: RunPaths) -> None:
    done: list[str] = []
    launcher: Launcher = in_process(done)
    launcher.check()
    assert launcher.plan(run) and done == ["plan demo"]
    assert launcher.plan_and_train(run) and done == ["plan demo", "plan demo", "train demo"]
    done.clear()
    launcher.planned(run)
    assert launcher.profile(run, TASKS) == {4: Ended(), 7: Ended()}
    assert (done, launcher.num_shares) == (["profile 4", "profile 7"], 1)


def test_this_machine_runs_jobs_one_after_another(run: RunPaths, jobs: list[str]) -> None:
    launcher: Launcher = LocalLauncher(SIZE)
    assert launcher.plan(run) and jobs == ["plan"]
    launcher.planned(run)
    assert launcher.plan_and_train(run) and jobs == ["plan", "plan", "train"]


def test_after_a_planning_that_failed_nothing_is_trained(run: RunPaths, jobs: list[str]) -> None:
    run.plan.touch()
    with pytest.raises(LaunchError, match="planning went wrong"):
        LocalLauncher(SIZE).plan_and_train(run)
    assert jobs == ["plan"]


def test_a_run_that_is_cancelled_while_it_is_planned_is_not_trained(run: RunPaths, jobs: list[str]) -> None:
    mark_cancelled(run)
    with pytest.raises(LaunchError, match="was cancelled: no more jobs are started"):
        LocalLauncher(SIZE).plan_and_train(run)
    assert jobs == ["plan"]


def test_profiling_tasks_of_this_machine_share_it(run: RunPaths, jobs: list[str]) -> None:
    launcher = LocalLauncher(SIZE)
    assert launcher.profile(run, TASKS) == dict.fromkeys((4, 7), Died("was killed"))
    assert (jobs, launcher.num_shares) == (["profile [4, 7] 3 86400 s"], 3)


def test_a_stage_that_hangs_is_given_up_after_its_time(run: RunPaths, jobs: list[str]) -> None:
    launcher = LocalLauncher(replace(SIZE, stage_seconds=90.0))
    three = ProfileTask(8, LONE, tuple(profile_request(name) for name in "abc"))
    for tasks in (TASKS, [*TASKS, three], [ProfileTask(0, LONE, ())]):  # the last one is a calibration
        launcher.profile(run, tasks)
    assert [job.split("] ")[1] for job in jobs] == ["3 90 s", "3 270 s", "3 86400 s"]


def test_steps_of_the_training_job_are_shown_while_it_runs(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(kind: JobKind, paths: RunPaths, *, watch: Any = None, **_: Any) -> None:
        if kind is JobKind.TRAIN:
            with open_metrics(paths.metrics) as metrics:
                metrics.write(1, {"loss": 5.25})
            watch()
            assert "5.25" in capsys.readouterr().err

    monkeypatch.setattr(launchers, "run_job", run_job)
    LocalLauncher(SIZE).plan_and_train(run)


def test_a_machine_that_is_too_small_is_refused_before_a_run_begins() -> None:
    LocalLauncher(RunSize(Submesh(1, 2), 1, 1)).check()
    with pytest.raises(LaunchError, match=r"needs 100000 ranks, this machine"):
        LocalLauncher(RunSize(Submesh(1000, 100), 1, 1)).check()


@pytest.mark.parametrize("launcher", [in_process([]), LocalLauncher(SIZE)], ids=["inprocess", "local"])
def test_who_submits_nothing_has_no_scripts(launcher: Launcher, run: RunPaths) -> None:
    with pytest.raises(LaunchError, match="launcher=slurm"):
        launcher.scripts(run)
