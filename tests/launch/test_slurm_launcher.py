"""Who submits what, and with which dependency, under each chain; and that what is shown is what is submitted."""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import slurm, slurm_launcher
from alpa_hpc.launch.batch import Allocation, BatchJob
from alpa_hpc.launch.launchers import Launcher, RunSize
from alpa_hpc.launch.options import Chain, SlurmOptions
from alpa_hpc.launch.outcome import Ended, JobOutcome, NotStarted
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.profiling import ProfileTask
from alpa_hpc.launch.queue import QueuePhase, QueueState
from alpa_hpc.launch.slurm_launcher import SlurmLauncher
from alpa_hpc.launch.submission import Submission
from alpa_hpc.launch.views import mark_cancelled
from alpa_hpc.training.metrics import open_metrics
from tests.launching import LONE, fake_command, launcher_options, profile_request

SIZE = RunSize(Submesh(2, 4), num_steps=10, max_parallel=3)
PAIR, WHOLE = Submesh(1, 2), Submesh(2, 4)
CHAINS = list(Chain)


def launcher_of(chain: Chain = Chain.INSIDE, *, wait: bool = False, has_gpus: bool = True, **slurm_flags: Any) -> SlurmLauncher:
    return SlurmLauncher(launcher_options(chain, wait=wait, **slurm_flags), SIZE, has_gpus, 60.0)


def tasks_for(*submeshes: Submesh) -> list[ProfileTask]:
    return [ProfileTask(number, submesh, (profile_request(f"{number}", submesh),)) for number, submesh in enumerate(submeshes)]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


@dataclass
class Site:
    """Stands for Slurm and its commands, and notes in `said` what was done, in order."""

    said: list[str] = field(default_factory=list[str])
    jobs: list[BatchJob] = field(default_factory=list[BatchJob])
    refuses: frozenset[Submesh] = frozenset()
    fails: JobKind | None = None
    refusal: str = ""

    def submit(self, job: BatchJob, _paths: RunPaths, _options: SlurmOptions, _environ: Mapping[str, str]) -> tuple[Submission, ...]:
        if Submesh(job.allocation.num_nodes, job.allocation.tasks_per_node) in self.refuses and job.is_array:
            raise LaunchError("sbatch refused it: too many nodes")
        self.jobs.append(job)
        number = f"{10 + len(self.jobs)}"
        self.said.append(f"submit {job.kind.value}{' ' + job.dependency if job.dependency else ''}")
        return (Submission(job.kind, tuple(job.tasks), job.is_array, number, "name", "", float(number)),)

    def refusal_ahead(self, job: BatchJob, _paths: RunPaths, _options: SlurmOptions, _environ: Mapping[str, str]) -> str:
        assert job.kind is JobKind.TRAIN
        return self.refusal

    def follow_job(self, _paths: RunPaths, kind: JobKind, _watch: Any) -> None:
        self.said.append(f"follow {kind.value}")
        if self.fails is kind:
            raise LaunchError(f"{kind.value} job failed")

    def wait_for_tasks(self, _paths: RunPaths, submissions: Sequence[Submission], *, max_pending_seconds: float) -> dict[int, JobOutcome]:
        self.said.append(f"wait for {[one.job_id for one in submissions]} {max_pending_seconds}")
        return {task: Ended() for one in submissions for task in one.tasks}

    def run_tasks(self, _kind: JobKind, _paths: RunPaths, tasks: Sequence[int], *, max_parallel: int, **_: Any) -> dict[int, JobOutcome]:
        self.said.append(f"run {list(tasks)} {max_parallel} at a time")
        return {task: Ended() for task in tasks}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site()
    for name in ("submit", "refusal_ahead", "follow_job", "wait_for_tasks", "run_tasks"):
        monkeypatch.setattr(slurm_launcher, name, getattr(site, name))
    return site


# ---- chains

SUBMITTED_BY_THE_COMMAND = {
    Chain.INSIDE: ["submit plan"],
    Chain.DEPENDENCY: ["submit plan", "submit train afterok:11"],
    Chain.LOGIN: ["submit plan", "follow plan", "submit train"],
}


@pytest.mark.parametrize(("chain", "is_told"), [(Chain.INSIDE, True), (Chain.LOGIN, True), (Chain.DEPENDENCY, False)])
def test_a_training_job_that_slurm_would_refuse_is_told_before_planning_is_over(
    chain: Chain, is_told: bool, run: RunPaths, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.refusal = "allocation failure: too many nodes"
    launcher_of(chain).plan_and_train(run)
    said = "warning: as things are, Slurm would refuse the training job that follows planning: allocation failure: too many nodes\n"
    assert (said in capsys.readouterr().err) == is_told
    assert site.said[0] == "submit plan", "for nodes may be there by then"


@pytest.mark.parametrize("chain", CHAINS)
def test_the_command_submits_and_returns(chain: Chain, run: RunPaths, site: Site) -> None:
    launcher: Launcher = launcher_of(chain)
    assert not launcher.plan_and_train(run), "it has come into the queue, not to its end"
    assert site.said == SUBMITTED_BY_THE_COMMAND[chain]


@pytest.mark.parametrize("chain", CHAINS)
def test_who_wishes_to_wait_follows_both_jobs(chain: Chain, run: RunPaths, site: Site) -> None:
    assert launcher_of(chain, wait=True).plan_and_train(run)
    followed = ["follow train"] if chain is Chain.LOGIN else ["follow plan", "follow train"]
    assert site.said == [*SUBMITTED_BY_THE_COMMAND[chain], *followed]


@pytest.mark.parametrize("chain", CHAINS)
def test_when_the_plan_is_there_only_the_chain_inside_submits_training(chain: Chain, run: RunPaths, site: Site) -> None:
    launcher_of(chain).planned(run)
    assert site.said == (["submit train"] if chain is Chain.INSIDE else [])


@pytest.mark.parametrize("wait", [False, True])
def test_a_run_that_is_only_planned_is_one_job(run: RunPaths, site: Site, *, wait: bool) -> None:
    assert launcher_of(wait=wait).plan(run) is wait
    assert site.said == ["submit plan", *(["follow plan"] if wait else [])]


def test_after_a_planning_that_failed_the_command_submits_no_training(run: RunPaths, site: Site) -> None:
    site.fails = JobKind.PLAN
    with pytest.raises(LaunchError, match="plan job failed"):
        launcher_of(Chain.LOGIN).plan_and_train(run)
    assert site.said == ["submit plan", "follow plan"]


def test_a_person_is_told_what_is_in_the_queue_and_how_to_go_on(run: RunPaths, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    launcher_of(Chain.DEPENDENCY).plan_and_train(run)
    assert site.jobs
    assert f"submitted plan job 11, train job 12; `python -m alpa_hpc status {run.root}`" in capsys.readouterr().err


# ---- profiling


def test_profiling_is_an_array_for_each_size_of_mesh_and_all_are_in_the_queue_before_one_is_waited_for(run: RunPaths, site: Site) -> None:
    outcomes = launcher_of().profile(run, tasks_for(LONE, LONE, PAIR, WHOLE, WHOLE))
    assert site.said == ["submit profile"] * 3 + ["wait for ['11', '12', '13'] 60.0"]
    assert [(job.allocation, job.tasks, job.max_parallel) for job in site.jobs] == [
        (Allocation(1, 1, 1), (0, 1), 3),
        (Allocation(1, 2, 2), (2,), 3),
        (Allocation(2, 4, 4), (3, 4), 3),
    ]
    assert all(job.is_array for job in site.jobs)
    assert outcomes == dict.fromkeys(range(5), Ended())


def test_an_array_that_sbatch_refuses_leaves_its_tasks_out_and_the_others_go_on(run: RunPaths, site: Site) -> None:
    site.refuses = frozenset({WHOLE})
    outcomes = launcher_of().profile(run, tasks_for(LONE, WHOLE, WHOLE))
    refused = NotStarted("sbatch refused it: too many nodes")
    assert outcomes == {0: Ended(), 1: refused, 2: refused}


@pytest.mark.parametrize("chain", [Chain.DEPENDENCY, Chain.LOGIN])
def test_where_the_planning_job_may_submit_nothing_it_measures_itself_what_one_device_can(chain: Chain, run: RunPaths, site: Site) -> None:
    outcomes = launcher_of(chain).profile(run, tasks_for(LONE, PAIR, LONE, WHOLE))
    alone = NotStarted(f"with launcher.chain={chain.value} only the planning job measures, on one device")
    assert outcomes == {0: Ended(), 1: alone, 2: Ended(), 3: alone}
    assert site.said == ["run [0, 2] 3 at a time"]


def test_a_task_a_request_where_the_queue_runs_them_and_a_share_each_where_they_share_a_node() -> None:
    assert [launcher_of(chain).num_shares for chain in CHAINS] == [sys.maxsize, 3, 3]


# ---- a run that somebody cancels


@pytest.mark.parametrize("chain", CHAINS)
def test_of_a_cancelled_run_nothing_more_is_submitted(chain: Chain, run: RunPaths, site: Site) -> None:
    mark_cancelled(run)
    launcher = launcher_of(chain)
    for act in (launcher.plan, launcher.plan_and_train):
        with pytest.raises(LaunchError, match=f"^the run {re.escape(str(run.root))} was cancelled: no more jobs are started$"):
            act(run)
    if chain is Chain.INSIDE:
        for go_on in (launcher.planned, lambda paths: launcher.profile(paths, tasks_for(LONE))):
            with pytest.raises(LaunchError, match="was cancelled"):
                go_on(run)
    assert site.said == []


def test_a_run_that_is_cancelled_while_the_command_waits_is_not_trained(run: RunPaths, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_launcher, "follow_job", lambda paths, *_: mark_cancelled(paths))
    with pytest.raises(LaunchError, match="was cancelled"):
        launcher_of(Chain.LOGIN).plan_and_train(run)
    assert site.said == ["submit plan"]


def test_who_stops_following_is_told_that_the_jobs_go_on(
    run: RunPaths, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_launcher, "follow_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launcher_of(wait=True).plan_and_train(run)
    assert site.jobs
    assert f"the jobs go on, and `python -m alpa_hpc cancel {run.root}` would end them" in capsys.readouterr().err


# ---- sizes


@pytest.mark.parametrize("has_gpus", [False, True])
def test_planning_takes_one_core_and_training_the_whole_cluster(run: RunPaths, site: Site, *, has_gpus: bool) -> None:
    launcher_of(Chain.DEPENDENCY, has_gpus=has_gpus).plan_and_train(run)
    assert [job.allocation for job in site.jobs] == [Allocation(1, 1, 0), Allocation(2, 4, 4 if has_gpus else 0)]


# ---- what is shown is what is submitted


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but sbatch itself is real; jobs get the numbers 100, 101, ..."""
    numbers = map(str, itertools.count(100))
    monkeypatch.setattr(slurm, "check_sbatch", lambda _: None)
    monkeypatch.setattr(slurm, "max_array_size", lambda _: 1000)
    monkeypatch.setattr(slurm, "_sbatch", lambda *_: next(numbers))
    monkeypatch.setattr(slurm_launcher, "wait_for_tasks", lambda *_, **__: {})
    monkeypatch.setattr(slurm_launcher, "follow_job", lambda *_: None)
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")


def parts(shown: str) -> dict[str, str]:
    """The scripts by the first word of their title."""
    pieces = re.split(r"^# ---- (\w+).*\n", shown, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.usefixtures("handed_over")
@pytest.mark.parametrize("chain", CHAINS)
def test_what_a_dry_run_shows_is_what_sbatch_is_handed_byte_for_byte(chain: Chain, run: RunPaths) -> None:
    launcher = launcher_of(chain, time_minutes=9, additional={"exclude": "node7"}, setup=("module load cuda",), environment={"A": "b c"})
    shown = launcher.scripts(run)
    launcher.plan_and_train(run)
    if chain is Chain.INSIDE:
        launcher.profile(run, tasks_for(*[LONE] * SIZE.max_parallel))
        launcher.planned(run)
    scripts = {path.parent.name: path.read_text() for path in run.logs.rglob("*.sh")}
    scripts["train"] = scripts["train"].replace("afterok:100", "afterok:PLANNING_JOB")
    assert [title.replace("planning", "plan").replace("profiling", "profile").replace("training", "train") for title in parts(shown)] == [
        kind for kind in ("plan", "profile", "train") if kind in scripts
    ]
    assert [script.rstrip("\n") for script in parts(shown).values()] == [scripts[kind].rstrip("\n") for kind in sorted(scripts)]
    assert "--account=physics" in shown
    assert ("afterok:PLANNING_JOB" in shown) == (chain is Chain.DEPENDENCY)


# ---- before a run folder is made


def test_without_sbatch_or_mpirun_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="no sbatch on PATH"):
        launcher_of().check()
    monkeypatch.setenv("PATH", fake_command(tmp_path / "bin", "sbatch", "")["PATH"].partition(os.pathsep)[0])
    launcher_of().check()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match="no mpirun"):
        launcher_of().check()


def test_who_follows_sees_the_queue_and_the_steps(
    run: RunPaths, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def follow_job(paths: RunPaths, kind: JobKind, watch: Any) -> None:
        if kind is JobKind.TRAIN:
            with open_metrics(paths.metrics) as metrics:
                metrics.write(1, {"loss": 5.25})
        for _ in range(2):
            watch({"11": QueueState(QueuePhase.PENDING, "Resources")})

    monkeypatch.setattr(slurm_launcher, "follow_job", follow_job)
    launcher_of(wait=True).plan_and_train(run)
    shown = capsys.readouterr().err
    assert site.jobs and "5.25" in shown
    assert shown.count("job 11: waits in the queue (Resources)") == 2, "once for each job that is followed"


def test_arrays_are_cancelled_when_the_planning_job_is_stopped(run: RunPaths, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise LaunchError("this job was asked to stop")

    cancelled: list[str] = []
    monkeypatch.setattr(slurm_launcher, "wait_for_tasks", stopped)
    monkeypatch.setattr(slurm_launcher, "cancel", cancelled.extend)
    with pytest.raises(LaunchError, match="asked to stop"):
        launcher_of().profile(run, [ProfileTask(0, Submesh(1, 1), ())])
    assert len(cancelled) == len(site.jobs) == 1
