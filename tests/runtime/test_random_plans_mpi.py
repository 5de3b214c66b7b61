"""Random valid plans over real MPI ranks, unequal meshes among them = one device with as many microbatches: loss and every gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "mpi"
MPIRUN = Path(sys.executable).parent / "mpirun"
PLANS_A_JOB = 8
JOBS = {"2x1,2x1": 0, "2x2": 100, "1x1,1x2,1x1": 200}  # meshes of four ranks, each job's first seed

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]


def run_plans(meshes: str, first_seed: int) -> list[dict[str, Any]]:
    """What the job found of each plan; it ends at once where a rank finds a difference."""
    environment = {**os.environ, "XLA_FLAGS": "", "PJRT_NPROC": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[2])}
    ranks = (MPIRUN, "-n", "4", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable, HERE / "plans.py")
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    command = (*ranks, meshes, str(first_seed), str(PLANS_A_JOB))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("meshes", JOBS)
def test_ranks_train_random_plans_as_one_device_does(meshes: str) -> None:
    plans = run_plans(meshes, JOBS[meshes])
    assert len({plan["seed"] for plan in plans}) == PLANS_A_JOB
    assert len({plan["microbatches"] for plan in plans}) > 1
    assert all(len(plan["stages"]) == len(meshes.split(",")) and plan["grad_norm"] > 0.1 for plan in plans)


def test_there_are_enough_of_them() -> None:
    assert len(JOBS) * PLANS_A_JOB >= 20
