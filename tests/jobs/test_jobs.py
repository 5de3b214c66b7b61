"""The real job scripts, chained as in a run: planning submits profiling and training, training starts ranks with mpirun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import alpa_hpc
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.status import JobState, read_status

ENTRIES = ("experiment.py", "profile_job.py", "train_job.py")
EXPERIMENT = """
import os
from mpi4py import MPI
from alpa_hpc.launch.executor import run_job, run_tasks
from alpa_hpc.launch.failures import explained_by_ranks
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.mpirun import Place, Ranks, run_ranks
from alpa_hpc.launch.outcome import Ended
from alpa_hpc.launch.paths import JobKind

def started(paths, kind, num_ranks, script, *arguments):
    with explained_by_ranks(paths.failures(kind, *map(int, arguments))):
        ranks = Ranks(num_ranks, num_ranks, Place.THIS_MACHINE)
        run_ranks(ranks, (str(job_script(script)), str(paths.root), *arguments), os.environ)

def plan_run(paths):
    tasks = () if paths.name == "unwell" else (0, 1, 2)
    outcomes = run_tasks(JobKind.PROFILE, paths, tasks, max_parallel=2, timeout_seconds=60)
    assert outcomes == dict.fromkeys(tasks, Ended()), outcomes
    paths.plan.write_text(" ".join(paths.profile_answer(task).read_text() for task in outcomes) + " " + os.environ["JAX_PLATFORMS"])
    run_job(JobKind.TRAIN, paths, timeout_seconds=60)

def profile_run(paths, task):
    import cProfile  # finds Python's own `profile`, not the job script of that name
    if task == 1:
        started(paths, JobKind.PROFILE, 2, "profile_rank", str(task))
    else:
        paths.profile_answer(task).write_text(f"cost{task}")

def profile_rank(paths, task):
    total = MPI.COMM_WORLD.allreduce(1)
    if MPI.COMM_WORLD.rank == 0:
        paths.profile_answer(task).write_text(f"cost{task}x{total}")

def train_run(paths):
    started(paths, JobKind.TRAIN, 2, "train_rank")

def train_rank(paths):
    world = MPI.COMM_WORLD
    if paths.name == "unwell" and world.rank == 1:
        raise ValueError("rank one is unwell")
    total = world.allreduce(world.rank)
    if world.rank == 0:
        paths.result.write_text(f"{paths.plan.read_text()} {world.size} {total}")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the real package and scripts, in which only what the scripts call is small."""
    package = Path(str(alpa_hpc.__file__)).parent
    root = tmp_path / "checkout"
    (root / "alpa_hpc").mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name not in (*ENTRIES, "__pycache__"):
            (root / "alpa_hpc" / entry.name).symlink_to(entry)
    for name in ENTRIES:
        (root / "alpa_hpc" / name).write_text(EXPERIMENT)
    (root / "jobs").symlink_to(job_script("plan").parent)
    return root


def run_plan(checkout: Path, paths: RunPaths) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-P", str(checkout / "jobs" / "plan.py"), str(paths.root)]
    return subprocess.run(command, env=environment, cwd=checkout.parent, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.mpi
def test_a_run_goes_from_plan_to_trained_ranks(checkout: Path) -> None:
    paths = new_run(checkout.parent / "runs", "demo")
    done = run_plan(checkout, paths)
    assert done.returncode == 0, done.stderr
    assert sorted(paths.result.read_text().split()) == ["1", "2", "cost0", "cost1x2", "cost2", "cpu"]
    jobs = [(JobKind.PLAN, 0), (JobKind.PROFILE, 0), (JobKind.PROFILE, 1), (JobKind.PROFILE, 2), (JobKind.TRAIN, 0)]
    for kind, task in jobs:
        status = read_status(paths, kind, task)
        assert status is not None, kind
        assert status.state is JobState.DONE, kind


@pytest.mark.mpi
def test_the_traceback_of_one_rank_reaches_who_started_the_run(checkout: Path) -> None:
    paths = new_run(checkout.parent / "runs", "unwell")
    failed = run_plan(checkout, paths)
    assert failed.returncode == 1
    for kind in (JobKind.TRAIN, JobKind.PLAN):
        status = read_status(paths, kind)
        assert status is not None
        assert status.state is JobState.FAILED
        assert re.search(
            r"rank 1 on \S+ failed: ValueError: rank one is unwell\nTraceback (.|\n)*ValueError: rank one is unwell", status.message
        ), status.message
        assert "mpirun" not in status.message.splitlines()[-1], "what a peer says of the end is not the cause"
    assert not paths.result.exists()
