"""Random valid plans over real MPI ranks, unequal meshes among them = one device with as many microbatches: loss and every gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.quick import QUICK_FLAGS

HERE = Path(__file__).parent / "mpi"
MPIRUN = Path(sys.executable).parent / "mpirun"
JOBS = {"2x1,2x1": 7, "2x2": 5, "1x1,1x2,1x1": 10}  # meshes of four ranks, and how many plans: each rank compiles all of its mesh's layers

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]


def run_plans(meshes: str, first_seed: int, count: int) -> list[dict[str, Any]]:
    """What the job found of each plan; it ends at once where a rank finds a difference."""
    environment = {**os.environ, "XLA_FLAGS": QUICK_FLAGS, "PJRT_NPROC": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[2])}
    ranks = (MPIRUN, "-n", "4", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable, HERE / "plans.py")
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    command = (*ranks, meshes, str(first_seed), str(count))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("meshes", JOBS)
def test_ranks_train_random_plans_as_one_device_does(meshes: str) -> None:
    plans = run_plans(meshes, first_seed=100 * len(meshes), count=JOBS[meshes])
    assert len({plan["seed"] for plan in plans}) == JOBS[meshes]
    assert len({plan["microbatches"] for plan in plans}) > 1
    assert all(len(plan["stages"]) == len(meshes.split(",")) and plan["grad_norm"] > 0.1 for plan in plans)


def test_there_are_enough_of_them() -> None:
    assert sum(JOBS.values()) >= 20
