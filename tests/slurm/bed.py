"""A folder -> a running Slurm of virtual nodes, made by `slurm/cluster.sh`, and what tests ask of it."""

import os
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLUSTER_SH = Path(__file__).parents[2] / "slurm" / "cluster.sh"
DAEMONS = ("munged", "slurmctld", "slurmd")
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True, slots=True)
class Bed:
    """A Slurm that is up: its folder, and the environment in which its commands (and ours) find it."""

    state: Path
    environment: Mapping[str, str]

    def run(self, *command: str, timeout_seconds: float = 60.0, expect_success: bool = True) -> str:
        """Run a command on the bed's login node, which is this machine, and return what it printed; an error unless it ends with 0."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout_seconds, check=False)
        assert done.returncode == 0 or not expect_success, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def squeue(self, *arguments: str) -> str:
        """What squeue prints, without its header; jobs that have ended are among them as long as the controller knows them."""
        return self.run("squeue", "--noheader", "--all", "--states=all", *arguments, timeout_seconds=20)

    def scontrol(self, *arguments: str) -> str:
        """What scontrol prints, one line a record."""
        return self.run("scontrol", "--oneliner", *arguments, timeout_seconds=20)

    def submit(self, body: str, *flags: str) -> str:
        """Submit a batch script with this body and return its job id; its output is `log(job_id)`."""
        flags = ("--output", str(self.state / "log" / "job-%A.out"), "--open-mode=append", *flags)
        return self.run("sbatch", "--parsable", *flags, "--wrap", body, timeout_seconds=20).strip()

    def log(self, job: str) -> str:
        """What a job (all tasks of an array) has printed until now."""
        path = self.state / "log" / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def states(self, job: str) -> tuple[str, ...]:
        """The Slurm states of a job, or of all tasks of an array."""
        return tuple(self.squeue("--array", "--jobs", job, "--format=%T").split())

    def wait(self, job: str, *, timeout_seconds: float = 60.0) -> tuple[str, ...]:
        """The states in which a job's tasks have ended; an error, with its output, if they have not by then."""
        end = time.monotonic() + timeout_seconds
        while UNFINISHED & set(states := self.states(job)):
            assert time.monotonic() < end, f"job {job} is still {states}\n{self.log(job)}\n{self.scontrol('show', 'job', job)}"
            time.sleep(0.2)
        return states

    def leave_empty(self, *, timeout_seconds: float = 30.0) -> None:
        """Cancel what is in the queue and wait until it is gone: the run of a test that failed would take the cores of those after it."""
        unfinished = f"--states={','.join(sorted(UNFINISHED))}"
        end = time.monotonic() + timeout_seconds
        while jobs := self.run("squeue", "--noheader", "--all", unfinished, "--format=%A", timeout_seconds=20).split():
            assert time.monotonic() < end, f"jobs {jobs} do not end"
            self.run("scancel", *set(jobs), expect_success=False)  # one may end in between
            time.sleep(0.2)

    def daemon(self, name: str) -> int:
        """The process id of a daemon: munged, slurmctld or slurmd.NODE."""
        return int((self.state / "run" / f"{name}.pid").read_text())


def cluster(verb: str, state: Path, **knobs: str | int) -> "subprocess.CompletedProcess[str]":
    """Run `slurm/cluster.sh VERB STATE`, with its knobs, to its end."""
    environ = {**outside_slurm(os.environ), **{name: str(value) for name, value in knobs.items()}}
    # the limit is that of an installation by apt
    return subprocess.run([CLUSTER_SH, *verb.split(), state], env=environ, capture_output=True, text=True, timeout=240, check=False)


@contextmanager
def running(state: Path, **knobs: str | int) -> Generator[Bed]:
    """A bed in the folder `state`, up inside the `with` and down after it."""
    started = cluster("up", state, **knobs)
    assert started.returncode == 0, f"the bed does not start: {started.stdout}{started.stderr}"
    try:
        yield Bed(state, bed_environment(state))
    finally:
        stopped = cluster("down", state)
        assert stopped.returncode == 0, f"the bed does not stop: {stopped.stdout}{stopped.stderr}"


def bed_environment(state: Path) -> dict[str, str]:
    """This environment, pointed at the bed; OpenMPI is told that root is welcome, where that is who we are."""
    root = dict.fromkeys(ROOT_VARIABLES, "1") if os.geteuid() == 0 else {}
    return {**outside_slurm(os.environ), **root, "SLURM_CONF": str(state / "slurm.conf")}


def outside_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the facts of a Slurm in which the tests themselves may run."""
    return {name: value for name, value in environ.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}


def missing_daemons() -> tuple[str, ...]:
    """The programs a bed needs that are not on this machine."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return tuple(name for name in DAEMONS if shutil.which(name, path=path) is None)
