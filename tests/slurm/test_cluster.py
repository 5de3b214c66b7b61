"""The Slurm of `slurm/cluster.sh` is one: nodes that differ, arrays, mpirun over two nodes; and it leaves nothing behind."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.bed import Bed, cluster
from tests.slurm.conftest import StartBed

pytestmark = pytest.mark.slurm

MPIRUN = Path(sys.executable).parent / "mpirun"
RANK = """
import json, os
from mpi4py import MPI
world = MPI.COMM_WORLD
environ = os.environ
place = [environ["SLURMD_NODENAME"], int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), environ["CUDA_VISIBLE_DEVICES"]]
ranks = world.gather([world.rank, world.size, *place])
if world.rank == 0:
    print(json.dumps(ranks), flush=True)
"""


def processes_of(state: Path) -> list[str]:
    """Command lines of the processes of a bed: its daemons, its steps, and its jobs, all of which inherit its SLURM_CONF."""
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue  # ended meanwhile
        if f"{state}/".encode() in words or f"SLURM_CONF={state}/".encode() in environ:
            found.append(words.replace(b"\0", b" ").decode())
    return found


def until(true: Callable[[], bool], *, timeout_seconds: float = 20.0) -> bool:
    """Whether a condition, given as a function, comes true in time."""
    end = time.monotonic() + timeout_seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_four_nodes_with_cores_and_gpus_are_idle(start_bed: StartBed) -> None:
    nodes = start_bed().run("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %t %c %G").splitlines()
    assert nodes == [f"node{number} idle 4 gpu:2" for number in range(1, 5)]


def test_a_step_runs_on_nodes_with_names_of_their_own(bed: Bed) -> None:
    names = bed.run("srun", "--nodes=4", "--ntasks=4", "sh", "-c", "echo $SLURMD_NODENAME").split()
    assert sorted(names) == ["node1", "node2", "node3", "node4"]


def test_an_array_runs_each_task_and_reports_each_end(bed: Bed) -> None:
    job = bed.submit("echo task $SLURM_ARRAY_TASK_ID; exit $((SLURM_ARRAY_TASK_ID == 2 ? 3 : 0))", "--array=0-3%2")
    assert sorted(bed.wait(job)) == ["COMPLETED", "COMPLETED", "COMPLETED", "FAILED"]
    assert sorted(bed.log(job).splitlines()) == [f"task {number}" for number in range(4)]
    assert "ExitCode=3:0" in bed.scontrol("show", "job", f"{job}_2")


@pytest.mark.mpi
def test_mpirun_in_the_batch_shell_spreads_ranks_over_the_nodes(bed: Bed) -> None:
    script = shlex.join((str(MPIRUN), "-n", "8", "--bind-to", "none", sys.executable, "-c", RANK))
    job = bed.submit(script, "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=2")
    assert bed.wait(job) == ("COMPLETED",), bed.log(job)
    ranks = json.loads(bed.log(job))
    nodes = bed.run("scontrol", "show", "hostnames", bed.squeue("--jobs", job, "--format=%N").strip()).split()
    assert len(nodes) == 2
    assert ranks == [[rank, 8, nodes[rank // 4], rank % 4, "0,1"] for rank in range(8)]


def test_two_beds_are_up_at_once_and_know_only_their_own_jobs(start_bed: StartBed) -> None:
    first, second = start_bed(NODES=1), start_bed(NODES=2, MAX_ARRAY_SIZE=4, GPUS=0)
    job = first.submit("sleep 100")
    assert until(lambda: first.states(job) == ("RUNNING",))
    assert second.squeue() == ""
    assert "MaxArraySize            = 4\n" in second.run("scontrol", "show", "config")
    assert cluster("down", second.state).returncode == 0
    assert first.states(job) == ("RUNNING",)


def test_up_in_a_folder_that_is_up_changes_nothing(start_bed: StartBed) -> None:
    bed = start_bed(NODES=1)
    before = bed.daemon("slurmctld")
    again = cluster("up", bed.state)
    assert again.returncode == 0 and "is up already" in again.stdout and f"export SLURM_CONF={bed.state}/slurm.conf" in again.stdout
    assert bed.daemon("slurmctld") == before
    assert "slurmd.node1 runs as process" in cluster("status", bed.state).stdout


def test_down_ends_jobs_and_daemons_and_keeps_the_logs(start_bed: StartBed) -> None:
    bed = start_bed(NODES=2)
    stubborn = bed.submit("trap '' TERM; echo here; sleep 1000")
    assert until(lambda: "here" in bed.log(stubborn))
    assert len(processes_of(bed.state)) > 4
    assert cluster("down", bed.state).returncode == 0
    assert processes_of(bed.state) == []
    assert "here" in bed.log(stubborn)
    assert "no bed is up" in cluster("down", bed.state).stdout
    assert cluster("status", bed.state).returncode == 1
    assert cluster("down --purge", bed.state).returncode == 0 and not bed.state.exists()


def test_after_a_crash_down_still_ends_all_and_up_runs_no_job_again(start_bed: StartBed) -> None:
    bed = start_bed(NODES=2)
    job = bed.submit("echo here; sleep 1000", "--nodes=2")
    assert until(lambda: "here" in bed.log(job))
    for daemon in ("slurmctld", "slurmd.node1"):
        os.kill(bed.daemon(daemon), signal.SIGKILL)
    refused = cluster("up", bed.state)
    assert refused.returncode == 1 and "its controller does not answer" in refused.stderr
    assert cluster("down", bed.state).returncode == 0
    assert processes_of(bed.state) == []
    assert cluster("up", bed.state, NODES=2).returncode == 0
    assert bed.states(job) == ("CANCELLED",)
    assert bed.submit("true") != job, "a bed that comes up again must not reuse job numbers"


def test_a_bed_that_cannot_start_says_why_and_leaves_nothing(slurm_is_here: None, tmp_path: Path) -> None:
    started = cluster("up", tmp_path / "bed", MAX_ARRAY_SIZE="many")
    assert started.returncode == 1
    assert "MaxArraySize value (many) is not a valid number" in started.stderr
    assert processes_of(tmp_path / "bed") == []


@pytest.mark.parametrize("folder", ["with space", "with,comma", "x" * 90])
def test_a_folder_slurm_could_not_use_is_refused(tmp_path: Path, folder: str) -> None:
    refused = cluster("up", tmp_path / folder)
    assert refused.returncode == 1 and refused.stderr.startswith("error: STATE_DIR may")


def test_purge_refuses_a_folder_that_is_no_bed(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert cluster("down --purge", tmp_path).returncode == 1
    assert (tmp_path / "precious").exists()
